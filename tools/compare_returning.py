# SPDX-License-Identifier: Apache-2.0
"""Users who return all at once after a restart, with more KV than the memory that keeps it: what of
their prompts is loaded, and how long they wait, by each way to keep KV.

    python tools/compare_returning.py --dir /nvme/somewhere --json figures.json

The KV of all users is twice, four and eight times the memory. Each user has come twice before the
restart. Then all ask at once. In the middle one of these cases three trials follow: a bit is
flipped in every 64 KiB of what is stored, other weights lie under the same path, and the engine
that stores is killed. The answers are compared with those of vLLM alone. The exit code is 1 where
one of kvdisk's doors gives a wrong answer.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from compared_engines import ComparedEngines, drop_pages, hardware
from connectors import Way, await_quiet, flip_bits, ways_here
from demo import WORK, DemoError, build_model
from engine_child import CPU, NEAR_TIE, Answer, EngineChild, EngineError, agrees, vllm_device

MIB = 1 << 20
GENERATED = 8
"""Tokens of each answer."""
ALONE = "vLLM alone"
FLIPPED, OTHER_WEIGHTS, KILLED = "a bit flipped in every 64 KiB", "other weights, same path", "after kill -9"
Prompt = list[int]


@dataclass
class Returned:
    """What those who returned got. ``loaded``: the share of their tokens that was not computed;
    ``mean_s`` and ``worst_s``: seconds to the first token; ``wrong``: answers that were not right,
    of ``users``."""

    users: int
    loaded: float
    mean_s: float
    worst_s: float
    wrong: int


@dataclass
class Found:
    """What was found of a way. ``returned``: by how many times the memory their KV is, or by trial.
    ``failed``: why it ended before all was done."""

    way: str
    is_ours: bool = False
    returned: dict[str, Returned] = field(default_factory=dict)
    failed: str = ""


class Returning(ComparedEngines):
    """Runs the ways."""

    def __init__(self, options: argparse.Namespace, model: Path, place: Path) -> None:
        super().__init__(model, place, eager=options.eager)
        self.memory_bytes: int = options.memory_mib * MIB
        self.times: list[int] = sorted(options.times)
        each = options.tokens * self.token_bytes
        rng = random.Random(20261)  # noqa: S311 - to be the same each time
        most = max(2, self.times[-1] * self.memory_bytes // each)
        self.all_users = [[rng.randrange(3, self.vocabulary) for _ in range(options.tokens)] for _ in range(most)]
        self.gpu_bytes = 2 * most * each + 64 * MIB
        self.most_tokens = options.tokens + 2 * GENERATED
        self.right: dict[str, list[Answer]] = {}
        """Of vLLM alone, by case."""

    def users(self, times: int) -> list[Prompt]:
        """Return the prompts whose KV is so many times the memory."""
        each = len(self.all_users[0]) * self.token_bytes
        return self.all_users[: max(2, times * self.memory_bytes // each)]

    @property
    def middle(self) -> int:
        """The case that the trials are of."""
        return self.times[len(self.times) // 2]

    def return_at_once(self, engine: EngineChild, found: Found, case: str, times: int) -> None:
        """Ask all at once, and compare the answers. vLLM alone says what is right."""
        prompts = self.users(times)
        answers = engine.generate(prompts, GENERATED, gaps=found.way == ALONE)
        right = self.right.setdefault(case, answers)
        near = NEAR_TIE[vllm_device()]
        found.returned[case] = Returned(
            len(prompts),
            sum(answer.cached for answer in answers) / sum(map(len, prompts)),
            statistics.mean(answer.ttft_s for answer in answers),
            max(answer.ttft_s for answer in answers),
            sum(not agrees(*both, near) for both in zip(right, answers, strict=True)),
        )

    def run_alone(self) -> Found:
        """Run vLLM alone. Raises EngineError."""
        found = Found(ALONE)
        for times in self.times:
            with self.engine(ALONE) as engine:
                self.return_at_once(engine, found, f"{times}", times)
        self.right |= dict.fromkeys((FLIPPED, KILLED), self.right[f"{self.middle}"])
        with self.other_weights(), self.engine(ALONE) as engine:
            self.return_at_once(engine, found, OTHER_WEIGHTS, self.middle)
        return found

    def run(self, way: Way, found: Found) -> None:
        """Run one way through all, as far as it gets. Raises EngineError."""
        for times in self.times:
            place = self.place / f"{way.name.replace(' ', '-').replace(',', '')}-{times}"
            place.mkdir()
            transfer = partial(way.transfer_config, place, self.memory_bytes, 4 * times * self.memory_bytes)
            beside = partial(way.beside, place, self.memory_bytes, WORK / "compared-beside.log")
            with beside(), self.engine(way.name, transfer()) as engine:
                self.come_twice(engine, times)
            await_quiet(place)
            drop_pages()
            with beside(), self.engine(way.name, transfer()) as engine:
                self.return_at_once(engine, found, f"{times}", times)
            if times == self.middle:
                with self.other_weights(), beside(), self.engine(way.name, transfer()) as engine:
                    self.return_at_once(engine, found, OTHER_WEIGHTS, times)
                flip_bits(place)
                with beside(), self.engine(way.name, transfer()) as engine:
                    self.return_at_once(engine, found, FLIPPED, times)
                shutil.rmtree(place)
                place.mkdir()
                with beside(), self.engine(way.name, transfer()) as engine:
                    self.come_twice(engine, times, drain=False)
                    engine.kill()
                with beside(), self.engine(way.name, transfer()) as engine:
                    self.return_at_once(engine, found, KILLED, times)
            shutil.rmtree(place)

    def come_twice(self, engine: EngineChild, times: int, *, drain: bool = True) -> None:
        """Ask one user after the other, and all once more."""
        for _ in range(2):
            engine.generate(self.users(times), 2, together=False)
        if drain:
            engine.drain()


def rows_of(found: Sequence[Found]) -> list[tuple[str, list[str]]]:
    """Return the rows of the table: a label, and the cell of each way."""
    cases = list(dict.fromkeys(case for one in found for case in one.returned))
    rows = []
    for case in cases:
        label = f"{case} times the memory" if case.isdigit() else case
        cells = []
        for one in found:
            got = one.returned.get(case)
            wrong = f", **{got.wrong} wrong**" if got is not None and got.wrong else ""
            cells.append(f"{got.loaded:.0%}, {got.mean_s:.2f} / {got.worst_s:.2f} s{wrong}" if got is not None else "")
        rows.append((label, cells))
    return rows


def markdown_of(found: Sequence[Found]) -> str:
    """Return the table as Markdown."""
    lines = [f"| | {' | '.join(one.way for one in found)} |", "|---" * (len(found) + 1) + "|"]
    lines += [f"| {label} | {' | '.join(cells)} |" for label, cells in rows_of(found)]
    return "\n".join(lines)


def verdict(found: Sequence[Found]) -> list[str]:
    """Return what is wrong with kvdisk's doors, in sentences."""
    ours = [one for one in found if one.is_ours]
    wrong = [
        f"{one.way}, {case}: {got.wrong} wrong answers."
        for one in ours
        for case, got in one.returned.items()
        if got.wrong
    ]
    return wrong + [f"{one.way} ended before all was done." for one in ours if one.failed]


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    on_cpu = vllm_device() == CPU
    parser.add_argument("--model", type=Path, help="a local model directory; without it a random one is built")
    parser.add_argument("--dir", type=Path, default=WORK, help="a directory on the drive")
    parser.add_argument("--tokens", type=int, default=2000 if on_cpu else 64000, help="of each user's prompt")
    parser.add_argument("--memory-mib", type=int, default=64 if on_cpu else 8192, help="that keeps KV")
    parser.add_argument("--times", type=int, nargs="+", default=[2, 4, 8], help="of the memory: the KV of all users")
    parser.add_argument("--only", nargs="+", metavar="WAY", help="of the ways, these; vLLM alone runs always")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--json", type=Path, help="where the figures go, after each way")
    return parser.parse_args()


def run_all(options: argparse.Namespace, place: Path, say: Callable[[str], None]) -> list[Found]:
    """Run every way that has a directory, and keep what is found after each. Raises DemoError, and
    EngineError where vLLM alone fails."""
    kind = "demo-llama" if vllm_device() == CPU else "bench-llama"
    returning = Returning(options, build_model(kind) if options.model is None else options.model.absolute(), place)
    say(f"asking {ALONE}")
    found = [returning.run_alone()]
    for way in (one for one in ways_here() if one.files and (not options.only or one.name in options.only)):
        say(f"asking {way.name}")
        found.append(one := Found(way.name, way.is_ours))
        try:
            returning.run(way, one)
        except EngineError as failure:
            one.failed = str(failure)
            say(f"{way.name} ended before all was done: {one.failed.splitlines()[0]}")
        if options.json is not None:
            options.json.write_text(json.dumps({"hardware": hardware(place), "found": list(map(asdict, found))}))
    return found


def main() -> int:
    """Run the comparison, and print its table."""
    options = parse_options()
    WORK.mkdir(exist_ok=True)
    options.dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvdisk-returning-", dir=options.dir) as place:
        try:
            found = run_all(options, Path(place), lambda what: print(f"kvdisk: {what}", flush=True))
        except (DemoError, EngineError) as failure:
            print(f"kvdisk: {failure}")
            return 1
        made_on = hardware(Path(place))
    print(markdown_of(found), f"Measured on: {made_on}", *(f"kvdisk: {one}" for one in verdict(found)), sep="\n")
    return 1 if verdict(found) else 0


if __name__ == "__main__":
    sys.exit(main())
