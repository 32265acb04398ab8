# SPDX-License-Identifier: Apache-2.0
"""What stands for a GPU where there is none: buffers by address, whose bytes are host memory, and
lanes whose work is done when it is given."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch

from kvdisk.device.base import Buffer, Device, GpuRange, Op, Transfer
from kvdisk.worker.copier import CudaLanes, Lane, Rows
from kvdisk.worker.copier_base import Event, Passed
from support.faulty_device import FaultyDevice


def range_of(buffer: Buffer) -> GpuRange:
    """Return the address of a writable view. It keeps nothing alive: the view has to outlive its
    use."""
    exported = ctypes.c_char.from_buffer(buffer)
    return GpuRange(ctypes.addressof(exported), buffer.nbytes, None)


def view_of(place: GpuRange) -> Buffer:
    """Return the bytes of a range of host memory."""
    return memoryview((ctypes.c_ubyte * place.nbytes).from_address(place.address)).cast("B")


class AddressedDevice(FaultyDevice):
    """``Device`` that takes ``GpuRange`` buffers, too: of host memory (GPU staging over CPU
    tensors). ``inner`` moves.

    ``registered``: what was attached, in order.
    """

    def __init__(self, inner: Device) -> None:
        super().__init__(inner)
        self.registered: list[GpuRange] = []

    @property
    def name(self) -> str:
        return f"addressed({self.inner.name})"

    def attach_memory(self, memory: Buffer) -> None:
        if isinstance(memory, GpuRange):
            self.registered.append(memory)
        else:
            super().attach_memory(memory)

    def submit(self, op: Op, batch: Sequence[Transfer]) -> int:
        return super().submit(op, [item._replace(buffers=tuple(map(self._view, item.buffers))) for item in batch])

    def _view(self, buffer: Buffer) -> Buffer:
        place = cast(object, buffer)
        if not isinstance(place, GpuRange):
            return buffer
        if self.registered:
            known = [memory.address <= place.address < memory.address + memory.nbytes for memory in self.registered]
            assert any(known), "memory that was not attached"
        return view_of(place)


class CpuLanes(CudaLanes):
    """Those of a CPU. ``log``: what was asked of which lane. ``rows``: of each copy of rows, how
    many it had; ``pinned``: whether its memory was."""

    device = torch.device("cpu")
    copies_rows = True

    def __init__(self) -> None:
        self.log: list[tuple[str, Lane | None]] = []
        self.rows: list[int] = []
        self.pinned: list[bool] = []

    def on(self, lane: Lane) -> AbstractContextManager[Any]:
        return nullcontext()

    def record(self, lane: Lane | None) -> Event:
        self.log.append(("record", lane))
        return Passed()

    def wait(self, lane: Lane | None, event: Event) -> None:
        self.log.append(("wait", lane))

    def synchronize(self, lane: Lane) -> None:
        self.log.append(("synchronize", lane))

    def copy_rows(
        self, lane: Lane, target: Rows, source: Rows, row_bytes: int, count: int, *, pinned: bool = False
    ) -> bool:
        self.rows.append(count)
        self.pinned.append(pinned)
        for row in range(count):
            to, of = (place.address + row * place.pitch for place in (target, source))
            ctypes.memmove(to, of, row_bytes)
        return True
