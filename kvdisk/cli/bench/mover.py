# SPDX-License-Identifier: Apache-2.0
"""Stores and loads through the real mover, between a GPU and NVMe or the CPU tier.

Needs torch. Without a GPU its blocks lie in host memory.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from kvdisk.blocks import JobId, Slot, Tier, make_block_key
from kvdisk.cli.bench.cases import Case, Flow, Part
from kvdisk.device.base import Buffer, Device
from kvdisk.errors import KvdiskError
from kvdisk.geometry import FINGERPRINT_BYTES, HEADER_BYTES, SEGMENT_HEADER_BYTES, Geometry, GroupGeometry
from kvdisk.messages import HomeSpec, Job, JobKind, Move, Plan, SegmentSpec
from kvdisk.worker.arena import Arena
from kvdisk.worker.mover import Mover
from kvdisk.worker.routes import Resources

if TYPE_CHECKING:
    from kvdisk.worker.copier import Copier, Lanes

LAYERS = 32
"""Of the model that the blocks belong to. vLLM keeps each layer in a tensor of its own."""
_STAGING_BYTES, _LEAST_STAGING_SLOTS = 64 << 20, 8
_SCRATCH_BYTES = 64 << 20
_JOB_BYTES = 64 << 20
_DEADLINE_S = 600.0
_BLOCK_TOKENS = 16
_FILL_BYTES = 1 << 20


def has_torch() -> bool:
    """Whether torch can be loaded. Loads it, which takes a while."""
    try:
        import kvdisk.worker.copier  # noqa: F401
    except ImportError:
        return False
    return True


def find_gpu() -> tuple[Lanes | None, str]:
    """Return a GPU, or None and why there is none. Needs torch."""
    from kvdisk.worker.copier import CudaLanes

    try:
        return CudaLanes(), ""
    except (AssertionError, RuntimeError) as error:  # torch was built without CUDA, or finds no GPU
        return None, str(error)


def blocks_of(file_bytes: int, block_bytes: int) -> int:
    """Return how many slots of such blocks a segment of this length holds."""
    return (file_bytes - SEGMENT_HEADER_BYTES) // (block_bytes + HEADER_BYTES)


def fill(memory: Buffer) -> None:
    """Fill memory with bytes that no drive compresses, the same in every run."""
    generator = np.random.default_rng(2)
    for start in range(0, memory.nbytes, _FILL_BYTES):
        chunk = memory[start : start + _FILL_BYTES]
        chunk[:] = generator.bytes(chunk.nbytes)


class Unmeasured(KvdiskError):
    """The mover cannot be measured. The message is a sentence that says why."""


class _OneFile:
    """``SegmentFiles`` of one segment. The file stays its opener's."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def open_home(self, spec: HomeSpec) -> None:
        """See ``SegmentFiles``."""

    def open_segment(self, spec: SegmentSpec) -> int:  # noqa: ARG002
        """See ``SegmentFiles``."""
        return self._fd

    def drop_segment(self, spec: SegmentSpec) -> None:
        """See ``SegmentFiles``."""

    def close(self) -> None:
        """See ``SegmentFiles``."""


class MoverRun:
    """A mover over ``device``, which becomes its own, and slots in the file ``fd``.

    One thread calls. ``lanes``: of the GPU; None: its blocks are in host memory. All blocks of the case are stored at
    once, so that they can be loaded. Raises Unmeasured where a move fails, ConfigError where there
    is too little memory, ImportError without torch.
    """

    def __init__(self, device: Device, fd: int, case: Case, lanes: Lanes | None = None) -> None:
        count, block_bytes = case.block_count, case.block_bytes
        geometry = Geometry((GroupGeometry(0, _BLOCK_TOKENS, block_bytes),), 1, _BLOCK_TOKENS)
        slot_bytes, on_nvme = geometry.slot_sizes[0], case.part is Part.MOVER
        pin = lanes is not None and lanes.device.type == "cuda"
        staging_slots = max(_LEAST_STAGING_SLOTS, _STAGING_BYTES // slot_bytes)
        self._arenas = [Arena([block_bytes], [count], pin=False), Arena([slot_bytes], [staging_slots], pin=pin)]
        if not on_nvme:
            self._arenas.append(Arena([slot_bytes], [count], pin=pin))
        cpu = None if on_nvme else self._arenas[-1]
        copier = self._copier(case, lanes)
        resources = Resources(geometry, 0, cpu, self._arenas[1], copier, device, _OneFile(fd))
        self._mover = Mover(resources, io_deadline_s=_DEADLINE_S)
        keys = [make_block_key(number.to_bytes(32, "big"), 0) for number in range(count)]
        slots = [Slot(0, at) for at in range(count)]
        self._moves = [Move(key, 7, at, {Tier.NVME if on_nvme else Tier.CPU: slots[at]}) for at, key in enumerate(keys)]
        self._job_moves = max(1, _JOB_BYTES // block_bytes)
        self._last_job = 0
        self._kind = JobKind.LOAD if case.flow is Flow.LOAD else JobKind.STORE
        try:
            if on_nvme:
                home = HomeSpec("0" * 32, bytes(FINGERPRINT_BYTES))
                self._run([self._job(JobKind.OPEN_HOME, home=home)])
                self._run([self._job(JobKind.OPEN_SEGMENT, segment=SegmentSpec(0, slot_bytes, count))])
            self._run(self._jobs(JobKind.STORE))
        except BaseException:
            self.close()
            raise

    def move(self) -> None:
        """Load, or store, all blocks of the case once."""
        self._run(self._jobs(self._kind))

    def close(self) -> None:
        """End the mover and its device, and give the memory back. Idempotent."""
        self._mover.close()
        for arena in self._arenas:
            arena.close()

    def _copier(self, case: Case, lanes: Lanes | None) -> Copier:
        from kvdisk.worker.copier import CudaCopier, HostCopier, LayerBlocks

        blocks = self._arenas[0]
        fill(blocks.memory)
        flat = blocks.tensor(0).view(-1)
        if lanes is not None:
            flat = flat.to(lanes.device)
        layers = [layer.view(case.block_count, -1) for layer in flat.chunk(LAYERS)]
        groups = [LayerBlocks(layers)]
        return HostCopier(groups) if lanes is None else CudaCopier(groups, lanes, _SCRATCH_BYTES)

    def _jobs(self, kind: JobKind) -> list[Job]:
        moves, most = self._moves, self._job_moves
        return [self._job(kind, tuple(moves[start : start + most])) for start in range(0, len(moves), most)]

    def _job(
        self,
        kind: JobKind,
        moves: tuple[Move, ...] = (),
        *,
        home: HomeSpec | None = None,
        segment: SegmentSpec | None = None,
    ) -> Job:
        self._last_job += 1
        return Job(JobId(self._last_job), kind, moves, home=home, segment=segment)

    def _run(self, jobs: list[Job]) -> None:
        """Have the mover run these jobs, and return when all have ended."""
        self._mover.submit(Plan(tuple(jobs)), self._mover.compute_done())
        running = {job.id for job in jobs}
        deadline = time.monotonic() + _DEADLINE_S
        while running:
            self._mover.wait_any(1.0)
            for job_id, result in self._mover.poll().results.items():
                if result.failed:
                    reason = next(iter(result.failed.values()))
                    raise Unmeasured(f"{len(result.failed)} moves failed in the mover, the first with {reason.name}.")
                running.discard(job_id)
            if time.monotonic() > deadline:
                raise Unmeasured("the mover does not come to an end.")
