# SPDX-License-Identifier: Apache-2.0
"""Whether somebody new still comes, or what has begun only goes on: an evening. Scheduler thread
only."""

from __future__ import annotations

import math
from typing import Final

_RARER: Final = 10.0
"""How many times as rarely somebody new comes of an evening."""
_ODDS_CAP: Final = 2.0
"""The most that one request speaks for an evening."""
_EVENING: Final = 20.0
"""The score from which on it is an evening. On traces to which somebody new comes the highest was
18, but for nights."""
_SCORE_CAP: Final = 24.0
"""The highest score, so that two who are new end an evening."""
_REMEMBERED: Final = 1024
"""Requests that the share of those who are new is a mean of."""


class Newcomers:
    """Counts how many requests began something new, and tests whether they have become rarer.

    A request is new if what it brings follows nothing, or what several requests had wanted: a
    system prompt, a document. It goes on if it extends the prompt of one. It says nothing if all of
    it was known.
    """

    def __init__(self) -> None:
        self._share, self._count = 0.5, 2
        """The share of those who are new, and of how many requests."""
        self._score = 0.0
        """The evidence that they come more rarely lately: the sum of logarithms of likelihood
        ratios since the last time that it was 0 (Page's test)."""
        self._last_came = -1

    @property
    def is_evening(self) -> bool:
        """Whether nobody new has come for long."""
        return self._score > _EVENING

    def note(self, came: int, *, is_new: bool) -> None:
        """A request brought something. ``came``: when it came, by any clock; of each only the first
        note counts, and none after one of a later request."""
        if came <= self._last_came:
            return
        self._last_came = came
        rarely = self._share / _RARER
        odds = 1.0 / _RARER if is_new else min(_ODDS_CAP, (1.0 - rarely) / max(1.0 - self._share, 1e-9))
        self._score = min(_SCORE_CAP, max(0.0, self._score + math.log(odds)))
        self._count = min(self._count + 1, _REMEMBERED)
        self._share += (is_new - self._share) / self._count
