# SPDX-License-Identifier: Apache-2.0
"""Compares the default policies with others on families of traces, at rooms of 2 to 50 %.

    python tools/compare_policies.py mooncake_conversation_trace.jsonl ...

prints the tables of ``docs/REPLAY.md``: of ``kvdisk replay`` with its defaults, with NVMe alone and
with memory of a tenth of it, of the best of six others, and of Belady's bound. The six are LRU, ARC
and S3-FIFO, each with all and with ``reuse(2)``. Constants were chosen on seeds 1 and 2.

Each family is there three times (``CASES``): in blocks of 512 tokens, at full length, and as an
evening to which nobody new comes.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import groupby, islice, product
from multiprocessing import get_context
from operator import itemgetter
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from make_traces import EVENING, FAMILIES, make_trace
from replay_models import MODELS, REUSE, run_model

from kvdisk.cli.replay.run import run_setting
from kvdisk.cli.replay.tiers import Capacity, Setting, make_geometry, parse_capacity
from kvdisk.cli.replay.trace import Trace, read_trace
from kvdisk.config import Config

ROOMS = ("2%", "5%", "10%", "25%")
FULL_LENGTH_ROOMS = ("5%", "10%", "25%", "50%")
"""With blocks of 16 tokens, where a prompt has thousands: of what is distinct, a hundredth would be
less than one prompt."""
OTHERS = [model + reuse for model, reuse in product(MODELS, ("", REUSE))]
NEAR = 0.3
"""Points behind the best of the others that count as level."""
CASES = {"short": (512, False), "full length": (16, False), "evening": (512, True)}
"""The tokens of a block, and whether nobody new comes."""
REFERENCES = {512: 75_000, 16: 800_000}
"""Blocks of a made trace, about, by the tokens of a block."""
_LONGER = {"coding agents": 5}
"""How many times as many blocks a family needs, so that more than a few sessions come."""
_BLOCK_BYTES = 1 << 20
_NONE = Capacity("0", 0, 0)


class Score(NamedTuple):
    """``hits``: blocks, in percent of all. ``written``: blocks."""

    hits: float
    written: int


class Row(NamedTuple):
    """One trace at one room. ``memory``: with a tenth of the room in memory."""

    trace: str
    room: str
    ours: Score
    memory: Score
    others: dict[str, Score]
    bound: Score

    @property
    def best(self) -> str:
        """The other policy that hits most."""
        return max(self.others, key=lambda name: self.others[name].hits)

    @property
    def lead(self) -> float:
        """Points ahead of the best of the others."""
        return self.ours.hits - self.others[self.best].hits

    @property
    def memory_lead(self) -> float:
        """The same with memory."""
        return self.memory.hits - self.others[self.best].hits

    @property
    def way(self) -> float:
        """Points from the best of the others to the bound."""
        return self.bound.hits - self.others[self.best].hits


def score(trace: Trace, room: str, policy: str) -> Score:
    """Run one policy at one room: ``""``: the defaults, ``"memory"``: with memory besides."""
    nvme = parse_capacity("--nvme", room, trace, make_geometry(trace, _BLOCK_BYTES), on_nvme=True)
    if policy in {"", "memory"}:
        config, blocks = Config(), nvme.blocks // 10
        cpu = Capacity("10 %", blocks, blocks) if policy else _NONE
        policies = config.eviction, config.cpu_admission, config.nvme_admission, config.store_policy
        run = run_setting(trace, _BLOCK_BYTES, Setting(*policies, cpu, nvme, 0))
        return Score(100 * run.hit_blocks_rate, run.written_blocks)
    counts = run_model(policy, [request.hashes for request in trace.requests], nvme.blocks)
    return Score(100 * sum(counts.hits) / trace.references, counts.written)


def read_traces(
    paths: Iterable[Path], families: Iterable[str], cases: Iterable[str], seed: int
) -> Iterator[tuple[str, Trace]]:
    """Yield traces with their families."""
    for path in paths:
        yield path.stem, read_trace(path)
    for family, case in product(families, cases):
        block_tokens, evening = CASES[case]
        requests, references = 200, REFERENCES[block_tokens] * _LONGER.get(family, 1)
        for _ in range(3):  # how long prompts are depends on how many came before
            trace = make_trace(family, seed, block_tokens, requests, evening=evening)
            requests = requests * references // trace.references
        yield family, trace


_traces: list[tuple[str, Trace]] = []
"""In forked processes, too: a trace is too large to be sent."""


def _score(at: int, room: str, policy: str) -> Score:
    return score(_traces[at][1], room, policy)


def compare(processes: int) -> Iterator[tuple[str, Row]]:
    """Yield a row for each trace and room, with its family, as soon as it is there."""
    policies = ["", "memory", *OTHERS, "belady"]
    cells = [
        (at, room)
        for at, (_, trace) in enumerate(_traces)
        for room in (FULL_LENGTH_ROOMS if trace.block_tokens == 16 else ROOMS)
    ]
    with ProcessPoolExecutor(processes, mp_context=get_context("fork")) as pool:
        scores = pool.map(_score, *zip(*((*cell, policy) for cell in cells for policy in policies), strict=True))
        for at, room in cells:
            family, trace = _traces[at]
            ours, memory, *others, bound = islice(scores, len(policies))
            name = f"{trace.block_tokens}, {trace.references / 1000:.0f} k{EVENING * trace.name.endswith(EVENING)}"
            yield family, Row(name, room, ours, memory, dict(zip(OTHERS, others, strict=True)), bound)


def tell(rows: Iterable[tuple[str, Row]]) -> Iterator[str]:
    """Yield the lines of a table for each family, and what comes of all."""
    found: list[tuple[str, Row]] = []
    for family, each in groupby(rows, key=itemgetter(0)):
        mine = [row for _, row in each]
        found += [(family, row) for row in mine]
        yield from ("", f"**{family}**: {mean(row.lead for row in mine):+.2f} points in the mean", "")
        yield "| tokens a block, blocks | room | kvdisk | with memory | best other | Belady | writes of its, of LRU's |"
        yield "|---|---|---|---|---|---|---|"
        for row in mine:
            best, lru, written = row.others[row.best], row.others["lru"], row.ours.written
            name = row.best.replace("lru", "LRU").replace("arc", "ARC").replace("s3fifo", "S3-FIFO")
            yield (
                f"| {row.trace} | {row.room} | {row.ours.hits:.2f} | {row.memory.hits:.2f} "
                f"| {name} {best.hits:.2f} | {row.bound.hits:.2f} "
                f"| {written / best.written:.2f}, {written / lru.written:.2f} |"
            )
    for kind, cells in (
        ("to which somebody new comes", [each for each in found if not each[1].trace.endswith(EVENING)]),
        ("of evenings", [each for each in found if each[1].trace.endswith(EVENING)]),
    ):
        yield from _sum_up(kind, cells) if cells else ()


def _sum_up(kind: str, rows: Sequence[tuple[str, Row]]) -> Iterator[str]:
    yield ""
    whole = sum(row.way for _, row in rows)
    for name, leads in (
        ("NVMe alone", [row.lead for _, row in rows]),
        ("memory besides", [row.memory_lead for _, row in rows]),
    ):
        behind, worst = sum(lead < -NEAR for lead in leads), leads.index(min(leads))
        family, row = rows[worst]
        part = f"{100 * sum(leads) / whole:.0f} %" if whole else "nothing"
        yield (
            f"With {name}, of {len(rows)} cells {kind} {behind} are more than {NEAR} points behind the best of the "
            f"six; the mean is {mean(leads):+.2f}, {part} of the way from there to Belady's; the worst is "
            f"{leads[worst]:+.2f} ({family}, {row.trace}, {row.room})."
        )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("traces", type=Path, nargs="*", help="of real requests")
    parser.add_argument("--families", nargs="*", choices=FAMILIES, default=list(FAMILIES), help="the made ones: all")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES), help="of each family: all")
    parser.add_argument("--seed", type=int, default=3, help="of the made ones")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    _traces[:] = read_traces(options.traces, options.families, options.cases, options.seed)
    for line in tell(compare(options.processes)):
        print(line, flush=True)


if __name__ == "__main__":
    main()
