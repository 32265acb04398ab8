# SPDX-License-Identifier: Apache-2.0
"""The engine and the worker of ``run_week``: without a model, a GPU and bytes of KV.

The manager, its index in LMDB with its process, the engine store and the segment files are the
product's. The worker knows of each slot which block it holds, and writes a sealed header where a
block goes to NVMe, with a payload of a few bytes. So whoever reads a slot can say whether the
manager has named the right one, and ``kvdisk verify`` can say it of the files at the end.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from kvdisk.assembly import SchedulerHalf, assemble_scheduler
from kvdisk.blocks import BlockKey, JobId, Slot, Tier, make_block_keys
from kvdisk.cli.replay.engine import GpuPool
from kvdisk.config import Config
from kvdisk.device.header import SlotIdentity, check_slot, seal_slot
from kvdisk.errors import KvdiskError
from kvdisk.geometry import HEADER_BYTES, Geometry, Namespace, slot_offset
from kvdisk.identity import Identity
from kvdisk.manager.requests import NO_LIMITS, KVHint, RequestLimits
from kvdisk.messages import Job, JobKind, JobResult, Move, Plan, Reason, Report, SegmentSpec
from kvdisk.worker.files import FILE_KINDS, HomeFiles
from kvdisk.worker.request_loads import RequestLoads

READ_IN_FULL = 256
"""One in so many reads of a drive looks at the file, too."""
TIMED = 7
"""One step in so many is timed: the clock takes as long as some calls."""
LONGEST_STEPS = 20_000
"""Steps that a request may take, or a quiet end: what takes longer hangs."""
MOST_STUCK = 500
"""Steps in a row in which requests wait and none runs."""


class Held(NamedTuple):
    """What a slot holds."""

    key: BlockKey
    generation: int
    epoch: int


ROTTEN = Held(BlockKey(b""), -1, -1)
"""The drive has lost what was there."""
Drive = dict[int, list[Held | None]]
"""What the slots of each segment of the engine store hold. It outlives a process."""


@dataclass
class Faults:
    """What goes wrong, as likelihoods: of a job that some of its moves fail (``fails``), that some
    are late (``late``), of a block written that the drive loses it (``rots``). ``is_off``: every
    transfer of the drive fails. ``counts``: what has gone wrong, by name."""

    rng: random.Random
    fails: float = 0.0
    late: float = 0.0
    rots: float = 0.0
    is_off: bool = False
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def happens(self, name: str, likelihood: float) -> bool:
        """Whether it does; counts it."""
        if not likelihood or self.rng.random() >= likelihood:
            return False
        self.counts[name] += 1
        return True


class Worker:
    """One rank. ``gpu``: what each GPU block holds; None: something else."""

    def __init__(
        self, config: Config, geometry: Geometry, fingerprint: bytes, drive: Drive, gpu_blocks: int, faults: Faults
    ) -> None:
        self.gpu: list[BlockKey | None] = [None] * gpu_blocks
        self._geometry = geometry
        self._fingerprint = fingerprint
        self._drive = drive
        self._faults = faults
        self._cpu: dict[Slot, Held | None] = {}
        self._files = HomeFiles(config.store_dirs or None, 0, 1)
        self._fds: dict[int, int] = {}
        self._step = 0
        self._jobs: dict[JobId, tuple[int, Job]] = {}
        """With the step in which they end."""
        self._void: set[JobId] = set()
        self._late: deque[tuple[int, Job, list[int]]] = deque()
        self._loads = RequestLoads()
        self._report = Report()
        self._slot = bytearray(HEADER_BYTES + geometry.groups[0].payload_bytes)

    # -- steps ---------------------------------------------------------------------------------

    def before_forward(self, plan: Plan) -> None:
        """Take in a plan: copy what the model is about to overwrite, and begin the rest."""
        self._step += 1
        self._begin(plan.jobs_before)
        for job_id in (*plan.urgent, *plan.fence):
            if job_id in self._jobs:
                self._end(self._jobs.pop(job_id)[1])
        self._begin(plan.jobs_beside)
        self._loads.void(plan.void)
        self._void.update(job_id for job_id in plan.void if job_id in self._jobs)

    def after_forward(self, plan: Plan) -> None:
        """Begin the stores of what the model has computed, and end what is due."""
        self._begin(plan.jobs_after)
        for job_id in [job_id for job_id, (due, _) in self._jobs.items() if due <= self._step]:
            self._end(self._jobs.pop(job_id)[1])
        while self._late and self._late[0][0] <= self._step:
            self._end_late(*self._late.popleft()[1:])

    @property
    def any(self) -> bool:
        """Whether anything is under way, or late."""
        return bool(self._jobs or self._late or self._report.results or self._report.released)

    def take_report(self) -> tuple[Report, dict[str, list[int]]]:
        """Return what ended since the last call, and the requests whose loads did, each with the
        blocks that failed."""
        report, self._report = self._report, Report()
        ended = {}
        for job_id, result in report.results.items():
            if job_id in self._loads:
                ended[job_id] = sorted(result.failed)
        return report, self._loads.end(ended)

    def close(self, *, killed: bool = False) -> None:
        """End. ``killed``: what is under way is lost; else it ends first."""
        for _, job in self._jobs.values():
            if not killed or self._faults.rng.random() < 0.5:
                self._end(job)
        for _, job, late in self._late:
            self._end_late(job, late)
        for fd in self._fds.values():
            os.close(fd)
        self._files.close()

    # -- jobs ----------------------------------------------------------------------------------

    def _begin(self, jobs: Sequence[Job]) -> None:
        self._loads.begin(jobs)
        for job in jobs:
            if job.kind in FILE_KINDS:
                reason = self._run_file_job(job)
                self._report.results[job.id] = JobResult(1, {} if reason is None else {-1: reason})
            else:
                self._jobs[job.id] = self._step + self._faults.rng.choice((0, 0, 0, 1, 1, 3)), job

    def _end(self, job: Job) -> None:
        if job.id in self._void:
            self._void.discard(job.id)
            self._report.results[job.id] = JobResult(1, dict.fromkeys(range(len(job.moves)), Reason.CANCELLED))
            return
        faults, failed, late = self._faults, {}, set[int]()
        on_drive = [at for at, move in enumerate(job.moves) if Tier.NVME in move.slots]
        if on_drive and faults.is_off:
            faults.counts["jobs while a drive is off"] += 1
            failed = dict.fromkeys(on_drive, Reason.IO_ERROR)
        elif on_drive and faults.happens("failed jobs", faults.fails):
            failed = {at: Reason.IO_ERROR for at in on_drive if faults.rng.random() < 0.3}
        elif on_drive and faults.happens("late jobs", faults.late):
            late = {at for at in on_drive if faults.rng.random() < 0.3}
            failed = dict.fromkeys(late, Reason.DEADLINE)
            if late:
                self._late.append((self._step + 40, job, sorted(late)))
        for at, move in enumerate(job.moves):
            if at not in failed:
                reason = self._run(job, move)
                if reason is not None:
                    failed[at] = reason
            elif at not in late and job.kind is JobKind.DEMOTE:
                self._write(move, None)  # torn
        self._report.results[job.id] = JobResult(1, failed, late, 1 if late else 0)

    def _end_late(self, job: Job, positions: Sequence[int]) -> None:
        """Let what was given up end: it touches its slots, and nobody looks."""
        for at in positions:
            move = job.moves[at]
            if job.kind is JobKind.DEMOTE:
                self._write(move, self._cpu[move.slots[Tier.CPU]])
            elif Tier.CPU in move.slots:
                segment, index = move.slots[Tier.NVME]
                self._cpu[move.slots[Tier.CPU]] = self._drive[segment][index]
        self._report.released[job.id] = 1

    def _run(self, job: Job, move: Move) -> Reason | None:
        slots, right = move.slots, Held(move.key, move.generation, job.epoch)
        if job.kind is JobKind.STORE:
            assert self.gpu[move.gpu_blocks[0]] == move.key, (
                f"a store of {move.key!r} finds {self.gpu[move.gpu_blocks[0]]!r}"
            )
            if Tier.CPU in slots:
                self._cpu[slots[Tier.CPU]] = right
            else:
                self._write(move, right)
            return None
        if job.kind is JobKind.DEMOTE:
            held = self._cpu.get(slots[Tier.CPU])
            assert held == right, f"a demotion of {right} finds {held}"
            self._write(move, ROTTEN if self._faults.happens("lost blocks", self._faults.rots) else held)
            return None
        if Tier.NVME in slots:
            reason = self._read(slots[Tier.NVME], right)
            if reason is not None:
                return reason
            if Tier.CPU in slots:
                self._cpu[slots[Tier.CPU]] = right
        elif Tier.CPU in slots:
            held = self._cpu.get(slots[Tier.CPU])
            assert held == right, f"a load of {right} from memory finds {held}"
        else:
            return Reason.ABSENT
        if job.kind is JobKind.LOAD:
            self.gpu[move.gpu_blocks[0]] = move.key
        return None

    def _read(self, slot: Slot, right: Held) -> Reason | None:
        """Look what a slot on a drive holds; one in READ_IN_FULL in the file, too."""
        if slot.segment not in self._fds:
            return Reason.IO_ERROR
        held = self._drive[slot.segment][slot.index]
        if held is ROTTEN:
            return Reason.CHECKSUM
        assert held == right, f"a read of {right} from {slot} finds {held}"
        if self._faults.rng.randrange(READ_IN_FULL) == 0:
            found = memoryview(os.pread(self._fds[slot.segment], len(self._slot), self._offset(slot)))
            reason = check_slot(found, self._identity(held))
            assert reason is None, f"{slot}: the file does not hold {held}: {reason}"
        return None

    def _write(self, move: Move, held: Held | None) -> None:
        """Write a block to its slot on a drive; None, ROTTEN: something else comes there."""
        slot = move.slots[Tier.NVME]
        self._drive[slot.segment][slot.index] = held
        if held is None or held is ROTTEN:
            os.pwrite(self._fds[slot.segment], bytes(HEADER_BYTES), self._offset(slot))
            return
        seal_slot(memoryview(self._slot), self._identity(held), move.parent)
        os.pwrite(self._fds[slot.segment], self._slot, self._offset(slot))

    def _identity(self, held: Held) -> SlotIdentity:
        namespace = Namespace(self._fingerprint, held.epoch)
        return SlotIdentity(namespace, held.key, held.generation, self._geometry.groups[0].payload_bytes, 0, 1)

    def _offset(self, slot: Slot) -> int:
        return slot_offset(self._geometry.slot_sizes[0], slot.index)

    # -- files ---------------------------------------------------------------------------------

    def _run_file_job(self, job: Job) -> Reason | None:
        try:
            if job.kind is JobKind.OPEN_HOME:
                assert job.home is not None
                self._files.open_home(job.home)
                for segment in self._drive.keys() - set(job.home.known_segments):
                    del self._drive[segment]
                return None
            assert job.segment is not None
            if job.kind is JobKind.DROP_SEGMENT:
                self._drop(job.segment)
                return None
            return self._open(job.segment)
        except KvdiskError:
            return Reason.IO_ERROR

    def _open(self, spec: SegmentSpec) -> Reason | None:
        if self._faults.is_off:
            return Reason.IO_ERROR
        opened = self._files.open_segment(spec)
        assert opened is not None
        self._fds[spec.segment] = os.open(f"/proc/self/fd/{opened.fd}", os.O_RDWR)  # not O_DIRECT
        if spec.create:
            self._drive[spec.segment] = [None] * spec.slot_count
        return None

    def _drop(self, spec: SegmentSpec) -> None:
        for job_id, (_, job) in list(self._jobs.items()):
            if any(move.slots[Tier.NVME].segment == spec.segment for move in job.moves if Tier.NVME in move.slots):
                self._end(self._jobs.pop(job_id)[1])
        self._files.drop_segment(spec)
        if spec.segment in self._fds:
            os.close(self._fds.pop(spec.segment))
        self._drive.pop(spec.segment, None)


# -- requests and the engine -------------------------------------------------------------------


class Asked(NamedTuple):
    """A request as it comes. ``hashes``: of its full blocks; behind them is half a block."""

    time_s: float
    family: str
    hashes: list[bytes]
    outputs: int = 1
    limits: RequestLimits = NO_LIMITS
    kv_hints: tuple[KVHint, ...] = ()


@dataclass(eq=False, slots=True)
class Request:
    """A request in the engine. ``gpu_tokens``: whose KV is there; ``local``: blocks that the
    GPU had; ``is_loading``: a load is out; ``is_gone``: it was aborted meanwhile."""

    id: str
    asked: Asked
    keys: list[BlockKey]
    tokens: int
    came_step: int
    blocks: list[int] = field(default_factory=list)
    gpu_tokens: int = 0
    local: int = 0
    outputs: int = 0
    is_loading: bool = False
    is_gone: bool = False


class Times:
    """Processor time of the manager's calls, by kind, in seconds, of one step in TIMED; without
    Python's collector, which walks this tool's objects, too."""

    def __init__(self) -> None:
        self.by_kind: dict[str, list[float]] = defaultdict(list)
        self._steps = 0
        self._step_s = 0.0
        self._collecting_s = self._collected_s = 0.0
        gc.callbacks.append(self._collect)

    def close(self) -> None:
        """Take no more times."""
        gc.callbacks.remove(self._collect)

    def _collect(self, phase: str, _: object) -> None:
        now_s = time.thread_time()
        if phase == "start":
            self._collecting_s = now_s
        else:
            self._collected_s += now_s - self._collecting_s

    @contextmanager
    def of(self, kind: str) -> Iterator[None]:
        """Take the time of what runs within."""
        if self._steps % TIMED:
            yield
            return
        start_s = time.thread_time() - self._collected_s
        yield
        seconds = time.thread_time() - self._collected_s - start_s
        self.by_kind[kind].append(seconds)
        self._step_s += seconds

    def end_step(self) -> None:
        """Note what all calls of a step took together."""
        if self._steps % TIMED == 0:
            self.by_kind["step"].append(self._step_s)
        self._steps += 1
        self._step_s = 0.0

    def take(self) -> dict[str, list[float]]:
        """Return what was taken since the last call."""
        found, self.by_kind = self.by_kind, defaultdict(list)
        return found


class _Pool(GpuPool):
    """A ``GpuPool`` whose cache can be emptied."""

    def forget_all(self) -> None:
        """Forget what is cached: the weights have changed."""
        self._cached.clear()
        for block in self._blocks:
            block.key = None
        self._reused += sorted(self._watched)
        self._watched.clear()


@dataclass(frozen=True)
class EngineSettings:
    """``at_once``: requests that run or load at once. ``step_tokens``: of a request in a step."""

    gpu_blocks: int = 4096
    at_once: int = 16
    step_tokens: int = 16_384
    step_s: float = 0.02
    most_waiting: int = 64


class Engine:
    """Serves requests as vLLM does: several at once, with a prefix cache, preemptions and failed
    loads. Takes an engine store; one thread calls everything.

    ``clock``: seconds since the Unix epoch when ``now`` is 0. ``counts``: what has happened.
    """

    def __init__(
        self,
        config: Config,
        geometry: Geometry,
        drive: Drive,
        faults: Faults,
        settings: EngineSettings,
        clock: tuple[float, float],
        fingerprint: bytes = b"w" * 32,
    ) -> None:
        self.settings = settings
        self._epoch_s, self.now = clock
        self._block_tokens = geometry.groups[0].block_tokens
        step_blocks = settings.step_tokens // self._block_tokens * settings.at_once
        self.pool = _Pool(settings.gpu_blocks, step_blocks, caches=True)
        identity = Identity.certain(fingerprint, {"model": "week"})
        self.parts: SchedulerHalf = assemble_scheduler(config, geometry, self.pool, identity)
        self.manager = self.parts.manager
        self.journal = self.manager.publish()
        self.worker = Worker(config, geometry, fingerprint, drive, settings.gpu_blocks, faults)
        self.faults = faults
        self.times = Times()
        self.counts: dict[str, int] = defaultdict(int)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.loading: dict[str, Request] = {}
        self.steps = 0
        self._number = self._stuck_steps = 0
        self._preempted: list[str] = []
        """By a reset since the last step."""
        self.on_request: Callable[[], object] = lambda: None
        """Called for each request that has ended: a seam for tests."""

    # -- requests ------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether no more requests shall come."""
        return len(self.waiting) >= self.settings.most_waiting

    @property
    def any(self) -> bool:
        """Whether there is any request."""
        return bool(self.waiting or self.running or self.loading)

    def add(self, asked: Asked) -> None:
        """Let a request come."""
        self._number += 1
        keys = make_block_keys(asked.hashes, 0)
        tokens = len(keys) * self._block_tokens + self._block_tokens // 2
        request = Request(f"{asked.family} {self._number}", asked, keys, tokens, self.steps)
        self.waiting.append(request)
        self.counts["requests"] += 1
        self.counts["prompt tokens"] += tokens
        self.counts["blocks"] += len(keys)
        with self.times.of("arrival"):
            self.manager.new_request(request.id, asked.hashes, tokens, self.now, asked.limits)
            if asked.kv_hints:
                self.manager.hint(request.id, asked.kv_hints, self.now)

    def abort(self, request: Request) -> None:
        """End a request where it is."""
        self.counts["aborted"] += 1
        self._forget(request)
        if request.is_loading:
            request.is_gone = True
            return  # its blocks are the load's until that has ended
        (self.running if request in self.running else self.waiting).remove(request)
        self._free(request)

    def _forget(self, request: Request) -> None:
        with self.times.of("end"):
            self.manager.request_finished(request.id)
        if self.parts.trace is not None:
            self.parts.trace.add(self._epoch_s + self.now, request.outputs, request.asked.hashes)
        self.on_request()

    def _free(self, request: Request) -> None:
        self.pool.free_blocks(reversed(request.blocks))
        request.blocks, request.gpu_tokens = [], 0

    # -- steps ---------------------------------------------------------------------------------

    def step(self) -> None:
        """Run a step."""
        manager, worker = self.manager, self.worker
        self.steps += 1
        self.now += self.settings.step_s
        self.parts.mailbox.work()
        with self.times.of("note time"):
            manager.note_time(self._now_s)
        preempted, self._preempted = self._preempted, []
        scheduled = self._schedule_running(preempted)
        self._stuck_steps = 0 if scheduled or self.loading or not self.waiting else self._stuck_steps + 1
        assert self._stuck_steps < MOST_STUCK, f"{self.waiting[0].id} waits, and nothing runs"
        if not preempted:
            self._schedule_waiting(scheduled)
        if preempted:
            with self.times.of("preempt"):
                manager.preempt(preempted, self.now)
        with self.times.of("store"):
            wanted = [(each, tokens) for each, tokens in scheduled if manager.note_scheduled(each.id, tokens)]
            manager.plan_stores([(each.id, tokens, [each.blocks]) for each, tokens in wanted], self.now)
        computed = sum(tokens - request.gpu_tokens for request, tokens in scheduled)
        with self.times.of("plan"):
            plan = manager.take_plan(self.now, idle=not scheduled, scheduled_tokens=computed)
        worker.before_forward(plan)
        for request, tokens in scheduled:
            self._compute(request, tokens)
        worker.after_forward(plan)
        report, loads = worker.take_report()
        invalid = {block for blocks in loads.values() for block in blocks}
        with self.times.of("settle"):
            if invalid:
                manager.note_invalid_blocks(invalid, report)
            manager.settle(report, self.now, self._now_s)
        for name, failed in loads.items():
            self._end_load(self.loading.pop(name), failed)
        for request, _ in scheduled:
            self._sample(request)
        if self.journal.waits:
            self.journal.take()
        self.parts.telemetry.take(self.now)
        self.times.end_step()

    @property
    def _now_s(self) -> int:
        return int(self._epoch_s + self.now)

    def _schedule_running(self, preempted: list[str]) -> list[tuple[Request, int]]:
        """Return what runs in this step, each with the tokens whose KV is there when it is over."""
        scheduled: list[tuple[Request, int]] = []
        for request in list(self.running):
            if request not in self.running:
                continue
            tokens = min(request.gpu_tokens + self.settings.step_tokens, request.tokens + request.outputs)
            while not self._take(request, tokens):
                victim = self.running.pop()
                preempted.append(victim.id)
                self.counts["preempted"] += 1
                self._free(victim)
                self.waiting.appendleft(victim)
                if victim is request:
                    return scheduled
            scheduled.append((request, tokens))
        return [(request, tokens) for request, tokens in scheduled if request in self.running]

    def _take(self, request: Request, tokens: int) -> bool:
        """Give a request blocks for so many tokens; False where too few are free."""
        missing = -(-tokens // self._block_tokens) - len(request.blocks)
        if missing > self.pool.free_count:
            return False
        if missing > 0:
            request.blocks += self.pool.take(missing)
        return True

    def _schedule_waiting(self, scheduled: list[tuple[Request, int]]) -> None:
        for request in list(self.waiting):
            if len(self.running) + len(self.loading) >= self.settings.at_once:
                return
            if request.gpu_tokens == 0:
                answer = self._look_up(request)
                if answer is None:
                    continue
                if answer is False:
                    return
                if request.is_loading:
                    self.waiting.remove(request)
                    self.loading[request.id] = request
                    continue
            tokens = min(request.gpu_tokens + self.settings.step_tokens, request.tokens)
            if not self._take(request, tokens):
                if not self.running and not self.loading and not scheduled:
                    for other in self.waiting:  # they hold each other up
                        self._free(other)
                return
            self.waiting.remove(request)
            self.running.append(request)
            scheduled.append((request, tokens))

    def _look_up(self, request: Request) -> bool | None:
        """Look for a hit, and begin its load. None: ask again; False: there is no room for it."""
        pool = self.pool
        local = pool.hit(request.keys)
        local_tokens = len(local) * self._block_tokens
        with self.times.of("lookup"):
            tokens = self.manager.lookup(request.id, local_tokens, request.tokens, self.now)
        if tokens is None or tokens // self._block_tokens > pool.free_count:
            self.counts["lookups that wait"] += tokens is None
            pool.free_blocks(reversed(local))
            return None if tokens is None else False
        request.blocks = local
        if tokens:
            request.blocks = local + pool.take(tokens // self._block_tokens)
            with self.times.of("load"):
                blocks = [0] * len(local) + request.blocks[len(local) :]
                self.manager.plan_load(request.id, local_tokens, tokens, [blocks])
            request.is_loading = True
            self.counts["hit blocks"] += tokens // self._block_tokens
        request.gpu_tokens, request.local = local_tokens + tokens, len(local)
        self.counts["local blocks"] += len(local)
        return True

    def _compute(self, request: Request, tokens: int) -> None:
        """Let the model read what a request has, and write what it computes."""
        gpu, keys, blocks = self.worker.gpu, request.keys, request.blocks
        first, last = request.gpu_tokens // self._block_tokens, min(tokens // self._block_tokens, len(keys))
        found = [gpu[block] for block in blocks[:first]]
        assert found == keys[:first], f"{request.id} reads what is not its own"
        for at in range(first, -(-tokens // self._block_tokens)):
            gpu[blocks[at]] = keys[at] if at < last else None
        self.pool.cache(keys[first:last], blocks[first:last])
        request.gpu_tokens = tokens

    def _end_load(self, request: Request, failed: Sequence[int]) -> None:
        request.is_loading = False
        if request.is_gone:
            self._free(request)
            return
        if failed:
            self.counts["failed loads"] += 1
            bad = set(failed)
            first = next((at for at, block in enumerate(request.blocks) if block in bad), None)
            if first is not None:
                request.gpu_tokens = first * self._block_tokens
                self.pool.free_blocks(reversed(request.blocks[first:]))
                del request.blocks[first:]
        count = request.gpu_tokens // self._block_tokens
        self.pool.cache(request.keys[:count], request.blocks[:count])
        self.waiting.appendleft(request)

    def _sample(self, request: Request) -> None:
        if request.gpu_tokens < request.tokens:
            self._check_age(request)
            return
        request.outputs += 1
        if request.outputs < min(request.asked.outputs, self._block_tokens // 2 - 1):
            return
        self.running.remove(request)
        with self.times.of("store"):
            if self.manager.note_scheduled(request.id, request.gpu_tokens):
                self.manager.plan_store(request.id, request.gpu_tokens, [request.blocks], self.now)
        self._forget(request)
        self._free(request)
        self.counts["ended"] += 1

    def _check_age(self, request: Request) -> None:
        assert self.steps - request.came_step < LONGEST_STEPS, f"{request} does not end"

    # -- what happens to it --------------------------------------------------------------------

    def reset(self, epoch: int) -> None:
        """Change the weights: what is computed is forgotten, and running requests start again."""
        self.counts["resets"] += 1
        while self.running:
            victim = self.running.pop()
            self._preempted.append(victim.id)
            self._free(victim)
            self.waiting.appendleft(victim)
        for request in [request for request in self.waiting if request.gpu_tokens]:
            self._free(request)
        for request in [request for request in self.loading.values() if request.local]:
            self.abort(request)  # a part of it is of the old weights; the others' loads fail whole
        self.pool.forget_all()
        self.manager.reset(epoch)
        self.worker.gpu[:] = [None] * len(self.worker.gpu)

    def kill_index(self) -> None:
        """Kill the process that has the index open."""
        assert self.parts.index is not None
        pid = self.parts.index.pid
        if pid is not None:
            self.counts["index killed"] += 1
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def run_until_quiet(self) -> None:
        """Step until nothing is left to do, no commit either."""
        index = self.parts.index
        for _ in range(LONGEST_STEPS):
            if not self.any:
                if index is not None:
                    index.flush(60.0)
                self.manager.commit()
                if not self.manager.has_pending_work(self.now) and not self.worker.any:
                    return
            self.step()
        queued = [request.id for request in (*self.running, *self.loading.values(), *self.waiting)]
        raise AssertionError(f"it never becomes quiet: {queued[:9]}, {self.manager.gauges.read()}")

    def close(self) -> None:
        """End well."""
        self.times.close()
        self.worker.close()
        self.parts.close()

    def kill(self) -> None:
        """End as a killed process does: what is not committed is lost, and HOME says nothing."""
        parts = self.parts
        assert parts.index is not None and parts.home is not None
        self.times.close()
        parts.index._tables.kill()
        parts.home.release()
        self.worker.close(killed=True)
        for background in parts.backgrounds:
            background.close()
        if parts.neighbours is not None:
            parts.neighbours.close()
        with suppress(KvdiskError):
            parts.index.close()
