# SPDX-License-Identifier: Apache-2.0
"""Tells the fake GPU what host memory kvdisk touches, so that a copy at work there is a
violation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
from support.memory_objects import MemoryObjects

from fake_gpu import control
from kvdisk.device.base import Buffer, GpuRange, Op, Outcome, Transfer
from kvdisk.device.posix import PosixDevice
from kvdisk.geometry import HEADER_BYTES
from kvdisk.remote.base import ObjectOp, RemoteObject, Result
from kvdisk.worker.copier import _Numbers
from kvdisk.worker.gpu_staging import GpuStaging
from kvdisk.worker.routes import Batch
from kvdisk.worker.slot_headers import SlotHeaders


def touch(view: Any, *, writes: bool) -> None:
    """The host touches these bytes now."""
    if isinstance(cast(object, view), GpuRange):
        return
    array = view if isinstance(view, np.ndarray) else np.frombuffer(view, np.uint8)
    if array.nbytes:
        control.host_touches(array.ctypes.data, array.nbytes, writes=writes)


@contextmanager
def host_watched() -> Iterator[None]:
    """Tell while this is entered: transfers of drives when they begin and when they have ended,
    seals, checks, headers and sums of GPU staging, numbers of blocks, and the bytes of the copy
    check."""
    with ExitStack() as within:
        for target, name, make in (
            (PosixDevice, "submit", _submitting),
            (PosixDevice, "poll", _polling),
            (PosixDevice, "drain", _polling),
            (SlotHeaders, "seal", _sealing),
            (SlotHeaders, "check", _checking),
            (GpuStaging, "header", _in_staging("_heads", writes=True)),
            (GpuStaging, "digest", _in_staging("_host_sums", writes=False)),
            (_Numbers, "__init__", _making_numbers),
            (torch, "equal", _comparing),
            (torch.Tensor, "zero_", _zeroing),
        ):
            within.enter_context(patch.object(target, name, make(getattr(target, name))))
        yield


class WatchedObjects(MemoryObjects):
    """A remote store in this process that says what it reads and writes."""

    def _do(self, op: ObjectOp, asked: RemoteObject) -> Result:
        touch(asked.buffer, writes=op is ObjectOp.GET)
        return super()._do(op, asked)


# -- what is put around a function of kvdisk's, or torch's -----------------------------------------


def _submitting(submit: Callable[..., int]) -> Callable[..., int]:
    def submitting(self: Any, op: Op, batch: Sequence[Transfer]) -> int:
        buffers = [buffer for transfer in batch for buffer in transfer.buffers]
        for buffer in buffers:
            touch(buffer, writes=op is Op.READ)
        ticket = submit(self, op, batch)
        self.__dict__.setdefault("_at_work", {})[ticket] = op, buffers
        return ticket

    return submitting


def _polling(poll: Callable[..., list[Outcome]]) -> Callable[..., list[Outcome]]:
    def polling(self: Any, *args: Any, **more: Any) -> list[Outcome]:
        outcomes = poll(self, *args, **more)
        for outcome in outcomes:
            op, buffers = self.__dict__.get("_at_work", {}).pop(outcome.ticket, (Op.READ, ()))
            for buffer in buffers:
                touch(buffer, writes=op is Op.READ)
        return outcomes

    return polling


def _slots(batch: Batch) -> list[Buffer]:
    return [] if batch.route.direct else [batch.memory.view(batch.size_class, slot) for slot in batch.slots]


def _sealing(seal: Callable[..., None]) -> Callable[..., None]:
    def sealing(self: SlotHeaders, batch: Batch) -> None:
        for slot in _slots(batch):
            touch(slot[:HEADER_BYTES], writes=True)
            touch(slot[HEADER_BYTES:], writes=False)
        seal(self, batch)
        for slot in _slots(batch):
            touch(slot[:HEADER_BYTES], writes=True)
            touch(slot[HEADER_BYTES:], writes=False)

    return sealing


def _checking(check: Callable[..., Any]) -> Callable[..., Any]:
    def checking(self: SlotHeaders, batch: Batch) -> Any:
        for slot in _slots(batch):
            touch(slot, writes=False)
        found = check(self, batch)
        for slot in _slots(batch):
            touch(slot, writes=False)
        return found

    return checking


def _in_staging(field: str, *, writes: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(ask: Callable[..., Any]) -> Callable[..., Any]:
        def asking(self: GpuStaging, size_class: int, index: int) -> Any:
            touch(getattr(self, field)[size_class][index].numpy(), writes=writes)
            return ask(self, size_class, index)

        return asking

    return make


def _making_numbers(make: Callable[..., None]) -> Callable[..., None]:
    def making(self: Any, *args: Any) -> None:
        make(self, *args)
        self._to_fill = _WatchedArray(self._to_fill)

    return making


class _WatchedArray:
    """An array that tells of what is put into it."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array

    def __setitem__(self, place: Any, values: Any) -> None:
        touch(self._array[place], writes=True)
        self._array[place] = values


def _comparing(equal: Callable[..., bool]) -> Callable[..., bool]:
    def comparing(one: torch.Tensor, two: torch.Tensor) -> bool:
        for each in (one, two):
            _touch_tensor(each, writes=False)
        return equal(one, two)

    return comparing


def _zeroing(zero: Callable[..., Any]) -> Callable[..., Any]:
    def zeroing(self: torch.Tensor) -> Any:
        _touch_tensor(self, writes=True)
        return zero(self)

    return zeroing


def _touch_tensor(tensor: torch.Tensor, *, writes: bool) -> None:
    """Tell of a tensor of bytes in host memory, by rows."""
    if tensor.device.type == "cpu" and tensor.dtype is torch.uint8:
        for row in tensor.view(-1, tensor.shape[-1]) if tensor.is_contiguous() else tensor:
            control.host_touches(row.data_ptr(), row.nbytes, writes=writes)
