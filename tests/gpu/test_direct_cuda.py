# SPDX-License-Identifier: Apache-2.0
"""Stores and loads of a mover on a real GPU, through pinned memory and straight, over one segment
on a real drive. Without GPUDirect the straight way bounces off host memory at the device, and all
else of it runs."""

from __future__ import annotations

import os
import random
from contextlib import ExitStack, closing

import gpu_measures
import pytest
import torch
from place import PIN, REHEARSED, make_lanes, random_bytes, synchronize
from support.addressed_device import view_of
from support.bounce_device import BounceDevice

from kvdisk.blocks import JobId, Slot, Tier, make_block_key
from kvdisk.device.gds import GdsDevice, gds_unavailable
from kvdisk.device.posix import PosixDevice
from kvdisk.geometry import Geometry, GroupGeometry, slot_offset
from kvdisk.messages import HomeSpec, Job, JobKind, Move, Plan, Reason, SegmentSpec
from kvdisk.worker.arena import Arena
from kvdisk.worker.copier import CudaCopier, LayerBlocks
from kvdisk.worker.direct import Direct
from kvdisk.worker.gpu_staging import GpuStaging
from kvdisk.worker.mover import Mover
from kvdisk.worker.resources import Resources
from kvdisk.worker.routes import OpenFile

pytestmark = pytest.mark.gpu
LAYERS, LAYER_BYTES, BLOCKS = 8, 32768, 64
GEOMETRY = Geometry((GroupGeometry(0, 16, LAYERS * LAYER_BYTES),), 1, 16)
SEGMENT = SegmentSpec(0, GEOMETRY.groups[0].slot_bytes, BLOCKS)


PINNED, BOUNCED, STRAIGHT = "through pinned memory", "bounced", "straight"
WAYS = (PINNED, BOUNCED, STRAIGHT)


def make_device(way: str):
    if way == STRAIGHT:
        why = "this is a CPU" if REHEARSED else gds_unavailable()
        if why is not None:
            pytest.skip(f"no GPUDirect Storage: {why}")
        return GdsDevice()
    if way == BOUNCED:
        return BounceDevice(PosixDevice(), tensor_in_host) if REHEARSED else BounceDevice(PosixDevice())
    return PosixDevice()


def tensor_in_host(place):
    return torch.frombuffer(view_of(place), dtype=torch.uint8)


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

    def give_back(self):
        return ()

    def close(self) -> None:
        os.close(self.fd)


class Worker:
    """A mover over random blocks, to be closed. ``way``: of what is staged."""

    def __init__(self, path, way: str) -> None:
        device, lanes = make_device(way), make_lanes()
        self.layers = list(random_bytes(LAYERS, BLOCKS, LAYER_BYTES).unbind(0))
        synchronize()
        sizes, every = GEOMETRY.slot_sizes, frozenset({0})
        with ExitStack() as undo:
            staging = undo.enter_context(closing(Arena(sizes, [16], pin=PIN)))
            direct = None
            if way != PINNED:
                direct = Direct(undo.enter_context(closing(GpuStaging(sizes, [16], lanes))), every, every)
            copier = CudaCopier([LayerBlocks(self.layers)], lanes, 4 << 20)
            resources = Resources(GEOMETRY, 0, {}, staging, copier, device, OneFile(path), direct)
            self.mover = undo.enter_context(closing(Mover(resources, io_deadline_s=60.0)))
            self.last = 0
            self.run(JobKind.OPEN_HOME, home=HomeSpec("ab" * 16, bytes(32)))
            self.run(JobKind.OPEN_SEGMENT, segment=SEGMENT)
            self._undo = undo.pop_all()

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

    def differing(self, before: dict[int, bytes]) -> list[int]:
        """Return the blocks that are not as before. Where there are some pytest would otherwise
        spell megabytes of them out, for longer than a test may last."""
        return [block for block in range(BLOCKS) if self.payload(block) != before[block]]

    def erase(self) -> None:
        for layer in self.layers:
            layer.fill_(0xEE)
        synchronize()

    def close(self) -> None:
        self._undo.close()


def moves(order) -> list[Move]:
    return [Move(make_block_key(b.to_bytes(32, "big"), 0), 7, (b,), {Tier.NVME: Slot(0, b)}) for b in order]


@pytest.mark.parametrize("stored", WAYS)
@pytest.mark.parametrize("loaded", WAYS)
def test_what_one_way_stores_the_other_loads(tmp_path, stored, loaded):
    with closing(Worker(tmp_path / "segment", stored)) as worker:
        before = {block: worker.payload(block) for block in range(BLOCKS)}
        assert worker.run(JobKind.STORE, moves(random.Random(0).sample(range(BLOCKS), BLOCKS))) == {}
    with closing(Worker(tmp_path / "segment", loaded)) as other:
        other.erase()
        assert other.differing(before) == list(range(BLOCKS))
        order = random.Random(1).sample(range(BLOCKS), BLOCKS)
        assert other.run(JobKind.LOAD, moves(order)) == {}
        assert other.differing(before) == []


@pytest.mark.parametrize("way", WAYS)
def test_a_flipped_bit_on_the_drive_is_refused_alone(tmp_path, way):
    with closing(Worker(tmp_path / "segment", way)) as worker:
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


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("block_bytes", [16 << 10, 512 << 10], ids=["gathered", "straight"])
@pytest.mark.parametrize("shape", gpu_measures.SHAPES, ids=lambda shape: shape.name)
def test_a_thousand_blocks_come_back_from_memory(shape, block_bytes, threads):
    """Of slots in any order, sealed and verified on threads."""
    count = 100 if REHEARSED else 1000
    with (
        closing(gpu_measures.Memory(make_lanes(), shape, block_bytes, count * block_bytes)) as memory,
        closing(memory.route(threads)) as route,
    ):
        route.check()
