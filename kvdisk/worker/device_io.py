# SPDX-License-Identifier: Apache-2.0
"""Batches at the device. Neighbouring slots travel as one transfer; what could not be read together
is read again alone.

A batch that hangs is given up, and stays known until the device has ended it: until then it may
touch memory and drive.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence

from kvdisk.device.base import Device, Op, Outcome, Transfer
from kvdisk.device.paths import NO_ROOM
from kvdisk.errors import QuietLog
from kvdisk.geometry import contiguous_runs, slot_offset
from kvdisk.messages import Reason
from kvdisk.stats import Stats
from kvdisk.worker.routes import Batch, Leg, OpenFile


class DeviceIo:
    """Moves batches between memory and segment files. ``stats``: where failures are counted.

    The mover's thread calls everything.
    """

    def __init__(self, device: Device, stats: Stats, log: QuietLog) -> None:
        self._device = device
        self._stats = stats
        self._log = log
        self._under_way: dict[int, Batch] = {}
        """Under way, late or not, by ticket."""
        self._read_again: set[Batch] = set()
        """Those of them whose slots are read a second time, each alone."""

    def uses(self, segment: int) -> bool:
        """Whether a batch under way, late or not, names the segment."""
        return any(
            batch.route.file_slot(batch.work.job.moves[position]).segment == segment
            for batch in self._under_way.values()
            for position in batch.positions
        )

    @property
    def busy(self) -> bool:
        """Whether a batch is under way."""
        return bool(self._under_way)

    def send(self, batch: Batch, files: Mapping[int, OpenFile]) -> dict[int, Reason]:
        """Start a batch at the device. Returns the moves that fail at once, for the caller to drop.

        ``files``: the open ones, by segment. With at least one move left, ``reap`` will yield the
        batch; until then the device owns its slots.
        """
        unopened = self._submit(batch, batch.positions, files, longest=len(batch.positions))
        if unopened:
            self._log.warn("segment", f"{len(unopened)} blocks are in a segment that is not open")
        return dict.fromkeys(unopened, Reason.IO_ERROR)

    def _submit(self, batch: Batch, positions: list[int], files: Mapping[int, OpenFile], longest: int) -> list[int]:
        """Submit moves of a batch: a run of up to ``longest`` neighbouring slots of a segment is
        one transfer. Return the positions of moves whose segment is not open."""
        moves, slot_of = batch.work.job.moves, dict(zip(batch.positions, batch.slots, strict=True))
        slots = [slot_of[position] for position in positions]
        places = [batch.route.file_slot(moves[position]) for position in positions]
        transfers: list[Transfer] = []
        unopened: list[int] = []
        batch.transfers = []
        start, total = 0, len(positions)
        while start < total:
            segment, first = places[start]
            end = start + 1
            while end < min(total, start + longest) and places[end] == (segment, first + end - start):
                end += 1
            file = files.get(segment)
            if file is None:
                unopened += positions[start:end]
            else:
                assert file.slot_bytes == batch.slot_bytes, "slots of another size"
                assert first + end - start <= file.slot_count, "a slot behind the segment's last"
                buffers = tuple(
                    batch.memory.view(batch.size_class, slots[start + at], count)
                    for at, count in contiguous_runs(slots[start:end], end - start)
                )
                transfers.append(Transfer(file.fd, slot_offset(file.slot_bytes, first), buffers))
                batch.transfers.append(positions[start:end])
            start = end
        if transfers:
            op = Op.READ if batch.leg is Leg.READ else Op.WRITE
            self._under_way[self._device.submit(op, transfers)] = batch
        return unopened

    def poll(self, wait_s: float) -> list[Outcome]:
        """Return the batches that have ended; wait up to ``wait_s`` for the first."""
        return self._device.poll(wait_s) if self._under_way else []

    def reap(
        self, outcomes: Sequence[Outcome], files: Mapping[int, OpenFile]
    ) -> Iterator[tuple[Batch, dict[int, Reason]]]:
        """Yield the batches that have ended, with moves that failed just now.

        What could not be read is read again before, each slot alone: one bad place on a drive costs
        one block.
        """
        for outcome in outcomes:
            batch = self._under_way.pop(outcome.ticket)
            failed: dict[int, Reason] = {}
            for at, number in {} if batch.late else outcome.errors.items():
                failed |= dict.fromkeys(batch.transfers[at], self._reason_of(batch, at, number))
            if failed and batch.leg is Leg.READ and batch not in self._read_again:
                self._read_again.add(batch)
                unopened = self._submit(batch, list(failed), files, longest=1)
                assert not unopened, "a segment was closed while a batch named it"
                continue
            self._read_again.discard(batch)
            batch.transfers = []
            yield batch, failed

    def _reason_of(self, batch: Batch, at: int, number: int) -> Reason:
        """Count and log a failed transfer."""
        what = batch.leg.name.lower()
        name = errno.errorcode.get(number, str(number))
        self._stats.add(f"io_errors.{what}")
        self._log.warn(f"{what} {name}", f"a {what} of {len(batch.transfers[at])} blocks failed: {name}")
        return Reason.NO_SPACE if number in NO_ROOM else Reason.IO_ERROR
