# SPDX-License-Identifier: Apache-2.0
"""A store policy that is looked at: it fails where an offer is repeated although nothing has changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from kvdisk.blocks import BlockKey
from kvdisk.context import KVCacheBlockView, SchedulerContext
from kvdisk.manager.store_policy import AHEAD_STEPS, FreeOffer, Refusal, Spillover, StorePolicy

SHORTEST_BACK_OFF_S = 0.04
"""An offer refused for lack of room is not repeated sooner."""


class WatchedPolicy:
    """``StorePolicy`` around another.

    ``changes``: a number that rises whenever room may have come free. ``on_accept(request_id, group, position)`` is
    called with every offer of a request's block that is accepted, ``before_free()`` before free blocks are asked for.
    """

    on_accept: Callable[[str, int, int], None]
    before_free: Callable[[], None]

    def __init__(self, inner: StorePolicy) -> None:
        self.inner = inner
        self.saves_victims = inner.saves_victims
        self.changes = 0
        self._open: set[object] = set()
        """Offers that wait for their answer: (request, group, position), or the key of a free block."""
        self._answered: dict[tuple[str, int, int], tuple[Refusal | None, int, int, float]] = {}
        self._unused: dict[tuple[str, int, int], BlockKey] = {}
        """Those that were refused for lack of reuse, and whose count has not risen since."""
        self._due: set[tuple[str, int, int]] = set()
        """Those whose count has risen."""
        self._free: set[BlockKey] = set()
        """Free blocks that were offered, and that no request has reached since."""
        self._ever_free: set[BlockKey] = set()
        self._refused_free: dict[BlockKey, tuple[Refusal, int, int, float]] = {}
        self._due_free: set[BlockKey] = set()

    # -- questions -----------------------------------------------------------------------------

    def reached(self, request_id: str, keys: Sequence[BlockKey], start: int, stop: int) -> None:
        """See ``StorePolicy``."""
        assert 0 <= start < stop <= len(keys)
        self._free.difference_update(keys[start:stop])
        self.inner.reached(request_id, keys, start, stop)

    def offers(self, request_id: str, group: int, storable: int, room: int, now: float) -> Sequence[int]:
        """See ``StorePolicy``."""
        positions = self.inner.offers(request_id, group, storable, room, now)
        self._begin(request_id, group, positions, storable)
        for position in positions:
            name = (request_id, group, position)
            before = self._answered.get(name)
            if before is not None:
                why, mark, changes, answered_s = before
                assert why is not None, "a block is offered again that was stored, or is on its way"
                self._check_repeated((why, mark, changes, answered_s), now, has_risen=name in self._due)
                self._due.discard(name)
        for name in self._due:
            left_out = name[:2] == (request_id, group) and name[2] < storable
            assert not left_out, f"{name} is not offered again, whose count has risen"
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
        others = [
            name for name in self._open if not isinstance(name, tuple) or name[0] != request_id or name[1] >= group
        ]
        assert not others, "an offer was not answered"
        self._open |= {(request_id, group, position) for position in positions}

    def free_offers(self, context: SchedulerContext, room: int, now: float) -> Sequence[FreeOffer]:
        """See ``StorePolicy``."""
        self.before_free()
        queue = {block.block_id: block.key for block in context.iter_free_blocks()}
        front = list(islice(context.iter_free_blocks(), AHEAD_STEPS * context.step_blocks))
        offers = self.inner.free_offers(context, room, now)
        assert not self._open, "an offer was not answered"
        self._open = {offer.key for offer in offers}
        assert len(self._open) == len(offers), "a key is offered twice at once"
        for offer in offers:
            assert queue.get(offer.block) == offer.key, "what is offered is not in the free queue"
            refused = self._refused_free.get(offer.key)
            if refused is not None:
                self._check_repeated(refused, now, has_risen=offer.key in self._due_free)
                self._due_free.discard(offer.key)
            else:
                assert offer.key not in self._free, "a free block is offered twice"
            self._free.add(offer.key)
            self._ever_free.add(offer.key)
        if isinstance(self.inner, Spillover):
            self._check_front(self.inner, front)
        return offers

    def _check_front(self, inner: Spillover, front: Sequence[KVCacheBlockView]) -> None:
        """Nothing at the front of the queue is left out."""
        for block in front:
            key = block.key
            assert key not in inner._parents or key in self._ever_free, f"{key!r} is not offered"

    def _check_repeated(self, before: tuple[Refusal, int, int, float], now: float, *, has_risen: bool) -> None:
        why, mark, changes, answered_s = before
        if why is Refusal.NOT_REUSED:
            assert has_risen, "an offer is repeated though the count has not risen"
        elif mark >= 0:
            assert now - answered_s >= SHORTEST_BACK_OFF_S, "an offer is repeated without a back-off"
            assert self.changes > changes, "an offer is repeated though no room can have come free"

    # -- answers -------------------------------------------------------------------------------

    def accept(self, request_id: str, group: int, positions: Sequence[int]) -> None:
        """See ``StorePolicy``."""
        self.inner.accept(request_id, group, positions)
        for position in positions:
            self._settle((request_id, group, position))
            self.on_accept(request_id, group, position)
            self._answered[request_id, group, position] = (None, 0, 0, 0.0)

    def refuse(
        self,
        request_id: str,
        group: int,
        positions: Sequence[int],
        keys: Sequence[BlockKey],
        why: Refusal,
        mark: int,
        now: float,
    ) -> None:
        """See ``StorePolicy``."""
        self.inner.refuse(request_id, group, positions, keys, why, mark, now)
        for position, key in zip(positions, keys, strict=True):
            name = (request_id, group, position)
            if name in self._answered or name in self._open:  # else it has not been offered yet
                # A block that was taken and whose store failed waits for nothing but the back-off.
                self._answered[name] = (why, mark, self.changes - (name not in self._open), now)
                self._settle(name)
                if why is Refusal.NOT_REUSED:
                    self._unused[name] = key

    def _settle(self, name: tuple[str, int, int]) -> None:
        """An offer is answered, or what was answered before has another end."""
        self._open.discard(name)
        self._unused.pop(name, None)
        self._due.discard(name)

    def wanted_again(self, keys: Sequence[BlockKey]) -> None:
        """See ``StorePolicy``."""
        self.inner.wanted_again(keys)
        for name in [name for name, key in self._unused.items() if key in keys]:
            del self._unused[name]
            self._due.add(name)
        self._due_free.update(key for key in keys if key in self._refused_free)

    def accept_free(self, key: BlockKey) -> None:
        """See ``StorePolicy``."""
        self.inner.accept_free(key)
        self._open.discard(key)
        self._due_free.discard(key)
        self._refused_free.pop(key, None)

    def refuse_free(self, key: BlockKey, why: Refusal, mark: int, now: float) -> None:
        """See ``StorePolicy``."""
        self.inner.refuse_free(key, why, mark, now)
        self._due_free.discard(key)
        self._refused_free[key] = (why, mark, self.changes - (key not in self._open), now)
        self._open.discard(key)

    # -- the rest ------------------------------------------------------------------------------

    def waits(self, request_id: str) -> bool:
        """See ``StorePolicy``."""
        return self.inner.waits(request_id)

    def request_finished(self, request_id: str) -> None:
        """See ``StorePolicy``."""
        self.inner.request_finished(request_id)
        for name in [name for name in self._answered if name[0] == request_id]:
            del self._answered[name]
            self._settle(name)

    def reset(self) -> None:
        """See ``StorePolicy``."""
        self.inner.reset()
        self._free.clear()
        self._refused_free.clear()
        self._due_free.clear()
