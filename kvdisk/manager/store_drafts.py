# SPDX-License-Identifier: Apache-2.0
"""Jobs of stores in the making: copies begun in slots, GPU blocks watched. Scheduler thread only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat

from kvdisk.blocks import CPU, BlockKey, JobId, Slot, Tier, new_tuple
from kvdisk.manager.catalog import Catalog
from kvdisk.manager.requests import RequestState
from kvdisk.manager.sources import StoreSources
from kvdisk.manager.transfers import MoveDetail, Transfers, make_details
from kvdisk.messages import JobKind, Move, make_moves

NO_PLACE: tuple[int, Iterable[int]] = (-1, repeat(-1))
"""Of free blocks: in no request."""


class StoreDraft:
    """A job in the making. ``request``: whose blocks it stores; None: nobody's, they are free."""

    def __init__(self, request: RequestState | None, epoch: int) -> None:
        self.request = request
        self.epoch = epoch
        self.moves: list[Move] = []
        self.details: list[MoveDetail] = []


class StoreDrafts:
    """Fills drafts, and queues them. ``target``: the tier that stores go to.

    ``first_generation``: larger than any that this home has seen.
    """

    def __init__(
        self,
        catalog: Catalog,
        transfers: Transfers,
        sources: StoreSources,
        target: Tier,
        first_generation: int,
    ) -> None:
        self._catalog = catalog
        self._transfers = transfers
        self._sources = sources
        self._target = target
        self._generation = first_generation

    def begin(
        self,
        draft: StoreDraft,
        keys: Sequence[BlockKey],
        parents: Sequence[BlockKey | None],
        blocks: Sequence[int],
        slots: Sequence[Slot],
        place: tuple[int, Iterable[int]],
        *,
        are_new: bool = False,
    ) -> None:
        """Begin copies in slots, and add their moves. ``place``: their group, and their positions in the request.

        ``are_new``: the catalog is known to have none of the keys. It has a copy of none of them in the target.
        """
        catalog = self._catalog
        if are_new:
            first = self._generation + 1
            rows = catalog.begin_new(keys, first, draft.epoch, parents, self._target, slots)
            self._generation += len(rows)
        else:
            rows = catalog.find_all(keys)
            for at, row in enumerate(rows):
                if row < 0:
                    self._generation += 1
                    rows[at] = catalog.add(keys[at], self._generation, draft.epoch, parents[at])
            catalog.begin_all(rows, self._target, slots)
        on_cpu, (group, positions) = self._target is CPU, place
        if len(rows) == 1:  # as when a request decodes: columns would take longer than their one block
            row, block, slot = rows[0], blocks[0], slots[0]
            cpu_slot, nvme_slot = (slot, None) if on_cpu else (None, slot)
            generation, position = catalog.generations[row], next(iter(positions))
            draft.moves.append(new_tuple(Move, (keys[0], generation, block, cpu_slot, nvme_slot, parents[0])))
            draft.details.append(new_tuple(MoveDetail, (row, group, position)))
            return
        generations = map(catalog.generations.__getitem__, rows)
        cpu, nvme = (slots, repeat(None)) if on_cpu else (repeat(None), slots)
        draft.moves += make_moves(keys, generations, blocks, cpu, nvme, parents)
        draft.details += make_details(rows, repeat(group), positions)

    def queue(self, draft: StoreDraft, *, watched: bool = True) -> JobId | None:
        """Queue the draft's job; return it, None where there are no moves.

        ``watched``: False where its blocks may be somebody else's by now, so that its copies come before all else.
        """
        if not draft.moves:
            return None
        request_id = draft.request.request_id if draft.request is not None else None
        record = self._transfers.add(
            JobKind.STORE, draft.moves, draft.details, epoch=draft.epoch, request_id=request_id
        )
        if watched:
            self._sources.add(record)
        return record.job.id
