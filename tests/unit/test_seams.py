# SPDX-License-Identifier: Apache-2.0
"""What changes in one place: a policy of eviction is a class and a line of the configuration, a
limit of demotions is one method, and a tier in memory is a member and a row."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replay_traces import Prefixes, of_prompts, replayed
from tier_bench import TierBench

from kvdisk.assembly import check_settings
from kvdisk.blocks import Tier
from kvdisk.errors import ConfigError
from kvdisk.manager import manager
from kvdisk.manager.chances import CLASSES
from kvdisk.manager.demotions import Demotions
from kvdisk.manager.eviction import EvictionPolicy, LearnedPolicy, make_eviction
from kvdisk.manager.reuse import ReuseHistory


class Gdsf(EvictionPolicy):
    """GreedyDual-Size-Frequency: what is worth least, by uses and a clock that stands at what left
    last, leaves first. Copies of one order are of one size."""

    classes = 16
    USE = 100
    """What a use is worth, in steps of the clock."""

    def __init__(self, keys: Any, history: ReuseHistory) -> None:
        super().__init__(keys, history)
        self._clock = 0

    @property
    def now(self) -> int:
        return self._clock

    def classes_of(self, rows: Sequence[int]) -> list[int]:
        return [min(self.classes, max(1, self._history.known(self._keys[row])[0])) - 1 for row in rows]

    def worth(self, number: int, last: int) -> float:
        return float(last + self.USE * (number + 1))

    def proposals(self) -> Iterator[tuple[float, int]]:
        for worth, row in super().proposals():
            self._clock = max(self._clock, int(worth))
            yield worth, row


GDSF = f"{__name__}:Gdsf"


def test_a_policy_of_eviction_is_one_class_and_a_line_of_the_configuration():
    """What is asked for often stays, where the order of last use loses it to what comes once."""
    prefixes = Prefixes()
    prompts = []
    for at in range(40):
        prompts += [prefixes.number([("often", each), *range(9)]) for each in range(5)]
        prompts += [prefixes.number([("once", at, each), *range(9)]) for each in range(10)]
    trace = of_prompts(prompts)
    found = {
        name: sum(replayed(trace, "120", eviction=name, nvme_admission="all").hit_blocks.values())
        for name in ("lru", GDSF)
    }
    assert found["lru"] == 0 and found[GDSF] > 0.9 * 39 * 50


def test_it_takes_over_what_was_there_before_a_restart():
    policy = make_eviction(GDSF, [bytes([at]) * 34 for at in range(4)], ReuseHistory())
    policy.fill(np.array([2, 0, 3, 1], np.int32), np.array([1, 5, 1, 1], np.uint32), np.ones(4, np.bool_))
    assert [row for _, row in policy.proposals()] == [2, 3, 1, 0], "the oldest first, and last what was used often"


class AsMany(EvictionPolicy):
    """Has as many classes as the history, and has all in the lowest."""

    classes = CLASSES

    def worth(self, number: int, last: int) -> float:
        return float(last + 100 * number)


class OfItsOwn(LearnedPolicy):
    """Is the learned one, but for its classes: it has all in the lowest."""

    classes_of = EvictionPolicy.classes_of
    worth = AsMany.worth


@pytest.mark.parametrize("policy", [AsMany, OfItsOwn])
def test_its_own_classes_are_those_of_before_a_restart_too(policy):
    made = policy([bytes([at]) * 34 for at in range(4)], ReuseHistory())
    made.fill(np.array([2, 0, 3, 1], np.int32), np.array([1, 5, 1, 1], np.uint32), np.ones(4, np.bool_))
    assert [row for _, row in made.proposals()] == [2, 0, 3, 1], "by their last use, as all are of one class"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (f"{__name__}:Gone", "no class of that name"),
        ("nowhere:Gdsf", "cannot be imported"),
        ("builtins:dict", "does not have"),
        ("kvdisk.manager.eviction:EvictionPolicy", None),
    ],
)
def test_a_class_that_is_none_is_refused_before_the_start(name, said, tmp_path):
    values = {"cpu_bytes": "1GiB", "eviction": name}
    if said is None:
        assert check_settings(values).eviction == name
        return
    with pytest.raises(ConfigError, match=said):
        check_settings(values)


class Limited(Demotions):
    """So many bytes are written to the drive in a second, from the first step on."""

    bytes_per_s = 0.0
    spent = 0

    def _affordable_bytes(self, now: float) -> float:
        left = self.bytes_per_s * now - self.spent
        return min(super()._affordable_bytes(now), left if left >= self._lower.bytes_of(0) else 0)

    def _charge(self, byte_count: int) -> None:
        self.spent += byte_count


PROMPTS = ["".join(chr(97 + (at * 8 + part) % 26) for part in range(8)) + "z" * at for at in range(20)]


def test_a_limit_of_demotions_is_two_methods(monkeypatch):
    """It is kept; an idle engine sleeps while it is spent, and memory serves new blocks; what waits
    is written later."""
    monkeypatch.setattr(manager, "Demotions", Limited)
    monkeypatch.setattr(Limited, "bytes_per_s", 0.0)
    bench = TierBench([16], [400], nvme_admission="all", gpu_blocks=100)
    (limited,) = bench.manager._demotions
    bench.idle()
    for prompt in PROMPTS:
        bench.add(prompt)
        bench.finish()
    assert bench.held(PROMPTS[-1], Tier.CPU)[:4] == [True] * 4, "memory is not blocked by what waits"
    assert limited.dirty.total > 0 and limited.dirty.blocked and limited.spent == 0
    monkeypatch.setattr(Limited, "bytes_per_s", 3 * limited._lower.bytes_of(0) / 1.0)
    while limited.dirty.total:
        bench.step(seconds=0.25)
        assert limited.spent <= limited.bytes_per_s * bench.now
        if limited.dirty.blocked and not bench.engine.requests:
            bench.idle(seconds=0.0)
    assert any(bench.held(PROMPTS[-1]))


def test_a_second_tier_in_memory_is_a_member_and_a_row():
    """In a process of its own, where the plugin has made the change. ``second_memory_cases`` has
    what must hold."""
    tests = Path(__file__).parents[1]
    command = [sys.executable, "-m", "pytest", "-p", "support.second_memory", "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [*command, str(tests / "unit/second_memory_cases.py")],
        cwd=tests.parent,
        env={key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
        | {"PYTHONPATH": str(tests)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0 and "4 passed" in ended.stdout, ended.stdout[-4000:] + ended.stderr[-1000:]


class TooMany(EvictionPolicy):
    classes = 251


def test_a_policy_that_cannot_be_built_is_one_sentence():
    with pytest.raises(ConfigError, match="cannot be built: AssertionError: a policy has up to 250 classes"):
        make_eviction(f"{__name__}:TooMany", [], ReuseHistory())
