# SPDX-License-Identifier: Apache-2.0
"""Who may enter a tier: the policies by name. Scheduler thread only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from kvdisk.blocks import BlockKey, group_of
from kvdisk.config import make_own
from kvdisk.errors import ConfigError
from kvdisk.manager.eviction import TailFirst
from kvdisk.manager.reuse import NEW_STATE, ReuseHistory


class AdmissionPolicy:
    """Decides for one tier. What is here lets every block in.

    The CPU tier's is asked when a request offers a block. The NVMe tier's is asked when a copy in
    the CPU tier becomes READY, each time a request wants it there, and before it leaves; without a
    CPU tier, when a request offers it.
    """

    @property
    def admits_all(self) -> bool:
        """Whether ``admits`` would now return True for any block: then it is not asked."""
        return True

    def want(self, keys: Sequence[BlockKey], request_id: str) -> None:
        """A request wanted these blocks, in the order of its prompt. Told once for each of them,
        before ``admits`` is asked."""

    def admits(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """Return of each block whether it may enter now."""
        return [True] * len(keys)

    def watch(self, orders: Sequence[TailFirst]) -> None:
        """Be given the eviction orders of the tier, by size class. Once, before any other call."""

    def note_room(self, free: int, total: int) -> None:
        """Take note, once a step, of the tier's free slots and of all that it may have, counted in
        slots of the smallest size."""

    def reset(self) -> None:
        """Forget all counts: the KV they stood for is gone."""


class AdmitReused(AdmissionPolicy):
    """A block may enter once ``needed`` distinct requests wanted it."""

    admits_all = False

    def __init__(self, history: ReuseHistory, needed: int) -> None:
        self._history = history
        self._needed = needed

    def admits(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """Return of each block whether enough distinct requests wanted it."""
        return [self._history.known(key)[0] >= self._needed for key in keys]


class AdmitLearned(AdmissionPolicy):
    """Admits everything while there is room, and then what is worth its write: what is expected to
    bring more hits while it is kept than what leaves for it, by ``LEAST_GAIN`` hits a block.

    Where copies of several sizes would leave, those that bring most are compared with: a hit needs
    the blocks of all groups. With recurrent states KV is worth what a new state is: it serves only
    with the one behind it.
    """

    LEAST_GAIN: Final = 0.02

    def __init__(self, history: ReuseHistory) -> None:
        self._history = history
        self._is_full = False
        self._evictors: Sequence[TailFirst] = ()

    def watch(self, orders: Sequence[TailFirst]) -> None:
        """Compare with what these would let leave."""
        self._evictors = orders

    @property
    def admits_all(self) -> bool:
        """Return whether there is room, or it is an evening: then the running conversations are all
        that can come back, and their blocks bring more than was learnt while others came."""
        return not self._is_full or self._history.is_evening

    def admits(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """Return of each block whether it is worth its write."""
        if self.admits_all:
            return [True] * len(keys)
        history, rate = self._history, max(order.least_rate() for order in self._evictors)
        gains: dict[tuple[int, int, int], bool] = {}
        answers: list[bool] = []
        for key in keys:
            _, number, blocks, ticks = history.known(key)
            if history.state_groups and group_of(key) not in history.state_groups:
                number, blocks, ticks = NEW_STATE, 0, 0
            kind = (number, blocks.bit_length(), ticks.bit_length())  # as far as the history tells ages apart
            if kind not in gains:
                gains[kind] = history.gain(number, blocks, ticks, rate) >= self.LEAST_GAIN
            answers.append(gains[kind])
        return answers

    def note_room(self, free: int, total: int) -> None:
        """A tier is full where an eighth of it or less is free."""
        self._is_full = free * 8 <= total


def make_admission(text: str, history: ReuseHistory, key: str = "admission") -> AdmissionPolicy:
    """Return a new policy. ``key``: the setting that ``text`` is the value of. Raises
    ConfigError."""
    if text == "all":
        return AdmissionPolicy()
    if text == "learned":
        return AdmitLearned(history)
    reuse = re.fullmatch(r"reuse\((\d+)\)", text)
    if reuse:
        return AdmitReused(history, int(reuse[1]))
    if ":" not in text:
        raise ConfigError(f"{key} must be 'all', 'learned', 'reuse(n)' or 'module:Class', not {text!r}.")
    policy: AdmissionPolicy = make_own(key, text, AdmissionPolicy)
    return policy
