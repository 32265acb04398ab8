# SPDX-License-Identifier: Apache-2.0
"""Moves batches to and from the remote store: a slot is an object, and each batch ends within the
store's own deadline."""

from __future__ import annotations

from kvdisk.blocks import BY_KEY_OVER, Tier
from kvdisk.errors import QuietLog
from kvdisk.messages import Reason
from kvdisk.remote.base import ObjectOp, Objects, ObjectsOutcome, Result
from kvdisk.stats import Stats
from kvdisk.worker.backend import Progress
from kvdisk.worker.routes import Batch, Leg
from kvdisk.worker.slot_headers import SlotHeaders

_REASONS = {
    Result.ABSENT: Reason.ABSENT,
    Result.BAD: Reason.HEADER,
    Result.LATE: Reason.DEADLINE,
    Result.REFUSED: Reason.CANCELLED,
    Result.FAILED: Reason.REMOTE_ERROR,
}
_REASONS_OF_WRITES = _REASONS | {Result.ABSENT: Reason.REMOTE_ERROR, Result.BAD: Reason.CHECKSUM}
_UNANSWERED = frozenset({Reason.DEADLINE, Reason.CANCELLED, Reason.REMOTE_ERROR})
"""Reasons with which the remote store has said nothing about an object."""


class RemoteIo:
    """``Backend`` of READ and WRITE to and from the remote store. ``headers``: names the
    objects."""

    def __init__(self, objects: Objects, headers: SlotHeaders, stats: Stats, log: QuietLog) -> None:
        self._objects = objects
        self._headers = headers
        self._stats = stats
        self._log = log
        self._under_way: dict[int, Batch] = {}
        self._has_told = False
        """Whether the pause that is under way was reported."""

    @property
    def busy(self) -> bool:
        return bool(self._under_way)

    def start(self, batch: Batch) -> Progress:
        op = ObjectOp.GET
        if batch.leg is Leg.WRITE:
            moves = batch.work.job.moves
            over = {moves[position].slots[Tier.REMOTE] == BY_KEY_OVER for position in batch.positions}
            assert len(over) == 1, "a job that writes some objects over, and others not"
            op = ObjectOp.REPLACE if over.pop() else ObjectOp.PUT
        self._has_told &= op is not ObjectOp.GET  # if that begins a pause, it is another one
        self._under_way[self._objects.submit(op, self._headers.objects(batch))] = batch
        return Progress(batch, ended=False)

    def poll(self, wait_s: float) -> list[Progress]:
        outcomes = self._objects.poll(wait_s) if self._under_way else ()
        return [self._end(self._under_way.pop(outcome.ticket), outcome) for outcome in outcomes]

    def _end(self, batch: Batch, outcome: ObjectsOutcome) -> Progress:
        writes = batch.leg is Leg.WRITE
        self._stats.add("remote_written_bytes" if writes else "remote_read_bytes", outcome.stored_bytes)
        reasons = _REASONS_OF_WRITES if writes else _REASONS
        results_of = zip(batch.positions, outcome.results, strict=True)
        failed = {position: reasons[result] for position, result in results_of if result is not Result.OK}
        for position in [at for at, reason in failed.items() if reason is Reason.HEADER]:
            self._headers.warn_of_object(self._log, batch, position, "length or seal")
        for position in [at for at, reason in failed.items() if reason is Reason.CHECKSUM]:
            name = self._headers.object_name(batch, position)
            self._log.warn("sent", f"a block is not sent, as its bytes in memory have changed: {name}")
        return Progress(batch, failed, unanswered=not _UNANSWERED.isdisjoint(failed.values()))

    def take_pause_s(self) -> float:
        """Return the seconds for which reads are left alone, once for each such pause; 0 where
        there is nothing new."""
        pause_s = self._objects.pause_s
        told, self._has_told = self._has_told, pause_s > 0
        return 0.0 if told else pause_s

    def close(self) -> None:
        """Give up what is under way, and close the store."""
        self._under_way.clear()
        self._objects.close()
