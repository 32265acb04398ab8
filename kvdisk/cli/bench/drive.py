# SPDX-License-Identifier: Apache-2.0
"""CPU to NVMe and back: each device that can be made, driven as the mover drives it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator

import numpy as np

from kvdisk.cli.bench.cases import Case, Flow, Layout, Sample
from kvdisk.cli.bench.rounds import timed
from kvdisk.cli.bench.settings import DEVICES
from kvdisk.device.base import Buffer, Device, Op, Transfer
from kvdisk.errors import DeviceError, KvdiskError
from kvdisk.worker.runner import MOST_READS, PART_BYTES

LANES = MOST_READS
"""Batches that a device has at once, as from the mover."""
AUTO_BYTES = MOST_READS * PART_BYTES
"""Bytes under way where no depth is given: as many as the mover has at the device."""
_SHALLOWEST, _DEEPEST = 4, 256
_WAIT_S = 1.0


def auto_depth(block_bytes: int) -> int:
    """Return how many blocks of this size the mover has at the device at once, within reason."""
    return min(max(AUTO_BYTES // block_bytes, _SHALLOWEST), _DEEPEST)


def under_way_bytes(depth: int, block_bytes: int) -> int:
    """Return the memory that a case's batches need at once."""
    lanes = min(LANES, depth)
    return lanes * -(-depth // lanes) * block_bytes


def try_device(name: str) -> tuple[Device | None, str]:
    """Return a device, the caller's to close, or None and why there is none."""
    module, kind = DEVICES[name]
    try:
        return getattr(importlib.import_module(module), kind)(), ""
    except (KvdiskError, ImportError, OSError, RuntimeError) as error:
        said = str(error).strip().splitlines()
        return None, said[0] if said else type(error).__name__


class DriveRun:
    """One device over the file of a run.

    ``memory``: what buffers are taken from, the caller's, attached here; at least as long as the bytes that a case has
    under way. ``fd`` stays the caller's. One thread calls.
    """

    def __init__(self, device: Device, fd: int, memory: Buffer) -> None:
        self.device = device
        self._fd = fd
        self._memory = memory
        device.attach_memory(memory)
        device.attach_file(fd)

    def measure(self, case: Case, passes: int) -> Sample:
        """Move every block of a case, so many times. Raises DeviceError where a transfer failed."""
        order = block_order(case)
        return timed(lambda: self._move(case, order, passes))

    def close(self) -> None:
        """Close the device, which waits for what is under way."""
        self.device.close()

    def _move(self, case: Case, order: list[int], passes: int) -> None:
        device = self.device
        lanes = min(LANES, case.depth)
        waiting = self._batches(case, order, passes, -(-case.depth // lanes))
        free = list(range(lanes))
        lane_of: dict[int, int] = {}
        try:
            while True:
                while free:
                    lane = free[-1]
                    batch = next(waiting, None)
                    if batch is None:
                        break
                    op, blocks = batch
                    lane_of[device.submit(op, self._transfers(case, lane * -(-case.depth // lanes), blocks))] = lane
                    free.pop()
                if not lane_of:
                    return
                for outcome in device.poll(_WAIT_S):
                    if outcome.errors:
                        number = next(iter(outcome.errors.values()))
                        raise DeviceError(number, f"device {device.name}")
                    free.append(lane_of.pop(outcome.ticket))
        except BaseException:
            device.drain()
            raise

    def _batches(self, case: Case, order: list[int], passes: int, most: int) -> Iterator[tuple[Op, list[int]]]:
        """Yield direction and blocks of each batch."""
        number = 0
        for _ in range(passes):
            for start in range(0, len(order), most):
                writes = case.flow is Flow.WRITE or (case.flow is Flow.MIXED and number % 2 == 1)
                yield Op.WRITE if writes else Op.READ, order[start : start + most]
                number += 1

    def _transfers(self, case: Case, first: int, blocks: list[int]) -> list[Transfer]:
        """Return the transfers of a batch, whose buffers lie from block ``first`` of the memory on."""
        size, memory, fd = case.block_bytes, self._memory, self._fd
        if case.layout is Layout.CONTIGUOUS:  # neighbours travel as one, as in the mover
            view = memory[first * size : (first + len(blocks)) * size]
            return [Transfer(fd, blocks[0] * size, (view,))]
        return [
            Transfer(fd, block * size, (memory[at * size : (at + 1) * size],))
            for at, block in enumerate(blocks, start=first)
        ]


def bare_loop(case: Case, fd: int, memory: Buffer, passes: int) -> Sample:
    """Read every block of a case with a system call of its own, one after the other: the least that Python can do.

    Raises DeviceError where a read fails.
    """
    buffers, size = [memory[: case.block_bytes]], case.block_bytes

    def move() -> None:
        for _ in range(passes):
            for offset in range(0, case.total_bytes, size):
                if os.preadv(fd, buffers, offset) != size:
                    raise DeviceError(5, "a short read")

    return timed(move)


def block_order(case: Case) -> list[int]:
    """Return the blocks of a case in the order in which they are moved, the same in every run."""
    if case.layout is Layout.CONTIGUOUS:
        return list(range(case.block_count))
    order: list[int] = np.random.default_rng(1).permutation(case.block_count).tolist()
    return order
