# SPDX-License-Identifier: Apache-2.0
"""kvdisk's counters in the form that vLLM passes from the scheduler to its log."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvdisk.stats import Stats


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
    """Nothing goes to Prometheus yet. Without this object for a child's counters ``MultiConnector`` ends the engine."""

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Leave the counters to the log."""
