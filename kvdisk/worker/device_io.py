# SPDX-License-Identifier: Apache-2.0
"""Parts at the device. Neighbouring slots travel as one transfer; what could not be read together
is read again alone.

A batch that hangs is given up, and stays known until the device has ended it: until then it may
touch memory and drive.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvdisk.device.base import Device, Op, Outcome, Transfer
from kvdisk.errors import QuietLog
from kvdisk.geometry import contiguous_runs, slot_offset
from kvdisk.messages import Reason
from kvdisk.stats import Stats
from kvdisk.worker.routes import Leg, OpenFile, Part

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


class DeviceIo:
    """Moves parts between memory and segment files. ``stats``: where failures are counted.

    The mover's thread calls everything.
    """

    def __init__(self, device: Device, stats: Stats, log: QuietLog) -> None:
        self._device = device
        self._stats = stats
        self._log = log
        self._parts: dict[int, Part] = {}
        """Under way, late or not, by ticket."""
        self._read_again: set[int] = set()
        """Those of them whose slots are read a second time, each alone."""

    def uses(self, segment: int) -> bool:
        """Whether a batch under way, late or not, names the segment."""
        return any(
            part.route.far_slot(part.work.job.moves[position]).segment == segment
            for part in self._parts.values()
            for position in part.positions
        )

    @property
    def busy(self) -> bool:
        """Whether a batch is under way."""
        return bool(self._parts)

    def send(self, part: Part, files: Mapping[int, OpenFile]) -> dict[int, Reason]:
        """Start a part's batch. Returns the moves that fail at once, for the caller to drop.

        ``files``: the open ones, by segment. With at least one move left, ``ended`` will yield the
        part; until then the device owns its slots.
        """
        transfers, part.batch, unopened = transfers_of(part, files)
        if unopened:
            self._log.warn("segment", f"{len(unopened)} blocks are in a segment that is not open")
        if transfers:
            op = Op.READ if part.leg is Leg.READ else Op.WRITE
            self._parts[self._device.submit(op, transfers)] = part
        return dict.fromkeys(unopened, Reason.IO_ERROR)

    def poll(self, wait_s: float) -> list[Outcome]:
        """Return the batches that have ended; wait up to ``wait_s`` for the first."""
        return self._device.poll(wait_s) if self._parts else []

    def ended(
        self, outcomes: Sequence[Outcome], files: Mapping[int, OpenFile]
    ) -> Iterator[tuple[Part, dict[int, Reason]]]:
        """Yield the parts that have ended, with moves that failed just now.

        What could not be read is read again before, each slot alone: one bad place on a drive costs
        one block.
        """
        for outcome in outcomes:
            part = self._parts.pop(outcome.ticket)
            failed: dict[int, Reason] = {}
            for at, number in {} if part.late else outcome.errors.items():
                failed |= dict.fromkeys(part.batch[at], self._reason_of(part, at, number))
            if failed and part.leg is Leg.READ and outcome.ticket not in self._read_again:
                self._read_alone(part, failed, files)
                continue
            self._read_again.discard(outcome.ticket)
            part.batch = []
            yield part, failed

    def _read_alone(self, part: Part, positions: Iterable[int], files: Mapping[int, OpenFile]) -> None:
        slots = dict(zip(part.positions, part.slots, strict=True))
        part.batch = [[position] for position in positions]
        transfers = []
        for (position,) in part.batch:
            segment, index = part.route.far_slot(part.work.job.moves[position])
            buffer = part.memory.run_view(part.size_class, slots[position], 1)
            transfers.append(Transfer(files[segment].fd, slot_offset(part.slot_bytes, index), (buffer,)))
        ticket = self._device.submit(Op.READ, transfers)
        self._parts[ticket] = part
        self._read_again.add(ticket)

    def _reason_of(self, part: Part, at: int, number: int) -> Reason:
        """Count and log a failed transfer."""
        what = part.leg.name.lower()
        name = errno.errorcode.get(number, str(number))
        self._stats.add(f"io_errors.{what}")
        self._log.warn(f"{what} {name}", f"a {what} of {len(part.batch[at])} blocks failed: {name}")
        return Reason.NO_SPACE if number in NO_SPACE else Reason.IO_ERROR


def transfers_of(part: Part, files: Mapping[int, OpenFile]) -> tuple[list[Transfer], list[list[int]], list[int]]:
    """Merge neighbouring slots of a part into one transfer for each run within a segment.

    Returns the transfers, for each of them the positions of its moves, and the positions of moves
    whose segment is not open.
    """
    moves, positions, slots = part.work.job.moves, part.positions, part.slots
    places = [part.route.far_slot(moves[position]) for position in positions]
    transfers: list[Transfer] = []
    members: list[list[int]] = []
    unopened: list[int] = []
    start, total = 0, len(positions)
    while start < total:
        segment, first = places[start]
        end = start + 1
        while end < total and places[end] == (segment, first + end - start):
            end += 1
        file = files.get(segment)
        if file is None:
            unopened += positions[start:end]
        else:
            assert file.slot_bytes == part.slot_bytes, "slots of another size"
            assert first + end - start <= file.slot_count, "a slot behind the segment's last"
            buffers = tuple(
                part.memory.run_view(part.size_class, slots[start + at], count)
                for at, count in contiguous_runs(slots[start:end], end - start)
            )
            transfers.append(Transfer(file.fd, slot_offset(file.slot_bytes, first), buffers))
            members.append(positions[start:end])
        start = end
    return transfers, members, unopened
