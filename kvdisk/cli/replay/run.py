# SPDX-License-Identifier: Apache-2.0
"""A whole replay: every setting through the real manager, each in a process of its own."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from kvdisk import __version__
from kvdisk.blocks import Tier
from kvdisk.cli.replay.tiers import Capacity, Setting, bytes_for, make_engine, make_geometry
from kvdisk.cli.replay.trace import Trace
from kvdisk.stats import REFUSALS, TIERS

JSON_VERSION = 3


@dataclass
class Run:
    """The result of one run. Shares are of 1. Dicts are by tier (gpu, cpu, nvme) or by reason.

    ``policy``: its name in the table. ``room``: of the tier in which the runs differ.
    ``nvme_bytes``: the setting that gives the NVMe tier this room; 0 where there is no such tier.
    ``written_*``, ``read_*``: to and from NVMe. ``write_amplification``: blocks written for each
    distinct block of the trace. ``written_per_hit``: blocks written for each hit in NVMe.
    ``refused``: offers; ``evicted_unwritten_*``: copies that were evicted from the CPU tier and not
    written to NVMe.
    """

    policy: str
    setting: Setting
    room: Capacity
    nvme_bytes: int
    hit_rate: float
    hit_blocks_rate: float
    hit_tokens: dict[str, int]
    hit_blocks: dict[str, int]
    written_blocks: int
    written_bytes: int
    read_blocks: int
    read_bytes: int
    write_amplification: float
    written_per_hit: float | None
    evicted_blocks: dict[str, int]
    refused: dict[str, int]
    seconds: float


@dataclass
class TraceFacts:
    """The facts about a trace. ``references``: blocks of all prompts. ``tokens``: of all prompts.
    ``most_hits``: the share of them that an endless tier would hit."""

    name: str
    form: str
    block_tokens: int
    requests: int
    references: int
    tokens: int
    most_hits: float
    distinct_blocks: int
    longest_prompt_blocks: int
    notes: tuple[str, ...]


@dataclass
class Replayed:
    """All runs, room by room, as ``--json`` prints them.

    The shape changes only with ``json_version``. ``slot_bytes``: of a block on NVMe, with its
    header. ``seconds``: of all runs together.
    """

    trace: TraceFacts
    block_bytes: int
    slot_bytes: int
    seconds: float
    processes: int
    runs: list[Run]
    references_per_second: int
    json_version: int = JSON_VERSION
    kvdisk_version: str = __version__


def run_setting(trace: Trace, slot_bytes: int, setting: Setting) -> Run:
    """Take a trace through the manager. Raises ConfigError where a policy does not exist."""
    engine = make_engine(trace, setting)
    began_s = time.perf_counter()
    for number, request in enumerate(trace.requests):
        engine.serve(number, request)
    seconds = time.perf_counter() - began_s
    stats, nvme_hits = engine.manager.stats, engine.hit_blocks[Tier.NVME]
    return Run(
        policy=setting.name,
        setting=setting,
        room=setting.room,
        nvme_bytes=bytes_for(setting.nvme.slots, slot_bytes) if setting.nvme.slots else 0,
        hit_rate=sum(engine.hit_tokens.values()) / trace.tokens,
        hit_blocks_rate=sum(engine.hit_blocks.values()) / trace.references,
        hit_tokens=_by_tier(engine.hit_tokens),
        hit_blocks=_by_tier(engine.hit_blocks),
        written_blocks=engine.written,
        written_bytes=engine.written * slot_bytes,
        read_blocks=engine.read,
        read_bytes=engine.read * slot_bytes,
        write_amplification=engine.written / trace.distinct,
        written_per_hit=engine.written / nvme_hits if nvme_hits else None,
        evicted_blocks={tier: stats[f"evicted_blocks.{tier}"] for tier in TIERS},
        refused={why: stats[f"refused_blocks.{why}"] for why in REFUSALS}
        | {f"evicted_unwritten_{why}": stats[f"evicted_unwritten.{why}"] for why in REFUSALS},
        seconds=round(seconds, 3),
    )


def _by_tier(counts: Mapping[Tier, int]) -> dict[str, int]:
    return {tier.name.lower(): count for tier, count in counts.items()}


_shared: list[tuple[Trace, int]] = []
"""The trace and the bytes of a slot, for forked processes: a trace is too large to be sent."""


def _run_shared(setting: Setting) -> Run:
    return run_setting(*_shared[0], setting)


def run_all(
    trace: Trace, settings: Sequence[Setting], block_bytes: int, processes: int, watch: Callable[[int], None]
) -> Replayed:
    """Run every setting, ``processes`` at a time. ``watch``: called with how many have ended.

    Raises as ``run_setting``.
    """
    slot_bytes = make_geometry(trace, block_bytes).slot_sizes[0]
    processes = min(processes, len(settings))
    most_hits = trace.most_hits / trace.tokens
    counts = len(trace.requests), trace.references, trace.tokens, most_hits, trace.distinct, trace.longest
    facts = TraceFacts(trace.name, trace.form, trace.block_tokens, *counts, trace.notes)
    runs = []
    _shared[:] = [(trace, slot_bytes)]
    gc.collect()
    gc.freeze()  # the trace is there to stay
    began_s = time.perf_counter()
    try:
        with ProcessPoolExecutor(processes, mp_context=get_context("fork")) as pool:
            for run in pool.map(_run_shared, settings):
                runs.append(run)
                watch(len(runs))
    finally:
        gc.unfreeze()
        _shared.clear()
    seconds = time.perf_counter() - began_s
    order = {setting.room.blocks: at for at, setting in reversed(list(enumerate(settings)))}
    runs.sort(key=lambda run: order[run.room.blocks])
    rate = round(len(runs) * trace.references / seconds)
    return Replayed(facts, block_bytes, slot_bytes, round(seconds, 3), processes, runs, rate)
