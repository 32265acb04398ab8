# SPDX-License-Identifier: Apache-2.0
"""On vLLM's real scheduler: what has ended before there was room for it is stored from the engine's own cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from schedulers import BLOCK_TOKENS, Bench

from kvdisk.blocks import make_block_key
from kvdisk.messages import JobKind

pytestmark = pytest.mark.vllm

PROMPT = list(range(100, 100 + 4 * BLOCK_TOKENS + 5))
OTHER = list(range(300, 300 + 4 * BLOCK_TOKENS + 5))


class Fresh(Bench):
    """An engine without a CPU tier, whose store is new."""

    def __init__(self, folder: Path, **more: Any) -> None:
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "weights.bin").write_bytes(b"a store needs weights that have an identity")
        store = {"store_dirs": str(folder / "store"), "nvme_bytes": "64MiB", "segment_bytes": "1MiB", "cpu_bytes": 0}
        super().__init__(folder / "model", extra=store, **more)

    def finish(self) -> None:
        for _ in range(40):
            if not self.scheduler.has_requests():
                return
            self.step()
            assert self.connector.scheduler._parts.index.flush(600.0)
        raise AssertionError("still busy")

    def stored(self) -> list[bytes]:
        return [move.key for job in self.jobs if job.kind is JobKind.STORE for move in job.moves]


def keys_of(bench: Bench, prompt: list[int]) -> list[bytes]:
    return [make_block_key(one, 0) for one in bench.make_request("any", prompt).block_hashes]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.mark.parametrize("max_tokens", [1, 2, 8])
def test_the_first_request_of_a_fresh_store_is_stored(folder: Path, max_tokens: int) -> None:
    bench = Fresh(folder)
    bench.add("a", PROMPT, max_tokens=max_tokens)
    bench.finish()
    assert bench.stored() == keys_of(bench, PROMPT)
    assert bench.scheduler.reset_prefix_cache()
    bench.add("b", PROMPT, max_tokens=1)
    bench.finish()
    (load,) = [job for job in bench.jobs if job.kind is JobKind.LOAD]
    assert len(load.moves) == 4
    assert all(block.ref_cnt == 0 for block in bench.pool.blocks[1:])
    bench.connector.shutdown()


def test_the_first_requests_of_a_fresh_store_with_a_window_are_stored(folder: Path) -> None:
    bench = Fresh(folder, window_tokens=2 * BLOCK_TOKENS)
    bench.add("a", PROMPT, max_tokens=1)
    bench.add("b", OTHER, max_tokens=1)
    bench.finish()
    assert bench.scheduler.reset_prefix_cache()
    for name, prompt in (("c", PROMPT), ("d", OTHER)):
        bench.add(name, prompt, max_tokens=1)
    bench.finish()
    assert bench.counters()["hit_tokens.nvme"] == 2 * 4 * BLOCK_TOKENS
    bench.connector.shutdown()


def test_what_the_engine_has_given_away_since_is_not_stored(folder: Path) -> None:
    bench = Fresh(folder)
    bench.hold = {JobKind.OPEN_SEGMENT}
    bench.add("a", PROMPT, max_tokens=1)
    while "a" in bench.scheduler.requests:
        bench.step()
    for _ in range(3):
        bench.step()
    assert bench.scheduler.reset_prefix_cache()
    bench.release()
    bench.finish()
    assert bench.stored() == []
    bench.connector.shutdown()


def test_after_a_reset_nothing_of_before_is_stored(folder: Path) -> None:
    bench = Fresh(folder)
    bench.hold = {JobKind.OPEN_SEGMENT}
    bench.add("a", PROMPT, max_tokens=1)
    for _ in range(4):
        bench.step()
    bench.scheduler.reset_connector_cache()
    bench.release()
    bench.finish()
    assert bench.stored() == []
    bench.connector.shutdown()
