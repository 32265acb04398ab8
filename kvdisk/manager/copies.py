# SPDX-License-Identifier: Apache-2.0
"""The life of a copy: how it begins and ends, whoever plans its job. Scheduler thread only.

A write begins a copy, which becomes READY or is abandoned when its job has ended. A read pins its
source, which was used then, or was bad. A late move has failed, and a device may still touch its
slots: its target is DOOMED and keeps its writer's pin, and its source keeps its pin, until
``release``. Of one chain the tail ends first, so that its head ends as the most recently used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from kvdisk.blocks import KEPT_TIERS, BlockKey, Slot, Tier
from kvdisk.manager.catalog import ABSENT, NONE, READY
from kvdisk.manager.jobs import JobRecord, MoveDetail
from kvdisk.manager.parts import Parts
from kvdisk.manager.peer_hints import PeerHints
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
    ``position``: of a load. ``tenant``: see ``Catalog.tenants``; of a block without a row.
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
    tenant: int = 0
    slots: dict[Tier, Slot] = field(default_factory=dict)

    @property
    def move(self) -> Move:
        """What the workers are told."""
        return Move(self.key, self.generation, self.gpu_blocks, self.slots, self.parent)

    @property
    def detail(self) -> MoveDetail:
        """What is to be finished when it is settled."""
        return MoveDetail(self.row, self.group, self.position, self.source, self.target)


class Copies:
    """Begins and ends the copies that jobs read and write."""

    def __init__(self, parts: Parts, tiers: Tiers, hints: PeerHints) -> None:
        self._geometry = parts.geometry
        self._catalog = parts.catalog
        self._stats = parts.stats
        self._state = parts.state
        self._tiers = tiers
        self._landing = tiers.landing_tier
        self._hints = hints
        self._neighbours, self._remote = hints.neighbours, hints.remote

    # -- reads begin -----------------------------------------------------------------------------

    def pin_sources(self, reads: Sequence[Read]) -> None:
        """Find and pin the fastest copy of each block: in a tier, or another's."""
        catalog = self._catalog
        found: dict[Tier, list[Read]] = {}
        for read, row in zip(reads, catalog.find_all([read.key for read in reads]), strict=True):
            source = catalog.readable_tier(row)
            if source is not None:
                read.row = row
                found.setdefault(source, []).append(read)
            else:
                self.take_from_others(read)
        for source, alike in found.items():
            catalog.pin([read.row for read in alike], source)
            self.read_from(source, alike)

    def read_from(self, tier: Tier, reads: Sequence[Read]) -> None:
        """Have each read its row's copy in a tier, which is pinned."""
        catalog, generations = self._catalog, self._catalog.generations
        slots = catalog.columns(tier).slots([read.row for read in reads])
        for read, slot in zip(reads, slots, strict=True):
            read.source, read.generation, read.parent = tier, generations[read.row], catalog.parent(read.row)
            read.slots[tier] = slot

    def take_from_others(self, read: Read, tiers: Collection[Tier] | None = None) -> None:
        """Have a read take another engine's copy, if one is known that is read as of some tiers
        (None: any)."""
        taken = self._hints.take(read.key, tiers)
        if taken is not None:
            read.source, slot, read.generation = taken
            read.slots[read.source] = slot

    def land(self, reads: Sequence[Read], slots: Sequence[Slot]) -> None:
        """Begin a copy in memory of what each of some reads brings."""
        catalog, landing = self._catalog, self._landing
        assert landing is not None
        for read, slot in zip(reads, slots, strict=True):
            if read.row < 0:  # another's
                (read.row,) = catalog.add(
                    (read.key,), (read.generation,), self._state.epoch, (read.parent,), (read.tenant,)
                )
                catalog.stored_s[read.row] = self._hints.neighbours.stored_s(read.key)
            read.target, read.slots[landing.tier] = landing.tier, slot
        catalog.begin([read.row for read in reads], landing.tier, slots)
        self._state.landing.update([read.key for read in reads])

    # -- writes begin ----------------------------------------------------------------------------

    def missing(self, target: TierSpace, keys: Sequence[BlockKey]) -> tuple[list[int], list[int]]:
        """Return the places in ``keys`` of the blocks that no tier has or gets, nor a neighbour as
        near as ``target`` is, and the row of each, NONE where it has none."""
        rows, near = self._catalog.find_all(keys), self._neighbours.near(target.tier)
        presences = self._catalog.presences_of(rows)
        if not near and not any(presences):
            return list(range(len(keys))), rows
        places = [at for at, presence in enumerate(presences) if not presence and keys[at] not in near]
        return places, rows if len(places) == len(rows) else [rows[at] for at in places]

    def may_begin(self, target: TierSpace, rows: Sequence[int]) -> list[bool]:
        """Return of each row whether it has no copy in ``target``; NONE has none. One that is being
        dropped, or cannot be read for a while, is not present, and has its slot still."""
        states = self._catalog.columns(target.tier).states
        return [row == NONE or states[row] == ABSENT for row in rows]

    def take_slots(
        self,
        target: TierSpace,
        groups: Sequence[int],
        parents: Sequence[BlockKey | None],
        tenants: Sequence[int],
        *,
        in_order: bool,
    ) -> tuple[list[Slot | None], list[int], int]:
        """Take slots of a tier for blocks; with ``in_order`` up to the first that gets none.
        ``groups``, ``parents``, ``tenants``: of each its group, what comes before it in its chain,
        and whose it is.

        Return each one's slot, if it got one; of one group they lie beside each other. And the rows
        of what is stored right before them, where that is the only copy: it does not leave for
        these. And how many blocks got none because their tenant has its share.
        """
        catalog, class_of = self._catalog, self._geometry.size_classes
        before = catalog.find_all([parent for parent in parents if parent is not None])
        tails = [row for row in before if row != NONE and catalog.is_only_in(target.tier, row)]
        catalog.pin(tails, target.tier)
        classes = [class_of[group] for group in groups]
        places = target.fit_to_share(classes, tenants, in_order=in_order)
        wanted: dict[int, list[int]] = {}
        for at in places:
            wanted.setdefault(classes[at], []).append(at)
        free = {each: target.allocate(each, len(alike)) for each, alike in wanted.items()}
        catalog.unpin(tails, target.tier)
        end = len(groups)
        if in_order:
            end = min(
                (alike[len(free[each])] for each, alike in wanted.items() if len(free[each]) < len(alike)), default=end
            )
        slots: list[Slot | None] = [None] * len(groups)
        for size_class, found in free.items():
            served = [at for at in wanted[size_class][: len(found)] if at < end]
            if len(self._geometry.groups) > 1:
                served.sort(key=groups.__getitem__)
            for at, slot in zip(served, found, strict=False):
                slots[at] = slot
            if len(served) < len(found):
                target.give_back(size_class, found[len(served) :])
        return slots, tails, len(groups) - len(places)

    def begin_new(
        self,
        tier: Tier,
        keys: Sequence[BlockKey],
        parents: Sequence[BlockKey | None],
        rows: Sequence[int],
        slots: Sequence[Slot],
        tenants: Sequence[int],
    ) -> list[int]:
        """Begin copies of blocks that no tier has, or only where nobody may read now; return their
        rows.

        ``parents``: of each the key before it in its chain. ``rows``: see ``may_begin``.
        ``tenants``: of each.
        """
        catalog = self._catalog
        hidden = {row for row in rows if row != NONE and READY in [catalog.state(row, each) for each in KEPT_TIERS]}
        new = [at for at, row in enumerate(rows) if row == NONE]
        if len(new) == len(rows):
            rows = self._add_new(keys, parents, tenants)
        elif new:
            some_keys, some_parents = [keys[at] for at in new], [parents[at] for at in new]
            added = iter(self._add_new(some_keys, some_parents, [tenants[at] for at in new]))
            rows = [next(added) if row == NONE else row for row in rows]
        for row in rows:
            if row not in hidden:  # or an old copy would be younger when it can be read again
                catalog.stored_s[row] = self._state.now_s
        catalog.begin(rows, tier, slots)
        return list(rows)

    def _add_new(
        self, keys: Sequence[BlockKey], parents: Sequence[BlockKey | None], tenants: Sequence[int]
    ) -> list[int]:
        """Make rows of new generations."""
        first = self._state.generation + 1
        self._state.generation += len(keys)
        return self._catalog.add(keys, range(first, first + len(keys)), self._state.epoch, parents, tenants)

    def begin_moves(
        self, rows: Sequence[int], source: Tier, target: Tier, slots: Sequence[Slot]
    ) -> tuple[list[Move], list[MoveDetail]]:
        """Begin copies in ``slots`` of what another tier has; return what their job is made of. The
        sources are pinned."""
        catalog = self._catalog
        catalog.begin(rows, target, slots)
        catalog.pin(rows, source)
        moves = [
            Move(
                catalog.keys[row],
                catalog.generations[row],
                slots={source: above, target: below},
                parent=catalog.parent(row),
            )
            for row, above, below in zip(rows, catalog.columns(source).slots(rows), slots, strict=True)
        ]
        return moves, [MoveDetail(row, source=source, target=target) for row in rows]

    # -- jobs end --------------------------------------------------------------------------------

    def end_targets(self, record: JobRecord, now_s: int) -> dict[Tier, list[int]]:
        """End the copies that a job wrote, or failed to. Return the READY ones by tier, the tail
        first.

        The slot of a late move stays taken until ``release``.
        """
        written: dict[Tier, list[int]] = {}
        for at in reversed(range(len(record.details))):
            detail = record.details[at]
            if detail.target is not None:
                rows = written.setdefault(detail.target, [])
                if at not in record.failed:
                    rows.append(detail.row)
        ready = {tier: self._tiers[tier].finish(rows, now_s) for tier, rows in written.items()}
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
        sound: defaultdict[Tier, list[int]] = defaultdict(list)
        used: defaultdict[Tier, list[int]] = defaultdict(list)
        reached: list[int] = []
        spent: defaultdict[Tier, list[int]] = defaultdict(list)
        states = {space.tier: self._catalog.columns(space.tier).states for space in self._tiers}
        for at in reversed(range(len(record.details))):
            (row, group, _, tier, _), move = record.details[at], record.job.moves[at]
            reason, late = record.failed.get(at), at in record.late
            if tier is self._remote.tier:
                self._remote.loaded(move, reason)
                continue
            foreign = self._neighbours.slot_of(move) if tier is self._neighbours.tier else None
            if foreign is not None:
                self._end_foreign(move, foreign, reason, late=late)
                self._stats.add("loaded_blocks_foreign", int(reason is None and record.job.kind is JobKind.LOAD))
                continue
            assert tier is not None or reason is not None, "nothing was read, and the move has not failed"
            if tier is None:
                continue
            if not late:
                spent[tier].append(row)
            if reason is not None and self._is_bad(row, tier, reason):
                self._tiers[tier].discard(row)
            elif states[tier][row] == READY:
                sound[tier].append(row)
                if reason is not None:
                    continue
                is_state = group >= 0 and self._geometry.groups[group].state_tokens is not None
                if record.job.kind is JobKind.LOAD and not is_state and not record.by_key:
                    reached.append(row)
                else:
                    used[tier].append(row)
        for space in self._tiers:
            self.offer_lower(sound[space.tier], space.tier)  # their counts rose when the load was planned
            space.unpin(spent[space.tier])
            space.reached(list(dict.fromkeys(reached)))  # so that the request need not do it again
            space.touch(list(dict.fromkeys(used[space.tier])))

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
        lower = self._tiers[tier].lower
        if lower is not None:
            lower.offer(rows)
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
