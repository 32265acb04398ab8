# SPDX-License-Identifier: Apache-2.0
"""The bounds of a step, so low that the short prompts of tests cross them."""

from __future__ import annotations

import pytest

from kvdisk.manager import (
    demotions,
    neighbours,
    nvme,
    prefetch,
    questions,
    remote,
    step_work,
)
from kvdisk.manager.eviction import TailFirst
from kvdisk.manager.step_work import SHARES, Kind

BOUNDS = (
    (TailFirst, "MAX_SKIPPED", 2),
    (demotions, "MAX_DEMOTE_MOVES", 3),
    (demotions, "MAX_DEMOTE_JOBS", 1),
    (prefetch, "MAX_PROMOTE_MOVES", 2),
    (nvme, "MOST_ENDED", 2),
    (neighbours, "MOST_KEYS", 3),
    (neighbours, "MOST_HINTS", 6),
    (questions, "MOST_HINTS", 12),
    (questions, "MOST_WAITING", 2),
    (remote, "MOST_KEYS", 3),
    (remote, "MOST_HINTS", 6),
    (remote, "MOST_SEND_MOVES", 2),
    (remote, "MOST_QUEUED", 4),
)


def lower_shares(patch: pytest.MonkeyPatch, blocks: int, *kinds: Kind) -> None:
    """Let each step look at so many blocks of these kinds, or of all."""
    for kind in kinds or SHARES:
        patch.setitem(SHARES, kind, SHARES[kind]._replace(blocks=blocks, cost=1))
    patch.setattr(step_work, "SPARE_BLOCKS", 0)


def lower_bounds(patch: pytest.MonkeyPatch) -> None:
    """Lower them all."""
    for owner, name, value in BOUNDS:
        assert hasattr(owner, name)
        patch.setattr(owner, name, value)
    lower_shares(patch, 2)
