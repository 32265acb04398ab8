# SPDX-License-Identifier: Apache-2.0
"""Which blocks were offered to the tiers, which of them were refused, and when those are offered again."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from itertools import compress

from kvdisk.blocks import BlockKey

FIRST_BACK_OFF_S = 0.05
LAST_BACK_OFF_S = 2.0


class Refusal(IntEnum):
    """Why an offer was refused."""

    NOT_REUSED = 1
    NO_ROOM = 2


class Refused:
    """A refusal for lack of room, of one block or of several that were refused together.

    ``mark``: the number of room at that moment.
    """

    def __init__(self, mark: int, retry_s: float, back_off_s: float) -> None:
        self.mark = mark
        self.retry_s = retry_s
        self.back_off_s = back_off_s

    @classmethod
    def make(cls, mark: int, now: float, before: Refused | None) -> Refused:
        """Return a refusal of now; ``before``: the one before it of the same blocks, whose back-off doubles."""
        back_off_s = min(before.back_off_s * 2, LAST_BACK_OFF_S) if before else FIRST_BACK_OFF_S
        return cls(mark, now + back_off_s, back_off_s)

    def is_over(self, room: int, now: float) -> bool:
        """Whether room has come free since, and time has passed."""
        return room > self.mark and now >= self.retry_s


class Watermark:
    """Up to where one group's blocks of one request have been offered, and which below were refused.

    A block refused for lack of reuse is offered again exactly when its count has risen, of which ``rise`` tells; those
    refused for lack of room when room has come free since, with back-off. Nothing else is offered twice. Asking for
    candidates while there are none takes a time that does not depend on how many wait: of thousands of running requests
    each may have thousands of them.

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

    def is_held(self, room: int, now: float) -> bool:
        """Whether blocks wait for room that are not to be offered yet: without them what follows serves nobody."""
        return any(not refusal.is_over(room, now) for refusal in self._refusals)

    def candidates(self, limit: int, room: int, now: float) -> Sequence[int]:
        """Return the positions below ``limit`` to offer now, ascending; the frontier moves to ``limit``.

        ``room``: a number that rises when room comes free.
        """
        start, self.frontier = self.frontier, max(limit, self.frontier)
        offered: list[int] = []
        if self._risen:
            offered = [position for position in self._risen if position < limit]
            self._risen = [position for position in self._risen if position >= limit]
        if self._refusals:
            offered += self._take_over(limit, room, now)
        return sorted({*offered}) + list(range(start, limit)) if offered else range(start, limit)

    def _take_over(self, limit: int, room: int, now: float) -> list[int]:
        """Return the positions below ``limit`` of those refusals that are over."""
        over = [refusal.is_over(room, now) for refusal in self._refusals]
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
        """The blocks are stored, on their way, or of no use: they are not offered again."""
        if self._no_room:
            for position in positions:
                self._no_room.pop(position, None)

    def rise(self, key: BlockKey) -> None:
        """The count of a block has risen, which was refused for lack of reuse."""
        position = self.unused.pop(key, None)
        if position is not None:
            self._risen.append(position)

    def refuse_unused(self, positions: Sequence[int], keys: Sequence[BlockKey]) -> None:
        """Remember what was refused for lack of reuse, all of it below the frontier."""
        self.accept(positions)
        self.unused.update(zip(keys, positions, strict=True))

    def refuse(self, positions: Sequence[int], mark: int, now: float) -> None:
        """Remember what was refused for lack of room; ``mark`` is the number of room at this moment.

        Blocks from the frontier on are offered anyway: what failed there was a load, or a store of
        the request's life before a reset.
        """
        if self._risen:
            self._risen = [position for position in self._risen if position not in positions]
        refused: dict[Refused | None, Refused] = {}
        for position in positions:
            if position < self.frontier:
                before = self._no_room.get(position)
                refusal = refused.get(before)
                if refusal is None:
                    refusal = refused[before] = Refused.make(mark, now, before)
                self._no_room[position] = refusal
        self._refusals += refused.values()
