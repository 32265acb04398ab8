# SPDX-License-Identifier: Apache-2.0
"""Block tables that are looked at in vLLM's own lists are those that vLLM would have made."""

from __future__ import annotations

import random
from typing import Any

import pytest
from schedulers import BLOCK_TOKENS, prompt_of

from kvdisk.connector import step as steps
from kvdisk.connector.tables import BlockTable, block_tables

PLACES: dict[str, dict[str, Any]] = {
    "full attention": {"num_blocks": 16},
    "a window": {"num_blocks": 26, "window_tokens": BLOCK_TOKENS + 1},
    "states": {"num_blocks": 30, "state_tokens": BLOCK_TOKENS},
    "pipelined, saving victims": {
        "num_blocks": 14,
        "pipelined": True,
        "extra": {"store_policy": "on_preemption"},
    },
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_table_is_vllms_own_at_each_step(engines, place, monkeypatch):
    """Through chunked prefill, decoding, preemption, aborts, resets and loads."""
    looked: list[int] = []

    def tables(state: Any, request_id: str) -> Any:
        found, theirs = block_tables(state, request_id), state.get_block_ids(request_id)
        assert [list(table) for table in found] == [list(ids) for ids in theirs]
        for table, ids in zip(found, theirs, strict=True):
            assert isinstance(table, BlockTable) and len(table) == len(ids)
            assert table[1:3] == ids[1:3] and (not ids or table[len(ids) - 1] == ids[-1])
            looked.append(len(ids))
        return found

    monkeypatch.setattr(steps, "block_tables", tables)
    rng = random.Random(7)
    bench = engines.make(**place)
    for step in range(80):
        if rng.random() < 0.3:
            prompt = prompt_of(rng.choice([1, 1, 2]), rng.randrange(10, 6 * BLOCK_TOKENS))
            bench.add(f"r{step}", prompt, max_tokens=rng.randrange(1, 40))
        if rng.random() < 0.1 and bench.scheduler.requests:
            bench.abort(rng.choice(sorted(bench.scheduler.requests)))
        if rng.random() < 0.1:
            bench.scheduler.reset_prefix_cache()
        bench.step()
    bench.finish()
    assert max(looked) > 3
    if place["num_blocks"] < 20:
        assert sum(request.num_preemptions for request in bench.known.values()) > 0


def test_a_resolver_of_another_kind_is_asked_as_vllm_asks_it():
    from vllm.v1.core.sched.output import KVConnectorBlockState

    state = KVConnectorBlockState({"a"}, lambda request_id: ([1, 2],), {})
    assert block_tables(state, "a") == ([1, 2],)
    assert block_tables(state, "b") is None
