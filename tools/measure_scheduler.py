# SPDX-License-Identifier: Apache-2.0
"""Measure what kvdisk's scheduler side costs, beside vLLM's own offloading to memory doing the same in the same run.

No model, no worker and no KV: lookups and stores are decided and booked, and nothing is moved. Each round measures
everything once, in turn, each time with a prompt that was not looked at before, and who begins changes from round to
round; figures are medians of the rounds, of the thread's processor time, since nothing here waits: what others do on
the machine still fills its caches. Ratios are of the medians, and beside that of the means: what one step pays for
many, as an eviction does, is only in these. A prompt of 32,000 tokens is 2,000 blocks; the store holds it whole. Where
a prompt is stored "right after another" of its kind, caches are warm from that; else other work was done in between.
"Stored" blocks came to the store in the order of their prompts, "found at start" in the order of their keys, as after a
restart. The bare dictionary has the same keys in the same order, and is asked for each by ``list(map(d.get, keys))``.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from measure_overhead import describe_machine
from rich.console import Console
from rich.table import Table
from scheduler_hits import OURS, THEIRS, WITH_NVME, Hits, Sample, Turns, Unwanted, timed
from scheduler_stands import (
    BLOCK_TOKENS,
    BothSides,
    catalog_of,
    completed,
    full_offloading_manager,
    hashes_of,
    order_of,
    report_of,
)
from scheduler_stores import LONG, Stores, stored_by, timed_sides

from kvdisk.blocks import make_block_keys
from kvdisk.config import Config
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.manager.admission import make_admission
from kvdisk.manager.jobs import Transfers
from kvdisk.manager.manager import TierManager
from kvdisk.manager.parts import Parts
from kvdisk.manager.store_policy import make_store_policy
from kvdisk.manager.tiers import CpuSpace

PROMPT_BLOCKS = 2000
RUNNING = 100
NEW_BLOCKS = 10
ASKS = 20
PARTS = ("steps", "stores", "hits", "lookups")
BARE = "dictionary"
PLACES = {"prompts": "stored", "keys": "found at start"}


class Figure(NamedTuple):
    """Microseconds."""

    median: float
    lowest: float
    highest: float
    mean: float


class Lookups:
    """A store, a dictionary and, with ``order`` "prompts", vLLM's manager, all with the same blocks."""

    def __init__(self, block_count: int, order: str) -> None:
        self._where = f"{block_count:,} blocks, {PLACES[order]}"
        numbers = order_of(block_count, order)
        geometry = Geometry((GroupGeometry(0, BLOCK_TOKENS, 4096),), 1, BLOCK_TOKENS)
        parts = Parts(Config(), geometry, _NoBlocks(), catalog_of(numbers, PROMPT_BLOCKS), Transfers(1))
        cpu = CpuSpace(parts, (1,), make_admission("all", 0))
        self._manager = TierManager(parts, cpu, None, make_store_policy("on_compute"), 1)
        self._bare = {key: row for row, key in enumerate(make_block_keys(hashes_of(numbers), 0))}
        self._theirs = full_offloading_manager(numbers, PROMPT_BLOCKS) if order == "prompts" else None
        self._prompts = [range(start, start + PROMPT_BLOCKS) for start in range(0, block_count, PROMPT_BLOCKS)]
        self._random = random.Random(block_count)  # noqa: S311 - not a secret

    def round(self) -> Iterator[Sample]:
        """Look a prompt up in each; no two the same prompt."""
        calls = [(OURS, self._ours), (BARE, self._dictionary), (THEIRS, self._vllm)]
        self._random.shuffle(calls)
        for (owner, call), prompt in zip(calls, self._random.sample(self._prompts, len(calls)), strict=True):
            for what, seconds in call(hashes_of(prompt)):
                yield f"{what}, {self._where}", owner, seconds

    def _ours(self, hashes: list[bytes]) -> Iterator[tuple[str, float]]:
        manager, tokens = self._manager, len(hashes) * BLOCK_TOKENS
        yield "new request", timed(lambda: manager.new_request("one", hashes, tokens))[0]
        for what, count in (("lookup", 1), ("again", ASKS)):
            seconds, found = timed(
                lambda count=count: [manager.lookup("one", 0, tokens + 1, 1.0) for _ in range(count)]
            )  # type: ignore[misc]
            assert found == [tokens] * count
            yield what, seconds / count
        manager.request_finished("one")

    def _dictionary(self, hashes: list[bytes]) -> Iterator[tuple[str, float]]:
        bare = self._bare
        keys = make_block_keys(hashes, 0)
        seconds, found = timed(lambda: list(map(bare.get, keys)))
        assert None not in found
        yield "lookup", seconds

    def _vllm(self, hashes: list[bytes]) -> Iterator[tuple[str, float]]:
        if self._theirs is None:
            return
        from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key

        manager, hit = self._theirs, LookupResult.HIT
        context = ReqContext(req_id="one")
        manager.on_new_request(context)
        keys: list[Any] = []

        def make_keys() -> None:  # as its RequestOffloadState does
            for number, block_hash in enumerate(hashes, 1):
                key = make_offload_key(block_hash, 0)
                keys.append(key)
                context.set_offload_key_position(key, number * BLOCK_TOKENS)

        def look_up() -> int:  # as the loop of its scheduler side does, without the events
            count = 0
            for key in keys:
                if manager.lookup(key, context) is not hit:
                    break
                count += 1
            return count

        yield "new request", timed(make_keys)[0]
        for what in ("lookup", "again"):
            seconds, found = timed(look_up)
            assert found == len(keys)
            yield what, seconds
        manager.on_request_finished(context)


class _NoBlocks:
    """An engine without GPU blocks."""

    block_count = 2

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"a lookup needs no {name}")


class Steps:
    """Steps of RUNNING requests, as both connectors' scheduler sides plan them. ``store_dir``: see ``BothSides``."""

    def __init__(self, store_dir: Path | None = None) -> None:
        self._sides, self._turns = BothSides(RUNNING, 128, 200_000, store_dir), Turns()
        self._with = WITH_NVME if store_dir else ""

    def round(self) -> Iterator[Sample]:
        """Plan a step in which nothing is new, and one in which NEW_BLOCKS requests fill a block."""
        sides = self._sides
        self._turns.next_round()
        yield from self._step("build_connector_meta, nothing new", sides.still(), None)
        filled = f"{NEW_BLOCKS} new blocks"
        yield from self._step(f"build_connector_meta, {filled}", sides.filling(NEW_BLOCKS), f"settling {filled}")

    def _step(self, what: str, output: Any, settling: str | None) -> Iterator[Sample]:
        sides, both = self._sides, self._turns.both
        (ours_s, plan), (theirs_s, meta) = both(
            lambda: sides.ours.plan(output), lambda: sides.theirs.build_connector_meta(output)
        )
        assert stored_by(plan) == len(meta.store_jobs) == (NEW_BLOCKS if settling else 0)
        yield what + self._with, OURS, ours_s
        yield what + self._with, THEIRS, theirs_s
        report, done = report_of(plan), completed(meta)
        (ours_s, _), (theirs_s, _) = both(
            lambda: sides.ours.settle(report, set()), lambda: sides.theirs.update_connector_output(done)
        )
        if settling:
            yield settling + self._with, OURS, ours_s
            yield settling + self._with, THEIRS, theirs_s


class Decoding:
    """A request that decodes alone: the steps of one block, of which the last fills and stores it."""

    def __init__(self, store_dir: Path | None = None) -> None:
        self._sides, self._turns = BothSides(1, 128, 200_000, store_dir), Turns()
        self._what = f"a decoded block of a lone request, its {BLOCK_TOKENS} steps{WITH_NVME if store_dir else ''}"

    def round(self) -> Iterator[Sample]:
        """Plan and settle a block's steps."""
        sides, ours_s, theirs_s = self._sides, 0.0, 0.0
        self._turns.next_round()
        for step in range(BLOCK_TOKENS):
            output = sides.still() if step < BLOCK_TOKENS - 1 else sides.filling(1)
            both_s, plan = timed_sides(sides, output, self._turns)
            ours_s, theirs_s = ours_s + both_s[0], theirs_s + both_s[1]
        assert stored_by(plan) == 1
        yield self._what, OURS, ours_s
        yield self._what, THEIRS, theirs_s


def measure(options: argparse.Namespace, store_dir: Path) -> dict[str, dict[str, list[float]]]:
    """Run the rounds; return seconds by what was measured and whose it is. ``store_dir``: an empty directory.

    Parts are let go when they are over.
    """
    found: dict[str, dict[str, list[float]]] = {}
    if "steps" in options.parts:
        run_rounds(
            [Steps(), Steps(store_dir), Unwanted(RUNNING, 400), Decoding(), Decoding(store_dir)], options.rounds, found
        )
    if "stores" in options.parts:
        for blocks in (1, 16, LONG):
            kinds = [(is_full, where) for where in (None, store_dir) for is_full in (False, True)]
            run_rounds(
                [Stores(blocks, is_full=is_full, store_dir=where) for is_full, where in kinds], options.rounds, found
            )
    if "hits" in options.parts:
        # A short one after a long one, so that it finds cold caches.
        run_rounds(
            [Hits(16), Hits(16, store_dir), Hits(PROMPT_BLOCKS), Hits(1), Hits(PROMPT_BLOCKS, store_dir)],
            options.rounds,
            found,
        )
    if "lookups" in options.parts:
        # All sizes at once, so that growth is that of the same minute.
        lookups = [Lookups(block_count, order) for block_count in options.blocks for order in PLACES]
        run_rounds(lookups, options.rounds, found)
    return found


def run_rounds(parts: list[Any], rounds: int, found: dict[str, dict[str, list[float]]]) -> None:
    """Let the parts take their turns."""
    gc.collect()
    gc.freeze()  # as vLLM does when it has started
    for _ in range(rounds):
        for part in parts:
            for what, owner, seconds in part.round():
                found.setdefault(what, {}).setdefault(owner, []).append(seconds)
    gc.unfreeze()


def figures_of(found: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, Figure]]:
    """Return medians and spread, in microseconds."""
    return {
        what: {
            owner: Figure(
                *(1e6 * figure for figure in (statistics.median(taken), min(taken), max(taken), statistics.mean(taken)))
            )
            for owner, taken in by_owner.items()
        }
        for what, by_owner in found.items()
    }


def table_of(figures: dict[str, dict[str, Figure]]) -> Table:
    """Return the table."""
    table = Table(
        "us: median (lowest to highest)", "kvdisk", "vLLM", "dictionary", "kvdisk / vLLM", "of means", "/ dictionary"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for what, by_owner in figures.items():
        cells = [
            f"{one.median:,.2f} ({one.lowest:,.2f} to {one.highest:,.2f})" if one is not None else ""
            for one in (by_owner.get(owner) for owner in (OURS, THEIRS, BARE))
        ]
        ratios = ratio(by_owner, THEIRS), ratio(by_owner, THEIRS, "mean"), ratio(by_owner, BARE)
        table.add_row(what, *cells, *ratios)
    return table


def ratio(by_owner: dict[str, Figure], owner: str, which: str = "median") -> str:
    """Return how many times as long as another kvdisk takes, by the medians or the means."""
    if OURS not in by_owner or owner not in by_owner:
        return ""
    return f"{getattr(by_owner[OURS], which) / getattr(by_owner[owner], which):.2f}"


def growth(figures: dict[str, dict[str, Figure]], blocks: list[int]) -> Iterator[str]:
    """Yield how lookups grow from the first size to the last, beside the dictionary's."""
    for place in PLACES.values():
        first, last = (figures[f"lookup, {count:,} blocks, {place}"] for count in (blocks[0], blocks[-1]))
        ours, bare = (last[owner].median / first[owner].median for owner in (OURS, BARE))
        yield (
            f"From {blocks[0]:,} to {blocks[-1]:,} blocks, {place}, a lookup takes {ours:.2f} times as long,"
            f" that of the dictionary {bare:.2f} times: {ours / bare:.2f}."
        )


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--blocks", type=int, nargs="+", default=[100_000, 1_000_000], help="of the stores looked up in"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True, width=200)
    start_s, load_before = time.monotonic(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as directory:
        figures = figures_of(measure(options, Path(directory)))
    console.print(table_of(figures))
    if "lookups" in options.parts:
        for line in growth(figures, options.blocks):
            console.print(line)
    console.print(f"{options.rounds} rounds, {time.monotonic() - start_s:.0f} s in all. {describe_machine(Path())}")
    console.print(f"Load average before and after (this tool is 1 of it): {load_before:.1f}, {os.getloadavg()[0]:.1f}")
    if options.json:
        shown = {what: {who: figure._asdict() for who, figure in owners.items()} for what, owners in figures.items()}
        options.json.write_text(json.dumps({"rounds": options.rounds, "figures_us": shown}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
