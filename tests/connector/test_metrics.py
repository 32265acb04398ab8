# SPDX-License-Identifier: Apache-2.0
"""kvdisk's counters at vLLM's Prometheus endpoint, without an engine; with one: ``test_sharing.py``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from kvdisk.connector.metrics import KVDiskStats
from kvdisk.connector.plugin import register
from kvdisk.stats import COUNTERS, Stats

pytestmark = pytest.mark.vllm

NAMES = ["model_name", "engine"]
ENGINES: dict[int, list[object]] = {0: ["model", "0"], 1: ["model", "1"]}
KVDISK = {"kv_connector": "KVDiskConnector", "kv_role": "kv_both"}


def _observers(transfer: dict[str, Any]) -> Any:
    """Return what vLLM makes of a transfer configuration in the process that serves the metrics."""
    register()
    unregister_vllm_metrics()
    config = KVTransferConfig(**transfer)
    types = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    connector = KVConnectorFactory.get_connector_class(config)
    return connector.build_prom_metrics(SimpleNamespace(kv_transfer_config=config), types, NAMES, ENGINES)


def _value(name: str, engine: int) -> float | None:
    return REGISTRY.get_sample_value(f"vllm:kvdisk_{name}_total", dict(zip(NAMES, ENGINES[engine], strict=True)))


@pytest.fixture(autouse=True)
def _leave_nothing() -> Any:
    yield
    unregister_vllm_metrics()


def test_every_counter_is_there_from_the_start_and_adds_up_by_engine() -> None:
    observers = _observers(KVDISK)
    assert [_value(name, engine) for name in COUNTERS for engine in ENGINES] == [0] * 2 * len(COUNTERS)
    for amount, name in enumerate(COUNTERS, start=1):
        observers.observe(KVDiskStats.of(Stats({name: amount})).to_dict(), 0)
        observers.observe(KVDiskStats.of(Stats({name: amount})).to_dict(), 1)
        observers.observe(KVDiskStats.of(Stats({name: amount})).to_dict(), 1)
    amounts = list(range(1, len(COUNTERS) + 1))
    assert [_value(name, 0) for name in COUNTERS] == amounts
    assert [_value(name, 1) for name in COUNTERS] == [2 * amount for amount in amounts]


def test_a_multi_connector_passes_the_counters_on() -> None:
    """It asserts that every child with counters has an object for Prometheus, and dies otherwise."""
    observers = _observers(
        {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": [KVDISK, KVDISK]},
        }
    )
    observers.observe({"KVDiskConnector": {"stored_blocks": 3}}, 1)
    assert _value("stored_blocks", 1) == 3
    assert _value("stored_blocks", 0) == 0
