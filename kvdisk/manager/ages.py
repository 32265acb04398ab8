# SPDX-License-Identifier: Apache-2.0
"""How old blocks may get: with ``max_age_s`` none is served that was first stored longer ago, and
its copies end, some in each step. Scheduler thread only.

All is judged by the clock as it is now, which may have been wrong, and may be. A block whose time
is still to come may have any age: it is not served, and ends once this process has known it for
``max_age_s``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvdisk.blocks import AHEAD_S, BlockKey
from kvdisk.errors import QuietLog
from kvdisk.manager.catalog import NONE
from kvdisk.manager.parts import Parts
from kvdisk.manager.step_work import Kind, Work
from kvdisk.manager.tiers import Tiers, TierSpace

LOOK_S = 10
"""How often old copies are looked for: a million blocks take a millisecond or two. They are not
served meanwhile."""
SETTLE_S = 60
"""How long no copy ends after the start, or after the clock was moved: a wrong one may be put
right."""


class Ages:
    """Hides blocks that are too old, and ends their copies. Without ``max_age_s`` it does
    nothing."""

    def __init__(self, parts: Parts, tiers: Tiers) -> None:
        self._config = parts.config
        self._catalog = parts.catalog
        self._stats = parts.stats
        self._state = parts.state
        self._work = parts.work
        self._tiers = tiers
        self._began = self._look_at = 0.0
        self._clock_offset: float | None = None
        """The time of day less the time of steps."""
        self._log = QuietLog(lambda: parts.state.now, logging.getLogger("kvdisk.manager"))

    def note_time(self) -> None:
        """Take note of another second."""
        if self._config.max_age_s is not None:
            now_s = self._state.now_s
            self._catalog.limit_ages(max(1, int(now_s - self._config.max_age_s)), now_s + AHEAD_S)

    @property
    def _own_tiers(self) -> list[TierSpace]:
        """The tiers whose copies may end: before the engine is identified, those on NVMe may be of
        other weights."""
        return [space for space in self._tiers if space.in_memory or self._state.is_identified]

    def look(self) -> None:
        """Look now and then for copies that are too old: steps end them, the oldest first. Call it
        once a step."""
        if self._config.max_age_s is None:
            return
        now = self._state.now
        self._watch_clock(now)
        if now >= self._look_at and not self._work.has(Kind.AGES):
            self._look_at = now + LOOK_S
            also_ahead = now - self._began > self._config.max_age_s
            for space in self._own_tiers:
                rows = self._catalog.columns(space.tier).too_old(also_ahead=also_ahead).tolist()
                if rows:
                    self._work.add(Kind.AGES, self, self._end_all(space, rows))

    def _end_all(self, space: TierSpace, rows: Sequence[int]) -> Work:
        """End copies that were too old when they were looked for; a row may be another block's by
        now."""
        at = 0
        while at < len(rows):
            some = rows[at : at + self._work.left(Kind.AGES)]
            for row in some:
                self._end(space, (row,))
            at += len(some)
            yield len(some)

    def _watch_clock(self, now: float) -> None:
        """Have nothing end for a while, and say so, where the time of day has moved by itself."""
        offset = self._state.now_s - now
        if self._clock_offset is None:
            self._began, self._clock_offset, self._look_at = now, offset, now + SETTLE_S
        moved_s, self._clock_offset = round(offset - self._clock_offset), offset
        if abs(moved_s) > AHEAD_S:
            self._work.cancel(self)
            self._look_at = now + SETTLE_S
            self._log.warn(
                "ahead" if moved_s > 0 else "back",
                f"the clock was moved by {moved_s:+,} s: blocks that are older than max_age_s by it, or whose time is "
                f"still to come, are not served; what is too old {SETTLE_S} s from now is dropped.",
            )

    def end(self, keys: Sequence[BlockKey]) -> None:
        """End those of these blocks' copies that are too old, or of a time to come, because they
        are to be stored anew."""
        if self._config.max_age_s is not None:
            rows = [row for row in self._catalog.find_all(keys) if row != NONE]
            for space in self._own_tiers:
                self._end(space, rows)

    def _end(self, space: TierSpace, rows: Sequence[int]) -> None:
        old = list(filter(self._catalog.columns(space.tier).is_of_no_age, rows))
        if old:
            space.discard(*old)
            self._stats.add(f"expired_blocks.{space.tier.label}", len(old))
