# SPDX-License-Identifier: Apache-2.0
"""How many distinct requests wanted a block: a table of fixed size, by hashes. Scheduler thread only."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from zlib import crc32

from kvdisk.blocks import BlockKey
from kvdisk.manager.key_numbers import numbers_of

MOST_PLACES = 1 << 22
FEWEST_PLACES = 1 << 18
_BITS = 0xFFFFFFFF


def places_for(slots: int) -> int:
    """Return how many keys to track for a tier of so many slots: eight a slot, within bounds; a power of two."""
    return min(MOST_PLACES, max(FEWEST_PLACES, 1 << (8 * slots - 1).bit_length()))


class ReuseTable:
    """Counts up to ``most`` distinct requests a key, of ``places`` keys at most (a power of two).

    A place takes 9 bytes and 4 for each request that must be known again: 13 for two requests. A key has two places,
    and of two that are taken the one that was wanted longest ago gives way. A key may be forgotten early and, about
    once in 2**30 times, another be taken for it: that decides nothing but who is stored. ``now``: keys met so far.
    """

    def __init__(self, most: int, places: int) -> None:
        assert most >= 1 and places & (places - 1) == 0
        self.most = most
        self.now = 0
        self._known = max(1, most - 1)  # one more than these is enough, whoever it is
        self._mask = places - 1
        self._request = ("", 0)
        self._clear()

    def _clear(self) -> None:
        places = self._mask + 1
        self._marks, self._times = array("I", [0]) * places, array("I", [0]) * places
        self._counts = bytearray(places)
        self._requests = array("I", [0]) * (places * self._known)

    def want(self, keys: Sequence[BlockKey], request_id: str) -> tuple[list[BlockKey], list[int]]:
        """Count a request once per key. Return the keys that others had wanted, and whose counts have risen; and of
        each key's second request how many keys were met since the first."""
        if request_id != self._request[0]:
            self._request = (request_id, _mark_of(request_id))
        request = self._request[1]
        marks, counts, times, requests = self._marks, self._counts, self._times, self._requests
        known, most, mask, now = self._known, self.most, self._mask, self.now
        risen: list[BlockKey] = []
        ages: list[int] = []
        for key, name in zip(keys, numbers_of(keys), strict=True):  # all in one: it is done for every block
            mark, place = name >> 32 | 1, name & mask
            if marks[place] != mark:
                other = name >> 22 & mask
                if marks[other] != mark:
                    now += 1
                    if marks[place] and (
                        not marks[other] or (now - times[other] & _BITS) > (now - times[place] & _BITS)
                    ):
                        place = other
                    marks[place], times[place], counts[place] = mark, now & _BITS, 1
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
                risen.append(key)
            if count == 1 and most > 1:
                ages.append(now - times[place] & _BITS)
            times[place] = now & _BITS
        self.now = now
        return risen, ages

    def counts(self, keys: Sequence[BlockKey]) -> list[int]:
        """Return of each key how many distinct requests wanted it, at most ``most``."""
        counts = self._counts
        return [counts[place] if place >= 0 else 0 for place in self._find(keys)]

    def first_requests(self, keys: Sequence[BlockKey], count: int) -> list[float]:
        """Return of each key a number from 0 to 1 that stands for the first request that wanted it; 1: unknown.

        -1 of a key that ``count`` requests or more wanted.
        """
        requests, known, counts = self._requests, self._known, self._counts
        return [
            1.0 if place < 0 else -1.0 if counts[place] >= count else requests[place * known] / 2**32
            for place in self._find(keys)
        ]

    def clear(self) -> None:
        """Forget all keys."""
        self._clear()

    @property
    def bytes_per_key(self) -> float:
        """Memory of the table by the keys that it can hold."""
        columns = (self._marks, self._times, self._requests)
        total = sum(len(column) * column.itemsize for column in columns) + len(self._counts)
        return total / (self._mask + 1)

    def _find(self, keys: Sequence[BlockKey]) -> list[int]:
        """Return each key's place, or -1."""
        marks, mask = self._marks, self._mask
        places = []
        for name in numbers_of(keys):
            mark, place = name >> 32 | 1, name & mask
            if marks[place] != mark:
                place = name >> 22 & mask
                if marks[place] != mark:
                    place = -1
            places.append(place)
        return places


def _mark_of(request_id: str) -> int:
    """Return 32 bits that are spread evenly, also over names that count up."""
    mark = crc32(request_id.encode()) * 0x9E3779B1 & 0xFFFFFFFF
    mark = (mark ^ mark >> 15) * 0x85EBCA77 & 0xFFFFFFFF
    return mark ^ mark >> 13
