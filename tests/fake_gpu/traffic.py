# SPDX-License-Identifier: Apache-2.0
"""Random requests on a live engine whose ranks are on the fake GPU, with missing waits as failures:
``python -m fake_gpu.traffic --variant NAME --seeds 0 20``.

Manager, workers, movers, files and index are the real ones. A seed is right when every block that a
request read, or that a load has filled, held what it must, when no two operations touched the same
bytes without an order between them, when the host touched nothing that a copy was at work on, when
no copy was at work on memory that was given back, and when all slots of all tiers, and what the GPU
has cached, hold their blocks in the end.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zlib import crc32

import torch
from support.bounce_device import BounceDevice
from support.live_audit import audit, audit_memory
from support.live_engine import LiveEngine
from support.live_load import LiveLoad, LoadShape
from support.live_model import LiveModel
from support.live_rank import WrongBytesError

from fake_gpu import control
from fake_gpu.gpu_rank import GpuRank, slow_record
from fake_gpu.host_watch import WatchedObjects, host_watched
from fake_gpu.unit_model import TextRequest, UnitModel
from kvdisk.config import Config
from kvdisk.device.base import Device, Op, Transfer
from kvdisk.device.base import Outcome as DeviceOutcome
from kvdisk.device.posix import PosixDevice
from kvdisk.worker.copier import CudaLanes
from kvdisk.worker.cudart import forget_error
from kvdisk.worker.mover import Mover
from kvdisk.worker.runner import Runner

HANGS_S = 600
"""What takes so long hangs, on however busy a machine."""
ORDERS = ("mixed", "late", "contrary", "random", "eager")
OUT_OF_MEMORY, INVALID, ILLEGAL_ACCESS, LAUNCH_FAILURE = 2, 1, 700, 719
_OF_THREADS = {"cudaGetDevice", "cudaSetDevice", "cudaGetDeviceCount", "cudaGetLastError", "cudaPeekAtLastError"}
"""Calls that say what a thread knows: a GPU that is broken lets them go well."""
_OFTEN = 0.3
_AT_WORK_S = 0.05
_ASLEEP_S = 0.005
_SLOW_S = 0.004
_IO_DEADLINE_S, _HANGS_S = 0.2, 0.3
_LETTERS, _REUSING_TOKENS = "abcdefghijklmnop", 60
_FORGETFUL = LoadShape(forgets=0.15)
_EVICTING = LoadShape(forgets=0.0)
_LONG = LoadShape(forgets=0.15, most_tokens=240, at_once=4)
_RESETTING = LoadShape(forgets=0.1, resets=0.03)


@dataclass(frozen=True, slots=True)
class Variant:
    """How traffic goes.

    ``order``: in which the fake GPU works (see ``runtime.cpp``); "": one of ``ORDERS``, by the seed
    and the name. ``late``, ``apart``: see ``GpuRank``. ``devices``: each rank's GPU.
    ``small_scratch``: the copier's scratch has one slot a lane, and room for one block number.
    ``straight``: rows of any size go without scratch. ``staged``: drives and GPU move blocks
    straight, through a device that bounces. ``triton``: it sums payloads there, by its interpreter,
    of which nobody knows what it touches; otherwise torch does, faster. ``slow_copies``: the mover
    takes copies for unfinished for a while, some longer than others. ``slow_turns``: its thread has
    to wait for a processor now and then. ``batch_slots``: of the
    largest size in a batch; 0: as many as kvdisk wants. ``piece_bytes``: that are pinned at once;
    0: as many as kvdisk wants. ``remote``: there is a remote store. ``zeroes``: see ``FakeEngine``;
    its races are meant (decision 29), so that bytes alone count.

    ``fence_s``: how long a step waits for copies to begin; None: as long as kvdisk wants.
    ``captures``: likelihood that the model captures CUDA graphs in a step; it does so at the start,
    too.

    ``unit``: blocks of the GPU that are one of kvdisk's. ``sleeps``: likelihood, per step, that the
    engine sleeps once it has no request. ``hangs``: likelihood that a batch is late at the drive.
    ``halts``: engines that are closed in the midst of their work have been switched off before.

    ``again``: so many prompts are served once more at the end. ``fails``: calls of the runtime of
    which some fail, with their codes. ``fails_for_good``: such of which none goes well from some
    step on. ``breaks``: from some step on all calls fail; then another engine goes on with the
    store. ``reuses``: so many prompts come first, each as soon as the blocks of the one before may
    be overwritten. ``closes``: engines of that store that are closed in the midst of their work
    before that. ``values``: of the configuration. ``environment``: variables that the process must
    have been started with.
    """

    name: str
    order: str = ""
    requests: int = 25
    late: int = 1
    apart: bool = True
    devices: Sequence[int] = (0,)
    windowed: bool = False
    small_scratch: bool = False
    straight: bool = False
    staged: bool = False
    triton: bool = False
    slow_copies: bool = False
    slow_turns: bool = False
    batch_slots: int = 0
    piece_bytes: int = 0
    remote: bool = False
    fence_s: float | None = None
    captures: float = 0.0
    zeroes: bool = False
    unit: int = 1
    sleeps: float = 0.0
    hangs: float = 0.0
    halts: bool = False
    payload_bytes: int = 3000
    gpu_blocks: int = 40
    drive_blocks: int = 64
    shape: LoadShape = _FORGETFUL
    again: int = 8
    fails: Mapping[str, int] = field(default_factory=dict)
    fails_for_good: Mapping[str, int] = field(default_factory=dict)
    breaks: bool = False
    reuses: int = 0
    closes: int = 0
    values: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


_TIGHT = partial(Variant, small_scratch=True, gpu_blocks=30)
_STAGED = partial(Variant, staged=True, windowed=True, gpu_blocks=48)
_HANGING = {"cpu_bytes": 0, "io_deadline_s": _IO_DEADLINE_S}
_NO_MEMORY = {"cpu_bytes": 0}
_GPU_STAGING_BYTES = 256 << 10
_LITTLE_STAGING = {"cpu_bytes": 0, "staging_bytes": 1}
VARIANTS = {
    one.name: one
    for one in (
        # Ways between GPU and slots.
        _TIGHT("scratch"),
        _TIGHT("straight", straight=True, windowed=True),
        Variant("windows", windowed=True, apart=False),
        _TIGHT("at-once", late=0, windowed=True),
        _TIGHT("drive-alone", values=_NO_MEMORY),
        _STAGED("staged", values=_NO_MEMORY),
        _STAGED("staged-beside-memory"),
        _STAGED("staged-triton", triton=True, requests=8, again=2),
        _TIGHT("straight-together", straight=True, apart=False, payload_bytes=1000),
        _TIGHT("units", unit=2, shape=_EVICTING),
        _TIGHT("units-straight", unit=2, straight=True, apart=False, shape=_EVICTING),
        # Stores of several batches.
        _TIGHT("long", shape=_LONG, batch_slots=2, gpu_blocks=90, requests=16),
        Variant("long-straight", straight=True, shape=_LONG, batch_slots=2, gpu_blocks=90, requests=16),
        _TIGHT("long-drive-alone", shape=_LONG, values=_LITTLE_STAGING, gpu_blocks=90, requests=16),
        Variant("long-staged", staged=True, shape=_LONG, values=_LITTLE_STAGING, gpu_blocks=90, requests=12),
        _TIGHT("reuses", reuses=12, requests=8, values=_LITTLE_STAGING, gpu_blocks=20, order="late", slow_copies=True),
        _TIGHT("reuses-memory", reuses=12, requests=8, batch_slots=2, gpu_blocks=20, order="late", slow_copies=True),
        # What else may happen.
        _TIGHT("resets", shape=_RESETTING, windowed=True),
        _TIGHT("remote", remote=True, windowed=True),
        _TIGHT("zeroes", zeroes=True, windowed=True),
        _TIGHT("on-preemption", values={"store_policy": "on_preemption"}, windowed=True, slow_turns=True),
        _TIGHT("hasty", fence_s=0.0, slow_turns=True),
        _TIGHT("slow-turns", slow_turns=True, windowed=True),
        _TIGHT("captures", captures=0.5, piece_bytes=8 << 10, values={"cpu_bytes": 16 << 20}),
        _TIGHT("two-ranks", devices=(0, 0), windowed=True),
        _TIGHT("closes", closes=4, windowed=True),
        _TIGHT("closes-drive-alone", closes=4, values=_NO_MEMORY),
        _STAGED("closes-staged", closes=3, values=_NO_MEMORY, requests=12),
        _TIGHT("halts", closes=4, halts=True, windowed=True),
        _TIGHT("sleeps", sleeps=0.1, windowed=True, slow_turns=True),
        _TIGHT("sleeps-drive-alone", sleeps=0.1, values=_NO_MEMORY),
        # Failures.
        _TIGHT("hangs", hangs=0.1, values=_HANGING),
        _STAGED("hangs-staged", hangs=0.1, values=_HANGING),
        _TIGHT("kernels-fail", fails={"kernel": OUT_OF_MEMORY}),
        _STAGED("kernels-fail-staged", fails={"kernel": OUT_OF_MEMORY}, values=_NO_MEMORY),
        _TIGHT("kernels-end", fails_for_good={"kernel": LAUNCH_FAILURE}),
        _TIGHT("copies-full", fails={"cudaMemcpyAsync": OUT_OF_MEMORY}),
        _TIGHT("copies-refused", fails={"cudaMemcpyAsync": INVALID}),
        _TIGHT("rows-refused", straight=True, fails={"cudaMemcpy2DAsync": INVALID}),
        _TIGHT("pinning-refused", piece_bytes=32 << 10, fails={"cudaHostRegister": OUT_OF_MEMORY}),
        Variant("pieces", piece_bytes=32 << 10, windowed=True),
        Variant("pieces-straight", piece_bytes=32 << 10, straight=True, apart=False),
        _TIGHT("breaks", breaks=True),
        _TIGHT("breaks-straight", breaks=True, straight=True, values=_NO_MEMORY),
        _STAGED("breaks-staged", breaks=True),
        # In processes of their own.
        _TIGHT("threads", order="threads", windowed=True, environment={"FAKE_GPU_SCHED": "threads"}),
        _STAGED("threads-staged", order="threads", environment={"FAKE_GPU_SCHED": "threads"}),
        _TIGHT("threads-closes", order="threads", closes=4, environment={"FAKE_GPU_SCHED": "threads"}),
        _TIGHT("second-gpu", devices=(1,), environment={"FAKE_GPU_DEVICES": "2"}),
        _STAGED("second-gpu-staged", devices=(1,), environment={"FAKE_GPU_DEVICES": "2"}),
        _TIGHT("two-gpus", devices=(0, 1), windowed=True, environment={"FAKE_GPU_DEVICES": "2"}),
        _TIGHT("asked-often", windowed=True, environment={"FAKE_GPU_POLLS": "400"}),
    )
}


class _BesideDevice(BounceDevice):
    """Moves GPU memory on a stream of its own, so that no stream's order says when, as GPUDirect
    does."""

    def __init__(self, inner: Device) -> None:
        super().__init__(inner)
        self._stream: Any = torch.cuda.Stream()

    def submit(self, op: Op, batch: Sequence[Transfer]) -> int:
        with torch.cuda.stream(self._stream):
            return super().submit(op, batch)

    def poll(self, timeout_s: float = 0.0) -> list[DeviceOutcome]:
        with torch.cuda.stream(self._stream):
            return super().poll(timeout_s)

    def drain(self) -> list[DeviceOutcome]:
        with torch.cuda.stream(self._stream):
            return super().drain()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a seed has shown. ``looks``: blocks that were compared. ``jobs``: how many of each kind.
    ``counts``: the manager's. ``left_pinned``: pieces of memory that nobody has unregistered.
    ``error``: "": none; ``wrong_bytes``: it is one of bytes."""

    seed: int
    steps: int
    looks: int
    jobs: Mapping[str, int]
    preempted: int
    counts: Mapping[str, int]
    races: int
    violations: int
    left_pinned: int
    error: str
    wrong_bytes: bool
    races_are_meant: bool

    @property
    def is_right(self) -> bool:
        return not (
            self.error
            or self.violations
            or self.unverified
            or self.left_pinned
            or (self.races and not self.races_are_meant)
        )

    @property
    def unverified(self) -> int:
        """How many blocks were read that were not what was written."""
        return sum(count for name, count in self.counts.items() if name.startswith("verification_failures"))

    def __str__(self) -> str:
        done = ", ".join(f"{count} {kind}" for kind, count in self.jobs.items() if count)
        failed = {name: count for name, count in self.counts.items() if "fail" in name}
        text = f"{self.steps} steps, {self.looks} looks, {self.races} races, {self.violations} violations"
        text += f", {self.preempted} preempted, jobs: {done}"
        text += f", {failed}" if failed else ""
        text += f", {self.left_pinned} pieces left pinned" if self.left_pinned else ""
        error = f"\n{self.error}" if self.error else ""
        return f"seed {self.seed}: {'right' if self.is_right else 'WRONG'}, {text}{error}"


def run_seed(seed: int, variant: Variant, directory: Path | str) -> Outcome:
    """Run a variant's traffic with a seed, over a store in a directory that is empty or not there.
    What is wrong is in the outcome, and not raised."""
    for name, value in variant.environment.items():
        assert os.environ.get(name) == value, f"{variant.name} needs a process that was started with {name}={value}"
    return _Run(seed, variant, str(directory)).outcome()


class _Run:
    """One seed: an engine, or several of one store one after the other."""

    def __init__(self, seed: int, variant: Variant, directory: str) -> None:
        self._seed, self._variant = seed, variant
        kind = LiveModel if variant.unit == 1 else UnitModel
        self._model = kind("model", len(variant.devices), variant.windowed, variant.payload_bytes, unit=variant.unit)
        values: dict[str, Any] = {"device": "gds", "gpu_staging_bytes": _GPU_STAGING_BYTES} if variant.staged else {}
        values |= {"remote": "s3://bucket/kv", "remote_admission": "all"} if variant.remote else {}
        self._config = self._model.config(
            directory, blocks=variant.drive_blocks, store_decode=True, **values | variant.values
        )
        self._chance = random.Random(seed)
        self._engines: list[LiveEngine] = []
        self._ranks: list[GpuRank] = []
        self._prompts: set[str] = set()

    def outcome(self) -> Outcome:
        torch.cuda.empty_cache()  # PyTorch keeps what it had for the streams of seeds before
        races, violations, pinned = control.races(), control.violations(), _pieces_pinned()
        order = ORDERS[(self._seed + crc32(self._variant.name.encode())) % len(ORDERS)]
        control.reseed(self._variant.order or order, self._seed)
        error, wrong_bytes = "", False
        try:
            with _hanging(self._variant.hangs, self._chance), host_watched(), _as_wanted(self._variant):
                self._run()
        except Exception as found:
            error, wrong_bytes = "".join(traceback.format_exception(found)), _is_of_bytes(found)
        self._end_failing()
        jobs, counts = dict[str, int](), dict[str, int]()
        for engine in self._engines:
            for kind, count in engine.counting.jobs.items():
                jobs[kind.name.lower()] = jobs.get(kind.name.lower(), 0) + count
            for name, value in engine.manager.stats.counts.items():
                counts[name] = counts.get(name, 0) + value
        return Outcome(
            self._seed,
            sum(engine.step_count for engine in self._engines),
            sum(rank.looked for rank in self._ranks),
            jobs,
            sum(engine.counting.preempted for engine in self._engines),
            counts,
            control.races() - races,
            control.violations() - violations,
            0 if self._fails_to_pin else _pieces_pinned() - pinned,
            error,
            wrong_bytes,
            self._variant.zeroes,
        )

    def _run(self) -> None:
        if 0 not in self._variant.devices:
            torch.cuda.set_device(self._variant.devices[0])  # as vLLM does, and once for the process
        for life in range(self._variant.closes):
            self._close_under_load(life)
        if self._variant.breaks:
            self._break()
        with self._engine() as engine:
            self._reuse_at_once(engine)
            self._load(engine, self._variant.closes).run_requests(self._variant.requests)
            self._end_failing()
            if not self._has_ended():
                self._audit(engine)
        if self._has_ended():
            with self._engine() as engine:
                self._audit(engine)
        if 0 not in self._variant.devices:
            assert not torch._C._cuda_hasPrimaryContext(0), "a rank on another GPU has taken memory of the first"

    def _audit(self, engine: LiveEngine) -> None:
        """Serve prompts once more, and look at all that there is. No load fails for what has failed
        before."""
        failed = engine.manager.stats.counts.get("failed_loads", 0)
        engine.serve(sorted(self._prompts, key=lambda prompt: (len(prompt), prompt))[-self._variant.again :])
        assert self._variant.hangs or engine.manager.stats.counts.get("failed_loads", 0) == failed, "loads still fail"
        while self._variant.hangs and _is_late(engine):
            engine.step()
        audit(engine)
        for rank in self._ranks[-self._model.ranks :]:
            rank.audit(engine)
            audit_memory(engine, rank.rank, rank.arenas)

    def _has_ended(self) -> bool:
        """Whether an error has ended a mover of the last engine."""
        return any(rank.has_ended for rank in self._ranks[-self._model.ranks :])

    def _reuse_at_once(self, engine: LiveEngine) -> None:
        """Serve prompts of which each overwrites the blocks of the one before, as soon as the
        manager takes those for copied: no fence makes the model wait then."""
        for number in range(self._variant.reuses):
            prompt = "".join(self._chance.choices(_LETTERS, k=_REUSING_TOKENS))
            engine.add(f"reuses-{number}", prompt, 0).finishing = True
            while engine.requests or len(engine.manager._stores.sources):
                engine.step(_REUSING_TOKENS)

    def _close_under_load(self, life: int) -> None:
        """Close an engine in the midst of a step, while copies are at work if there are any."""
        with self._engine() as engine:
            load = self._load(engine, life)
            for _ in range(self._chance.randrange(4, 30)):
                load.step()
            engine.schedule(16)
            engine.forward()
            for rank in self._ranks[-self._model.ranks :]:
                rank.await_launch(_AT_WORK_S)
                if self._variant.halts:
                    rank.halt_and_overwrite()

    def _break(self) -> None:
        """Run an engine until a GPU fails whatever it is asked for, and close it then: nothing may
        hang."""
        try:
            with self._engine() as engine:
                load = self._load(engine, -1)
                for _ in range(self._chance.randrange(4, 40)):
                    load.step()
                within_step = self._chance.random() < 0.5
                if within_step:
                    engine.schedule(16)
                    engine.forward()
                _break_gpu(broken=True)
                if within_step:
                    engine.update()
                for _ in range(5):
                    load.step()
        except RuntimeError:
            pass  # the model's
        else:
            raise AssertionError("a GPU that is broken goes on")
        finally:
            _break_gpu(broken=False)
            forget_error()
            torch.cuda.synchronize()

    def _sleep(self, engine: LiveEngine) -> None:
        """Sleep as vLLM does: with an empty prefix cache, and without requests but aborted ones.
        Meanwhile the memory of the KV cache is not there."""
        aborts = self._chance.random() < 0.7
        for request in list(engine.queued) if aborts else ():
            engine.abort(request)  # what it loads is still on its way
        while engine.requests and not aborts:
            engine.step()
            for request in engine.running:
                request.finishing = True
        engine.pool.forget_all()
        ranks = self._ranks[-self._model.ranks :]
        for rank in ranks:
            rank.sleep()
        time.sleep(self._chance.choice((0, _ASLEEP_S)))
        for rank in ranks:
            rank.wake()

    @contextmanager
    def _engine(self) -> Iterator[LiveEngine]:
        engine = LiveEngine(self._config, self._model, self._make_rank, self._variant.gpu_blocks)
        engine.zeroes = self._variant.zeroes
        if self._variant.unit > 1:
            engine.request_type = TextRequest
        self._engines.append(engine)
        try:
            yield engine
        finally:
            engine.close()

    def _make_rank(self, config: Config, model: LiveModel, rank: int, block_count: int) -> GpuRank:
        variant, device = self._variant, self._variant.devices[rank]
        for call, code in variant.fails.items():
            if call == "cudaHostRegister":
                control.fail(call, code, after=self._chance.randrange(6))
        made = GpuRank(
            config,
            model,
            rank,
            block_count,
            late=variant.late,
            apart=variant.apart,
            device=device,
            captures=variant.captures,
        )
        made.may_end = bool(variant.fails_for_good) or variant.fails.get("cudaMemcpyAsync") == INVALID
        self._ranks.append(made)
        return made

    def _load(self, engine: LiveEngine, life: int) -> LiveLoad:
        """Return a load that notes its prompts, and in whose steps calls fail now and then."""
        variant, chance = self._variant, self._chance
        load = LiveLoad(engine, self._seed + 1000 * life, variant.shape)
        step: Callable[..., None] = load.step
        add, steps_to_end = engine.add, chance.randrange(10, 60)

        def adding(request_id: str, prompt: str, most_outputs: int, **more: Any) -> Any:
            self._prompts.add(prompt)
            return add(request_id, prompt, most_outputs, **more)

        def failing_step(**more: Any) -> None:
            nonlocal steps_to_end
            steps_to_end -= 1
            for call, code in variant.fails.items():
                if call != "cudaHostRegister" and chance.random() < _OFTEN:
                    control.fail(call, code, after=chance.randrange(4))
            for call, code in variant.fails_for_good.items() if steps_to_end == 0 else ():
                control.fail(call, code, times=1 << 40)
            step(**more)
            if chance.random() < variant.sleeps:
                self._sleep(engine)

        engine.add = adding  # type: ignore[method-assign]
        load.step = failing_step  # type: ignore[method-assign]
        return load

    @property
    def _fails_to_pin(self) -> bool:
        return self._variant.breaks or "cudaHostRegister" in self._variant.fails

    def _end_failing(self) -> None:
        for call in (*self._variant.fails, *self._variant.fails_for_good):
            control.fail(call, 0, times=0)


@contextmanager
def _hanging(likelihood: float, chance: random.Random) -> Iterator[None]:
    """Let some batches end at the drive only when they are late."""
    poll, held = PosixDevice.poll, dict[int, tuple[float, DeviceOutcome]]()

    def hanging_poll(self: PosixDevice, timeout_s: float = 0.0) -> list[DeviceOutcome]:
        ended, now_s = list[DeviceOutcome](), time.monotonic()
        for outcome in poll(self, timeout_s):
            if chance.random() < likelihood:
                held[outcome.ticket] = now_s + _HANGS_S, outcome
            else:
                ended.append(outcome)
        over = [ticket for ticket, (end_s, _) in held.items() if end_s <= now_s]
        return ended + [held.pop(ticket)[1] for ticket in over]

    with patch.object(PosixDevice, "poll", hanging_poll if likelihood else poll):
        yield


def _is_late(engine: LiveEngine) -> bool:
    """Whether a drive may still touch slots of moves that have failed."""
    catalog = engine.manager._catalog
    return any(catalog.pins(row, space.tier) for space in engine.manager._tiers for row in catalog.rows())


def _slow_turn(chance: random.Random) -> Callable[..., bool]:
    """Return a turn of a mover's thread that has to wait for a processor now and then, once it has
    taken its plans."""
    turn = Runner.turn

    def slow_turn(self: Runner, *args: Any, **more: Any) -> bool:
        if chance.random() < _OFTEN:
            time.sleep(chance.random() * _SLOW_S)
        return turn(self, *args, **more)

    return slow_turn


def _pieces_pinned() -> int:
    """Return how many pieces of memory are registered with CUDA, where no call has failed."""
    counts = control.counts()
    return counts.get("cudaHostRegister", 0) - counts.get("cudaHostUnregister", 0)


def _break_gpu(*, broken: bool) -> None:
    """Let all calls fail that ask something of a GPU, or none any more."""
    for call in control.counts().keys() | {"kernel", "cudaFree", "cudaFreeHost", "cudaHostUnregister"}:
        if call not in _OF_THREADS:
            control.fail(call, ILLEGAL_ACCESS, times=1 << 40 if broken else 0)


def _is_of_bytes(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, WrongBytesError):
            return True
        error = error.__context__
    return False


@contextmanager
def _as_wanted(variant: Variant) -> Iterator[None]:
    """Let kvdisk go the variant's way."""
    patches = list[Any]()
    if variant.straight:
        patches += [
            patch("kvdisk.worker.copier.STRAIGHT_BYTES", 0),
            patch("kvdisk.worker.copier.STRAIGHT_ROW_BYTES", 0),
        ]
    if variant.small_scratch:
        patches += [patch("kvdisk.assembly._GPU_SCRATCH_BYTES", 0), patch("kvdisk.worker.copier.MOST_NUMBERS", 1)]
    if variant.staged:
        patches.append(patch("kvdisk.worker.direct.BUDGET_S", 0.0))
        patches.append(patch("kvdisk.assembly.gds_unavailable", lambda: None))
        patches.append(patch("kvdisk.assembly.GdsDevice", lambda *_, **__: _BesideDevice(PosixDevice())))
        if not variant.triton:
            patches.append(patch("kvdisk.worker.gpu_staging._kernel_for", lambda _: None))
    if variant.fence_s is not None:
        patches.append(patch("kvdisk.worker.mover.FENCE_S", variant.fence_s))
    if variant.slow_copies:
        patches.append(patch.object(CudaLanes, "record", slow_record(random.Random(0))))
    if variant.slow_turns:
        patches.append(patch.object(Runner, "turn", _slow_turn(random.Random(0))))
    if variant.batch_slots:
        slot_bytes = LiveModel("", 1, variant.windowed, variant.payload_bytes).geometry.slot_sizes[-1]
        patches.append(patch.dict(Mover.__init__.__kwdefaults__, batch_bytes=variant.batch_slots * slot_bytes))
    if variant.piece_bytes:
        patches.append(patch("kvdisk.worker.arena.PIECE_BYTES", variant.piece_bytes))
    if variant.remote:
        contents: dict[str, bytes] = {}
        patches.append(patch("kvdisk.assembly.open_remote", lambda _: WatchedObjects(contents)))
    with ExitStack() as within:
        for each in patches:
            within.enter_context(each)
        yield


def run_apart(variant: Variant, seeds: tuple[int, int]) -> tuple[int, str]:
    """Run seeds of a variant in a process with its environment; return the exit code, and what was
    printed."""
    command = [sys.executable, "-m", "fake_gpu.traffic", "--variant", variant.name, "--seeds", *map(str, seeds)]
    done = subprocess.run(
        command,
        check=False,
        env=os.environ | dict(variant.environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", action="append", choices=sorted(VARIANTS), help="default: list them")
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 10), metavar=("FIRST", "END"))
    parser.add_argument("--directory", help="where stores are made")
    options = parser.parse_args()
    if not options.variant:
        print("\n".join(VARIANTS))
        return 0
    faulthandler.enable()
    bad = 0
    for variant in map(VARIANTS.__getitem__, options.variant):
        if any(os.environ.get(name) != value for name, value in variant.environment.items()):
            code, text = run_apart(variant, tuple(options.seeds))
            bad += code != 0
            print(text, end="", flush=True)
            continue
        for seed in range(*options.seeds):
            began_s = time.monotonic()
            faulthandler.dump_traceback_later(HANGS_S, exit=True)
            with tempfile.TemporaryDirectory(dir=options.directory) as store:
                outcome = run_seed(seed, variant, store)
            faulthandler.cancel_dump_traceback_later()
            bad += not outcome.is_right
            print(f"{variant.name}, {time.monotonic() - began_s:.1f} s, {outcome}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
