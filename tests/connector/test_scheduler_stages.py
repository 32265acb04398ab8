# SPDX-License-Identifier: Apache-2.0
"""On vLLM's real scheduler: groups whose layers differ in bytes, and stages of a pipeline, which
have layers of their own and report a step late. What a block's bytes are only the workers know."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
from other_connectors import ANOTHER, SHAKING
from schedulers import BLOCK_TOKENS, BLOCKS, KVDISK, PROMPT, Bench, Engines, prompt_of
from support.live_audit import audit_manager
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from kvdisk.blocks import Tier
from kvdisk.config import Config
from kvdisk.connector.scheduler_side import SchedulerSide
from kvdisk.errors import ConfigError
from kvdisk.geometry import HEADER_BYTES
from kvdisk.messages import JobKind

LAYER = 2 * 4 * BLOCK_TOKENS * 2 * 32
"""Bytes of a block's keys and values of 32-bit numbers, with two heads of 32."""


def handshakes(bench: Bench) -> list[Any]:
    """Return what its workers tell, as it comes from other processes."""
    return [pickle.loads(pickle.dumps(rank.connector.get_handshake_metadata())) for rank in bench.ranks]  # noqa: S301 - our own


def tell(bench: Bench, *told: Any) -> None:
    """As EngineCore does, whatever connector the scheduler has."""
    in_stage = max(1, len(told) // bench.config.parallel_config.pipeline_parallel_size)
    by_worker = {divmod(at, in_stage): one for at, one in enumerate(told) if one is not None}
    bench.scheduler.connector.set_xfer_handshake_metadata_pp_aware(by_worker)


def start(engines: Engines, **more: object) -> Bench:
    """Make an engine of two stages, which have told their sizes."""
    bench = engines.make(by_stage=True, stages=2, **more)
    tell(bench, *handshakes(bench))
    return bench


# -- stages ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_worker_stores_and_loads_its_own_layers(engines, ranks):
    """Of the first stage the second group has no layer, and a block of the first half the bytes."""
    bench = start(engines, nvme=True, window_tokens=2 * BLOCK_TOKENS, ranks=ranks)
    geometry = bench.connector.scheduler._geometry
    assert [group.payload_bytes for group in geometry.groups] == [2 * LAYER, LAYER]
    assert [group.window_tokens for group in geometry.groups] == [None, 2 * BLOCK_TOKENS]
    assert geometry.shard_count == 2 * ranks
    assert geometry.slot_sizes == (HEADER_BYTES + LAYER, HEADER_BYTES + 2 * LAYER), "of the largest stage"
    assert {tuple(rank.ours.worker._parts.memory[0].slot_sizes) for rank in bench.ranks} == {geometry.slot_sizes}
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


def test_another_connector_beside_it_need_not_know_of_stages(engines):
    bench = start(engines, others=(KVDISK, ANOTHER))
    bench.serve_twice(PROMPT)
    assert bench.loads() == [("b", BLOCKS)]


def test_what_a_stage_has_not_told_is_not_guessed(engines):
    bench = engines.make(by_stage=True, stages=2)
    with pytest.raises(ConfigError, match="between the stages of a pipeline"):
        bench.add("a", PROMPT)
    engines.close()


# -- layers of two sizes ---------------------------------------------------------------------------


@pytest.mark.parametrize("others", [(), (KVDISK, ANOTHER)], ids=["alone", "in a MultiConnector"])
def test_the_sizes_are_those_of_the_workers(engines, others):
    bench = engines.make(two_sizes=True, others=others)
    tell(bench, *handshakes(bench) * (1 if others else 2))
    (group,) = bench.connector.scheduler._geometry.groups
    assert group.payload_bytes == 3 * LAYER
    assert bench.manager._tiers.get(Tier.CPU).pool.total == [(4 << 20) // group.slot_bytes]
    bench.serve_twice(PROMPT)
    assert [job.kind for job in bench.jobs] == [JobKind.STORE, JobKind.LOAD]


def test_without_what_the_engine_has_to_tell_nothing_starts(engines):
    bench = engines.make(two_sizes=True)
    with pytest.raises(ConfigError, match="no handshake came"):
        bench.add("a", PROMPT)
    with pytest.raises(ConfigError, match="no handshake came"):
        tell(bench)
    with pytest.raises(ConfigError, match="no handshake came"):
        tell(bench, KVConnectorHandshakeMetadata())
    side = SchedulerSide(Config(), bench.config, bench.cache)
    with pytest.raises(ConfigError, match="block pool"):
        side.bind_pool(object())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="block pool"):
        side.has_pending_work()
    engines.close()


def test_workers_that_differ_are_refused(engines):
    bench = engines.make(two_sizes=True)
    (other,) = handshakes(bench)
    specs = other.stages[0][0].kv_cache_spec.kv_cache_specs
    specs["full.1"] = replace(specs["full.1"], num_kv_heads=4)
    with pytest.raises(ConfigError, match=rf"\[{3 * LAYER}\] bytes.*\[{5 * LAYER}\]"):
        tell(bench, *handshakes(bench), other)


def test_where_the_scheduler_is_certain_workers_keep_silent_or_are_refused(engines):
    """Of a ``MultiConnector`` only the first child that says something is heard."""
    bench = engines.make()
    assert bench.ranks[0].ours.get_handshake_metadata() is None
    tell(bench)
    other = engines.make(two_sizes=True)
    tell(other, *handshakes(other))
    with pytest.raises(ConfigError, match=rf"\[{LAYER}\] bytes.*\[{3 * LAYER}\]"):
        tell(bench, *handshakes(other))


@pytest.mark.parametrize("others", [(KVDISK, SHAKING), (SHAKING, KVDISK)])
def test_beside_a_connector_with_a_handshake(engines, others):
    """In either order, unless kvdisk needs one itself: vLLM passes on the first, and to all."""
    for groups in ({}, {"two_sizes": True}, {"by_stage": True, "stages": 2}):
        bench = engines.make(others=others, **groups)
        if groups:
            with pytest.raises(ConfigError, match="does not support ShakingConnector beside it"):
                tell(bench, handshakes(bench)[0])
            continue
        tell(bench, *handshakes(bench))
        bench.serve_twice(PROMPT)
        assert [job.kind for job in bench.jobs] == [JobKind.STORE, JobKind.LOAD]
    engines.close()
