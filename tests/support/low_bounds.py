# SPDX-License-Identifier: Apache-2.0
"""The bounds of a step, so low that the short prompts of tests cross them."""

from __future__ import annotations

import pytest

from kvdisk.manager import bounds, step_work
from kvdisk.manager.step_work import SHARES, Kind

LOW = {
    "JOBS": 1,
    "FETCH_JOBS": 1,
    "MOVES": 2,
    "EVICTED_AHEAD": 3,
    "SLOTS_PER_AHEAD": 3,
    "ENDED": 2,
    "TAILS_SKIPPED": 2,
    "QUESTION_BLOCKS": 3,
    "QUESTIONS": 2,
    "HINTS": 8,
    "QUEUED": 4,
    "UNREACHED": 4,
    "CHAINS": 2,
}


def lower_shares(patch: pytest.MonkeyPatch, blocks: int, *kinds: Kind) -> None:
    """Let each step look at so many blocks of these kinds, or of all."""
    for kind in kinds or SHARES:
        patch.setitem(SHARES, kind, SHARES[kind]._replace(blocks=blocks, cost=1))
    patch.setattr(step_work, "SPARE_BLOCKS", 0)


def lower_bounds(patch: pytest.MonkeyPatch) -> None:
    """Lower them all."""
    for name, value in LOW.items():
        patch.setattr(bounds, name, value)
    lower_shares(patch, 2)
