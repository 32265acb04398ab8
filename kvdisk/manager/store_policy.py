# SPDX-License-Identifier: Apache-2.0
"""When blocks are offered to the tiers: the protocol, the policies by name. Scheduler thread only.

The planner tells a policy what happens, offers the tiers what it returns, and tells it the answers.
A policy knows nothing of tiers or slots. One of a user's own (``store_policy: "module:Class"``) is
built without arguments, and is best derived from ``NoStores``."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, Protocol

from kvdisk.blocks import BlockKey
from kvdisk.config import make_own
from kvdisk.context import KVCacheBlockView, SchedulerContext

FIRST_BACK_OFF_S = 0.05
LAST_BACK_OFF_S = 2.0


@dataclass(slots=True)
class BackOff:
    """How long nothing is offered after a refusal: until room came free, and some time passed.

    ``released``: the number at the last refusal. ``seconds``: how long the last one held, twice as
    long as the one before; 0: an offer was taken since, so that the next one is short again.
    """

    released: int = -1
    retry_s: float = 0.0
    seconds: float = 0.0

    def holds(self, released: int, now: float) -> bool:
        """Whether it is too early to offer anything."""
        return released <= self.released or now < self.retry_s

    def refuse(self, released: int, now: float) -> None:
        """Offers were refused. Those that are refused while it holds count as one refusal."""
        if now >= self.retry_s:
            self.seconds = min(self.seconds * 2, LAST_BACK_OFF_S) or FIRST_BACK_OFF_S
        self.released = max(self.released, released)
        self.retry_s = max(self.retry_s, now + (self.seconds or FIRST_BACK_OFF_S))

    def accept(self) -> None:
        """An offer was taken."""
        self.seconds = 0.0


class FreeOffer(NamedTuple):
    """A free GPU block that is offered. ``parent``: key of the block before it in its chain; None:
    first or unknown."""

    block: int
    key: BlockKey
    parent: BlockKey | None


Place = tuple[int, int]
"""A block's group, and its position in that group of its request."""


class StorePolicy(Protocol):
    """Decides which blocks are offered, and when. As it is written here it offers nothing.

    ``saves_victims``: whether ``preempted`` returns anything. Every offer is answered once all
    groups of its request were asked, and before anything else is asked: first by ``accept``, then
    by ``refuse``; for free blocks by ``accept_free`` and ``refuse_free``. An offer that was taken
    may be refused later, when its copy failed. ``released``: a number that rises when room comes
    free.
    """

    saves_victims: bool = False

    def reached(self, request_id: str, keys: Sequence[BlockKey], start: int, stop: int) -> None:
        """A request's blocks from ``start`` to before ``stop`` of one group are full and computed
        for the first time.

        ``keys``: of all the group's blocks. After a preemption a request begins at 0 again.
        """

    def offers(
        self,
        request_id: str,  # noqa: ARG002 - the protocol's signature, here and below
        group: int,  # noqa: ARG002
        storable: int,  # noqa: ARG002
        released: int,  # noqa: ARG002
        now: float,  # noqa: ARG002
    ) -> Sequence[int]:
        """Return the positions of the group's blocks to offer in this step, ascending, none twice.

        ``storable``: how many are full, computed and hashed.
        """
        return ()

    def preempted(self, request_id: str, group: int, storable: int) -> Sequence[int]:  # noqa: ARG002
        """Return the positions of a victim's blocks to offer, before they are overwritten,
        ascending."""
        return ()

    def free_offers(
        self,
        context: SchedulerContext,  # noqa: ARG002
        released: int,  # noqa: ARG002
        now: float,  # noqa: ARG002
    ) -> Sequence[FreeOffer]:
        """Return the free blocks to offer in this step, no key twice."""
        return ()

    def accept(self, request_id: str, places: Sequence[Place]) -> None:
        """The offers need no other: they were taken, are there already, or are not admitted."""

    def refuse(self, request_id: str, places: Sequence[Place], released: int, now: float) -> None:
        """There was no room for the offers, or taken ones failed: offer them again later.

        The request may be gone. ``released``: as it was then.
        """

    def accept_free(self, keys: Sequence[BlockKey]) -> None:
        """As ``accept``, of free blocks."""

    def refuse_free(self, keys: Sequence[BlockKey], released: int, now: float) -> None:
        """As ``refuse``, of free blocks."""

    def waits(self, request_id: str) -> bool:  # noqa: ARG002
        """Whether refused blocks of the request are to be offered again, as soon as there is
        room."""
        return False

    def request_finished(self, request_id: str) -> None:
        """Forget the request."""

    def reset(self) -> None:
        """The weights may have changed, or a block was not filled: no preempted or free block of
        before is offered.

        Running requests reach again what they still hold. The planner offers nothing of those that
        went on through a change of weights.
        """


class NoStores(StorePolicy):
    """Offers nothing: what other policies, a user's own too, differ from."""


@dataclass(slots=True)
class _Watermark:
    """Up to where one request's blocks were offered, by group; drawn back to what found no room.

    ``waits``: it was drawn back, and nothing was offered since.
    """

    frontiers: dict[int, int] = field(default_factory=dict)
    back_off: BackOff = field(default_factory=BackOff)
    waits: bool = False


class OnCompute(NoStores):
    """Offers each full block in the step that computes it.

    Where blocks find no room nothing behind them is offered before they are, after a back-off:
    without them it serves nobody. A block that is not admitted is not offered again: whoever makes
    its count rise offers it.
    """

    def __init__(self) -> None:
        self._watermarks: dict[str, _Watermark] = {}

    def offers(self, request_id: str, group: int, storable: int, released: int, now: float) -> Sequence[int]:
        """Return the blocks from the watermark on; none during the back-off."""
        watermark = self._watermarks.setdefault(request_id, _Watermark())
        if watermark.back_off.holds(released, now):
            return ()
        watermark.waits = False
        start = watermark.frontiers.get(group, 0)
        watermark.frontiers[group] = max(start, storable)
        return range(start, storable)

    def accept(self, request_id: str, places: Sequence[Place]) -> None:  # noqa: ARG002
        """Begin with a short back-off again."""
        self._watermarks[request_id].back_off.accept()

    def refuse(self, request_id: str, places: Sequence[Place], released: int, now: float) -> None:
        """Draw the watermark back."""
        watermark = self._watermarks.get(request_id)
        if watermark is not None:
            watermark.back_off.refuse(released, now)
            watermark.waits = True
            for group, position in places:
                watermark.frontiers[group] = min(position, watermark.frontiers.get(group, 0))

    def waits(self, request_id: str) -> bool:
        """Return whether the watermark is drawn back."""
        watermark = self._watermarks.get(request_id)
        return watermark is not None and watermark.waits

    def request_finished(self, request_id: str) -> None:
        """Forget the request's watermark."""
        self._watermarks.pop(request_id, None)


class OnPreemption(NoStores):
    """Offers what a preemption would lose, and nothing else.

    A preemption offers all of the victim's full blocks once. One that is refused is overwritten
    before room comes free.
    """

    saves_victims = True

    def preempted(self, request_id: str, group: int, storable: int) -> Sequence[int]:  # noqa: ARG002
        """Return all of the victim's blocks."""
        return range(storable)


AHEAD_STEPS = 2
"""How far the cursor is kept ahead of the engine, in steps that take as many blocks as a step
can."""


class _Front:
    """The blocks of the free queue from its head to a cursor, in order. A step's cost is that of
    what has changed.

    vLLM: it takes blocks at the head, may put some before it, and takes others out anywhere when a
    request hits them (``leave``). ``_members``: those of ``_blocks`` that have not left.
    """

    def __init__(self) -> None:
        self._blocks: deque[int] = deque()
        self._members: set[int] = set()

    def advance(self, context: SchedulerContext) -> Iterator[KVCacheBlockView]:
        """Yield the blocks that have come before the cursor, which is moved on to ``AHEAD_STEPS``
        steps' blocks."""
        most = AHEAD_STEPS * context.step_blocks
        yield from self._follow_head(context, most)
        cursor = self._valid_cursor(context)
        if len(self._members) < most:
            added = list(islice(context.iter_free_blocks(cursor), most - len(self._members)))
            self._blocks.extend(block.block_id for block in added)
            self._members.update(block.block_id for block in added)
            yield from added

    def leave(self, block: int) -> None:
        """Forget a block that has left the queue; it may come back, at its end."""
        self._members.discard(block)

    def _follow_head(self, context: SchedulerContext, most: int) -> list[KVCacheBlockView]:
        """Drop what has left the queue at its head; return what was put before it, or all of a
        front found anew."""
        before: list[KVCacheBlockView] = []
        for block in islice(context.iter_free_blocks(), most):
            if block.block_id in self._members:
                while self._blocks[0] != block.block_id:
                    self._members.discard(self._blocks.popleft())
                break
            before.append(block)
        else:
            self._blocks.clear()
            self._members.clear()
        self._blocks.extendleft(block.block_id for block in reversed(before))
        self._members.update(block.block_id for block in before)
        return before

    def _valid_cursor(self, context: SchedulerContext) -> int | None:
        blocks = self._blocks
        while blocks and (blocks[-1] not in self._members or context.get_block(blocks[-1]).ref_cnt > 0):
            self._members.discard(self._blocks.pop())
        return self._blocks[-1] if self._blocks else None


class Spillover(NoStores):
    """Offers free, cached blocks at the front of the engine's free queue.

    The cursor is behind the first blocks of the queue, as many as ``AHEAD_STEPS`` steps can take. A
    block is offered when the cursor passes it; again when it has left the queue and come back. When
    the back-off of a refusal is over, the cursor begins at the head anew, and what was refused is
    offered where it is still there.

    Only blocks of requests that kvdisk follows are offered (an adapter's are not), reached since
    the last reset. Of these it knows the keys last reached, twice as many as the GPU has blocks.
    """

    def __init__(self) -> None:
        self._parents: OrderedDict[BlockKey, BlockKey | None] = OrderedDict()
        self._front = _Front()
        self._blocks: dict[BlockKey, int] = {}
        """The block of each key that was offered last."""
        self._offered: set[BlockKey] = set()
        """Keys that were offered since they were last reached."""
        self._refused: set[BlockKey] = set()
        """Those that found no room."""
        self._back_off = BackOff()

    def reached(self, request_id: str, keys: Sequence[BlockKey], start: int, stop: int) -> None:  # noqa: ARG002
        """Note keys and parents."""
        for position in range(start, stop):
            self._parents[keys[position]] = keys[position - 1] if position else None
            self._parents.move_to_end(keys[position])
            self._offered.discard(keys[position])
            block = self._blocks.get(keys[position])
            if block is not None:
                self._front.leave(block)

    def free_offers(self, context: SchedulerContext, released: int, now: float) -> Sequence[FreeOffer]:
        """Return the blocks that the cursor passes."""
        while len(self._parents) > 2 * context.block_count:
            self._forget(self._parents.popitem(last=False)[0])
        if self._refused and not self._back_off.holds(released, now):
            self._offered -= self._refused
            self._refused.clear()
            self._front = _Front()
        offers: dict[BlockKey, FreeOffer] = {}
        for block in self._front.advance(context):
            key = block.key
            if key is None or key not in self._parents or key in self._offered or key in offers:
                continue
            if block.ref_cnt == 0:
                offers[key] = FreeOffer(block.block_id, key, self._parents[key])
        self._blocks.update((key, offer.block) for key, offer in offers.items())
        self._offered.update(offers)
        self._refused.difference_update(offers)
        return list(offers.values())

    def accept_free(self, keys: Sequence[BlockKey]) -> None:  # noqa: ARG002
        """Begin with a short back-off again."""
        self._back_off.accept()

    def refuse_free(self, keys: Sequence[BlockKey], released: int, now: float) -> None:
        """Offer the blocks again when the back-off is over, if they are there then."""
        self._back_off.refuse(released, now)
        known = [key for key in keys if key in self._parents]
        self._refused.update(known)
        self._offered.update(known)  # a request may have reached them meanwhile

    def _forget(self, key: BlockKey) -> None:
        self._blocks.pop(key, None)
        for known in (self._offered, self._refused):
            known.discard(key)

    def reset(self) -> None:
        """Forget all keys: the blocks may keep theirs, and what they hold is not what those mean
        any more."""
        for known in (self._parents, self._blocks, self._offered, self._refused):
            known.clear()


_POLICIES: Mapping[str, Callable[[], StorePolicy]] = {
    "on_compute": OnCompute,
    "on_preemption": OnPreemption,
    "spillover": Spillover,
}


def make_store_policy(name: str) -> StorePolicy:
    """Return a new policy by its name, or of the class that ``module:Class`` names. Raises
    ConfigError."""
    if name in _POLICIES:
        return _POLICIES[name]()
    own: StorePolicy = make_own("store_policy", name, StorePolicy)
    return own
