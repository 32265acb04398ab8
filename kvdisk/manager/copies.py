# SPDX-License-Identifier: Apache-2.0
"""The life of a copy, as one table; what a block's copies mean for a load; and copies by columns. Pure."""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvdisk.blocks import BlockKey


class CopyState(IntEnum):
    """State of one copy. DOOMED: not served any more, waits for its last pin."""

    ABSENT = 0
    WRITING = 1
    READY = 2
    DOOMED = 3


ABSENT: Final = int(CopyState.ABSENT)
WRITING: Final = int(CopyState.WRITING)
READY: Final = int(CopyState.READY)
DOOMED: Final = int(CopyState.DOOMED)
"""The same as plain integers, which is what columns hold; see ``kvdisk.blocks.CPU``."""


class Change(IntEnum):
    """What can happen to a copy."""

    BEGIN = 0
    READY = 1
    DOOM = 2
    DROP = 3


TRANSITIONS: dict[tuple[CopyState, Change], CopyState] = {
    (CopyState.ABSENT, Change.BEGIN): CopyState.WRITING,
    (CopyState.WRITING, Change.READY): CopyState.READY,
    (CopyState.WRITING, Change.DOOM): CopyState.DOOMED,
    (CopyState.WRITING, Change.DROP): CopyState.ABSENT,
    (CopyState.READY, Change.DOOM): CopyState.DOOMED,
    (CopyState.READY, Change.DROP): CopyState.ABSENT,
    (CopyState.DOOMED, Change.DROP): CopyState.ABSENT,
}
"""The whole life cycle of a copy. DROP asks for zero pins."""


class Presence(IntEnum):
    """Whether a block can be loaded: NOWHERE, from no tier; COMING: it is being written; READY: now."""

    NOWHERE = 0
    COMING = 1
    READY = 2


def _presence_by(cpu: int, nvme: int) -> Presence:
    if CopyState.READY in {cpu, nvme}:
        return Presence.READY
    return Presence.COMING if CopyState.WRITING in {cpu, nvme} else Presence.NOWHERE


NOWHERE: Final = int(Presence.NOWHERE)
COMING: Final = int(Presence.COMING)
ILLEGAL = 255
# By state and change, and by the states in both tiers, four of each: what is asked for every block of every job.
NEXT = bytes(TRANSITIONS.get((state, change), ILLEGAL) for state in CopyState for change in Change)
PRESENCES = bytes(_presence_by(cpu, nvme) for cpu in CopyState for nvme in CopyState)


class CommittedCopies(NamedTuple):
    """Columns of blocks whose NVMe copies a committed record names, a row each; arrays of one length.

    ``parent_rows``: positions in these columns, or -1 where the parent is not among them. ``parents``: the very
    objects of ``keys`` where it is.
    """

    keys: list[BlockKey]
    parents: list[BlockKey | None]
    parent_rows: NDArray[np.int32]
    generations: NDArray[np.uint64]
    segments: NDArray[np.uint32]
    indices: NDArray[np.uint32]
