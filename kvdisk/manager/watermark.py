# SPDX-License-Identifier: Apache-2.0
"""Which blocks were offered to the tiers, which of them were refused, and when those are offered again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

FIRST_BACK_OFF_S = 0.05
LAST_BACK_OFF_S = 2.0


class Refusal(IntEnum):
    """Why an offer was refused."""

    NOT_REUSED = 1
    NO_ROOM = 2


@dataclass(slots=True)
class Refused:
    """A refusal. ``mark``: the block's reuse count, or the number of room, at that moment."""

    why: Refusal
    mark: int
    retry_s: float
    back_off_s: float

    @classmethod
    def make(cls, why: Refusal, mark: int, now: float, before: Refused | None) -> Refused:
        """Return a refusal of now; ``before``: the one before it of the same block, whose back-off doubles."""
        back_off_s = min(before.back_off_s * 2, LAST_BACK_OFF_S) if before else FIRST_BACK_OFF_S
        return cls(why, mark, now + back_off_s, back_off_s)

    def is_over(self, room: int, now: float, count: int) -> bool:
        """Whether what was in the way has changed: the count has risen, or room has come free and time has passed."""
        if self.why is Refusal.NOT_REUSED:
            return count > self.mark
        return room > self.mark and now >= self.retry_s


@dataclass(slots=True)
class Watermark:
    """Up to where one group's blocks of one request have been offered, and which below were refused.

    A block refused for lack of reuse is offered again exactly when its count has risen; one refused
    for lack of room when room has come free since, with back-off. Nothing else is offered twice.
    """

    frontier: int = 0
    refused: dict[int, Refused] = field(default_factory=dict)

    def candidates(self, limit: int, room: int, now: float, count_of: Callable[[int], int]) -> list[int]:
        """Return the positions below ``limit`` to offer now, ascending; the frontier moves to ``limit``.

        ``room``: a number that rises when room comes free. ``count_of(position)``: the block's reuse count.
        """
        start, self.frontier = self.frontier, max(limit, self.frontier)
        if not self.refused:
            return list(range(start, limit))
        offered = [
            position
            for position, refused in self.refused.items()
            if position < limit and refused.is_over(room, now, count_of(position))
        ]
        return sorted(offered) + list(range(start, limit))

    def accept(self, position: int) -> None:
        """The block is stored, on its way, or of no use: it is not offered again."""
        self.refused.pop(position, None)

    def refuse(self, position: int, why: Refusal, mark: int, now: float) -> None:
        """Remember a refusal; ``mark`` is the count or the room number at this moment.

        A block from the frontier on is offered anyway: what failed there was a load, or a store of
        the request's life before a reset.
        """
        if position < self.frontier:
            self.refused[position] = Refused.make(why, mark, now, self.refused.get(position))
