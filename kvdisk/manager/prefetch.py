# SPDX-License-Identifier: Apache-2.0
"""What is read ahead for requests that wait, and because a KV hint asks for it. Scheduler thread
only.

A request that waits in the engine's queue has its NVMe blocks promoted, so that the queue hides the
disk. A promoted copy is an ordinary CPU copy: once evicted, its request reads the block from NVMe.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Generator, Sequence
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from kvdisk.blocks import BlockKey, JobId, group_of
from kvdisk.manager import bounds
from kvdisk.manager.catalog import ABSENT, NONE, READY
from kvdisk.manager.copies import Copies, Read, Taken, moves_of
from kvdisk.manager.demand import Demand
from kvdisk.manager.load_jobs import GpuLoads
from kvdisk.manager.parts import Parts
from kvdisk.manager.peer_hints import PeerHints
from kvdisk.manager.prefix_match import first_needed
from kvdisk.manager.requests import RequestState
from kvdisk.manager.step_work import SHARES, Kind, Work
from kvdisk.manager.tiers import Tiers
from kvdisk.messages import JobKind

PREFETCH_DIVISOR = 2
"""One in so many CPU slots of each size class may have a block that is read ahead for a request
that still waits."""

_IN_A_LOOK = 4
"""Blocks of a prompt that take as long as a look, while it is found out which are wanted."""


class _Wanted:
    """A waiting request's blocks that are to be read ahead, in the order of its prompt.

    ``groups``, ``positions``: of each. Of a long prompt few are planned in a step: reads are made
    when they are.
    """

    def __init__(self, request: RequestState, groups: NDArray[np.intp], positions: NDArray[np.intp]) -> None:
        self._request = request
        self._groups = groups
        self._positions = positions
        self._at = 0
        self._made: deque[Read] = deque()

    def __bool__(self) -> bool:
        return bool(self._made) or self._at < len(self._positions)

    @property
    def first(self) -> Read:
        """The next of them. There is one."""
        if not self._made:
            group, position = int(self._groups[self._at]), int(self._positions[self._at])
            keys = self._request.keys[group]
            parent = self._request.parent(group, position)
            self._made.append(Read(keys[position], parent, request=self._request))
            self._at += 1
        return self._made[0]

    def take(self) -> Read:
        """Remove and return the first."""
        read = self.first
        self._made.popleft()
        return read

    def put_back(self, reads: Sequence[Read]) -> None:
        """Have reads come first again that were taken."""
        self._made.extendleft(reversed(reads))

    def clear(self) -> None:
        """Leave out all."""
        self._at = len(self._positions)
        self._made.clear()


_Search = Generator[int, None, _Wanted]
"""Yields how many blocks it has looked at, and returns what is wanted."""
_Line = OrderedDict[RequestState, "_Wanted | _Search | None"]
"""Requests with what is wanted for each, or how it is being found; None: nobody has begun."""


class Promotions:
    """Reads ahead for the requests that wait, in order of arrival, unless ``prefetch`` is off; and
    what KV hints ask for. Does nothing without a slower tier.

    Each block is read ahead once for a request's stay in the queue: that bounds the reads.
    """

    def __init__(
        self, parts: Parts, tiers: Tiers, demand: Demand, hints: PeerHints, gpu_loads: GpuLoads, copies: Copies
    ) -> None:
        self._config = parts.config
        self._geometry = parts.geometry
        self._context = parts.context
        self._catalog = parts.catalog
        self._transfers = parts.transfers
        self._state = parts.state
        self._work = parts.work
        self._tiers = tiers
        self._arrival = tiers.arrival_tier if len(tiers) > 1 or parts.config.remote else None
        self._demand = demand
        self._hints = hints
        self._gpu_loads = gpu_loads
        self._copies = copies
        self._waiting: _Line = OrderedDict()
        """Requests with something left to be read ahead, in order of arrival."""
        self._asked: _Line = OrderedDict()
        """The same of those that were made for a KV hint, and are no requests of the engine."""
        self._ahead: dict[str, Counter[int]] = {}
        """By waiting request: slots by size class that were taken for it."""
        self._taken: Counter[int] = Counter()
        """The same of all."""
        self._remote_jobs: list[JobId] = []
        """Promotions from the remote store that were out."""
        self._left = 0
        """Blocks that this step may still plan, or find to need no read."""
        self._lacks_room = False
        """Whether requests wait for room, which nothing else takes then."""
        for kind in (Kind.PREFETCH, Kind.ASKED):
            self._work.open_when(kind, lambda: not self._state.read_awaited)

    # -- the queue -----------------------------------------------------------------------------

    def enqueue(self, request: RequestState, *, first: bool = False) -> None:
        """Read ahead for a request that waits, and that may load from all tiers; with ``first``
        before all others."""
        if self._arrival is not None and self._config.prefetch and request.load_tiers is None:
            self.leave(request)
            self._waiting[request] = None
            self._waiting.move_to_end(request, last=not first)
            self._read(Kind.PREFETCH, self._waiting)

    def leave(self, request: RequestState) -> None:
        """Read nothing more ahead for a request. What was read ahead for it is left to the tier."""
        if not (self._waiting or self._ahead):  # asked of every request in every step
            return
        self._waiting.pop(request, None)
        ahead = self._ahead.pop(request.request_id, None)
        if ahead is not None:
            self._taken.subtract(ahead)

    def _read(self, kind: Kind, line: _Line) -> None:
        if not self._work.has(kind, self):
            self._work.add(kind, self, self._read_ahead(kind, line))

    def ask(self, request: RequestState, tokens: int) -> bool:
        """Read a prompt's first ``tokens`` ahead, after what requests wait for and whatever becomes
        of this one, as far as there is room. Return False where too many wait already."""
        if self._arrival is None:
            return True
        if len(self._asked) >= bounds.PREFETCHES:
            return False
        self._asked[request.beginning(f"{request.request_id}, prefetch", tokens)] = None
        self._read(Kind.ASKED, self._asked)
        return True

    def reset(self) -> None:
        """Forget what was read ahead, which is gone with the weights, and look for it anew."""
        self._ahead.clear()
        self._taken.clear()
        for kind, line in ((Kind.PREFETCH, self._waiting), (Kind.ASKED, self._asked)):
            line.update(dict.fromkeys(line))
            self._work.cancel(self, kind)
            self._read(kind, line)

    # -- steps ---------------------------------------------------------------------------------

    def _read_ahead(self, kind: Kind, line: _Line) -> Work:
        """Plan promotions for those in a line, once in a step.

        None is planned while a scheduled request waits for a prefetch, to let that finish first.
        """
        while line:
            if any(space.works for space in self._tiers if space is not self._arrival) or self._config.remote:
                self._left = self._work.left(kind)
                found = self._plan(kind, line)
                if looked := found + self._work.left(kind) - max(0, self._left):
                    yield looked
            elif kind is Kind.ASKED:
                for asked in list(line):
                    self._end(asked, line)
            yield 0

    def _plan(self, kind: Kind, line: _Line) -> int:
        """Plan promotions for the first in a line; return how many blocks were looked at to find
        what they want."""
        found = found_keys = 0
        if kind is Kind.PREFETCH:
            self._lacks_room = False
        elif self._lacks_room and self._waiting:
            return 0
        for request, wanted in list(islice(line.items(), bounds.WAITING_SEEN)):
            self._hints.renew(request)
            if not isinstance(wanted, _Wanted):
                if found == bounds.WAITING_LOOKED_UP or found_keys >= self._left or self._hints.is_asking(request):
                    continue
                found += 1
                looked, wanted = self._go_on(request, wanted, line, self._left - found_keys)  # noqa: PLW2901
                found_keys += looked
                if wanted is None:
                    continue
            while wanted and self._left > 0 and not self._has_enough_jobs(self._is_remote(wanted.first)):
                if not self._plan_job(request.request_id, wanted):
                    if kind is Kind.PREFETCH:
                        self._lacks_room = True  # those behind it would take what comes free
                        return found_keys
                    wanted.clear()
            if not wanted:
                self._end(request, line)
            elif self._left <= 0 or not self._is_remote(wanted.first):
                break
        return found_keys

    def _go_on(
        self, request: RequestState, search: _Search | None, line: _Line, most: int
    ) -> tuple[int, _Wanted | None]:
        """Look for what a request in a line wants, about so many looks; return how many that were,
        and what it wants, where that is found by now."""
        search = line[request] = self._find(request) if search is None else search
        looked = 0
        while looked < _IN_A_LOOK * most:
            try:
                looked += next(search)
            except StopIteration as end:
                line[request] = end.value
                return -(-looked // _IN_A_LOOK), end.value
        return -(-looked // _IN_A_LOOK), None

    def _end(self, request: RequestState, line: _Line) -> None:
        """Read nothing more for one that still waits."""
        del line[request]
        if line is self._asked:
            self.leave(request)

    def _is_remote(self, read: Read) -> bool:
        """Whether a block would come from the remote store."""
        return self._catalog.find(read.key) < 0 and self._hints.tier_of(read.key) is self._hints.remote.tier

    def _has_enough_jobs(self, is_remote: bool) -> bool:
        """Whether so many promotions are out already, of the remote store or of drives, that a slow
        one does not hold up the other."""
        self._remote_jobs = [job_id for job_id in self._remote_jobs if job_id in self._transfers]
        count = len(self._remote_jobs)
        return (count if is_remote else self._transfers.count(JobKind.PROMOTE) - count) >= bounds.JOBS

    def _find(self, request: RequestState) -> _Search:
        """Find what of a request's hit is to be read ahead, piece by piece; what the CPU tier has
        of it counts as used."""
        request.update_keys()
        known = max(request.prompt_tokens, len(request.hashes) * self._geometry.hash_tokens)
        limit = known - 1 if request.load_limit_tokens is None else min(known - 1, request.load_limit_tokens)
        catalog, geometry, step = self._catalog, self._geometry, self._geometry.alignment_tokens
        blocks = sum(step // group.block_tokens for group in geometry.groups if group.reads_all)
        end, is_ready = 0, True
        while is_ready and end < limit:
            start, end = end, min(limit, end + max(1, self._piece // max(1, blocks)) * step)
            is_ready = request.lookups.look_ahead(catalog, geometry, request.keys, end, *self._hinted())
            yield (end - start) // step * blocks
        # To the end of what is there or on its way: behind a block that is just being stored there
        # may be others.
        hit = request.lookups.hits(catalog, geometry, request.keys, 0, limit, *self._hinted()).coming
        groups, positions = [], []
        held: list[list[NDArray[np.intp]]] = []
        for group in geometry.groups:
            held.append([])
            self._demand.reach(request, group.group, min(1, hit // group.block_tokens))
            first, stop = first_needed(group, 0, hit), hit // group.block_tokens
            while first < stop:  # from the tail on, which is used first
                start = max(first, stop - self._piece)
                found, rows = self._look_at(request, group.group, start, stop)
                groups.append(np.full(len(found), group.group))
                positions.append(found)
                held[-1].append(rows)
                yield stop - start
                stop = start
        if not positions:
            return _Wanted(request, np.zeros(0, np.intp), np.zeros(0, np.intp))
        of_group, at = np.concatenate(groups), np.concatenate(positions)
        starts = at * np.array([group.block_tokens for group in geometry.groups])[of_group]
        order = np.lexsort((of_group, starts))
        some = order[self._within(request, of_group[order], at[order], starts[order])]
        for rows in (
            chain.from_iterable(reversed(held)) if len(some) else ()
        ):  # or reading ahead would make room by letting just these leave
            self._touch(rows)
            yield len(rows)
        return _Wanted(request, of_group[some], at[some])

    @property
    def _piece(self) -> int:
        """How many blocks are looked at together: a block takes a part of a look."""
        return _IN_A_LOOK * max(1, self._left)

    def _hinted(self) -> tuple[Collection[BlockKey], int]:
        hints = self._hints.usable
        return hints, self._hints.changes if hints else -1

    def _look_at(
        self, request: RequestState, group: int, start: int, stop: int
    ) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return the positions of those of some blocks of a hit that are to be read ahead, and the
        rows of those that memory has, the tail first."""
        assert self._arrival is not None
        catalog, hints, tier = self._catalog, self._hints.usable, self._arrival.tier
        keys = request.keys[group][start:stop]
        rows = catalog.find_many(keys)
        states = catalog.states_of(rows, tier)
        is_wanted = (states == ABSENT) & (catalog.readable_tiers(rows) != 0)
        for at in np.flatnonzero(rows == NONE).tolist() if hints else ():
            is_wanted[at] = keys[at] in hints
        if self._gpu_loads.any:
            is_wanted &= np.frombuffer(self._gpu_loads.presences(keys), np.uint8) != READY
        return np.flatnonzero(is_wanted) + start, rows[states == READY][::-1]

    def _touch(self, rows: NDArray[np.intp]) -> None:
        """Note that memory's copies in these rows are used, of those that it still has."""
        assert self._arrival is not None
        self._arrival.touch(rows[self._catalog.states_of(rows, self._arrival.tier) == READY].tolist())

    def _within(
        self, request: RequestState, groups: NDArray[np.intp], positions: NDArray[np.intp], starts: NDArray[np.intp]
    ) -> slice:
        """Return which blocks, in the order of their prompt, a request may load: from the first on
        that the GPU has not cached. ``starts``: of each, in tokens."""
        first, most = 0, request.limits.most_load_tokens
        for group, position in zip(groups[: SHARES[Kind.PREFETCH].blocks].tolist(), positions.tolist(), strict=False):
            if not self._context.is_cached(request.keys[group][position]):
                break
            first += 1
        if most is None or first == len(starts):
            return slice(first, None)
        return slice(first, int(np.searchsorted(starts, starts[first] + most)))

    def _is_wanted(self, key: BlockKey, row: int, hints: Collection[BlockKey]) -> bool:
        """Whether a drive has a block, in this row of the catalog, or ``hints``, that neither the
        GPU nor memory has or gets."""
        catalog = self._catalog
        assert self._arrival is not None
        if self._gpu_loads.loader_of(key) is not None or self._context.is_cached(key):
            return False
        if row < 0:
            return key in hints
        return catalog.state(row, self._arrival.tier) == ABSENT and catalog.readable_tier(row) is not None

    def _plan_job(self, request_id: str, wanted: _Wanted) -> bool:
        """Plan one job of a request's first wanted blocks; False where there is no room for any."""
        assert self._arrival is not None
        picked: list[Read] = []
        is_remote, hints = self._is_remote(wanted.first), self._hints.usable
        while wanted and self._left > 0 and len(picked) < bounds.MOVES and self._is_remote(wanted.first) is is_remote:
            read = wanted.take()
            self._left -= 1
            row = self._catalog.find(read.key)
            if self._is_wanted(read.key, row, hints):
                picked.append(read)
        taken = self._take(request_id, picked)
        made: list[Read] = []
        left: list[Read] = []
        for at, (read, slot) in enumerate(zip(picked, taken.slots, strict=True)):
            if slot is not None:
                self._copies.pin_sources((read,))
                self._copies.begin_arrivals((read,), (slot,))
                made.append(read)
            elif at not in taken.refused:
                left.append(read)
        wanted.put_back(left)
        if made:
            moves, details = moves_of(made)
            record = self._transfers.add(JobKind.PROMOTE, moves, details, epoch=self._state.epoch)
            record.owners = [request_id] * len(moves)
            self._remote_jobs += [record.job.id] if is_remote else []
        return bool(made) or not left

    def _take(self, request_id: str, reads: Sequence[Read]) -> Taken:
        """Take CPU slots for blocks, within the share of what may be read ahead."""
        assert self._arrival is not None
        totals = enumerate(self._arrival.pool.total)
        most = [max(0, total // PREFETCH_DIVISOR - self._taken[size_class]) for size_class, total in totals]
        found = self._copies.take_arriving(reads, most=most, keep_dirty=True)
        taken = Counter(self._class_of(read) for read, slot in zip(reads, found.slots, strict=True) if slot is not None)
        self._ahead.setdefault(request_id, Counter()).update(taken)
        self._taken.update(taken)
        return found

    def _class_of(self, read: Read) -> int:
        return self._geometry.size_classes[group_of(read.key)]
