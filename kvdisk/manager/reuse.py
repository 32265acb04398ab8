# SPDX-License-Identifier: Apache-2.0
"""How often and how soon blocks are wanted again: counted for each block, learnt for classes of
them. Scheduler thread only.

Eviction and admission of all tiers go by it (decision 31). Time is counted in blocks that requests
came to; it passes between requests, not within one: an age goes up to the last time at which a
request came. What is learnt is weighed: a prompt by the root
of its length, so that neither a few long ones decide, nor many short ones.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvdisk.blocks import BlockKey, group_of
from kvdisk.manager import bounds
from kvdisk.manager.catalog import key_hash

USES: Final = 65
"""Uses that are told apart."""
_ORIGINS: Final = 5
"""The origins of reuse, by what first brought a block: a prompt that began anew (0) or branched off
(1), the second turn of a conversation (2), or a later one (3). States have their own (4)."""
_BRANCH: Final = 1
_LATER_TURN: Final = 3
STATES: Final = 4
"""The origin of recurrent states: a class for each number of uses, of their own."""
_TOP_LEVEL: Final = 5
_LEVEL_OF: Final = bytes(min(max(0, uses - 1).bit_length(), _TOP_LEVEL) for uses in range(USES + 1))
"""By number of uses: its level, the rounded-up logarithm to base 2."""
CLASSES: Final = (max(_LEVEL_OF) + 1) * _ORIGINS
_CLASS_OF: Final = [_LEVEL_OF[mark // _ORIGINS] * _ORIGINS + mark % _ORIGINS for mark in range((USES + 1) * _ORIGINS)]
_ORIGIN_BEHIND: Final = bytes(
    min(max(origin, _BRANCH) + 1, _LATER_TURN) if uses == 1 else _BRANCH
    for uses in range(USES + 1)
    for origin in range(_ORIGINS)
)
"""By a block's uses and origin: the origin of a new block that follows it."""
NEW_STATE: Final = _CLASS_OF[_ORIGINS + STATES]
"""The class of a state that nobody has wanted since it came."""
_BUCKETS: Final = 33
"""Buckets of ages: an age is in the bucket of its bit length."""
_EDGES: Final = np.array([0.0] + [2.0**bucket for bucket in range(_BUCKETS)])
_WIDTHS: Final = np.diff(_EDGES)
_BITS: Final = 0xFFFFFFFF
_LEARNT_EVERY: Final = (512, 1024)
"""Blocks, at first and at most: a sixteenth of those that were counted."""
_PRIOR: Final = 5.0
"""A class's own counts weigh as much as all classes' together once prompts of it of this weight
were at risk."""
_FIRST_CHANCE: Final = 0.1
"""The chance of reuse while an age doubles, before anything is learnt: the order is that of last
use."""
_FIRST_WEIGHT: Final = 5.0
_LEAST_LEFT: Final = 0.1
"""Least share of blocks that have come to an age: with fewer the age counts like the one before."""
_EVIDENCE_CAP: Final = 0.006
"""Cap of one visit's weight as evidence of a scan, as a share of the tier's slots."""
_RARER: Final = 10.0
"""How many times as rarely new blocks come back while a scan runs."""
_SCAN_SCORE: Final = 7.0
"""The scan score from which on less is expected of new blocks."""
_SCAN_SCORE_CAP: Final = 11.0
"""The highest scan score, so that a few reuses end a scan."""

_SPREAD: Final = 0x9E3779B1
_NOWHERE: Final = -1
_NEW: Final = -1
"""The age of a key that was not known."""
_MANY: Final = 64
"""Keys from which on arrays save more than they cost."""
_CLASSES_OF: Final = np.array(_CLASS_OF)
_ORIGINS_BEHIND: Final = np.frombuffer(_ORIGIN_BEHIND, np.uint8)

_Floats = NDArray[np.float64]


class Visit(NamedTuple):
    """A request came to its blocks of a group. ``before``: the history's time as the request came.
    ``now``: the time of the visit, for all of its blocks. ``blocks``: how many it has. ``weight``:
    of each of them. ``most``: uses that they have then at most."""

    before: int
    now: int
    blocks: int
    weight: float
    most: int = USES


class ReuseHistory:
    """Remembers keys: how many requests wanted each, and when last. Learns from that how soon, if
    at all, blocks of a class are wanted again.

    The class of a block is made of its uses, in doublings, and of its origin: what the prompt was
    that first brought it. Nothing before the block was known; or it branches off from what several
    requests had wanted; or it extends the prompt of one: the second turn of a conversation, or a
    later one. Of a prompt that came no block has more uses than the one before it.
    Recurrent states are classes of their own: a request wants one of its prompt, and the next one
    mostly takes its place.

    A key takes 10 bytes of a place, and has two places: of two that are taken, the one that was
    wanted longest ago gives way; but what was wanted since the same request came moves to its own
    other place. About once in 2**30 times a key is taken for another: that decides
    nothing but who is stored and who is evicted. ``now``: blocks wanted so far. ``state_groups``:
    the KV-cache groups that keep recurrent states.
    """

    def __init__(self, state_groups: Collection[int] = ()) -> None:
        self.state_groups = state_groups
        self.now = 0
        self.came = 0
        """``now`` as the last request came: the age of anything is counted up to it."""
        self._places = bounds.LEAST_PLACES
        self._evidence_blocks = _EVIDENCE_CAP * bounds.LEAST_PLACES / 8
        self.clear()
        self._entered = [0.0] * CLASSES
        """By class: how much came to be in it, or was used in it: of a prompt the root of its
        length."""
        self._reused = [0.0] * (CLASSES * _BUCKETS)
        """By class and bucket: how much of this was used again at that age."""
        self._restored = 0
        """``now`` after a restart: nobody knows how old a block was that came before."""
        self._prompt_blocks = 1.0
        """The recent mean of blocks a request. Nothing leaves for less."""
        self._scan_score = [0.0] * _ORIGINS
        """By origin: the evidence that its new blocks come back more rarely lately. It is the sum
        of logarithms of likelihood ratios since the last time that it was 0."""
        self._past: list[tuple[int, _Floats, _Floats]] = [(0, np.zeros(CLASSES), np.zeros(CLASSES * _BUCKETS))]
        """Earlier values of ``now`` and of both counts, the earliest first."""
        self._undrawn: tuple[_Floats, _Floats, float] | None = None
        """Of what is learnt and not drawn yet, by class and bucket: how much came to it, and how
        much of this was wanted; and the mean of blocks a request."""
        self._learn()
        self._draw()

    def reserve(self, slots: int) -> None:
        """Remember enough for a tier of so many slots: eight keys a slot, within bounds. Forgets
        all keys; for start only."""
        self._places = max(self._places, min(bounds.PLACES, 1 << (8 * slots - 1).bit_length()))
        self._evidence_blocks = _EVIDENCE_CAP * slots
        self.clear()

    def clear(self) -> None:
        """Forget all keys: their KV is gone. What was learnt of classes holds."""
        self._tags, self._times = array("I", [0]) * self._places, array("I", [0]) * self._places
        self._marks = array("H", [0]) * self._places
        """By place: the key's uses times ``_ORIGINS``, plus its origin."""

    # -- keys ----------------------------------------------------------------------------------

    def begin(self, start: int, stop: int, *, is_prompt: bool = True, before: int | None = None) -> Visit:
        """A request comes to these blocks of its prompt, all of them at once, that are counted in
        one or more parts: how old a block is, of the prompt or another, does not depend on how long
        the prompt is. ``before``: that of the request's first visit; None: this is the first."""
        before = self.now if before is None else before
        self.came = max(self.came, before)
        self.now += stop - start
        visit = Visit(before, self.now, stop - start, max(1, stop) ** -0.5)
        if not start and is_prompt:
            self._prompt_blocks += (stop - self._prompt_blocks) / 64
        return visit

    def go_on(self, visit: Visit, count: int) -> Visit:
        """A visit has more blocks than was known when it began: return it with these, which are to
        be counted as its next part."""
        self.now += count
        self._prompt_blocks += count / 64
        so_far = visit.blocks + count
        return Visit(visit.before, visit.now + count, so_far, so_far**-0.5)

    def origin_behind(self, key: BlockKey) -> int:
        """Return the origin of a new block that follows this one, and comes with another visit."""
        place, is_known = self._find(key_hash(key))
        return _ORIGIN_BEHIND[self._marks[place]] if is_known else 0

    def count(self, keys: Sequence[BlockKey], start: int, stop: int, origin: int, visit: Visit | None = None) -> int:
        """A request came to these blocks of its prompt, from ``start`` on, for the first time. All
        of them are known then, as far as there are places.

        ``keys``: of the prompt, at least up to ``stop``. ``origin``: as returned for those before
        ``start``; 0 at first; of a state, which comes alone, ``STATES``. ``visit``: what these
        blocks are a part of; None: they are all. Each request counts once: the caller sees to that.
        """
        if visit is None:
            visit = self.begin(start, stop, is_prompt=origin != STATES)
        hashes = map(key_hash, keys[start:stop])
        if stop - start >= _MANY:
            counted = self._count_many(np.fromiter(hashes, np.uint64, stop - start), origin, visit)
        else:
            counted = self._count_few(list(hashes), origin, visit)
        least, origin, new, again = counted
        for number, (came, came_again) in enumerate(zip(new, again, strict=True)):
            if came or came_again:
                part = (stop - start) / visit.blocks
                self._scan_score[number] = self._scan_score_of(number, came, came_again, part)
        self._raise(keys, start, least)
        if self.now >= self._learns_at:
            self._learn()
        return origin

    def _scan_score_of(self, number: int, came: int, came_again: int, part: float) -> float:
        """Return the scan score of an origin after a part of a visit, by Page's test (CUSUM): it
        rises while new blocks come back more rarely than was learnt. The blocks of one visit come
        together, so a visit is one observation."""
        often = self._returned[number] / (1.0 + self._returned[number])
        if not 0.0 < often < 1.0:
            return self._scan_score[number]
        rarely, again = often / _RARER, came_again / (came + came_again)
        evidence = again * math.log(rarely / often) + (1.0 - again) * math.log((1.0 - rarely) / (1.0 - often))
        weight = part * min(1.0, (came + came_again) / self._evidence_blocks)
        return min(_SCAN_SCORE_CAP, max(0.0, self._scan_score[number] + weight * evidence))

    def _count_few(self, hashes: list[int], origin: int, visit: Visit) -> tuple[int, int, list[int], list[int]]:
        """Count keys that follow each other. Return the uses of the first, the origin of what comes
        behind them, and by origin how many came for the first and for the second time."""
        marks, entered, reused = self._marks, self._entered, self._reused
        weight, known_ages = visit.weight, visit.before - self._restored
        places, ages, origins, origin = self._find_or_insert(hashes, origin, visit)
        new, again = [0] * _ORIGINS, [0] * _ORIGINS
        least = 0
        for place, age, own_origin in zip(reversed(places), reversed(ages), reversed(origins), strict=True):
            if age == _NEW:
                uses = 1
                new[own_origin] += 1
            else:
                mark = marks[place] if place != _NOWHERE else _ORIGINS + own_origin
                if age < known_ages:
                    reused[_CLASS_OF[mark] * _BUCKETS + age.bit_length()] += weight
                if mark < 2 * _ORIGINS:
                    again[mark % _ORIGINS] += 1
                uses, own_origin = divmod(mark, _ORIGINS)  # noqa: PLW2901
                uses += uses < visit.most
            least = max(least, uses)
            mark = least * _ORIGINS + own_origin
            entered[_CLASS_OF[mark]] += weight
            if place != _NOWHERE:
                marks[place] = mark
        return least, origin, new, again

    def _count_many(
        self, hashes: NDArray[np.uint64], origin: int, visit: Visit
    ) -> tuple[int, int, list[int], list[int]]:
        """Do what ``_count_few`` does, by arrays."""
        weight, known_ages = visit.weight, visit.before - self._restored
        places, ages, origins, origin = self._find_or_insert_many(hashes, origin, visit)
        marks, is_known, has_place = np.frombuffer(self._marks, np.uint16), ages != _NEW, places != _NOWHERE
        of_key = np.where(has_place & is_known, marks[places], _ORIGINS + origins).astype(np.intp)
        is_timed = is_known & (ages < known_ages)
        # bit_length: exact for ages below 2**53.
        buckets = _CLASSES_OF[of_key] * _BUCKETS + np.frexp(ages.astype(np.float64))[1]
        _add_weight(self._reused, buckets[is_timed][::-1], weight)
        new = np.bincount(origins[~is_known], minlength=_ORIGINS).tolist()
        again = np.bincount(of_key[is_known & (of_key < 2 * _ORIGINS)] % _ORIGINS, minlength=_ORIGINS).tolist()
        uses, own_origins = np.divmod(of_key, _ORIGINS)
        uses = np.where(is_known, np.maximum(uses, np.minimum(uses + 1, visit.most)), 1)
        least = np.maximum.accumulate(uses[::-1])[::-1]
        after = least * _ORIGINS + own_origins
        _add_weight(self._entered, _CLASSES_OF[after][::-1], weight)
        marks[places[has_place]] = after[has_place]
        return int(least[0]), origin, new, again

    def _find_or_insert(
        self, hashes: list[int], origin: int, visit: Visit
    ) -> tuple[list[int], list[int], list[int], int]:
        """Find or make the place of each key of a chain, and note the time of the visit there.
        Return by key its place, its age (``_NEW``: the key is new) and its origin; and the origin
        of a new block that follows them."""
        tags, times, marks, mask = self._tags, self._times, self._marks, self._places - 1
        time, now, since = visit.now & _BITS, self.now, self.now - visit.before
        places: list[int] = []
        ages: list[int] = []
        origins: list[int] = []
        lacking: list[int] = []
        for at, hashed in enumerate(hashes):
            place = hashed & mask
            if tags[place] != hashed >> 32 | 1:
                place = self._other(place, hashed >> 32 | 1)
            if tags[place] == hashed >> 32 | 1:
                mark = marks[place]
                ages.append(max(0, (now - times[place] & _BITS) - since))
                times[place] = time
                origins.append(mark % _ORIGINS)
                origin = _ORIGIN_BEHIND[mark]
            else:
                lacking.append(at)
                ages.append(_NEW)
                origins.append(origin)
            places.append(place)
        moved = False
        for at in lacking:  # once the others are held: none of them gives way to these
            tag = hashes[at] >> 32 | 1
            written = self._enter(hashes[at] & mask, tag, time, _ORIGINS + origins[at], since)
            places[at] = written[0][0]
            moved |= len(written) > 1
        if moved:
            found = map(self._find, hashes)
            places = [place if is_known else _NOWHERE for place, is_known in found]
        return places, ages, origins, origin

    def _find_or_insert_many(
        self, hashes: NDArray[np.uint64], origin: int, visit: Visit
    ) -> tuple[NDArray[np.intp], NDArray[np.int64], NDArray[np.intp], int]:
        """Do what ``_find_or_insert`` does, by arrays."""
        tags, times, marks = (np.frombuffer(each, each.typecode) for each in (self._tags, self._times, self._marks))
        time, now, since, mask = visit.now & _BITS, self.now, self.now - visit.before, self._places - 1
        firsts = (hashes & np.uint64(mask)).astype(np.intp)
        upper = (hashes >> np.uint64(32)).astype(np.int64) | 1
        others = firsts ^ (upper * _SPREAD >> 16 & mask | 1)
        places = np.where(tags[firsts] == upper, firsts, others)
        is_known = tags[places] == upper
        held = places[is_known]
        ages = np.full(len(hashes), _NEW, np.int64)
        ages[is_known] = np.maximum(0, (now - times[held].astype(np.int64) & _BITS) - since)
        times[held] = time
        # What is not known has the origin that the last one before it leaves.
        last = np.maximum.accumulate(np.where(is_known, np.arange(len(hashes)), -1))
        own = np.zeros(len(hashes), np.intp)
        own[is_known] = marks[held]
        origins = np.where(is_known, own % _ORIGINS, np.where(last < 0, origin, _ORIGINS_BEHIND[own[last]])).astype(
            np.intp
        )
        origin = origin if last[-1] < 0 else _ORIGIN_BEHIND[own[last[-1]]]
        # Once the others are held: none of them gives way to these.
        new = np.flatnonzero(~is_known)
        if not len(new):
            return places, ages, origins, origin
        entered = self._enter_many(firsts[new], others[new], upper[new], time, _ORIGINS + origins[new], since)
        if entered is not None:
            places[new] = entered
        else:  # some have moved
            places = np.where(tags[firsts] == upper, firsts, others)
            places[tags[places] != upper] = _NOWHERE
        return places, ages, origins, origin

    def _enter_many(
        self,
        firsts: NDArray[np.intp],
        others: NDArray[np.intp],
        upper: NDArray[np.int64],
        time: int,
        marks: NDArray[np.intp],
        since: int,
    ) -> NDArray[np.intp] | None:
        """Do what ``_enter`` does for each of these keys in turn. ``firsts``, ``others``: the two
        places of each; ``upper``: its tag. Return which it took; None: others have moved.

        Keys that may take a free place or an old key's, and share neither place with others of
        these, are entered at once: in which order does not matter.
        """
        tags, times = np.frombuffer(self._tags, np.uint32), np.frombuffer(self._times, np.uint32)
        both = np.stack((firsts, others))
        is_taken, ages = tags[both] != 0, self.now - times[both].astype(np.int64) & _BITS
        takes_other = is_taken[0] & (~is_taken[1] | (ages[1] > ages[0]))
        places = np.where(takes_other, others, firsts)
        are_simple = ~(is_taken & (ages < since))[takes_other.astype(np.intp), np.arange(len(places))]
        in_order = np.sort(both, axis=None)
        shared = in_order[1:][in_order[1:] == in_order[:-1]]
        if len(shared):
            are_simple &= ~np.isin(both, shared).any(0)
        rest, moved = np.flatnonzero(~are_simple), False
        written: list[tuple[int, int, int, int]] = []
        for at in rest.tolist():
            own = self._enter(int(firsts[at]), int(upper[at]), time, int(marks[at]), since)
            places[at] = own[0][0]
            moved |= len(own) > 1
            written += own
        if moved and np.isin(both[:, are_simple], [each[0] for each in written]).any():
            for place, tag, wanted, mark in reversed(written):
                self._tags[place], self._times[place], self._marks[place] = tag, wanted, mark
            for first, tag, mark in zip(firsts.tolist(), upper.tolist(), marks.tolist(), strict=True):
                self._enter(first, tag, time, mark, since)
            return None
        taken = places[are_simple]
        tags[taken], times[taken] = upper[are_simple], time
        np.frombuffer(self._marks, np.uint16)[taken] = marks[are_simple]
        return None if moved else places

    def _enter(self, place: int, tag: int, time: int, mark: int, since: int) -> list[tuple[int, int, int, int]]:
        """Write a key that is not known to one of its two places. Return each place that was
        written to, that one first, with the tag, time and mark that were there.

        It takes one where none is, or that of the older. That one is forgotten, unless it was
        wanted ``since`` as many blocks, too: then it moves to its own other place, and so on.
        """
        tags, times, marks, now = self._tags, self._times, self._marks, self.now
        other = self._other(place, tag)
        if tags[place] and (not tags[other] or (now - times[other] & _BITS) > (now - times[place] & _BITS)):
            place = other
        written: list[tuple[int, int, int, int]] = []
        for _ in range(bounds.PLACES_MOVED):
            is_held = tags[place] and (now - times[place] & _BITS) < since
            written.append((place, tags[place], times[place], marks[place]))
            tags[place], times[place], marks[place] = tag, time, mark
            if not is_held:
                break
            _, tag, time, mark = written[-1]
            place = self._other(place, tag)
        return written

    def _other(self, place: int, tag: int) -> int:
        """Return the other place of what is, or might be, at a place."""
        return place ^ (tag * _SPREAD >> 16 & self._places - 1 | 1)

    def _raise(self, keys: Sequence[BlockKey], stop: int, least: int) -> None:
        """Let blocks before ``stop`` have at least so many uses: some were forgotten, and came back
        before those behind them were counted."""
        for at in range(stop - 1, -1, -1):
            place, is_known = self._find(key_hash(keys[at]))
            if is_known:
                uses, origin = divmod(self._marks[place], _ORIGINS)
                if uses >= least:
                    break
                self._marks[place] = least * _ORIGINS + origin

    def _find(self, hashed: int) -> tuple[int, bool]:
        """Return the place of a key's number, and whether it is there."""
        tags, tag, place = self._tags, hashed >> 32 | 1, hashed & self._places - 1
        if tags[place] == tag:
            return place, True
        place = self._other(place, tag)
        return place, tags[place] == tag

    def classes_of(self, keys: Iterable[BlockKey]) -> list[int]:
        """Return the class of each key; the lowest of one that is not known."""
        tags, marks, mask, found = self._tags, self._marks, self._places - 1, []
        for hashed in map(key_hash, keys):
            place, is_known = hashed & mask, True
            if tags[place] != hashed >> 32 | 1:
                place, is_known = self._find(hashed)
            found.append(_CLASS_OF[marks[place]] if is_known else 0)
        return found

    def last_known(self, keys: Sequence[BlockKey]) -> BlockKey | None:
        """Return the last of some keys that is known."""
        return next((key for key in reversed(keys) if self._find(key_hash(key))[1]), None)

    def nearest_known(self, keys: Sequence[BlockKey], parents: Sequence[BlockKey | None]) -> Sequence[BlockKey]:
        """Return each key that is known. For another return the nearest known key before it in its
        chain, else the nearest behind it: the same requests wanted that. ``keys``: each chain in
        order, from its tail or its head. ``parents``: of each."""
        stands = {key: key for key in keys if self._find(key_hash(key))[1]}
        if len(stands) == len(keys):
            return keys
        before = {parent for parent in parents if parent is not None}.difference(stands)
        stands |= {parent: parent for parent in before if self._find(key_hash(parent))[1]}
        pairs = [(key, parent) for key, parent in zip(keys, parents, strict=True) if parent is not None]
        for key, parent in (*pairs, *reversed(pairs)):
            if key not in stands and parent in stands:
                stands[key] = stands[parent]
        for key, parent in (*reversed(pairs), *pairs):
            if key in stands:
                stands.setdefault(parent, stands[key])
        return [stands.get(key, key) for key in keys]

    def known(self, key: BlockKey) -> tuple[int, int, int]:
        """Return a key's uses, its class and its age; of one not known 0, the lowest, and as old as
        can be."""
        place, is_known = self._find(key_hash(key))
        if not is_known:
            return 0, 0, min(self.now, _BITS)
        mark = self._marks[place]
        return mark // _ORIGINS, _CLASS_OF[mark], max(0, (self.now - self._times[place] & _BITS) - self.now + self.came)

    def restore(self, keys: Sequence[BlockKey], order: NDArray[np.intp], uses: NDArray[np.uint32]) -> NDArray[np.uint8]:
        """Remember keys of before a restart, as far as there are places; return the class of each.

        ``order``: the places in ``keys`` of all of them, the one used last at the end. ``uses``,
        and what is returned, are in this order.
        """
        hashes = np.fromiter(map(key_hash, keys), np.uint64, len(keys))[order]
        upper = (hashes >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
        marks = (np.minimum(uses, USES - 1).astype(np.uint16) + np.uint16(1)) * np.uint16(_ORIGINS)
        if self.state_groups:
            are_states = (STATES * (group_of(key) in self.state_groups) for key in keys)
            marks += np.fromiter(are_states, np.uint16, len(keys))[order]
        tags, times = (np.frombuffer(each, np.uint32) for each in (self._tags, self._times))
        left, mask = np.arange(len(keys), dtype=np.uint64), np.uint64(self._places - 1)
        hops = upper.astype(np.uint64) * np.uint64(_SPREAD) >> np.uint64(16) & mask | np.uint64(1)  # as in _other
        for places in (hashes & mask, hashes & mask ^ hops):
            able = left[tags[places[left]] == 0]  # of several with one place the last has it
            tags[places[able]], times[places[able]] = upper[able], able + np.uint64(self.now + 1)
            np.frombuffer(self._marks, np.uint16)[places[able]] = marks[able]
            left = left[tags[places[left]] != upper[left]]
        self._restored = self.now = self.came = self.now + len(keys)
        classes: NDArray[np.uint8] = np.array(_CLASS_OF, np.uint8)[marks]
        return classes

    # -- classes -------------------------------------------------------------------------------

    def rate(self, number: int, age: int) -> float:
        """Return how many hits a copy of a class and age brings for each block that requests come
        to while it is kept, if it is kept for as long as pays best."""
        if self._undrawn is not None:
            self._draw()
        at = number * _BUCKETS + min(age.bit_length(), _BUCKETS - 1)
        return self._rates[at] + self._slopes[at] * age

    def gain(self, number: int, age: int, rate: float) -> float:
        """Return how many more hits are to be expected of a copy of a class and age, while it is
        kept, than of one that brings ``rate``.

        Of new blocks what was learnt holds only as far as they still come back as often: a scan is
        over before the ages of its blocks tell.
        """
        if self._undrawn is not None:
            self._draw()
        bucket, still = age.bit_length(), 1.0
        if number < _ORIGINS and self._scan_score[number] > _SCAN_SCORE:
            still = math.exp(_SCAN_SCORE - self._scan_score[number])
        gains = (still * self._hits[number, bucket:] - rate * self._kept[number, bucket:]).cumsum()
        return float(gains.max() / self._left[number, bucket])

    def _entered_by(self, ends: _Floats) -> _Floats:
        """Return by time, and by class, how many had entered it by then: on a line between the
        counts that are kept."""
        times = np.array([time for time, _, _ in self._past] + [self.now + 1], np.float64)
        counts = np.array([past for _, past, _ in self._past] + [self._entered], np.float64)
        after = np.searchsorted(times, ends, "right").clip(1, len(times) - 1)
        part = ((ends - times[after - 1]) / np.maximum(times[after] - times[after - 1], 1.0)).clip(0.0, 1.0)
        entered: _Floats = counts[after - 1] + (counts[after] - counts[after - 1]) * part[..., None]
        return entered

    def _learn(self) -> None:
        """Take what has been counted so far as what the chances of classes are learnt from
        (``_draw``)."""
        now, memory = self.now, 8 * self._places
        entered, reused = np.array(self._entered, np.float64), np.array(self._reused, np.float64)
        by_edge, by_memory = self._entered_by(np.stack((now - _EDGES, now - _EDGES - memory)))
        come_to = (by_edge - by_memory).T
        risk = (come_to[:, :-1] + come_to[:, 1:]) / 2
        old = max(
            (past for past in self._past if past[0] <= now - memory), default=self._past[0], key=lambda past: past[0]
        )
        wanted = (reused - old[2]).reshape(CLASSES, _BUCKETS)
        self._returned = (wanted[:_ORIGINS].sum(1) / np.maximum(come_to[:_ORIGINS, 0], 1.0)).tolist()
        self._undrawn = (risk, wanted, self._prompt_blocks)
        self._learns_at = now + min(max(_LEARNT_EVERY[0], now // 16), _LEARNT_EVERY[1])
        self._past.append((now, entered, reused))
        if len(self._past) > bounds.COUNTS:
            del self._past[1 : bounds.COUNTS // 2 : 2]

    def _draw(self) -> None:
        """Draw the curves of what was learnt last. Only once somebody asks: of a prompt with many
        groups each is counted, and learnt from, before that.

        Of what came to be in a class at least an age ago, and was not wanted before that age, how
        much was wanted at it (Kaplan and Meier's estimate): what came lately does not count as
        never wanted.
        """
        assert self._undrawn is not None
        (risk, wanted, prompt_blocks), self._undrawn = self._undrawn, None
        widths = _WIDTHS.copy()
        widths[0] = prompt_blocks  # what the next request wants is kept for as long as that comes
        chance, all_left, left = _FIRST_CHANCE, 1.0, np.ones(CLASSES)
        owns, lefts = np.empty((_BUCKETS, CLASSES)), np.empty((_BUCKETS, CLASSES))
        # By bucket: one row for each step of the loop.
        wanted, risk = np.ascontiguousarray(wanted.T), np.ascontiguousarray(risk.T)
        for bucket, (at_risk, came) in enumerate(zip(risk.sum(1).tolist(), wanted.sum(1).tolist(), strict=True)):
            weight = _FIRST_WEIGHT + _LEAST_LEFT * at_risk
            chance = min(1.0, (came + weight * chance) / (at_risk * all_left + weight))
            all_left = max(all_left * (1.0 - chance), 1e-6)
            own = np.minimum(1.0, (wanted[bucket] + _PRIOR * chance) / (risk[bucket] * left + _PRIOR))
            lefts[bucket], owns[bucket] = left, own
            left = np.maximum(left * (1.0 - own), 1e-6)
        best, hits, kept = (np.zeros((_BUCKETS, CLASSES)) for _ in range(3))
        all_hits, all_kept = lefts * owns, widths[:, None] * lefts * (1.0 - owns / 2)
        self._left, self._hits, self._kept = (np.ascontiguousarray(each.T) for each in (lefts, all_hits, all_kept))
        for bucket in range(_BUCKETS):  # those from each bucket up to this one
            upto = slice(bucket + 1)
            hits[upto] += all_hits[bucket]
            kept[upto] += all_kept[bucket]
            np.maximum(best[upto], hits[upto] / kept[upto], out=best[upto])
        rates = np.concatenate((best, best[-1:])).T
        slopes = np.diff(rates) / _WIDTHS
        self._slopes: list[float] = slopes.ravel().tolist()
        self._rates: list[float] = (rates[:, :-1] - slopes * _EDGES[:-1]).ravel().tolist()
        """By class and bucket: on a line from age 0 that has the slope of the bucket."""


def _add_weight(counts: list[float], places: NDArray[np.intp], weight: float) -> None:
    """Add a weight to a count for each of some places, in their order."""
    for place, times in zip(*np.unique(places, return_counts=True), strict=True):
        count = counts[place]
        for _ in range(times):
            count += weight
        counts[place] = count
