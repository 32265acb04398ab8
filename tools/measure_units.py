# SPDX-License-Identifier: Apache-2.0
"""What units of several blocks cost in hits: families of requests, replayed with each.

    python tools/measure_units.py --requests 300 --room 5 --trace mooncake.jsonl

Of each family it prints how many tokens of prompts hit with blocks of 16 tokens, and how many
points fewer with units of 32, 64 and 128: in a tier that keeps all, and, replayed, in one that has
room for a share of the distinct blocks, the same in tokens for each unit. A file of a trace whose
blocks are larger than units says nothing of what is inside them: for it the bound is printed, which
is half a unit of each prompt that hits.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from make_traces import FAMILIES, make_trace

from kvdisk.cli.replay.run import run_setting
from kvdisk.cli.replay.tiers import Capacity, Setting, slots_for
from kvdisk.cli.replay.trace import Trace, read_trace
from kvdisk.config import Config

BLOCK_TOKENS = 16
UNITS = (32, 64, 128)


class Cost(NamedTuple):
    """Of one family: the share of tokens that hit with blocks, and the points fewer by unit."""

    name: str
    hit_rate: float
    lost: Sequence[float]


def hit_rate(trace: Trace, unit_tokens: int, share: float | None) -> float:
    """Return the share of a trace's tokens that hit, with room for a share of its blocks; None:
    for all."""
    of_units = trace.in_units(unit_tokens)
    if share is None:
        return of_units.most_hits / trace.tokens
    blocks = int(trace.distinct * share)
    count = max(1, blocks * trace.block_tokens // unit_tokens)
    config, none = Config(), Capacity("0", 0, 0)
    room = Capacity(str(count), count, slots_for(count))
    setting = Setting(config.eviction, config.cpu_admission, config.nvme_admission, "on_compute", none, room, 0)
    return run_setting(of_units, 1, setting).hit_rate


def costs(seeds: int, requests: int, share: float | None, names: Sequence[str]) -> Iterator[Cost]:
    """Yield what units cost in each family, as a mean over seeds."""
    for name in names:
        rates = []
        for seed in range(1, seeds + 1):
            trace = make_trace(name, seed, BLOCK_TOKENS, requests)
            rates.append([hit_rate(trace, unit, share) for unit in (BLOCK_TOKENS, *UNITS)])
        means = [sum(each) / seeds for each in zip(*rates, strict=True)]
        yield Cost(name, means[0], [100 * (means[0] - mean) for mean in means[1:]])


def bound(trace: Trace) -> Cost:
    """Return what units cost at most on average where hits end anywhere: of each prompt that hits,
    half of what a unit has more than a block."""
    seen: set[bytes] = set()
    hits = 0
    for request in trace.requests:
        hits += bool(request.hashes) and request.hashes[0] in seen
        seen.update(request.hashes)
    lost = [100 * hits * (unit - BLOCK_TOKENS) / 2 / trace.tokens for unit in UNITS]
    return Cost(f"{trace.name}, at most", trace.most_hits / trace.tokens, lost)


def row(cost: Cost) -> str:
    """Return a row of the table."""
    return f"| {cost.name} | {100 * cost.hit_rate:.1f} | {' | '.join(f'{lost:.2f}' for lost in cost.lost)} |"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=300, help="of each family")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--room", type=float, nargs="*", default=[5.0], help="in %% of the distinct blocks")
    parser.add_argument("--trace", type=Path, nargs="*", default=[], help="files, for the bound")
    options = parser.parse_args()
    head = f"| tokens of a unit | {BLOCK_TOKENS}: hits, % | {' | '.join(f'{unit}: points' for unit in UNITS)} |"
    for percent in (None, *options.room):
        room = "all" if percent is None else f"{percent:g} % of the distinct"
        print(f"room for {room} blocks\n\n{head}\n|---|{'---|' * (1 + len(UNITS))}")
        found = []
        share = None if percent is None else percent / 100
        for cost in costs(options.seeds, options.requests, share, options.families):
            found.append(cost)
            print(row(cost), flush=True)
        count = max(1, len(found))
        lost = [sum(each) / count for each in zip(*(cost.lost for cost in found), strict=True)]
        print(row(Cost("mean", sum(cost.hit_rate for cost in found) / count, lost)) + "\n", flush=True)
    for path in options.trace:
        print(row(bound(read_trace(path))), flush=True)


if __name__ == "__main__":
    main()
