# SPDX-License-Identifier: Apache-2.0
"""NVMe to CPU to GPU and back, through the real mover. The GPU's blocks lie in host memory. Needs torch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from kvdisk.blocks import JobId, Slot, make_block_key
from kvdisk.cli.bench.cases import Case, Flow, Sample, Unmeasured
from kvdisk.cli.bench.rounds import timed
from kvdisk.cli.bench.stand import fill
from kvdisk.device.base import Device
from kvdisk.geometry import FINGERPRINT_BYTES, HEADER_BYTES, SEGMENT_HEADER_BYTES, Geometry, GroupGeometry
from kvdisk.messages import HomeSpec, Job, JobKind, Move, Plan, SegmentSpec
from kvdisk.worker import slot_headers
from kvdisk.worker.arena import Arena
from kvdisk.worker.mover import Mover
from kvdisk.worker.routes import Resources

LAYERS = 32
"""Of the model that the blocks are of; each lies in a part of its own of the GPU's memory, as vLLM has it."""
_STAGING_BYTES, _LEAST_STAGING_SLOTS = 64 << 20, 8
_JOB_BYTES = 64 << 20
_DEADLINE_S = 600.0
_BLOCK_TOKENS = 16
_FINGERPRINT = bytes(FINGERPRINT_BYTES)


def blocks_of(file_bytes: int, block_bytes: int) -> int:
    """Return how many slots of such blocks a file of this length holds, the segment's header included."""
    return (file_bytes - SEGMENT_HEADER_BYTES) // (block_bytes + HEADER_BYTES)


class _OneFile:
    """``SegmentFiles`` of one segment: the file of the run."""

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
        """See ``SegmentFiles``; the file is the run's."""


class MoverRun:
    """A mover over ``device``, which becomes its own, and slots in the file ``fd``, which stays the caller's.

    All blocks of the case are stored once at the start, so that they can be loaded. ``cpu_tier``: with slots for all
    of them in memory too, for ``promote``. One thread calls. Raises Unmeasured where a move fails, ConfigError where
    memory cannot be had, ImportError without torch.
    """

    def __init__(self, device: Device, fd: int, case: Case, *, cpu_tier: bool = False) -> None:
        from kvdisk.worker.copier import HostCopier, LayerBlocks

        count, block_bytes = case.block_count, case.block_bytes
        geometry = Geometry((GroupGeometry(0, _BLOCK_TOKENS, block_bytes),), 1, _BLOCK_TOKENS)
        slot_bytes = geometry.slot_sizes[0]
        staging_slots = max(_LEAST_STAGING_SLOTS, _STAGING_BYTES // slot_bytes)
        self._gpu = Arena([block_bytes], [count], pin=False)
        self._staging = Arena([slot_bytes], [staging_slots], pin=False)
        self._cpu = Arena([slot_bytes], [count], pin=False) if cpu_tier else None
        fill(self._gpu.memory)
        flat = self._gpu.tensor(0).view(-1)
        layer_bytes = block_bytes // LAYERS
        part = count * layer_bytes
        layers = [flat[at * part : (at + 1) * part].view(count, layer_bytes) for at in range(LAYERS)]
        copier = HostCopier([LayerBlocks(layers)])
        files = _OneFile(fd)
        resources = Resources(geometry, 0, self._cpu, self._staging, copier, device, files)
        self._mover = Mover(resources, io_deadline_s=_DEADLINE_S)
        self._next_job = 0
        keys = [make_block_key(number.to_bytes(32, "big"), 0) for number in range(count)]
        self._staged = [Move(key, 7, at, None, Slot(0, at)) for at, key in enumerate(keys)]
        self._promoted = [Move(key, 7, -1, Slot(0, at), Slot(0, at)) for at, key in enumerate(keys)]
        self._job_moves = max(1, _JOB_BYTES // block_bytes)
        self._case = case
        try:
            home = HomeSpec("0" * 32, _FINGERPRINT)
            self._run([self._job(JobKind.OPEN_HOME, home=home)])
            self._run([self._job(JobKind.OPEN_SEGMENT, segment=SegmentSpec(0, slot_bytes, count))])
            self._run(self._jobs(JobKind.STORE, self._staged))
        except BaseException:
            self.close()
            raise

    def measure(self, passes: int) -> Sample:
        """Load all blocks of the case so many times, or store them, as its flow says."""
        assert self._case.flow is not Flow.MIXED
        kind = JobKind.LOAD if self._case.flow is Flow.READ else JobKind.STORE
        return self._measure(kind, self._staged, passes)

    def measure_unverified(self, passes: int) -> Sample:
        """As ``measure``, and nothing that was read is verified: for what that costs."""
        with _unverified():
            return self.measure(passes)

    def promote(self, passes: int) -> Sample:
        """Read all blocks of the case into the CPU tier, verified, so many times."""
        return self._measure(JobKind.PROMOTE, self._promoted, passes)

    def close(self) -> None:
        """End the mover and its device, and give the memory back. Idempotent."""
        self._mover.close()
        for arena in (self._gpu, self._staging, self._cpu):
            if arena is not None:
                arena.close()

    def _measure(self, kind: JobKind, moves: list[Move], passes: int) -> Sample:
        jobs = [self._jobs(kind, moves) for _ in range(passes)]

        def move() -> None:
            for one in jobs:
                self._run(one)

        return timed(move)

    def _jobs(self, kind: JobKind, moves: list[Move]) -> list[Job]:
        return [
            self._job(kind, moves=tuple(moves[start : start + self._job_moves]))
            for start in range(0, len(moves), self._job_moves)
        ]

    def _job(
        self,
        kind: JobKind,
        *,
        moves: tuple[Move, ...] = (),
        home: HomeSpec | None = None,
        segment: SegmentSpec | None = None,
    ) -> Job:
        self._next_job += 1
        return Job(JobId(self._next_job), kind, moves, home=home, segment=segment)

    def _run(self, jobs: Iterable[Job]) -> None:
        """Let the mover run these jobs, and return when all have ended."""
        mine = tuple(jobs)
        self._mover.submit(Plan(mine), self._mover.compute_done())
        out = {job.id for job in mine}
        deadline = time.monotonic() + _DEADLINE_S
        while out:
            self._mover.wait_any(1.0)
            for job_id, result in self._mover.poll().results.items():
                if result.failed:
                    reason = next(iter(result.failed.values()))
                    raise Unmeasured(f"{len(result.failed)} moves failed in the mover, the first with {reason.name}.")
                out.discard(job_id)
            if time.monotonic() > deadline:
                raise Unmeasured("the mover does not come to an end.")


@contextmanager
def _unverified() -> Iterator[None]:
    """Let the movers of this process take what they read for good. They have only slots of a measurement to read."""
    rooms = vars(slot_headers)
    real = rooms["check_slot"]
    rooms["check_slot"] = lambda *_: None
    try:
        yield
    finally:
        rooms["check_slot"] = real
