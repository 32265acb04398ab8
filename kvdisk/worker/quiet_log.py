# SPDX-License-Identifier: Apache-2.0
"""Warnings that a failing drive, or a client, cannot turn into a flood: one per cause and interval."""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger("kvdisk.worker")

INTERVAL_S = 60.0


class QuietLog:
    """Passes the first warning of a cause, and the next one ``INTERVAL_S`` later with what was left out. One thread."""

    def __init__(self, clock: Callable[[], float], log: logging.Logger = logger) -> None:
        self._clock = clock
        self._log = log
        self._last_s: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def warn(self, cause: str, text: str) -> None:
        """Log ``text``, unless this ``cause`` (one of a closed list) was logged a short while ago."""
        now_s = self._clock()
        last_s = self._last_s.get(cause)
        if last_s is not None and now_s - last_s < INTERVAL_S:
            self._left_out[cause] = self._left_out.get(cause, 0) + 1
            return
        self._last_s[cause] = now_s
        left_out = self._left_out.pop(cause, 0)
        self._log.warning("kvdisk: %s%s", text, f" ({left_out} more like it before)" if left_out else "")
