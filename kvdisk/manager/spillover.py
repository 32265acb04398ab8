# SPDX-License-Identifier: Apache-2.0
"""The lazy store policy: cached blocks are offered shortly before the engine reuses them. Scheduler thread only."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from itertools import islice

from kvdisk.blocks import BlockKey
from kvdisk.context import KVCacheBlockView, SchedulerContext
from kvdisk.manager.store_policy import FreeOffer, NoStores
from kvdisk.manager.watermark import Refusal, Refused

AHEAD_STEPS = 2
"""How far the cursor is kept ahead of the engine, in steps that take as many blocks as a step can."""


class _Front:
    """The blocks of the free queue from its head to a cursor, in order. Keeping it costs what has changed.

    The engine takes blocks at the head, may put some before it, and takes others out anywhere when a request hits them,
    of which ``leave`` tells. ``_members``: those of ``_blocks`` that have not left.
    """

    def __init__(self) -> None:
        self._blocks: deque[int] = deque()
        self._members: set[int] = set()

    def advance(self, context: SchedulerContext) -> Iterator[KVCacheBlockView]:
        """Yield the blocks that have come before the cursor, which is moved on to ``AHEAD_STEPS`` steps' blocks."""
        most = AHEAD_STEPS * context.step_blocks
        yield from self._follow_head(context, most)
        cursor = self._valid_cursor(context)
        if len(self._members) < most:
            added = list(islice(context.iter_free_blocks(cursor), most - len(self._members)))
            self._blocks.extend(block.block_id for block in added)
            self._members.update(block.block_id for block in added)
            yield from added

    def leave(self, block: int) -> None:
        """A block has left the queue; it may come back, at its end."""
        self._members.discard(block)

    def _follow_head(self, context: SchedulerContext, most: int) -> list[KVCacheBlockView]:
        """Drop what has left the queue at its head; return what was put before it, or all of a front found anew."""
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

    The cursor stands behind the first blocks of the queue, as many as ``AHEAD_STEPS`` steps can take. A block is
    offered when the cursor passes it; again when its refusal is over, or when it has left the queue and come back.

    Only blocks of requests that kvdisk follows are offered (an adapter's are not), and that were reached since the last
    reset: their keys are known, twice as many as the GPU has blocks; the last reached stay.
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
        """Keys of ``_no_room`` that were refused together, at that time; they are offered again together."""
        self._retried: Refused | None = None
        """The refusal of those that were offered again last, whose back-off the next refusal doubles."""
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

    def free_offers(self, context: SchedulerContext, room: int, now: float) -> Sequence[FreeOffer]:
        """Return the blocks that the cursor passes, and those that are due again."""
        while len(self._parents) > 2 * context.block_count:
            self._forget(self._parents.popitem(last=False)[0])
        while self._groups and self._groups[0][0].is_over(room, now):
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
            waiting = next((refused for refused in (self._unused, self._no_room) if key in refused), None)
            if key is None:
                continue
            if waiting is not None:
                waiting[key] = block.block_id
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

    def refuse_free(self, key: BlockKey, why: Refusal, mark: int, now: float) -> None:
        """Offer the block again when its cause has changed, if it is there then."""
        block = self._blocks.get(key)
        if block is None:
            return
        if why is Refusal.NOT_REUSED:
            self._unused[key] = block
        else:
            self._no_room[key] = block
            if not self._groups or self._groups[-1][1] != now:
                self._groups.append((Refused.make(mark, now, self._retried), now, []))
            refused, _, keys = self._groups[-1]
            refused.mark = max(refused.mark, mark)
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
        """Forget all keys: the blocks may keep theirs, and what they hold is not what those mean any more."""
        for known in (self._parents, self._blocks, self._offered, self._unused, self._no_room, self._due):
            known.clear()
        self._groups.clear()
        self._retried = None
