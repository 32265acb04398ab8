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
import random
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from compared_engines import ALONE, ComparedEngines, FoundOfWay, compare, drop_pages, markdown_of, options_for
from connectors import Way, await_quiet, flip_bits, kill, ways_here
from demo import WORK
from engine_child import CPU, NEAR_TIE, Answer, EngineChild, EngineError, agrees, vllm_device

MIB = 1 << 20
GENERATED = 8
"""Tokens of each answer."""
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
class Found(FoundOfWay):
    """See ``FoundOfWay``. ``returned``: by how many times the memory their KV is, or by trial."""

    returned: dict[str, Returned] = field(default_factory=dict)


class Returning(ComparedEngines[Found]):
    """Runs the ways."""

    found_type = Found

    def __init__(self, options: argparse.Namespace, place: Path) -> None:
        super().__init__(options, place)
        self.memory_bytes: int = options.memory_mib * MIB
        self.times: list[int] = sorted(options.times)
        each = options.tokens * self.token_bytes
        rng = random.Random(20261)  # noqa: S311 - to be the same each time
        most = -(-self.times[-1] * self.memory_bytes // each)
        self.all_users = [[rng.randrange(3, self.vocabulary) for _ in range(options.tokens)] for _ in range(most)]
        self.gpu_bytes = 2 * most * each + 64 * MIB
        self.most_tokens = options.tokens + 2 * GENERATED
        self.right: dict[str, list[Answer]] = {}
        """Of vLLM alone, by case."""

    def users(self, times: int) -> list[Prompt]:
        """Return the prompts whose KV is so many times the memory, or a little more."""
        each = len(self.all_users[0]) * self.token_bytes
        return self.all_users[: -(-times * self.memory_bytes // each)]

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
                if not flip_bits(place):
                    raise EngineError(f"{way.name} has left no KV in {place}.")
                with beside(), self.engine(way.name, transfer()) as engine:
                    self.return_at_once(engine, found, FLIPPED, times)
                shutil.rmtree(place)
                place.mkdir()
                with beside() as server, self.engine(way.name, transfer()) as engine:
                    self.come_twice(engine, times, drain=False)
                    kill(engine, server)
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


def main() -> int:
    """Run the comparison, and print its table."""
    ways, on_cpu = [way for way in ways_here() if way.files], vllm_device() == CPU
    parser = options_for(__doc__.partition("\n\n")[0], ways)
    parser.add_argument("--tokens", type=int, default=2064 if on_cpu else 64016, help="of each user's prompt")
    parser.add_argument("--memory-mib", type=int, default=64 if on_cpu else 8192, help="that keeps KV")
    parser.add_argument("--times", type=int, nargs="+", default=[2, 4, 8], help="of the memory: the KV of all users")
    compared = compare(Returning, parser.parse_args(), ways, lambda what: print(f"kvdisk: {what}", flush=True))
    if compared is None:
        return 1
    found, made_on = compared
    print(markdown_of(found, rows_of(found)), f"Measured on: {made_on}", sep="\n")
    wrong = verdict(found)
    print(*(f"kvdisk: {one}" for one in wrong), sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
