# SPDX-License-Identifier: Apache-2.0
"""One rank's wing over small tensors, for the mover's tests: two groups whose payloads differ."""

from __future__ import annotations

import threading
from collections.abc import Collection

import torch
from support.addressed_device import AddressedDevice, CpuLanes
from support.faulty_device import FaultyDevice
from support.memory_device import MemoryDevice
from support.sim_rank import staging_is_free
from support.waits import WAIT_S

from kvdisk.blocks import BY_KEY, JobId, Slot, Tier, make_block_key
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.messages import HomeSpec, Job, JobKind, JobResult, Move, Plan, SegmentSpec
from kvdisk.remote.base import Objects
from kvdisk.stats import Stats
from kvdisk.worker.arena import Arena
from kvdisk.worker.copier import CudaCopier, HostCopier, LayerBlocks
from kvdisk.worker.direct import Direct
from kvdisk.worker.gpu_staging import GpuStaging
from kvdisk.worker.mover import Mover
from kvdisk.worker.resources import Resources
from kvdisk.worker.routes import OpenFile

GPU_BLOCKS = 48
LAYERS = (3, 1)
LAYER_BYTES = (2048, 1000)
GROUPS = tuple(
    GroupGeometry(group, 16, count * size) for group, (count, size) in enumerate(zip(LAYERS, LAYER_BYTES, strict=True))
)
GEOMETRY = Geometry(GROUPS, 1, 16)
FINGERPRINT = bytes(range(32))


def segment_of(group: int) -> SegmentSpec:
    """The segment that the tests keep a group's blocks in: its number is the group's."""
    return SegmentSpec(group, GROUPS[group].slot_bytes, GPU_BLOCKS)


class NamedFiles:
    """``SegmentFiles`` for a device whose descriptors are only names. ``slow``: the opening of each
    of these waits for its event, and sets ``opening``."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.slow: dict[int, threading.Event] = {}
        self.opening = threading.Event()
        self.closed = False

    def open_home(self, spec: HomeSpec) -> None:
        self.calls.append(f"home {spec.home_id[:4]}")

    def open_segment(self, spec: SegmentSpec) -> OpenFile:
        if spec.segment in self.slow:
            self.opening.set()
            assert self.slow[spec.segment].wait(600.0)
        self.calls.append(f"open {spec.segment}")
        return OpenFile(100 + spec.segment, spec.slot_bytes, spec.slot_count, spec.drive)

    def drop_segment(self, spec: SegmentSpec) -> None:
        self.calls.append(f"drop {spec.segment}")

    def give_back(self) -> Collection[int]:
        self.calls.append("give back")
        return ()

    def close(self) -> None:
        self.closed = True


class Rank:
    """A mover that ``run`` turns, over random KV and a faulty device over bytes in RAM.

    ``direct``: what is staged goes through GPU staging, over CPU tensors, of as many slots.
    ``on_gpu``: the copier is that of GPUs, over CPU tensors.
    """

    def __init__(
        self,
        *,
        cpu_slots: int = GPU_BLOCKS,
        staging_slots: int = 8,
        files=None,
        copier=None,
        threaded: bool = False,
        home: HomeSpec | None = None,
        direct: bool = False,
        remote: Objects | None = None,
        on_gpu: bool = False,
        checksum_threads: int = 0,
        geometry: Geometry = GEOMETRY,
    ) -> None:
        sizes = GEOMETRY.slot_sizes
        generator = torch.Generator().manual_seed(100)
        self.layers = [
            [torch.randint(0, 256, (GPU_BLOCKS, size), dtype=torch.uint8, generator=generator) for _ in range(count)]
            for count, size in zip(LAYERS, LAYER_BYTES, strict=True)
        ]
        self.now_s = 0.0
        self.memory = MemoryDevice()
        self.device = FaultyDevice(self.memory)
        self.files = files or NamedFiles()
        classes = len(sizes)
        self.arena = Arena(sizes, [cpu_slots] * classes, pin=False) if cpu_slots else None
        self.staging = Arena(sizes, [staging_slots] * classes, pin=False)
        self.classes = GEOMETRY.size_classes
        self.direct = None
        if direct:
            every = frozenset(range(classes))
            self.direct = Direct(GpuStaging(sizes, [staging_slots] * classes, CpuLanes()), every, every)
        groups = [LayerBlocks(layers) for layers in self.layers]
        resources = Resources(
            geometry,
            0,
            {} if self.arena is None else {Tier.CPU: self.arena},
            self.staging,
            copier or (CudaCopier(groups, CpuLanes(), 0) if on_gpu else HostCopier(groups)),
            AddressedDevice(self.device) if direct else self.device,
            self.files,
            self.direct,
            remote,
            checksum_threads,
        )
        self.mover = Mover(
            resources, io_deadline_s=10.0, clock=lambda: self.now_s, batch_bytes=4 * max(sizes), threaded=threaded
        )
        self.last_job = 0
        self.results: dict[int, JobResult] = {}
        self.released: dict[int, int] = {}
        self.stats = Stats()
        home = home or HomeSpec("ab" * 16, FINGERPRINT)
        opened = [self.job(JobKind.OPEN_HOME, home=home)]
        opened += [self.job(JobKind.OPEN_SEGMENT, segment=segment_of(group)) for group in range(len(GROUPS))]
        self.opening = [int(job.id) for job in opened]
        self.mover.submit(Plan(tuple(opened)))

    def job(self, kind: JobKind, moves=(), **fields) -> Job:
        self.last_job += 1
        return Job(JobId(self.last_job), kind, tuple(moves), **fields)

    def submit(self, kind: JobKind, moves=(), **fields) -> int:
        job = self.job(kind, moves, **fields)
        self.mover.submit(Plan((job,)))
        return int(job.id)

    def run(self) -> dict[int, JobResult]:
        """Turn until nothing happens; return all results so far, each job's once."""
        while self.mover.turn():
            pass
        return self.poll()

    def poll(self) -> dict[int, JobResult]:
        report = self.mover.poll()
        for job_id, result in report.results.items():
            assert job_id not in self.results, f"job {job_id} was reported twice"
            self.results[job_id] = result
        for job_id, ranks in report.released.items():
            assert job_id not in self.released, f"job {job_id} was released twice"
            assert self.results[job_id].late, f"job {job_id} was released, and nothing of it was late"
            self.released[job_id] = ranks
        self.stats.merge(report.stats)
        return self.results

    def await_jobs(self, *job_ids: int) -> None:
        """Wait until the mover's thread has ended these jobs."""
        while not set(job_ids) <= set(self.poll()):
            assert self.mover.wait_any(WAIT_S)

    def do(self, kind: JobKind, moves=(), **fields) -> dict[int, int]:
        """Run one job to its end; return its failed moves."""
        job_id = self.submit(kind, moves, **fields)
        return self.run()[job_id].failed

    def stored(self, count: int, segments: tuple[int, ...] = ()) -> list[Move]:
        """Store blocks 0.. to the same numbers on the drive, and erase them; return the moves that
        load them.

        ``segments``: of each of them, where that is not the group's.
        """
        places = segments or [0] * count
        moves = [move(block, 0, block, nvme=block, segment=places[block]) for block in range(count)]
        assert self.do(JobKind.STORE, moves) == {}
        self.erase()
        return moves

    def let_go(self) -> None:
        """Let the device end what it holds, and hold nothing more."""
        self.device.plan.hold = False
        self.device.release()

    def close(self) -> None:
        """End the mover; all staging was given back, unless a test has ended it."""
        self.let_go()
        if not self.mover._ended:
            self.run()
            assert staging_is_free(self.mover._runner), "staging is lost"
        self.mover.close()

    def cpu(self, group: int, index: int) -> Slot:
        return Slot(self.classes[group], index)

    def payload(self, group: int, block: int) -> bytes:
        return b"".join(bytes(layer[block].numpy()) for layer in self.layers[group])

    def erase(self) -> None:
        """Overwrite the blocks, as a model that goes on does."""
        for layer in (layer for layers in self.layers for layer in layers):
            layer.fill_(0xEE)

    def is_erased(self, group: int, block: int) -> bool:
        return set(self.payload(group, block)) == {0xEE}


def move(
    number: int,
    group: int = 0,
    block: int = -1,
    cpu=None,
    nvme: int | None = None,
    segment: int = -1,
    *,
    remote: bool = False,
    **fields,
) -> Move:
    """Block ``number`` of a group; ``nvme``: index in a segment, which is the group's unless
    given."""
    slots = {Tier.CPU: cpu, Tier.NVME: None if nvme is None else Slot(segment if segment >= 0 else group, nvme)}
    slots = {tier: slot for tier, slot in slots.items() if slot is not None}
    if remote:
        slots[Tier.REMOTE] = BY_KEY
    return Move(
        make_block_key(number.to_bytes(32, "big"), group), fields.pop("generation", 7), (block,), slots, **fields
    )


def keeping(move: Move, slot: Slot) -> Move:
    """Return a load's move that leaves a copy in this CPU slot."""
    return move._replace(slots={**move.slots, Tier.CPU: slot})
