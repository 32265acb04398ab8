# SPDX-License-Identifier: Apache-2.0
"""The life of a copy: how it begins and ends, whoever plans its job. Scheduler thread only.

A write begins a copy, which becomes READY or is abandoned when its job has ended. A read pins its
source, which was used then, or was bad. A late move has failed, and a device may still touch its
slots: its target is DROPPED and keeps its writer's pin, and its source keeps its pin, until
``release``. Of one chain the tail ends first, so that its head ends as the most recently used.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvdisk.blocks import BlockKey, Slot, Tier, group_of, records_of
from kvdisk.manager.catalog import ABSENT, NONE, READY
from kvdisk.manager.jobs import JobRecord, MoveDetail
from kvdisk.manager.parts import Parts
from kvdisk.manager.peer_hints import PeerHints
from kvdisk.manager.requests import RequestState
from kvdisk.manager.tiers import Tiers, TierSpace
from kvdisk.messages import JobKind, Move, Reason

SOURCE_IS_BAD = frozenset({Reason.HEADER, Reason.CHECKSUM, Reason.IO_ERROR})
"""Failures of a read after which its source copy is dropped. A deadline says nothing about the
copy."""
_IS_BAD_FOR_SURE = frozenset({Reason.HEADER, Reason.CHECKSUM})
"""Failures of a move that reads and writes which can only be its source's."""


@dataclass(slots=True)
class Read:
    """A block to be read. ``source``: the tier whose copy is read; None: there is none.

    ``target``: where the read leaves a copy, in ``row``; None: nowhere. ``gpu_blocks``, ``group``,
    ``position``: of a load. ``request``: who reads it, whose tenant a new row has; None: it is read
    by key.
    """

    key: BlockKey
    parent: BlockKey | None
    gpu_blocks: tuple[int, ...] = ()
    group: int = -1
    position: int = -1
    row: int = NONE
    generation: int = 0
    source: Tier | None = None
    target: Tier | None = None
    request: RequestState | None = None
    slots: dict[Tier, Slot] = field(default_factory=dict)


def moves_of(reads: Sequence[Read]) -> tuple[list[Move], list[MoveDetail]]:
    """Return what a job of these reads is made of: what the workers are told, and what is to be
    finished when it is settled."""
    moves = [(read.key, read.generation, read.gpu_blocks, read.slots, read.parent) for read in reads]
    details = [(read.row, read.group, read.position, read.source, read.target) for read in reads]
    return records_of(Move, moves), records_of(MoveDetail, details)


class Offers(NamedTuple):
    """Blocks that are to have copies in a tier, as columns. Of each: its key, what comes before it
    in its chain, its row (NONE: it has none), its group, and its tenant.

    Columns of a store, empty where nobody needs them: ``positions`` in its request or job (-1: it
    is no request's, or not to be offered again), ``gpu_blocks`` (of a job by key, the row of the
    caller's memory), and ``gpu_keys``: of what nobody holds on the GPU, the keys of these. They are
    somebody else's when the engine knows them by others.
    """

    keys: Sequence[BlockKey] = ()
    parents: Sequence[BlockKey | None] = ()
    rows: Sequence[int] = ()
    groups: Sequence[int] = ()
    tenants: Sequence[int] = ()
    positions: Sequence[int] = ()
    gpu_blocks: Sequence[tuple[int, ...]] = ()
    gpu_keys: Sequence[Sequence[BlockKey]] = ()

    def at(self, places: Sequence[int]) -> Offers:
        """Return the blocks at some places, in the order of these."""
        return Offers._make([column[at] for at in places] if column else column for column in self)

    @classmethod
    def joined(cls, some: Sequence[Offers]) -> Offers:
        """Return several with the same columns as one, without their rows: these may have
        changed."""
        filled = [each for each in some if each.keys]
        if len(filled) < 2:
            return filled[0]._replace(rows=()) if filled else cls()
        return cls._make([*chain.from_iterable(columns)] for columns in zip(*filled, strict=True))._replace(rows=())


class Taken(NamedTuple):
    """What ``Copies.take`` found. ``slots``: of each block, if it got one. ``refused``: the places
    of those that were not admitted. ``beyond_share``: how many got none because their tenant has
    its share. ``tails``: rows of what is stored right before them and only there. ``is_writable``:
    False where the tier takes no writes now."""

    slots: list[Slot | None]
    refused: Sequence[int] = ()
    beyond_share: int = 0
    tails: Sequence[int] = ()
    is_writable: bool = True


class _Ended(NamedTuple):
    """Rows of a tier whose copies a job has read. ``spent``: their pins are to be given back.
    ``sound``: the copies can be read again. ``used``: as well, and are not only reached. ``bad``:
    they are to be dropped."""

    states: bytearray
    spent: list[int]
    sound: list[int]
    used: list[int]
    bad: dict[int, None]


class Copies:
    """Begins and ends the copies that jobs read and write."""

    def __init__(self, parts: Parts, tiers: Tiers, hints: PeerHints) -> None:
        self._geometry = parts.geometry
        self._catalog = parts.catalog
        self._stats = parts.stats
        self._state = parts.state
        self._tiers = tiers
        self._arrival = tiers.arrival_tier
        self._hints = hints
        self._neighbours, self._remote = hints.neighbours, hints.remote

    # -- reads begin -----------------------------------------------------------------------------

    def pin_sources(self, reads: Sequence[Read], tiers: Collection[Tier] | None = None) -> None:
        """Find and pin the fastest copy of each block, of some tiers (None: of any): in a tier, or
        another's."""
        catalog = self._catalog
        found: dict[Tier, list[Read]] = {}
        rows = catalog.find_all([read.key for read in reads])
        for read, row, source in zip(reads, rows, catalog.readable_in_turn(rows, tiers), strict=True):
            if source is not None:
                read.row = row
                found.setdefault(source, []).append(read)
            else:
                self.take_from_others(read, tiers)
        for source, alike in found.items():
            catalog.pin([read.row for read in alike], source)
            self.read_from(source, alike)

    def hold(self, rows: NDArray[np.intp], tiers: NDArray[np.uint8]) -> None:
        """Pin the copy of each row in its tier, for a job that is planned later. Tier 0: none."""
        for tier in self._catalog.tiers:
            self._catalog.pin_many(rows[tiers == tier], tier)

    def let_go(self, rows: NDArray[np.intp], tiers: NDArray[np.uint8]) -> None:
        """Unpin what was held, but for NONE."""
        for space in self._tiers:
            space.unpin(rows[(tiers == space.tier) & (rows != NONE)].tolist())

    def let_go_unreadable(self, rows: NDArray[np.intp], tiers: NDArray[np.uint8]) -> NDArray[np.intp]:
        """Unpin what is held, and must not be read any more: another read has found it bad, it has
        become too old, or its drive was quarantined. Return the places of that."""
        gone = np.zeros(len(rows), np.bool_)
        for space in self._tiers:
            held = np.flatnonzero((tiers == space.tier) & (rows != NONE))
            if len(held):
                gone[held] = self._catalog.columns(space.tier).presences(rows[held]) != READY
        self.let_go(rows[gone], tiers[gone])
        return np.flatnonzero(gone)

    def read_from(self, tier: Tier, reads: Sequence[Read]) -> None:
        """Have each read its row's copy in a tier, which is pinned."""
        catalog, generations = self._catalog, self._catalog.generations
        rows = [read.row for read in reads]
        for read, slot, parent in zip(reads, catalog.columns(tier).slots(rows), catalog.parents(rows), strict=True):
            read.source, read.generation, read.parent = tier, generations[read.row], parent
            read.slots[tier] = slot

    def take_from_others(self, read: Read, tiers: Collection[Tier] | None = None) -> None:
        """Have a read take another engine's copy, if one is known that is read as of some tiers
        (None: any)."""
        taken = self._hints.take(read.key, tiers)
        if taken is not None:
            read.source, slot, read.generation = taken
            read.slots[read.source] = slot

    def take_arriving(self, reads: Sequence[Read], *, most: Sequence[int], keep_dirty: bool = False) -> Taken:
        """Take slots in memory for what some reads bring, as ``take`` does."""
        assert self._arrival is not None
        find = self._catalog.find
        columns = [
            (
                read.key,
                read.parent,
                read.row if read.row != NONE else find(read.key),
                read.group if read.group >= 0 else group_of(read.key),
                0 if read.request is None else read.request.limits.tenant,
            )
            for read in reads
        ]
        offers = Offers(*zip(*columns, strict=True)) if columns else Offers()
        return self.take(self._arrival, offers, keep_dirty=keep_dirty, most=most)

    def begin_arrivals(self, reads: Sequence[Read], slots: Sequence[Slot]) -> None:
        """Begin a copy in memory of what each of some reads brings."""
        catalog, arrival = self._catalog, self._arrival
        assert arrival is not None
        others = [read for read in reads if read.row < 0]
        if others:
            rows = catalog.add(
                [read.key for read in others],
                [read.generation for read in others],
                self._state.epoch,
                [read.parent for read in others],
                [0 if read.request is None else read.request.limits.tenant for read in others],
            )
            for read, row in zip(others, rows, strict=True):
                read.row, catalog.stored_s[row] = row, self._hints.neighbours.stored_s(read.key)
        for read, slot in zip(reads, slots, strict=True):
            read.target, read.slots[arrival.tier] = arrival.tier, slot
        catalog.begin([read.row for read in reads], arrival.tier, slots)
        self._state.arriving.update([read.key for read in reads])

    # -- writes begin ----------------------------------------------------------------------------

    def missing(self, target: TierSpace, offers: Offers) -> Offers:
        """Return, with their rows, the blocks that no tier has or gets, nor a neighbour as near as
        ``target`` is."""
        rows, near = self._catalog.find_all(offers.keys), self._neighbours.near(target.tier)
        presences = self._catalog.presences_of(rows)
        offers = Offers(offers.keys, offers.parents, rows, *offers[3:])
        if not near and not any(presences):
            return offers
        keys = offers.keys
        return offers.at([at for at, presence in enumerate(presences) if not presence and keys[at] not in near])

    def take(
        self,
        target: TierSpace,
        offers: Offers,
        *,
        now: float | None = None,
        are_admitted: bool = False,
        in_order: bool = False,
        keep_dirty: bool = False,
        most: Sequence[int] | None = None,
    ) -> Taken:
        """Take slots of a tier for blocks that it admits, as far as there is room. What has a copy
        there gets none: one that is being dropped, or cannot be read for a while, is not present,
        and has its slot still. What is stored right before them does not leave for these, where
        that is the only copy.

        ``now``: of a tier that cannot always be written. ``are_admitted``: they were before.
        ``in_order``, ``keep_dirty``, ``most``: see ``Room.take``.
        """
        catalog, states = self._catalog, self._catalog.columns(target.tier).states
        places: Sequence[int] = range(len(offers.keys))
        refused: list[int] = []
        if not are_admitted and not target.admission.admits_all:
            answers = target.admits(offers.keys, offers.parents)
            refused = [at for at, is_let_in in enumerate(answers) if not is_let_in]
            places = list(compress(places, answers))
        places = [at for at in places if (row := offers.rows[at]) == NONE or states[row] == ABSENT]
        slots: list[Slot | None] = [None] * len(offers.keys)
        if now is not None and not target.update_writable(now):
            return Taken(slots, refused, is_writable=False)
        if not places:
            return Taken(slots, refused)
        some = offers if len(places) == len(slots) else offers.at(places)
        before = catalog.find_all([parent for parent in some.parents if parent is not None])
        tails = [row for row in before if row != NONE and catalog.is_only_in(target.tier, row)] if before else ()
        classes = list(map(self._geometry.size_classes.__getitem__, some.groups))
        if tails:
            catalog.pin(tails, target.tier)
        found, beyond_share = target.take(
            classes, some.tenants, some.groups, in_order=in_order, keep_dirty=keep_dirty, most=most
        )
        if tails:
            catalog.unpin(tails, target.tier)
        if some is offers:
            slots = found
        else:
            for at, slot in zip(places, found, strict=True):
                slots[at] = slot
        return Taken(slots, refused, beyond_share, tails)

    def begin_new(self, tier: Tier, offers: Offers, slots: Sequence[Slot]) -> Sequence[int]:
        """Begin copies of blocks that no tier has, or only where nobody may read now; return their
        rows."""
        catalog, rows, hidden = self._catalog, offers.rows, set[int]()
        new = [at for at, row in enumerate(rows) if row == NONE]
        if len(new) == len(rows):
            rows = self._add_new(offers)
        else:
            tiers = catalog.tiers
            hidden = {row for row in rows if row != NONE and READY in [catalog.state(row, each) for each in tiers]}
            added = iter(self._add_new(offers.at(new)) if new else ())
            rows = [next(added) if row == NONE else row for row in rows]
        stored_s, now_s = catalog.stored_s, self._state.now_s
        for row in rows:
            if row not in hidden:  # or an old copy would be younger when it can be read again
                stored_s[row] = now_s
        catalog.begin(rows, tier, slots)
        return rows

    def _add_new(self, offers: Offers) -> list[int]:
        """Make rows of new generations."""
        first, count = self._state.generation + 1, len(offers.keys)
        self._state.generation += count
        generations = range(first, first + count)
        return self._catalog.add(offers.keys, generations, self._state.epoch, offers.parents, offers.tenants)

    def begin_demotions(
        self, wanted: Mapping[int, Sequence[int]], source: TierSpace, target: TierSpace
    ) -> tuple[dict[int, list[int]], list[Move], list[MoveDetail]]:
        """Begin copies of rows, given by size class, in the next tier, as far as it has room now.
        Return those that found some, likewise, and what their job is made of."""
        classes = [size_class for size_class, alike in wanted.items() for _ in alike]
        found, _ = target.take(classes, [0] * len(classes), classes)
        begun: dict[int, list[int]] = {size_class: [] for size_class in wanted}
        slots: list[Slot] = []
        for size_class, row, slot in zip(classes, chain.from_iterable(wanted.values()), found, strict=True):
            if slot is not None:
                begun[size_class].append(row)
                slots.append(slot)
        moves, details = self.begin_moves(list(chain.from_iterable(begun.values())), source.tier, target.tier, slots)
        return begun, moves, details

    def begin_moves(
        self, rows: Sequence[int], source: Tier, target: Tier, slots: Sequence[Slot]
    ) -> tuple[list[Move], list[MoveDetail]]:
        """Begin copies in ``slots`` of what another tier has; return what their job is made of. The
        sources are pinned. Of what goes to the remote store no copy begins: it names blocks by
        key."""
        catalog, is_kept = self._catalog, target in self._catalog.tiers
        if is_kept:
            catalog.begin(rows, target, slots)
        catalog.pin(rows, source)
        moves = [
            Move(
                catalog.keys[row],
                catalog.generations[row],
                slots={source: above, target: below},
                parent=catalog.parent(row) if is_kept else None,
            )
            for row, above, below in zip(rows, catalog.columns(source).slots(rows), slots, strict=True)
        ]
        return moves, [MoveDetail(row, source=source, target=target if is_kept else None) for row in rows]

    # -- jobs end --------------------------------------------------------------------------------

    def end_targets(self, record: JobRecord) -> dict[Tier, list[int]]:
        """End the copies that a job wrote, or failed to. Return the READY ones by tier, the tail
        first.

        The slot of a late move stays taken until ``release``.
        """
        details, failed, ready = record.details, record.failed, dict[Tier, list[int]]()
        for target in dict.fromkeys([detail.target for detail in details]):
            if target is not None:
                rows = [row for at, (row, *_, tier) in enumerate(details) if tier is target and at not in failed]
                ready[target] = self._tiers[target].finish(rows[::-1])
        for at in sorted(record.failed, reverse=True):
            detail = record.details[at]
            if detail.target is not None:
                self._tiers[detail.target].abandon(detail.row, late=at in record.late)
        return ready

    def unpin_sources(self, record: JobRecord) -> None:
        """Give back the sources of a job that wrote, but for those of late moves; drop the bad
        ones."""
        for at, detail in enumerate(record.details):
            if detail.source is None:
                continue
            space = self._tiers[detail.source]
            if record.failed.get(at) in _IS_BAD_FOR_SURE and self._catalog.state(detail.row, space.tier) == READY:
                space.discard(detail.row)
            if at not in record.late:
                space.unpin((detail.row,))

    def end_reads(self, record: JobRecord) -> None:
        """Give back the pins of sources, drop the bad ones, and note that the others were used."""
        ended: dict[Tier, _Ended] = {}
        reached: list[int] = []
        of_others = {self._remote.tier, self._neighbours.tier} if self._neighbours.are_read else {self._remote.tier}
        is_load, groups = record.job.kind is JobKind.LOAD and not record.by_key, self._geometry.groups
        last, of_tier = None, None  # most blocks are from where the one before is from
        for at in reversed(range(len(record.details))):
            row, group, _, tier, _ = record.details[at]
            reason, late = record.failed.get(at) if record.failed else None, at in record.late
            if tier in of_others and self._end_from_others(record, at, tier):
                continue
            assert tier is not None or reason is not None, "nothing was read, and the move has not failed"
            if tier is None:
                continue
            if of_tier is None or tier is not last:
                last, of_tier = tier, ended.get(tier)
            if of_tier is None:
                of_tier = ended[tier] = _Ended(self._catalog.columns(tier).states, [], [], [], {})
            if not late:
                of_tier.spent.append(row)
            if reason is not None and self._is_bad(row, tier, reason):
                of_tier.bad[row] = None
            elif of_tier.states[row] == READY:
                of_tier.sound.append(row)
                if reason is None:
                    is_reached = is_load and not (group >= 0 and groups[group].state_tokens is not None)
                    (reached if is_reached else of_tier.used).append(row)
        for tier, of_tier in ended.items():
            if of_tier.bad:
                self._drop_bad(tier, of_tier)
        for space in self._tiers:
            self._end_reads_from(space, ended.get(space.tier), reached)

    def _end_from_others(self, record: JobRecord, at: int, tier: Tier | None) -> bool:
        """End a read from the remote store, or of a neighbour's copy; return False where it was
        neither."""
        move, reason = record.job.moves[at], record.failed.get(at)
        if tier is self._remote.tier:
            self._remote.loaded(move, reason)
            return True
        foreign = self._neighbours.slot_of(move)
        if foreign is None:
            return False
        self._end_foreign(move, foreign, reason, late=at in record.late)
        self._stats.add("loaded_blocks_foreign", int(reason is None and record.job.kind is JobKind.LOAD))
        return True

    def _drop_bad(self, tier: Tier, ended: _Ended) -> None:
        """Drop the bad copies of a tier: they are neither sound nor used, where a job by key has
        read one twice, and found it bad once."""
        self._tiers[tier].discard(*ended.bad)
        for rows in (ended.sound, ended.used):
            rows[:] = [row for row in rows if row not in ended.bad]

    def _end_reads_from(self, space: TierSpace, ended: _Ended | None, reached: Sequence[int]) -> None:
        """Note what became of a tier's copies that were read, if any were, and which blocks were
        ``reached`` in whatever tier."""
        if ended is not None and ended.sound:
            self.offer_lower(ended.sound, space.tier)  # their counts rose when the load was planned
        if ended is not None and ended.spent:
            space.unpin(ended.spent)
        if reached:
            space.reached(reached)  # so that the request need not do it again
        if ended is not None and ended.used:
            space.touch(list(dict.fromkeys(ended.used)))

    def _is_bad(self, row: int, tier: Tier, reason: Reason) -> bool:
        """Whether to drop a copy that was read. One on a drive that was given up for now is as good
        as before."""
        if reason not in SOURCE_IS_BAD or self._catalog.state(row, tier) != READY:
            return False
        return reason is not Reason.IO_ERROR or self._catalog.readable(row, tier)

    def _end_foreign(self, move: Move, slot: Slot, reason: Reason | None, *, late: bool) -> None:
        """End the read of a neighbour's copy."""
        if reason in SOURCE_IS_BAD:
            self._neighbours.reject(move.key, slot, move.generation)
        if not late:
            self._neighbours.unpin(slot)

    def offer_lower(self, rows: Sequence[int], tier: Tier) -> None:
        """Offer copies that have become READY, or were used, to the next tier, and to the remote
        store."""
        self._tiers[tier].offer(rows)
        if tier is self._remote.source:
            self._remote.offer(rows)

    def release(self, record: JobRecord) -> None:
        """Give back the pins of a settled job's late moves: nothing touches their slots any
        more."""
        self._state.released += 1
        for at in sorted(record.late, reverse=True):
            detail, move = record.details[at], record.job.moves[at]
            foreign = self._neighbours.slot_of(move)
            if foreign is not None:
                self._neighbours.unpin(foreign)
            elif detail.source is not None and detail.source is not self._remote.tier:
                self._tiers[detail.source].unpin((detail.row,))
            if detail.target is not None:
                self._tiers[detail.target].abandon(detail.row)
