# SPDX-License-Identifier: Apache-2.0
"""Which blocks are offered to the tiers, and when: the protocol, the policies by name. Scheduler
thread only.

The planner calls a policy when something happens, and offers the tiers what it returns. What finds
no room the planner offers again (``stores``). A policy knows nothing of tiers or slots. One of a
user's own (``store_policy: "module:Class"``) is built without arguments, and is best derived from
``NoStores``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

from kvdisk.blocks import BlockKey
from kvdisk.config import STORE_POLICIES, make_own
from kvdisk.context import SchedulerContext


class FreeOffer(NamedTuple):
    """A free GPU block that is offered. ``parent``: key of the block before it in its chain; None:
    first or unknown."""

    block: int
    key: BlockKey
    parent: BlockKey | None


class StorePolicy(Protocol):
    """Decides which blocks are offered, and when. As it is written here it offers nothing.

    ``saves_victims``: whether ``preempted`` returns anything. ``offers_all``: whether ``reached``
    returns every block, so that one which follows a block that no tier has is of no use.

    A class may have ``is_told_later``, True: then ``reached`` is called part by part of what a long
    load has brought, also once the request has ended. Else it is called for all of that at once.
    """

    saves_victims: bool = False
    offers_all: bool = False

    def reached(
        self,
        request_id: str,  # noqa: ARG002 - the protocol's signature, here and below
        keys: Sequence[BlockKey],  # noqa: ARG002
        start: int,  # noqa: ARG002
        stop: int,  # noqa: ARG002
    ) -> Sequence[int]:
        """A request's blocks from ``start`` to before ``stop`` of one group are full and computed
        for the first time. Return the positions of those to offer.

        ``keys``: of all the group's blocks. After a preemption a request begins at 0 again.
        """
        return ()

    def preempted(self, request_id: str, group: int, storable: int) -> Sequence[int]:  # noqa: ARG002
        """Return the positions of a victim's blocks to offer, before they are overwritten,
        ascending.

        ``storable``: how many of the group's are full, computed and hashed. One that is refused is
        not offered again.
        """
        return ()

    def free_offers(self, context: SchedulerContext) -> Sequence[FreeOffer]:  # noqa: ARG002
        """Return the free blocks to offer, no key twice.

        Asked when the engine may have taken as many blocks as a step can since it was last asked,
        or has fewer free than ``AHEAD_STEPS`` steps can take, and not during a back-off.
        """
        return ()

    def refuse_free(self, keys: Sequence[BlockKey]) -> None:
        """There was no room for these free blocks, or their stores failed: offer them again."""

    def request_finished(self, request_id: str) -> None:
        """Forget the request."""

    def reset(self) -> None:
        """The weights may have changed, or a block was not filled: offer no free block of before.

        Running requests reach again what they still hold. The planner offers nothing of those that
        went on through a change of weights.
        """


class NoStores(StorePolicy):
    """Offers nothing: what other policies, a user's own too, differ from."""


class OnCompute(NoStores):
    """Offers each full block in the step that computes it."""

    offers_all = is_told_later = True

    def reached(self, request_id: str, keys: Sequence[BlockKey], start: int, stop: int) -> Sequence[int]:  # noqa: ARG002
        """Return all of them."""
        return range(start, stop)


class OnPreemption(NoStores):
    """Offers what a preemption would lose, and nothing else: all of the victim's full blocks."""

    saves_victims = is_told_later = True

    def preempted(self, request_id: str, group: int, storable: int) -> Sequence[int]:  # noqa: ARG002
        """Return all of the victim's blocks."""
        return range(storable)


AHEAD_STEPS = 2
"""How far ahead of the engine free blocks are offered, in steps that take as many blocks as a step
can."""


class Spillover(NoStores):
    """Offers free, cached blocks at the front of the engine's free queue: as many as
    ``AHEAD_STEPS`` steps can take.

    A block is offered once each time that a request has reached it. Only blocks of requests that
    kvdisk follows are offered (an adapter's are not), reached since the last reset. Of these it
    knows the keys last reached, twice as many as the GPU has blocks.
    """

    is_told_later = True

    def __init__(self) -> None:
        self._parents: OrderedDict[BlockKey, BlockKey | None] = OrderedDict()
        self._offered: set[BlockKey] = set()
        """Keys that were offered since they were last reached."""

    def reached(self, request_id: str, keys: Sequence[BlockKey], start: int, stop: int) -> Sequence[int]:  # noqa: ARG002
        """Note keys and parents; offer nothing yet."""
        some = keys[start:stop]
        for key, parent in zip(some, [keys[start - 1] if start else None, *some], strict=False):
            self._parents[key] = parent
            self._parents.move_to_end(key)
        self._offered.difference_update(some)
        return ()

    def free_offers(self, context: SchedulerContext) -> Sequence[FreeOffer]:
        """Return the blocks that have come to the front."""
        while len(self._parents) > 2 * context.block_count:
            self._offered.discard(self._parents.popitem(last=False)[0])
        offers = []
        for block in islice(context.iter_free_blocks(), AHEAD_STEPS * context.step_blocks):
            key = block.key
            if key is not None and key in self._parents and key not in self._offered:
                self._offered.add(key)
                offers.append(FreeOffer(block.block_id, key, self._parents[key]))
        return offers

    def refuse_free(self, keys: Sequence[BlockKey]) -> None:
        """Offer the blocks again, if they are still there."""
        self._offered.difference_update(keys)

    def reset(self) -> None:
        """Forget all keys: the blocks may keep theirs, and what they hold is not what those mean
        any more."""
        self._parents.clear()
        self._offered.clear()


_POLICIES: Mapping[str, Callable[[], StorePolicy]] = {
    "on_compute": OnCompute,
    "on_preemption": OnPreemption,
    "spillover": Spillover,
}
assert tuple(_POLICIES) == STORE_POLICIES


def make_store_policy(name: str) -> StorePolicy:
    """Return a new policy; ``name``: one of ``STORE_POLICIES``, or a class of the user's as
    ``module:Class``. Raises ConfigError."""
    if ":" not in name:
        return _POLICIES[name]()
    own: StorePolicy = make_own("store_policy", name, StorePolicy)
    return own
