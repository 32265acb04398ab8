# SPDX-License-Identifier: Apache-2.0
"""Parts on their way between arena and drive: the device, the files that are open on it, and a second try.

Neighbouring slots travel as one transfer. When such a transfer fails, each of its slots is tried once
more alone, so that one bad sector costs one block.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvdisk.device.base import Device, Op, Outcome, Transfer
from kvdisk.errors import CorruptRecord, DeviceError, GeometryMismatch, KvdiskError
from kvdisk.messages import Job, JobKind, Reason
from kvdisk.stats import Stats
from kvdisk.worker.files import SegmentFiles
from kvdisk.worker.legs import OpenFile, Part, split_transfer, transfers_of
from kvdisk.worker.quiet_log import QuietLog

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(slots=True)
class _Flight:
    """A part's batch at the device. ``members``: positions of the moves in each transfer."""

    part: Part
    op: Op
    transfers: list[Transfer]
    members: list[list[int]]
    failed: dict[int, Reason] = field(default_factory=dict)


class Shuttle:
    """Carries parts of a job between memory and open segment files. The mover's thread calls everything.

    ``reads``: read batches under way. ``stats`` is the caller's; counted are bytes and failed transfers.
    """

    def __init__(self, device: Device, files: SegmentFiles, stats: Stats, log: QuietLog) -> None:
        self._device = device
        self._files = files
        self._stats = stats
        self._log = log
        self._open: dict[int, OpenFile] = {}
        self._flights: dict[int, _Flight] = {}
        self.reads = 0

    # -- files ---------------------------------------------------------------------------------

    def run_file_job(self, job: Job) -> Reason | None:
        """Open or drop what a job names, waiting for the disk; return why that failed, or None."""
        try:
            self._change_files(job)
        except KvdiskError as error:
            self._log.warn(job.kind.name, f"{job.kind.name} failed: {error}")
            return _reason_of(error)
        return None

    def _change_files(self, job: Job) -> None:
        if job.kind is JobKind.OPEN_HOME:
            assert job.home is not None
            self._files.open_home(job.home)
            return
        spec = job.segment
        assert spec is not None
        if job.kind is JobKind.OPEN_SEGMENT:
            fd = self._files.open_segment(spec)
            self._device.attach_file(fd)
            self._open[spec.segment] = OpenFile(fd, spec.slot_bytes, spec.slot_count)
            return
        assert job.kind is JobKind.DROP_SEGMENT, job.kind
        assert not self.uses(spec.segment), "a segment is dropped when no batch names it"
        opened = self._open.pop(spec.segment, None)
        if opened is not None:
            self._device.detach_file(opened.fd)
        self._files.drop_segment(spec)

    def uses(self, segment: int) -> bool:
        """Whether a batch under way names the segment."""
        return any(
            place is not None and place.segment == segment
            for flight in self._flights.values()
            for place in (flight.part.work.job.moves[position].nvme for position in flight.part.positions)
        )

    def close(self) -> None:
        """Close device and files; nothing is under way."""
        assert not self._flights
        for opened in self._open.values():
            self._device.detach_file(opened.fd)
        self._open.clear()
        self._device.close()
        self._files.close()

    # -- parts ---------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a batch is under way."""
        return bool(self._flights)

    def send(self, part: Part, op: Op) -> dict[int, Reason]:
        """Start a part's batch. Returns the moves that fail at once, by position; the caller drops them.

        With at least one move left, ``ended`` will yield the part; until then the device owns its slots.
        """
        transfers, members, unopened = transfers_of(part, self._open)
        if unopened:
            self._log.warn("segment", f"{len(unopened)} blocks are in a segment that is not open")
        if transfers:
            self._submit(_Flight(part, op, transfers, members))
        return dict.fromkeys(unopened, Reason.IO_ERROR)

    def poll(self, wait_s: float) -> list[Outcome]:
        """Return the batches that have ended, for ``ended``; wait for the first up to ``wait_s``."""
        return self._device.poll(wait_s) if self._flights else []

    def drain(self) -> list[Outcome]:
        """As ``poll``, waiting for all."""
        return self._device.drain()

    def ended(self, outcomes: Sequence[Outcome]) -> Iterator[tuple[Part, dict[int, Reason]]]:
        """Yield the parts that are through, with the moves that failed; others are on their second try."""
        for outcome in outcomes:
            flight = self._flights.pop(outcome.ticket)
            part = flight.part
            self.reads -= flight.op is Op.READ
            if outcome.errors and self._try_again(flight, outcome.errors):
                continue
            moved = (len(part.positions) - len(flight.failed)) * part.slot_bytes
            self._stats.add("rank_bytes_read" if flight.op is Op.READ else "rank_bytes_written", moved)
            yield part, flight.failed

    def abandon(self) -> None:
        """Wait until nothing is under way, and forget the parts."""
        self._device.drain()
        self._flights.clear()

    def _submit(self, flight: _Flight) -> None:
        self._flights[self._device.submit(flight.op, flight.transfers)] = flight
        self.reads += flight.op is Op.READ

    def _try_again(self, flight: _Flight, errors: dict[int, int]) -> bool:
        """Note the failed transfers; send the slots of merged ones alone, and return whether there were any."""
        again: list[Transfer] = []
        alone: list[list[int]] = []
        for at, number in errors.items():
            members = flight.members[at]
            self._stats.add("io_errors")
            name = errno.errorcode.get(number, str(number))
            self._log.warn(f"{flight.op.value} {name}", f"a {flight.op.value} of {len(members)} blocks failed: {name}")
            if number in _NO_SPACE:
                flight.failed.update(dict.fromkeys(members, Reason.NO_SPACE))
            elif len(members) == 1:
                flight.failed[members[0]] = Reason.IO_ERROR
            else:
                again += split_transfer(flight.transfers[at], flight.part.slot_bytes, len(members))
                alone += [[position] for position in members]
        if again:
            self._submit(_Flight(flight.part, flight.op, again, alone, flight.failed))
        return bool(again)


def _reason_of(error: KvdiskError) -> Reason:
    if isinstance(error, DeviceError) and error.errno in _NO_SPACE:
        return Reason.NO_SPACE
    return Reason.HEADER if isinstance(error, GeometryMismatch | CorruptRecord) else Reason.IO_ERROR
