# SPDX-License-Identifier: Apache-2.0
"""One device between memory and a file, driven as the mover drives it, for ``bench_tiers.py``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from kvdisk.cli.bench.cases import short_size
from kvdisk.device.base import Buffer, Device, Op, Transfer
from kvdisk.errors import DeviceError
from kvdisk.worker.runner import MOST_READS, PART_BYTES

LANES = MOST_READS
"""Batches that the mover has at a device at once."""


class Layout(Enum):
    """Where on the drive blocks lie that are moved one after the other."""

    CONTIGUOUS = "contiguous"
    SCATTERED = "scattered"


@dataclass(frozen=True)
class Case:
    """One thing to measure: so many blocks, each moved once, ``depth`` of them at a time."""

    op: Op
    layout: Layout
    block_bytes: int
    block_count: int

    @property
    def depth(self) -> int:
        """As many blocks as the mover has at the device at once, within reason."""
        return min(max(MOST_READS * PART_BYTES // self.block_bytes, 4), 256, self.block_count)

    @property
    def total_bytes(self) -> int:
        """Of one measurement."""
        return self.block_bytes * self.block_count

    @property
    def lane_blocks(self) -> int:
        """Blocks of a batch."""
        return -(-self.depth // min(LANES, self.depth))

    @property
    def bytes_in_flight(self) -> int:
        """Memory that the batches need at once."""
        return min(LANES, self.depth) * self.lane_blocks * self.block_bytes

    @property
    def words(self) -> str:
        """The case in words."""
        return f"{self.op.value} {short_size(self.block_bytes)} x {self.depth} {self.layout.value}"

    def order(self) -> list[int]:
        """Return the blocks in the order in which they are moved, the same in every run."""
        if self.layout is Layout.CONTIGUOUS:
            return list(range(self.block_count))
        return np.random.default_rng(1).permutation(self.block_count).tolist()


class DriveRun:
    """A device over a file. ``memory``, for the buffers, and ``fd`` stay the caller's."""

    def __init__(self, device: Device, fd: int, memory: Buffer) -> None:
        self.device = device
        self._fd = fd
        self._memory = memory
        device.attach_memory(memory)
        device.attach_file(fd)

    def move(self, case: Case) -> None:
        """Move every block of a case once. Raises DeviceError where a transfer failed."""
        device, order, most = self.device, case.order(), case.lane_blocks
        batches = (order[start : start + most] for start in range(0, len(order), most))
        free = list(range(min(LANES, case.depth)))
        lane_of: dict[int, int] = {}
        while True:
            while free and (blocks := next(batches, None)) is not None:
                lane = free.pop()
                lane_of[device.submit(case.op, self._transfers(case, lane * most, blocks))] = lane
            if not lane_of:
                return
            for outcome in device.poll(1.0):
                if outcome.errors:
                    device.drain()
                    raise DeviceError(next(iter(outcome.errors.values())), f"device {device.name}")
                free.append(lane_of.pop(outcome.ticket))

    def _transfers(self, case: Case, first: int, blocks: list[int]) -> list[Transfer]:
        """Return the transfers of a batch whose buffers begin at block ``first`` of the memory."""
        size, memory, fd = case.block_bytes, self._memory, self._fd
        if case.layout is Layout.CONTIGUOUS:  # neighbours are one transfer, as in the mover
            return [Transfer(fd, blocks[0] * size, (memory[first * size : (first + len(blocks)) * size],))]
        return [
            Transfer(fd, block * size, (memory[at * size : (at + 1) * size],))
            for at, block in enumerate(blocks, start=first)
        ]
