# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines with one store on several drives at the same time: what one computed, the
others load.

As in ``test_engine.py`` one start serves many cases, in the order of a script.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from engine_child import EngineChild

from kvdisk.cli.survey import Survey, survey_store
from kvdisk.stats import Kind, kind_of

BLOCK_TOKENS = 32
LIMITS = {"max_model_len": 512, "num_gpu_blocks_override": 120}
STEADY = {"prefetch": False, "device": "posix"}
"""Loads are what is tested: nothing is read ahead. (An engine child waits for its neighbours
however long it takes.)"""
FAILURES = ("failed_", "verification_failures", "foreign_failures", "segment_failures", "io_errors", "wait_timeouts")


def _prompts(seed: int, count: int) -> list[list[int]]:
    """Prompts of nine blocks and a bit, of which the first five are the same."""
    chosen = random.Random(seed)
    shared = [chosen.randrange(10, 500) for _ in range(5 * BLOCK_TOKENS)]
    return [shared + [chosen.randrange(10, 500) for _ in range(4 * BLOCK_TOKENS + 7)] for _ in range(count)]


WHOLE = 9 * BLOCK_TOKENS
OF_ONE, OF_TWO, LATE = _prompts(1, 4), _prompts(2, 4), _prompts(3, 4)
BLOCKS = 5 + 4 * 4
"""Different blocks in each of these lists."""


def _answer(engine: EngineChild, prompts: list[list[int]], cached: int | None = None) -> list[list[int]]:
    """Return an engine's tokens, when all that follows has ended; of each prompt so much was
    cached."""
    answers = engine.generate(prompts, together=False)
    assert cached is None or [answer.cached for answer in answers] == [cached] * len(prompts)
    engine.drain()
    return [answer.tokens for answer in answers]


def _look(drives: Sequence[Path]) -> Survey:
    """Return what the tools say of the store, which is two homes' and without a problem."""
    store = survey_store(drives)
    assert not store.problems, store.problems
    assert len(store.homes) == 2
    return store


def _counted(engine: EngineChild) -> dict[str, int]:
    """Return the counters at vLLM's endpoint that are not 0, by series; none is of a failure."""
    ours = {
        name.removeprefix("kvdisk_"): int(value)
        for name, value in engine.metrics().items()
        if name.startswith("kvdisk_")
    }
    names = {name.partition(".")[0] for name in ours if "." in name}
    counted = {
        name: value for name, value in ours.items() if value and name not in names and kind_of(name) is Kind.COUNTER
    }
    assert not [name for name in counted if name.startswith(FAILURES)], counted
    return counted


def test_two_engines_on_three_drives(tiny_llama, tmp_path):
    log = tmp_path / "log"
    drives = [tmp_path / name for name in ("one", "two", "three")]
    store = {"store_dirs": [str(drive) for drive in drives], "nvme_bytes": "64MiB", **STEADY}
    in_memory = {"cpu_bytes": "16MiB", "segment_bytes": 300_000}
    first = EngineChild(tiny_llama, log, extra_config=store | in_memory, layout="own", **LIMITS)
    # Without a CPU tier every load of the second engine is one from a drive, and what finds no room
    # is not stored.
    staged = {"cpu_bytes": 0, "segment_bytes": "1MiB"}
    with EngineChild(tiny_llama, log, extra_config=store | staged, **LIMITS) as second:
        of_one, late = _answer(first, OF_ONE), _answer(first, LATE)
        drives_used = [{one.drive for one in home.segments if one.used_slots} for home in _look(drives).homes]
        assert sorted(drives_used, key=len) == [set(), {0, 1, 2}], "the segments lie on all drives"

        assert _answer(second, OF_ONE, WHOLE) == of_one, "computed by one engine, loaded by the other"
        counted = _counted(second)
        assert counted["loaded_blocks_foreign"] == counted["loaded_blocks"] == BLOCKS
        assert not {"stored_blocks", "demoted_blocks"} & set(counted), "and not written a second time"

        of_two = _answer(second, OF_TWO)
        assert _counted(second)["stored_blocks"] == BLOCKS
        assert _answer(first, OF_TWO, WHOLE) == of_two, "the other way round"
        counted = _counted(first)
        assert counted["loaded_blocks_foreign"] == BLOCKS
        assert counted["demoted_blocks"] == 2 * BLOCKS, "what it computed itself"

        first.kill()
        assert _answer(second, LATE, WHOLE) == late, "from the home that nobody owns now"
        counted = _counted(second)
        assert counted["loaded_blocks_foreign"] == 2 * BLOCKS
        assert counted == second.counters(), "Prometheus and the connector agree"
    # The drives after the first in another order; the two homes are those that were.
    turned = [drives[0], drives[2], drives[1]]
    assert sorted(home.clean for home in _look(turned).homes) == [False, True]
