# SPDX-License-Identifier: Apache-2.0
"""What goes between the scheduler's and the workers' connectors, in vLLM's envelopes."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvdisk.messages import Plan, Report

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec

logger = logging.getLogger("kvdisk.connector")


@dataclass
class KVDiskMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is untyped here
    """One step's plan, on its way to the workers."""

    plan: Plan


@dataclass
class KVDiskWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM is untyped here
    """One step's reports, on their way to the scheduler."""

    report: Report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVDiskWorkerMetadata:
        """Merge another rank's report of the same step into this one, and return this one."""
        assert isinstance(other, KVDiskWorkerMetadata)
        try:
            self.report.merge(other.report)
        except Exception:
            logger.exception("kvdisk cannot add up what two ranks report")
            self.report = Report(off=True)
        return self


@dataclass
class KVDiskHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vLLM is untyped here
    """The KV-cache groups of all stages as a worker has them, on their way to the scheduler at the
    start."""

    stages: list[list[KVCacheGroupSpec]]
