# SPDX-License-Identifier: Apache-2.0
"""On vLLM's real scheduler: a KV-cache group of a drafter, whose last block is not what its hash says."""

from __future__ import annotations

from pathlib import Path

import pytest
from schedulers import BLOCK_TOKENS, Bench

from kvdisk.blocks import group_of
from kvdisk.messages import Job, JobKind

pytestmark = pytest.mark.vllm

MODEL, DRAFT = 0, 1
BLOCKS = 4
WHOLE = list(range(100, 100 + BLOCKS * BLOCK_TOKENS))


def _keys(bench: Bench, kind: JobKind, group: int) -> list[bytes]:
    jobs: list[Job] = [job for job in bench.jobs if job.kind is kind]
    return [move.key for job in jobs for move in job.moves if group_of(move.key) == group]


def _served(tmp_path: Path, prompt: list[int]) -> Bench:
    bench = Bench(tmp_path / "model", drafter=True)
    bench.add("a", prompt, max_tokens=1)
    bench.run()
    assert bench.scheduler.reset_prefix_cache()
    return bench


@pytest.mark.parametrize(("more", "drafted"), [(0, BLOCKS - 1), (1, BLOCKS)])
def test_the_block_whose_next_token_is_not_known_is_not_stored(more: int, drafted: int, tmp_path: Path) -> None:
    bench = _served(tmp_path, [*WHOLE, *[7] * more])
    assert len(_keys(bench, JobKind.STORE, MODEL)) == BLOCKS
    assert len(_keys(bench, JobKind.STORE, DRAFT)) == drafted


@pytest.mark.parametrize(("more", "loaded"), [(0, BLOCKS - 2), (1, BLOCKS - 1)])
def test_a_hit_ends_a_block_before_the_drafters_last(more: int, loaded: int, tmp_path: Path) -> None:
    """The next token of the last block may be another one now; of those before it, it is in the next block's hash."""
    bench = _served(tmp_path, [*WHOLE, *[7] * more])
    bench.add("b", [*WHOLE, 8])
    bench.run()
    for group in (MODEL, DRAFT):
        assert _keys(bench, JobKind.LOAD, group) == _keys(bench, JobKind.STORE, group)[:loaded]
    assert not any(block.ref_cnt for block in bench.pool.blocks[1:])


def test_what_lies_before_a_longer_prompts_next_block_is_a_hit(tmp_path: Path) -> None:
    longer = [*WHOLE, *range(300, 300 + BLOCK_TOKENS + 1)]
    bench = _served(tmp_path, longer)
    bench.add("b", [*WHOLE, *[8] * BLOCK_TOKENS, 9])
    bench.run()
    assert len(_keys(bench, JobKind.LOAD, DRAFT)) == BLOCKS - 1, "the fourth one's next token is another"
    bench.scheduler.reset_prefix_cache()
    bench.jobs.clear()
    bench.add("c", longer)
    bench.run()
    assert len(_keys(bench, JobKind.LOAD, DRAFT)) == BLOCKS
