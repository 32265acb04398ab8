# SPDX-License-Identifier: Apache-2.0
"""The ``Device`` protocol: moves bytes between host memory and open segment files, a batch at a
time."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

Buffer = memoryview
"""A writable, contiguous, one-byte-item view whose address and length are multiples of
``geometry.ALIGNMENT``."""


class GpuRange:
    """A range of GPU memory by its address, in the place of a ``Buffer``. Immutable; any thread may
    use it.

    It is sliced in bytes like a memoryview, so that parts and transfers are cut the same way. It
    has no buffer protocol: a device that does not know it refuses it. ``owner``: keeps the memory
    alive. ``address`` and ``nbytes``: multiples of ``geometry.ALIGNMENT``.
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
        """Do nothing; a memoryview would release its memory."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The interface by which kvikio and torch find GPU memory."""
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}


class Op(Enum):
    """The direction of a batch, as seen from the drive: READ fills buffers, WRITE empties them."""

    READ = "read"
    WRITE = "write"


class Transfer(NamedTuple):
    """One contiguous range of a file, and the buffers that it fills or that are written to it, in
    order.

    ``fd``: an open file that was attached. ``offset``: in bytes, a multiple of ALIGNMENT. The range
    is as long as the buffers together.
    """

    fd: int
    offset: int
    buffers: tuple[Buffer, ...]


class Outcome(NamedTuple):
    """A batch that has ended: nothing touches its buffers any more.

    ``errors``: the errno of each transfer that failed, by its position in the batch (``errno.EIO``
    for a short one). The others moved every byte.
    """

    ticket: int
    errors: dict[int, int]


class Device(Protocol):
    """Moves batches. One thread calls all methods of one device.

    The device owns a batch's buffers from ``submit`` until ``poll`` or ``drain`` has returned its
    outcome: the caller keeps them alive and does not touch them.
    """

    @property
    def name(self) -> str:
        """Short name for logs: ``posix``, ``memory``, ..."""

    def attach_memory(self, memory: Buffer) -> None:
        """Make known a range of memory that buffers will lie in, once, before the first batch."""

    def attach_file(self, fd: int) -> None:
        """Make known an open file, before the first batch that names it."""

    def detach_file(self, fd: int) -> None:
        """Forget a file. The caller makes sure that no batch in flight names it."""

    def submit(self, op: Op, batch: Sequence[Transfer]) -> int:
        """Start a batch of one transfer or more, and return its ticket. Does not wait for the
        drive. Operating failures come back in the outcome."""

    def poll(self, timeout_s: float = 0.0) -> list[Outcome]:
        """Return the batches that ended since the last call. Where none has, wait up to
        ``timeout_s`` for the first. Returns at once when nothing is in flight."""

    def drain(self) -> list[Outcome]:
        """Wait until nothing is in flight, and return what ended since the last call."""

    def close(self) -> None:
        """Drain, and end the threads. Files stay open: who opened them closes them. Idempotent."""
