# SPDX-License-Identifier: Apache-2.0
"""Says once that ranks answer no job. Scheduler thread only.

vLLM starts an engine one of whose machines was given no connector: nothing is ever stored there,
and no hook tells the scheduler's half. Without this line the only sign is that nothing hits.
"""

from __future__ import annotations

import logging
from typing import Final

from kvdisk.manager.jobs import Transfers

SILENT_DEADLINES: Final = 4
"""A rank answers within ``io_deadline_s``, whatever its drive does."""
LEAST_STEPS: Final = 64
"""Steps in which the same job has no answer: an engine that was stopped hears nobody either."""
logger = logging.getLogger("kvdisk.manager")


class SilentRanks:
    """Watches the job that was planned first of those that are out. ``io_deadline_s``: see the
    setting."""

    def __init__(self, transfers: Transfers, io_deadline_s: float) -> None:
        self._transfers = transfers
        self._most_s = SILENT_DEADLINES * io_deadline_s
        self._job_id, self._steps, self._is_said = -1, 0, False

    def look(self, now: float) -> None:
        """Look once in a step."""
        record = self._transfers.oldest
        if record is None or record.sent_s is None or self._is_said:
            return
        if record.job.id != self._job_id:
            self._job_id, self._steps = record.job.id, 0
        self._steps += 1
        if self._steps >= LEAST_STEPS and now - record.sent_s > self._most_s:
            self._is_said = True
            logger.warning(
                "kvdisk has had no answer from %d of %d ranks for %.0f s, and stores nothing without them: give each"
                " machine of this engine the same connector and settings, and see the log of each worker.",
                self._transfers.rank_count - record.ranks,
                self._transfers.rank_count,
                now - record.sent_s,
            )
