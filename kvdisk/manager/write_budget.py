# SPDX-License-Identifier: Apache-2.0
"""How much may be written to a drive in a day, or sent to the remote store in a minute."""

from __future__ import annotations


class WriteBudget:
    """A token bucket of bytes, over all ranks: it holds ``burst_bytes``, and ``bytes_per_s`` flow
    in.

    It starts empty: a restart gives nothing away. Once it holds less than a block
    (``largest_bytes``), nothing is written until it holds enough for a run of blocks. Failed writes
    are not given back: the drive may have written them. ``may_spend``: whether blocks might be
    written as of the last ``refresh``.
    """

    _RUN_BLOCKS = 64

    def __init__(self, burst_bytes: int, bytes_per_s: float, largest_bytes: int) -> None:
        assert 0 < largest_bytes <= burst_bytes and bytes_per_s >= 0
        self.burst_bytes = burst_bytes
        self._bytes_per_s = bytes_per_s
        self._largest = largest_bytes
        self._bytes = 0.0
        self._refreshed_s: float | None = None
        self.may_spend = False
        self._resumed = False

    @classmethod
    def within(cls, byte_count: int, seconds: float, largest_bytes: int) -> WriteBudget:
        """Return a budget with which in no such time more than ``byte_count`` is written: the
        bucket holds a 24th of it (one block at least), and the rest flows in over that time."""
        burst_bytes = max(byte_count // 24, largest_bytes)
        return cls(burst_bytes, max(0, byte_count - burst_bytes) / seconds, largest_bytes)

    def refresh(self, now: float) -> bool:
        """Fill the bucket; return whether blocks may be written now. A clock that goes back takes
        nothing out."""
        if self._refreshed_s is not None:
            filled = self._bytes + max(0.0, now - self._refreshed_s) * self._bytes_per_s
            self._bytes = min(float(self.burst_bytes), filled)
        self._refreshed_s = now
        if not self.may_spend and self._bytes >= min(self.burst_bytes, self._RUN_BLOCKS * self._largest):
            self.may_spend = self._resumed = True
        return self.may_spend

    def affords(self, block_bytes: int) -> int:
        """Return how many blocks of so many bytes might be written at the last ``refresh``."""
        return int(self._bytes // block_bytes) if self.may_spend else 0

    @property
    def left_bytes(self) -> int:
        """Bytes that may be written, as of the last ``refresh``."""
        return int(self._bytes)

    def spend(self, count: int, block_bytes: int) -> bool:
        """Take out what is planned to be written; return whether that has used it up."""
        self._bytes -= count * block_bytes
        assert self._bytes >= 0, "more is written than the budget allows"
        ran_dry = self.may_spend and self._bytes < self._largest
        self.may_spend = self.may_spend and not ran_dry
        return ran_dry

    def take_resumed(self) -> bool:
        """Whether writes have resumed since this was last asked."""
        resumed, self._resumed = self._resumed, False
        return resumed
