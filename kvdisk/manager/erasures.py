# SPDX-License-Identifier: Apache-2.0
"""Deletes blocks for good, as a caller of the library asks: no later start finds them. Scheduler
thread only.

Nobody finds them from the call on. What a job reads it still gets; what it writes leaves no copy.
An erasure is over when the index has committed the deletion of every record, those of copies that
jobs still use among them: a drive that hangs holds up no erasure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvdisk.blocks import BlockKey
from kvdisk.geometry import FILE_EPOCH
from kvdisk.index.base import IndexState
from kvdisk.manager.catalog import ABSENT, DROPPED, NONE, Catalog
from kvdisk.manager.nvme import NvmeSpace
from kvdisk.manager.parts import StepState


@dataclass(slots=True)
class Erasure:
    """``ticket``: of the last deletion; None: not all are queued yet. ``heard_s``: when it last
    came nearer to its end, and ``left`` how far it was then."""

    ticket: int | None
    heard_s: float
    left: int = 0


class Erasures:
    """Begins erasures, and says when they are over. ``silence_s``: how long nothing may come of
    one."""

    def __init__(self, catalog: Catalog, state: StepState, nvme: NvmeSpace, silence_s: float) -> None:
        self._catalog = catalog
        self._state = state
        self._nvme = nvme
        self._silence_s = silence_s

    def delete(self, keys: Sequence[BlockKey], now: float) -> tuple[Erasure, list[bool]]:
        """Delete blocks of this engine store, of the current epoch and of the files'. Return also
        which of them had a copy of the current one, or were getting one."""
        rows, states = self._catalog.find_all(keys), self._catalog.columns(self._nvme.tier).states
        are_there = [row != NONE and states[row] not in {ABSENT, DROPPED} for row in rows]
        going = [row for row, is_there in zip(rows, are_there, strict=True) if is_there]
        self._nvme.discard(*dict.fromkeys(going))
        epochs = sorted({FILE_EPOCH, self._state.epoch})
        ticket = self._nvme.delete_records([(epoch, key) for key in dict.fromkeys(keys) for epoch in epochs])
        return Erasure(ticket, now), are_there

    def clear(self, now: float) -> Erasure:
        """Delete every block of this engine store, of all epochs, and its segments. Steps do the
        rest of many."""
        self._nvme.let_all_go()
        return Erasure(None, now)

    def is_over(self, erasure: Erasure, now: float) -> bool:
        """Whether an erasure is durable. Raises OSError where nothing is committed any more, and
        TimeoutError where nothing has come of it for ``silence_s``."""
        nvme = self._nvme
        if erasure.ticket is None and not nvme.ending_segments:
            # What jobs still use: its record goes now, and once more with its copy.
            rows = set(self._catalog.rows_in(nvme.tier)).difference(self._catalog.kept_in(nvme.tier))
            used = [(self._catalog.epochs[row], self._catalog.keys[row]) for row in sorted(rows)]
            erasure.ticket, erasure.heard_s = nvme.delete_records(used), now
        left = nvme.ending_segments if erasure.ticket is None else erasure.ticket - nvme.status.tickets[1]
        if erasure.ticket is not None and left <= 0:
            return True
        if nvme.index_state is IndexState.GONE:
            raise OSError
        if left != erasure.left:
            erasure.left, erasure.heard_s = left, now
        elif now - erasure.heard_s >= self._silence_s:
            raise TimeoutError
        return False
