# SPDX-License-Identifier: Apache-2.0
"""GPU memory as a buffer of transfers: an address and a length, which nobody here can look into."""

from __future__ import annotations

from typing import Any


class GpuRange:
    """A range of memory by its address, in the place of a ``Buffer`` where a device moves GPU memory.

    Like the memoryviews of host memory it has ``nbytes`` and ``readonly`` and is sliced in bytes, so that parts
    and transfers are cut the same way. It offers no buffer protocol: a device that does not know it refuses it
    instead of reading an address of another machine. ``owner``: what keeps the memory alive; slices share it.
    ``address`` and ``nbytes``: multiples of ``geometry.ALIGNMENT``. Immutable; any thread.
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
