# SPDX-License-Identifier: Apache-2.0
"""The trial of the way between drive and GPU: what is chosen by which speeds, and what a way that
lies comes to."""

from __future__ import annotations

import errno

import pytest
from ranks import CpuLanes
from support.addressed_device import AddressedDevice
from support.memory_device import MemoryDevice

from kvdisk.device.base import GpuRange, Op
from kvdisk.geometry import HEADER_BYTES
from kvdisk.testing.faulty_device import FaultPlan, FaultyDevice
from kvdisk.worker import direct as directs
from kvdisk.worker.arena import Arena
from kvdisk.worker.direct import try_direct
from kvdisk.worker.gpu_staging import GpuStaging

SIZES = (HEADER_BYTES + 8192, HEADER_BYTES + 65536)
FILE_BYTES = 1 << 20


@pytest.fixture
def memories():
    arena, staging = Arena(SIZES, (6, 5), pin=False), GpuStaging(SIZES, (5, 6), CpuLanes())
    yield arena, staging
    arena.close()
    staging.close()


class Paced(AddressedDevice):
    """Bytes in RAM, at a speed for each op, way, and whether slots are neighbours; in bytes per
    second."""

    def __init__(self, speeds) -> None:
        super().__init__(MemoryDevice(file_bytes=FILE_BYTES))
        self.speeds = speeds
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def submit(self, op, batch):
        direct = isinstance(batch[0].buffers[0], GpuRange)
        self.registered = []
        moved = sum(buffer.nbytes for item in batch for buffer in item.buffers)
        self.now_s += moved / self.speeds(op, direct, len(batch) == 1)
        return super().submit(op, batch)


FAST, SLOW = 4e8, 1e8


@pytest.mark.parametrize(
    ("speeds", "loads", "stores"),
    [
        (lambda op, direct, run: FAST if direct else SLOW, {0, 1}, {0, 1}),
        (lambda op, direct, run: SLOW if direct else FAST, set(), set()),
        (lambda op, direct, run: FAST if direct and op is Op.READ else SLOW, {0, 1}, set()),
        (lambda op, direct, run: FAST if direct and op is Op.WRITE else SLOW, set(), {0, 1}),
        (lambda op, direct, run: FAST if direct == run else SLOW, set(), set()),
    ],
    ids=["faster", "slower", "faster for reads", "faster for writes", "slower for single slots"],
)
def test_what_is_faster_is_chosen_by_direction(memories, monkeypatch, speeds, loads, stores):
    device = Paced(speeds)
    monkeypatch.setattr(directs, "time", device)
    report = try_direct(7, FILE_BYTES, device, *memories)
    assert (report.loads, report.stores, report.problems) == (loads, stores, [])
    assert len(report.speeds) == 2 * 2 * 2
    line = report.line(SIZES)
    assert ("moves nothing straight" in line) == (not loads | stores)
    assert ("loads of 12288, 69632 bytes" in line) == bool(loads)
    assert ("stores of 12288, 69632 bytes" in line) == bool(stores)
    assert "into host memory" in line


class Lying(AddressedDevice):
    """Moves something else where buffers are a GPU's."""

    def __init__(self, inner, op: Op) -> None:
        super().__init__(inner)
        self.op = op

    def submit(self, op, batch):
        if op is self.op and isinstance(batch[0].buffers[0], GpuRange):
            batch = [item._replace(offset=item.offset + 4096) for item in batch]
        return super().submit(op, batch)


@pytest.mark.parametrize(("op", "said"), [(Op.READ, "read"), (Op.WRITE, "written")])
def test_a_way_that_moves_other_bytes_is_not_gone(memories, op, said):
    report = try_direct(7, FILE_BYTES, Lying(MemoryDevice(file_bytes=FILE_BYTES), op), *memories)
    assert not report.loads | report.stores
    assert [problem for problem in report.problems if f"what was {said} straight is not" in problem] == report.problems
    assert len(report.problems) == 2
    assert f"what was {said} straight" in report.line(SIZES)


@pytest.mark.parametrize("which", [1, 3, 4])
def test_a_way_that_fails_is_not_gone(memories, which):
    """The first transfer is written straight, the fourth is read so; an error of the host's says
    nothing for it."""
    device = FaultyDevice(MemoryDevice(file_bytes=FILE_BYTES), FaultPlan(fail={which: errno.EIO}))
    report = try_direct(7, FILE_BYTES, AddressedDevice(device), *memories)
    (problem,) = report.problems
    assert problem.startswith("of 12288 bytes a ")
    assert ("in host memory" in problem) == (which == 3)
    assert 0 not in report.loads | report.stores
    assert {each.size_class for each in report.speeds} == {1}
