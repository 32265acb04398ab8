# SPDX-License-Identifier: Apache-2.0
"""On vLLM's real scheduler: the stages of a pipeline, which have other layers and blocks of other
sizes, and whose steps are reported one step late."""

from __future__ import annotations

import pickle

import pytest
from other_connectors import ANOTHER
from schedulers import BLOCK_TOKENS, BLOCKS, KVDISK, PROMPT, Bench, Engines, prompt_of
from support.live_audit import audit_manager

from kvdisk.blocks import Tier
from kvdisk.errors import ConfigError
from kvdisk.geometry import HEADER_BYTES
from kvdisk.messages import JobKind

LAYER = 2 * 4 * BLOCK_TOKENS * 2 * 32
"""Bytes of a block's keys and values of 32-bit numbers, with two heads of 32."""


def start(engines: Engines, **more: object) -> Bench:
    """Make an engine of two stages, which have told their sizes as from another process."""
    bench = engines.make(by_stage=True, stages=2, **more)
    told = [pickle.loads(pickle.dumps(rank.connector.get_handshake_metadata())) for rank in bench.ranks]  # noqa: S301 - our own
    ranks = bench.config.parallel_config.tensor_parallel_size
    by_worker = {divmod(at, ranks): one for at, one in enumerate(told) if one is not None}
    bench.scheduler.connector.set_xfer_handshake_metadata_pp_aware(by_worker)
    return bench


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_worker_stores_and_loads_its_own_layers(engines, ranks):
    """Of the first stage the second group has no layer, and a block of the first half the bytes."""
    bench = start(engines, nvme=True, window_tokens=2 * BLOCK_TOKENS, ranks=ranks)
    geometry = bench.connector.scheduler._geometry
    assert [group.payload_bytes for group in geometry.groups] == [2 * LAYER, LAYER]
    assert [group.window_tokens for group in geometry.groups] == [None, 2 * BLOCK_TOKENS]
    assert geometry.part_count == 2 * ranks
    bench.warm(1)
    bench.serve("b", prompt_of(1))
    assert bench.jobs_of(JobKind.LOAD, "b"), "from the drive; the workers compare all that is read"
    files = {file.name for file in bench.store.glob("homes/*/segments/*/*.kv")}
    assert files == {f"rank{rank}.kv" for rank in range(2 * ranks)}
    bench.forget()
    loads = len(bench.loads())
    bench.serve("c", prompt_of(1))
    assert len(bench.loads()) == loads + 1, "from memory"


def test_what_one_stage_cannot_load_is_computed_by_all(engines):
    bench = start(engines).warm(1)
    bench.fail, bench.fail_rank = {JobKind.LOAD: (1,)}, 1
    bench.serve("b", prompt_of(1))
    assert bench.loads() == [("b", BLOCKS)] and bench.counters()["failed_loads"] == 1
    bench.fail = {}
    bench.forget()
    bench.serve("c", prompt_of(1))
    assert bench.loads()[1:] == [("c", BLOCKS)]
    audit_manager(bench.manager)


def test_a_store_counts_when_the_last_stage_has_copied(engines):
    bench = start(engines)
    bench.hold, bench.hold_rank = {JobKind.STORE}, 1
    bench.add("a", PROMPT)
    bench.run_until_finished("a")
    assert not bench.in_tier(Tier.CPU)
    bench.finish("a")
    assert len(bench.in_tier(Tier.CPU)) == BLOCKS


def test_another_connector_beside_it_need_not_know_of_stages(engines):
    bench = start(engines, others=(KVDISK, ANOTHER))
    for name in "ab":
        bench.serve(name, PROMPT)
        bench.forget()
    assert bench.loads() == [("b", BLOCKS)]


def test_what_a_stage_has_not_told_is_not_guessed(engines):
    bench = engines.make(by_stage=True, stages=2)
    with pytest.raises(ConfigError, match="between the stages of a pipeline"):
        bench.add("a", PROMPT)
    engines.close()


def test_slots_hold_the_largest_stage(engines):
    bench = start(engines)
    assert bench.connector.scheduler._geometry.slot_sizes == (HEADER_BYTES + 2 * LAYER,)
    sizes = [rank.ours.worker._parts.memory[0].slot_sizes for rank in bench.ranks]
    assert list(map(tuple, sizes)) == [(HEADER_BYTES + 2 * LAYER,)] * 2
