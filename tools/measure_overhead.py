# SPDX-License-Identifier: Apache-2.0
"""What kvdisk costs where it gains nothing: throughput on prompts that were never seen, with it and
without it.

Two engines stay alive side by side, one with the connector and one without, and work in turn: never
both at once. Each turn has prompts of its own, so there is nothing to hit and everything to store.
Before the other engine's turn, stores are drained; that wait is shown, and not part of the
throughput. The same engine can be a tenth faster or slower from one start to the next, so there are
several pairs of engines. CPU time, of all threads of an in-process engine, is the figure to trust
where others use the machine.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from demo import WORK, DemoError, build_model
from engine_child import EngineChild, EngineError
from figures import Record, add_json_option
from machine import Machine
from rich.console import Console
from rich.table import Table

from kvdisk.cli.survey import survey_store

CONNECTED, ALONE = "with kvdisk", "vLLM alone"


class Turn(NamedTuple):
    """One engine's work on one set of prompts, how long its stores took to drain after it, and the
    CPU time of both."""

    work_s: float
    drain_s: float
    cpu_s: float


def make_prompts(seed: int, count: int, length: int, vocabulary: int) -> list[list[int]]:
    """Return prompts of random tokens that no other seed gives."""
    chosen = random.Random(seed)  # noqa: S311 - not a secret
    return [[chosen.randrange(10, vocabulary) for _ in range(length)] for _ in range(count)]


def take_turn(engine: EngineChild, prompts: list[list[int]], max_tokens: int) -> Turn:
    """Run one set of prompts, all handed over at once, and drain."""
    used_s = engine.cpu_s()
    start_s = time.perf_counter()
    answers = engine.generate(prompts, max_tokens)
    worked_s = time.perf_counter()
    engine.drain()
    assert not any(answer.cached for answer in answers), "a prompt was found somewhere, so this measures something else"
    return Turn(worked_s - start_s, time.perf_counter() - worked_s, engine.cpu_s() - used_s)


def take_turns(
    engines: dict[str, EngineChild], pair: int, options: argparse.Namespace, console: Console
) -> Iterator[tuple[str, Turn]]:
    """Yield turns of both engines, interleaved; which goes first changes with each round. The first
    is not counted."""
    for number in range(options.rounds + 1):
        order = list(engines) if (number + pair) % 2 else list(reversed(engines))
        for place, name in enumerate(order):
            seed = 2 * (pair * (options.rounds + 1) + number) + place
            prompts = make_prompts(seed, options.requests, options.prompt_tokens, options.vocabulary)
            turn = take_turn(engines[name], prompts, options.max_tokens)
            if number:
                console.print(f"pair {pair + 1}, {name}: {turn.work_s:.2f} s, then {turn.drain_s:.2f} s to drain")
                yield name, turn


def table_of(turns: dict[str, list[Turn]], tokens: int) -> Table:
    """Return the table of both engines' throughput; ``tokens``: processed in a turn."""
    table = Table("", "median tokens/s", "lowest", "highest", "median drain", "median CPU time")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, taken in turns.items():
        rates = [tokens / turn.work_s for turn in taken]
        table.add_row(
            name,
            *(f"{rate:,.0f}" for rate in (statistics.median(rates), min(rates), max(rates))),
            f"{statistics.median(turn.drain_s for turn in taken):.2f} s",
            f"{statistics.median(turn.cpu_s for turn in taken):.2f} s",
        )
    return table


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a local model directory; without it the demo's random one")
    parser.add_argument("--store-parent", type=Path, default=None, help="directory to make the store in, and remove it")
    parser.add_argument("--pairs", type=int, default=3, help="times that both engines are started anew")
    parser.add_argument("--rounds", type=int, default=3, help="counted turns of each engine of a pair")
    parser.add_argument("--requests", type=int, default=24, help="requests of a turn")
    parser.add_argument("--concurrent", type=int, default=8, help="requests that run at once")
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=4096, help="token ids of the prompts are below this")
    parser.add_argument("--layout", choices=("inproc", "own"), default="inproc")
    parser.add_argument("--nvme-bytes", default="4GiB")
    parser.add_argument("--cpu-bytes", default="1GiB")
    add_json_option(parser)
    return parser.parse_args()


def measure(options: argparse.Namespace, work: Path, console: Console) -> dict[str, list[Turn]]:
    """Start pairs of engines, let them take their turns, and return all turns by name."""
    model = build_model() if options.model is None else options.model.absolute()
    turns: dict[str, list[Turn]] = {CONNECTED: [], ALONE: []}
    for pair in range(options.pairs):
        place = work / str(pair)
        place.mkdir()
        for name, turn in run_pair(model, pair, place, options, console):
            turns[name].append(turn)
        shutil.rmtree(place)
    return turns


def run_pair(
    model: Path, pair: int, place: Path, options: argparse.Namespace, console: Console
) -> Iterator[tuple[str, Turn]]:
    """Yield the turns of one pair of engines."""
    config = {
        "store_dirs": str(place / "store"),
        "nvme_bytes": options.nvme_bytes,
        "cpu_bytes": options.cpu_bytes,
        "segment_bytes": "256MiB",
    }
    limits = {"max_model_len": options.prompt_tokens + options.max_tokens, "max_num_seqs": options.concurrent}
    with (
        EngineChild(model, place / "connected.log", extra_config=config, layout=options.layout, **limits) as connected,
        EngineChild(model, place / "alone.log", layout=options.layout, **limits) as alone,
    ):
        yield from take_turns({CONNECTED: connected, ALONE: alone}, pair, options, console)
    used_bytes = survey_store(place / "store").totals.used_bytes
    assert used_bytes, "nothing was stored, so this measures nothing"
    console.print(f"pair {pair + 1} left {used_bytes / 2**20:,.0f} MiB of blocks on NVMe")


def report(options: argparse.Namespace, turns: dict[str, list[Turn]], record: Record, console: Console) -> None:
    """Note and print what was measured."""
    tokens = options.requests * (options.prompt_tokens + options.max_tokens)
    rounds = list(zip(turns[CONNECTED], turns[ALONE], strict=True))
    ratios = [alone.work_s / connected.work_s for connected, alone in rounds]
    cpu_ratios = [connected.cpu_s / alone.cpu_s for connected, alone in rounds]
    for name, taken in turns.items():
        record.add("turns", name, "tokens/s", [round(tokens / turn.work_s) for turn in taken])
        record.add("turns", name, "drain", [turn.drain_s for turn in taken], "s")
        record.add("turns", name, "processor time", [turn.cpu_s for turn in taken], "s")
    record.add("of vLLM alone", "throughput", "ratio", ratios)
    record.add("of vLLM alone", "processor time", "ratio", cpu_ratios)
    console.print()
    console.print(table_of(turns, tokens))
    console.print(
        f"Throughput with kvdisk is {statistics.median(ratios):.3f} of vLLM alone"
        f" (median of {len(ratios)} rounds, {options.pairs} pairs of engines; {min(ratios):.3f} to {max(ratios):.3f})."
    )
    if options.layout == "inproc":
        ratio = statistics.median(cpu_ratios)
        console.print(f"CPU time with kvdisk is {ratio:.3f} of vLLM alone (median of rounds).")
    console.print(
        f"A turn: {options.requests} prompts of {options.prompt_tokens:,} tokens, {options.max_tokens} tokens decoded,"
        f" {options.concurrent} at once, layout {options.layout}."
    )


def main() -> int:
    """Measure and report."""
    options = parse_options()
    console = Console(highlight=False, soft_wrap=True)
    WORK.mkdir(exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="overhead-", dir=options.store_parent or WORK))
    record = Record(work)
    try:
        report(options, measure(options, work, console), record, console)
        console.print(Machine.here(work).sentence)
    except (DemoError, EngineError) as failure:
        console.print(f"kvdisk: {failure}", markup=False)
        return 1
    finally:
        # The logs of a failure stay.
        for store in work.glob("*/store"):
            shutil.rmtree(store)
    shutil.rmtree(work)
    record.write(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
