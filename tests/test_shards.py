# SPDX-License-Identifier: Apache-2.0
"""The shards of the long tests are all of them, and no test is in two; and what is said of how long
a unit takes is about one that there is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.units_of_work import APART, LONG_UNITS, SHORT_S, parse, seconds_of, shards, unit_of

ROOT = Path(__file__).resolve().parents[1]
SOME = [*LONG_UNITS, *(f"tests/unit/test_{at}.py::test_it[{each}]" for at in range(40) for each in "ab")]


@pytest.mark.parametrize("count", [1, 2, 6, 100])
def test_each_unit_is_in_one_shard(count):
    found = shards(SOME, count)
    assert len(found) == count and sum(map(len, found)) == len(set.union(*found))
    assert set.union(*found) == set(map(unit_of, SOME))
    assert shards(reversed(SOME), count) == found, "whatever the order"


def test_they_are_about_equally_long():
    seconds = [sum(map(seconds_of, shard)) for shard in shards(SOME, 6)]
    assert max(seconds) - min(seconds) <= SHORT_S


def test_a_file_stays_together_unless_its_tests_share_nothing():
    assert unit_of("tests/unit/test_x.py::test_a[1]") == "tests/unit/test_x.py"
    apart = min(APART)
    assert unit_of(f"{apart}::test_a[1]") == f"{apart}::test_a[1]"


@pytest.mark.parametrize("unit", sorted({*LONG_UNITS, *APART}))
def test_what_is_said_to_be_long_is_there(unit):
    file, _, test = unit.partition("::")
    text = (ROOT / file).read_text()
    assert not test or (file in APART and re.search(rf"^def {test.partition('[')[0]}\(", text, re.MULTILINE))


def collected(*options: str) -> list[str]:
    """Return what a run of long tests would run, in its order."""
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "--collect-only", "-n0", "-m", "torture"]
    done = subprocess.run(
        [*command, *options, "tests/stateful", "tests/unit/test_shares.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [line for line in done.stdout.splitlines() if line.startswith("tests/")]


def test_the_shards_of_a_run_are_the_whole_run():
    whole, first, second = collected(), collected("--shard", "1/2"), collected("--shard", "2/2")
    assert first and second and sorted(first + second) == sorted(whole)
    assert not set(first) & set(second)


@pytest.mark.parametrize("wrong", ["3/2", "0/2", "2", "a/b"])
def test_a_shard_that_is_none_is_refused(wrong):
    with pytest.raises(pytest.UsageError, match=f"^--shard is one of several, as 2/6, not '{wrong}'$"):
        parse(wrong)
