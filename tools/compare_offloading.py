# SPDX-License-Identifier: Apache-2.0
"""kvdisk, as a connector and as a tier of vLLM's, beside vLLM's own offloading and LMCache's
server: the same prompts, one way after the other, on the vLLM that is installed here.

    python tools/compare_offloading.py --dir /nvme/somewhere --json figures.json --picture bars.svg

Of each way: the time to the first token by where a prompt is, tokens a second where nothing is
known and where half of it is, and whether the answers are those of vLLM alone: also after a bit
was flipped in every 64 KiB of what is stored, with other weights under the same path, after ``kill
-9``, and with three times the cap written. A way that does not start is named, and the others go
on. The exit code is 1 where either of kvdisk's doors gave a wrong token or took more of the drive
than its cap.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from compared_engines import ALONE, ComparedEngines, FoundOfWay, compare, drop_pages, markdown_of, options_for
from connectors import Way, await_quiet, flip_bits, kill, taken_bytes, ways_here
from demo import WORK
from engine_child import CPU, NEAR_TIE, Answer, EngineChild, EngineError, agrees, vllm_device
from rich import box
from rich.console import Console
from rich.table import Table

MIB = 1 << 20
GENERATED = 16
"""Tokens of each answer."""
COMPUTED, IN_MEMORY, ON_DRIVE = "computed", "from memory", "from the drive"
NOTHING_KNOWN, HALF_KNOWN = "nothing known", "half known"
FLIPPED, OTHER_WEIGHTS, KILLED = "a bit flipped in every 64 KiB", "other weights, same path", "after kill -9"
TIMES_THE_CAP = 3
PATIENCE = 50
"""Turns in which a connector may let go of blocks, before vLLM's own cache is emptied."""
TABLE_WIDTH = 120
Prompt = list[int]


@dataclass(frozen=True)
class Work:
    """What every way is asked. ``timed``: by length, prompts of which each is asked alone; those of
    the shortest length are asked again in each trial. ``new`` and ``others``: asked at once,
    nothing of them known, and together with ``timed``'s shortest; ``much``: more than the cap."""

    timed: dict[int, list[Prompt]]
    new: list[Prompt]
    others: list[Prompt]
    much: list[Prompt]
    token_bytes: int

    @classmethod
    def make(cls, lengths: Sequence[int], each: int, cap_bytes: int, token_bytes: int, vocabulary: int) -> Work:
        """Make prompts of random tokens, the same ones each time."""
        rng = random.Random(20260)  # noqa: S311 - to be the same each time

        def prompts(count: int, length: int) -> list[Prompt]:
            return [[rng.randrange(3, vocabulary) for _ in range(length)] for _ in range(count)]

        short = min(lengths)
        much = -(-TIMES_THE_CAP * cap_bytes // (short * token_bytes))
        return cls(
            {length: prompts(each, length) for length in lengths},
            prompts(2 * each, short),
            prompts(each, short),
            prompts(much, short),
            token_bytes,
        )

    @property
    def asked_again(self) -> list[Prompt]:
        """The prompts of the trials."""
        return self.timed[min(self.timed)]

    @property
    def memory_bytes(self) -> int:
        """Room for all that is timed, and as much again."""
        tokens = sum(len(prompt) for prompts in (*self.timed.values(), self.new, self.others) for prompt in prompts)
        return 2 * tokens * self.token_bytes + 64 * MIB

    @property
    def gpu_tokens(self) -> int:
        """Tokens that vLLM's own cache has to hold at once."""
        return 2 * max(*self.timed, sum(map(len, self.new)), sum(map(len, [*self.others, *self.asked_again])))


@dataclass
class Found(FoundOfWay):
    """See ``FoundOfWay``. ``first_s``: median seconds to the first token, by where and length;
    ``cached``: the median share of a prompt that was not computed, likewise. ``rates``: tokens a
    second. ``wrong``: answers that were not right, by trial, of ``asked``; ``loaded``: the tokens
    that were not computed in each trial. ``drive_bytes``: taken with three times the cap
    written."""

    first_s: dict[str, dict[int, float]] = field(default_factory=dict)
    cached: dict[str, dict[int, float]] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    wrong: dict[str, int] = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=dict)
    loaded: dict[str, int] = field(default_factory=dict)
    drive_bytes: int | None = None


class Comparison(ComparedEngines[Found]):
    """Runs the ways."""

    found_type = Found

    def __init__(self, options: argparse.Namespace, place: Path) -> None:
        super().__init__(options, place)
        self.cap_bytes = options.cap_mib * MIB
        self.work = Work.make(options.lengths, options.prompts, self.cap_bytes, self.token_bytes, self.vocabulary)
        self.gpu_bytes = self.work.gpu_tokens * self.token_bytes + 64 * MIB
        self.most_tokens = max(self.work.timed) + 2 * GENERATED
        self.right: dict[str, list[Answer]] = {}
        """Of vLLM alone, by what was asked."""

    def ask_in_turn(self, engine: EngineChild, found: Found, where: str) -> None:
        """Ask what is timed, one after the other, and compare the answers."""
        for length, prompts in self.work.timed.items():
            answers = self.ask(engine, found, where, f"{length}", prompts)
            found.first_s.setdefault(where, {})[length] = statistics.median(answer.ttft_s for answer in answers)
            shares = [answer.cached / length for answer in answers]
            found.cached.setdefault(where, {})[length] = statistics.median(shares)

    def ask(self, engine: EngineChild, found: Found, trial: str, what: str, prompts: list[Prompt]) -> list[Answer]:
        """Ask prompts one after the other. vLLM alone says what is right."""
        alone = found.way == ALONE
        answers = engine.generate(prompts, GENERATED, together=False, gaps=alone)
        if alone:
            self.right[what] = answers
        near = NEAR_TIE[vllm_device()]
        wrong = [not agrees(*both, near) for both in zip(self.right[what], answers, strict=True)]
        found.wrong[trial] = found.wrong.get(trial, 0) + sum(wrong)
        found.asked[trial] = found.asked.get(trial, 0) + len(wrong)
        found.loaded[trial] = found.loaded.get(trial, 0) + sum(answer.cached or 0 for answer in answers)
        return answers

    def measure_rates(self, engine: EngineChild, found: Found) -> None:
        """Ask many at once: nothing known, then half of it."""
        loads = {NOTHING_KNOWN: self.work.new, HALF_KNOWN: [*self.work.others, *self.work.asked_again]}
        for name, prompts in loads.items():
            engine.reset(PATIENCE)
            began_s = time.perf_counter()
            engine.generate(prompts, GENERATED)
            tokens = sum(len(prompt) + GENERATED for prompt in prompts)
            found.rates[name] = tokens / (time.perf_counter() - began_s)

    @property
    def figures(self) -> dict[str, Any]:
        """See ``ComparedEngines``."""
        return super().figures | {"cap_bytes": self.cap_bytes}

    # -- ways --------------------------------------------------------------------------------------

    def run_alone(self) -> Found:
        """Run vLLM alone: what it answers is right. Raises EngineError."""
        found = Found(ALONE)
        with self.engine(ALONE) as engine:
            self.ask_in_turn(engine, found, COMPUTED)
            self.measure_rates(engine, found)
            self.ask(engine, found, COMPUTED, "much", self.last_of_much)
        with self.other_weights(), self.engine(ALONE) as engine:
            self.ask(engine, found, COMPUTED, OTHER_WEIGHTS, self.work.asked_again)
        return found

    def run(self, way: Way, found: Found) -> None:
        """Run one way through all, as far as it gets. Raises EngineError."""
        place, memory = self.place / way.name.replace(" ", "-").replace(",", ""), self.work.memory_bytes
        place.mkdir()
        transfer = partial(way.transfer_config, place, memory, 4 * memory)
        beside = partial(way.beside, place, memory, WORK / "compared-beside.log")
        with beside(), self.engine(way.name, transfer()) as engine:
            self.ask_in_turn(engine, found, COMPUTED)
            engine.reset(PATIENCE)
            self.ask_in_turn(engine, found, IN_MEMORY)
            self.measure_rates(engine, found)
            engine.drain()
        if not way.files:
            return
        await_quiet(place)
        drop_pages()
        with beside(), self.engine(way.name, transfer()) as engine:
            self.ask_in_turn(engine, found, ON_DRIVE)
        with self.other_weights(), beside(), self.engine(way.name, transfer()) as engine:
            self.ask(engine, found, OTHER_WEIGHTS, OTHER_WEIGHTS, self.work.asked_again)
        if not flip_bits(place):
            raise EngineError(f"{way.name} has left no KV in {place}.")
        with beside(), self.engine(way.name, transfer()) as engine:
            self.ask(engine, found, FLIPPED, f"{min(self.work.timed)}", self.work.asked_again)
        shutil.rmtree(place)
        self.run_capped(way, found)

    def run_capped(self, way: Way, found: Found) -> None:
        """Write more than the cap, and kill the engine with blocks on their way."""
        place = self.place / "capped"
        place.mkdir()
        transfer = partial(way.transfer_config, place, self.cap_bytes, self.cap_bytes)
        beside = partial(way.beside, place, self.cap_bytes, WORK / "compared-beside.log")
        try:
            with beside() as server, self.engine(way.name, transfer()) as engine:
                engine.generate(self.work.much[: -self.options.prompts], GENERATED)
                engine.drain()
                await_quiet(place)
                found.drive_bytes = taken_bytes(place)
                engine.generate(self.last_of_much, GENERATED)
                kill(engine, server)
            with beside(), self.engine(way.name, transfer()) as engine:
                self.ask(engine, found, KILLED, "much", self.last_of_much)
        finally:
            shutil.rmtree(place)

    @property
    def last_of_much(self) -> list[Prompt]:
        """Those that are on their way to the drive when the engine is killed."""
        return self.work.much[-self.options.prompts :]


# -- what is shown ---------------------------------------------------------------------------------


def rows_of(found: Sequence[Found], cap_bytes: int) -> list[tuple[str, list[str]]]:
    """Return the rows of the table: a label, and the cell of each way."""
    rows: list[tuple[str, list[str]]] = []
    for where in (COMPUTED, IN_MEMORY, ON_DRIVE):
        for length in sorted({length for one in found for length in one.first_s.get(where, {})}):
            cells = []
            for one in found:
                seconds, share = one.first_s.get(where, {}).get(length), one.cached.get(where, {}).get(length, 0)
                known = f" ({share:.0%})" if where != COMPUTED else ""
                cells.append("" if seconds is None else f"{seconds:.3f} s{known}")
            rows.append((f"first token of {length:,}, {where}", cells))
    for rate in (NOTHING_KNOWN, HALF_KNOWN):
        cells = [f"{one.rates[rate]:,.0f}" if rate in one.rates else "" for one in found]
        rows.append((f"tokens a second, {rate}", cells))
    for trial in (COMPUTED, IN_MEMORY, ON_DRIVE, FLIPPED, OTHER_WEIGHTS, KILLED):
        cells = [f"{one.wrong[trial]} of {one.asked[trial]}" if trial in one.asked else "" for one in found]
        rows.append((f"wrong answers, {trial}", cells))
    taken = [f"{one.drive_bytes / MIB:,.0f} MiB" if one.drive_bytes is not None else "" for one in found]
    times = f"{TIMES_THE_CAP} times {cap_bytes / MIB:,.0f} MiB written"
    rows.append((f"on the drive, {times}", taken))
    return rows


def table_of(found: Sequence[Found], cap_bytes: int) -> Table:
    """Return the table for a terminal."""
    table = Table("", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for one in found:
        table.add_column(one.way, justify="right")
    for label, cells in rows_of(found, cap_bytes):
        table.add_row(label, *cells)
    return table


BAR, GAP, LEFT, RIGHT = 14, 12, 190, 110
COLOURS = {COMPUTED: "#9aa5b1", IN_MEMORY: "#2f7ed8", ON_DRIVE: "#0b3d6b"}


def picture_of(found: Sequence[Found]) -> str:
    """Return an SVG: the time to the first token of the longest prompts, by where they are."""
    length = max(length for one in found for length in one.first_s.get(COMPUTED, {}))
    most = max(times[length] for one in found for times in one.first_s.values() if length in times)
    shown, y = [], 40
    for one in (one for one in found if one.first_s):
        bars = [(where, times[length]) for where, times in one.first_s.items() if length in times]
        shown.append(f'<text x="{LEFT - 8}" y="{y + BAR * len(bars) / 2 + 4}" text-anchor="end">{one.way}</text>')
        for where, seconds in bars:
            width = max(1.0, 500 * seconds / most)
            shown.append(f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR - 2}" fill="{COLOURS[where]}"/>')
            shown.append(f'<text x="{LEFT + width + 5:.1f}" y="{y + BAR - 4}" font-size="11">{seconds:.3f} s</text>')
            y += BAR
        y += GAP
    for at, (where, colour) in enumerate(COLOURS.items()):
        shown.append(f'<rect x="{LEFT + 150 * at}" y="{y}" width="12" height="12" fill="{colour}"/>')
        shown.append(f'<text x="{LEFT + 150 * at + 17}" y="{y + 11}" font-size="12">{where}</text>')
    width = LEFT + 500 + RIGHT
    title = f'<text x="{LEFT}" y="22" font-size="14">Time to the first token of {length:,} tokens</text>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y + 24}" font-family="sans-serif"'
    return "\n".join(
        [
            f'{head} font-size="13">',
            f'<rect width="{width}" height="{y + 24}" fill="white"/>',
            title,
            *shown,
            "</svg>\n",
        ]
    )


def verdict(found: Sequence[Found], cap_bytes: int) -> list[str]:
    """Return what is wrong with kvdisk's doors, in sentences."""
    wrong = []
    for one in found:
        if one.is_ours:
            wrong += [f"{one.way}, {trial}: {count} wrong answers." for trial, count in one.wrong.items() if count]
            if one.failed:
                wrong.append(f"{one.way} ended before all was done.")
            if (one.drive_bytes or 0) > cap_bytes:
                wrong.append(f"{one.way}: {one.drive_bytes:,} bytes on the drive, over the cap of {cap_bytes:,}.")
    return wrong


def parse_options(ways: Sequence[Way]) -> argparse.Namespace:
    """Read the command line."""
    parser, on_cpu = options_for(__doc__.partition("\n\n")[0], ways), vllm_device() == CPU
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[1000, 2000, 4000] if on_cpu else [4000, 16000, 64000]
    )
    parser.add_argument("--prompts", type=int, default=3, help="of each length")
    parser.add_argument("--cap-mib", type=int, default=64 if on_cpu else 2048, help="of the trial that writes more")
    parser.add_argument("--picture", type=Path, help="where an SVG goes")
    return parser.parse_args()


def main() -> int:
    """Run the comparison, and print its table."""
    options = parse_options(ways := ways_here())
    console = Console(highlight=False, width=TABLE_WIDTH)
    compared = compare(
        Comparison, options, ways, lambda what: console.print(f"kvdisk: {what}", markup=False, soft_wrap=True)
    )
    if compared is None:
        return 1
    found, made_on = compared
    cap_bytes = options.cap_mib * MIB
    as_text = table_of(found, cap_bytes) if console.is_terminal else markdown_of(found, rows_of(found, cap_bytes))
    console.print(as_text, soft_wrap=True)
    console.print(f"Measured on: {made_on}", soft_wrap=True)
    if options.picture is not None:
        options.picture.write_text(picture_of(found))
    wrong = verdict(found, cap_bytes)
    for sentence in wrong:
        console.print(f"kvdisk: {sentence}", style="bold red", soft_wrap=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
