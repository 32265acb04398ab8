# SPDX-License-Identifier: Apache-2.0
"""Brings to the drive what was loaded from the remote store, so that the next load finds it here.
Only for jobs by key, and without a tier in memory, in which a load leaves its copy. Scheduler
thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvdisk.blocks import BY_KEY, BlockKey, JobId, groups_of
from kvdisk.manager import bounds
from kvdisk.manager.copies import Copies, Offers
from kvdisk.manager.jobs import JobRecord, MoveDetail
from kvdisk.manager.parts import Parts
from kvdisk.manager.peer_hints import PeerHints
from kvdisk.manager.step_work import Kind, Work
from kvdisk.manager.tiers import Tiers
from kvdisk.messages import JobKind, Move


class Fetches:
    """See the module. A block is read from the store once more, apart from its load: neither a full
    drive nor a slow one holds that up."""

    def __init__(self, parts: Parts, tiers: Tiers, copies: Copies, hints: PeerHints) -> None:
        self._catalog = parts.catalog
        self._transfers = parts.transfers
        self._state = parts.state
        self._work = parts.work
        self._target = tiers.first
        self._copies = copies
        self._remote = hints.remote
        self._loaded: OrderedDict[BlockKey, None] = OrderedDict()
        self._queue: OrderedDict[BlockKey, BlockKey | None] = OrderedDict()
        """Blocks to fetch, and the one before each in its chain."""
        self._jobs: list[JobId] = []
        self._work.open_when(Kind.FETCHES, lambda: self._remote.is_usable and not self._work.has(Kind.DEMAND))

    def note_loads(self, keys: Sequence[BlockKey]) -> None:
        """These blocks are being loaded from the remote store."""
        if self._target.in_memory:
            return
        self._loaded.update(dict.fromkeys(keys))
        while len(self._loaded) > bounds.UNREACHED:
            self._loaded.popitem(last=False)

    def forget_failed(self, record: JobRecord) -> None:
        """What a job has failed to load is not fetched: it would be read in vain again."""
        for at in record.failed:
            key = record.job.moves[at].key
            self._loaded.pop(key, None)
            self._queue.pop(key, None)

    def reached(self, keys: Sequence[BlockKey]) -> None:
        """A request wants these blocks of one kind, which follow each other: queue what was loaded
        from the remote store."""
        if not self._loaded:
            return
        for parent, key in zip((None, *keys), keys, strict=False):
            if key in self._loaded:
                del self._loaded[key]
                if len(self._queue) < bounds.QUEUED:
                    self._queue[key] = parent
        if self._queue and not self._work.has(Kind.FETCHES, self):
            self._work.add(Kind.FETCHES, self, self._fetch_queued())

    def _fetch_queued(self) -> Work:
        """Plan jobs that fetch what is queued, as far as it is admitted and there is room now; the
        rest is left to the next load. All that requests reached is counted by now: admission goes
        by these counts."""
        while self._queue:
            if not self._target.update_writable(self._state.now):
                self._queue.clear()
                return
            self._jobs = [job_id for job_id in self._jobs if job_id in self._transfers]
            if len(self._jobs) >= bounds.FETCH_JOBS:
                yield 0
                continue
            count = min(bounds.MOVES, len(self._queue), self._work.left(Kind.FETCHES))
            self._fetch([self._queue.popitem(last=False) for _ in range(count)])
            yield count

    def _fetch(self, wanted: list[tuple[BlockKey, BlockKey | None]]) -> None:
        """Plan a job for some blocks, each with the one before it in its chain."""
        target, source, generations = self._target, self._remote.tier, self._catalog.generations
        keys, parents = [key for key, _ in wanted], [parent for _, parent in wanted]
        offers = self._copies.missing(target, Offers(keys, parents, (), groups_of(keys), [0] * len(keys)))
        found = self._copies.take(target, offers).slots
        slots = [slot for slot in found if slot is not None]
        if not slots:
            return
        offers = offers.at([at for at, slot in enumerate(found) if slot is not None])
        rows = self._copies.begin_new(target.tier, offers, slots)
        moves = [
            Move(key, generations[row], slots={target.tier: slot, source: BY_KEY}, parent=parent)
            for key, parent, slot, row in zip(offers.keys, offers.parents, slots, rows, strict=True)
        ]
        details = [MoveDetail(row, source=source, target=target.tier) for row in rows]
        self._remote.begin_reads(len(moves))
        self._jobs.append(self._transfers.add(JobKind.PROMOTE, moves, details, epoch=self._state.epoch).job.id)

    def reset(self) -> None:
        """Forget all: the keys have another meaning."""
        self._work.cancel(self)
        self._loaded.clear()
        self._queue.clear()
