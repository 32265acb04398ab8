# SPDX-License-Identifier: Apache-2.0
"""A whole replay: every setting through the real manager, and the models beside it."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field
from functools import partial
from multiprocessing import get_context
from typing import NamedTuple

from kvdisk import __version__
from kvdisk.blocks import Tier
from kvdisk.cli.replay.capacity import Room
from kvdisk.cli.replay.engine import Engine
from kvdisk.cli.replay.models import run_model
from kvdisk.cli.replay.tiers import Setting, make_engine, make_geometry
from kvdisk.cli.replay.trace import Trace

JSON_VERSION = 1
REASONS = ("reuse", "room", "budget")
"""Why a tier refuses what it is offered."""

Watch = Callable[[int, int], None]
"""Told how many runs have ended, of how many."""


class Rival(NamedTuple):
    """A model to compare with, and the room that it gets."""

    model: str
    room: Room


@dataclass(frozen=True)
class Waits:
    """Seconds from the arrival of requests that loaded to the end of their load."""

    count: int
    mean: float
    median: float
    p99: float
    most: float


@dataclass
class Run:
    """What one run came to. Shares are of 1. Dicts are by tier (gpu, cpu, nvme) or by reason.

    ``policy``: its name in the table. ``model``: None: the real manager, with ``setting``.
    ``room``: of the tier that the runs differ in. ``written_*``, ``read_*``: to and from NVMe, or a
    model's one tier. ``write_amplification``: blocks written for each distinct block of the trace.
    ``written_per_hit``: for each that hit in that tier. ``evicted_blocks``: None: the model does
    not say. ``refused``: offers; ``left_cpu_*``: what left the CPU tier unwritten. ``failed``:
    blocks. ``waits_s``: None: no bytes were moved.
    """

    trace: InitVar[Trace]
    slot_bytes: InitVar[int]
    policy: str
    model: str | None
    setting: Setting | None
    room: Room
    hit_rate: float = field(init=False)
    hit_blocks_rate: float = field(init=False)
    hit_tokens: dict[str, int]
    hit_blocks: dict[str, int]
    written_blocks: int
    written_bytes: int = field(init=False)
    read_blocks: int
    read_bytes: int = field(init=False)
    write_amplification: float = field(init=False)
    written_per_hit: float | None = field(init=False)
    evicted_blocks: dict[str, int] | None
    refused: dict[str, int]
    failed: dict[str, int]
    seconds: float
    waits_s: Waits | None = None

    def __post_init__(self, trace: Trace, slot_bytes: int) -> None:
        nvme_hits = self.hit_blocks.get("nvme", 0)
        self.hit_rate = sum(self.hit_tokens.values()) / trace.tokens
        self.hit_blocks_rate = sum(self.hit_blocks.values()) / trace.references
        self.written_bytes = self.written_blocks * slot_bytes
        self.read_bytes = self.read_blocks * slot_bytes
        self.write_amplification = self.written_blocks / trace.distinct
        self.written_per_hit = self.written_blocks / nvme_hits if nvme_hits else None
        self.seconds = round(self.seconds, 3)


@dataclass
class TraceFacts:
    """What a trace is. ``references``: blocks of all prompts; ``tokens``: of all prompts."""

    name: str
    form: str
    block_tokens: int
    requests: int
    references: int
    tokens: int
    distinct_blocks: int
    longest_prompt_blocks: int
    notes: tuple[str, ...]


@dataclass
class Replayed:
    """All runs, room by room, as ``--json`` prints them.

    The shape changes only with ``json_version``. ``slot_bytes``: of a block on NVMe, with its
    header. ``seconds``: of the manager's runs together.
    ``io_directory``: None: no bytes were moved.
    """

    trace: TraceFacts
    block_bytes: int
    slot_bytes: int
    seconds: float
    processes: int
    runs: list[Run]
    io_directory: str | None = None
    references_per_second: int = field(init=False)
    json_version: int = JSON_VERSION
    kvdisk_version: str = __version__

    def __post_init__(self) -> None:
        references = len(self.own) * self.trace.references
        self.references_per_second = round(references / self.seconds) if self.seconds else 0

    @property
    def own(self) -> list[Run]:
        """The runs of the real manager."""
        return [run for run in self.runs if run.model is None]


# -- one run ---------------------------------------------------------------------------------------


def run_setting(trace: Trace, slot_bytes: int, setting: Setting) -> Run:
    """Take a trace through the manager, without bytes. Raises ConfigError: no such policy."""
    return run_engine(trace, slot_bytes, setting, make_engine(trace, setting))


def run_engine(trace: Trace, slot_bytes: int, setting: Setting, engine: Engine) -> Run:
    """Take a trace through an engine."""
    began_s = time.perf_counter()
    for number, request in enumerate(trace.requests):
        engine.serve(number, request)
    seconds = time.perf_counter() - began_s
    counts, stats = engine.counts, engine.manager.stats
    return Run(
        trace,
        slot_bytes,
        policy=setting.name,
        model=None,
        setting=setting,
        room=setting.room,
        hit_tokens=_by_tier(counts.hit_tokens),
        hit_blocks=_by_tier(counts.hit_blocks),
        written_blocks=counts.written,
        read_blocks=counts.read,
        evicted_blocks={"cpu": stats["evicted_blocks.cpu"], "nvme": stats["evicted_blocks.nvme"]},
        refused={why: stats[f"refused_blocks.{why}"] for why in REASONS}
        | {f"left_cpu_{why}": stats[f"left_blocks.{why}"] for why in REASONS},
        failed={"loads": stats["failed_loads"], "stores": stats["failed_stores"]},
        seconds=seconds,
    )


def run_rival(trace: Trace, slot_bytes: int, rival: Rival) -> Run:
    """Take a trace through a model."""
    began_s = time.perf_counter()
    counts = run_model(rival.model, [request.hashes for request in trace.requests], rival.room.blocks)
    spans = zip(trace.requests, counts.hits, strict=True)
    tokens, hits = sum(trace.token_span(request, 0, count) for request, count in spans), sum(counts.hits)
    return Run(
        trace,
        slot_bytes,
        policy=rival.model,
        model=rival.model,
        setting=None,
        room=rival.room,
        hit_tokens={"nvme": tokens},
        hit_blocks={"nvme": hits},
        written_blocks=counts.written,
        read_blocks=hits,
        evicted_blocks=None if counts.evicted is None else {"nvme": counts.evicted},
        refused={},
        failed={},
        seconds=time.perf_counter() - began_s,
    )


def waits_of(seconds: Sequence[float]) -> Waits | None:
    """Return how long requests waited; None where none did."""
    ordered = sorted(seconds)
    if not ordered:
        return None
    p99 = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
    return Waits(len(ordered), statistics.fmean(ordered), statistics.median(ordered), p99, ordered[-1])


def _by_tier(counts: Mapping[Tier, int]) -> dict[str, int]:
    return {tier.name.lower(): count for tier, count in counts.items()}


# -- all of them -----------------------------------------------------------------------------------


def replay(
    trace: Trace,
    settings: Sequence[Setting],
    models: Sequence[str],
    block_bytes: int,
    processes: int,
    watch: Watch,
    run_own: Callable[[Trace, int, Setting], Run] = run_setting,
) -> Replayed:
    """Run every setting with ``run_own``, and every model at every room. Raises as it does."""
    rooms = {setting.room.blocks: setting.room for setting in settings}
    rivals = [Rival(model, room) for room in rooms.values() for model in models]
    slot_bytes = make_geometry(trace, block_bytes).slot_sizes[0]
    total = len(settings) + len(rivals)
    processes = min(processes, max(len(settings), 1))

    def run(task: Setting | Rival) -> Run:
        if isinstance(task, Rival):
            return run_rival(trace, slot_bytes, task)
        return run_own(trace, slot_bytes, task)

    with _mapper(run, processes) as mapped:
        began_s = time.perf_counter()
        own = _watched(mapped(settings), lambda done: watch(done, total))
        seconds = round(time.perf_counter() - began_s, 3)
        others = _watched(mapped(rivals), lambda done: watch(len(settings) + done, total))
    order = {blocks: at for at, blocks in enumerate(rooms)}
    runs = sorted([*own, *others], key=lambda run: order[run.room.blocks])
    return Replayed(_facts(trace), block_bytes, slot_bytes, seconds, processes, runs)


def _facts(trace: Trace) -> TraceFacts:
    return TraceFacts(
        name=trace.name,
        form=trace.form,
        block_tokens=trace.block_tokens,
        requests=len(trace.requests),
        references=trace.references,
        tokens=trace.tokens,
        distinct_blocks=trace.distinct,
        longest_prompt_blocks=trace.longest,
        notes=trace.notes,
    )


_Task = Setting | Rival
_shared: list[Callable[[_Task], Run]] = []
"""What runs tasks, with the trace, in a forked process: it is too large to be sent each time."""


def _run_shared(task: _Task) -> Run:
    return _shared[0](task)


@contextmanager
def _mapper(run: Callable[[_Task], Run], processes: int) -> Iterator[Callable[[Iterable[_Task]], Iterator[Run]]]:
    """Yield what runs tasks on so many processes, in their order; with one, in this process."""
    _shared[:] = [run]
    gc.collect()
    gc.freeze()  # the trace is there to stay
    try:
        if processes <= 1:
            yield partial(map, run)
        else:
            with ProcessPoolExecutor(processes, mp_context=get_context("fork")) as pool:
                yield partial(pool.map, _run_shared)
    finally:
        gc.unfreeze()
        _shared.clear()


def _watched(runs: Iterable[Run], done: Callable[[int], None]) -> list[Run]:
    found = []
    for run in runs:
        found.append(run)
        done(len(found))
    return found
