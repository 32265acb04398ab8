# SPDX-License-Identifier: Apache-2.0
"""How much may be written to NVMe in a day. Scheduler thread only; time comes in as ``now`` (seconds, monotonic)."""

from __future__ import annotations

_RUN_BLOCKS = 64


class WriteBudget:
    """A bucket of bytes, over all ranks, that fills steadily: what is planned to be written is taken out of it.

    It holds an hour's share (``bytes_per_day / 24``, one block at least) and fills with the rest of the day's bytes
    over a day, so that in no 24 hours more than ``bytes_per_day`` is written. It starts empty: a restart gives
    nothing away. Once it holds less than one block, nothing is written until it holds enough for a run of blocks.
    ``largest_bytes``: of a block, over all ranks. ``day_s``: length of a day.
    Failed writes are not given back: the drive may have written them.
    ``is_open``: whether blocks might be written when that was last asked. ``pauses``: how often it ran dry.
    """

    def __init__(self, bytes_per_day: int, largest_bytes: int, day_s: float = 86_400.0) -> None:
        self._largest = largest_bytes
        self.burst_bytes = max(bytes_per_day // 24, largest_bytes)
        self._bytes_per_s = max(0, bytes_per_day - self.burst_bytes) / day_s
        self._bytes = 0.0
        self._looked_s: float | None = None
        self.is_open = False
        self._resumed = False
        self.pauses = 0

    def look(self, now: float) -> bool:
        """Whether blocks may be written now."""
        if self._looked_s is not None:
            filled = self._bytes + (now - self._looked_s) * self._bytes_per_s
            self._bytes = min(float(self.burst_bytes), filled)
        self._looked_s = now
        if not self.is_open and self._bytes >= min(self.burst_bytes, _RUN_BLOCKS * self._largest):
            self.is_open = self._resumed = True
        return self.is_open

    def affords(self, block_bytes: int) -> int:
        """Return how many blocks of so many bytes over all ranks may be written, as of the last ``look``."""
        return int(self._bytes // block_bytes) if self.is_open else 0

    @property
    def left_bytes(self) -> int:
        """Bytes that may be written, as of the last ``look``."""
        return int(self._bytes)

    def spend(self, count: int, block_bytes: int) -> None:
        """Take out what is planned to be written."""
        self._bytes -= count * block_bytes
        assert self._bytes >= 0, "more is written than the budget allows"
        if self.is_open and self._bytes < self._largest:
            self.is_open = False
            self.pauses += 1

    def take_resumed(self) -> bool:
        """Whether writes have resumed since this was last asked."""
        resumed, self._resumed = self._resumed, False
        return resumed
