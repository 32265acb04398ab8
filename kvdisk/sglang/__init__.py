# SPDX-License-Identifier: Apache-2.0
"""The door to SGLang. ``HiCache`` is a storage backend of its hierarchical cache: one that SGLang
loads by name (``dynamic``), so that nothing of SGLang changes.

All that depends on SGLang's insides is in this folder. What its modules assume about SGLang is
marked there with ``SGLang:``. docs/SGLANG.md has what to type.
"""

from kvdisk.sglang.hicache import HiCache

__all__ = ["HiCache"]
