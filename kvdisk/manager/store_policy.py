# SPDX-License-Identifier: Apache-2.0
"""When blocks are offered to the tiers. A policy owns the watermarks. Scheduler thread only.

The planner tells a policy what happens, offers the tiers what it returns, and tells it the answers. A policy
knows nothing of tiers or slots. One of a user's own (``store_policy: "module:Class"``) is built without
arguments, and is best derived from ``NoStores``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from kvdisk.blocks import BlockKey
from kvdisk.context import SchedulerContext
from kvdisk.manager.watermark import Refusal, Watermark


class FreeOffer(NamedTuple):
    """A free GPU block that is offered. ``parent``: key of the block before it in its chain; None: first or unknown."""

    block: int
    key: BlockKey
    parent: BlockKey | None


class StorePolicy(Protocol):
    """Decides which blocks are offered, and when.

    ``reached`` and ``free_offers`` are looked up once, at the start.
    ``saves_victims``: whether ``preempted`` returns anything. Every offer is answered when all groups of its request
    were asked, before any other question, by ``accept`` or ``refuse``, those of free blocks by ``accept_free`` or
    ``refuse_free``; and one that was taken may be refused later, when its copy failed.
    """

    saves_victims: bool

    def reached(self, request_id: str, keys: Sequence[BlockKey], start: int, stop: int) -> None:
        """A request's blocks from ``start`` to before ``stop`` of one group are full and computed for the first time.

        ``keys``: of all the group's blocks. After a preemption a request begins at 0 again.
        """

    def offers(self, request_id: str, group: int, storable: int, room: int, now: float) -> Sequence[int]:
        """Return the positions of the group's blocks to offer in this step, ascending, none twice.

        ``storable``: how many are full, computed and hashed. ``room``: a number that rises when room comes free.
        """

    def preempted(self, request_id: str, group: int, storable: int) -> Sequence[int]:
        """Return the positions of a victim's blocks to offer, before they are overwritten, ascending."""

    def free_offers(self, context: SchedulerContext, room: int, now: float) -> Sequence[FreeOffer]:
        """Return the free blocks to offer in this step, no key twice."""

    def accept(self, request_id: str, group: int, positions: Sequence[int]) -> None:
        """The offers were taken, or the blocks are there already."""

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
        """The offers were refused, or taken ones failed: offer them again when things have changed.

        ``keys``: of the blocks. ``mark``: the number of room, for those that were refused for lack of it.
        """

    def wanted_again(self, keys: Sequence[BlockKey]) -> None:
        """More requests want these blocks than before: those that were refused for lack of reuse may be admitted."""

    def accept_free(self, key: BlockKey) -> None:
        """The offer of a free block was taken, or the block is there already."""

    def refuse_free(self, key: BlockKey, why: Refusal, mark: int, now: float) -> None:
        """The offer of a free block was refused, or its store failed. ``mark``: as in ``refuse``."""

    def waits(self, request_id: str) -> bool:
        """Whether refused blocks of the request are to be offered again, as soon as there is room or at once."""

    def request_finished(self, request_id: str) -> None:
        """Forget the request."""

    def reset(self) -> None:
        """The weights may have changed, or a block was not filled: no preempted or free block of before is offered.

        Running requests reach again what they still hold. The planner offers nothing of those that went on through a
        change of weights.
        """


class NoStores:
    """Offers nothing: what the other policies differ from."""

    saves_victims = False

    def reached(self, request_id: str, keys: Sequence[BlockKey], start: int, stop: int) -> None:
        """Nothing to note."""

    def offers(
        self,
        request_id: str,  # noqa: ARG002 - the protocol's signature, here and below
        group: int,  # noqa: ARG002
        storable: int,  # noqa: ARG002
        room: int,  # noqa: ARG002
        now: float,  # noqa: ARG002
    ) -> Sequence[int]:
        """Return nothing."""
        return ()

    def preempted(self, request_id: str, group: int, storable: int) -> Sequence[int]:  # noqa: ARG002
        """Return nothing."""
        return ()

    def free_offers(
        self,
        context: SchedulerContext,  # noqa: ARG002
        room: int,  # noqa: ARG002
        now: float,  # noqa: ARG002
    ) -> Sequence[FreeOffer]:
        """Return nothing."""
        return ()

    def accept(self, request_id: str, group: int, positions: Sequence[int]) -> None:
        """Nothing to note."""

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
        """Nothing to note: they are not offered again."""

    def wanted_again(self, keys: Sequence[BlockKey]) -> None:
        """Nothing was noted."""

    def accept_free(self, key: BlockKey) -> None:
        """Nothing to note."""

    def refuse_free(self, key: BlockKey, why: Refusal, mark: int, now: float) -> None:
        """Nothing to note."""

    def waits(self, request_id: str) -> bool:  # noqa: ARG002
        """Return False."""
        return False

    def request_finished(self, request_id: str) -> None:
        """Nothing to forget."""

    def reset(self) -> None:
        """Nothing to forget."""


def own_method(policy: StorePolicy, name: str) -> Any:
    """Return a policy's method; None where it is that of ``NoStores``, which need not be called."""
    method = getattr(policy, name)
    return None if getattr(method, "__func__", None) is getattr(NoStores, name) else method


class OnCompute(NoStores):
    """Offers each full block in the step that computes it."""

    def __init__(self) -> None:
        self._watermarks: dict[str, dict[int, Watermark]] = {}
        """By request and group."""
        self._waiting: set[str] = set()
        """Those with blocks to be offered again: few, and asked for in every step."""
        self._unused: dict[BlockKey, tuple[Watermark, ...]] = {}
        """Of each block that was refused for lack of reuse, the watermarks that wait for its count to rise."""

    def offers(self, request_id: str, group: int, storable: int, room: int, now: float) -> Sequence[int]:
        """Return new blocks, and refused ones whose cause has changed; no new ones while others wait for room."""
        watermarks = self._watermarks.setdefault(request_id, {})
        watermark = watermarks.get(group)
        if request_id in self._waiting and any(other.is_held(room, now) for other in watermarks.values()):
            storable = 0 if watermark is None else min(storable, watermark.frontier)
        if watermark is None:
            watermark = watermarks[group] = Watermark(request_id)
        elif storable == watermark.frontier and not watermark.waits:
            return ()
        return watermark.candidates(storable, room, now)

    def accept(self, request_id: str, group: int, positions: Sequence[int]) -> None:
        """Do not offer the blocks again."""
        if request_id in self._waiting:  # what was never refused is not offered twice
            self._watermarks[request_id][group].accept(positions)
            self._look(request_id)

    def _look(self, request_id: str) -> None:
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
        mark: int,
        now: float,
    ) -> None:
        """Offer the blocks again when the cause has changed. A request that is gone is ignored."""
        watermark = self._watermarks.get(request_id, {}).get(group)
        if watermark is None:
            return
        if why is Refusal.NOT_REUSED:
            watermark.refuse_unused(positions, keys)
            unused, alone = self._unused, (watermark,)
            if unused.keys().isdisjoint(keys):
                unused.update(dict.fromkeys(keys, alone))
            else:
                for key in keys:
                    unused[key] = unused.get(key, ()) + alone
        else:
            watermark.refuse(positions, mark, now)
            if watermark.unused:  # one that another request has stored since, and whose load failed
                self._forget(watermark, [key for key in keys if key in watermark.unused])
        self._look(request_id)

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
        """A watermark does not wait for the counts of some blocks any more."""
        for key in keys:
            del watermark.unused[key]
            others = tuple(other for other in self._unused.pop(key) if other is not watermark)
            if others:
                self._unused[key] = others


class OnPreemption(NoStores):
    """Offers what a preemption would lose, and nothing else.

    It needs no watermark: each preemption offers all of the victim's full blocks once, those that are in a tier, or on
    their way there, are accepted without a store, and one that is refused has been overwritten before room comes free.
    """

    saves_victims = True

    def preempted(self, request_id: str, group: int, storable: int) -> Sequence[int]:  # noqa: ARG002
        """Return all of the victim's blocks."""
        return range(storable)
