# SPDX-License-Identifier: Apache-2.0
"""A second account of the bytes written to NVMe, beside the one that the product keeps of its
budget."""

from __future__ import annotations

from support.manager_parts import DAY_S, Sizes


class BudgetWatch:
    """An hour's bytes at most, none at the start, and the rest over the day. Without a budget
    anything goes."""

    def __init__(self, sizes: Sizes, now: float) -> None:
        self._bytes_per_day = sizes.config.nvme_write_bytes_per_day
        self._largest_bytes = sizes.largest_bytes
        self._allowed_bytes = 0.0
        self._filled_s = now

    def spend(self, written_bytes: int, now: float) -> None:
        """Note a write; fail where it is more than the budget allows."""
        if self._bytes_per_day is None:
            return
        burst = max(self._bytes_per_day / 24, self._largest_bytes)
        filled = (now - self._filled_s) * (self._bytes_per_day - burst) / DAY_S
        self._allowed_bytes = min(burst, self._allowed_bytes + filled) - written_bytes
        self._filled_s = now
        assert self._allowed_bytes >= -1.0, "the budget of written bytes is overdrawn"
