# SPDX-License-Identifier: Apache-2.0
"""On vLLM's real scheduler: decode context parallelism, where each rank has a part of a block's
tokens. It is refused at start until it has run on GPUs; what there is of it is right."""

from __future__ import annotations

import pytest
from schedulers import BLOCK_TOKENS, BLOCKS, PROMPT, Engines
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

from kvdisk.blocks import Tier
from kvdisk.connector import connector
from kvdisk.errors import ConfigError


@pytest.fixture
def let(monkeypatch: pytest.MonkeyPatch) -> None:
    """kvdisk does not refuse it."""
    monkeypatch.setattr(connector, "refuse_unsupported", lambda *_: None)


def test_it_is_refused_where_vllm_makes_the_connector(engines):
    with pytest.raises(ConfigError, match=r"^kvdisk does not support context parallelism [^.]*\.$"):
        engines.make(ranks=2, shards=2)


@pytest.mark.usefixtures("let")
@pytest.mark.parametrize(("state_tokens", "ranks"), [(None, 2), (None, 4), (BLOCK_TOKENS, 2)])
def test_blocks_span_the_tokens_of_all_ranks(engines: Engines, state_tokens, ranks):
    """Also where two ranks have the same tokens, and beside states, which each rank has whole."""
    bench = engines.make(nvme=True, ranks=ranks, shards=2, state_tokens=state_tokens)
    geometry = bench.connector.scheduler._geometry
    theirs = bench.scheduler.kv_cache_manager.coordinator.single_type_managers
    assert [group.block_tokens for group in geometry.groups] == [one.block_size for one in theirs]
    assert resolve_kv_cache_block_sizes(bench.cache, bench.config)[1] == geometry.hash_tokens == BLOCK_TOKENS
    assert bench.ranks[0].views[0][1].shape[1] == BLOCK_TOKENS // 2 and geometry.part_count == ranks
    bench.warm(1)
    loaded = BLOCKS if state_tokens is None else BLOCKS + 1
    for name, *tiers in (("drive",), ("memory", Tier.NVME)):
        bench.serve(name, PROMPT)
        assert bench.loads()[-1] == (name, loaded), "the ranks compare every byte that is read"
        bench.forget(*tiers)
