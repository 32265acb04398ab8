# SPDX-License-Identifier: Apache-2.0
"""A store policy that is looked at: it fails where an offer is repeated although nothing has
changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from kvdisk.blocks import BlockKey
from kvdisk.context import KVCacheBlockView, SchedulerContext
from kvdisk.manager.store_policy import AHEAD_STEPS, FreeOffer, Refusal, Spillover, StorePolicy

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
        self._answered: dict[Name, tuple[Refusal, int, int, float] | None] = {}
        """The last answers; None: accepted. Free blocks that were accepted only until a request
        reaches them."""
        self._unused: dict[Name, BlockKey] = {}
        """Those that were refused for lack of reuse, and whose count has not risen since."""
        self._due: set[Name] = set()
        """Those whose count has risen."""
        self._ever_free: set[BlockKey] = set()

    # -- questions -----------------------------------------------------------------------------

    def reached(self, request_id: str, keys: Sequence[BlockKey], start: int, stop: int) -> None:
        """See ``StorePolicy``."""
        assert 0 <= start < stop <= len(keys)
        for key in keys[start:stop]:
            if self._answered.get(key, ()) is None:
                del self._answered[key]
        self.inner.reached(request_id, keys, start, stop)

    def offers(self, request_id: str, group: int, storable: int, released: int, now: float) -> Sequence[int]:
        """See ``StorePolicy``."""
        positions = self.inner.offers(request_id, group, storable, released, now)
        self._begin(request_id, group, positions, storable)
        for position in positions:
            self._check_offer((request_id, group, position), now)
        for name in self._due:
            left_out = name[:2] == (request_id, group) and name[2] < storable
            assert not left_out, f"{name!r} is not offered again, whose count has risen"
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
            why, mark, changes, answered_s = refused
            if why is Refusal.NOT_REUSED:
                assert name in self._due, "an offer is repeated though the count has not risen"
            elif mark >= 0:
                assert now - answered_s >= SHORTEST_BACK_OFF_S, "an offer is repeated without a back-off"
                assert self.changes > changes, "an offer is repeated though no room can have come free"
        self._due.discard(name)

    # -- answers -------------------------------------------------------------------------------

    def accept(self, request_id: str, group: int, positions: Sequence[int]) -> None:
        """See ``StorePolicy``."""
        self.inner.accept(request_id, group, positions)
        for position in positions:
            self._settle((request_id, group, position), None)
            self.on_accept(request_id, group, position)

    def accept_free(self, key: BlockKey) -> None:
        """See ``StorePolicy``."""
        self.inner.accept_free(key)
        self._settle(key, None)

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
        """See ``StorePolicy``."""
        self.inner.refuse(request_id, group, positions, keys, why, released, now)
        for position, key in zip(positions, keys, strict=True):
            name = (request_id, group, position)
            if name in self._answered or name in self._open:  # else it has not been offered yet
                self._refuse(name, key, why, released, now)

    def refuse_free(self, key: BlockKey, why: Refusal, released: int, now: float) -> None:
        """See ``StorePolicy``."""
        self.inner.refuse_free(key, why, released, now)
        self._refuse(key, key, why, released, now)

    def _refuse(self, name: Name, key: BlockKey, why: Refusal, released: int, now: float) -> None:
        # A block that was taken and whose store failed waits for nothing but the back-off.
        self._settle(name, (why, released, self.changes - (name not in self._open), now))
        if why is Refusal.NOT_REUSED:
            self._unused[name] = key

    def _settle(self, name: Name, answer: tuple[Refusal, int, int, float] | None) -> None:
        """An offer is answered, or what was answered before has another end."""
        self._forget([name])
        self._answered[name] = answer

    def _forget(self, names: Iterable[Name]) -> None:
        for name in names:
            self._open.discard(name)
            self._unused.pop(name, None)
            self._due.discard(name)
            self._answered.pop(name, None)

    # -- the rest ------------------------------------------------------------------------------

    def wanted_again(self, keys: Sequence[BlockKey]) -> None:
        """See ``StorePolicy``."""
        self.inner.wanted_again(keys)
        for name in [name for name, key in self._unused.items() if key in keys]:
            del self._unused[name]
            self._due.add(name)

    def waits(self, request_id: str) -> bool:
        """See ``StorePolicy``."""
        return self.inner.waits(request_id)

    def request_finished(self, request_id: str) -> None:
        """See ``StorePolicy``."""
        self.inner.request_finished(request_id)
        self._forget([name for name in self._answered if isinstance(name, tuple) and name[0] == request_id])

    def reset(self) -> None:
        """See ``StorePolicy``."""
        self.inner.reset()
        self._forget([name for name in self._answered if not isinstance(name, tuple)])
