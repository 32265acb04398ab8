# SPDX-License-Identifier: Apache-2.0
"""How often and how soon blocks are wanted again: counted for each block, learnt for classes of
them. Scheduler thread only.

Eviction and admission of all tiers go by it (decisions 31, 63). Two clocks count time: in blocks
that requests came to, and in ticks, sixteenths of a second. The first passes between requests, not
within one: an age goes up to the last time at which a request came. What is learnt is weighed: a
prompt by the root of its length, so that neither a few long ones decide, nor many short ones.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvdisk.blocks import BlockKey, group_of
from kvdisk.manager import bounds
from kvdisk.manager.catalog import key_hash
from kvdisk.manager.chances import BUCKETS, LEVELS, ORIGINS, TEMPOS, Chances
from kvdisk.manager.newcomers import Newcomers

USES: Final = 65
"""Uses that are told apart."""
_ORIGINS: Final = ORIGINS
"""The origins of reuse, by what first brought a block: a prompt that began anew (0) or branched off
(1), the second turn of a conversation (2), or a later one (3). States have their own (4)."""
_BRANCH: Final = 1
_LATER_TURN: Final = 3
STATES: Final = 4
"""The origin of recurrent states: a class for each number of uses, of their own."""
_LEVEL_OF: Final = bytes(min(max(0, uses - 1).bit_length(), LEVELS - 1) for uses in range(USES + 1))
"""By number of uses: its level, the rounded-up logarithm to base 2."""
_CLASS_OF: Final = [
    (_LEVEL_OF[mark // _ORIGINS] * _ORIGINS + mark % _ORIGINS) * TEMPOS for mark in range((USES + 1) * _ORIGINS)
]
"""By a block's uses and origin: its class, with no tempo."""
_ORIGIN_BEHIND: Final = bytes(
    min(max(origin, _BRANCH) + 1, _LATER_TURN) if uses == 1 else _BRANCH
    for uses in range(USES + 1)
    for origin in range(_ORIGINS)
)
"""By a block's uses and origin: the origin of a new block that follows it."""
_HAS_TEMPO: Final = bytes(origin != STATES for _ in range(USES + 1) for origin in range(_ORIGINS))
"""By a block's uses and origin: whether it has a tempo."""
_TEMPO_CAP: Final = 251
_TEMPO_OF: Final = bytes(max(1, min(TEMPOS - 1, ((code - 1) // 8 - 2) // 2 + 1)) if code else 0 for code in range(256))
"""By a tempo, in eighths of octaves (``_tempo_of``): its group, of two octaves from a second on."""
NEW_STATE: Final = _CLASS_OF[_ORIGINS + STATES]
"""The class of a state that nobody has wanted since it came."""
_BITS: Final = 0xFFFFFFFF
_TICKS_PER_S: Final = 16
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
_Entry = tuple[int, int, int, int, int]
"""What a place has of a key: its tag, time, mark, tick and tempo."""
_MANY: Final = 64
"""Keys from which on arrays save more than they cost."""
_CLASSES_OF: Final = np.array(_CLASS_OF)
_ORIGINS_BEHIND: Final = np.frombuffer(_ORIGIN_BEHIND, np.uint8)
_HAVE_TEMPO: Final = np.frombuffer(_HAS_TEMPO, np.bool_)
_TEMPOS_OF: Final = np.frombuffer(_TEMPO_OF, np.uint8)


def _tempo_of(ticks: int) -> int:
    """Return a time in eighths of octaves, from 1 on."""
    return min(_TEMPO_CAP, 1 + int(8 * math.log2(1 + ticks)))


class Visit(NamedTuple):
    """A request came to its blocks of a group. ``before``: the history's time as the request came.
    ``now``: the time of the visit, for all of its blocks. ``blocks``: how many it has. ``weight``:
    of each of them. ``tick``: its time in ticks. ``most``: uses that they have then at most."""

    before: int
    now: int
    blocks: int
    weight: float
    tick: int
    most: int = USES


class Known(NamedTuple):
    """What is known of a key: its uses, its class, and its age in blocks and in ticks."""

    uses: int
    number: int
    blocks: int
    ticks: int


class _FoundMany(NamedTuple):
    """By key of a chain: its place, its age (``_NEW``: the key is new) in blocks and in ticks, its
    origin, and its tempo before and after the visit. ``behind``: see ``ReuseHistory.count``."""

    places: NDArray[np.intp]
    ages: NDArray[np.int64]
    gaps: NDArray[np.int64]
    origins: NDArray[np.intp]
    tempos_before: NDArray[np.intp]
    tempos: NDArray[np.intp]
    behind: int


class _Entries(NamedTuple):
    """Entries of keys of one visit, by arrays."""

    tags: NDArray[np.int64]
    marks: NDArray[np.intp]
    tempos: NDArray[np.int64]
    time: int
    tick: int

    def at(self, at: int) -> _Entry:
        """Return one of them."""
        return int(self.tags[at]), self.time, int(self.marks[at]), self.tick, int(self.tempos[at])


class ReuseHistory:
    """Remembers keys: how many requests wanted each, and when last. Learns from that how soon, if
    at all, blocks of a class are wanted again.

    The class of a block is made of its uses, in doublings, and of its origin: what the prompt was
    that first brought it. Nothing before the block was known; or it branches off from what several
    requests had wanted; or it extends the prompt of one: the second turn of a conversation, or a
    later one. Of a prompt that came no block has more uses than the one before it.
    Recurrent states are classes of their own: a request wants one of its prompt, and the next one
    mostly takes its place. A class is made of the tempo, too: how far apart the last requests
    for the block were. What is new has the tempo of the prompt that it extends.

    A key takes 15 bytes of a place, and has two places: of two that are taken, the one that was
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
        self.tick = 0
        """The time in ticks since the first that was noted."""
        self._first_s: float | None = None
        self._recent_blocks, self._recent_ticks, self._noted_tick = 0.0, 0.0, 0
        """Of the last prompts: their blocks, and how long they took to come; and when the last of
        them came."""
        self._places = bounds.LEAST_PLACES
        self._evidence_blocks = _EVIDENCE_CAP * bounds.LEAST_PLACES / 8
        self.clear()
        self._chances = Chances()
        self._restored = 0
        """``now`` after a restart: nobody knows how old a block was that came before."""
        self._prompt_blocks = 1.0
        """The recent mean of blocks a request. Nothing leaves for less."""
        self._scan_score = [0.0] * _ORIGINS
        """By origin: the evidence that its new blocks come back more rarely lately. It is the sum
        of logarithms of likelihood ratios since the last time that it was 0."""
        self._newcomers = Newcomers()

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
        self._ticks, self._tempos = array("I", [0]) * self._places, array("B", [0]) * self._places

    @property
    def is_evening(self) -> bool:
        """Whether nobody new has come for long, and what has begun goes on."""
        return self._newcomers.is_evening

    # -- keys ----------------------------------------------------------------------------------

    def note_time(self, now: float) -> None:
        """Set the time, in seconds of a clock that does not fall."""
        self._first_s = now if self._first_s is None else self._first_s
        self.tick = max(self.tick, int((now - self._first_s) * _TICKS_PER_S))

    def begin(self, start: int, stop: int, *, is_prompt: bool = True, before: int | None = None) -> Visit:
        """A request comes to these blocks of its prompt, all of them at once, that are counted in
        one or more parts: how old a block is, of the prompt or another, does not depend on how long
        the prompt is. ``before``: that of the request's first visit; None: this is the first."""
        before = self.now if before is None else before
        self.came = max(self.came, before)
        self.now += stop - start
        if not start and is_prompt:
            self._prompt_blocks += (stop - self._prompt_blocks) / 64
            self._recent_blocks += stop - self._recent_blocks / 256
            self._recent_ticks += self.tick - self._noted_tick - self._recent_ticks / 256
            self._noted_tick = self.tick
        return Visit(before, self.now, stop - start, max(1, stop) ** -0.5, self.tick)

    def go_on(self, visit: Visit, count: int) -> Visit:
        """A visit has more blocks than was known when it began: return it with these, which are to
        be counted as its next part."""
        self.now += count
        self._prompt_blocks += count / 64
        so_far = visit.blocks + count
        return Visit(visit.before, visit.now + count, so_far, so_far**-0.5, visit.tick)

    def origin_behind(self, key: BlockKey) -> int:
        """Return what ``count`` would of a visit that ends with this one; of one that is not known
        0."""
        place, is_known = self._find(key_hash(key))
        if not is_known:
            return 0
        mark, tempo = self._marks[place], _tempo_of(max(0, self.tick - self._ticks[place]))
        if _HAS_TEMPO[mark] and self._tempos[place]:
            tempo = (self._tempos[place] + tempo + 1) // 2
        return _ORIGIN_BEHIND[mark] + (tempo * _ORIGINS if mark // _ORIGINS == 1 else 0)

    def count(self, keys: Sequence[BlockKey], start: int, stop: int, origin: int, visit: Visit | None = None) -> int:
        """A request came to these blocks of its prompt, from ``start`` on, for the first time. All
        of them are known then, as far as there are places.

        ``keys``: of the prompt, at least up to ``stop``. ``origin``: as returned for those before
        ``start``: the origin of a new block behind them, plus ``_ORIGINS`` times its tempo; 0 at
        first; of a state, which comes alone, ``STATES``. ``visit``: what these blocks are a part
        of; None: they are all. Each request counts once: the caller sees to that.
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
        if came := sum(new[:STATES]):
            self._newcomers.note(visit.before, is_new=2 * (new[0] + new[_BRANCH]) > came)
        self._raise(keys, start, least)
        if self.now >= self._chances.learns_at:
            self._learn()
        return origin

    def count_state(self, key: BlockKey, before: int | None) -> int:
        """A request wants a recurrent state. Return when it came; ``before``: that, if it is
        known."""
        visit = self.begin(0, 1, is_prompt=False, before=before)
        self.count((key,), 0, 1, STATES, visit)
        return visit.before

    def _scan_score_of(self, number: int, came: int, came_again: int, part: float) -> float:
        """Return the scan score of an origin after a part of a visit, by Page's test (CUSUM): it
        rises while new blocks come back more rarely than was learnt. The blocks of one visit come
        together, so a visit is one observation."""
        often = self._chances.returned[number] / (1.0 + self._chances.returned[number])
        if not 0.0 < often < 1.0:
            return self._scan_score[number]
        rarely, again = often / _RARER, came_again / (came + came_again)
        evidence = again * math.log(rarely / often) + (1.0 - again) * math.log((1.0 - rarely) / (1.0 - often))
        weight = part * min(1.0, (came + came_again) / self._evidence_blocks)
        return min(_SCAN_SCORE_CAP, max(0.0, self._scan_score[number] + weight * evidence))

    def _count_few(self, hashes: list[int], origin: int, visit: Visit) -> tuple[int, int, list[int], list[int]]:
        """Count keys that follow each other. Return the uses of the first, the origin of what comes
        behind them, and by origin how many came for the first and for the second time."""
        marks, chances = self._marks, self._chances
        entered, reused, reused_after = chances.entered, chances.reused, chances.reused_after
        weight, known_ages = visit.weight, visit.before - self._restored
        found, behind = self._find_or_insert(hashes, origin, visit)
        new, again = [0] * _ORIGINS, [0] * _ORIGINS
        least = 0
        for place, age, gap, own_origin, before, tempo in reversed(found):
            if age == _NEW:
                uses = 1
                new[own_origin] += 1
            else:
                mark = marks[place] if place != _NOWHERE else _ORIGINS + own_origin
                if age < known_ages:
                    of_class = (_CLASS_OF[mark] + _TEMPO_OF[before]) * BUCKETS
                    reused[of_class + age.bit_length()] += weight
                    reused_after[of_class + gap.bit_length()] += weight
                if mark < 2 * _ORIGINS:
                    again[mark % _ORIGINS] += 1
                uses, own_origin = divmod(mark, _ORIGINS)  # noqa: PLW2901
                uses += uses < visit.most
            least = max(least, uses)
            mark = least * _ORIGINS + own_origin
            entered[_CLASS_OF[mark] + _TEMPO_OF[tempo]] += weight
            if place != _NOWHERE:
                marks[place] = mark
        return least, behind, new, again

    def _count_many(
        self, hashes: NDArray[np.uint64], origin: int, visit: Visit
    ) -> tuple[int, int, list[int], list[int]]:
        """Do what ``_count_few`` does, by arrays."""
        weight, known_ages = visit.weight, visit.before - self._restored
        places, ages, gaps, origins, before, tempos, behind = self._find_or_insert_many(hashes, origin, visit)
        marks, is_known, has_place = np.frombuffer(self._marks, np.uint16), ages != _NEW, places != _NOWHERE
        of_key = np.where(has_place & is_known, marks[places], _ORIGINS + origins).astype(np.intp)
        is_timed = (is_known & (ages < known_ages))[::-1]
        of_class = (_CLASSES_OF[of_key] + _TEMPOS_OF[before]) * BUCKETS
        for reused, each in ((self._chances.reused, ages), (self._chances.reused_after, gaps)):
            # bit_length: exact for ages below 2**53.
            _add_weight(reused, (of_class + np.frexp(each.astype(np.float64))[1])[::-1][is_timed], weight)
        new = np.bincount(origins[~is_known], minlength=_ORIGINS).tolist()
        again = np.bincount(of_key[is_known & (of_key < 2 * _ORIGINS)] % _ORIGINS, minlength=_ORIGINS).tolist()
        uses, own_origins = np.divmod(of_key, _ORIGINS)
        uses = np.where(is_known, np.maximum(uses, np.minimum(uses + 1, visit.most)), 1)
        least = np.maximum.accumulate(uses[::-1])[::-1]
        after = least * _ORIGINS + own_origins
        _add_weight(self._chances.entered, (_CLASSES_OF[after] + _TEMPOS_OF[tempos])[::-1], weight)
        marks[places[has_place]] = after[has_place]
        return int(least[0]), behind, new, again

    def _find_or_insert(
        self, hashes: list[int], behind: int, visit: Visit
    ) -> tuple[list[tuple[int, int, int, int, int, int]], int]:
        """Find or make the place of each key of a chain, and note the time of the visit there.
        Return by key its place, its age (``_NEW``: the key is new) in blocks and in ticks, its
        origin, and its tempo before and after the visit; and what ``count`` returns."""
        tags, times, marks, mask = self._tags, self._times, self._marks, self._places - 1
        ticks, tempos, tick = self._ticks, self._tempos, visit.tick
        time, now, since = visit.now & _BITS, self.now, self.now - visit.before
        carried, origin = divmod(behind, _ORIGINS)
        found: list[tuple[int, int, int, int, int, int]] = []
        lacking: list[int] = []
        last_gap, latest = _NEW, 0
        for at, hashed in enumerate(hashes):
            place = hashed & mask
            if tags[place] != hashed >> 32 | 1:
                place = self._other(place, hashed >> 32 | 1)
            if tags[place] == hashed >> 32 | 1:
                mark, gap, before = marks[place], max(0, tick - ticks[place]), tempos[place]
                if gap != last_gap:
                    last_gap, latest = gap, _tempo_of(gap)
                tempo = (before + latest + 1) // 2 if before else latest
                age = max(0, (now - times[place] & _BITS) - since)
                times[place], ticks[place] = time, tick
                if _HAS_TEMPO[mark]:
                    tempos[place] = tempo
                found.append((place, age, gap, mark % _ORIGINS, before, tempos[place]))
                origin, carried = _ORIGIN_BEHIND[mark], tempo if mark < 2 * _ORIGINS else 0
            else:
                lacking.append(at)
                found.append((place, _NEW, 0, origin, 0, carried))
        moved = False
        for at in lacking:  # once the others are held: none of them gives way to these
            hashed, (*_, own_origin, _, tempo) = hashes[at], found[at]
            entry = hashed >> 32 | 1, time, _ORIGINS + own_origin, tick, tempo
            written = self._enter(hashed & mask, found[at][0], entry, since)
            found[at] = written[0][0], _NEW, 0, own_origin, 0, tempo
            moved |= len(written) > 1
        if moved:
            places = [place if is_known else _NOWHERE for place, is_known in map(self._find, hashes)]
            found = [(place, *each[1:]) for place, each in zip(places, found, strict=True)]
        return found, carried * _ORIGINS + origin

    def _find_or_insert_many(self, hashes: NDArray[np.uint64], behind: int, visit: Visit) -> _FoundMany:
        """Do what ``_find_or_insert`` does, by arrays."""
        tags, times, marks, ticks, tempos = self._arrays()
        time, now, since = visit.now & _BITS, self.now, self.now - visit.before
        firsts, others, upper = self._both_places(hashes)
        places = np.where(tags[firsts] == upper, firsts, others)
        is_known = tags[places] == upper
        held = places[is_known]
        ages, (gaps, own, before, after) = np.full(len(hashes), _NEW, np.int64), np.zeros((4, len(hashes)), np.int64)
        ages[is_known] = np.maximum(0, (now - times[held].astype(np.int64) & _BITS) - since)
        gaps[is_known] = np.maximum(0, visit.tick - ticks[held].astype(np.int64))
        own[is_known], before[is_known] = marks[held], tempos[held]
        times[held], ticks[held] = time, visit.tick
        latest = np.minimum(_TEMPO_CAP, 1 + (8 * np.log2(1.0 + gaps)).astype(np.int64))
        after = np.where(_HAVE_TEMPO[own], np.where(before > 0, (before + latest + 1) // 2, latest), before)
        tempos[held] = after[is_known]
        # What is not known has the origin and the tempo that the last one before it leaves.
        last = np.maximum.accumulate(np.where(is_known, np.arange(len(hashes)), -1))
        carried = np.where(own < 2 * _ORIGINS, np.where(after > 0, after, latest), 0) * _ORIGINS + _ORIGINS_BEHIND[own]
        behinds = np.where(last < 0, behind, carried[last])
        after = np.where(is_known, after, behinds // _ORIGINS)
        origins = np.where(is_known, own, behinds) % _ORIGINS
        # Once the others are held: none of them gives way to these.
        new = np.flatnonzero(~is_known)
        if len(new):
            entries = _Entries(upper[new], _ORIGINS + origins[new], after[new], time, visit.tick)
            entered = self._enter_many(firsts[new], others[new], entries, since)
            if entered is not None:
                places[new] = entered
            else:  # some have moved
                places = np.where(tags[firsts] == upper, firsts, others)
                places[tags[places] != upper] = _NOWHERE
        return _FoundMany(places, ages, gaps, origins, before, after, int(behinds[-1]))

    def _both_places(self, hashes: NDArray[np.uint64]) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.int64]]:
        """Return the two places of each key, as ``_other`` has them, and its tag."""
        mask = self._places - 1
        firsts = (hashes & np.uint64(mask)).astype(np.intp)
        upper = (hashes >> np.uint64(32)).astype(np.int64) | 1
        return firsts, firsts ^ (upper * _SPREAD >> 16 & mask | 1), upper

    def _arrays(self) -> tuple[NDArray[np.unsignedinteger], ...]:
        """Return what is by place: tags, times, marks, ticks and tempos."""
        each = (self._tags, self._times, self._marks, self._ticks, self._tempos)
        return tuple(np.frombuffer(one, one.typecode) for one in each)

    def _enter_many(
        self, firsts: NDArray[np.intp], others: NDArray[np.intp], entries: _Entries, since: int
    ) -> NDArray[np.intp] | None:
        """Do what ``_enter`` does for each of these keys in turn. ``firsts``, ``others``: the two
        places of each. Return which it took; None: others have moved.

        Keys that may take a free place or an old key's, and share neither place with others of
        these, are entered at once: in which order does not matter.
        """
        tags, times, marks, ticks, tempos = self._arrays()
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
        written: list[tuple[int, _Entry]] = []
        for at in rest.tolist():
            own = self._enter(int(firsts[at]), int(others[at]), entries.at(at), since)
            places[at] = own[0][0]
            moved |= len(own) > 1
            written += own
        if moved and np.isin(both[:, are_simple], [place for place, _ in written]).any():
            for place, (tag, time, mark, tick, tempo) in reversed(written):
                tags[place], times[place], marks[place], ticks[place], tempos[place] = tag, time, mark, tick, tempo
            for at, (first, other) in enumerate(zip(firsts.tolist(), others.tolist(), strict=True)):
                self._enter(first, other, entries.at(at), since)
            return None
        taken = places[are_simple]
        tags[taken], times[taken], ticks[taken] = entries.tags[are_simple], entries.time, entries.tick
        marks[taken], tempos[taken] = entries.marks[are_simple], entries.tempos[are_simple]
        return None if moved else places

    def _enter(self, place: int, other: int, entry: _Entry, since: int) -> list[tuple[int, _Entry]]:
        """Write a key that is not known to one of its two places. Return each place that was
        written to, that one first, with what was there.

        It takes one where none is, or that of the older. That one is forgotten, unless it was
        wanted ``since`` as many blocks, too: then it moves to its own other place, and so on.
        """
        tags, times, now = self._tags, self._times, self.now
        if tags[place] and (not tags[other] or (now - times[other] & _BITS) > (now - times[place] & _BITS)):
            place = other
        marks, ticks, tempos = self._marks, self._ticks, self._tempos
        written: list[tuple[int, _Entry]] = []
        for _ in range(bounds.PLACES_MOVED):
            was = tags[place], times[place], marks[place], ticks[place], tempos[place]
            written.append((place, was))
            tags[place], times[place], marks[place], ticks[place], tempos[place] = entry
            if not was[0] or (now - was[1] & _BITS) >= since:
                break
            entry, place = was, self._other(place, was[0])
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

    def classes_of(self, keys: Sequence[BlockKey]) -> list[int]:
        """Return the class of each key; the lowest of one that is not known."""
        if len(keys) >= _MANY:
            return self._classes_of_many(keys)
        tags, marks, tempos, mask, found = self._tags, self._marks, self._tempos, self._places - 1, []
        for hashed in map(key_hash, keys):
            place, is_known = hashed & mask, True
            if tags[place] != hashed >> 32 | 1:
                place, is_known = self._find(hashed)
            found.append(_CLASS_OF[marks[place]] + _TEMPO_OF[tempos[place]] if is_known else 0)
        return found

    def _classes_of_many(self, keys: Sequence[BlockKey]) -> list[int]:
        """Do what ``classes_of`` does, by arrays."""
        tags, _, marks, _, tempos = self._arrays()
        hashes = np.fromiter(map(key_hash, keys), np.uint64, len(keys))
        firsts, others, upper = self._both_places(hashes)
        places = np.where(tags[firsts] == upper, firsts, others)
        classes = _CLASSES_OF[marks[places]] + _TEMPOS_OF[tempos[places]]
        found: list[int] = np.where(tags[places] == upper, classes, 0).tolist()
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

    def known(self, key: BlockKey) -> Known:
        """Return what is known of a key; of one that is not known no use, the lowest class, and as
        old as can be."""
        place, is_known = self._find(key_hash(key))
        if not is_known:
            return Known(0, 0, min(self.now, _BITS), self.tick)
        mark, blocks = self._marks[place], (self.now - self._times[place] & _BITS) - self.now + self.came
        number = _CLASS_OF[mark] + _TEMPO_OF[self._tempos[place]]
        return Known(mark // _ORIGINS, number, max(0, blocks), max(0, self.tick - self._ticks[place]))

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
        tags, times, own_marks, ticks, tempos = self._arrays()
        left, mask = np.arange(len(keys), dtype=np.uint64), np.uint64(self._places - 1)
        hops = upper.astype(np.uint64) * np.uint64(_SPREAD) >> np.uint64(16) & mask | np.uint64(1)  # as in _other
        for places in (hashes & mask, hashes & mask ^ hops):
            able = left[tags[places[left]] == 0]  # of several with one place the last has it
            tags[places[able]], times[places[able]] = upper[able], able + np.uint64(self.now + 1)
            own_marks[places[able]], ticks[places[able]], tempos[places[able]] = marks[able], self.tick, 0
            left = left[tags[places[left]] != upper[left]]
        self._restored = self.now = self.came = self.now + len(keys)
        classes: NDArray[np.uint8] = np.array(_CLASS_OF, np.uint8)[marks]
        return classes

    # -- classes -------------------------------------------------------------------------------

    def rate(self, number: int, blocks: int, ticks: int) -> float:
        """See ``Chances.rate``."""
        return self._chances.rate(number, blocks, ticks)

    def gain(self, number: int, blocks: int, ticks: int, rate: float) -> float:
        """See ``Chances.gain``.

        Of new blocks what was learnt holds only as far as they still come back as often: a scan is
        over before the ages of its blocks tell.
        """
        kind, still = number // TEMPOS, 1.0
        if kind < _ORIGINS and self._scan_score[kind] > _SCAN_SCORE:
            still = math.exp(_SCAN_SCORE - self._scan_score[kind])
        return self._chances.gain(number, blocks, ticks, rate, still)

    def _learn(self) -> None:
        speed = (1.0 + self._recent_blocks) / (1.0 + self._recent_ticks)
        self._chances.learn(self.now, self.tick, 8 * self._places, self._prompt_blocks, speed)


def _add_weight(counts: list[float] | array[float], places: NDArray[np.intp], weight: float) -> None:
    """Add a weight to a count for each of some places, in their order."""
    for place, times in zip(*np.unique(places, return_counts=True), strict=True):
        count = counts[place]
        for _ in range(times):
            count += weight
        counts[place] = count
