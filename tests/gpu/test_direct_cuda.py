# SPDX-License-Identifier: Apache-2.0
"""Stores and loads of a mover on a real GPU, through pinned memory and straight, over one segment
on a real drive."""

from __future__ import annotations

import os
import random

import pytest
import torch

from kvdisk.blocks import JobId, Slot, Tier, make_block_key
from kvdisk.device.gds import GdsDevice, gds_unavailable
from kvdisk.device.posix import PosixDevice
from kvdisk.geometry import Geometry, GroupGeometry, slot_offset
from kvdisk.messages import HomeSpec, Job, JobKind, Move, Plan, Reason, SegmentSpec
from kvdisk.worker.arena import Arena
from kvdisk.worker.copier import CudaCopier, CudaLanes, LayerBlocks
from kvdisk.worker.direct import Direct
from kvdisk.worker.gpu_staging import GpuStaging
from kvdisk.worker.mover import Mover
from kvdisk.worker.routes import OpenFile, Resources

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
LAYERS, LAYER_BYTES, BLOCKS = 8, 32768, 64
GEOMETRY = Geometry((GroupGeometry(0, 16, LAYERS * LAYER_BYTES),), 1, 16)
SEGMENT = SegmentSpec(0, GEOMETRY.groups[0].slot_bytes, BLOCKS)


def make_lanes():
    return CudaLanes()


def make_device(direct: bool):
    return GdsDevice() if direct else PosixDevice()


class OneFile:
    """The one segment of these tests."""

    def __init__(self, path) -> None:
        self.path = path
        self.fd = -1

    def open_home(self, spec) -> None:
        pass

    def open_segment(self, spec) -> OpenFile:
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self.fd, 0, slot_offset(spec.slot_bytes, spec.slot_count))
        return OpenFile(self.fd, spec.slot_bytes, spec.slot_count)

    def drop_segment(self, spec) -> None:
        pass

    def give_back(self) -> None:
        pass

    def close(self) -> None:
        os.close(self.fd)


class Worker:
    """A mover over random blocks. ``direct``: what is staged goes straight."""

    def __init__(self, path, *, direct: bool) -> None:
        lanes = make_lanes()
        self.layers = list(
            torch.randint(0, 256, (LAYERS, BLOCKS, LAYER_BYTES), dtype=torch.uint8, device=GPU).unbind(0)
        )
        self.staging = Arena(GEOMETRY.slot_sizes, [16], pin=GPU.type == "cuda")
        every = frozenset({0})
        self.direct = Direct(GpuStaging(GEOMETRY.slot_sizes, [16], lanes), every, every) if direct else None
        copier = CudaCopier([LayerBlocks(self.layers)], lanes, 4 << 20)
        resources = Resources(GEOMETRY, 0, None, self.staging, copier, make_device(direct), OneFile(path), self.direct)
        self.mover = Mover(resources, io_deadline_s=60.0)
        self.last = 0
        self.run(JobKind.OPEN_HOME, home=HomeSpec("ab" * 16, bytes(32)))
        self.run(JobKind.OPEN_SEGMENT, segment=SEGMENT)

    def run(self, kind: JobKind, moves=(), **fields) -> dict[int, Reason]:
        self.last += 1
        job = Job(JobId(self.last), kind, tuple(moves), **fields)
        self.mover.submit(Plan((job,)))
        while True:
            report = self.mover.poll()
            if job.id in report.results:
                return report.results[job.id].failed
            self.mover.wait_any(1.0)

    def payload(self, block: int) -> bytes:
        return b"".join(layer[block].cpu().numpy().tobytes() for layer in self.layers)

    def erase(self) -> None:
        for layer in self.layers:
            layer.fill_(0xEE)
        if GPU.type == "cuda":
            torch.cuda.synchronize()

    def close(self) -> None:
        self.mover.close()
        self.staging.close()
        if self.direct is not None:
            self.direct.staging.close()


@pytest.fixture(scope="module", autouse=True)
def here():
    why = gds_unavailable()
    if why is not None:
        pytest.skip(f"no GPUDirect Storage: {why}")


def moves(order) -> list[Move]:
    return [Move(make_block_key(b.to_bytes(32, "big"), 0), 7, b, {Tier.NVME: Slot(0, b)}) for b in order]


@pytest.mark.parametrize("stored_straight", [True, False])
@pytest.mark.parametrize("loaded_straight", [True, False])
def test_what_one_way_stores_the_other_loads(tmp_path, stored_straight, loaded_straight):
    worker = Worker(tmp_path / "segment", direct=stored_straight)
    before = {block: worker.payload(block) for block in range(BLOCKS)}
    assert worker.run(JobKind.STORE, moves(range(BLOCKS))) == {}
    worker.close()
    other = Worker(tmp_path / "segment", direct=loaded_straight)
    other.erase()
    order = random.Random(1).sample(range(BLOCKS), BLOCKS)
    assert other.run(JobKind.LOAD, moves(order)) == {}
    assert {block: other.payload(block) for block in range(BLOCKS)} == before
    other.close()


@pytest.mark.parametrize("direct", [True, False])
def test_a_flipped_bit_on_the_drive_is_refused_alone(tmp_path, direct):
    worker = Worker(tmp_path / "segment", direct=direct)
    before = {block: worker.payload(block) for block in range(BLOCKS)}
    assert worker.run(JobKind.STORE, moves(range(BLOCKS))) == {}
    worker.erase()
    with open(tmp_path / "segment", "r+b") as file:
        file.seek(slot_offset(SEGMENT.slot_bytes, 9) + 5000)
        was = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([was[0] ^ 4]))
        file.flush()
        os.fsync(file.fileno())
    assert worker.run(JobKind.LOAD, moves(range(BLOCKS))) == {9: Reason.CHECKSUM}
    assert set(worker.payload(9)) == {0xEE}
    assert all(worker.payload(block) == before[block] for block in range(BLOCKS) if block != 9)
    worker.close()
