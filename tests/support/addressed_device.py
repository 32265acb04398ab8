# SPDX-License-Identifier: Apache-2.0
"""What stands for a GPU's device where there is none: buffers by address, whose bytes are host
memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import cast

from kvdisk.device.base import Buffer, Device, GpuRange, Op, Outcome, Transfer


def range_of(buffer: Buffer) -> GpuRange:
    """Return the address of a writable view. It keeps nothing alive: the view has to outlive its
    use."""
    exported = ctypes.c_char.from_buffer(buffer)
    return GpuRange(ctypes.addressof(exported), buffer.nbytes, None)


def view_of(place: GpuRange) -> Buffer:
    """Return the bytes of a range of host memory."""
    return memoryview((ctypes.c_ubyte * place.nbytes).from_address(place.address)).cast("B")


class AddressedDevice:
    """``Device`` that takes ``GpuRange`` buffers, too: of host memory (GPU staging over CPU
    tensors). ``inner`` moves.

    ``registered``: what was attached, in order.
    """

    def __init__(self, inner: Device) -> None:
        self.inner = inner
        self.registered: list[GpuRange] = []

    @property
    def name(self) -> str:
        """See ``Device``."""
        return f"addressed({self.inner.name})"

    def attach_memory(self, memory: Buffer) -> None:
        """See ``Device``."""
        if isinstance(memory, GpuRange):
            self.registered.append(memory)
        else:
            self.inner.attach_memory(memory)

    def attach_file(self, fd: int) -> None:
        """See ``Device``."""
        self.inner.attach_file(fd)

    def detach_file(self, fd: int) -> None:
        """See ``Device``."""
        self.inner.detach_file(fd)

    def submit(self, op: Op, batch: Sequence[Transfer]) -> int:
        """See ``Device``."""
        return self.inner.submit(op, [item._replace(buffers=tuple(map(self._view, item.buffers))) for item in batch])

    def poll(self, timeout_s: float = 0.0) -> list[Outcome]:
        """See ``Device``."""
        return self.inner.poll(timeout_s)

    def drain(self) -> list[Outcome]:
        """See ``Device``."""
        return self.inner.drain()

    def close(self) -> None:
        """See ``Device``."""
        self.inner.close()

    def _view(self, buffer: Buffer) -> Buffer:
        place = cast(object, buffer)
        if not isinstance(place, GpuRange):
            return buffer
        if self.registered:
            known = [memory.address <= place.address < memory.address + memory.nbytes for memory in self.registered]
            assert any(known), "memory that was not attached"
        return view_of(place)
