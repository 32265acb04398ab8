# SPDX-License-Identifier: Apache-2.0
"""kvdisk as a tier behind vLLM's ``OffloadingConnector``, where vLLM's plugins are off:
``{"type": "KVDiskTier", "module_path": "kvdisk.offloading"}`` in ``secondary_tiers``."""

from kvdisk.connector.tier import KVDiskTier

__all__ = ["KVDiskTier"]
