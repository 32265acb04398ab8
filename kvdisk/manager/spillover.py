# SPDX-License-Identifier: Apache-2.0
"""The lazy store policy: cached blocks are offered shortly before the engine reuses them. Scheduler thread only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from kvdisk.blocks import BlockKey
from kvdisk.context import SchedulerContext
from kvdisk.manager.store_policy import FreeOffer, NoStores
from kvdisk.manager.watermark import Refusal, Refused

AHEAD_STEPS = 2
"""How far the cursor is kept ahead of the engine, in steps that take as many blocks as a step can."""


@dataclass(slots=True)
class _Known:
    """A block that may be offered. ``is_dealt_with``: it was offered since it was last reached. How that offer ended,
    if it was refused: ``is_unused``: for lack of reuse; ``refused``: for lack of room."""

    parent: BlockKey | None
    is_dealt_with: bool = False
    is_unused: bool = False
    refused: Refused | None = None

    def may_be_offered(self, room: int, now: float) -> bool:
        """Whether it was reached, or what was in its way has changed, since it was last offered."""
        if self.is_unused:
            return False
        return not self.is_dealt_with if self.refused is None else self.refused.is_over(room, now)


class Spillover(NoStores):
    """Offers free, cached blocks at the front of the engine's free queue.

    The cursor stands behind the first blocks of the queue, as many as ``AHEAD_STEPS`` steps can take. Each step it
    goes over them, from the queue's head, and offers each once; again only when its refusal is over, or when a request
    has reached it again. What a store held comes back at the queue's head, as it was: the engine reuses it next.
    Of the free blocks and those that stores hold already, stores never get more than half: the engine needs the rest.

    Only blocks of requests that kvdisk follows are offered (an adapter's are not), and that were reached since the last
    reset: their keys are known, twice as many as the GPU has blocks; the last reached stay.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[BlockKey, _Known] = OrderedDict()

    def reached(self, request_id: str, keys: Sequence[BlockKey], start: int, stop: int) -> None:  # noqa: ARG002
        """Note keys and parents."""
        for position in range(start, stop):
            key = keys[position]
            known = self._known.get(key)
            if known is None:
                self._known[key] = _Known(keys[position - 1] if position else None)
            else:
                known.is_dealt_with = False
                self._known.move_to_end(key)

    def free_offers(self, context: SchedulerContext, held: int, room: int, now: float) -> Sequence[FreeOffer]:
        """Return blocks before the cursor that were not offered since they were reached, and those that are due."""
        while len(self._known) > 2 * context.block_count:
            self._known.popitem(last=False)
        blocks = list(islice(context.iter_free_blocks(), AHEAD_STEPS * context.step_blocks))
        most = (len(blocks) + held) // 2 - held
        offers: dict[BlockKey, FreeOffer] = {}
        for block in blocks:
            if len(offers) >= most:
                break
            key = block.key
            known = self._known.get(key) if key is not None else None
            if key is None or known is None or key in offers:
                continue
            if known.may_be_offered(room, now):
                known.is_dealt_with = True
                offers[key] = FreeOffer(block.block_id, key, known.parent)
        return list(offers.values())

    def accept_free(self, key: BlockKey) -> None:
        """Do not offer the block again until it is reached again."""
        known = self._known.get(key)
        if known is not None:
            known.refused = None

    def refuse_free(self, key: BlockKey, why: Refusal, mark: int, now: float) -> None:
        """Offer the block again when its cause has changed, if it is there then."""
        known = self._known.get(key)
        if known is None:
            return
        if why is Refusal.NOT_REUSED:
            known.is_unused, known.refused = True, None
        else:
            known.refused = Refused.make(mark, now, known.refused)

    def wanted_again(self, keys: Sequence[BlockKey]) -> None:
        """Offer those that were refused for lack of reuse again."""
        for key in keys:
            known = self._known.get(key)
            if known is not None and known.is_unused:
                known.is_unused = known.is_dealt_with = False

    def reset(self) -> None:
        """Forget all keys: the blocks may keep theirs, and what they hold is not what those mean any more."""
        self._known.clear()
