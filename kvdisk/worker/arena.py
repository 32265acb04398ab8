# SPDX-License-Identifier: Apache-2.0
"""Slots in host memory: a rank's CPU tier and its staging are an ``Arena`` each.

A slot lies here as it lies on the drive, 4 KiB header and payload together, so that neighbours
move in one transfer. ``torch`` is imported only where a tensor or pinning is asked for.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvdisk.device.base import Buffer
from kvdisk.errors import ConfigError
from kvdisk.geometry import ALIGNMENT, HEADER_BYTES

if TYPE_CHECKING:
    import torch


class SlotMemory(ABC):
    """A region of slots for each size class, one behind the other; in host memory or on a GPU.

    ``slot_sizes``: bytes of a slot by size class, multiples of 4096. ``slot_counts``: slots of each
    class; 0 is allowed. ``total_bytes``: at least 4096.
    """

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
        # An empty mapping is an error to the kernel, an empty tier is not one to us.
        self.total_bytes = max(total_bytes, ALIGNMENT)

    @property
    @abstractmethod
    def memory(self) -> Buffer:
        """All of it, for ``Device.attach_memory``."""

    @abstractmethod
    def tensor(self, size_class: int) -> torch.Tensor:
        """Return all slots of a class, sharing the memory: uint8 (slot_count, slot_bytes)."""

    def view(self, size_class: int, index: int, count: int = 1) -> Buffer:
        """Return ``count`` neighbouring slots from ``index`` on, as one view: writable bytes, 4
        KiB-aligned."""
        assert 0 <= index <= self.slot_counts[size_class] - count, (size_class, index, count)
        slot_bytes = self.slot_sizes[size_class]
        start = self._offsets[size_class] + index * slot_bytes
        return self.memory[start : start + count * slot_bytes]


class Arena(SlotMemory):
    """One private anonymous mapping. Any thread may ask for views.

    ``pin``: take all of it from the NUMA node of the process's current GPU and register it with
    CUDA; otherwise memory is taken as slots are first written. A view or tensor that outlives the
    arena keeps the mapping alive. Raises ConfigError where the memory cannot be had or pinned.
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
        self._pinned_address = 0
        if pin:
            self._pin()

    @property
    def memory(self) -> memoryview:
        """See ``SlotMemory``."""
        assert self._memory is not None, "the arena is closed"
        return self._memory

    def tensor(self, size_class: int) -> torch.Tensor:
        """See ``SlotMemory``."""
        import torch

        size, count = self.slot_sizes[size_class], self.slot_counts[size_class]
        # Through numpy, whose array holds the mapping open; torch.frombuffer would not.
        array = np.frombuffer(self.memory, np.uint8, size * count, self._offsets[size_class])
        return torch.from_numpy(array.reshape(count, size))

    def close(self) -> None:
        """Unregister from CUDA, and give the memory back with the last view of it. Idempotent.

        No copy and no batch may be in flight.
        """
        if self._pinned_address:
            import torch

            torch.cuda.cudart().cudaHostUnregister(self._pinned_address)
            self._pinned_address = 0
        self._memory = None

    def _pin(self) -> None:
        try:
            import torch
        except ImportError as error:
            raise ConfigError("pinned host memory needs torch with CUDA") from error
        if not torch.cuda.is_available():
            raise ConfigError("pinned host memory needs CUDA, and torch finds no CUDA device")
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        whole = np.frombuffer(self.memory, np.uint8)
        with running_on(processors_near(properties)):
            whole[::ALIGNMENT] = 0  # memory comes from where it is first touched
            status = int(torch.cuda.cudart().cudaHostRegister(whole.ctypes.data, self.total_bytes, 0))
        if status != 0:
            raise ConfigError(f"CUDA cannot pin {self.total_bytes} bytes of host memory (error {status})")
        self._pinned_address = whole.ctypes.data


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


@contextlib.contextmanager
def running_on(processors: set[int]) -> Iterator[None]:
    """Run this thread on those of these processors that it may use, if there are any."""
    before = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, processors & before or before)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)
