# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines with one store on several drives at the same time: what one computed, the
others load.

As in ``test_engine.py`` one start serves many cases, in the order of a script.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from engine_child import Answer, EngineChild

from kvdisk.cli.survey import Survey, survey_store
from kvdisk.stats import Kind, kind_of

pytestmark = pytest.mark.vllm

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


def _tokens(answers: Sequence[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


def _cached(answers: Sequence[Answer]) -> list[int]:
    return [answer.cached for answer in answers]


def _config(drives: Sequence[Path], **more: object) -> dict[str, object]:
    store = {"store_dirs": [str(drive) for drive in drives], "nvme_bytes": "64MiB", "segment_bytes": 300_000}
    return {"cpu_bytes": "16MiB", **store, **STEADY, **more}


def _look(drives: Sequence[Path], homes: int) -> Survey:
    """Return what the tools say of the store, which is without a problem."""
    store = survey_store(drives)
    assert not store.problems, store.problems
    assert len(store.homes) == homes
    return store


def _used_drives(store: Survey) -> list[set[int]]:
    """Return the drives of each home that blocks lie on."""
    return [{segment.drive for segment in home.segments if segment.used_slots} for home in store.homes]


def _counted(metrics: dict[str, float]) -> dict[str, int]:
    """Return the counters at vLLM's endpoint that are not 0, by series."""
    ours = {name.removeprefix("kvdisk_"): int(value) for name, value in metrics.items() if name.startswith("kvdisk_")}
    names = {name.partition(".")[0] for name in ours if "." in name}
    return {
        name: value for name, value in ours.items() if value and name not in names and kind_of(name) is Kind.COUNTER
    }


def test_two_engines_on_three_drives(tiny_llama: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    drives = [tmp_path / name for name in ("one", "two", "three")]
    first = EngineChild(tiny_llama, log, extra_config=_config(drives), layout="own", **LIMITS)
    # Without a CPU tier every load of the second engine is one from a drive, and what finds no room
    # is not stored.
    config = _config(drives, cpu_bytes=0, segment_bytes="1MiB")
    with EngineChild(tiny_llama, log, extra_config=config, **LIMITS) as second:
        of_one, late = (_tokens(first.generate(prompts, together=False)) for prompts in (OF_ONE, LATE))
        first.drain()
        (used, nothing) = sorted(_used_drives(_look(drives, homes=2)), key=len, reverse=True)
        assert (used, nothing) == ({0, 1, 2}, set()), "the segments lie on all drives"

        answers = second.generate(OF_ONE, together=False)
        assert _tokens(answers) == of_one, "computed by one engine, loaded by the other"
        assert _cached(answers) == [WHOLE] * 4
        second.drain()
        counters = second.counters()
        assert counters["loaded_blocks_foreign"] == counters["loaded_blocks"] == BLOCKS
        assert not {"stored_blocks", "demoted_blocks"} & set(counters), "and not written a second time"

        of_two = _tokens(second.generate(OF_TWO, together=False))
        second.drain()
        assert second.counters()["stored_blocks"] == BLOCKS
        answers = first.generate(OF_TWO, together=False)
        assert _tokens(answers) == of_two, "the other way round"
        assert _cached(answers) == [WHOLE] * 4
        first.drain()
        counted = _counted(first.metrics())
        assert counted["loaded_blocks_foreign"] == BLOCKS
        assert counted["demoted_blocks"] == 2 * BLOCKS, "what it computed itself"
        assert not [name for name in counted if name.startswith(FAILURES)]

        first.kill()
        answers = second.generate(LATE, together=False)
        assert _tokens(answers) == late, "from the home that nobody owns now"
        assert _cached(answers) == [WHOLE] * 4
        second.drain()
        counters = second.counters()
        assert counters["loaded_blocks_foreign"] == 2 * BLOCKS
        assert not [name for name in counters if name.startswith(FAILURES)]
        assert _counted(second.metrics()) == counters, "Prometheus and the connector agree"
        _take_over(tiny_llama, drives, log, second, [of_one, of_two, late])


def _take_over(
    model: Path, drives: list[Path], log: Path, second: EngineChild, expected: list[list[list[int]]]
) -> None:
    """Start the successor of the engine that was killed, with the drives after the first in another
    order."""
    turned = [drives[0], drives[2], drives[1]]
    with EngineChild(model, log, extra_config=_config(turned), **LIMITS) as third:
        for prompts, tokens in zip((OF_ONE, LATE), (expected[0], expected[2]), strict=True):
            answers = third.generate(prompts, together=False)
            assert _tokens(answers) == tokens, "the successor's own"
            assert _cached(answers) == [WHOLE] * 4, "from all drives"
        counters = third.counters()
        assert counters["loaded_blocks"] == 2 * BLOCKS
        assert "loaded_blocks_foreign" not in counters
        answers = third.generate(OF_TWO, together=False)
        assert _tokens(answers) == expected[1], "its neighbour's"
        assert _cached(answers) == [WHOLE] * 4
        assert third.counters()["loaded_blocks_foreign"] == BLOCKS

        # The home has another name now. What the second engine remembers of the old one fails, and
        # is computed.
        second.reset()
        assert _tokens(second.generate(LATE, together=False)) == expected[2]
        second.reset()
        answers = second.generate(LATE, together=False)
        assert _tokens(answers) == expected[2]
        assert _cached(answers) == [WHOLE] * 4, "and is found under the new one"
    assert all(home.clean == (home.owner == "orphan") for home in _look(turned, 2).homes)
