# SPDX-License-Identifier: Apache-2.0
"""One device between memory and a file, driven as the mover drives it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvdisk.cli.bench.cases import Case, Flow, Layout
from kvdisk.device.base import Buffer, Device, Op, Transfer
from kvdisk.device.probe import MAKERS
from kvdisk.errors import DeviceError, KvdiskError
from kvdisk.worker.runner import MOST_READS, PART_BYTES

LANES = MOST_READS
"""Batches that the mover has at a device at once."""
_SHALLOWEST, _DEEPEST = 4, 256
_WAIT_S = 1.0


def auto_depth(block_bytes: int) -> int:
    """Return how many blocks of this size the mover has at the device at once, within reason."""
    return min(max(MOST_READS * PART_BYTES // block_bytes, _SHALLOWEST), _DEEPEST)


def bytes_in_flight(depth: int, block_bytes: int) -> int:
    """Return the memory that the batches of a case need at once."""
    lanes = min(LANES, depth)
    return lanes * -(-depth // lanes) * block_bytes


def try_device(name: str) -> tuple[Device | None, str]:
    """Return a device, the caller's to close, or None and why there is none."""
    try:
        return MAKERS[name](), ""
    except (KvdiskError, ImportError, OSError, RuntimeError) as error:
        said = str(error).strip().splitlines()
        return None, said[0] if said else type(error).__name__


class DriveRun:
    """A device over a file. One thread calls.

    ``memory``: for the buffers, at least ``bytes_in_flight`` of a case. It and ``fd`` stay the caller's.
    """

    def __init__(self, device: Device, fd: int, memory: Buffer) -> None:
        self.device = device
        self._fd = fd
        self._memory = memory
        device.attach_memory(memory)
        device.attach_file(fd)

    def move(self, case: Case) -> None:
        """Move every block of a case once. Raises DeviceError where a transfer failed."""
        device = self.device
        lanes = min(LANES, case.depth)
        lane_blocks = -(-case.depth // lanes)
        batches = _batches(case, lane_blocks)
        free = list(range(lanes))
        lane_of: dict[int, int] = {}
        op = Op.READ if case.flow is Flow.READ else Op.WRITE
        try:
            while True:
                while free and (blocks := next(batches, None)) is not None:
                    lane = free.pop()
                    lane_of[device.submit(op, self._transfers(case, lane * lane_blocks, blocks))] = lane
                if not lane_of:
                    return
                for outcome in device.poll(_WAIT_S):
                    if outcome.errors:
                        raise DeviceError(next(iter(outcome.errors.values())), f"device {device.name}")
                    free.append(lane_of.pop(outcome.ticket))
        except BaseException:
            device.drain()
            raise

    def close(self) -> None:
        """Close the device. It waits for what is in flight."""
        self.device.close()

    def _transfers(self, case: Case, first: int, blocks: list[int]) -> list[Transfer]:
        """Return the transfers of a batch whose buffers begin at block ``first`` of the memory."""
        size, memory, fd = case.block_bytes, self._memory, self._fd
        if case.layout is Layout.CONTIGUOUS:  # neighbours are one transfer, as in the mover
            return [Transfer(fd, blocks[0] * size, (memory[first * size : (first + len(blocks)) * size],))]
        return [
            Transfer(fd, block * size, (memory[at * size : (at + 1) * size],))
            for at, block in enumerate(blocks, start=first)
        ]


def _batches(case: Case, most: int) -> Iterator[list[int]]:
    order = block_order(case)
    return (order[start : start + most] for start in range(0, len(order), most))


def block_order(case: Case) -> list[int]:
    """Return the blocks of a case in the order in which they are moved, the same in every run."""
    if case.layout is Layout.CONTIGUOUS:
        return list(range(case.block_count))
    order: list[int] = np.random.default_rng(1).permutation(case.block_count).tolist()
    return order
