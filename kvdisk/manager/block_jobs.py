# SPDX-License-Identifier: Apache-2.0
"""Jobs that somebody asks for by key, without a request of an engine: what ``BlockStore`` does.

Where a plan's moves name GPU blocks, these name rows of the caller's memory. Scheduler thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvdisk.blocks import BlockKey, Tier, groups_of
from kvdisk.manager.catalog import NONE, READY
from kvdisk.manager.copies import Copies, Offers, Read, moves_of
from kvdisk.manager.demand import Demand
from kvdisk.manager.erasures import Erasures
from kvdisk.manager.fetches import Fetches
from kvdisk.manager.garbage import uncollected
from kvdisk.manager.intake import Answer, Intake
from kvdisk.manager.jobs import JobRecord
from kvdisk.manager.nvme import NvmeSpace
from kvdisk.manager.parts import Parts
from kvdisk.manager.peer_hints import PeerHints
from kvdisk.manager.step_work import Kind, Work
from kvdisk.manager.tiers import Tiers
from kvdisk.messages import JobKind


@dataclass(slots=True, eq=False)
class Prompt:
    """A chain of blocks that others are asked for, as ``questions.Asking``. ``keys``: by group."""

    keys: tuple[list[BlockKey], ...]
    question: int = 0
    remote_question: int = 0
    asked_s: float | None = None
    load_tiers: frozenset[Tier] | None = None


class BlockJobs:
    """Stores and loads blocks by key, in the first tier, ``target``. ``wanted``: slots by size
    class that offers wait for; at least one of each, so that there is some room for what comes
    first."""

    def __init__(
        self, parts: Parts, tiers: Tiers, demand: Demand, copies: Copies, hints: PeerHints, intake: Intake
    ) -> None:
        self._geometry = parts.geometry
        self._catalog = parts.catalog
        self._history = parts.history
        self._transfers = parts.transfers
        self._stats = parts.stats
        self._state = parts.state
        self._work = parts.work
        self.target = tiers.first
        self._tiers = tiers
        self._demand = demand
        self._copies = copies
        self._hints = hints
        self._intake = intake
        self.fetches = Fetches(parts, tiers, copies, hints)
        self._class_of = parts.geometry.size_classes
        self._waiting = Counter[int]()
        self._silence_s = parts.config.io_deadline_s

    # -- what there is -------------------------------------------------------------------------

    def presences(self, keys: Sequence[BlockKey]) -> bytes:
        """As ``Catalog.presences``; READY is also what others are thought to have, though it may be
        on its way to a tier: that may take long."""
        found = self._catalog.presences(keys)
        usable = self._hints.usable if found.count(READY) < len(found) else ()
        if not usable:
            return found
        return bytes(READY if key in usable else presence for key, presence in zip(keys, found, strict=True))

    def keys(self) -> list[BlockKey]:
        """Return the keys of all blocks that are READY here."""
        keys = self._catalog.ready_keys(self.target.tier)
        found = self._catalog.presences(keys)
        return [key for key, presence in zip(keys, found, strict=True) if presence == READY]

    def ask(self, keys: Sequence[BlockKey]) -> Prompt:
        """Ask others for what is missing of a prompt."""
        prompt = Prompt(self._by_group(keys))
        self._hints.ask(prompt)
        return prompt

    def is_asking(self, prompt: Prompt) -> bool:
        """Whether an answer is still to come."""
        return self._hints.is_asking(prompt)

    # -- demand --------------------------------------------------------------------------------

    def reached(self, request: str, keys: Sequence[BlockKey], now: float) -> None:
        """A request wants these blocks of its prompt, in this order; see ``Demand.reach_keys``."""
        self._state.now = now
        self._history.note_time(now)
        keys = list(dict.fromkeys(keys))
        self._work.add(Kind.RECENCY, self, self._use(list(keys), self._state.generation))
        alike = self._by_group(keys)
        for of_group in alike:
            self.fetches.reached(of_group)
        self._demand.reach_keys(request, alike, self._offer)
        self._work.run(Kind.RECENCY, Kind.DEMAND)

    def _use(self, keys: list[BlockKey], generation: int) -> Work:
        """Refresh the recency of a prompt's blocks; of these the head last, so that it leaves
        last. ``generation``: the last one when the request came: it does not use what is newer."""
        generations = self._catalog.generations
        while keys:
            left = self._work.left(Kind.RECENCY)
            some = keys[-left:]
            del keys[-left:]
            rows = [row for row in self._catalog.find_all(some) if row != NONE and generations[row] <= generation]
            for space in self._tiers:
                space.reached(rows[::-1])
            yield len(some)

    def _offer(self, keys: Sequence[BlockKey]) -> None:
        """Offer blocks, whose count has risen, to the remote store."""
        remote = self._hints.remote
        if remote.admission is not None:
            remote.offer([row for row in self._catalog.find_all(keys) if row != NONE])

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
        waiting = self._waiting
        return [max(1, waiting.get(size_class, 0)) for size_class in range(len(self._geometry.slot_sizes))]

    @uncollected
    def store(self, offers: Offers, now: float, *, is_new: bool) -> tuple[Answer, list[int]]:
        """Plan a job for the offers that are missing and admitted, as far as there is room now.
        Return also the positions of those that are there.

        ``is_new``: False: they waited for room, and were admitted. A key comes once.
        """
        self._state.now = now
        missing = self._intake.missing(offers)
        are_admitted = not is_new or self.target.admission.admits_all
        if not are_admitted:
            self._demand.put(missing)
        answer = self._intake.store(missing, now, are_admitted=are_admitted, by_key=True)
        return answer, sorted({*offers.positions}.difference(missing.positions))

    def waiting(self, answer: Answer) -> list[int]:
        """Return which of the offers that got no slot may get one soon."""
        if not answer.is_writable or self.target.is_spent:
            return []
        classes = map(self._class_of.__getitem__, answer.unserved.groups)
        return [at for at, each in enumerate(classes) if self.target.may_get_room(each, silent=False)]

    def await_room(self, groups: Iterable[int]) -> None:
        """Take note of the groups of the offers that wait for room, at the end of a step's
        offers."""
        self._waiting = Counter(map(self._class_of.__getitem__, groups))

    def give_up(self, count: int) -> None:
        """Count blocks for which no room came."""
        self._stats.add(f"refused_blocks.{'budget' if self.target.is_spent else 'room'}", count)

    # -- loads ---------------------------------------------------------------------------------

    @uncollected
    def load(
        self, keys: Sequence[BlockKey], rows: Sequence[tuple[int, ...]], arrival: int
    ) -> tuple[JobRecord | None, Sequence[int]]:
        """Plan a job that loads blocks into the caller's rows; return it (None: there is none), and
        the positions of those that it brings, in the order of its moves. Nobody has the others.
        ``rows``: of each block those of its pieces."""
        reads = [Read(key, None, each, group) for key, each, group in zip(keys, rows, groups_of(keys), strict=True)]
        self._copies.pin_sources(reads)
        found = [at for at, read in enumerate(reads) if read.source is not None]
        if not found:
            return None, found
        moves, details = moves_of([reads[at] for at in found])
        record = self._transfers.add(JobKind.LOAD, moves, details, epoch=self._state.epoch, arrival=arrival)
        record.by_key = True
        self.fetches.note_loads([move.key for move in moves if self._hints.remote.tier in move.slots])
        return record, found

    # -- deletion ------------------------------------------------------------------------------

    def erasures_in(self, nvme: NvmeSpace) -> Erasures:
        """Return what deletes blocks of a tier for good."""
        return Erasures(self._catalog, self._state, nvme, self._silence_s)

    # -- a new epoch ---------------------------------------------------------------------------

    def reset(self) -> None:
        """What was counted is forgotten."""
        self._demand.forget_keys()
        self._waiting.clear()
        self.fetches.reset()
