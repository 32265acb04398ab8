# SPDX-License-Identifier: Apache-2.0
"""Who may enter a tier: the policies by name, and who is told of demand."""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from zlib import crc32

from kvdisk.blocks import BlockKey
from kvdisk.config import make_own
from kvdisk.errors import ConfigError
from kvdisk.manager.catalog import number_of

MOST_PLACES = 1 << 22
FEWEST_PLACES = 1 << 18
_BITS = 0xFFFFFFFF


def places_for(slots: int) -> int:
    """Return how many keys to track for a tier: eight a slot, within bounds; a power of two."""
    return min(MOST_PLACES, max(FEWEST_PLACES, 1 << (8 * slots - 1).bit_length()))


class ReuseTable:
    """Counts up to ``most`` distinct requests a key, of ``places`` keys at most (a power of two).

    A place takes 9 bytes and 4 for each request that must be known again: 13 for two requests. A
    key has two places, and of two that are taken the one that was wanted longest ago gives way. A
    key may be forgotten early and, about once in 2**30 times, another be taken for it: that decides
    nothing but who is stored. ``now``: keys met so far.
    """

    def __init__(self, most: int, places: int) -> None:
        assert most >= 1 and places & (places - 1) == 0
        self.most = most
        self.now = 0
        self._known = max(1, most - 1)  # one more than these is enough, whoever it is
        self._mask = places - 1
        self.clear()

    def clear(self) -> None:
        """Forget all keys."""
        places = self._mask + 1
        self._tags, self._times = array("I", [0]) * places, array("I", [0]) * places
        self._counts = bytearray(places)
        self._requests = array("I", [0]) * (places * self._known)

    def want(self, keys: Sequence[BlockKey], request_id: str) -> list[int]:
        """Count a request once per key. Return of each key's second request how many keys were met
        since the first."""
        request = _tag_of(request_id)
        tags, counts, times, requests = self._tags, self._counts, self._times, self._requests
        known, most, mask, now = self._known, self.most, self._mask, self.now
        ages: list[int] = []
        for name in map(number_of, keys):  # all in one: it is done for every block
            tag, place = name >> 32 | 1, name & mask
            if tags[place] != tag:
                other = name >> 22 & mask
                if tags[other] != tag:
                    now += 1
                    if tags[place] and (not tags[other] or (now - times[other] & _BITS) > (now - times[place] & _BITS)):
                        place = other
                    tags[place], times[place], counts[place] = tag, now & _BITS, 1
                    requests[place * known] = request
                    continue
                place = other
            count, first = counts[place], place * known
            if count < most:
                if requests[first] == request or (count > 1 and request in requests[first : first + min(count, known)]):
                    continue
                if count < known:
                    requests[first + count] = request
                counts[place] = count + 1
            if count == 1 and most > 1:
                ages.append(now - times[place] & _BITS)
            times[place] = now & _BITS
        self.now = now
        return ages

    def known(self, keys: Sequence[BlockKey]) -> list[tuple[int, float]]:
        """Return of each key how many distinct requests wanted it, at most ``most``, and a number
        from 0 to 1 that stands for the first of them; 1: none is known."""
        tags, counts, requests, known, mask = self._tags, self._counts, self._requests, self._known, self._mask
        found = []
        for name in map(number_of, keys):
            tag, place = name >> 32 | 1, name & mask
            if tags[place] != tag:
                place = name >> 22 & mask
            is_known = tags[place] == tag
            found.append((counts[place], requests[place * known] / 2**32) if is_known else (0, 1.0))
        return found


def _tag_of(request_id: str) -> int:
    """Return 32 bits that are spread evenly, also over names that count up."""
    tag = crc32(request_id.encode()) * 0x9E3779B1 & 0xFFFFFFFF
    tag = (tag ^ tag >> 15) * 0x85EBCA77 & 0xFFFFFFFF
    return tag ^ tag >> 13


class AdmissionPolicy:
    """Decides for one tier. ``want`` is told before ``admits`` is asked for the same request. What
    is here lets every block in.

    The CPU tier's is asked when a request offers a block. The NVMe tier's is asked when a copy in
    the CPU tier becomes READY, each time a request wants it there, and before it leaves; without a
    CPU tier, when a request offers it.
    """

    @property
    def is_open(self) -> bool:
        """Whether ``admits`` would now return True for any block: then it is not asked."""
        return True

    def want(self, keys: Sequence[BlockKey], request_id: str) -> None:
        """A request wanted these blocks (offered them, or was served from them). May be told again
        for the same one."""

    def admits(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """Return of each block whether it may enter now."""
        return [True] * len(keys)

    def note_room(self, free: int, total: int) -> None:
        """Learn, once a step, how many of the tier's slots are free, of all that it may have."""

    def reset(self) -> None:
        """Forget all counts: the KV they stood for is gone."""


class AdmitAll(AdmissionPolicy):
    """Every block may enter."""


class AdmitReused(AdmissionPolicy):
    """A block may enter once ``needed`` distinct requests wanted it."""

    def __init__(self, needed: int, places: int) -> None:
        self._needed = needed
        self.table = ReuseTable(needed, places)

    @property
    def is_open(self) -> bool:
        """Return False."""
        return False

    def want(self, keys: Sequence[BlockKey], request_id: str) -> None:
        """Count a request once per key."""
        self.table.want(keys, request_id)

    def admits(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """Return of each block whether enough distinct requests wanted it."""
        return [count >= self._needed for count, _ in self.table.known(keys)]

    def reset(self) -> None:
        """Forget all counts."""
        self.table.clear()


class AdmitAdaptive(AdmitReused):
    """Admits everything while there is room, and the fewer blocks that one request wanted the
    sooner copies leave.

    ``distance``: how many keys are met, on average, between the first and the second request that
    want a block. A tier of ``total`` slots that admits all holds a new block while about ``total``
    others are met. So where ``total`` is ``distance`` or more, most of what comes back is still
    there, and all may enter. Below, new blocks push each other out before they are used, and only a
    share of the requests, ``(total / distance) ** 6``, has its new blocks admitted at once; those
    of others enter when a second request wants them. Which requests these are goes by a hash of
    their names: one request's blocks are all in or all out, and asking twice changes nothing. A
    reset forgets the counts, not the distance, which says nothing of the KV.
    """

    _STEEPNESS = 6
    """So that small tiers are written little (decision 25)."""
    _MEMORY = 2000
    """Second requests over which the distance is averaged."""

    def __init__(self, places: int) -> None:
        super().__init__(2, places)
        self._total = 0
        self._is_full = False
        self._seconds = 0
        self.distance = 0.0

    @property
    def is_open(self) -> bool:
        """Return whether there is room, or all requests have their new blocks admitted."""
        return not self._is_full or self.share >= 1.0

    def want(self, keys: Sequence[BlockKey], request_id: str) -> None:
        """Count a request once per key, and learn from the second."""
        for age in self.table.want(keys, request_id):
            self._seconds = min(self._seconds + 1, self._MEMORY)
            self.distance += (age - self.distance) / self._seconds

    def admits(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """Return True while open, and for what two wanted, or the first if it is of the share."""
        if self.is_open:
            return [True] * len(keys)
        share = self.share
        return [count >= self._needed or first < share for count, first in self.table.known(keys)]

    @property
    def share(self) -> float:
        """Of the requests, how many have their new blocks admitted when the tier is full."""
        return 1.0 if self.distance <= self._total else (self._total / self.distance) ** self._STEEPNESS

    def note_room(self, free: int, total: int) -> None:
        """A tier is full from when an eighth of it or less is free until half of it is."""
        self._total = total
        self._is_full = free * 2 <= total if self._is_full else free * 8 <= total


def make_admission(text: str, slots: int, key: str = "admission") -> AdmissionPolicy:
    """Return a new policy for a tier of so many slots. ``key``: the setting that ``text`` is the
    value of.

    Raises ConfigError.
    """
    if text == "all":
        return AdmitAll()
    if text == "adaptive":
        return AdmitAdaptive(places_for(slots))
    reuse = re.fullmatch(r"reuse\((\d+)\)", text)
    if reuse:
        return AdmitReused(int(reuse[1]), places_for(slots))
    if ":" not in text:
        raise ConfigError(f"{key} must be 'all', 'adaptive', 'reuse(n)' or 'module:Class', not {text!r}.")
    policy: AdmissionPolicy = make_own(key, text, AdmissionPolicy)
    return policy


class Demand:
    """Counts which blocks requests want, in the tiers' admissions."""

    def __init__(self, admissions: Sequence[AdmissionPolicy]) -> None:
        self._counting = [admission for admission in admissions if type(admission) is not AdmitAll]

    def count_demand(self, keys: Sequence[BlockKey], request_id: str) -> None:
        """A request wants these blocks: it has come to them, or is served from them."""
        for admission in self._counting:
            admission.want(keys, request_id)
