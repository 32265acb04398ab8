# SPDX-License-Identifier: Apache-2.0
"""Write-behind from a tier to the next: which copies that is to take, and the jobs that write them.

It works as a page cache does. A copy of the upper tier is *dirty* once the lower tier has admitted
it, until it is being written there; any other copy is *clean*. Only clean copies are evicted, and
eviction passes over dirty ones where they stand in its order. At most half of the upper tier's
slots are dirty (at least one), so that the others always serve new blocks (invariant 8): what is
admitted beyond that stays clean, and may be lost. While the lower tier takes no writes
(``blocked``), dirty copies may be evicted, too. Scheduler thread only.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import merge
from itertools import islice, repeat

from kvdisk.blocks import JobId, Slot, group_of
from kvdisk.manager.catalog import ABSENT, NONE, READY, WRITING
from kvdisk.manager.copies import Copies
from kvdisk.manager.parts import Parts
from kvdisk.manager.peer_hints import PeerHints
from kvdisk.manager.row_lists import GROWN_ROWS, RowLists
from kvdisk.manager.tiers import TierSpace
from kvdisk.messages import JobKind

MAX_DEMOTE_MOVES = 64
MAX_DEMOTE_JOBS = 4
"""Queued or out, from one tier to the next."""
MOST_WALKED = 4096
"""Copies that one call looks at for what lies before those that it is given: bounds a step."""
_TURN_BITS = 20
"""Turns of one offer, of 64: what is left numbers offers for longer than an engine lives."""


class Demotions:
    """Moves copies from one tier to the next.

    ``blocked``: the lower tier takes no writes now. Dirty copies may then be evicted for room, and
    the lower tier never gets those.
    """

    def __init__(self, parts: Parts, upper: TierSpace, lower: TierSpace, hints: PeerHints, copies: Copies) -> None:
        self._catalog = parts.catalog
        self._transfers = parts.transfers
        self._stats = parts.stats
        self._state = parts.state
        self._upper = upper
        self._lower = lower
        self._groups = parts.geometry.groups
        self._size_classes = parts.geometry.size_classes
        self._needs_all = len(parts.geometry.groups) > 1
        """Whether a part of a prompt's blocks can serve nobody."""
        self._hints = hints
        self._copies = copies
        self._dirty = RowLists(len(upper.pool.total))
        """The dirty copies by size class, in the order of ``_turns``."""
        self._turns = array("Q")
        """By row of a dirty copy: the lowest turn is written first, whatever its size class."""
        self._offers = 0
        self._jobs: list[JobId] = []
        self.blocked = False
        self._behind: set[int] = set()
        """Copies that would serve nobody below, since what they follow is not there, or has the
        only room. They stay clean until they are used."""
        self.deferred: list[set[int]] = [set() for _ in upper.pool.total]
        """By size class: copies whose eviction waits for their write, since the upper tier had room
        last. What they have below does not leave: it would be written again and again."""
        upper.lower, lower.upper = self, self

    # -- what is asked -----------------------------------------------------------------------------

    def offer(self, rows: Sequence[int], *, own: bool = False) -> None:
        """Make READY copies dirty that the lower tier admits, and neither has nor can read from a
        neighbour; no more than may be dirty.

        Called when a copy becomes READY, and each time its key's count may have risen. ``own``:
        also copies that a neighbour has; all of these leave as soon as the lower tier has them.
        """
        if self._lower.status.works:
            queued = self._make_dirty(self._admitted(self._lacking(rows, own=own)), whole=self._needs_all)
            if own:
                self._mark(queued)

    def offer_before_eviction(self, rows: Sequence[int]) -> list[int]:
        """Offer copies once more, which are about to be evicted. Return which may go: not those
        that become dirty by it, nor what these follow. One that was dirty already goes.

        Counts the copies that will be in no tier then, by the reason. ``rows``: the tail of a chain
        comes before its head.
        """
        status = self._lower.status
        if not status.works:
            return list(rows)
        lacking = self._lacking(rows)
        admitted = self._admitted(lacking)
        stay, parent_rows = set(self._make_dirty(admitted)), self._catalog.parent_rows
        self._mark(stay)
        leaving: list[int] = []
        for row in rows:
            if row in stay:
                stay.add(parent_rows[row])
            else:
                leaving.append(row)
        lost = set(lacking).intersection(leaving)
        unserved = lost.intersection(admitted)
        beyond_share = sum(map(self._is_beyond_share, unserved)) if self._lower.share is not None else 0
        self._stats.add("left_blocks.reuse", len(lost) - len(unserved))
        self._stats.add("left_blocks.share", beyond_share)
        why = "left_blocks.budget" if status.is_spent else "left_blocks.room"
        self._stats.add(why, len(unserved) - beyond_share)
        return leaving

    def _is_beyond_share(self, row: int) -> bool:
        """Whether a copy's tenant has its share of the lower tier."""
        share, tenant = self._lower.share, self._catalog.tenants[row]
        size_class = self._size_classes[group_of(self._catalog.keys[row])]
        return share is not None and tenant != 0 and share.left(size_class, tenant) <= 0

    def _lacking(self, rows: Sequence[int], *, own: bool = False) -> list[int]:
        """Return the READY copies that the lower tier lacks; unless ``own``, without those that a
        neighbour has."""
        keys, near = self._catalog.keys, self._hints.neighbours.near(self._lower.tier)
        above, below = (self._catalog.columns(space.tier).states for space in (self._upper, self._lower))
        lacking = [row for row in rows if above[row] == READY and below[row] == ABSENT]
        return [row for row in lacking if keys[row] not in near] if near and not own else lacking

    def _admitted(self, rows: Sequence[int]) -> Sequence[int]:
        """Return which copies the lower tier admits. A copy that others there follow is always
        admitted: they would serve nobody without it."""
        if not rows or self._lower.admission.admits_all:
            return rows
        keys, parents = [self._catalog.keys[row] for row in rows], list(map(self._catalog.parent, rows))
        followers, answers = self._catalog.columns(self._lower.tier).first_child, self._lower.admits(keys, parents)
        return [row for row, is_let_in in zip(rows, answers, strict=True) if is_let_in or followers[row] != NONE]

    def _make_dirty(self, rows: Sequence[int], *, whole: bool = False) -> list[int]:
        """Make clean copies dirty, as many as may be; return those. ``whole``: none where all could
        be dirty, but not now: parts of prompts would take the place of whole ones."""
        if all(self.count(each) >= self.limit(each) for each in range(len(self._dirty.counts))):
            return []
        rows = self._without_gaps(rows)
        before = set(self._dirty.held(rows))
        by_class = self._upper.by_class(self._take_turns([row for row in rows if row not in before]))
        if whole and any(
            self.limit(each) - self.count(each) < len(alike) <= self.limit(each) for each, alike in by_class
        ):
            return []
        queued: list[int] = []
        for size_class, alike in by_class:
            fitting = alike[: max(0, self.limit(size_class) - self.count(size_class))]
            self._dirty.append(fitting, repeat(size_class))
            queued += fitting
        return queued

    def _without_gaps(self, rows: Sequence[int]) -> Sequence[int]:
        """Return the rows without those that would serve nobody below: they follow one that found
        no room there, or is in neither tier. A row's parent is put before it where that has left
        the lower tier and is in the upper one, within ``MOST_WALKED``. ``rows``: each chain in
        order, from its tail or its head."""
        above, behind = self._catalog.columns(self._upper.tier).states, self._behind
        found: dict[int, None] = {}
        left = MOST_WALKED
        for row in rows:
            path, last = [row], row
            while (last := self._missing_parent(last)) != NONE and last not in found and above[last] == READY:
                path.append(last)
                left -= 1
                if left < 0:
                    path, last = [row], NONE
                    break
            if last != NONE and last not in found and above[last] != WRITING:  # what is written will be offered
                behind.add(path[-1])
            for each in reversed(path):
                if each in behind or self._catalog.parent_rows[each] in behind:
                    behind.add(each)
                else:
                    found[each] = None
        return list(found)

    def _missing_parent(self, row: int) -> int:
        """Return the parent of a row where the lower tier lacks it, and does not get it; else
        NONE. In a group that reads less than all before a block no parent is missed."""
        catalog, parent = self._catalog, self._catalog.parent_rows[row]
        if parent == NONE or parent in self._dirty or catalog.columns(self._lower.tier).states[parent] != ABSENT:
            return NONE
        is_whole = self._groups[group_of(catalog.keys[row])].reads_all
        return parent if is_whole and catalog.keys[parent] not in self._hints.known else NONE

    def _take_turns(self, rows: Sequence[int]) -> Sequence[int]:
        """Give rows that are offered together their turns, and return them in that order. The
        groups of a prompt take turns, because a hit needs them all."""
        lacking = max(rows, default=-1) + 1 - len(self._turns)
        if lacking > 0:
            self._turns.frombytes(bytes((lacking + GROWN_ROWS) * self._turns.itemsize))
        self._offers += 1
        first, turns = self._offers << _TURN_BITS, self._turns
        for alike in self._by_group(rows):
            for at, row in enumerate(alike):
                turns[row] = first + (at << _TURN_BITS) // len(alike)
        return sorted(rows, key=turns.__getitem__)

    def _by_group(self, rows: Sequence[int]) -> Iterable[Sequence[int]]:
        found: dict[int, list[int]] = {}
        for row in rows:
            found.setdefault(group_of(self._catalog.keys[row]), []).append(row)
        return found.values()

    # -- what is dirty -----------------------------------------------------------------------------

    def is_dirty(self, row: int) -> bool:
        """Return whether a copy is dirty."""
        return row in self._dirty

    def clean_followers(self, rows: Sequence[int]) -> list[int]:
        """Return which copies of the lower tier may leave for what is dirty. One that a dirty copy
        follows stays, and that one becomes clean, with all dirty ones behind it: they would serve
        nobody there.

        ``rows``: the tail of a chain comes before its head.
        """
        if not self.total:
            return list(rows)
        staying, leaving, parent_rows = set[int](), list[int](), self._catalog.parent_rows
        for row in rows:
            waiting = self._waiting_behind(row)
            if waiting:
                self._dirty.remove(waiting)
                self._behind.update(waiting)
            if waiting or row in staying:
                staying.add(parent_rows[row])
            else:
                leaving.append(row)
        return leaving

    def _waiting_behind(self, row: int) -> list[int]:
        """Return the dirty copies that follow a row, directly or behind each other; none where a
        group reads less than all before a block: there the later block is worth more."""
        found: list[int] = []
        if self._groups[group_of(self._catalog.keys[row])].reads_all:
            columns, looked_at = self._catalog.columns(self._upper.tier), [row]
            while looked_at:
                child = columns.first_child[looked_at.pop()]
                while child != NONE:
                    if child in self._dirty:
                        found.append(child)
                        looked_at.append(child)
                    child = columns.next_child[child]
        return found

    def forget(self, rows: Sequence[int]) -> None:
        """Copies have ended in the upper tier."""
        self._dirty.remove(rows)
        self.used(rows)

    def used(self, rows: Sequence[int]) -> None:
        """Copies were used in the upper tier: they do not leave it soon, and may become dirty
        again."""
        if self._behind:
            self._behind.difference_update(rows)
        for marked in self.deferred:
            if marked:
                marked.difference_update(rows)

    def _mark(self, rows: Collection[int]) -> None:
        for size_class, alike in self._upper.by_class(list(rows)):
            self.deferred[size_class].update(alike)

    def count(self, size_class: int) -> int:
        """Return how many copies of a size class are dirty."""
        return self._dirty.counts[size_class]

    def limit(self, size_class: int) -> int:
        """Return how many copies of a size class may be dirty."""
        return max(1, self._upper.pool.total[size_class] // 2)

    @property
    def total(self) -> int:
        """How many copies are dirty."""
        return sum(self._dirty.counts)

    # -- steps -------------------------------------------------------------------------------------

    def plan(self, now: float) -> None:
        """Make room in the lower tier for what is dirty; plan jobs for what finds some."""
        lower = self._lower
        if not lower.status.works:
            self._dirty = RowLists(len(self._dirty.counts))
            return
        self._jobs = [job_id for job_id in self._jobs if job_id in self._transfers]
        self.blocked = not self._affordable_bytes(now)
        lower.make_room(now, list(self._dirty.counts) if lower.share is None else self._within_shares(now))
        has_room = {size_class for size_class, count in enumerate(self._dirty.counts) if count}
        while has_room and len(self._jobs) < MAX_DEMOTE_JOBS and (affordable := self._affordable_bytes(now)):
            wanted = self._next_rows(has_room, affordable)
            if not any(wanted.values()):
                return  # what is written next is what has waited longest
            has_room -= self._plan_job(wanted)

    def _within_shares(self, now: float) -> list[int]:
        """Make way in the lower tier for what this step may write; return how many copies that
        are, by size class. What finds no room in its tenant's share becomes clean."""
        if not self._affordable_bytes(now):
            return [0] * len(self._dirty.counts)
        wanted: list[int] = []
        most = MAX_DEMOTE_MOVES * (MAX_DEMOTE_JOBS - len(self._jobs))
        for size_class in range(len(self._dirty.counts)):
            rows = list(islice(self._dirty.walk(size_class), most))
            tenants = [self._catalog.tenants[row] for row in rows]
            let_in = self._lower.fit_to_share([size_class] * len(rows), tenants, in_order=False)
            if len(let_in) < len(rows):
                beyond = set(rows).difference([rows[at] for at in let_in])
                self._dirty.remove(beyond)
                self._behind.update(beyond)
            wanted.append(sum(row in self._dirty for row in rows))  # another may have gone, whose parent was to leave
        return wanted

    def _affordable_bytes(self, now: float) -> float:
        """Return how many bytes may go to the lower tier now, 0 where they are less than a block.

        A limit of demotions lowers this, and learns in ``_charge`` what was planned. While this is
        0 dirty copies may be evicted, an idle engine sleeps until it has something else to do, and
        the remote store does not wait for what is dirty.
        """
        return self._lower.affordable_bytes if self._lower.update_writable(now) else 0

    def _charge(self, byte_count: int) -> None:
        """So many bytes were planned to be written. The lower tier keeps account of its own."""

    def _next_rows(self, classes: Collection[int], left: float) -> dict[int, list[int]]:
        """Return by size class the dirty copies of these classes whose turn is next: as many as one
        job takes, of ``left`` bytes at most."""
        turns = self._turns
        wanted: dict[int, list[int]] = {size_class: [] for size_class in classes}
        waiting = merge(
            *(
                zip(map(turns.__getitem__, self._dirty.walk(each)), self._dirty.walk(each), repeat(each))
                for each in classes
            )
        )
        for _, row, size_class in islice(waiting, MAX_DEMOTE_MOVES):
            left -= self._lower.bytes_of(size_class)
            if left < 0:
                break
            wanted[size_class].append(row)
        return wanted

    def _plan_job(self, wanted: Mapping[int, Sequence[int]]) -> set[int]:
        """Plan one job that writes dirty copies, given by size class. Return the classes that are
        done: there is no room for all of theirs, or none is dirty any more."""
        rows: list[int] = []
        slots: list[Slot] = []
        ended: set[int] = set()
        for size_class, alike in wanted.items():
            found = self._lower.allocate(size_class, len(alike)) if alike else []
            rows += alike[: len(found)]
            slots += found
            self._charge(len(found) * self._lower.bytes_of(size_class))
            if len(found) < len(alike) or len(found) == self.count(size_class):
                ended.add(size_class)
        if not rows:
            return ended
        self._dirty.remove(rows)
        moves, details = self._copies.begin_moves(rows, self._upper.tier, self._lower.tier, slots)
        record = self._transfers.add(JobKind.DEMOTE, moves, details, epoch=self._state.epoch)
        self._jobs.append(record.job.id)
        return ended

    def has_work(self, now: float, *, silent: bool) -> bool:
        """Return whether dirty copies can be written by further steps. False lets an idle engine
        sleep: they stay in the upper tier. ``silent``: commits were silent for long, and none is
        awaited."""
        return bool(self._affordable_bytes(now)) and any(
            count and self._lower.may_get_room(size_class, silent=silent)
            for size_class, count in enumerate(self._dirty.counts)
        )
