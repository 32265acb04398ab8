# SPDX-License-Identifier: Apache-2.0
"""On vLLM's real scheduler: a group whose layers differ in bytes, of which only the workers know
both."""

from __future__ import annotations

import pickle
from copy import deepcopy
from dataclasses import replace

import pytest
from other_connectors import ANOTHER, SHAKING
from schedulers import BLOCK_TOKENS, KVDISK, PROMPT, Bench
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from kvdisk.blocks import Tier
from kvdisk.config import Config
from kvdisk.connector.connector import KVDiskHandshake
from kvdisk.connector.scheduler_side import SchedulerSide
from kvdisk.errors import ConfigError
from kvdisk.messages import JobKind

# Keys and values of 32-bit numbers, two heads: of 32 in one layer, of 64 in the other.
ONE_LAYER = 2 * 4 * BLOCK_TOKENS * 2 * 32
BOTH = 3 * ONE_LAYER


def handshake(bench: Bench) -> KVDiskHandshake:
    """What a worker tells, as it comes from another process."""
    return pickle.loads(pickle.dumps(bench.ranks[0].ours.get_handshake_metadata()))  # noqa: S301 - our own


def tell(bench: Bench, *told: KVConnectorHandshakeMetadata) -> None:
    """As EngineCore does, whatever connector the scheduler has."""
    bench.scheduler.connector.set_xfer_handshake_metadata_pp_aware({(0, at): one for at, one in enumerate(told)})


@pytest.mark.parametrize("others", [(), (KVDISK, ANOTHER)], ids=["alone", "in a MultiConnector"])
def test_the_sizes_are_those_of_the_workers(engines, others):
    bench = engines.make(two_sizes=True, others=others)
    tell(bench, *[handshake(bench)] * (1 if others else 2))
    (group,) = bench.connector.scheduler._geometry.groups
    assert group.payload_bytes == BOTH
    assert bench.manager._tiers.get(Tier.CPU).pool.total == [(4 << 20) // group.slot_bytes]
    for name in ("a", "b"):
        bench.serve(name, PROMPT)
        bench.forget()
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
    other = deepcopy(handshake(bench))
    specs = other.stages[0][0].kv_cache_spec.kv_cache_specs
    specs["full.1"] = replace(specs["full.1"], num_kv_heads=4)
    with pytest.raises(ConfigError, match=rf"\[{BOTH}\] bytes.*\[{5 * ONE_LAYER}\]"):
        tell(bench, handshake(bench), other)


def test_where_the_scheduler_is_certain_workers_keep_silent_or_are_refused(engines):
    """Of a ``MultiConnector`` only the first child that says something is heard."""
    bench = engines.make()
    assert bench.ranks[0].ours.get_handshake_metadata() is None
    tell(bench)
    other = engines.make(two_sizes=True)
    tell(other, handshake(other))
    with pytest.raises(ConfigError, match=rf"\[{ONE_LAYER}\] bytes.*\[{BOTH}\]"):
        tell(bench, handshake(other))


@pytest.mark.parametrize("others", [(KVDISK, SHAKING), (SHAKING, KVDISK)])
def test_beside_a_connector_with_a_handshake(engines, others):
    """In either order, unless kvdisk needs one itself: vLLM passes on the first, and to all."""
    for groups in ({}, {"two_sizes": True}, {"by_stage": True, "stages": 2}):
        bench = engines.make(others=others, **groups)
        told = bench.ranks[0].connector.get_handshake_metadata()
        if groups:
            with pytest.raises(ConfigError, match="does not support ShakingConnector beside it"):
                tell(bench, told)
            continue
        tell(bench, told)
        for name in ("a", "b"):
            bench.serve(name, PROMPT)
            bench.forget()
        assert [job.kind for job in bench.jobs] == [JobKind.STORE, JobKind.LOAD]
    engines.close()
