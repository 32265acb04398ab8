# SPDX-License-Identifier: Apache-2.0
"""Copies slots between two tiers in one host's memory. kvdisk ships one such tier: a second one
needs this (decision 30, ``tests/unit/test_seams.py``)."""

from __future__ import annotations

import numpy as np

from kvdisk.worker.arena import Arena
from kvdisk.worker.routes import Batch, Leg


def copy_slots(batch: Batch, slow: Arena) -> None:
    """Copy what a batch reads from the slow tier, or writes to it, as its leg says. Any thread; the
    interpreter lock is released meanwhile.

    ``slow``: the arena of that tier. The batch owns the slots until this returns.
    """
    moves, size_class = batch.work.job.moves, batch.size_class
    for position, slot in zip(batch.positions, batch.slots, strict=True):
        fast_view = np.frombuffer(batch.memory.view(size_class, slot), np.uint8)
        slow_view = np.frombuffer(slow.view(size_class, moves[position].slots[batch.far].index), np.uint8)
        if batch.leg is Leg.READ:
            np.copyto(fast_view, slow_view)
        else:
            np.copyto(slow_view, fast_view)
