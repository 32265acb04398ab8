# SPDX-License-Identifier: Apache-2.0
"""Moves batches to and from the remote store: a slot is an object, and each batch ends within the
store's own deadline."""

from __future__ import annotations

from collections.abc import Iterator

from kvdisk.blocks import BY_KEY_OVER, Tier
from kvdisk.geometry import Geometry, Namespace
from kvdisk.messages import Reason
from kvdisk.remote.base import ObjectOp, Objects, RemoteObject, Result, object_name
from kvdisk.worker.routes import Batch, Leg
from kvdisk.worker.slot_headers import SlotHeaders

_REASONS = {
    Result.ABSENT: Reason.ABSENT,
    Result.BAD: Reason.HEADER,
    Result.LATE: Reason.DEADLINE,
    Result.REFUSED: Reason.CANCELLED,
    Result.FAILED: Reason.REMOTE_ERROR,
}
_REASONS_OF_WRITES = _REASONS | dict.fromkeys((Result.ABSENT, Result.BAD), Reason.REMOTE_ERROR)


class RemoteIo:
    """Moves batches between memory and the remote store. ``headers``: has the fingerprint. The
    mover's thread makes all calls."""

    def __init__(self, objects: Objects, geometry: Geometry, rank: int, headers: SlotHeaders) -> None:
        self._objects = objects
        self._part, self._part_count = geometry.shard_of(rank), geometry.shard_count
        self._headers = headers
        self._batches: dict[int, Batch] = {}
        self._has_told = False
        """Whether the pause that is under way was reported."""

    @property
    def busy(self) -> bool:
        """Whether a batch is under way."""
        return bool(self._batches)

    def send(self, batch: Batch) -> None:
        """Start a batch. The store owns its slots until ``reap`` yields it."""
        objects = [
            RemoteObject(self.name_of(batch, position), batch.memory.view(batch.size_class, slot))
            for position, slot in zip(batch.positions, batch.slots, strict=True)
        ]
        op = ObjectOp.GET
        if batch.leg is Leg.WRITE:
            moves = batch.work.job.moves
            over = {moves[position].slots[Tier.REMOTE] == BY_KEY_OVER for position in batch.positions}
            assert len(over) == 1, "a job that writes some objects over, and others not"
            op = ObjectOp.REPLACE if over.pop() else ObjectOp.PUT
        self._has_told &= op is not ObjectOp.GET  # if that begins a pause, it is another one
        self._batches[self._objects.submit(op, objects)] = batch

    def name_of(self, batch: Batch, position: int) -> str:
        """Return the name of the object that a move reads or writes."""
        job = batch.work.job
        namespace = Namespace(self._headers.fingerprint, job.epoch)
        return object_name(namespace, job.moves[position].key, self._part, self._part_count)

    def take_pause_s(self) -> float:
        """Return the seconds for which reads are left alone, once for each such pause; 0 where
        there is nothing new."""
        pause_s = self._objects.pause_s
        told, self._has_told = self._has_told, pause_s > 0
        return 0.0 if told else pause_s

    def reap(self, wait_s: float) -> Iterator[tuple[Batch, dict[int, Reason]]]:
        """Yield the batches that have ended, with the reason for each move that failed, by its
        position; wait up to ``wait_s`` for the first."""
        for outcome in self._objects.poll(wait_s) if self._batches else ():
            batch = self._batches.pop(outcome.ticket)
            results = zip(batch.positions, outcome.results, strict=True)
            reasons = _REASONS_OF_WRITES if batch.leg is Leg.WRITE else _REASONS
            yield batch, {position: reasons[result] for position, result in results if result is not Result.OK}

    def close(self) -> None:
        """Give up what is under way, and close the store."""
        self._batches.clear()
        self._objects.close()
