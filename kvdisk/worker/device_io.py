# SPDX-License-Identifier: Apache-2.0
"""Batches at the device. Neighbouring slots travel as one transfer; what could not be read together
is read again alone.

A batch that hangs is given up as *late*, and stays known until the device has ended it: until then
it may touch memory and drive.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvdisk.device.base import Device, Op, Outcome, Transfer
from kvdisk.device.paths import NO_ROOM
from kvdisk.errors import QuietLog
from kvdisk.geometry import contiguous_runs, slot_offset
from kvdisk.messages import Reason
from kvdisk.stats import Stats
from kvdisk.worker.backend import Progress, fail_all
from kvdisk.worker.routes import Batch, Leg, OpenFile

if TYPE_CHECKING:
    from kvdisk.worker.direct import Direct

MOST_LATE, MOST_LATE_WRITES = 16, 4
"""So many late reads of a drive stop every batch there: it does not answer; so many late writes
stop its writes only. Late batches count nowhere else."""


class DeviceIo:
    """``Backend`` of READ and WRITE to and from segment files.

    ``direct``: the direct way to the GPU, where there is one. ``io_deadline_s``: how long a batch
    may be at the device. ``stats``: where failures are counted. ``open``: the segment files that
    can be used, by segment. The mover's thread calls everything.
    """

    def __init__(
        self, device: Device, direct: Direct | None, *, io_deadline_s: float, stats: Stats, log: QuietLog
    ) -> None:
        self.open: dict[int, OpenFile] = {}
        self._device = device
        self._direct = direct
        self._io_deadline_s = io_deadline_s
        self._stats = stats
        self._log = log
        self._under_way: dict[int, Batch] = {}
        """Under way, late or not, by ticket."""
        self._read_again: set[Batch] = set()
        """Those of them whose slots are read a second time, each alone."""

    # -- files ---------------------------------------------------------------------------------

    def attach(self, segment: int, file: OpenFile) -> None:
        """Use a segment's file from now on."""
        self._device.attach_file(file.fd)
        self.open[segment] = file

    def detach(self, segment: int) -> None:
        """Use a segment's file no more, where it is open."""
        opened = self.open.pop(segment, None)
        if opened is not None:
            self._device.detach_file(opened.fd)

    def uses(self, segment: int) -> bool:
        """Whether a batch under way, late or not, names the segment."""
        return any(
            batch.route.file_slot(batch.work.job.moves[position]).segment == segment
            for batch in self._under_way.values()
            for position in batch.positions
        )

    # -- batches -------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        return bool(self._under_way)

    @property
    def stuck(self) -> set[tuple[int, bool]]:
        """The drives that are given no more reads (False) or writes (True)."""
        found: set[tuple[int, bool]] = set()
        late = [batch for batch in self._under_way.values() if batch.late]
        if not late:
            return found  # the usual case
        for (drive, writes), count in Counter((batch.drive, batch.leg is Leg.WRITE) for batch in late).items():
            if count >= (MOST_LATE_WRITES if writes else MOST_LATE):
                found |= {(drive, writes), (drive, True)}
        return found

    def start(self, batch: Batch) -> Progress:
        if (batch.drive, batch.leg is Leg.WRITE) in self.stuck:
            return fail_all(batch, Reason.DEADLINE)
        unopened = self._submit(batch, batch.positions, longest=len(batch.positions))
        if unopened:
            self._log.warn("segment", f"{len(unopened)} blocks are in a segment that is not open")
        return Progress(batch, dict.fromkeys(unopened, Reason.IO_ERROR), ended=len(unopened) == len(batch.positions))

    def poll(self, wait_s: float) -> Iterator[Progress]:
        """See ``Backend``.

        What could not be read is read again before it fails, each slot alone: one bad place on a
        drive costs one block.
        """
        for outcome in self._device.poll(wait_s) if self._under_way else ():
            yield self._end(outcome)

    def give_up_late(self, now_s: float) -> list[Progress]:
        """Fail the moves of batches that are too long at the device. Their memory stays taken."""
        overdue = [
            batch
            for batch in self._under_way.values()
            if not batch.late and batch.began_s < now_s - self._io_deadline_s
        ]
        for batch in overdue:
            count = len(batch.positions)
            self._log.warn("late", f"a drive has not finished {count} blocks in {self._io_deadline_s:g} s")
            self._stats.add("late_moves", count)
            batch.late = True
        return [fail_all(batch, Reason.DEADLINE)._replace(ended=False) for batch in overdue]

    def _submit(self, batch: Batch, positions: list[int], longest: int) -> list[int]:
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
            file = self.open.get(segment)
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

    def _end(self, outcome: Outcome) -> Progress:
        batch = self._under_way.pop(outcome.ticket)
        failed: dict[int, Reason] = {}
        for at, number in {} if batch.late else outcome.errors.items():
            failed |= dict.fromkeys(batch.transfers[at], self._reason_of(batch, at, number))
        if failed and batch.leg is Leg.READ and batch not in self._read_again:
            self._read_again.add(batch)
            unopened = self._submit(batch, list(failed), longest=1)
            assert not unopened, "a segment was closed while a batch named it"
            return Progress(batch, ended=False)
        self._read_again.discard(batch)
        batch.transfers = []
        if failed and batch.route.direct:
            assert self._direct is not None
            return Progress(batch, *self._direct.note_failed(batch.route, failed, self._log))
        return Progress(batch, failed)

    def _reason_of(self, batch: Batch, at: int, number: int) -> Reason:
        """Count and log a failed transfer."""
        what = batch.leg.name.lower()
        name = errno.errorcode.get(number, str(number))
        self._stats.add(f"io_errors.{what}")
        self._log.warn(f"{what} {name}", f"a {what} of {len(batch.transfers[at])} blocks failed: {name}")
        return Reason.NO_SPACE if number in NO_ROOM else Reason.IO_ERROR
