# SPDX-License-Identifier: Apache-2.0
"""Cuts a batch into system calls, and the protocol of a drive's queue that runs them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from kvdisk.device.base import Buffer, Op, Transfer

MOST_BUFFERS = 1024
"""Buffers of one call at most: IOV_MAX of Linux."""


class Call(NamedTuple):
    """What one system call moves of the transfer at ``position`` in its batch."""

    position: int
    fd: int
    offset: int
    buffers: Sequence[Buffer]


class DriveQueue(Protocol):
    """Runs the calls of one drive in one direction, several at a time, on threads of its own. So a
    drive that hangs does not hold up another, and writes that hang do not hold up reads.

    ``way``: a word for the log that says what runs the calls.
    """

    way: str

    def put(self, ticket: int, op: Op, known: Sequence[tuple[int, Transfer]], batch_bytes: int) -> int:
        """Start transfers, given with their positions. Return the number of parts: each is reported
        as an ``Outcome`` when it has ended.

        ``batch_bytes``: the bytes of the whole batch, which is cut into about as many calls as run
        at once. Does not wait for the drive.
        """

    def close(self) -> None:
        """End the threads. Nothing may be in flight."""


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
    """Return the buffers without their first ``moved`` bytes."""
    for position, buffer in enumerate(buffers):
        if moved < buffer.nbytes:
            return [buffer[moved:], *buffers[position + 1 :]]
        moved -= buffer.nbytes
    return []
