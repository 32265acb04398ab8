# SPDX-License-Identifier: Apache-2.0
"""The one way into the first tier: offers are looked at, and a job is planned for those taken.

Both doors use it, each with its own rules for what is offered, and for what finds no room:
``stores`` for an engine's requests, ``block_jobs`` for blocks by key. Scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple

from kvdisk.blocks import Slot
from kvdisk.manager.ages import Ages
from kvdisk.manager.copies import Copies, Offers
from kvdisk.manager.jobs import JobRecord, MoveDetail
from kvdisk.manager.parts import Parts
from kvdisk.manager.tiers import Tiers
from kvdisk.messages import JobKind, StoreMoves

_NONE = Offers()


class Answer(NamedTuple):
    """What became of offers. ``record``: the job of those ``taken``, in the order of its moves;
    None: there is none. ``refused``: admission does not want them. ``unserved``: they got no slot;
    ``beyond_share`` of them because of it. ``is_writable``: False where the
    tier takes no writes now."""

    record: JobRecord | None = None
    taken: Offers = _NONE
    refused: Offers = _NONE
    unserved: Offers = _NONE
    beyond_share: int = 0
    is_writable: bool = True


class Intake:
    """Takes offers into slots of the first tier."""

    def __init__(self, parts: Parts, tiers: Tiers, copies: Copies, ages: Ages) -> None:
        self._catalog = parts.catalog
        self._transfers = parts.transfers
        self._stats = parts.stats
        self._state = parts.state
        self._has_groups = len(parts.geometry.groups) > 1
        self._target = tiers.first
        self._copies = copies
        self._ages = ages

    def missing(self, offers: Offers) -> Offers:
        """Return, with their rows, the offers that no tier has or gets, nor a neighbour as near as
        the first tier is. Copies of them that are too old end."""
        self._ages.end(offers.keys)
        return self._copies.missing(self._target, offers)

    def store(
        self,
        offers: Offers,
        now: float,
        *,
        owners: Sequence[str] = (),
        are_admitted: bool = False,
        by_key: bool = False,
    ) -> Answer:
        """Plan a job for the offers that are admitted, as far as there is room; of requests' none
        behind the first that gets no slot.

        ``offers``: as ``missing`` returns them. ``are_admitted``: see ``Copies.take``. ``owners``:
        the request of each; empty: they are no request's. ``by_key``: see ``JobRecord``.
        """
        if not offers.keys:
            return Answer()
        in_order = len(owners) > 0  # a hit needs what is before it
        owner_of = dict(zip(offers.keys, owners, strict=in_order))
        found = self._copies.take(self._target, offers, now=now, are_admitted=are_admitted, in_order=in_order)
        slots = [slot for slot in found.slots if slot is not None]
        refused = unserved = _NONE
        if len(slots) < len(found.slots):
            self._target.offer(found.tails, own=True)  # once it has them they may leave; nobody else asks for them
            self._stats.add("refused_blocks.reuse", len(found.refused))
            refused, ended = offers.at(found.refused), set(found.refused)
            unserved = offers.at([at for at, slot in enumerate(found.slots) if slot is None and at not in ended])
            offers = offers.at([at for at, slot in enumerate(found.slots) if slot is not None])
        if slots and self._has_groups:  # as the slots lie
            order = sorted(range(len(slots)), key=offers.groups.__getitem__)
            offers, slots = offers.at(order), [slots[at] for at in order]
        record = self._plan(offers, slots, by_key=by_key) if slots else None
        if record is not None and in_order:
            record.owners = list(map(owner_of.__getitem__, offers.keys))
        return Answer(record, offers, refused, unserved, found.beyond_share, found.is_writable)

    def _plan(self, offers: Offers, slots: Sequence[Slot], *, by_key: bool) -> JobRecord:
        """Begin copies of blocks, and plan the job that writes them."""
        tier, positions = self._target.tier, repeat(-1) if by_key else offers.positions
        rows = self._copies.begin_new(tier, offers, slots)
        generations = list(map(self._catalog.generations.__getitem__, rows))
        moves = StoreMoves(offers.keys, generations, offers.gpu_blocks, tier, slots, offers.parents)
        details = list(map(MoveDetail, rows, offers.groups, positions, repeat(None), repeat(tier)))
        record = self._transfers.add(JobKind.STORE, moves, details, epoch=self._state.epoch)
        record.by_key = by_key
        return record
