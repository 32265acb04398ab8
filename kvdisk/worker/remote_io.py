# SPDX-License-Identifier: Apache-2.0
"""Parts at the remote store: a slot is an object, and each ends within the store's own deadline."""

from __future__ import annotations

from collections.abc import Iterator

from kvdisk.blocks import BY_KEY_OVER, Tier
from kvdisk.geometry import Geometry, Namespace
from kvdisk.messages import Reason
from kvdisk.remote.base import ObjectOp, Objects, RemoteObject, Result, object_name
from kvdisk.worker.routes import Leg, Part
from kvdisk.worker.slot_headers import SlotHeaders

_REASONS = {
    Result.ABSENT: Reason.ABSENT,
    Result.BAD: Reason.HEADER,
    Result.LATE: Reason.DEADLINE,
    Result.REFUSED: Reason.CANCELLED,
    Result.FAILED: Reason.IO_ERROR,
}


class RemoteIo:
    """Moves parts between memory and the remote store. ``headers``: has the fingerprint. The
    mover's thread calls everything."""

    def __init__(self, objects: Objects, geometry: Geometry, rank: int, headers: SlotHeaders) -> None:
        self._objects = objects
        self._part, self._part_count = geometry.part_of(rank), geometry.part_count
        self._headers = headers
        self._parts: dict[int, Part] = {}
        self._has_told = False
        """The pause that is under way was reported."""

    @property
    def busy(self) -> bool:
        """Whether a part is under way."""
        return bool(self._parts)

    def send(self, part: Part) -> None:
        """Start a part. Until ``ended`` yields it, the store has its slots."""
        batch = [
            RemoteObject(self.name_of(part, position), part.memory.view(part.size_class, slot))
            for position, slot in zip(part.positions, part.slots, strict=True)
        ]
        op = ObjectOp.GET
        if part.leg is Leg.WRITE:
            moves = part.work.job.moves
            over = {moves[position].slots[Tier.REMOTE] == BY_KEY_OVER for position in part.positions}
            assert len(over) == 1, "a job that writes some objects over, and others not"
            op = ObjectOp.REPLACE if over.pop() else ObjectOp.PUT
        self._has_told &= op is not ObjectOp.GET  # if that begins a pause, it is another one
        self._parts[self._objects.submit(op, batch)] = part

    def name_of(self, part: Part, position: int) -> str:
        """Return the name of the object of a move."""
        job = part.work.job
        namespace = Namespace(self._headers.fingerprint, job.epoch)
        return object_name(namespace, job.moves[position].key, self._part, self._part_count)

    def new_pause_s(self) -> float:
        """Return for how long reads are left alone, once of each such pause; 0: nothing new."""
        pause_s = self._objects.pause_s
        told, self._has_told = self._has_told, pause_s > 0
        return 0.0 if told else pause_s

    def ended(self, wait_s: float) -> Iterator[tuple[Part, dict[int, Reason]]]:
        """Yield the parts that have ended, with the moves that failed; wait up to ``wait_s`` for
        the first."""
        for outcome in self._objects.poll(wait_s) if self._parts else ():
            part = self._parts.pop(outcome.ticket)
            results = zip(part.positions, outcome.results, strict=True)
            yield part, {position: _REASONS[result] for position, result in results if result is not Result.OK}

    def close(self) -> None:
        """Give up what is under way."""
        self._parts.clear()
        self._objects.close()
