# SPDX-License-Identifier: Apache-2.0
"""Random requests on a live engine whose ranks are on the fake GPU, with missing waits as failures:
``python -m fake_gpu.traffic --variant NAME --seeds 0 20``.

Manager, workers, movers, files and index are the real ones. A seed is right when every block that a
request read, or that a load has filled, held what it must, when no two operations touched the same
bytes without an order between them, when the host touched nothing that a copy was at work on, and
when all slots of all tiers hold their blocks in the end.
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from fake_gpu import control
from fake_gpu.gpu_rank import GpuRank, host_watched
from kvdisk.config import Config
from kvdisk.device.posix import PosixDevice
from support.bounce_device import BounceDevice
from support.live_audit import audit
from support.live_engine import LiveEngine
from support.live_load import LiveLoad, LoadShape
from support.live_model import LiveModel
from support.live_rank import WrongBytesError

HANGS_S = 600


@dataclass(frozen=True, slots=True)
class Variant:
    """How traffic goes.

    ``order``: in which the fake GPU works (see ``runtime.cpp``). ``late``, ``apart``: see
    ``GpuRank``. ``small_scratch``: the copier's scratch has one slot a lane, and room for two
    block numbers. ``straight``: rows of any size go without scratch. ``staged``: drives
    and GPU move blocks straight, through a device that bounces. ``zeroes``: see ``FakeEngine``;
    its races are meant (decision 29), so that bytes alone count. ``again``: so many prompts are
    served once more at the end. ``fails``: calls of the runtime of which some fail, with their
    codes. ``values``: of the configuration. ``environment``: variables that the process must have been
    started with.
    """

    name: str
    order: str = "mixed"
    requests: int = 30
    late: int = 1
    apart: bool = True
    windowed: bool = False
    small_scratch: bool = False
    straight: bool = False
    staged: bool = False
    zeroes: bool = False
    payload_bytes: int = 3000
    gpu_blocks: int = 40
    drive_blocks: int = 64
    shape: LoadShape = LoadShape(forgets=0.15)
    again: int = 10
    fails: Mapping[str, int] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


VARIANTS = {
    one.name: one
    for one in (
        Variant("scratch", small_scratch=True, gpu_blocks=30),
        Variant("straight", straight=True, windowed=True, small_scratch=True, gpu_blocks=30),
        Variant("windows", windowed=True, apart=False),
        Variant("staged", staged=True, small_scratch=True, gpu_blocks=30, values={"cpu_bytes": 0}),
        Variant("staged-beside-memory", staged=True, windowed=True),
        Variant("drive-alone", small_scratch=True, gpu_blocks=30, values={"cpu_bytes": 0}),
        Variant("kernels-fail", small_scratch=True, gpu_blocks=30, fails={"kernel": 2}),
        Variant("rows-refused", straight=True, small_scratch=True, gpu_blocks=30, fails={"cudaMemcpy2DAsync": 1}),
        Variant("zeroes", zeroes=True),
    )
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a seed has shown. ``looks``: blocks that were compared. ``jobs``: how many of each kind.
    ``counts``: the manager's. ``error``: "": none; ``wrong_bytes``: it is one of bytes."""

    seed: int
    steps: int
    looks: int
    jobs: Mapping[str, int]
    preempted: int
    counts: Mapping[str, int]
    races: int
    violations: int
    error: str
    wrong_bytes: bool
    races_are_meant: bool

    @property
    def is_right(self) -> bool:
        return not self.error and not self.violations and not (self.races and not self.races_are_meant)

    def __str__(self) -> str:
        done = ", ".join(f"{count} {kind}" for kind, count in self.jobs.items() if count)
        failed = {name: count for name, count in self.counts.items() if "fail" in name}
        text = f"{self.steps} steps, {self.looks} looks, {self.races} races, {self.violations} violations"
        text += f", {self.preempted} preempted, jobs: {done}"
        text += f", {failed}" if failed else ""
        return f"seed {self.seed}: {'right' if self.is_right else 'WRONG'}, {text}" + (
            f"\n{self.error}" if self.error else ""
        )


def run_seed(seed: int, variant: Variant, directory: Path | str) -> Outcome:
    """Run a variant's traffic with a seed, over a store in a directory that is empty or not there.
    What is wrong is in the outcome, and not raised."""
    run = _Run(seed, variant, str(directory))
    return run.outcome()


class _Run:
    """One seed."""

    def __init__(self, seed: int, variant: Variant, directory: str) -> None:
        self._seed, self._variant = seed, variant
        self._model = LiveModel("model", 1, variant.windowed, variant.payload_bytes)
        self._config = self._model.config(
            directory,
            blocks=variant.drive_blocks,
            store_decode=True,
            **({"device": "gds"} if variant.staged else {}) | variant.values,
        )
        self._ranks: list[GpuRank] = []
        self._engine: LiveEngine | None = None
        self._chance = random.Random(seed)

    def outcome(self) -> Outcome:
        races, violations = control.races(), control.violations()
        control.reseed(self._variant.order, self._seed)
        error, wrong_bytes = "", False
        try:
            with host_watched(), _as_wanted(self._variant):
                self._run()
        except Exception as found:
            error, wrong_bytes = "".join(traceback.format_exception(found, limit=-6)), _is_of_bytes(found)
        engine = self._engine
        return Outcome(
            self._seed,
            engine.step_count if engine else 0,
            sum(rank.looked for rank in self._ranks),
            {kind.name.lower(): count for kind, count in engine.counting.jobs.items()} if engine else {},
            engine.counting.preempted if engine else 0,
            dict(engine.manager.stats.counts) if engine else {},
            control.races() - races,
            control.violations() - violations,
            error,
            wrong_bytes,
            self._variant.zeroes,
        )

    def _run(self) -> None:
        variant = self._variant
        engine = self._engine = LiveEngine(self._config, self._model, self._make_rank, variant.gpu_blocks)
        engine.zeroes = variant.zeroes
        try:
            load = LiveLoad(engine, self._seed, variant.shape)
            prompts = _Prompts(engine)
            with _failing(load, variant.fails, self._chance):
                load.run_requests(variant.requests)
            engine.serve(prompts.longest(variant.again))
            audit(engine)
            for rank in self._ranks:
                rank.settle()
        finally:
            engine.close()

    def _make_rank(self, config: Config, model: LiveModel, rank: int, block_count: int) -> GpuRank:
        made = GpuRank(
            config, model, rank, block_count, late=self._variant.late, apart=self._variant.apart, device=rank
        )
        self._ranks.append(made)
        return made


def _is_of_bytes(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, WrongBytesError):
            return True
        error = error.__context__
    return False


class _Prompts:
    """Notes the prompts that an engine is given."""

    def __init__(self, engine: LiveEngine) -> None:
        self._found: set[str] = set()
        add = engine.add

        def adding(request_id: str, prompt: str, most_outputs: int, **more: Any) -> Any:
            self._found.add(prompt)
            return add(request_id, prompt, most_outputs, **more)

        engine.add = adding  # type: ignore[method-assign]

    def longest(self, count: int) -> list[str]:
        return sorted(self._found, key=lambda prompt: (len(prompt), prompt))[len(self._found) - count :]


@contextmanager
def _failing(load: LiveLoad, fails: Mapping[str, int], chance: random.Random) -> Iterator[None]:
    """Let calls fail now and then while the load runs."""
    step: Callable[..., None] = load.step

    def failing_step(**more: Any) -> None:
        for call, code in fails.items():
            if chance.random() < 0.3:
                control.fail(call, code, after=chance.randrange(4))
        step(**more)

    if fails:
        load.step = failing_step  # type: ignore[method-assign]
    try:
        yield
    finally:
        for call in fails:
            control.fail(call, 0, times=0)


@contextmanager
def _as_wanted(variant: Variant) -> Iterator[None]:
    """Let kvdisk go the variant's way."""
    with ExitStack() as within:
        if variant.straight:
            within.enter_context(patch("kvdisk.worker.copier.STRAIGHT_BYTES", 0))
            within.enter_context(patch("kvdisk.worker.copier.STRAIGHT_ROW_BYTES", 0))
        if variant.small_scratch:
            within.enter_context(patch("kvdisk.assembly._GPU_SCRATCH_BYTES", 0))
            within.enter_context(patch("kvdisk.worker.copier.MOST_NUMBERS", 2))
        if variant.staged:
            within.enter_context(patch("kvdisk.assembly.gds_unavailable", lambda: None))
            within.enter_context(patch("kvdisk.assembly.GdsDevice", lambda *_, **__: BounceDevice(PosixDevice())))
        yield


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
    for name in options.variant:
        for seed in range(*options.seeds):
            began_s = time.monotonic()
            faulthandler.dump_traceback_later(HANGS_S, exit=True)
            with tempfile.TemporaryDirectory(dir=options.directory) as store:
                outcome = run_seed(seed, VARIANTS[name], store)
            faulthandler.cancel_dump_traceback_later()
            bad += not outcome.is_right
            print(f"{name}, {outcome}, {time.monotonic() - began_s:.1f} s", flush=True)
    print(f"{bad} wrong")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
