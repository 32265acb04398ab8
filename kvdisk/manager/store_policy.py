# SPDX-License-Identifier: Apache-2.0
"""When blocks are offered to the tiers: the protocol, the policies by name. Scheduler thread only.

The planner tells a policy what happens, offers the tiers what it returns, and tells it the answers.
A policy knows nothing of tiers or slots. One of a user's own (``store_policy: "module:Class"``) is
built without arguments, and is best derived from ``NoStores``."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import compress, islice
from typing import NamedTuple, Protocol

from kvdisk.blocks import BlockKey
from kvdisk.config import make_own
from kvdisk.context import KVCacheBlockView, SchedulerContext

FIRST_BACK_OFF_S = 0.05
LAST_BACK_OFF_S = 2.0


class Refusal(IntEnum):
    """Why an offer was refused."""

    NOT_REUSED = 1
    NO_ROOM = 2


@dataclass(eq=False, slots=True)
class Refused:
    """A refusal for lack of room, of one block or of several together. ``released``: the number at
    that moment."""

    released: int
    retry_s: float
    back_off_s: float

    @classmethod
    def make(cls, released: int, now: float, before: Refused | None) -> Refused:
        """Return a refusal of now; ``before``: the one before it of the same blocks, whose back-off
        doubles."""
        back_off_s = min(before.back_off_s * 2, LAST_BACK_OFF_S) if before else FIRST_BACK_OFF_S
        return cls(released, now + back_off_s, back_off_s)

    def is_over(self, released: int, now: float) -> bool:
        """Whether room has come free since, and time has passed."""
        return released > self.released and now >= self.retry_s


class Watermark:
    """Up to where one group's blocks of one request have been offered, and which below were
    refused.

    A block refused for lack of reuse is offered again when its count has risen (``rise``), one
    refused for lack of room when room has come free since, with back-off. Nothing else is offered
    twice. While nothing is to be offered, asking costs the same however many blocks wait.

    ``unused``: refused for lack of reuse: positions by key.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.frontier = 0
        self.unused: dict[BlockKey, int] = {}
        # Of those, the ones whose count has risen since.
        self._risen: list[int] = []
        # Refused for lack of room, or offered again since and not answered yet.
        self._no_room: dict[int, Refused] = {}
        # Those of ``_no_room`` that have not been offered again, each once.
        self._refusals: list[Refused] = []

    @property
    def waits(self) -> bool:
        """Whether refused blocks may be candidates without another event than room or time."""
        return bool(self._no_room or self._risen)

    def is_held(self, released: int, now: float) -> bool:
        """Whether blocks wait for room that are not to be offered yet: without them what follows
        serves nobody."""
        return any(not refusal.is_over(released, now) for refusal in self._refusals)

    def candidates(self, limit: int, released: int, now: float) -> Sequence[int]:
        """Return the positions below ``limit`` to offer now, ascending; the frontier moves to
        ``limit``.

        ``released``: a number that rises when room comes free.
        """
        start, self.frontier = self.frontier, max(limit, self.frontier)
        offered: list[int] = []
        if self._risen:
            offered = [position for position in self._risen if position < limit]
            self._risen = [position for position in self._risen if position >= limit]
        if self._refusals:
            offered += self._take_over(limit, released, now)
        return sorted({*offered}) + list(range(start, limit)) if offered else range(start, limit)

    def _take_over(self, limit: int, released: int, now: float) -> list[int]:
        """Return the positions below ``limit`` of those refusals that are over."""
        over = [refusal.is_over(released, now) for refusal in self._refusals]
        if not any(over):
            return []
        ended = {*compress(self._refusals, over)}
        held: set[Refused] = set()
        offered = []
        for position, refusal in self._no_room.items():
            if refusal in ended:
                if position < limit:
                    offered.append(position)
                else:
                    held.add(refusal)
        self._refusals = [refusal for refusal in self._refusals if refusal not in ended or refusal in held]
        return offered

    def accept(self, positions: Sequence[int]) -> None:
        """Do not offer the blocks again: they are stored, on their way, or of no use."""
        if self._no_room:
            for position in positions:
                self._no_room.pop(position, None)

    def rise(self, key: BlockKey) -> None:
        """Offer a block again that was refused for lack of reuse: its count has risen."""
        position = self.unused.pop(key, None)
        if position is not None:
            self._risen.append(position)

    def refuse_unused(self, positions: Sequence[int], keys: Sequence[BlockKey]) -> None:
        """Remember what was refused for lack of reuse, all of it below the frontier."""
        self.accept(positions)
        self.unused.update(zip(keys, positions, strict=True))

    def refuse(self, positions: Sequence[int], released: int, now: float) -> None:
        """Remember what was refused for lack of room; ``released`` is its number at this moment.

        Blocks from the frontier on are offered anyway: their load failed, or a store from before a
        reset.
        """
        if self._risen:
            self._risen = [position for position in self._risen if position not in positions]
        refused: dict[Refused | None, Refused] = {}
        for position in positions:
            if position < self.frontier:
                before = self._no_room.get(position)
                refusal = refused.get(before)
                if refusal is None:
                    refusal = refused[before] = Refused.make(released, now, before)
                self._no_room[position] = refusal
        self._refusals += refused.values()


class FreeOffer(NamedTuple):
    """A free GPU block that is offered. ``parent``: key of the block before it in its chain; None:
    first or unknown."""

    block: int
    key: BlockKey
    parent: BlockKey | None


class StorePolicy(Protocol):
    """Decides which blocks are offered, and when. As it is written here it offers nothing.

    ``saves_victims``: whether ``preempted`` returns anything. Every offer is answered once all
    groups of its request were asked, and before anything else is asked: by ``accept`` or
    ``refuse``, for free blocks by ``accept_free`` or ``refuse_free``. An offer that was taken may
    be refused later, when its copy failed. ``released``: a number that rises when room comes free.
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

    def accept(self, request_id: str, group: int, positions: Sequence[int]) -> None:
        """The offers were taken, or the blocks are there already."""

    def refuse(
        self,
        request_id: str,
        group: int,
        positions: Sequence[int],
        keys: Sequence[BlockKey],
        why: Refusal,
        released: int,
        now: float,
    ) -> None:
        """The offers were refused, or taken ones failed: offer them again when things have changed.

        ``keys``: of the blocks. ``released``: as it was then, for those that were refused for lack
        of room.
        """

    def wanted_again(self, keys: Sequence[BlockKey]) -> None:
        """More requests want these blocks than before: those that were refused for lack of reuse
        may be admitted."""

    def accept_free(self, key: BlockKey) -> None:
        """The offer of a free block was taken, or the block is there already."""

    def refuse_free(self, key: BlockKey, why: Refusal, released: int, now: float) -> None:
        """The offer of a free block was refused, or its store failed. ``released``: as in
        ``refuse``."""

    def waits(self, request_id: str) -> bool:  # noqa: ARG002
        """Whether refused blocks of the request are to be offered again, as soon as there is room
        or at once."""
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


class OnCompute(NoStores):
    """Offers each full block in the step that computes it."""

    def __init__(self) -> None:
        self._watermarks: dict[str, dict[int, Watermark]] = {}
        """By request and group."""
        self._waiting: set[str] = set()
        """Those with blocks to be offered again: few, and asked for in every step."""
        self._unused: dict[BlockKey, tuple[Watermark, ...]] = {}
        """Of each block that was refused for lack of reuse, the watermarks that wait for its count
        to rise."""

    def offers(self, request_id: str, group: int, storable: int, released: int, now: float) -> Sequence[int]:
        """Return new blocks, and refused ones whose cause has changed; no new ones while others
        wait for room."""
        watermarks = self._watermarks.setdefault(request_id, {})
        watermark = watermarks.get(group)
        if request_id in self._waiting and any(other.is_held(released, now) for other in watermarks.values()):
            storable = 0 if watermark is None else min(storable, watermark.frontier)
        if watermark is None:
            watermark = watermarks[group] = Watermark(request_id)
        elif storable == watermark.frontier and not watermark.waits:
            return ()
        return watermark.candidates(storable, released, now)

    def accept(self, request_id: str, group: int, positions: Sequence[int]) -> None:
        """Do not offer the blocks again."""
        if request_id in self._waiting:  # what was never refused is not offered twice
            self._watermarks[request_id][group].accept(positions)
            self._refresh(request_id)

    def _refresh(self, request_id: str) -> None:
        """Note whether any of a request's blocks wait, some of which were answered."""
        if any(watermark.waits for watermark in self._watermarks[request_id].values()):
            self._waiting.add(request_id)
        else:
            self._waiting.discard(request_id)

    def refuse(
        self,
        request_id: str,
        group: int,
        positions: Sequence[int],
        keys: Sequence[BlockKey],
        why: Refusal,
        released: int,
        now: float,
    ) -> None:
        """Offer the blocks again when the cause has changed. A request that is gone is ignored."""
        watermark = self._watermarks.get(request_id, {}).get(group)
        if watermark is None:
            return
        if why is Refusal.NOT_REUSED:
            watermark.refuse_unused(positions, keys)
            for key in keys:
                self._unused[key] = (*self._unused.get(key, ()), watermark)
        else:
            watermark.refuse(positions, released, now)
            if watermark.unused:  # one that another request has stored since, and whose load failed
                self._forget(watermark, [key for key in keys if key in watermark.unused])
        self._refresh(request_id)

    def wanted_again(self, keys: Sequence[BlockKey]) -> None:
        """Offer those blocks again that were refused for lack of reuse."""
        if self._unused:
            for key in keys:
                for watermark in self._unused.pop(key, ()):
                    watermark.rise(key)
                    self._waiting.add(watermark.request_id)

    def waits(self, request_id: str) -> bool:
        """Return whether any group has blocks to be offered again."""
        return request_id in self._waiting

    def request_finished(self, request_id: str) -> None:
        """Forget the request's watermarks."""
        for watermark in self._watermarks.pop(request_id, {}).values():
            self._forget(watermark, list(watermark.unused))
        self._waiting.discard(request_id)

    def _forget(self, watermark: Watermark, keys: Sequence[BlockKey]) -> None:
        """Wait no more, for a watermark, until the counts of some blocks rise."""
        for key in keys:
            del watermark.unused[key]
            others = tuple(other for other in self._unused.pop(key) if other is not watermark)
            if others:
                self._unused[key] = others


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
    block is offered when the cursor passes it; again when its refusal is over, or when it has left
    the queue and come back.

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
        self._unused: dict[BlockKey, int] = {}
        self._no_room: dict[BlockKey, int] = {}
        self._groups: deque[tuple[Refused, float, list[BlockKey]]] = deque()
        """Keys of ``_no_room`` that were refused together, at that time; they are offered again
        together."""
        self._retried: Refused | None = None
        """The refusal of those that were offered again last, whose back-off the next refusal
        doubles."""
        self._due: dict[BlockKey, int] = {}

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
        """Return the blocks that the cursor passes, and those that are due again."""
        while len(self._parents) > 2 * context.block_count:
            self._forget(self._parents.popitem(last=False)[0])
        while self._groups and self._groups[0][0].is_over(released, now):
            self._retried, _, keys = self._groups.popleft()
            self._due.update((key, self._no_room.pop(key)) for key in keys if key in self._no_room)
        due, self._due = self._due, {}
        offers: dict[BlockKey, FreeOffer] = {}
        for wanted, block_id in due.items():
            block = context.get_block(block_id)
            if block.key == wanted:
                self._add(offers, block)
        for block in self._front.advance(context):
            key = block.key
            if key is None:
                continue
            if key in self._unused:
                self._unused[key] = block.block_id
            elif key in self._no_room:
                self._no_room[key] = block.block_id
            elif key not in self._offered:
                self._add(offers, block)
        self._blocks.update((key, offer.block) for key, offer in offers.items())
        self._offered.update(offers)
        return list(offers.values())

    def _add(self, offers: dict[BlockKey, FreeOffer], block: KVCacheBlockView) -> None:
        key = block.key
        if key is not None and block.ref_cnt == 0 and key in self._parents and key not in offers:
            offers[key] = FreeOffer(block.block_id, key, self._parents[key])

    def accept_free(self, key: BlockKey) -> None:
        """Do not offer the block again until it is reached again."""
        self._retried = None
        for known in (self._unused, self._no_room, self._due):
            known.pop(key, None)

    def refuse_free(self, key: BlockKey, why: Refusal, released: int, now: float) -> None:
        """Offer the block again when its cause has changed, if it is there then."""
        block = self._blocks.get(key)
        if block is None:
            return
        if why is Refusal.NOT_REUSED:
            self._unused[key] = block
        else:
            self._no_room[key] = block
            if not self._groups or self._groups[-1][1] != now:
                self._groups.append((Refused.make(released, now, self._retried), now, []))
            refused, _, keys = self._groups[-1]
            refused.released = max(refused.released, released)
            keys.append(key)

    def wanted_again(self, keys: Sequence[BlockKey]) -> None:
        """Offer those that were refused for lack of reuse again."""
        for key in keys:
            block = self._unused.pop(key, None)
            if block is not None:
                self._due[key] = block

    def _forget(self, key: BlockKey) -> None:
        self.accept_free(key)
        self._blocks.pop(key, None)
        self._offered.discard(key)

    def reset(self) -> None:
        """Forget all keys: the blocks may keep theirs, and what they hold is not what those mean
        any more."""
        for known in (self._parents, self._blocks, self._offered, self._unused, self._no_room, self._due):
            known.clear()
        self._groups.clear()
        self._retried = None


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
