# SPDX-License-Identifier: Apache-2.0
"""kvdisk's metrics at vLLM's endpoint, without an engine; with one: ``test_engine.py``,
``test_sharing.py``."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from kvdisk.connector import metrics
from kvdisk.connector.metrics import KVDiskStats
from kvdisk.connector.plugin import register
from kvdisk.stats import METRICS, MOST_SAMPLES, SERIES, Kind, Stats

pytestmark = pytest.mark.vllm

NAMES = ["model_name", "engine"]
ENGINES: dict[int, list[object]] = {0: ["model", "0"], 1: ["model", "1"]}
KVDISK = {"kv_connector": "KVDiskConnector", "kv_role": "kv_both"}
COUNTERS = [series for series, kind in SERIES.items() if kind is Kind.COUNTER]
HISTOGRAMS = [series for series, kind in SERIES.items() if kind is Kind.HISTOGRAM]
GAUGES = [series for series, kind in SERIES.items() if kind is Kind.GAUGE]


def _observers(transfer: dict[str, Any]) -> Any:
    """Return what vLLM makes of a transfer configuration in the process that serves the metrics."""
    register()
    unregister_vllm_metrics()
    config = KVTransferConfig(**transfer)
    types = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    connector = KVConnectorFactory.get_connector_class(config)
    return connector.build_prom_metrics(SimpleNamespace(kv_transfer_config=config), types, NAMES, ENGINES)


def _value(series: str, engine: int, suffix: str = "", **more: str) -> float | None:
    name, _, value = series.partition(".")
    labels = {key: str(given) for key, given in zip(NAMES, ENGINES[engine], strict=True)} | more
    if value:
        labels[METRICS[name].label] = value
    return REGISTRY.get_sample_value(f"vllm:kvdisk_{name}{suffix}", labels)


def _sent(stats: Stats) -> dict[str, Any]:
    """Return values as they come out of the engine's process: plain JSON, and nothing else."""
    return json.loads(json.dumps(KVDiskStats.of(stats).to_dict()))


@pytest.fixture(autouse=True)
def _leave_nothing() -> Any:
    yield
    unregister_vllm_metrics()


def test_every_counter_is_there_from_the_start_and_adds_up_by_engine() -> None:
    observers = _observers(KVDISK)
    assert [_value(name, engine, "_total") for name in COUNTERS for engine in ENGINES] == [0] * 2 * len(COUNTERS)
    assert [_value(name, engine, "_count") for name in HISTOGRAMS for engine in ENGINES] == [0] * 2 * len(HISTOGRAMS)
    for amount, name in enumerate(COUNTERS, start=1):
        observers.observe(_sent(Stats({name: amount})), 0)
        observers.observe(_sent(Stats({name: amount})), 1)
        observers.observe(_sent(Stats({name: amount})), 1)
    amounts = list(range(1, len(COUNTERS) + 1))
    assert [_value(name, 0, "_total") for name in COUNTERS] == amounts
    assert [_value(name, 1, "_total") for name in COUNTERS] == [2 * amount for amount in amounts]


def test_a_gauge_is_what_it_was_last_and_missing_until_then() -> None:
    observers = _observers(KVDISK)
    assert {_value(name, 0) for name in GAUGES} == {None}
    for value in (7, 3):
        observers.observe(_sent(Stats(gauges=dict.fromkeys(GAUGES, value))), 0)
        assert {_value(name, 0) for name in GAUGES} == {value}
        assert {_value(name, 1) for name in GAUGES} == {None}
    assert _value("drive_read_bytes.12", 0, "_total") is None, "a drive is a label that comes with its first value"
    observers.observe(_sent(Stats({"drive_read_bytes.12": 4096}, gauges={"drive_quarantined.12": 1})), 0)
    assert (_value("drive_read_bytes.12", 0, "_total"), _value("drive_quarantined.12", 0)) == (4096, 1)


def test_a_histogram_gets_each_sample_and_the_mean_of_those_that_were_too_many() -> None:
    observers = _observers(KVDISK)
    stats = Stats()
    for value in (0.0001, 0.004, 700.0):
        stats.observe("transfer_seconds.nvme_to_cpu", value)
    observers.observe(_sent(stats.take()), 0)
    assert _value("transfer_seconds.nvme_to_cpu", 0, "_count") == 3
    assert _value("transfer_seconds.nvme_to_cpu", 0, "_sum") == pytest.approx(700.0041)
    assert _value("transfer_seconds.nvme_to_cpu", 0, "_bucket", le="0.005") == 2
    for value in [*[1.0] * MOST_SAMPLES, 3.0, 5.0, 7.0]:
        stats.observe("job_seconds.load", value)
    observers.observe(_sent(stats), 1)
    assert _value("job_seconds.load", 1, "_count") == MOST_SAMPLES + 3
    assert _value("job_seconds.load", 1, "_sum") == pytest.approx(MOST_SAMPLES + 15)
    assert _value("job_seconds.load", 1, "_bucket", le="5.0") == MOST_SAMPLES + 3, "5 is their mean"
    assert _value("job_seconds.load", 1, "_bucket", le="2.0") == MOST_SAMPLES


def test_what_comes_of_several_steps_adds_up_and_gauges_are_the_last() -> None:
    first, then = Stats({"stored_blocks": 2}, gauges={"backlog_blocks": 9}), Stats({"stored_blocks": 3})
    first.observe("wait_seconds", 0.5)
    then.observe("wait_seconds", 1.5)
    then.gauges["backlog_blocks"] = 4
    total = KVDiskStats.of(first).aggregate(KVDiskStats(data=_sent(then)))
    assert total.data == {
        "counts": {"stored_blocks": 5},
        "samples": {"wait_seconds": [2, 2.0, [0.5, 1.5]]},
        "gauges": {"backlog_blocks": 4},
    }
    total.reset()
    assert total.is_empty() and KVDiskStats.of(Stats()).is_empty()
    assert total.aggregate(KVDiskStats.of(first)).data == KVDiskStats.of(first).data


def test_the_line_of_vllm_has_the_few_figures_that_matter() -> None:
    stats = Stats({"hit_tokens.cpu": 300, "missed_tokens.cpu": 700, "hit_tokens.nvme": 350, "missed_tokens.nvme": 350})
    stats.gauges |= {"used_bytes.cpu": 30, "capacity_bytes.cpu": 40}
    stats.observe("transfer_bytes.nvme_to_cpu", 2e6)
    assert KVDiskStats.of(stats).reduce() == {
        "CPU hits": "30.0 %",
        "NVMe hits": "50.0 %",
        "from NVMe": "2.0 MB",
        "CPU fill": "75 %",
    }


def test_a_multi_connector_passes_the_values_on() -> None:
    """It asserts that every child with counters has an object for Prometheus, and dies
    otherwise."""
    observers = _observers(
        {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": [KVDISK, KVDISK]},
        }
    )
    observers.observe({"KVDiskConnector": _sent(Stats({"stored_blocks": 3}, gauges={"held_blocks.cpu": 8}))}, 1)
    assert _value("stored_blocks", 1, "_total") == 3
    assert _value("stored_blocks", 0, "_total") == 0
    assert _value("held_blocks.cpu", 1) == 8


def test_an_error_in_them_is_said_once_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """vLLM's front end would take it for the engine's end."""
    metrics._say_once.cache_clear()
    observers = _observers(KVDISK)
    unknown = {"counts": {"stored_blocks": 1, "no such metric": 1}, "samples": {"job_seconds.load": "no samples"}}
    with caplog.at_level("ERROR", "kvdisk.connector"):
        observers.observe(unknown, 0)
        broken = KVDiskStats(data=unknown)
        sound = KVDiskStats.of(Stats({"stored_blocks": 2}))
        assert sound.aggregate(broken) is sound and sound.data["counts"] == {"stored_blocks": 2}
        assert broken.reduce() == {}
    assert caplog.text.count("kvdisk's metrics are incomplete") == 1
    observers.observe(_sent(Stats({"evicted_blocks.cpu": 3})), 0)
    assert _value("evicted_blocks.cpu", 0, "_total") == 3
