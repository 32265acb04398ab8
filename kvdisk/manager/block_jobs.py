# SPDX-License-Identifier: Apache-2.0
"""Jobs that somebody asks for by key, without a request of an engine: what ``BlockStore`` does.

Where a plan's moves name GPU blocks, these name rows of the caller's memory. Scheduler thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import NamedTuple

from kvdisk.blocks import BlockKey, Slot, Tier, groups_of
from kvdisk.manager import bounds
from kvdisk.manager.ages import Ages
from kvdisk.manager.catalog import NONE, READY
from kvdisk.manager.copies import Copies, Read, Taken, Wanted
from kvdisk.manager.fetches import Fetches
from kvdisk.manager.garbage import uncollected
from kvdisk.manager.jobs import JobRecord, MoveDetail
from kvdisk.manager.parts import Parts
from kvdisk.manager.peer_hints import PeerHints
from kvdisk.manager.reuse import STATES, Visit
from kvdisk.manager.step_work import Kind, Work
from kvdisk.manager.tiers import Tiers
from kvdisk.messages import JobKind, RowMoves


class Offers(NamedTuple):
    """Blocks in rows of the caller's, to be stored, as columns. ``parents``: of each the key before
    it in its chain; ``groups``: of the keys."""

    keys: Sequence[BlockKey]
    parents: Sequence[BlockKey | None]
    rows: Sequence[int]
    groups: Sequence[int]

    def at(self, positions: Sequence[int]) -> Offers:
        """Return those at some positions, in their order, each of which comes once."""
        if len(positions) == len(self.keys):
            return self
        keys, parents = [self.keys[at] for at in positions], [self.parents[at] for at in positions]
        return Offers(keys, parents, [self.rows[at] for at in positions], [self.groups[at] for at in positions])


@dataclass(slots=True)
class PutResult:
    """What became of offers, by their positions. ``record``: the job of those that were ``taken``,
    in the order of its moves; None: there is none. ``waiting``: for room; ``hopeless``: none is
    coming."""

    record: JobRecord | None = None
    taken: Sequence[int] = ()
    present: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    hopeless: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Prompt:
    """A chain of blocks that others are asked for, as ``questions.Asking``. ``keys``: by group."""

    keys: tuple[list[BlockKey], ...]
    question: int = 0
    remote_question: int = 0
    asked_s: float | None = None
    load_tiers: frozenset[Tier] | None = None


class BlockJobs:
    """Stores and loads blocks by key, in the first tier. ``wanted``: slots by size class that
    offers wait for; at least one of each, so that there is some room for what comes first."""

    def __init__(self, parts: Parts, tiers: Tiers, copies: Copies, hints: PeerHints, ages: Ages) -> None:
        self._geometry = parts.geometry
        self._catalog = parts.catalog
        self._transfers = parts.transfers
        self._history = parts.history
        self._stats = parts.stats
        self._state = parts.state
        self._work = parts.work
        self._target = tiers.first
        self._tiers = tiers
        self._copies = copies
        self._hints = hints
        self._ages = ages
        self.fetches = Fetches(parts, tiers, copies, hints)
        self._admissions = [space.admission for space in tiers]
        if hints.remote.admission is not None:
            self._admissions.append(hints.remote.admission)
        self._class_of = parts.geometry.size_classes
        self._new: dict[BlockKey, None] = {}
        """See ``bounds.UNREACHED``; the first that came goes first."""
        self._chains: dict[BlockKey, tuple[Visit, int]] = {}
        """See ``bounds.CHAINS``; by the last block, the visit that counted it and the origin of
        what comes behind."""
        self._waiting = Counter[int]()

    # -- what there is -------------------------------------------------------------------------

    def presences(self, keys: Sequence[BlockKey]) -> bytes:
        """As ``Catalog.presences``; READY is also what others are thought to have, though it may be
        on its way to a tier: that may take long."""
        found = self._catalog.presences(keys)
        usable = self._hints.usable if found.count(READY) < len(found) else ()
        if not usable:
            return found
        return bytes(READY if key in usable else presence for key, presence in zip(keys, found, strict=True))

    def ask(self, keys: Sequence[BlockKey]) -> Prompt:
        """Ask others for what is missing of a prompt."""
        prompt = Prompt(self._by_group(keys))
        self._hints.ask(prompt)
        return prompt

    def is_asking(self, prompt: Prompt) -> bool:
        """Whether an answer is still to come."""
        return self._hints.is_asking(prompt)

    # -- demand --------------------------------------------------------------------------------

    def reached(self, request: str, keys: Sequence[BlockKey]) -> None:
        """A request wants these blocks of its prompt, in this order. Those that were counted as new
        when they were put are not counted again; of recurrent states the last known one is
        wanted."""
        keys = list(dict.fromkeys(keys))
        self._work.add(Kind.RECENCY, self, self._use(list(keys)))
        for group, alike in enumerate(self._by_group(keys)):
            self.fetches.reached(alike)
            uncounted = [key for key in alike if key not in self._new]
            for key in alike if len(uncounted) < len(alike) else ():
                self._new.pop(key, None)
                self._chains.pop(key, None)
            if group in self._history.state_groups:
                last = self._history.last_known(uncounted)
                if last is not None:
                    self._history.count((last,), 0, 1, STATES)
                    self._offer((last,))
            elif uncounted:
                visit = self._history.begin(0, len(uncounted))
                self._work.add(Kind.DEMAND, self, self._count(uncounted, visit))
            self._want(request, uncounted)
        self._work.run(self._work.now, Kind.RECENCY, Kind.DEMAND)

    @property
    def has_counted_all(self) -> bool:
        """Whether all that requests reached is counted."""
        return not self._work.has(Kind.DEMAND)

    def _use(self, keys: list[BlockKey]) -> Work:
        """Refresh the recency of a prompt's blocks; of these the head last, so that it leaves
        last."""
        while keys:
            left = self._work.left(Kind.RECENCY)
            some = keys[-left:]
            del keys[-left:]
            rows = [row for row in self._catalog.find_all(some) if row != NONE]
            for space in self._tiers:
                space.reached(rows[::-1])
            yield len(some)

    def _count(self, keys: Sequence[BlockKey], visit: Visit) -> Work:
        """Count blocks of one kind that a request reached."""
        start = origin = 0
        while start < len(keys):
            stop = min(len(keys), start + self._work.left(Kind.DEMAND))
            origin = self._history.count(keys, start, stop, origin, visit)
            self._offer(keys[start:stop])
            looked, start = stop - start, stop
            yield looked

    def _want(self, request: str, keys: Sequence[BlockKey]) -> None:
        for admission in self._admissions:
            admission.want(keys, request)

    def _offer(self, keys: Sequence[BlockKey]) -> None:
        """Offer blocks, whose count has risen, to the remote store."""
        remote = self._hints.remote
        if remote.admission is not None:
            remote.offer([row for row in self._catalog.find_all(keys) if row != NONE])

    def _count_new(self, offers: Offers) -> None:
        """Count those blocks as new that no request was said to have reached: who puts one wants
        it. Admission would take it for one that nobody has wanted for long."""
        self._work.finish(Kind.DEMAND)
        known, pairs = self._history.known, zip(offers.keys, offers.parents, strict=True)
        parents = {key: parent for key, parent in pairs if not known(key)[0]}
        for group, keys in enumerate(self._by_group(list(parents))):
            if group in self._history.state_groups:
                for key in keys:
                    self._history.count((key,), 0, 1, STATES)
            elif keys:
                self._count_chain(keys, parents[keys[0]])
        self._new.update(dict.fromkeys(parents))
        for most, counted in ((bounds.UNREACHED, self._new), (bounds.CHAINS, self._chains)):
            while len(counted) > most:
                del counted[next(iter(counted))]

    def _count_chain(self, keys: Sequence[BlockKey], parent: BlockKey | None) -> None:
        """Count blocks of one kind that follow each other. A prompt that is put in parts is one
        visit; the next turn of a conversation is another."""
        begun = self._chains.pop(parent, None) if parent is not None else None
        if begun is not None:
            visit, origin = self._history.go_on(begun[0], len(keys)), begun[1]
        else:
            visit = self._history.begin(0, len(keys))
            origin = self._history.origin_behind(parent) if parent is not None else 0
        self._chains[keys[-1]] = visit, self._history.count(keys, 0, len(keys), origin, visit)

    def _by_group(self, keys: Sequence[BlockKey]) -> tuple[list[BlockKey], ...]:
        if len(self._geometry.groups) == 1:
            return (list(keys),)
        found: tuple[list[BlockKey], ...] = tuple([] for _ in self._geometry.groups)
        for key, group in zip(keys, groups_of(keys), strict=True):
            found[group].append(key)
        return found

    # -- stores --------------------------------------------------------------------------------

    @property
    def wanted(self) -> list[int]:
        """See the class."""
        return [max(1, self._waiting[size_class]) for size_class in range(len(self._geometry.slot_sizes))]

    @uncollected
    def store(self, offers: Offers, now: float, *, is_new: bool) -> PutResult:
        """Plan a job for the offers that are missing and admitted, as far as there is room now.

        ``is_new``: False: they waited for room, and were admitted. A key comes once.
        """
        answer = PutResult()
        places, rows = self._missing(offers, answer)
        some, are_admitted = offers.at(places), not is_new or self._target.admission.admits_all
        if not are_admitted:
            self._count_new(some)
        wanted = Wanted(some.keys, some.parents, rows, some.groups, [0] * len(places))
        found = self._copies.take(self._target, wanted, now=now, are_admitted=are_admitted)
        self._stats.add("refused_blocks.reuse", len(found.refused))
        answer.refused += [places[at] for at in found.refused]
        served = [(at, row, slot) for at, row, slot in zip(places, rows, found.slots, strict=True) if slot is not None]
        if len(served) + len(found.refused) < len(places):
            without = {*answer.refused, *(at for at, _, _ in served)}
            self._leave_waiting(offers, [at for at in places if at not in without], answer, found)
        taken, rows, slots = map(list, zip(*served, strict=True)) if served else ([], [], [])
        if taken:
            answer.taken, answer.record = taken, self._plan_store(offers.at(taken), rows, slots)
        return answer

    def _missing(self, offers: Offers, answer: PutResult) -> tuple[list[int], list[int]]:
        """Return the positions of what no tier has or gets, nor a neighbour, and the row of each in
        the catalog."""
        self._ages.end(offers.keys)
        places, rows = self._copies.missing(self._target, offers.keys)
        if len(places) < len(offers.keys):
            answer.present += sorted({*range(len(offers.keys))}.difference(places))
        return places, rows

    def _leave_waiting(self, offers: Offers, places: Sequence[int], answer: PutResult, found: Taken) -> None:
        target, may_come = self._target, found.is_writable and not self._target.status.is_spent
        for at in places:
            comes = may_come and target.may_get_room(self._class_of[offers.groups[at]], silent=False)
            (answer.waiting if comes else answer.hopeless).append(at)

    def _plan_store(self, offers: Offers, rows: Sequence[int], slots: Sequence[Slot]) -> JobRecord:
        tier = self._target.tier
        rows = self._copies.begin_new(tier, offers.keys, offers.parents, rows, slots, [0] * len(rows))
        generations = list(map(self._catalog.generations.__getitem__, rows))
        moves = RowMoves(offers.keys, generations, offers.rows, tier, slots, offers.parents)
        details = list(map(MoveDetail, rows, offers.groups, repeat(-1), repeat(None), repeat(tier)))
        record = self._transfers.add(JobKind.STORE, moves, details, epoch=self._state.epoch)
        record.by_key = True
        return record

    def await_room(self, groups: Iterable[int]) -> None:
        """Take note of the groups of the offers that wait for room, at the end of a step's
        offers."""
        self._waiting = Counter(map(self._class_of.__getitem__, groups))

    def give_up(self, count: int) -> None:
        """Count blocks for which no room came."""
        self._stats.add(f"refused_blocks.{'budget' if self._target.status.is_spent else 'room'}", count)

    # -- loads ---------------------------------------------------------------------------------

    @uncollected
    def load(self, blocks: Sequence[tuple[BlockKey, int]], arrival: int) -> tuple[JobRecord | None, Sequence[int]]:
        """Plan a job that loads blocks into the caller's rows; return it (None: there is none), and
        the positions of those that it brings, in the order of its moves. Nobody has the others."""
        groups = groups_of([key for key, _ in blocks])
        reads = [Read(key, None, (row,), group) for (key, row), group in zip(blocks, groups, strict=True)]
        self._copies.pin_sources(reads)
        found = [at for at, read in enumerate(reads) if read.source is not None]
        if not found:
            return None, found
        moves, details = [reads[at].move for at in found], [reads[at].detail for at in found]
        record = self._transfers.add(JobKind.LOAD, moves, details, epoch=self._state.epoch, arrival=arrival)
        record.by_key = True
        self.fetches.note_loads([move.key for move in moves if self._hints.remote.tier in move.slots])
        return record, found

    # -- a new epoch ---------------------------------------------------------------------------

    def reset(self) -> None:
        """What was counted is forgotten."""
        self._new.clear()
        self._chains.clear()
        self._waiting.clear()
        self.fetches.reset()
