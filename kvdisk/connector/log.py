# SPDX-License-Identifier: Apache-2.0
"""Where kvdisk's log lines go in an engine."""

from __future__ import annotations

import logging


def join_log() -> None:
    """Send kvdisk's log lines where vLLM's go, at vLLM's level, unless somebody has said where they
    go. Idempotent.

    vLLM shows only the lines of its own loggers.
    """
    ours, theirs = logging.getLogger("kvdisk"), logging.getLogger("vllm")
    if ours.hasHandlers() or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    if ours.level == logging.NOTSET:
        ours.setLevel(theirs.level)
