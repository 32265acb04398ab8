# SPDX-License-Identifier: Apache-2.0
"""A store policy that checks another: it fails where that one offers what is not there, or free
blocks twice."""

from __future__ import annotations

from collections.abc import Sequence

from kvdisk.blocks import BlockKey
from kvdisk.context import SchedulerContext
from kvdisk.manager.store_policy import FreeOffer, StorePolicy


class WatchedPolicy:
    """``StorePolicy`` around another."""

    def __init__(self, inner: StorePolicy) -> None:
        self.inner = inner
        self.saves_victims, self.offers_all = inner.saves_victims, inner.offers_all
        self.is_told_later = getattr(inner, "is_told_later", False)
        self._offered: set[BlockKey] = set()
        """Free blocks that were offered since a request reached them, and not refused."""

    def reached(self, request_id: str, keys: Sequence[BlockKey], start: int, stop: int) -> Sequence[int]:
        """See ``StorePolicy``."""
        assert 0 <= start < stop <= len(keys)
        self._offered.difference_update(keys[start:stop])
        return _check(self.inner.reached(request_id, keys, start, stop), start, stop)

    def preempted(self, request_id: str, group: int, storable: int) -> Sequence[int]:
        """See ``StorePolicy``."""
        return _check(self.inner.preempted(request_id, group, storable), 0, storable)

    def free_offers(self, context: SchedulerContext) -> Sequence[FreeOffer]:
        """See ``StorePolicy``."""
        queue = {block.block_id: block.key for block in context.iter_free_blocks()}
        offers = self.inner.free_offers(context)
        for offer in offers:
            assert queue.get(offer.block) == offer.key, "what is offered is not in the free queue"
            assert offer.key not in self._offered, f"{offer.key!r} is offered again, and no request has reached it"
            self._offered.add(offer.key)
        return offers

    def refuse_free(self, keys: Sequence[BlockKey]) -> None:
        """See ``StorePolicy``."""
        self._offered.difference_update(keys)
        self.inner.refuse_free(keys)

    def request_finished(self, request_id: str) -> None:
        """See ``StorePolicy``."""
        self.inner.request_finished(request_id)

    def reset(self) -> None:
        """See ``StorePolicy``."""
        self.inner.reset()


def _check(positions: Sequence[int], start: int, stop: int) -> Sequence[int]:
    assert list(positions) == sorted(set(positions)), f"offered twice at once, or out of order: {positions}"
    assert all(start <= position < stop for position in positions), f"{positions}: not from {start} to before {stop}"
    return positions
