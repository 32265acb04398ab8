# SPDX-License-Identifier: Apache-2.0
"""Batches under way: cut into system calls, queued by drive, counted until all calls end."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from kvdisk.device.base import Buffer, Op, Outcome, Transfer

MOST_BUFFERS = 1024
"""IOV_MAX of Linux: buffers of one call."""


class Call(NamedTuple):
    """One system call's worth of the transfer at ``position`` in its batch."""

    position: int
    fd: int
    offset: int
    buffers: Sequence[Buffer]


class DriveQueue(Protocol):
    """Runs the calls of one drive in one direction, several at a time, on threads of its own.

    So a drive that hangs holds up no other, and where only writes hang, as on a frozen file system,
    reads go on. ``way``: what serves the calls, in a word.
    """

    way: str

    def put(self, ticket: int, op: Op, known: Sequence[tuple[int, Transfer]], share_bytes: int) -> int:
        """Start transfers, given with their positions; return how many reports will come.

        ``share_bytes``: what a thread should have of the batch, a multiple of ALIGNMENT. Does not
        wait for the drive.
        """

    def close(self) -> None:
        """End the threads. Nothing is in flight."""


def cut(known: Sequence[tuple[int, Transfer]], task_bytes: int) -> Iterator[list[Call]]:
    """Yield the calls of tasks of up to ``task_bytes`` each, in the order of the batch."""
    calls: list[Call] = []
    room_bytes = task_bytes
    for position, transfer in known:
        offset = transfer.offset
        buffers: list[Buffer] = []
        for buffer in transfer.buffers:
            rest = buffer
            while rest.nbytes:
                if not buffers:
                    calls.append(Call(position, transfer.fd, offset, buffers))
                piece = rest[:room_bytes]
                buffers.append(piece)
                offset += piece.nbytes
                room_bytes -= piece.nbytes
                rest = rest[piece.nbytes :]
                if not room_bytes:
                    yield calls
                    calls, buffers, room_bytes = [], [], task_bytes
                elif len(buffers) == MOST_BUFFERS:
                    buffers = []
    if calls:
        yield calls


def without(buffers: Sequence[Buffer], moved: int) -> list[Buffer]:
    """Return what is left of ``buffers`` after their first ``moved`` bytes."""
    for position, buffer in enumerate(buffers):
        if moved < buffer.nbytes:
            return [buffer[moved:], *buffers[position + 1 :]]
        moved -= buffer.nbytes
    return []


class Done(NamedTuple):
    """A task that has ended, with errno by position of the failed transfers."""

    ticket: int
    errors: dict[int, int]


class Tickets:
    """Answers ``submit``, ``poll`` and ``drain``. The device's thread calls all but ``report``."""

    def __init__(self) -> None:
        self._last = 0
        self._in_flight: dict[int, tuple[int, dict[int, int]]] = {}
        """Reports that are still to come, and errors so far, by ticket."""
        self._done: queue.SimpleQueue[Done] = queue.SimpleQueue()

    def take(self) -> int:
        """Return the ticket of a new batch. Reports that come at once wait for the next poll."""
        self._last += 1
        return self._last

    def expect(self, ticket: int, reports: int, errors: dict[int, int]) -> None:
        """So many reports of a batch will come. ``errors``: what failed before it began."""
        self._in_flight[ticket] = (max(1, reports), errors)
        if not reports:
            self._done.put(Done(ticket, {}))

    def report(self, done: Done) -> None:
        """A task of a batch has ended. Any thread."""
        self._done.put(done)

    def poll(self, timeout_s: float) -> list[Outcome]:
        """See ``Device``."""
        ended: list[Outcome] = []
        deadline_s = time.monotonic() + timeout_s
        while self._in_flight:
            remaining_s = 0.0 if ended else deadline_s - time.monotonic()
            try:
                self._note(self._done.get(timeout=remaining_s) if remaining_s > 0 else self._done.get_nowait(), ended)
            except queue.Empty:
                break
        return ended

    def drain(self) -> list[Outcome]:
        """See ``Device``."""
        ended: list[Outcome] = []
        while self._in_flight:
            self._note(self._done.get(), ended)
        return ended

    def _note(self, done: Done, ended: list[Outcome]) -> None:
        """Take in a report; of two errors of one transfer the first in time counts."""
        left, errors = self._in_flight[done.ticket]
        for position, number in done.errors.items():
            errors.setdefault(position, number)
        if left > 1:
            self._in_flight[done.ticket] = (left - 1, errors)
        else:
            del self._in_flight[done.ticket]
            ended.append(Outcome(done.ticket, errors))
