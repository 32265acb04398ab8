# SPDX-License-Identifier: Apache-2.0
"""The device suite's buffers, which are host memory, as GPU memory on the way to a device of GPU
memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvdisk.device.base import Buffer, Device, GpuRange, Op, Outcome, Transfer


class ThroughGpu:
    """``Device``: copies what is written to GPU memory before, and what was read from it after
    ``inner`` moved it."""

    def __init__(self, inner: Device, device: torch.device) -> None:
        self.inner = inner
        self._device = device
        self._under_way: dict[int, tuple[Op, list[Transfer], list[list[torch.Tensor]]]] = {}

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def attach_memory(self, memory: Buffer) -> None:
        """Host memory is not the device's."""

    def submit(self, op: Op, batch: Sequence[Transfer]) -> int:
        copies = [[self._on_gpu(buffer) for buffer in transfer.buffers] for transfer in batch]
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        moved = [
            transfer._replace(buffers=tuple(GpuRange(copy.data_ptr(), copy.numel(), copy) for copy in mine))
            for transfer, mine in zip(batch, copies, strict=True)
        ]
        ticket = self.inner.submit(op, moved)
        self._under_way[ticket] = (op, list(batch), copies)
        return ticket

    def poll(self, timeout_s: float = 0.0) -> list[Outcome]:
        return self._brought(self.inner.poll(timeout_s))

    def drain(self) -> list[Outcome]:
        return self._brought(self.inner.drain())

    def _on_gpu(self, buffer: Buffer) -> torch.Tensor:
        """Return the bytes of a buffer at an address that is a multiple of 4096."""
        room = torch.empty(buffer.nbytes + 4096, dtype=torch.uint8, device=self._device)
        skipped = -room.data_ptr() % 4096
        copy = room[skipped : skipped + buffer.nbytes]
        copy.copy_(torch.frombuffer(bytearray(buffer), dtype=torch.uint8))
        return copy

    def _brought(self, outcomes: list[Outcome]) -> list[Outcome]:
        for outcome in outcomes:
            op, batch, copies = self._under_way.pop(outcome.ticket)
            if op is Op.READ:
                for position, (transfer, mine) in enumerate(zip(batch, copies, strict=True)):
                    if position not in outcome.errors:
                        for buffer, copy in zip(transfer.buffers, mine, strict=True):
                            buffer[:] = copy.cpu().numpy().tobytes()
        return outcomes
