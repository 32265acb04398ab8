# SPDX-License-Identifier: Apache-2.0
"""Slots in GPU memory between drive and vLLM's tensors, and payload checksums computed there.

A slot is laid out here as in an ``Arena`` and on the drive. The host never sees a payload: it reads
and writes headers through a small pinned area, and gets 16 bytes of sums for each slot.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import numpy as np
import torch

from kvdisk.device.base import Buffer, GpuRange
from kvdisk.device.checksum import LANES, ROW_BYTES, ROW_WORDS, WORD_BYTES, multipliers
from kvdisk.geometry import HEADER_BYTES, contiguous_runs, round_up
from kvdisk.worker.arena import SlotMemory
from kvdisk.worker.copier import CudaLanes, Lane, unless_full
from kvdisk.worker.copier_base import Event

SCRATCH_BYTES = 8 << 20
"""Bytes of GPU memory in which each lane computes sums; at least one slot's payload."""
_GPU_ALIGNMENT = 64 << 10

logger = logging.getLogger("kvdisk.worker")


class PayloadSums:
    """Computes ``checksum.multilinear_digest`` of many payloads at once on a GPU: the same bytes.

    A Triton kernel reads each payload once. Where there is none, or no GPU, five operations of
    torch do the same over payloads and scratch.

    ``largest_bytes``: of a payload. ``scratch_bytes``: memory beside the payloads. Work goes to the
    calling thread's current stream, one computation at a time.
    """

    def __init__(self, device: torch.device, largest_bytes: int, scratch_bytes: int = SCRATCH_BYTES) -> None:
        rows = -(-largest_bytes // ROW_BYTES)
        self._words = _on_device(np.stack([multipliers(lane, ROW_WORDS) for lane in range(LANES)]), device)
        self._rows = _on_device(np.stack([multipliers(2 + lane, rows) for lane in range(LANES)]), device)
        self._starts = _on_device(multipliers(4, LANES), device)
        self._turned = torch.arange(WORD_BYTES - 1, -1, -1, device=device)
        self._kernel = _kernel_for(device)
        scratch_words = _KERNEL_WORDS if self._kernel is not None else scratch_bytes // WORD_BYTES
        scratch_words = max(scratch_words, self._scratch_words(rows))
        self._scratch = torch.empty(scratch_words, dtype=torch.int64, device=device)

    def of(self, slots: torch.Tensor, payload_bytes: int, out: torch.Tensor) -> None:
        """Put the checksums of ``slots``, uint8 (n, slot_bytes), into ``out``, int64 (n, 2).

        The bytes behind the payloads, up to the end of their last rows, become zeros.
        """
        rows = -(-payload_bytes // ROW_BYTES)
        slots[:, HEADER_BYTES + payload_bytes : HEADER_BYTES + rows * ROW_BYTES].zero_()
        most = max(1, self._scratch.numel() // max(1, self._scratch_words(rows)))
        for start in range(0, slots.shape[0], most):
            some = slots[start : start + most, HEADER_BYTES : HEADER_BYTES + rows * ROW_BYTES]
            if self._kernel is not None and rows:
                found = self._kernel.sum_rows(some.view(torch.int64), self._words, self._rows, self._scratch)
                torch.sum(found, 1, out=out[start : start + most]).add_(self._starts)
            else:
                self._some(some, rows, out[start : start + most])

    def _scratch_words(self, rows: int) -> int:
        """Return the words of scratch that a payload of so many rows needs."""
        return rows * ROW_WORDS if self._kernel is None else self._kernel.parts_of(rows) * LANES

    def _some(self, payloads: torch.Tensor, rows: int, out: torch.Tensor) -> None:
        """Do the same as the kernel with operations of torch, each of which reads or writes all
        payloads."""
        count = payloads.shape[0]
        scratch = self._scratch[: count * rows * ROW_WORDS]
        products = scratch.view(count, rows, ROW_WORDS)
        # Products and sums of signed words wrap as those of unsigned ones do.
        torch.mul(payloads.view(torch.int64).unflatten(1, (rows, ROW_WORDS)), self._words[0], out=products)
        self._fold(products, 0, out)
        in_bytes = payloads.unflatten(1, (rows * ROW_WORDS, WORD_BYTES))
        torch.index_select(
            in_bytes, 2, self._turned, out=scratch.view(torch.uint8).view(count, rows * ROW_WORDS, WORD_BYTES)
        )
        self._fold(products.mul_(self._words[1]), 1, out)

    def _fold(self, products: torch.Tensor, lane: int, out: torch.Tensor) -> None:
        row_sums = products.sum(2)
        out[:, lane] = row_sums.mul_(self._rows[lane][: row_sums.shape[1]]).sum(1).add_(self._starts[lane])


_KERNEL_WORDS = 8 << 10
"""Words of scratch for the kernel's partial sums, enough for many payloads at once."""


def _kernel_for(device: torch.device) -> Any:
    """Return the module of the Triton kernel once it has run; None where it cannot run."""
    if device.type != "cuda":
        return None
    try:
        from kvdisk.worker import sum_kernel

        row = torch.zeros(1, ROW_WORDS, dtype=torch.int64, device=device)
        sum_kernel.sum_rows(row, row.expand(LANES, ROW_WORDS).contiguous(), row[:, :LANES].view(LANES, 1), row[0])
    except Exception as error:  # of Triton, of its compiler, and of what that needs
        why = next(iter(str(error).splitlines()), "") or type(error).__name__
        logger.warning("Triton has no kernel for checksums on this GPU: torch computes them, slower (%s).", why)
        return None
    return sum_kernel


def _on_device(numbers: np.ndarray[Any, np.dtype[np.uint64]], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(numbers.view(np.int64).copy()).to(device)


class GpuStaging(SlotMemory):
    """One rank's registered staging on its GPU. Its buffers are addresses only (``GpuRange``).

    ``lanes``: those of the copier. Sums of gathered slots go to lane STORE, sums of slots that were
    read to LOAD. On a CPU (in tests) it is host memory. The mover's thread makes all calls. Raises
    torch's OutOfMemoryError where the GPU has too little memory left.
    """

    on_gpu = True

    def __init__(self, slot_sizes: Sequence[int], slot_counts: Sequence[int], lanes: CudaLanes) -> None:
        super().__init__(slot_sizes, slot_counts)
        self._lanes = lanes
        device = lanes.device
        on_gpu = device.type == "cuda"
        self.total_bytes = round_up(self.total_bytes, _GPU_ALIGNMENT)
        # cuFile registers the whole allocation that an address is in: it must not be one that torch
        # divides among others.
        self._pool: Any = torch.cuda.MemPool() if on_gpu else None
        within: AbstractContextManager[Any] = torch.cuda.use_mem_pool(self._pool, device) if on_gpu else nullcontext()
        with within:
            # Zeros, so that headers and padding that go to the drive hold no stale bytes.
            raw = torch.zeros(self.total_bytes + _GPU_ALIGNMENT, dtype=torch.uint8, device=device)
        skipped = -raw.data_ptr() % _GPU_ALIGNMENT
        whole = raw[skipped : skipped + self.total_bytes]
        self._address = whole.data_ptr()
        self._owner: object = raw
        self._tensors = [
            whole[start : start + size * count].view(count, size)
            for start, size, count in zip(self._offsets, slot_sizes, slot_counts, strict=True)
        ]

        def on_host(shape: Callable[[int], tuple[int, ...]], dtype: torch.dtype) -> list[torch.Tensor]:
            return [torch.zeros(shape(count), dtype=dtype, pin_memory=on_gpu) for count in slot_counts]

        self._heads = on_host(lambda count: (count, HEADER_BYTES), torch.uint8)
        self._host_sums = on_host(lambda count: (count, LANES), torch.int64)
        self._sums = [torch.zeros(count, LANES, dtype=torch.int64, device=device) for count in slot_counts]
        largest = max(slot_sizes) - HEADER_BYTES
        self._payload_sums = {lane: PayloadSums(device, largest) for lane in (Lane.STORE, Lane.LOAD)}
        made = lanes.record(None)
        for lane in Lane:
            lanes.wait(lane, made)

    @property
    def memory(self) -> Buffer:
        assert self._owner is not None, "the staging is closed"
        return cast(Buffer, GpuRange(self._address, self.total_bytes, self._owner))

    def tensor(self, size_class: int) -> torch.Tensor:
        return self._tensors[size_class]

    def header(self, size_class: int, index: int) -> memoryview:
        """Return a slot's header in host memory: as it was last read, or to be filled and
        written."""
        return memoryview(self._heads[size_class][index].numpy())

    def digest(self, size_class: int, index: int) -> bytes:
        """Return a payload's MULTILINEAR checksum, once the event of ``start_sums`` has passed."""
        sums: bytes = self._host_sums[size_class][index].numpy().astype("<i8").tobytes()
        return sums

    def settle(self) -> None:
        """Wait for this thread's work on its tensors, before a device touches them."""
        self._lanes.record(None).synchronize()

    def start_sums(self, size_class: int, slots: Sequence[int], payload_bytes: int, lane: Lane) -> Event | None:
        """Start bringing slots' checksums to host memory, and on lane LOAD their headers too.
        Return None where the GPU has no memory for it now; then none of it is under way."""
        return unless_full(self._lanes, [lane], lambda: self._start_sums(size_class, slots, payload_bytes, lane))

    def _start_sums(self, size_class: int, slots: Sequence[int], payload_bytes: int, lane: Lane) -> Event:
        with self._lanes.on(lane):
            for start, count in contiguous_runs(slots, len(slots)):
                run = slice(slots[start], slots[start] + count)
                if lane is Lane.LOAD:
                    heads = self._tensors[size_class][run, :HEADER_BYTES].contiguous()
                    self._heads[size_class][run].copy_(heads, non_blocking=True)
                sums = self._sums[size_class][run]
                self._payload_sums[lane].of(self._tensors[size_class][run], payload_bytes, sums)
                self._host_sums[size_class][run].copy_(sums, non_blocking=True)
            return self._lanes.record(lane)

    def start_headers(self, size_class: int, slots: Sequence[int]) -> Event | None:
        """Start copying headers, which were filled in host memory, in front of the payloads. None
        as with ``start_sums``."""
        return unless_full(self._lanes, [Lane.STORE], lambda: self._start_headers(size_class, slots))

    def _start_headers(self, size_class: int, slots: Sequence[int]) -> Event:
        with self._lanes.on(Lane.STORE):
            for start, count in contiguous_runs(slots, len(slots)):
                run = slice(slots[start], slots[start] + count)
                heads = self._heads[size_class][run].to(self._lanes.device, non_blocking=True)
                self._tensors[size_class][run, :HEADER_BYTES].copy_(heads)
            return self._lanes.record(Lane.STORE)

    def close(self) -> None:
        """Release the memory. Idempotent. No copy and no batch may be in flight."""
        if self._pool is not None and not self._gives_memory_back():
            # torch ends the process where it cannot give a pool's memory back: the pool stays.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._pool))
        self._tensors, self._owner, self._pool, self._address = [], None, None, 0
        self._sums.clear()
        self._payload_sums.clear()

    def _gives_memory_back(self) -> bool:
        """Whether the GPU takes calls. After some errors it takes none any more."""
        try:
            for lane in Lane:
                self._lanes.synchronize(lane)
        except RuntimeError:
            return False
        return True
