# SPDX-License-Identifier: Apache-2.0
"""kvdisk's metrics in the form in which vLLM passes them from the scheduler to its log and its
Prometheus endpoint.

They are plain values (see ``KVDiskStats``), because vLLM hands them to another process. Samples of
histograms are passed one by one: Prometheus' client takes them so, in one process or several, and
so does Ray's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata, OffloadingHistogramMetadata

from kvdisk.stats import METRICS, SERIES, Kind, Metric, Samples, Stats
from kvdisk.telemetry import summarize

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("kvdisk.connector")
PREFIX = "vllm:kvdisk_"
"""vLLM clears and lists only metrics with its own prefix."""
_COUNTS, _SAMPLES, _GAUGES = "counts", "samples", "gauges"


@contextmanager
def _harmless() -> Iterator[None]:
    """Ignore an error in the body, logged once: vLLM calls this where an error would end the
    server."""
    try:
        yield
    except Exception:
        _say_once()


@cache
def _say_once() -> None:
    logger.exception("kvdisk's metrics are incomplete from now on, because of this error; please report it.")


_OF_A_TIER = {
    Kind.COUNTER: OffloadingCounterMetadata,
    Kind.GAUGE: OffloadingGaugeMetadata,
    Kind.HISTOGRAM: OffloadingHistogramMetadata,
}


def tier_metrics() -> dict[str, Any]:
    """Return the metrics of a tier behind vLLM's own connector, as that connector defines them."""
    found = {}
    for metric in METRICS.values():
        about: dict[str, Any] = {"documentation": f"kvdisk: {metric.about}."}
        if metric.label:
            about["labelnames"] = (metric.label,)
        if metric.kind is Kind.HISTOGRAM:
            about["buckets"] = tuple(metric.buckets)
        found[f"{PREFIX}{metric.name}"] = _OF_A_TIER[metric.kind](**about)
    return found


def tier_stats(stats: Stats) -> OffloadingConnectorStats:
    """Return values in the form of vLLM's own connector."""
    found = OffloadingConnectorStats()
    for series, amount in stats.counts.items():
        name, label = _name_and_label(series)
        found.increase_counter(name, amount, label)
    for series, value in stats.gauges.items():
        name, label = _name_and_label(series)
        found.set_gauge(name, value, label)
    for series, samples in stats.samples.items():
        name, label = _name_and_label(series)
        for value in samples.all_values():
            found.observe_histogram(name, value, label)
    return found


def _name_and_label(series: str) -> tuple[str, tuple[str, ...]]:
    name, _, value = series.partition(".")
    return f"{PREFIX}{name}", (value,) if value else ()


class KVDiskStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is untyped here
    """``data``: what has risen, and present values, by series as ``kvdisk.stats`` names them.

    ``counts``: integers. ``samples``: [number, sum, [the first values]]. ``gauges``: numbers. Empty
    where there is nothing.
    """

    data: dict[str, Any]

    @classmethod
    def of(cls, stats: Stats) -> KVDiskStats:
        """Return the values wrapped."""
        if stats.empty:
            return cls(data={})
        samples = {series: [each.count, each.total, each.values] for series, each in stats.samples.items()}
        return cls(data={_COUNTS: dict(stats.counts), _SAMPLES: samples, _GAUGES: dict(stats.gauges)})

    @property
    def stats(self) -> Stats:
        """The values, unwrapped."""
        samples = {series: Samples(*each) for series, each in self.data.get(_SAMPLES, {}).items()}
        return Stats(dict(self.data.get(_COUNTS, {})), samples, dict(self.data.get(_GAUGES, {})))

    def reset(self) -> None:
        """Begin again from nothing."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVDiskStats:
        """Add the values of a later time, or of another child of a ``MultiConnector``. Later gauges
        replace earlier ones."""
        with _harmless():
            merged = self.stats
            merged.merge(KVDiskStats(data=other.data).stats)
            self.data = KVDiskStats.of(merged).data
        return self

    def reduce(self) -> dict[str, Any]:
        """Return what one log line shows: a few figures of the time since the last line."""
        with _harmless():
            return summarize(self.stats)
        return {}

    def is_empty(self) -> bool:
        """Return whether nothing was counted or measured."""
        return not self.data


class KVDiskPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # vLLM is untyped here
    """Every metric as ``vllm:kvdisk_<name>``, by engine and by its own label, in the process that
    serves ``/metrics``.

    ``MultiConnector`` makes one object for all children of this class, and adds their values up
    first.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {metric.name: self._make(metric) for metric in METRICS.values()}
        self._series: dict[tuple[int, str], Any] = {}
        # Made at once, so that a series that nothing has moved reads 0 and is not missing. A gauge
        # is missing until it is read.
        for series, kind in SERIES.items():
            if kind is not Kind.GAUGE:
                for engine in per_engine_labelvalues:
                    self._of(engine, series)

    def _make(self, metric: Metric) -> Any:
        labels = [*self._labelnames, metric.label] if metric.label else list(self._labelnames)
        about = {"name": f"{PREFIX}{metric.name}", "documentation": f"kvdisk: {metric.about}.", "labelnames": labels}
        if metric.kind is Kind.COUNTER:
            return self._counter_cls(**about)
        if metric.kind is Kind.HISTOGRAM:
            return self._histogram_cls(**about, buckets=list(metric.buckets))
        return self._gauge_cls(**about, multiprocess_mode="mostrecent")

    def _of(self, engine: int, series: str) -> Any:
        found = self._series.get((engine, series))
        if found is None:
            name, _, value = series.partition(".")
            labels = self.per_engine_labelvalues[engine]
            found = self._metrics[name].labels(*labels, *([value] if value else []))
            self._series[engine, series] = found
        return found

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take what one engine has counted and measured since the last call, in the form of
        ``KVDiskStats.data``."""
        with _harmless():
            self._observe(KVDiskStats(data=transfer_stats_data).stats, engine_idx)

    def _observe(self, stats: Stats, engine: int) -> None:
        for series, amount in stats.counts.items():
            self._of(engine, series).inc(amount)
        for series, value in stats.gauges.items():
            self._of(engine, series).set(value)
        for series, samples in stats.samples.items():
            for value in samples.all_values():
                self._of(engine, series).observe(value)
