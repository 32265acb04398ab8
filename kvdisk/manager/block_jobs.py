# SPDX-License-Identifier: Apache-2.0
"""Jobs that somebody asks for by key, without a request of an engine: what ``BlockStore`` does.

Where a plan's moves name GPU blocks, these name rows of the caller's memory. Scheduler thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvdisk.blocks import BlockKey, Tier, groups_of
from kvdisk.manager.catalog import NONE, READY
from kvdisk.manager.copies import Copies, Offers, Read
from kvdisk.manager.fetches import Fetches
from kvdisk.manager.garbage import uncollected
from kvdisk.manager.intake import Answer, Intake
from kvdisk.manager.jobs import JobRecord
from kvdisk.manager.parts import Parts
from kvdisk.manager.peer_hints import PeerHints
from kvdisk.manager.reuse import STATES, Visit
from kvdisk.manager.step_work import Kind, Work
from kvdisk.manager.tiers import Tiers
from kvdisk.messages import JobKind

MOST_NEW: Final = 1 << 16
"""Blocks that were counted when they were put, and that no request was said to have reached
since."""
MOST_CHAINS: Final = 1024
"""Chains of these blocks that the next put may go on with."""


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

    def __init__(self, parts: Parts, tiers: Tiers, copies: Copies, hints: PeerHints, intake: Intake) -> None:
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
        self._intake = intake
        self.fetches = Fetches(parts, tiers, copies, hints)
        self._admissions = [space.admission for space in tiers]
        if hints.remote.admission is not None:
            self._admissions.append(hints.remote.admission)
        self._class_of = parts.geometry.size_classes
        self._new: dict[BlockKey, None] = {}
        """See ``MOST_NEW``; the first that came goes first."""
        self._chains: dict[BlockKey, tuple[Visit, int]] = {}
        """See ``MOST_CHAINS``; by the last block, the visit that counted it and the origin of what
        comes behind."""
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
        for most, counted in ((MOST_NEW, self._new), (MOST_CHAINS, self._chains)):
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
    def store(self, offers: Offers, now: float, *, is_new: bool) -> tuple[Answer, list[int]]:
        """Plan a job for the offers that are missing and admitted, as far as there is room now.
        Return also the positions of those that are there.

        ``is_new``: False: they waited for room, and were admitted. A key comes once.
        """
        missing = self._intake.missing(offers)
        are_admitted = not is_new or self._target.admission.admits_all
        if not are_admitted:
            self._count_new(missing)
        answer = self._intake.store(missing, now, are_admitted=are_admitted, by_key=True)
        return answer, sorted({*offers.positions}.difference(missing.positions))

    def waiting(self, answer: Answer) -> list[int]:
        """Return which of the offers that got no slot may get one soon."""
        if not answer.is_writable or self._target.status.is_spent:
            return []
        classes = map(self._class_of.__getitem__, answer.unserved.groups)
        return [at for at, each in enumerate(classes) if self._target.may_get_room(each, silent=False)]

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
