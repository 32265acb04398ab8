# SPDX-License-Identifier: Apache-2.0
"""What a replay is compared with: LRU and ARC, which vLLM's own offloading has, and the optimum.

They know nothing of tiers or steps. Each has room for ``capacity`` blocks, takes requests in order,
and counts by the same rule: a block hits when it and all before it in its prompt are there when the
request comes. Then every block of the prompt that is there is used and every other one is written,
the tail of the prompt first, so that its head is the last to be used.

``belady`` knows the future: of the blocks that are there, and the one that comes, it does not keep the
one that is used again last, or never (Belady's MIN, block by block, with bypass). Whoever asks for a
block asks for those before it, so what it keeps are prefixes, and no policy can hit more. It writes
only what will hit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple, Protocol

Prompt = Sequence[Hashable]
"""The blocks of a request. Equal blocks have equal blocks before them."""


class ModelCounts(NamedTuple):
    """``hits``: of each request, how many of its first blocks hit. ``written``, ``evicted``: blocks.

    ``evicted`` is None for ``belady``: it writes only what will be used, and evicts none of it.
    """

    hits: list[int]
    written: int
    evicted: int | None


class Model(Protocol):
    """A cache of blocks."""

    def __contains__(self, block: Hashable) -> bool:
        """Whether a block is there."""

    def use(self, block: Hashable) -> None:
        """A block that is there is used."""

    def add(self, block: Hashable) -> None:
        """A block that is not there is written; others leave for it."""

    def __len__(self) -> int:
        """Blocks that are there."""


class Lru:
    """Least recently used leaves."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[Hashable, None] = OrderedDict()

    def __contains__(self, block: Hashable) -> bool:
        return block in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def use(self, block: Hashable) -> None:
        """See ``Model``."""
        self._blocks.move_to_end(block)

    def add(self, block: Hashable) -> None:
        """See ``Model``."""
        self._blocks[block] = None
        if len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)


class Arc:
    """ARC (FAST '03): what was used once and what was used more often, in shares that follow what comes back."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._target = 0.0  # of the first list's share
        self._once: OrderedDict[Hashable, None] = OrderedDict()
        self._often: OrderedDict[Hashable, None] = OrderedDict()
        self._left_once: OrderedDict[Hashable, None] = OrderedDict()
        self._left_often: OrderedDict[Hashable, None] = OrderedDict()

    def __contains__(self, block: Hashable) -> bool:
        return block in self._once or block in self._often

    def __len__(self) -> int:
        return len(self._once) + len(self._often)

    def use(self, block: Hashable) -> None:
        """See ``Model``."""
        self._once.pop(block, None)
        self._often[block] = None
        self._often.move_to_end(block)

    def add(self, block: Hashable) -> None:
        """See ``Model``."""
        capacity, once, left_once, left_often = self._capacity, self._once, self._left_once, self._left_often
        if block in left_once:
            self._target = min(float(capacity), self._target + max(1.0, len(left_often) / len(left_once)))
            self._replace(came_often=False)
            del left_once[block]
            self._often[block] = None
        elif block in left_often:
            self._target = max(0.0, self._target - max(1.0, len(left_once) / len(left_often)))
            self._replace(came_often=True)
            del left_often[block]
            self._often[block] = None
        else:
            if len(once) + len(left_once) == capacity:
                if len(once) < capacity:
                    left_once.popitem(last=False)
                    self._replace(came_often=False)
                else:
                    once.popitem(last=False)
            elif len(self) + len(left_once) + len(left_often) >= capacity:
                if len(self) + len(left_once) + len(left_often) == 2 * capacity:
                    left_often.popitem(last=False)
                self._replace(came_often=False)
            once[block] = None

    def _replace(self, *, came_often: bool) -> None:
        """Make room for one block, if there is none."""
        if len(self) < self._capacity:
            return
        count = len(self._once)
        if count and (count > self._target or (came_often and count == self._target) or not self._often):
            self._left_once[self._once.popitem(last=False)[0]] = None
        else:
            self._left_often[self._often.popitem(last=False)[0]] = None


MODELS: Mapping[str, Callable[[int], Model]] = {"lru": Lru, "arc": Arc}
BELADY = "belady"


def run_model(name: str, prompts: Sequence[Prompt], capacity: int) -> ModelCounts:
    """Replay prompts against a model."""
    if name == BELADY:
        return run_belady(prompts, capacity)
    model = MODELS[name](capacity)
    hits: list[int] = []
    written = 0
    for prompt in prompts:
        there = [block in model for block in prompt]
        hits.append(there.index(False) if False in there else len(there))
        for block in reversed(prompt):
            if block in model:
                model.use(block)
            elif capacity:
                model.add(block)
                written += 1
    return ModelCounts(hits, written, written - len(model))


def run_belady(prompts: Sequence[Prompt], capacity: int) -> ModelCounts:
    """Replay prompts with knowledge of the future; see the module."""
    references = [block for prompt in prompts for block in prompt]
    next_uses = _next_uses(references)
    # The blocks that are there and when each is used again; the same as a heap, with some that have gone.
    kept: dict[Hashable, int] = {}
    latest: list[tuple[int, Hashable]] = []
    fresh: set[Hashable] = set()  # have not hit yet
    hits: list[int] = []
    written = at = 0
    for prompt in prompts:
        hits.append(0)
        for position, block in enumerate(prompt):
            if kept.pop(block, None) is None:
                fresh.add(block)
            else:
                assert hits[-1] == position, "a block was kept, and one before it was not"
                hits[-1] += 1
                if block in fresh:
                    fresh.remove(block)
                    written += 1
            following = next_uses[at]
            at += 1
            if following < len(references):
                kept[block] = following
                heappush(latest, (-following, block))
                while len(kept) > capacity:
                    following, last = heappop(latest)
                    if kept.get(last) == -following:
                        del kept[last]
                        fresh.discard(last)
            else:
                fresh.discard(block)
    return ModelCounts(hits, written, None)


def _next_uses(references: Sequence[Hashable]) -> list[int]:
    """Return for each reference the position of the next one to the same block; behind the last where there is none."""
    found = [0] * len(references)
    following: dict[Hashable, int] = {}
    for at in reversed(range(len(references))):
        found[at] = following.get(references[at], len(references))
        following[references[at]] = at
    return found
