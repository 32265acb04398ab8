# SPDX-License-Identifier: Apache-2.0
"""How soon blocks of a class are wanted again: learnt from how many came to each age, and how many
were wanted at it. Scheduler thread only.

The same is learnt by two clocks, of blocks and of ticks (``kvdisk.manager.reuse``): an age in
blocks says what a copy has cost, and an age in ticks what people and programs take to come back.
"""

from __future__ import annotations

import math
from array import array
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvdisk.manager import bounds

LEVELS: Final = 6
ORIGINS: Final = 5
TEMPOS: Final = 6
"""Groups of tempos; 0: none is known."""
_KINDS: Final = LEVELS * ORIGINS
"""Classes, but for the tempo."""
CLASSES: Final = _KINDS * TEMPOS
"""A class is its level, times ``ORIGINS``, plus its origin; all of that times ``TEMPOS``, plus its
group of tempos."""
BUCKETS: Final = 33
"""Buckets of ages: an age is in the bucket of its bit length."""
_EDGES: Final = np.array([0.0] + [2.0**bucket for bucket in range(BUCKETS)])
_WIDTHS: Final = np.diff(_EDGES)
_LEARNT_EVERY: Final = (512, 4096)
"""Blocks, at first and at most: an eighth of those that were counted."""
OLD_COUNTS: Final = 8
"""Counts that are kept of what was wanted so long ago that it will be left out."""
_PRIOR: Final = 5.0
"""A class's own counts weigh as much as all classes' together once prompts of it of this weight
were at risk."""
_TEMPO_PRIOR: Final = 150.0
"""The same of a class with a tempo, beside that class whatever its tempo."""
_RATIO_PRIOR: Final = 10.0
"""The same of how one tempo differs from all, in all classes together."""
_FIRST_CHANCE: Final = 0.1
"""The chance of reuse while an age doubles, before anything is learnt: the order is that of last
use."""
_FIRST_WEIGHT: Final = 5.0
_LEAST_LEFT: Final = 0.1
"""Least share of blocks that have come to an age: with fewer the age counts like the one before."""

_Floats = NDArray[np.float64]


class Chances:
    """What is counted of classes, and what is learnt from it.

    ``entered``: by class, how much came to be in it, or was used in it: of a prompt the root of its
    length. ``reused``: by class and bucket, how much of this was used again at that age in blocks.
    ``reused_after``: the same by the age in ticks. ``returned``: by origin, how much of what was
    used once was used again, for each that was not.
    """

    def __init__(self) -> None:
        self.entered = [0.0] * CLASSES
        self.reused, self.reused_after = (array("d", bytes(8 * CLASSES * BUCKETS)) for _ in range(2))
        self._past: list[tuple[int, int, _Floats]] = [(0, 0, np.zeros(CLASSES))]
        """Earlier times by both clocks, and what had entered by then, the earliest first."""
        self._old: list[tuple[int, int, _Floats]] = [(0, 0, np.zeros((2, CLASSES * BUCKETS)))]
        """Fewer, and what had been used again by then."""
        self._undrawn: tuple[_Floats, _Floats, _Floats] | None = None
        """Of what is learnt and not drawn yet, by clock, class and bucket: how much came to it, how
        much of this was wanted; and the widths of buckets in blocks, by clock."""
        self.learns_at = 0
        """When there is enough to learn anew: in blocks."""
        self.learn(0, 0, 0, 1.0, 1.0)

    # -- what is learnt --------------------------------------------------------------------------

    def rate(self, number: int, blocks: int, ticks: int) -> float:
        """Return how many hits a copy of a class and age brings for each block that requests come
        to while it is kept, if it is kept for as long as pays best: the geometric mean of what both
        clocks say."""
        if self._undrawn is not None:
            self._draw()
        at = number * BUCKETS + min(blocks.bit_length(), BUCKETS - 1)
        after = (CLASSES + number) * BUCKETS + min(ticks.bit_length(), BUCKETS - 1)
        rates, slopes = self._rates, self._slopes
        product = (rates[at] + slopes[at] * blocks) * (rates[after] + slopes[after] * ticks)
        return math.sqrt(product) if product > 0.0 else 0.0

    def gain(self, number: int, blocks: int, ticks: int, rate: float, still: float) -> float:
        """Return how many more hits are to be expected of a copy of a class and age, while it is
        kept, than of one that brings ``rate``: the mean of what both clocks say. ``still``: as a
        share of the hits that were learnt."""
        if self._undrawn is not None:
            self._draw()
        found = 0.0
        for clock, age in enumerate((blocks, ticks)):
            bucket = min(age.bit_length(), BUCKETS - 1)
            hits, kept = self._hits[clock, number, bucket:], self._kept[clock, number, bucket:]
            found += float((still * hits - rate * kept).cumsum().max() / self._left[clock, number, bucket]) / 2
        return found

    def learn(self, now: int, tick: int, memory: int, prompt_blocks: float, speed: float) -> None:
        """Take what has been counted so far as what is learnt.

        ``memory``: what was wanted longer ago, in blocks, is left out, sooner or later.
        ``prompt_blocks``: what the next request wants is kept for as long as that comes.
        ``speed``: blocks that come in a tick.
        """
        entered, reused = np.array(self.entered), np.array((self.reused, self.reused_after))
        counts = np.array([past for *_, past in self._past] + [entered])
        while len(self._old) > 1 and self._old[1][0] <= now - memory:
            del self._old[0]
        left_out = self._old[0]
        risk, widths = np.empty((2, CLASSES, BUCKETS)), np.stack((_WIDTHS, _WIDTHS * speed))
        widths[:, 0] = prompt_blocks
        for clock, time in enumerate((now, tick)):
            times = np.array([past[clock] for past in self._past] + [time + 1], np.float64)
            by_edge, by_old = _count_by(np.stack((time - _EDGES, left_out[clock] - _EDGES)), times, counts)
            come_to = np.maximum(by_edge - by_old, 0.0).T
            risk[clock] = (come_to[:, :-1] + come_to[:, 1:]) / 2
            if not clock:
                came = come_to[:, 0].reshape(_KINDS, TEMPOS)[:ORIGINS].sum(1)
        wanted = (reused - left_out[2]).reshape(2, CLASSES, BUCKETS)
        self.returned = (wanted[0].reshape(_KINDS, -1)[:ORIGINS].sum(1) / np.maximum(came, 1.0)).tolist()
        self._undrawn = risk, wanted, widths
        self._past.append((now, tick, entered))
        if now - self._old[-1][0] >= max(1, memory // OLD_COUNTS):
            self._old.append((now, tick, reused))
        if len(self._past) > bounds.COUNTS:
            del self._past[1 : bounds.COUNTS // 2 : 2]
        self.learns_at = now + min(max(_LEARNT_EVERY[0], now // 8), _LEARNT_EVERY[1])

    def _draw(self) -> None:
        """Draw the curves of what was learnt last. Only once somebody asks: of a prompt with many
        groups each is counted, and learnt from, before that."""
        assert self._undrawn is not None
        (risk, wanted, widths), self._undrawn = self._undrawn, None
        shape = (BUCKETS, 2, CLASSES)
        owns, lefts = _chances_of(risk, wanted)
        own, left = owns.reshape(shape), lefts.reshape(shape)
        all_hits, all_kept = left * own, widths.T[:, :, None] * left * (1.0 - own / 2)
        self._hits, self._kept, self._left = (
            np.ascontiguousarray(each.transpose(1, 2, 0)) for each in (all_hits, all_kept, left)
        )
        best, hits, kept = (np.zeros(shape) for _ in range(3))
        for bucket in range(BUCKETS):  # those from each bucket up to this one
            upto = slice(bucket + 1)
            hits[upto] += all_hits[bucket]
            kept[upto] += all_kept[bucket]
            np.maximum(best[upto], hits[upto] / kept[upto], out=best[upto])
        rates = np.concatenate((best, best[-1:])).transpose(1, 2, 0)
        slopes = np.diff(rates) / _WIDTHS
        self._slopes = array("d", slopes.tobytes())
        self._rates = array("d", (rates[:, :, :-1] - slopes * _EDGES[:-1]).tobytes())
        """By clock, class and bucket: on a line from age 0 that has the slope of the bucket."""


def _count_by(ends: _Floats, times: _Floats, counts: _Floats) -> _Floats:
    """Return by time, and by class, how many there were by then: on a line between the ``counts``
    that are kept, of ``times``."""
    after = np.searchsorted(times, ends, "right").clip(1, len(times) - 1)
    part = ((ends - times[after - 1]) / np.maximum(times[after] - times[after - 1], 1.0)).clip(0.0, 1.0)
    entered: _Floats = counts[after - 1] + (counts[after] - counts[after - 1]) * part[..., None]
    return entered


def _chances_of(risk: _Floats, wanted: _Floats) -> tuple[_Floats, _Floats]:
    """Return by bucket, clock, kind and tempo the chance that what comes to an age is wanted at it,
    and the share that comes to it. ``risk``, ``wanted``: by clock, class and bucket.

    Of what came to be in a class at least an age ago, and was not wanted before that age, how much
    was wanted at it (Kaplan and Meier's estimate): what came lately does not count as never wanted.
    A class that has few of its own goes by its kind, whatever the tempo, and by how its tempo
    differs from others in all kinds; a kind that has few goes by all.
    """
    shape = (BUCKETS, 2, _KINDS, TEMPOS)
    risk, wanted = (each.transpose(2, 0, 1).reshape(shape) for each in (risk, wanted))
    kind_risk, kind_wanted, tempo_wanted = risk.sum(3), wanted.sum(3), wanted.sum(2)
    all_risk, all_wanted = kind_risk.sum(2), kind_wanted.sum(2)
    chance, all_left = np.full(2, _FIRST_CHANCE), np.ones(2)
    kind_left, left, owns, lefts = np.ones(shape[1:3]), np.ones(shape[1:]), np.empty(shape), np.empty(shape)
    reached = int((all_risk + all_wanted).any(1).nonzero()[0].max(initial=-1)) + 1
    for bucket in range(reached):
        weight = _FIRST_WEIGHT + _LEAST_LEFT * all_risk[bucket]
        chance = np.minimum(1.0, (all_wanted[bucket] + weight * chance) / (all_risk[bucket] * all_left + weight))
        all_left = np.maximum(all_left * (1.0 - chance), 1e-6)
        of_kind = (kind_wanted[bucket] + _PRIOR * chance[:, None]) / (kind_risk[bucket] * kind_left + _PRIOR)
        of_kind = np.minimum(1.0, of_kind)
        kind_left = np.maximum(kind_left * (1.0 - of_kind), 1e-6)
        come = risk[bucket] * left
        expected = (come * of_kind[:, :, None]).sum(1)
        ratio = (tempo_wanted[bucket] + _RATIO_PRIOR) / (expected + _RATIO_PRIOR)
        likely = np.minimum(0.95, of_kind[:, :, None] * ratio[:, None])
        own = np.minimum(1.0, (wanted[bucket] + _TEMPO_PRIOR * likely) / (come + _TEMPO_PRIOR))
        lefts[bucket], owns[bucket] = left, own
        left = np.maximum(left * (1.0 - own), 1e-6)
    for bucket in range(reached, BUCKETS):  # nothing says more than what came before
        lefts[bucket], owns[bucket] = left, chance[:, None, None]
        left = np.maximum(left * (1.0 - owns[bucket]), 1e-6)
    return owns, lefts
