# SPDX-License-Identifier: Apache-2.0
"""What the remote store is thought to have, and what is sent there.

A remote store names blocks by key and evicts by itself: there are no slots of it, nor copies in the
catalog. What it answers is a hint for a while. Blocks go there from the first tier, once the
drive's backlog is written: what is evicted before its turn is not sent. Scheduler thread only.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Final

from kvdisk.blocks import BY_KEY, BY_KEY_OVER, BlockKey, JobId, Slot, Tier, group_of
from kvdisk.manager import bounds
from kvdisk.manager.admission import AdmissionPolicy
from kvdisk.manager.catalog import NONE, READY
from kvdisk.manager.hint_source import HintSource
from kvdisk.manager.jobs import JobRecord, MoveDetail
from kvdisk.manager.parts import Parts
from kvdisk.manager.questions import Asking
from kvdisk.manager.step_work import Kind, Work
from kvdisk.manager.write_budget import WriteBudget
from kvdisk.messages import JobKind, Move, Reason
from kvdisk.remote.base import RemoteAnswer, RemoteIndex

ASK_AGAIN_S = 30.0
"""A request that is looked up so long after it asked, or after half of ``hint_life_s``, asks
again."""
BeginMoves = Callable[[Sequence[int], Tier, Tier, Sequence[Slot]], tuple[list[Move], list[MoveDetail]]]
_BAD = frozenset({Reason.HEADER, Reason.CHECKSUM})
_ANSWERS = frozenset({None, Reason.ABSENT, *_BAD})
"""What came of a read that it has answered."""


@dataclass(slots=True)
class _Bad:
    """An object that has failed its check. ``doubt_s``: for how long it is not read, until
    ``until_s``; ``is_replaced``: this engine has written it over, which it does once."""

    doubt_s: float
    until_s: float
    is_replaced: bool = False


class BadObjects:
    """Blocks whose object has failed its check. Who computes one writes it over; meanwhile somebody
    else may have."""

    def __init__(self) -> None:
        self._bad: OrderedDict[BlockKey, _Bad] = OrderedDict()

    def note(self, key: BlockKey, now: float) -> None:
        """It has failed, once more maybe."""
        known = self._bad.pop(key, None)
        doubt_s = bounds.READ_AGAIN.after(0.0 if known is None else known.doubt_s)
        self._bad[key] = _Bad(doubt_s, now + doubt_s, known is not None and known.is_replaced)
        if len(self._bad) > bounds.REJECTED:
            self._bad.popitem(last=False)

    def note_sound(self, key: BlockKey) -> None:
        """It has passed: somebody has repaired it."""
        known = self._bad.get(key)
        if known is not None and not known.is_replaced:
            del self._bad[key]

    def begin_replacing(self, key: BlockKey) -> None:
        """It is being written over."""
        known = self._bad.get(key)
        if known is not None:
            known.is_replaced = True

    def end_replacing(self, key: BlockKey, *, failed: bool) -> None:
        """It was written over, or could not be."""
        known = self._bad.get(key)
        if known is not None:
            known.is_replaced = not failed
            known.until_s = known.until_s if failed else 0.0

    def may_be_read(self, key: BlockKey, now: float) -> bool:
        """Whether it is worth a read, if it is there."""
        known = self._bad.get(key)
        return known is None or now >= known.until_s

    def is_to_replace(self, key: BlockKey) -> bool | None:
        """Whether to write it over; None: it has not failed."""
        known = self._bad.get(key)
        return None if known is None else not known.is_replaced


class RemoteCopies(HintSource[RemoteAnswer, None]):
    """The remote store. Without ``index`` there is none.

    ``source``: the tier whose copies are sent. ``admission``: which blocks it is sent; None: none.
    ``budget``: how many bytes; None: any. ``tier``: what its blocks are read as.
    """

    tier: Final = Tier.REMOTE

    def __init__(
        self,
        parts: Parts,
        index: RemoteIndex | None,
        source: Tier,
        admission: AdmissionPolicy | None,
        budget: WriteBudget | None = None,
    ) -> None:
        super().__init__(parts, index, "remote_questions")
        self._geometry = parts.geometry
        self._catalog = parts.catalog
        self._transfers = parts.transfers
        self._stats = parts.stats
        self._budget = budget
        self._index = index
        self.source = source
        self.admission = admission
        self.bad = BadObjects()
        self._queue: OrderedDict[BlockKey, bool] = OrderedDict()
        """Blocks to send, and whether to write over what is there."""
        self._jobs: list[JobId] = []
        self._begin_moves: BeginMoves | None = None
        self._paused_until_s = 0.0
        """Until when some rank leaves it alone."""
        self._is_doubted = False
        """Some rank has left it alone, and no read has been answered since."""
        self._reads = 0
        """Blocks that are just being read from it."""
        self._is_usable = index is not None

    def send_by(self, begin_moves: BeginMoves) -> None:
        """Take who begins the moves that send blocks: ``Copies.begin_moves``. Call it once."""
        self._begin_moves = begin_moves

    # -- whether it answers --------------------------------------------------------------------

    @property
    def is_paused(self) -> bool | None:
        """Whether questions are left alone, or reads on some rank; None: there is no store."""
        index = self._index
        return None if index is None else not index.any or self._state.now < self._paused_until_s

    @property
    def usable_hints(self) -> Collection[BlockKey]:
        """What of ``hints`` a lookup may count as READY now: nothing while questions or reads are
        left alone, or the last question failed. After a pause of reads one request at a time may,
        until a read was answered."""
        return self.hints if self._is_usable else ()

    @property
    def is_usable(self) -> bool:
        """Whether it may be read now."""
        return self._is_usable

    def pause(self, seconds: float) -> None:
        """Some rank leaves it alone for so long from now on."""
        self._paused_until_s = max(self._paused_until_s, self._state.now + seconds)
        self._is_doubted = True
        self._look()

    def _look(self) -> None:
        """Find out whether its hints can be used."""
        index, before = self._index, self._is_usable
        may_try = self._state.now >= self._paused_until_s and not (self._is_doubted and self._reads)
        self._is_usable = index is not None and index.any and index.is_sound and may_try
        self._table.changes += self._is_usable is not before

    # -- questions -----------------------------------------------------------------------------

    @property
    def hint_life_s(self) -> float:
        """How long a hint is kept. Without a store there are none: see ``stop``."""
        return math.inf if self._index is None else self._index.hint_life_s

    def ask(self, request: Asking, nearer: Collection[BlockKey]) -> None:
        """Ask for what of a request's blocks neither this engine has nor is in ``nearer``."""
        number = self._ask(request, nearer)
        if number is not None:
            request.remote_question = number

    def _send(self, ticket: int, missing: list[list[BlockKey]]) -> bool:
        assert self._index is not None
        groups = self._geometry.groups
        chains = [keys for group, keys in zip(groups, missing, strict=True) if group.state_tokens is None and keys]
        states = [
            key for group, keys in zip(groups, missing, strict=True) if group.state_tokens is not None for key in keys
        ]
        return self._index.ask(ticket, chains, self._by_place(states))

    def _by_place(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Return blocks of several groups, each group's from one place of a prompt on, in the order
        of the prompt: so that what is cut off is cut off alike in every group."""
        groups = self._geometry.groups
        if len(groups) == 1:
            return list(keys)
        ends = [0] * len(groups)
        places: list[int] = []
        for key in keys:
            group = group_of(key)
            ends[group] += groups[group].block_tokens
            places.append(ends[group])
        return [keys[at] for at in sorted(range(len(keys)), key=places.__getitem__)]

    def is_asking(self, request: Asking) -> bool:
        """Whether the answer to a request's question is still to come."""
        return self._is_asking(request.remote_question)

    def absorb(self) -> None:
        """See ``HintSource``."""
        self._look()
        super().absorb()

    def _hear(self, key: BlockKey, answer: RemoteAnswer) -> None:
        if key in answer.found:
            self._hint(key)
        elif answer.is_whole:
            self._table.forget(key)

    def _hint(self, key: BlockKey) -> None:
        if self.bad.may_be_read(key, self._state.now):
            self._table.put(key, None, self._state.now)

    def stop(self) -> None:
        """Neither ask it nor send there any more, because this engine's weights are no longer those
        of the files."""
        super().stop()
        self._queue.clear()
        self._index = None
        self._look()

    # -- loads ---------------------------------------------------------------------------------

    def take(self) -> tuple[Tier, Slot, int]:
        """Return where a move reads a block that is in ``hints``, and the generation that a copy of
        it here gets. ``loaded`` follows."""
        self._state.generation += 1
        self.begin_reads(1)
        return self.tier, BY_KEY, self._state.generation

    def begin_reads(self, count: int) -> None:
        """So many blocks are about to be read. ``loaded`` follows for each."""
        self._reads += count
        self._look()

    def loaded(self, move: Move, reason: Reason | None) -> None:
        """End the read of a block."""
        self._reads -= 1
        if reason is None:
            self.bad.note_sound(move.key)
        if reason in _BAD:
            self._stats.add("remote_rejects")
            self.bad.note(move.key, self._state.now)
        if reason in _BAD or reason is Reason.ABSENT:
            self._table.forget(move.key)
        if reason in _ANSWERS:
            self._is_doubted = False
        self._look()

    # -- sending -------------------------------------------------------------------------------

    def offer(self, rows: Sequence[int]) -> None:
        """Queue those copies in ``source`` that it admits, and is not thought to have; and those
        whose object here has failed its check, whatever it admits."""
        if self._index is None or self.admission is None:
            return
        keys, states = self._catalog.keys, self._catalog.columns(self.source).states
        ready = [keys[row] for row in rows if states[row] == READY and keys[row] not in self._queue]
        bad = [self.bad.is_to_replace(key) for key in ready]
        wanted = [key for key, is_bad in zip(ready, bad, strict=True) if is_bad is None and key not in self.hints]
        if not self.admission.admits_all:
            wanted = list(compress(wanted, self.admission.admits(wanted)))
        wanted = self._by_place([*compress(ready, bad), *wanted])[: max(0, bounds.QUEUED - len(self._queue))]
        self._queue.update((key, self.bad.is_to_replace(key) is True) for key in wanted)
        if self._queue and not self._work.has(Kind.SENDS, self):
            self._work.add(Kind.SENDS, self, self._send_queued())

    def _send_queued(self) -> Work:
        """Plan jobs that send what is queued, as the budget allows it: a rate goes on by itself."""
        while self._queue:
            self._jobs = [job_id for job_id in self._jobs if job_id in self._transfers]
            may_send = self._budget is None or self._budget.refresh(self._state.now)
            if len(self._jobs) >= bounds.JOBS or not may_send:
                yield 0
                continue
            most = min(bounds.MOVES, self._work.left(Kind.SENDS))
            if self._budget is not None:
                most = min(most, self._budget.affords(max(self._geometry.slot_sizes) * self._geometry.shard_count))
            keys, is_over = self._next(most)
            catalog = self._catalog
            rows = [row for row in catalog.find_all(keys) if row != NONE and catalog.readable(row, self.source)]
            if rows:  # much of what waited may have left its tier
                self._plan_job(rows, is_over=is_over)
            yield len(keys)

    def _plan_job(self, rows: Sequence[int], *, is_over: bool) -> None:
        assert self._begin_moves is not None
        place = BY_KEY_OVER if is_over else BY_KEY
        for row in rows if is_over else ():
            self.bad.begin_replacing(self._catalog.keys[row])
        moves, details = self._begin_moves(rows, self.source, self.tier, [place] * len(rows))
        if self._budget is not None:
            sizes, groups = self._geometry.slot_sizes, self._geometry.size_classes
            sent = sum(sizes[groups[group_of(move.key)]] for move in moves)
            self._budget.spend(1, sent * self._geometry.shard_count)
        self._jobs.append(self._transfers.add(JobKind.DEMOTE, moves, details, epoch=self._state.epoch).job.id)

    def _next(self, most: int) -> tuple[list[BlockKey], bool]:
        """Take blocks from the queue, as many as follow each other that are to be written over, or
        not; return them and which."""
        keys: list[BlockKey] = []
        is_over = next(iter(self._queue.values()))
        while self._queue and len(keys) < most and next(iter(self._queue.values())) is is_over:
            keys.append(self._queue.popitem(last=False)[0])
        return keys, is_over

    def sent(self, record: JobRecord) -> None:
        """Note what a settled job has sent there."""
        moves = record.job.moves
        self._stats.add("sent_blocks", len(moves) - len(record.failed))
        for at, move in enumerate(moves):
            if move.slots[self.tier] == BY_KEY_OVER:
                self.bad.end_replacing(move.key, failed=at in record.failed)
            if at not in record.failed and self._index is not None and record.job.epoch == self._state.epoch:
                self._hint(move.key)
