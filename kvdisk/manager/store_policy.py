# SPDX-License-Identifier: Apache-2.0
"""When a request's blocks are offered to the tiers. A policy owns the watermarks. Scheduler thread only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from kvdisk.errors import ConfigError

_FIRST_BACK_OFF_S = 0.05
_LAST_BACK_OFF_S = 2.0


class Refusal(IntEnum):
    """Why an offer was refused."""

    NOT_REUSED = 1
    NO_ROOM = 2


@dataclass(slots=True)
class _Refused:
    why: Refusal
    mark: int
    retry_s: float
    back_off_s: float


@dataclass(slots=True)
class Watermark:
    """Up to where one group's blocks of one request have been offered, and which below were refused.

    A block refused for lack of reuse is offered again exactly when its count has risen; one refused
    for lack of room when room has come free since, with back-off. Nothing else is offered twice.
    """

    frontier: int = 0
    refused: dict[int, _Refused] = field(default_factory=dict)

    def candidates(self, limit: int, room: int, now: float, count_of: Callable[[int], int]) -> list[int]:
        """Return the positions below ``limit`` to offer now, ascending; the frontier moves to ``limit``.

        ``room``: a number that rises when room comes free. ``count_of(position)``: the block's reuse count.
        """
        offered = [
            position
            for position, refused in self.refused.items()
            if position < limit
            and (
                count_of(position) > refused.mark
                if refused.why is Refusal.NOT_REUSED
                else room > refused.mark and now >= refused.retry_s
            )
        ]
        offered.sort()
        if limit > self.frontier:
            offered.extend(range(self.frontier, limit))
            self.frontier = limit
        return offered

    def accept(self, position: int) -> None:
        """The block is stored, on its way, or of no use: it is not offered again."""
        self.refused.pop(position, None)

    def refuse(self, position: int, why: Refusal, mark: int, now: float) -> None:
        """Remember a refusal; ``mark`` is the count or the room number at this moment.

        A block from the frontier on is offered anyway: what failed there was a load, or a store of
        the request's life before a reset.
        """
        if position >= self.frontier:
            return
        before = self.refused.get(position)
        back_off_s = min(before.back_off_s * 2, _LAST_BACK_OFF_S) if before else _FIRST_BACK_OFF_S
        self.refused[position] = _Refused(why, mark, now + back_off_s, back_off_s)


class StorePolicy(Protocol):
    """Decides what of a request is offered, and when. Knows nothing of tiers or slots."""

    def offers(
        self, request_id: str, group: int, storable: int, room: int, now: float, count_of: Callable[[int], int]
    ) -> list[int]:
        """Return the positions of the group's blocks to offer in this step, ascending, none twice.

        ``storable``: how many are full, computed and hashed.
        Every position returned is answered by ``accept`` or ``refuse`` before the next call.
        """

    def accept(self, request_id: str, group: int, position: int) -> None:
        """The offer was taken, or the block is there already."""

    def refuse(self, request_id: str, group: int, position: int, why: Refusal, mark: int, now: float) -> None:
        """The offer was refused, or a taken one failed: offer it again when things have changed."""

    def waits(self, request_id: str) -> bool:
        """Whether refused blocks of the request wait to be offered again."""

    def request_finished(self, request_id: str) -> None:
        """Forget the request."""


class OnCompute:
    """Offers each full block in the step that computes it."""

    def __init__(self) -> None:
        self._watermarks: dict[tuple[str, int], Watermark] = {}
        self._groups: dict[str, set[int]] = {}

    def offers(
        self, request_id: str, group: int, storable: int, room: int, now: float, count_of: Callable[[int], int]
    ) -> list[int]:
        """Return new blocks, and refused ones whose cause has changed."""
        watermark = self._watermarks.get((request_id, group))
        if watermark is None:
            watermark = self._watermarks[request_id, group] = Watermark()
            self._groups.setdefault(request_id, set()).add(group)
        elif storable == watermark.frontier and not watermark.refused:
            return []
        return watermark.candidates(storable, room, now, count_of)

    def accept(self, request_id: str, group: int, position: int) -> None:
        """Do not offer the block again."""
        self._watermarks[request_id, group].accept(position)

    def refuse(self, request_id: str, group: int, position: int, why: Refusal, mark: int, now: float) -> None:
        """Offer the block again when its cause has changed. A request that is gone is ignored."""
        watermark = self._watermarks.get((request_id, group))
        if watermark is not None:
            watermark.refuse(position, why, mark, now)

    def waits(self, request_id: str) -> bool:
        """Return whether any group has refused blocks."""
        return any(self._watermarks[request_id, group].refused for group in self._groups.get(request_id, ()))

    def request_finished(self, request_id: str) -> None:
        """Forget the request's watermarks."""
        for group in self._groups.pop(request_id, ()):
            del self._watermarks[request_id, group]


def make_store_policy(name: str) -> StorePolicy:
    """Return a new policy by its configuration name."""
    if name == "on_compute":
        return OnCompute()
    raise ConfigError(f"store_policy must be 'on_compute', not {name!r}.")
