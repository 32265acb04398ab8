# SPDX-License-Identifier: Apache-2.0
"""Says once that ranks have never answered a job. Scheduler thread only.

vLLM starts an engine one of whose machines was given no connector: nothing is ever stored there,
and no hook tells the scheduler's half. Without this line the only sign is that nothing hits. Once
all ranks have answered one job nothing is looked at any more: ranks that end or hang later are
named by others.
"""

from __future__ import annotations

import logging
from typing import Final

from kvdisk.manager.jobs import Transfers

SILENT_DEADLINES: Final = 4
"""A rank answers within ``io_deadline_s``, whatever its drive does."""
LEAST_STEPS: Final = 64
"""Steps without an answer: an engine that was stopped hears nobody either."""
logger = logging.getLogger("kvdisk.manager")


class SilentRanks:
    """Watches the first job of all. ``io_deadline_s``: see the setting."""

    def __init__(self, transfers: Transfers, io_deadline_s: float) -> None:
        self._transfers = transfers
        self._most_s = SILENT_DEADLINES * io_deadline_s
        self._steps, self._is_over = 0, False

    def look(self, now: float) -> None:
        """Look once in a step."""
        if self._is_over or (record := self._transfers.oldest) is None or record.sent_s is None:
            return
        self._steps += 1
        self._is_over = self._transfers.has_settled
        if not self._is_over and self._steps >= LEAST_STEPS and now - record.sent_s > self._most_s:
            self._is_over = True
            logger.warning(
                "kvdisk has had no answer from %d of %d ranks for %.0f s, and stores nothing without them: give each"
                " machine of this engine the same connector and settings, and see the log of each worker.",
                self._transfers.rank_count - record.ranks,
                self._transfers.rank_count,
                now - record.sent_s,
            )
