# SPDX-License-Identifier: Apache-2.0
"""A whole replay: every setting through the real manager, every model beside it, on as many processes as are wanted."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import NamedTuple

from kvdisk.blocks import Tier
from kvdisk.cli.replay.capacity import Room
from kvdisk.cli.replay.models import run_model
from kvdisk.cli.replay.tiers import Setting, make_engine
from kvdisk.cli.replay.trace import Trace
from kvdisk.manager.manager import TierManager

Watch = Callable[[int, int], None]
"""Told how many runs have ended, of how many."""


class Rival(NamedTuple):
    """A model to compare with. ``needed``: see ``run_model``."""

    model: str
    needed: int = 1

    @property
    def name(self) -> str:
        """As it is shown: ``lru``, ``lru+reuse(2)``."""
        return self.model if self.needed == 1 else f"{self.model}+reuse({self.needed})"


@dataclass(frozen=True)
class Outcome:
    """What one run came to. Blocks, but for ``hit_tokens``; by tier where a tier is named.

    ``rival``: None: of the real manager, with this setting. ``room``: of the tier that the runs differ in. ``evicted``:
    copies that left a tier for room; None: not told. ``refused``: offers to the tiers, by reason. ``waits_s``: of each
    request that loaded, measured; empty without I/O. ``failed``: blocks that could not be loaded, or stored.
    """

    room: Room
    setting: Setting | None
    rival: Rival | None
    hit_tokens: dict[Tier, int]
    hit_blocks: dict[Tier, int]
    written: int
    read: int
    evicted: dict[Tier, int] | None
    refused: dict[str, int]
    seconds: float
    waits_s: list[float] = field(default_factory=list)
    failed: dict[str, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens that hit, in whichever tier."""
        return sum(self.hit_tokens.values())

    @property
    def blocks(self) -> int:
        """Blocks that hit, in whichever tier."""
        return sum(self.hit_blocks.values())


@dataclass(frozen=True)
class Replayed:
    """All outcomes, room by room. ``seconds``: of the manager's runs together, as a clock has it."""

    trace: Trace
    block_bytes: int
    outcomes: list[Outcome]
    seconds: float
    processes: int
    io_directory: str | None = None

    @property
    def own(self) -> list[Outcome]:
        """Those of the real manager."""
        return [outcome for outcome in self.outcomes if outcome.rival is None]

    @property
    def rate(self) -> float:
        """Block references that the manager took a second."""
        return len(self.own) * self.trace.references / self.seconds if self.seconds else 0.0


def room_of(setting: Setting) -> Room:
    """Return the room that a setting's models get: of the NVMe tier, or without one of the CPU tier."""
    return setting.nvme if setting.nvme.slots else setting.cpu


def run_setting(trace: Trace, setting: Setting) -> Outcome:
    """Take a trace through the manager, without bytes."""
    engine, manager, ranks = make_engine(trace, setting)
    began_s = time.perf_counter()
    for number, request in enumerate(trace.requests):
        engine.serve(number, request)
    seconds = time.perf_counter() - began_s
    served, moved = engine.served, ranks.moved
    return make_outcome(setting, manager, served.tokens, served.blocks, moved.written, moved.read, seconds)


def make_outcome(
    setting: Setting,
    manager: TierManager,
    tokens: dict[Tier, int],
    blocks: dict[Tier, int],
    written: int,
    read: int,
    seconds: float,
    waits_s: Sequence[float] = (),
) -> Outcome:
    """Return the outcome of a run of the manager."""
    stats = manager.stats
    return Outcome(
        room_of(setting),
        setting,
        None,
        tokens,
        blocks,
        written,
        read,
        {Tier.CPU: stats["evicted_blocks.cpu"], Tier.NVME: stats["evicted_blocks.nvme"]},
        {why: stats[f"refused_blocks.{why}"] for why in ("reuse", "room", "budget")}
        | {"left_cpu_" + why: stats[f"left_blocks.{why}"] for why in ("reuse", "room", "budget")},
        seconds,
        list(waits_s),
        {"loads": stats["failed_loads"], "stores": stats["failed_stores"]},
    )


def run_rival(trace: Trace, room: Room, rival: Rival) -> Outcome:
    """Take a trace through a model."""
    began_s = time.perf_counter()
    outcome = run_model(rival.model, [request.hashes for request in trace.requests], room.blocks, rival.needed)
    spans = zip(trace.requests, outcome.hits, strict=True)
    tokens = sum(trace.token_span(request, 0, count) for request, count in spans)
    evicted = None if outcome.evicted is None else {Tier.NVME: outcome.evicted}
    hits = sum(outcome.hits)
    seconds = time.perf_counter() - began_s
    return Outcome(
        room, None, rival, {Tier.NVME: tokens}, {Tier.NVME: hits}, outcome.written, hits, evicted, {}, seconds
    )


_Task = tuple[Setting | None, Room, Rival | None]
_shared: list[Trace] = []
"""Of a process that runs tasks: its trace, which is too large to be sent with each."""


def _run_task(task: _Task) -> Outcome:
    (trace,) = _shared
    setting, room, rival = task
    if rival is not None:
        return run_rival(trace, room, rival)
    assert setting is not None
    return run_setting(trace, setting)


def replay(
    trace: Trace, settings: Sequence[Setting], rivals: Sequence[Rival], block_bytes: int, processes: int, watch: Watch
) -> Replayed:
    """Run every setting, and every model at every room. Raises ConfigError for a policy that cannot be made."""
    rooms = {room_of(setting).blocks: room_of(setting) for setting in settings}
    mine: list[_Task] = [(setting, room_of(setting), None) for setting in settings]
    theirs: list[_Task] = [(None, room, rival) for room in rooms.values() for rival in rivals]
    total = len(mine) + len(theirs)
    processes = min(processes, max(len(mine), 1))
    with _workers(trace, processes) as pool:
        began_s = time.perf_counter()
        own = _run_all(pool, mine, lambda done: watch(done, total))
        seconds = time.perf_counter() - began_s
        others = _run_all(pool, theirs, lambda done: watch(len(mine) + done, total))
    order = {blocks: at for at, blocks in enumerate(rooms)}
    outcomes = sorted([*own, *others], key=lambda outcome: order[outcome.room.blocks])
    return Replayed(trace, block_bytes, outcomes, seconds, processes)


@contextmanager
def _workers(trace: Trace, processes: int) -> Iterator[Executor | None]:
    """Yield processes that have the trace, or None: this one alone."""
    _shared[:] = [trace]
    gc.collect()
    gc.freeze()  # the trace is there to stay
    try:
        if processes <= 1:
            yield None
        else:
            with ProcessPoolExecutor(processes, mp_context=get_context("fork")) as pool:
                yield pool
    finally:
        gc.unfreeze()
        _shared.clear()


def _run_all(pool: Executor | None, tasks: Sequence[_Task], done: Callable[[int], None]) -> list[Outcome]:
    if pool is None:
        outcomes = []
        for task in tasks:
            outcomes.append(_run_task(task))
            done(len(outcomes))
        return outcomes
    futures = [pool.submit(_run_task, task) for task in tasks]
    try:
        for count, future in enumerate(as_completed(futures), start=1):
            future.result()
            done(count)
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    return [future.result() for future in futures]
