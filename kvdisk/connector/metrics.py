# SPDX-License-Identifier: Apache-2.0
"""kvdisk's counters in the form that vLLM passes from the scheduler to its log and its Prometheus endpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from kvdisk.stats import COUNTERS, Stats

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PREFIX = "vllm:kvdisk_"
"""vLLM clears and lists the metrics of its own name only."""


class KVDiskStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is untyped here
    """``data`` is a dictionary of counters, see ``kvdisk.stats.COUNTERS``."""

    data: dict[str, int]

    @classmethod
    def of(cls, stats: Stats) -> KVDiskStats:
        """Wrap counters."""
        return cls(data=dict(stats.counts))

    def reset(self) -> None:
        """Start again from zero."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVDiskStats:
        """Add the counters of ``other`` to these."""
        merged = Stats(dict(self.data))
        merged.merge(Stats(other.data))
        self.data = merged.counts
        return self

    def reduce(self) -> dict[str, Any]:
        """Return what one log line shows: the counters as they are."""
        return dict(sorted(self.data.items()))

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class KVDiskPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # vLLM is untyped here
    """Every counter as ``vllm:kvdisk_<name>``, one series per engine, in the process that serves ``/metrics``.

    ``MultiConnector`` makes one object for all children of this class, and adds their counters up before.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        # Made at once, so that a counter that nothing has moved reads 0 and is not missing.
        self._counters = {
            name: create_metric_per_engine(
                self._counter_cls(name=f"{PREFIX}{name}", documentation=f"kvdisk: {meaning}.", labelnames=labelnames),
                per_engine_labelvalues,
            )
            for name, meaning in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what one engine has counted since the last call; names are those of ``kvdisk.stats.COUNTERS``."""
        for name, amount in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(amount)
