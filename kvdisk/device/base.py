# SPDX-License-Identifier: Apache-2.0
"""The ``Device`` protocol: bytes between host memory and open segment files. A batch, not a block,
is the unit."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

Buffer = memoryview
"""A writable, contiguous, one-byte-item view whose address and length are multiples of
``geometry.ALIGNMENT``."""


class Op(Enum):
    """Direction of a batch."""

    READ = "read"
    WRITE = "write"


class Transfer(NamedTuple):
    """One contiguous range of a file, and the buffers that it fills or empties in order.

    ``fd``: an open file that was attached. ``offset``: bytes, a multiple of ALIGNMENT; the range is
    as long as the buffers together.
    """

    fd: int
    offset: int
    buffers: tuple[Buffer, ...]


class Outcome(NamedTuple):
    """A batch that has ended: nothing touches its buffers any more.

    ``errors``: errno by position of the transfers that failed (``errno.EIO`` for a short one); the
    others moved every byte.
    """

    ticket: int
    errors: dict[int, int]


class Device(Protocol):
    """Moves batches. One thread calls all methods of one device.

    From ``submit`` until the batch's outcome has been returned by ``poll`` or ``drain``, the device
    owns the buffers: the caller keeps them alive and does not touch them.
    """

    @property
    def name(self) -> str:
        """Short name for logs: ``posix``, ``memory``, ..."""

    def attach_memory(self, memory: Buffer) -> None:
        """Make known a range of memory that buffers will lie in, once, before the first batch."""

    def attach_file(self, fd: int) -> None:
        """Make known an open file before the first batch that names it."""

    def detach_file(self, fd: int) -> None:
        """Forget a file. The caller makes sure that no batch in flight names it."""

    def submit(self, op: Op, batch: Sequence[Transfer]) -> int:
        """Start a batch (one transfer or more) and return its ticket.

        Does not wait for the disk; raises nothing for operating failures, which come back in the
        outcome.
        """

    def poll(self, timeout_s: float = 0.0) -> list[Outcome]:
        """Return the batches that ended since the last call.

        Waits up to ``timeout_s`` for the first where none has; returns at once when nothing is in
        flight.
        """

    def drain(self) -> list[Outcome]:
        """Wait until nothing is in flight, and return what ended since the last call."""

    def close(self) -> None:
        """Drain and release threads. Files stay open: they are their opener's. Idempotent."""
