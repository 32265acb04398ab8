# SPDX-License-Identifier: Apache-2.0
"""kvdisk's metrics at vLLM's endpoint, without an engine; with one: ``test_engine.py``."""

from __future__ import annotations

import json
from collections.abc import Iterator
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

NAMES = ["model_name", "engine"]
ENGINES: dict[int, list[object]] = {0: ["model", "0"], 1: ["model", "1"]}
KVDISK = {"kv_connector": "KVDiskConnector", "kv_role": "kv_both"}
SUFFIXES = {Kind.COUNTER: "_total", Kind.HISTOGRAM: "_count", Kind.GAUGE: ""}


def _observers(transfer: dict[str, Any] = KVDISK) -> Any:
    """Return what vLLM makes of a transfer configuration in the process that serves the metrics."""
    register()
    unregister_vllm_metrics()
    config = KVTransferConfig(**transfer)
    types = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    connector = KVConnectorFactory.get_connector_class(config)
    return connector.build_prom_metrics(SimpleNamespace(kv_transfer_config=config), types, NAMES, ENGINES)


def _value(series: str, engine: int, suffix: str | None = None, **more: str) -> float | None:
    name, _, value = series.partition(".")
    labels = {key: str(given) for key, given in zip(NAMES, ENGINES[engine], strict=True)} | more
    if value:
        labels[METRICS[name].label] = value
    suffix = SUFFIXES[METRICS[name].kind] if suffix is None else suffix
    return REGISTRY.get_sample_value(f"vllm:kvdisk_{name}{suffix}", labels)


def _sent(stats: Stats) -> dict[str, Any]:
    """Return values as they come out of the engine's process: plain JSON, and nothing else."""
    return json.loads(json.dumps(KVDiskStats.of(stats).to_dict()))


@pytest.fixture(autouse=True)
def _leave_nothing() -> Iterator[None]:
    yield
    unregister_vllm_metrics()


def test_every_series_adds_up_by_engine_and_but_for_gauges_is_there_from_the_start():
    observers = _observers()
    for series, kind in SERIES.items():
        start = None if kind is Kind.GAUGE else 0
        assert [_value(series, engine) for engine in ENGINES] == [start, start], series
    for amount, (series, kind) in enumerate(SERIES.items(), start=2):
        for engine in (0, 1, 1):
            stats = Stats({series: amount} if kind is Kind.COUNTER else {})
            if kind is Kind.GAUGE:
                stats.gauges[series] = amount + engine
            elif kind is Kind.HISTOGRAM:
                stats.observe(series, amount)
            observers.observe(_sent(stats), engine)
        of_both = {Kind.COUNTER: [amount, 2 * amount], Kind.HISTOGRAM: [1, 2], Kind.GAUGE: [amount, amount + 1]}
        assert [_value(series, engine) for engine in ENGINES] == of_both[kind], series


def test_a_drive_is_a_label_that_comes_with_its_first_value():
    observers = _observers()
    assert _value("drive_read_bytes.12", 0) is None
    observers.observe(_sent(Stats({"drive_read_bytes.12": 4096}, gauges={"drive_quarantined.12": 1})), 0)
    assert (_value("drive_read_bytes.12", 0), _value("drive_quarantined.12", 0)) == (4096, 1)


def test_a_histogram_gets_each_sample_and_the_mean_of_those_that_were_too_many():
    observers = _observers()
    stats = Stats()
    for value in [0.0001, 0.004, *[1.0] * (MOST_SAMPLES - 2), 2.5, 4.0, 5.5]:
        stats.observe("job_seconds.load", value)
    observers.observe(_sent(stats), 1)
    assert _value("job_seconds.load", 1, "_count") == MOST_SAMPLES + 3
    assert _value("job_seconds.load", 1, "_sum") == pytest.approx(MOST_SAMPLES - 2 + 12.0041)
    counts = {"0.005": 2, "2.0": MOST_SAMPLES, "5.0": MOST_SAMPLES + 3}
    assert {le: _value("job_seconds.load", 1, "_bucket", le=le) for le in counts} == counts, "4 is their mean"


def test_what_comes_of_several_steps_adds_up_and_gauges_are_the_last():
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


def test_a_multi_connector_passes_the_values_on():
    """It asserts that every child with counters has an object for Prometheus, and dies
    otherwise."""
    children = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [KVDISK, KVDISK]}}
    observers = _observers(KVDISK | children)
    observers.observe({"KVDiskConnector": _sent(Stats({"stored_blocks": 3}, gauges={"held_blocks.cpu": 8}))}, 1)
    assert [_value("stored_blocks", engine) for engine in ENGINES] == [0, 3]
    assert _value("held_blocks.cpu", 1) == 8


def test_an_error_in_them_is_said_once_and_ends_nothing(caplog):
    """vLLM's front end would take it for the engine's end."""
    metrics._say_once.cache_clear()
    observers = _observers()
    unknown = {"counts": {"stored_blocks": 1, "no such metric": 1}, "samples": {"job_seconds.load": "no samples"}}
    with caplog.at_level("ERROR", "kvdisk.connector"):
        observers.observe(unknown, 0)
        broken = KVDiskStats(data=unknown)
        sound = KVDiskStats.of(Stats({"stored_blocks": 2}))
        assert sound.aggregate(broken) is sound and sound.data["counts"] == {"stored_blocks": 2}
        assert broken.reduce() == {}
    assert caplog.text.count("kvdisk's metrics are incomplete") == 1
    observers.observe(_sent(Stats({"evicted_blocks.cpu": 3})), 0)
    assert _value("evicted_blocks.cpu", 0) == 3
