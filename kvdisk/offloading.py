# SPDX-License-Identifier: Apache-2.0
"""kvdisk as a tier behind vLLM's ``OffloadingConnector``, where vLLM's plugins are off:
``{"type": "KVDiskTier", "module_path": "kvdisk.offloading"}`` in ``secondary_tiers``. Also what a
user names there by its path: the detector of ``backpressure``."""

from kvdisk.connector.backpressure import WriteBackpressure
from kvdisk.connector.tier import KVDiskTier

__all__ = ["KVDiskTier", "WriteBackpressure"]
