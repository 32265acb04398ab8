# SPDX-License-Identifier: Apache-2.0
"""Copies of slots between two tiers of one host's memory. kvdisk ships one such tier: a second one
needs this (decision 30, ``tests/unit/test_seams.py``)."""

from __future__ import annotations

import numpy as np

from kvdisk.worker.arena import Arena
from kvdisk.worker.routes import Leg, Part


def copy_slots(part: Part, slow: Arena) -> None:
    """Copy what a part reads from the slow tier, or writes to it, as its leg says. Any thread; the
    interpreter's lock is let go.

    ``slow``: the arena of that tier. The slots are the part's until this returns.
    """
    moves, size_class = part.work.job.moves, part.size_class
    for position, slot in zip(part.positions, part.slots, strict=True):
        fast_view = np.frombuffer(part.memory.view(size_class, slot), np.uint8)
        slow_view = np.frombuffer(slow.view(size_class, part.route.slow_slot(moves[position]).index), np.uint8)
        if part.leg is Leg.READ:
            np.copyto(fast_view, slow_view)
        else:
            np.copyto(slow_view, fast_view)
