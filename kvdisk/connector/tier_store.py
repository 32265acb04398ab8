# SPDX-License-Identifier: Apache-2.0
"""The store of kvdisk's tier: what vLLM's own connector asks for beyond what any engine does."""

from __future__ import annotations

import time

from kvdisk.manager.kv_hints import Hinted
from kvdisk.store import BlockStore


class TierStore(BlockStore):
    """See the module. One thread at a time makes all calls, as of ``BlockStore``."""

    def hint(self, prompt: Hinted, *, ended: bool) -> None:
        """Do what the KV hints of a prompt say of its blocks. Call it when the prompt has come, and
        again when its request has ended. A store that is off does nothing."""
        if not self._is_off:
            with self._turn:
                self._manager.hint_keys(prompt, time.monotonic(), ended=ended)

    @property
    def is_budget_spent(self) -> bool:
        """Whether the write budget lets no block be written, as of the last step."""
        assert self._parts.nvme is not None, "a store without memory has a drive, or does not open"
        return self._parts.nvme.affordable_bytes <= 0
