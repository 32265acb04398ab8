# SPDX-License-Identifier: Apache-2.0
"""The door to LMCache's server. ``L2Adapter`` is one of its adapters of a second level: one that it
loads by name (``plugin``), so that nothing of LMCache changes.

All that depends on LMCache's insides is in this folder. What its modules assume about LMCache is
marked there with ``LMCache:``. docs/LMCACHE.md has what to type.
"""

from kvdisk.lmcache.adapter import L2Adapter

__all__ = ["L2Adapter"]
