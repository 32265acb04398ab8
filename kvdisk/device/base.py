# SPDX-License-Identifier: Apache-2.0
"""The ``Device`` protocol: bytes between host memory and open segment files. A batch, not a block,
is the unit."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

Buffer = memoryview
"""A writable, contiguous, one-byte-item view whose address and length are multiples of
``geometry.ALIGNMENT``."""


class GpuRange:
    """A range of GPU memory by its address, in the place of a ``Buffer``. Immutable; any thread.

    Sliced in bytes like a memoryview, so that parts and transfers are cut the same way. It has no
    buffer protocol: a device that does not know it refuses it. ``owner``: keeps the memory alive.
    ``address`` and ``nbytes``: multiples of ``geometry.ALIGNMENT``.
    """

    __slots__ = ("address", "nbytes", "owner")
    readonly = False

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        assert address >= 0 and nbytes >= 0
        self.address = address
        self.nbytes = nbytes
        self.owner = owner

    def __getitem__(self, part: slice) -> GpuRange:
        start, end, step = part.indices(self.nbytes)
        assert step == 1
        return GpuRange(self.address + start, max(0, end - start), self.owner)

    def __len__(self) -> int:
        return self.nbytes

    def release(self) -> None:
        """Do nothing; a memoryview would let go of its memory."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """What kvikio and torch know GPU memory by."""
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}


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
        """Start a batch (one transfer or more) and return its ticket. Does not wait for the disk;
        operating failures come back in the outcome."""

    def poll(self, timeout_s: float = 0.0) -> list[Outcome]:
        """Return the batches that ended since the last call; where none has, wait up to
        ``timeout_s`` for the first. Returns at once when nothing is in flight."""

    def drain(self) -> list[Outcome]:
        """Wait until nothing is in flight, and return what ended since the last call."""

    def close(self) -> None:
        """Drain and release threads. Files stay open: they are their opener's. Idempotent."""
