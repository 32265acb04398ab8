# SPDX-License-Identifier: Apache-2.0
"""The device that hands whole batches to the kernel: NIXL's POSIX plugin with io_uring.

A batch is one call that starts all its transfers and returns. No thread waits for them, so busy Python threads,
which hold up a pool of threads each time that one of it has to go on, change little. Memory and files are registered
once.

NIXL says of a batch that it is over, and whether all went well, not what failed and why. A batch that did not go well
is therefore moved again by ``PosixDevice``, transfer by transfer: to do it twice does no harm while the device owns the
buffers. So is what does not suit the ring: files without O_DIRECT, and memory that was not attached.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvdisk.device.base import Buffer, Op, Outcome, Transfer
from kvdisk.device.nixl_ring import Piece, Range, Ring, address_of, load_nixl, prove_ring
from kvdisk.device.posix import PosixDevice
from kvdisk.geometry import ALIGNMENT

_MOST_RANGES = 256
"""Of one request to NIXL."""
_LONGEST_BYTES = 8 << 20
"""Of a range: the kernel cuts it for the drive, and keeps the drive busy with it."""
_LONGEST_SLEEP_S = 0.005
"""What NIXL saw of a batch while it was asked about another is noticed so late at most."""
_SHORT_SLEEP_S = 0.0001

logger = logging.getLogger("kvdisk.device")


@dataclass(slots=True)
class _Flight:
    """A batch under way. ``pieces``: those that have not ended."""

    errors: dict[int, int]
    pieces: int = 0


class NixlDevice:
    """``Device`` over NIXL: one io_uring for each drive, so that a drive that hangs holds up nothing of the others.

    Raises ConfigError, one sentence, where the package is missing or io_uring cannot be used here; that it works is
    tried once on a file in memory, short reads included. No threads but those of ``PosixDevice``, which begin with the
    first batch that needs it. A transfer of a file that is not attached fails with EBADF.
    """

    def __init__(self) -> None:
        self._library = load_nixl()
        self._spare: Ring | None = Ring(self._library)
        prove_ring(self._spare)
        self._rings: dict[int, Ring] = {}
        """By drive (``st_dev``)."""
        self._files: dict[int, Ring | None] = {}
        """By descriptor; None: ``PosixDevice`` serves it."""
        self._memory: list[tuple[int, int]] = []
        """Attached, as addresses of start and end."""
        self._tickets = itertools.count(1)
        self._flights: dict[int, _Flight] = {}
        self._posix: PosixDevice | None = None
        self._again: dict[int, Piece] = {}
        """Pieces at ``PosixDevice``, by its ticket."""
        self._poller = select.poll()
        self._closed = False

    @property
    def name(self) -> str:
        """See ``Device``."""
        return "nixl"

    def attach_memory(self, memory: Buffer) -> None:
        """See ``Device``. Memory may be given back without being detached: its addresses are all that is kept."""
        start = address_of(memory)
        end = start + memory.nbytes
        rings = [*self._rings.values(), *([] if self._spare is None else [self._spare])]
        for span in [span for span in self._memory if span[0] <= end and start <= span[1]]:
            # Attached before: again, or given back since. Two registrations of one address would confuse NIXL.
            start, end = min(start, span[0]), max(end, span[1])
            self._memory.remove(span)
            for ring in rings:
                ring.remove_memory(*span)
        self._memory.append((start, end))
        for ring in rings:
            ring.add_memory(start, end)

    def attach_file(self, fd: int) -> None:
        """See ``Device``."""
        if fd in self._files:
            return
        self._files[fd] = None
        try:
            drive, direct = os.fstat(fd).st_dev, fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
            if direct:
                ring = self._ring_of(drive)
                ring.add_file(fd)
                self._files[fd] = ring
        except Exception as error:  # NIXL has exceptions of its own; the other way works without it
            logger.warning("kvdisk: NIXL does not take the file %d, which goes without it: %s", fd, error)

    def detach_file(self, fd: int) -> None:
        """See ``Device``."""
        ring = self._files.pop(fd, None)
        if ring is not None:
            ring.remove_file(fd)
        if self._posix is not None:
            self._posix.detach_file(fd)

    def submit(self, op: Op, batch: Sequence[Transfer]) -> int:
        """See ``Device``."""
        assert not self._closed, "the device is closed"
        assert batch
        ticket = next(self._tickets)
        flight = self._flights[ticket] = _Flight({})
        of_rings: dict[Ring | None, list[Range]] = {}
        for position, transfer in enumerate(batch):
            if transfer.fd not in self._files:
                flight.errors[position] = errno.EBADF
                continue
            ranges = _ranges(op, position, transfer)
            ring = self._files[transfer.fd]
            if ring is not None and not self._knows(ranges):
                ring = None
            of_rings.setdefault(ring, []).extend(ranges)
        for ring, ranges in of_rings.items():
            for start in range(0, len(ranges), _MOST_RANGES):
                piece = Piece(ticket, op, ranges[start : start + _MOST_RANGES])
                flight.pieces += 1
                if ring is None:
                    self._move_again(piece)
                else:
                    ring.waiting.append(piece)
            if ring is not None:
                self._begin(ring)
        return ticket

    def poll(self, timeout_s: float = 0.0) -> list[Outcome]:
        """See ``Device``."""
        deadline = time.monotonic() + timeout_s
        ended = self._look()
        while not ended and self._flights:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                break
            self._sleep(remaining_s)
            ended = self._look()
        return ended

    def drain(self) -> list[Outcome]:
        """See ``Device``."""
        ended = []
        while self._flights:
            ended += self.poll(_LONGEST_SLEEP_S)
        return ended

    def close(self) -> None:
        """See ``Device``."""
        if self._closed:
            return
        self.drain()
        self._closed = True
        if self._posix is not None:
            self._posix.close()
        # What NIXL holds goes with the last reference to its agent.
        self._rings.clear()
        self._files.clear()
        self._spare = None

    # -- within ------------------------------------------------------------------------------

    def _ring_of(self, drive: int) -> Ring:
        ring = self._rings.get(drive)
        if ring is None:
            ring, self._spare = self._spare, None
            if ring is None:
                ring = Ring(self._library)
                for span in self._memory:
                    ring.add_memory(*span)
            if ring.fd is not None:
                self._poller.register(ring.fd, select.POLLIN)
            self._rings[drive] = ring
        return ring

    def _knows(self, ranges: Sequence[Range]) -> bool:
        """Whether all that the ranges fill or empty was attached."""
        for _, _, _, buffer, address in ranges:
            end = address + buffer.nbytes
            for start, known_end in self._memory:
                if start <= address and end <= known_end:
                    break
            else:
                return False
        return True

    def _begin(self, ring: Ring) -> None:
        """Start what has room in the ring, in order."""
        while ring.waiting and ring.has_room(len(ring.waiting[0].ranges)):
            piece = ring.waiting.popleft()
            if not ring.begin(piece):
                self._move_again(piece)

    def _look(self) -> list[Outcome]:
        """Return what has ended, without waiting."""
        ended: list[Outcome] = []
        for ring in self._rings.values():
            for piece, well in ring.take_ended():
                if well:
                    self._end(piece, {}, ended)
                else:
                    self._move_again(piece)
            self._begin(ring)
        if self._again and self._posix is not None:
            for outcome in self._posix.poll():
                piece = self._again.pop(outcome.ticket)
                found = {piece.ranges[at].position: number for at, number in outcome.errors.items()}
                self._end(piece, found, ended)
        # Not one of their files was attached:
        empty = [ticket for ticket, flight in self._flights.items() if not flight.pieces]
        ended += [Outcome(ticket, self._flights.pop(ticket).errors) for ticket in empty]
        return ended

    def _end(self, piece: Piece, errors: dict[int, int], ended: list[Outcome]) -> None:
        flight = self._flights[piece.ticket]
        for position, number in errors.items():
            flight.errors.setdefault(position, number)
        flight.pieces -= 1
        if not flight.pieces:
            del self._flights[piece.ticket]
            ended.append(Outcome(piece.ticket, flight.errors))

    def _move_again(self, piece: Piece) -> None:
        """Let ``PosixDevice`` move a piece, which says of each transfer what becomes of it."""
        if self._posix is None:
            self._posix = PosixDevice()
        for fd in {piece.fd for piece in piece.ranges} & self._files.keys():
            self._posix.attach_file(fd)
        batch = [Transfer(piece.fd, piece.offset, (piece.buffer,)) for piece in piece.ranges]
        self._again[self._posix.submit(piece.op, batch)] = piece

    def _sleep(self, longest_s: float) -> None:
        """Wait until something may have ended, at most so long; the interpreter lock is free meanwhile."""
        longest_s = min(longest_s, _LONGEST_SLEEP_S)
        if self._again or longest_s < 0.0005 or any(ring.fd is None for ring in self._rings.values()):
            time.sleep(min(longest_s, _SHORT_SLEEP_S))
        else:
            self._poller.poll(max(1, int(longest_s * 1000)))


def _ranges(op: Op, position: int, transfer: Transfer) -> list[Range]:
    """Cut a transfer where its buffers end, and where they are long."""
    _, offset, buffers = transfer
    assert offset >= 0
    assert offset % ALIGNMENT == 0
    assert buffers
    found = []
    for buffer in buffers:
        total = buffer.nbytes
        assert total > 0
        assert total % ALIGNMENT == 0
        assert op is Op.WRITE or not buffer.readonly
        address = address_of(buffer)
        if total <= _LONGEST_BYTES:
            found.append(Range(position, transfer.fd, offset, buffer, address))
        else:
            found += [
                Range(position, transfer.fd, offset + start, buffer[start : start + _LONGEST_BYTES], address + start)
                for start in range(0, total, _LONGEST_BYTES)
            ]
        offset += total
    return found
