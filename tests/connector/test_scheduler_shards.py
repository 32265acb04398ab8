# SPDX-License-Identifier: Apache-2.0
"""On vLLM's real scheduler: ranks that have the same of a block (MLA), and ranks that have a part
of its tokens each (decode context parallelism). That is refused at start until it has run on GPUs;
what there is of it is right."""

from __future__ import annotations

import pytest
from schedulers import BLOCK_TOKENS, BLOCKS, PROMPT, Engines, prompt_of
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

from kvdisk.blocks import Tier
from kvdisk.connector import connector
from kvdisk.errors import ConfigError


@pytest.fixture
def let(monkeypatch: pytest.MonkeyPatch) -> None:
    """kvdisk does not refuse it."""
    monkeypatch.setattr(connector, "refuse_unsupported", lambda *_: None)


def test_mla_is_on_the_drive_once_for_any_number_of_ranks(engines: Engines):
    """Each engine takes over what the one before has left, and adds to it."""
    for at, ranks in enumerate((2, 4, 1, 3)):
        bench = engines.make(nvme=True, ranks=ranks, latent=True)
        bench.serve("known", PROMPT)
        assert bench.loads() == ([("known", BLOCKS)] if at else []), "each rank compares what it reads"
        bench.serve("new", prompt_of(10 + at))
        bench.forget(Tier.CPU)
        bench.serve("again", prompt_of(10 + at))
        assert bench.loads()[-1] == ("again", BLOCKS)
        assert {file.name for file in bench.store.glob("homes/*/segments/*/*.kv")} == {"rank0.kv"}
        bench.finish()
        assert len(bench.in_tier(Tier.NVME)) == (2 + at) * BLOCKS
        engines.close()


def test_context_parallelism_is_refused_where_vllm_makes_the_connector(engines):
    with pytest.raises(ConfigError, match=r"^kvdisk does not support context parallelism [^.]*\.$"):
        engines.make(ranks=2, shards=2)


@pytest.mark.usefixtures("let")
@pytest.mark.parametrize(
    ("groups", "ranks", "loaded"),
    [
        ({}, 2, BLOCKS),
        ({}, 4, BLOCKS),  # two ranks have the same tokens
        ({"latent": True}, 2, BLOCKS),
        ({"state_tokens": BLOCK_TOKENS}, 2, BLOCKS + 1),  # each rank has states whole
    ],
)
def test_blocks_span_the_tokens_of_all_ranks(engines: Engines, groups, ranks, loaded):
    bench = engines.make(nvme=True, ranks=ranks, shards=2, **groups)
    geometry = bench.connector.scheduler._geometry
    theirs = bench.scheduler.kv_cache_manager.coordinator.single_type_managers
    assert [group.block_tokens for group in geometry.groups] == [one.block_size for one in theirs]
    assert resolve_kv_cache_block_sizes(bench.cache, bench.config)[1] == geometry.hash_tokens == BLOCK_TOKENS
    assert bench.ranks[0].views[0][1].shape[1] == BLOCK_TOKENS // 2 and geometry.shard_count == ranks
    bench.warm(1)
    for name, *tiers in (("drive",), ("memory", Tier.NVME)):
        bench.serve(name, PROMPT)
        assert bench.loads()[-1] == (name, loaded), "the ranks compare every byte that is read"
        bench.forget(*tiers)
