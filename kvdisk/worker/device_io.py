# SPDX-License-Identifier: Apache-2.0
"""Parts at the device: a second try where one fails, and those that do not end in time.

Neighbouring slots travel as one transfer. When such a transfer fails, each of its slots is tried
once more alone, so that one bad sector costs one block. A batch that hangs is given up, and stays
known until the device has ended it: until then it may touch memory and drive.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvdisk.device.base import Device, Op, Outcome, Transfer
from kvdisk.errors import QuietLog
from kvdisk.geometry import contiguous_runs, slot_offset
from kvdisk.messages import Reason
from kvdisk.stats import Stats
from kvdisk.worker.routes import OpenFile, Part

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(slots=True)
class _Flight:
    """A part's batch at the device. ``members``: positions of the moves in each transfer.

    ``sent_s``: when the first try began, on the mover's clock.
    """

    part: Part
    op: Op
    transfers: list[Transfer]
    members: list[list[int]]
    sent_s: float
    failed: dict[int, Reason] = field(default_factory=dict)


class DeviceIo:
    """Moves parts between memory and segment files. The mover's thread calls everything.

    ``reads``: read batches under way that are not late; ``late``: by drive and direction, batches
    that were given up, and that the device has not ended. ``stats`` is the caller's; counted are
    bytes, seconds and failed transfers. ``clock`` as the mover's.
    """

    def __init__(self, device: Device, stats: Stats, log: QuietLog, clock: Callable[[], float]) -> None:
        self._device = device
        self._stats = stats
        self._log = log
        self._clock = clock
        self._flights: dict[int, _Flight] = {}
        self.reads = 0
        self.late: Counter[tuple[int, Op]] = Counter()

    def uses(self, segment: int) -> bool:
        """Whether a batch under way, late or not, names the segment."""
        return any(
            part.route.far_slot(part.work.job.moves[position]).segment == segment
            for part in (flight.part for flight in self._flights.values())
            for position in part.positions
        )

    @property
    def busy(self) -> bool:
        """Whether a batch is under way."""
        return bool(self._flights)

    def send(self, part: Part, op: Op, open_files: Mapping[int, OpenFile], now_s: float) -> dict[int, Reason]:
        """Start a part's batch. Returns the moves that fail at once, for the caller to drop.

        ``open_files``: by segment. With at least one move left, ``ended`` will yield the part;
        until then the device owns its slots.
        """
        transfers, members, unopened = transfers_of(part, open_files)
        if unopened:
            self._log.warn("segment", f"{len(unopened)} blocks are in a segment that is not open")
        if transfers:
            self._submit(_Flight(part, op, transfers, members, now_s))
        return dict.fromkeys(unopened, Reason.IO_ERROR)

    def poll(self, wait_s: float) -> list[Outcome]:
        """Return the batches that have ended, for ``ended``; wait for the first up to
        ``wait_s``."""
        return self._device.poll(wait_s) if self._flights else []

    def drain(self) -> list[Outcome]:
        """As ``poll``, waiting for all."""
        return self._device.drain()

    def ended(self, outcomes: Sequence[Outcome]) -> Iterator[tuple[Part, dict[int, Reason]]]:
        """Yield the parts that have ended, with failed moves; others are on their second try.

        A late part is through whatever became of it: its moves have failed long ago.
        """
        for outcome in outcomes:
            flight = self._flights.pop(outcome.ticket)
            part = flight.part
            if part.late:
                self.late[part.drive, flight.op] -= 1
                yield part, {}
                continue
            self.reads -= flight.op is Op.READ
            if outcome.errors and self._try_again(flight, outcome.errors):
                continue
            self._count(flight)
            yield part, flight.failed

    def _count(self, flight: _Flight) -> None:
        """Count what a batch has moved, if anything, and how long that took, a second try
        included."""
        part, reads = flight.part, flight.op is Op.READ
        moved_bytes = (len(part.positions) - len(flight.failed)) * part.slot_bytes
        if moved_bytes:
            memory = "gpu" if part.route.direct else "cpu"
            route = f"nvme_to_{memory}" if reads else f"{memory}_to_nvme"
            self._stats.observe(f"transfer_bytes.{route}", moved_bytes)
            self._stats.observe(f"transfer_seconds.{route}", max(0.0, self._clock() - flight.sent_s))
            counter = "drive_read_bytes" if reads else "drive_written_bytes"
            self._stats.add(f"{counter}.{part.drive}", moved_bytes)

    def overdue(self, sent_before_s: float) -> list[tuple[Part, dict[int, Reason]]]:
        """Give up the batches that were sent before then: return their parts, which are late now.

        With each part why its moves failed: DEADLINE where the device may still touch their slots,
        the reason of their first try elsewhere. ``ended`` yields the part once more.
        """
        found = []
        for flight in self._flights.values():
            part = flight.part
            if part.late or flight.sent_s >= sent_before_s:
                continue
            part.late = True
            self.late[part.drive, flight.op] += 1
            self.reads -= flight.op is Op.READ
            found.append((part, {**dict.fromkeys(part.positions, Reason.DEADLINE), **flight.failed}))
        return found

    def _submit(self, flight: _Flight) -> None:
        self._flights[self._device.submit(flight.op, flight.transfers)] = flight
        self.reads += flight.op is Op.READ

    def _try_again(self, flight: _Flight, errors: dict[int, int]) -> bool:
        """Note failed transfers; retry the slots of merged ones alone; return whether any were."""
        again: list[Transfer] = []
        alone: list[list[int]] = []
        for at, number in errors.items():
            members = flight.members[at]
            self._stats.add(f"io_errors.{flight.op.value}")
            name = errno.errorcode.get(number, str(number))
            self._log.warn(f"{flight.op.value} {name}", f"a {flight.op.value} of {len(members)} blocks failed: {name}")
            if number in NO_SPACE:
                flight.failed.update(dict.fromkeys(members, Reason.NO_SPACE))
            elif len(members) == 1:
                flight.failed[members[0]] = Reason.IO_ERROR
            else:
                again += split_transfer(flight.transfers[at], flight.part.slot_bytes, len(members))
                alone += [[position] for position in members]
        if again:
            self._submit(_Flight(flight.part, flight.op, again, alone, flight.sent_s, flight.failed))
        return bool(again)


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
                part.arena.run_view(part.size_class, slots[start + at], count)
                for at, count in contiguous_runs(slots[start:end], end - start)
            )
            transfers.append(Transfer(file.fd, slot_offset(file.slot_bytes, first), buffers))
            members.append(positions[start:end])
        start = end
    return transfers, members, unopened


def split_transfer(transfer: Transfer, slot_bytes: int, count: int) -> list[Transfer]:
    """Cut a transfer of ``count`` slots into one for each slot."""
    views = [
        buffer[start : start + slot_bytes]
        for buffer in transfer.buffers
        for start in range(0, buffer.nbytes, slot_bytes)
    ]
    assert len(views) == count
    return [Transfer(transfer.fd, transfer.offset + at * slot_bytes, (view,)) for at, view in enumerate(views)]
