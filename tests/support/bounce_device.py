# SPDX-License-Identifier: Apache-2.0
"""GPU memory over any device of host memory: what stands for GPUDirect where there is none, so that
all else of the way straight between drive and GPU can run."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from kvdisk.device.base import Buffer, Device, GpuRange, Op, Outcome, Transfer


def on_gpu(place: GpuRange) -> torch.Tensor:
    """Return a range of a GPU's memory as a tensor that shares it."""
    return torch.as_tensor(place, device="cuda")


class BounceDevice:
    """``Device`` that moves each ``GpuRange`` through host memory of its own; ``inner`` moves that,
    and host memory as it is. ``tensor_of``: a tensor that shares a range's bytes."""

    def __init__(self, inner: Device, tensor_of: Callable[[GpuRange], torch.Tensor] = on_gpu) -> None:
        self.inner = inner
        self._tensor_of = tensor_of
        self._read: dict[int, list[list[tuple[GpuRange, Buffer]]]] = {}
        """By ticket, of each transfer: what goes on to the GPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def attach_memory(self, memory: Buffer) -> None:
        if not isinstance(cast(object, memory), GpuRange):
            self.inner.attach_memory(memory)

    def submit(self, op: Op, batch: Sequence[Transfer]) -> int:
        bounced: list[list[tuple[GpuRange, Buffer]]] = [[] for _ in batch]
        moved = []
        for transfer, pairs in zip(batch, bounced, strict=True):
            buffers = [self._bounced(op, buffer, pairs) for buffer in transfer.buffers]
            moved.append(transfer._replace(buffers=tuple(buffers)))
        ticket = self.inner.submit(op, moved)
        if op is Op.READ:
            self._read[ticket] = bounced
        return ticket

    def poll(self, timeout_s: float = 0.0) -> list[Outcome]:
        return self._brought(self.inner.poll(timeout_s))

    def drain(self) -> list[Outcome]:
        return self._brought(self.inner.drain())

    def _bounced(self, op: Op, buffer: Buffer, pairs: list[tuple[GpuRange, Buffer]]) -> Buffer:
        place = cast(object, buffer)
        if not isinstance(place, GpuRange):
            return buffer
        host = memoryview(mmap.mmap(-1, place.nbytes))
        if op is Op.WRITE:
            torch.frombuffer(host, dtype=torch.uint8).copy_(self._tensor_of(place))
        pairs.append((place, host))
        return host

    def _brought(self, outcomes: list[Outcome]) -> list[Outcome]:
        for outcome in outcomes:
            for position, pairs in enumerate(self._read.pop(outcome.ticket, [])):
                for place, host in pairs if position not in outcome.errors else []:
                    target = self._tensor_of(place)
                    target.copy_(torch.frombuffer(host, dtype=torch.uint8))
                    if target.is_cuda:
                        torch.cuda.current_stream(target.device).synchronize()
        return outcomes
