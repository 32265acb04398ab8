# SPDX-License-Identifier: Apache-2.0
"""What the remote store is thought to have, what is sent there, and all hints together.

A remote store names blocks by key and evicts by itself: there are no slots of it, nor copies in the
catalog. What it answers is a hint for a while. Blocks go there from the CPU tier, once the
drive's backlog is written: what is evicted before its turn is not sent. Scheduler thread only.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import compress, islice
from typing import Final

from kvdisk.blocks import BY_KEY, BlockKey, JobId, Slot, Tier, group_of
from kvdisk.manager.admission import AdmissionPolicy
from kvdisk.manager.catalog import NONE, READY
from kvdisk.manager.jobs import JobRecord, MoveDetail
from kvdisk.manager.neighbours import NeighbourCopies
from kvdisk.manager.parts import HasParts, Parts
from kvdisk.manager.requests import RequestState
from kvdisk.manager.write_budget import WriteBudget
from kvdisk.messages import JobKind, Move, Reason
from kvdisk.remote.base import RemoteIndex

MOST_KEYS = 16384
"""Blocks of one question: of a longer prompt, the first."""
MOST_HINTS = 65536
MOST_REJECTED = 8192
MOST_FORGOTTEN = 256
"""Hints that are forgotten at a time: bounds a step."""
MOST_QUEUED = 16384
"""Blocks that wait to be sent, about 100 bytes each. What comes then is not sent."""
MOST_SEND_MOVES = 64
MOST_SEND_JOBS = 4
MOST_BATCHES = 32
"""Batches that a step takes from the queue."""
ASK_AGAIN_S = 30.0
"""A request that is looked up so long after it asked, or after half of ``hint_life_s``, asks
again."""
_BAD = frozenset({Reason.HEADER, Reason.CHECKSUM})


class RemoteCopies(HasParts):
    """The remote store. Without ``index`` there is none.

    ``admission``: which blocks it is sent; None: none. ``budget``: how many bytes; None: any.
    ``tier``: what its blocks are read as; ``source``: the tier whose copies are sent.
    """

    tier: Final = Tier.REMOTE
    source: Final = Tier.CPU

    def __init__(
        self,
        parts: Parts,
        index: RemoteIndex | None,
        admission: AdmissionPolicy | None,
        budget: WriteBudget | None = None,
    ) -> None:
        super().__init__(parts)
        self._budget = budget
        self._index = index
        self.admission = admission
        self.hints: OrderedDict[BlockKey, float] = OrderedDict()
        """Blocks that it has, and when it said so, the oldest first. Read only, but for this
        class."""
        self.changes = 0
        """Rises with each change of which keys are in ``hints``."""
        self._rejected: OrderedDict[BlockKey, None] = OrderedDict()
        self._unanswered: dict[int, Sequence[Sequence[BlockKey]]] = {}
        self._last_ticket = 0
        self._queue: OrderedDict[BlockKey, None] = OrderedDict()
        self._jobs: list[JobId] = []

    # -- questions -----------------------------------------------------------------------------

    @property
    def answers(self) -> bool | None:
        """Whether it is asked now; None: there is none."""
        return None if self._index is None else self._index.any

    @property
    def hint_life_s(self) -> float:
        """How long a hint is kept. Without a store there are none: see ``stop``."""
        return math.inf if self._index is None else self._index.hint_life_s

    def ask(self, request: RequestState, nearer: Collection[BlockKey]) -> None:
        """Ask for what of a request's blocks neither this engine has nor is in ``nearer``."""
        index, left = self._index, MOST_KEYS
        if index is None or not index.any:
            return
        chains: list[list[BlockKey]] = []
        alone: list[BlockKey] = []
        for group, keys in zip(self._geometry.groups, request.keys, strict=True):
            found = zip(keys, self._catalog.presences(keys), strict=True)
            missing = [key for key, presence in found if presence != READY and key not in nearer][:left]
            left -= len(missing)
            if group.state_tokens is not None:
                alone += missing
            elif missing:
                chains.append(missing)
        if not chains and not alone:
            return
        self._last_ticket += 1
        if index.ask(self._last_ticket, chains, alone):
            self._unanswered[self._last_ticket] = [*chains, alone]
            request.remote_question = self._last_ticket
            self._stats.add("remote_questions")

    def is_asking(self, request: RequestState) -> bool:
        """Whether the answer to a request's question is still to come."""
        return request.remote_question in self._unanswered and self._index is not None and self._index.any

    def absorb(self, now: float) -> None:
        """Take in the answers that have come, and forget hints that are too old."""
        if self._index is None:
            return
        for answer in self._index.poll():
            found = frozenset(answer.found)
            for keys in self._unanswered.pop(answer.ticket, ()):
                for key in keys if answer.is_whole else ():
                    if key in self.hints and key not in found:
                        self._forget(key)
            self._hint(answer.found, now)
        life_s = self.hint_life_s
        for _ in range(min(MOST_FORGOTTEN, len(self.hints))):
            key = next(iter(self.hints))
            if len(self.hints) <= MOST_HINTS and now - self.hints[key] <= life_s:
                break
            self._forget(key)

    def _hint(self, keys: Sequence[BlockKey], now: float) -> None:
        count = len(self.hints)
        for key in keys:
            if key not in self._rejected:
                self.hints[key] = now
                self.hints.move_to_end(key)
        self.changes += len(self.hints) != count

    def _forget(self, key: BlockKey) -> None:
        self.changes += 1
        self.hints.pop(key, None)

    def stop(self) -> None:
        """Neither ask it nor send there any more, because this engine's weights are no longer those
        of the files."""
        self._index = None
        self.changes += 1
        for each in (self.hints, self._unanswered, self._queue):
            each.clear()

    # -- loads ---------------------------------------------------------------------------------

    def take(self) -> tuple[Tier, Slot, int]:
        """Return where a move reads a block that is in ``hints``, and the generation that a copy of
        it here gets."""
        self._state.generation += 1
        return self.tier, BY_KEY, self._state.generation

    def loaded(self, move: Move, reason: Reason | None) -> None:
        """End the read of a block."""
        if reason in _BAD:
            self._stats.add("remote_rejects")
            self._rejected[move.key] = None
            if len(self._rejected) > MOST_REJECTED:
                self._rejected.popitem(last=False)
        if reason in _BAD or reason is Reason.ABSENT:
            self._forget(move.key)

    # -- sending -------------------------------------------------------------------------------

    def offer(self, rows: Sequence[int]) -> None:
        """Queue those copies in memory that it admits, and is not thought to have."""
        if self._index is None or self.admission is None:
            return
        keys, states = self._catalog.keys, self._catalog.columns(self.source).states
        wanted = [keys[row] for row in rows if states[row] == READY]
        known = (self._queue, self.hints, self._rejected)
        wanted = [key for key in wanted if not any(key in each for each in known)]
        if not self.admission.is_open:
            wanted = list(compress(wanted, self.admission.admits(wanted)))
        self._queue.update(dict.fromkeys(wanted[: max(0, MOST_QUEUED - len(self._queue))]))

    def can_go_on(self, now: float) -> bool:
        """Whether blocks that wait to be sent may be."""
        return bool(self._queue) and (self._budget is None or self._budget.refresh(now))

    def plan(self, now: float) -> None:
        """Plan jobs that send what is queued."""
        if not self._queue:
            return
        self._jobs = [job_id for job_id in self._jobs if job_id in self._transfers]
        largest, parts = max(self._geometry.slot_sizes), self._geometry.part_count
        for _ in range(MOST_BATCHES):  # much of what waited may have left memory
            if len(self._jobs) >= MOST_SEND_JOBS or not self.can_go_on(now):
                return
            most = MOST_SEND_MOVES if self._budget is None else self._budget.affords(largest * parts)
            keys = list(islice(self._queue, min(MOST_SEND_MOVES, most)))
            for key in keys:
                del self._queue[key]
            catalog, states = self._catalog, self._catalog.columns(self.source).states
            rows = [row for row in catalog.find_all(keys) if row != NONE and states[row] == READY]
            if not rows:
                continue
            catalog.pin(rows, self.source)
            moves = [
                Move(catalog.keys[row], catalog.generations[row], slots={self.source: slot, self.tier: BY_KEY})
                for row, slot in zip(rows, catalog.columns(self.source).slots(rows), strict=True)
            ]
            details = [MoveDetail(row, source=self.source) for row in rows]
            if self._budget is not None:
                sizes, groups = self._geometry.slot_sizes, self._geometry.size_classes
                sent = sum(sizes[groups[group_of(move.key)]] for move in moves)
                self._budget.spend(1, sent * parts)
            self._jobs.append(self._transfers.add(JobKind.DEMOTE, moves, details, epoch=self._state.epoch).job.id)

    def sent(self, record: JobRecord, now: float) -> None:
        """Note what a settled job has sent there."""
        there = [move.key for at, move in enumerate(record.job.moves) if at not in record.failed]
        self._stats.add("sent_blocks", len(there))
        if self._index is not None and record.job.epoch == self._state.epoch:
            self._hint(there, now)


class Hints:
    """What others are thought to have, the nearest first: neighbours, then the remote store."""

    def __init__(self, neighbours: NeighbourCopies, remote: RemoteCopies) -> None:
        self.neighbours = neighbours
        self.remote = remote
        self._asked: list[RequestState] = []
        """Those that were asked for since the last ``absorb``, which knows the time."""
        self._now_s = 0.0

    @property
    def changes(self) -> int:
        """Rises with each change of which keys they name."""
        return self.neighbours.changes + self.remote.changes

    @property
    def usable(self) -> Collection[BlockKey]:
        """Return the keys that a lookup may count as READY now."""
        near, far = self.neighbours.usable_hints, self.remote.hints
        return _Either(near, far) if near and far else near or far

    def ask(self, request: RequestState) -> None:
        """Ask for what of a request's blocks this engine has not got. ``keys`` are up to date."""
        self.neighbours.ask(request)
        self.remote.ask(request, self.neighbours.hints)
        self._asked.append(request)

    def renew(self, request: RequestState) -> None:
        """Ask again where the last question of a request that waits is long ago: hints are kept for
        a time only. One that was looked up since it came does not wait a second time."""
        age_s = 0.0 if request.asked_s is None else self._now_s - request.asked_s
        if age_s > min(ASK_AGAIN_S, self.remote.hint_life_s / 2):
            request.asked_s = self._now_s
            self.ask(request)
            if request.looked_up:
                request.question = request.remote_question = 0

    def refresh(self, request: RequestState, now: float) -> None:
        """Take in answers before a request is looked up, and ask again where its question is long
        ago."""
        self.absorb(now)
        self.renew(request)
        request.looked_up = True

    def is_asking(self, request: RequestState) -> bool:
        """Whether an answer to a request's questions is still to come."""
        return self.neighbours.is_asking(request) or self.remote.is_asking(request)

    def absorb(self, now: float) -> None:
        """Take in the answers that have come, and forget hints that are too old."""
        self._now_s = now
        for request in self._asked:
            request.asked_s = now
        self._asked.clear()
        self.neighbours.absorb(now)
        self.remote.absorb(now)

    def take(self, key: BlockKey) -> tuple[Tier, Slot, int] | None:
        """Return where a move can read a block, and its generation; None: no hint names it. What it
        reads is held until the move is settled."""
        if key in self.remote.hints and key not in self.neighbours.usable_hints:
            return self.remote.take()
        return self.neighbours.take(key)

    def tier_of(self, key: BlockKey) -> Tier:
        """Return what a hinted block is read as."""
        is_far = key in self.remote.hints and key not in self.neighbours.usable_hints
        return self.remote.tier if is_far else self.neighbours.tier

    def stop(self) -> None:
        """Ask no more, because this engine's weights are no longer those of the files."""
        self.neighbours.stop()
        self.remote.stop()


class _Either(Collection[BlockKey]):
    """The keys of two collections."""

    def __init__(self, near: Collection[BlockKey], far: Collection[BlockKey]) -> None:
        self._pair = near, far
        self._near: Callable[[object], bool] = near.__contains__
        self._far: Callable[[object], bool] = far.__contains__

    def __contains__(self, key: object) -> bool:
        return self._near(key) or self._far(key)

    def __iter__(self) -> Iterator[BlockKey]:
        near, far = self._pair
        return iter({*near, *far})

    def __len__(self) -> int:
        return sum(map(len, self._pair))
