# SPDX-License-Identifier: Apache-2.0
"""What a step does beside what it must do at once: all that waits for its turn, under one budget.
Scheduler thread only.

A long prompt has more blocks than a step can look at. So work on blocks is a generator, which looks
at some and yields how many. ``SHARES`` says which kind of work comes before which, and how many
blocks of it a step looks at. Blocks are counted, and not time: the same calls do the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator
from enum import IntEnum, auto
from typing import Final, NamedTuple

Work = Generator[int, None, None]
"""Yields how many blocks it has looked at, no more than ``StepWork.left`` said; 0: it can do
nothing more in this step."""


class Kind(IntEnum):
    """The kinds of work, in the order in which a step does them."""

    ANSWERS = auto()
    QUESTIONS = auto()
    HINT_ENDS = auto()
    LOADS = auto()
    REACHED = auto()
    SAVES = auto()
    LEFT = auto()
    PUT_OFF = auto()
    RECENCY = auto()
    DEMAND = auto()
    GONE = auto()
    KV_HINTS = auto()
    STANDINGS = auto()
    AGES = auto()
    PREFETCH = auto()
    ASKED = auto()
    FETCHES = auto()
    SENDS = auto()


class Share(NamedTuple):
    """What a step has for one kind of work.

    ``blocks``: that it looks at, whatever else waits. ``keeps_awake``: whether an engine that rests
    makes steps for it; ``when_silent``: also while jobs and commits have been silent for long.
    ``cost``: how many looks a block takes.
    """

    blocks: int
    keeps_awake: bool = True
    when_silent: bool = True
    cost: int = 1


SHARES: Final[dict[Kind, Share]] = {
    # A lookup waits for an answer, and that for its question.
    Kind.ANSWERS: Share(2048, keeps_awake=False),
    Kind.QUESTIONS: Share(4096, keeps_awake=False),
    # Hints that are too old: before anything is read because of them.
    Kind.HINT_ENDS: Share(256, keeps_awake=False),
    # The rest of loads: requests wait for it, so it takes room before prefetches do. With what is
    # spare it is 2,048 blocks that come by memory: a hit of 32,000 tokens is one job.
    Kind.LOADS: Share(3072),
    # What running requests have come to: the step offers it before its plan is made.
    Kind.REACHED: Share(2048),
    # What preempted requests had: the engine overwrites it soon, from its tail on.
    Kind.SAVES: Share(1024, cost=2),
    # What ended requests have left on the GPU: the engine may overwrite it soon.
    Kind.LEFT: Share(1024),
    # What a load has brought: each part is counted, then used, then offered.
    Kind.PUT_OFF: Share(1024),
    # Of jobs by key: what was reached, from the tail of each prompt on.
    Kind.RECENCY: Share(512),
    # The rest of prompts, whose heads are counted: admission of all below goes by it.
    Kind.DEMAND: Share(512),
    # What a reset has left, which nobody finds: who needs the room does not wait for it.
    Kind.GONE: Share(512),
    # Which copies leave first, late, or now.
    Kind.KV_HINTS: Share(256, cost=2),
    Kind.STANDINGS: Share(256, keeps_awake=False, cost=2),
    Kind.AGES: Share(256, cost=8),
    # What nobody needs yet: requests that wait in the queue, KV hints, the next load.
    Kind.PREFETCH: Share(768, keeps_awake=False),
    Kind.ASKED: Share(256, when_silent=False),
    Kind.FETCHES: Share(256, when_silent=False),
    Kind.SENDS: Share(768, when_silent=False),
}
"""The order of a step. No kind waits for ever: each has its own blocks in each step."""
SPARE_BLOCKS = 1024
"""What a step may look at beyond that: who comes first has it."""


class StepWork:
    """The work that waits, by kind and owner: of a kind the owner that came first is first.

    A budget lasts from one plan to the next: it is for the lookups and offers of a step, and then
    for its plan.
    """

    def __init__(self) -> None:
        self._waiting: dict[Kind, dict[object, deque[Work]]] = {}
        """Of kinds of which work waits."""
        self._gates: dict[Kind, Callable[[], bool]] = {}
        self._resting: set[tuple[Kind, object]] = set()
        """Who can do nothing more in this step."""
        self._spent: dict[Kind, int] = {}
        """Looks of this step, by kind."""
        self._beyond = 0
        """Looks of this step beyond the kinds' own shares."""
        self._unbounded: Kind | None = None
        """What is done to its end."""

    # -- what waits ----------------------------------------------------------------------------

    def open_when(self, kind: Kind, is_open: Callable[[], bool]) -> None:
        """Let work of a kind wait, and an engine rest, while ``is_open`` returns False."""
        self._gates[kind] = is_open

    def add(self, kind: Kind, owner: object, work: Work, *, first: bool = False) -> None:
        """Let work wait for its turn, behind the owner's other work, or ``first`` before it."""
        of_owner = self._waiting.setdefault(kind, {}).setdefault(owner, deque())
        if first:
            of_owner.appendleft(work)
        else:
            of_owner.append(work)

    def has(self, kind: Kind, owner: object = None) -> bool:
        """Return whether work of a kind waits, of this owner or (None) of any."""
        return kind in self._waiting if owner is None else owner in self._waiting.get(kind, ())

    def owners(self, kind: Kind) -> Collection[object]:
        """Return whose work of a kind waits, the first first."""
        return self._waiting.get(kind, {}).keys()

    def cancel(self, owner: object, *kinds: Kind) -> None:
        """Do no more of an owner's work of these kinds, or of all."""
        for kind in kinds or tuple(self._waiting):
            for work in self._taken(kind, owner):
                work.close()

    def clear(self) -> None:
        """Forget all work, but for what is left of what was forgotten before."""
        for kind in tuple(self._waiting):
            for owner in tuple(self.owners(kind)) if kind is not Kind.GONE else ():
                self.cancel(owner, kind)

    def _taken(self, kind: Kind, owner: object) -> Collection[Work]:
        """Return an owner's work of a kind, which waits no more."""
        waiting = self._waiting.get(kind)
        if waiting is None:
            return ()
        works = waiting.pop(owner, ())
        if not waiting:
            del self._waiting[kind]
        return works

    # -- the budget ----------------------------------------------------------------------------

    def left(self, kind: Kind) -> int:
        """Return how many blocks of a kind this step may still look at."""
        if kind is self._unbounded:
            return 1 << 30
        share = SHARES[kind]
        looks = max(0, share.blocks - self._spent.get(kind, 0)) + max(0, SPARE_BLOCKS - self._beyond)
        return -(-looks // share.cost)

    def spend(self, kind: Kind, blocks: int) -> None:
        """So many blocks were looked at. What cannot wait is, whatever is left: then nothing is
        spare, and the others have their shares."""
        share, before = SHARES[kind], self._spent.get(kind, 0)
        after = self._spent[kind] = before + blocks * share.cost
        if after > share.blocks:
            self._beyond += after - max(before, share.blocks)

    @property
    def looks(self) -> int:
        """How many looks this step has taken so far."""
        return sum(self._spent.values())

    def end_step(self) -> None:
        """The plan is made: the next step has a budget of its own."""
        self._beyond = 0
        self._spent.clear()
        self._resting.clear()

    # -- doing it ------------------------------------------------------------------------------

    def run(self, *kinds: Kind) -> None:
        """Do what waits, of these kinds, in this order, or of all, as far as the budget goes."""
        for kind in (kinds or SHARES) if self._waiting else ():
            if kind in self._waiting and self._is_open(kind):
                for owner in tuple(self.owners(kind)):
                    if not self._go_on(kind, owner):
                        break

    def finish(self, kind: Kind) -> None:
        """Do all that waits of a kind now, whatever is left: what follows goes by it."""
        self._unbounded = kind
        for owner in tuple(self.owners(kind)):
            for work in self._taken(kind, owner):
                for looked in work:
                    self.spend(kind, looked)
        self._unbounded = None

    def _go_on(self, kind: Kind, owner: object) -> bool:
        """Do an owner's work; return whether there is more to do of this kind in this step."""
        while (of_owner := self._waiting.get(kind, {}).get(owner)) and (kind, owner) not in self._resting:
            if self.left(kind) <= 0 or not self._is_open(kind):
                return False
            work = of_owner[0]
            looked = next(work, None)
            if looked is None:
                of_owner.remove(work)  # it may have put other work before itself
                if not of_owner:
                    self._taken(kind, owner)
            elif looked:
                self.spend(kind, looked)
            else:
                self._resting.add((kind, owner))
        return True

    def _is_open(self, kind: Kind) -> bool:
        gate = self._gates.get(kind)
        return gate is None or gate()

    def is_pending(self, *, silent: bool) -> bool:
        """Return whether an engine that rests makes steps for what waits. ``silent``: jobs and
        commits have been silent for long."""
        return any(
            SHARES[kind].keeps_awake and (SHARES[kind].when_silent or not silent) and self._is_open(kind)
            for kind in self._waiting
        )
