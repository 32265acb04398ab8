# SPDX-License-Identifier: Apache-2.0
"""Slots in host memory: a rank's CPU tier and its staging are an ``Arena`` each.

A slot is laid out here as on the drive, 4 KiB header and payload together, so that neighbouring
slots move in one transfer. ``torch`` is imported only where a tensor or pinning is asked for.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import numpy as np

from kvdisk.device.base import Buffer
from kvdisk.device.paths import refusal
from kvdisk.errors import ConfigError, start_thread
from kvdisk.geometry import ALIGNMENT, HEADER_BYTES
from kvdisk.worker.cudart import cuda_runtime, forget_error, relax_captures

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("kvdisk.worker")

PIECE_BYTES = 256 << 20
"""Bytes that are pinned at once, about: a driver may refuse much more, or hold up the model for
it."""


class SlotMemory(ABC):
    """A region of slots for each size class, one behind the other, in host memory or on a GPU.

    ``slot_sizes``: bytes of a slot by size class, multiples of 4096. ``slot_counts``: slots of each
    class; 0 is allowed. ``total_bytes``: at least 4096. ``on_gpu``: whether the memory is a GPU's,
    so that a copier's copies stay on the GPU.
    """

    on_gpu = False
    is_pageable = False
    """Whether a copy from a GPU begins only when all that it has to wait for is over: CUDA behaves
    so with memory that is not pinned, or not yet."""

    def __init__(self, slot_sizes: Sequence[int], slot_counts: Sequence[int]) -> None:
        assert len(slot_sizes) == len(slot_counts) > 0
        assert all(size > HEADER_BYTES and size % ALIGNMENT == 0 for size in slot_sizes)
        assert all(count >= 0 for count in slot_counts)
        self.slot_sizes = tuple(slot_sizes)
        self.slot_counts = tuple(slot_counts)
        self._offsets: list[int] = []
        total_bytes = 0
        for size, count in zip(slot_sizes, slot_counts, strict=True):
            self._offsets.append(total_bytes)
            total_bytes += size * count
        # The kernel refuses an empty mapping, but an empty tier is allowed.
        self.total_bytes = max(total_bytes, ALIGNMENT)
        self._address = 0
        """The address of the first byte; 0 before there is memory, and after it is closed."""

    @property
    @abstractmethod
    def memory(self) -> Buffer:
        """All of the memory, for ``Device.attach_memory``."""

    @abstractmethod
    def tensor(self, size_class: int) -> torch.Tensor:
        """Return all slots of a class, sharing the memory: uint8 (slot_count, slot_bytes)."""

    def address_of(self, size_class: int) -> int:
        """Return the address of the first slot of a class. The others follow without gaps."""
        assert self._address, "the memory is closed"
        return self._address + self._offsets[size_class]

    def piece_slots(self, size_class: int) -> int:
        """Return the number of slots of a class in a piece. A copy between host and GPU has to stay
        within a piece: CUDA refuses a copy across two that were pinned apart."""
        return max(1, PIECE_BYTES // self.slot_sizes[size_class])

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Yield the first byte and the length of each piece."""
        for size_class, (size, count) in enumerate(zip(self.slot_sizes, self.slot_counts, strict=True)):
            step = self.piece_slots(size_class)
            for first in range(0, count, step):
                yield self._offsets[size_class] + first * size, min(step, count - first) * size

    def view(self, size_class: int, index: int, count: int = 1) -> Buffer:
        """Return ``count`` neighbouring slots from ``index`` on, as one view of writable bytes,
        aligned to 4 KiB."""
        assert 0 <= index <= self.slot_counts[size_class] - count, (size_class, index, count)
        slot_bytes = self.slot_sizes[size_class]
        start = self._offsets[size_class] + index * slot_bytes
        return self.memory[start : start + count * slot_bytes]


class Arena(SlotMemory):
    """One private anonymous mapping. Any thread may ask for views.

    ``pin``: take all of it from the NUMA node of the constructing thread's GPU, register it with
    CUDA, and keep it from children that fork. A background thread does so, piece by piece: copies
    of memory that is not pinned yet are only slower. A warning says what cannot be pinned. Without
    ``pin``, memory is taken as slots are first written, or ahead of that: see ``populate``. A view
    or tensor that outlives the arena keeps the mapping alive. Raises ConfigError where the kernel
    refuses so much.
    """

    def __init__(self, slot_sizes: Sequence[int], slot_counts: Sequence[int], pin: bool) -> None:
        super().__init__(slot_sizes, slot_counts)
        # mmap's default for fd -1 is MAP_SHARED, for which MADV_HUGEPAGE does nothing.
        try:
            mapping = mmap.mmap(-1, self.total_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cannot map {self.total_bytes} bytes of host memory: {error}") from error
        with contextlib.suppress(OSError):  # a kernel without it serves as well, only slower
            mapping.madvise(mmap.MADV_HUGEPAGE)
        self._memory: memoryview | None = memoryview(mapping)
        self._address = np.frombuffer(mapping, np.uint8).ctypes.data
        self._tensors: dict[int, torch.Tensor] = {}
        self._pinned: list[int] = []
        """The addresses of the pieces that are registered with CUDA."""
        self._unregister = weakref.finalize(self, _unregister, self._pinned, self._memory)
        self._unregister.atexit = False  # the process ends with its registrations
        self.is_pageable = pin
        self._closing = Event()
        self._pinning: Thread | None = None
        if pin:
            import torch

            # A child's first write after a fork would otherwise move our pages from under the GPU.
            try:
                mapping.madvise(mmap.MADV_DONTFORK)
            except OSError as error:
                raise ConfigError(
                    f"memory for a GPU is to be kept from children: {refusal('madvise', error)}."
                ) from error
            gpu = torch.cuda.current_device()
            self._pinning = Thread(target=self._pin, args=(gpu,), name="kvdisk-pinning", daemon=True)
            start_thread(self._pinning)
            if cuda_runtime() is None:  # then the thread cannot keep out of the model's captures
                self.await_pinned()

    @property
    def memory(self) -> memoryview:
        assert self._memory is not None, "the arena is closed"
        return self._memory

    def tensor(self, size_class: int) -> torch.Tensor:
        found = self._tensors.get(size_class)
        if found is None:
            import torch

            size, count = self.slot_sizes[size_class], self.slot_counts[size_class]
            # Through numpy, whose array keeps the mapping open; torch.frombuffer would not.
            array = np.frombuffer(self.memory, np.uint8, size * count, self._offsets[size_class])
            with torch.inference_mode(False):  # or who is not in it could not write
                found = self._tensors.setdefault(size_class, torch.from_numpy(array.reshape(count, size)))
        return found

    def await_pinned(self) -> None:
        """Wait until all memory is pinned that can be."""
        if self._pinning is not None:
            self._pinning.join()

    def close(self) -> None:
        """Unregister from CUDA, and release the memory with the last view of it. Idempotent.

        No copy and no batch may be in flight.
        """
        self._closing.set()
        self.await_pinned()
        self._unregister()
        self._tensors.clear()
        self._memory, self._address = None, 0

    def _pin(self, gpu: int) -> None:
        """Pin one piece after the other, on a thread of its own."""
        import torch

        start, pinned_bytes, why = self._address, 0, ""
        try:
            torch.cuda.set_device(gpu)
            relax_captures()
            run_near(torch.cuda.get_device_properties(gpu))  # memory comes from where it is first touched
            for offset, length in self.pieces():
                if self._closing.is_set():
                    return
                status = int(torch.cuda.cudart().cudaHostRegister(start + offset, length, 0))
                if status:
                    forget_error()
                    why = f"error {status}"
                    break
                self._pinned.append(start + offset)
                pinned_bytes += length
        except Exception as error:  # torch's, of a driver that answers otherwise than expected
            why = str(error)
        self.is_pageable = bool(why)
        if why:
            left = self.total_bytes - pinned_bytes
            logger.warning(
                "CUDA cannot pin %d of %d bytes of host memory: copies of them are slow (%s).",
                left,
                self.total_bytes,
                why,
            )


_REFUSED: list[memoryview] = []
"""Memory that CUDA did not unregister. It stays mapped: otherwise a copy could write to whatever is
mapped there next."""


def _unregister(pinned: list[int], memory: memoryview) -> None:
    """Unregister pieces of memory from CUDA, by their addresses."""
    if not pinned:
        return
    import torch

    failed = []
    for address in pinned:
        status = int(torch.cuda.cudart().cudaHostUnregister(address))
        if status:
            forget_error()
            failed.append(status)
    pinned.clear()
    if failed:
        _REFUSED.append(memory)
        logger.warning(
            "CUDA did not unregister %d pieces of host memory (error %d): %d bytes stay with this process.",
            len(failed),
            failed[0],
            memory.nbytes,
        )


# -- memory near a GPU ---------------------------------------------------------------------------

SYS = Path("/sys")


def processors_near(properties: Any, sys: Path = SYS) -> set[int]:
    """Return the processors on a GPU's NUMA node; empty where torch or the system does not know."""
    if not hasattr(properties, "pci_bus_id"):
        return set()  # an older torch, or not a CUDA device
    place = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    try:
        ranges = (sys / f"bus/pci/devices/{place}/local_cpulist").read_text().strip().split(",")
        ends = [[int(end) for end in each.split("-")] for each in ranges]
    except (OSError, ValueError):
        return set()
    return {number for each in ends for number in range(each[0], each[-1] + 1)}


def run_near(properties: Any) -> None:
    """Bind this thread to the processors near a GPU that it may use, if there are any."""
    with contextlib.suppress(OSError):
        may = os.sched_getaffinity(0)
        os.sched_setaffinity(0, processors_near(properties) & may or may)
