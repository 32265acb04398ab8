# SPDX-License-Identifier: Apache-2.0
"""A store policy that is looked at: it fails where an offer is repeated although nothing has
changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from kvdisk.blocks import BlockKey
from kvdisk.context import KVCacheBlockView, SchedulerContext
from kvdisk.manager.store_policy import AHEAD_STEPS, FreeOffer, Place, Spillover, StorePolicy

SHORTEST_BACK_OFF_S = 0.04
"""An offer refused for lack of room is not repeated sooner."""
Name = tuple[str, int, int] | BlockKey
"""Of an offer: request, group and position; or the key of a free block."""


class WatchedPolicy:
    """``StorePolicy`` around another.

    ``changes``: a number that rises whenever room may have come free. ``on_accept(request_id,
    group, position)`` is called with every offer of a request's block that is accepted,
    ``before_free()`` before free blocks are asked for.
    """

    on_accept: Callable[[str, int, int], None]
    before_free: Callable[[], None]

    def __init__(self, inner: StorePolicy) -> None:
        self.inner = inner
        self.saves_victims = inner.saves_victims
        self.changes = 0
        self._open: set[Name] = set()
        """Offers that wait for their answer."""
        self._answered: dict[Name, tuple[int, int, float] | None] = {}
        """The last answers; None: accepted. Forgotten of a free block when a request reaches it;
        that a request's was accepted, when one before it is refused."""
        self._ever_free: set[BlockKey] = set()

    # -- questions -----------------------------------------------------------------------------

    def reached(self, request_id: str, keys: Sequence[BlockKey], start: int, stop: int) -> None:
        """See ``StorePolicy``."""
        assert 0 <= start < stop <= len(keys)
        for key in keys[start:stop]:
            self._answered.pop(key, None)
        self.inner.reached(request_id, keys, start, stop)

    def offers(self, request_id: str, group: int, storable: int, released: int, now: float) -> Sequence[int]:
        """See ``StorePolicy``."""
        positions = self.inner.offers(request_id, group, storable, released, now)
        self._begin(request_id, group, positions, storable)
        for position in positions:
            self._check_offer((request_id, group, position), now)
        return positions

    def preempted(self, request_id: str, group: int, storable: int) -> Sequence[int]:
        """See ``StorePolicy``."""
        positions = self.inner.preempted(request_id, group, storable)
        self._begin(request_id, group, positions, storable)
        return positions

    def _begin(self, request_id: str, group: int, positions: Sequence[int], storable: int) -> None:
        assert list(positions) == sorted(set(positions)), f"offered twice at once, or out of order: {positions}"
        assert all(position < storable for position in positions)
        # Those of the request's other groups are answered with these.
        others = [name for name in self._open if isinstance(name, bytes) or name[0] != request_id or name[1] >= group]
        assert not others, "an offer was not answered"
        self._open |= {(request_id, group, position) for position in positions}

    def free_offers(self, context: SchedulerContext, released: int, now: float) -> Sequence[FreeOffer]:
        """See ``StorePolicy``."""
        self.before_free()
        queue = {block.block_id: block.key for block in context.iter_free_blocks()}
        front = list(islice(context.iter_free_blocks(), AHEAD_STEPS * context.step_blocks))
        offers = self.inner.free_offers(context, released, now)
        assert not self._open, "an offer was not answered"
        self._open = {offer.key for offer in offers}
        assert len(self._open) == len(offers), "a key is offered twice at once"
        for offer in offers:
            assert queue.get(offer.block) == offer.key, "what is offered is not in the free queue"
            self._check_offer(offer.key, now)
            self._ever_free.add(offer.key)
        if isinstance(self.inner, Spillover):
            self._check_front(self.inner, front)
        return offers

    def _check_front(self, inner: Spillover, front: Sequence[KVCacheBlockView]) -> None:
        """Nothing at the front of the queue is left out."""
        for block in front:
            key = block.key
            assert key not in inner._parents or key in self._ever_free, f"{key!r} is not offered"

    def _check_offer(self, name: Name, now: float) -> None:
        """What was answered before is offered again only where something has changed."""
        if name in self._answered:
            refused = self._answered[name]
            assert refused is not None, f"{name!r} is offered again, which was stored, or is on its way"
            mark, changes, answered_s = refused
            if mark >= 0:
                assert now - answered_s >= SHORTEST_BACK_OFF_S, "an offer is repeated without a back-off"
                assert self.changes > changes, "an offer is repeated though no room can have come free"

    # -- answers -------------------------------------------------------------------------------

    def accept(self, request_id: str, places: Sequence[Place]) -> None:
        """See ``StorePolicy``."""
        self.inner.accept(request_id, places)
        for group, position in places:
            self._settle((request_id, group, position), None)
            self.on_accept(request_id, group, position)

    def accept_free(self, keys: Sequence[BlockKey]) -> None:
        """See ``StorePolicy``."""
        self.inner.accept_free(keys)
        for key in keys:
            self._settle(key, None)

    def refuse(self, request_id: str, places: Sequence[Place], released: int, now: float) -> None:
        """See ``StorePolicy``."""
        self.inner.refuse(request_id, places, released, now)
        for group, position in places:
            for name in [name for name in self._answered if name[:2] == (request_id, group)]:
                if name[2] > position and self._answered[name] is None:
                    del self._answered[name]
            name = (request_id, group, position)
            if name in self._answered or name in self._open:  # else it has not been offered yet
                self._refuse(name, released, now)

    def refuse_free(self, keys: Sequence[BlockKey], released: int, now: float) -> None:
        """See ``StorePolicy``."""
        self.inner.refuse_free(keys, released, now)
        for key in keys:
            self._refuse(key, released, now)

    def _refuse(self, name: Name, released: int, now: float) -> None:
        # A block that was taken and whose store failed waits for nothing but the back-off.
        self._settle(name, (released, self.changes - (name not in self._open), now))

    def _settle(self, name: Name, answer: tuple[int, int, float] | None) -> None:
        """An offer is answered, or what was answered before has another end."""
        self._open.discard(name)
        self._answered[name] = answer

    # -- the rest ------------------------------------------------------------------------------

    def waits(self, request_id: str) -> bool:
        """See ``StorePolicy``."""
        return self.inner.waits(request_id)

    def request_finished(self, request_id: str) -> None:
        """See ``StorePolicy``."""
        self.inner.request_finished(request_id)
        self._answered = {name: answer for name, answer in self._answered.items() if name[0] != request_id}

    def reset(self) -> None:
        """See ``StorePolicy``."""
        self.inner.reset()
        self._answered = {name: answer for name, answer in self._answered.items() if isinstance(name, tuple)}
