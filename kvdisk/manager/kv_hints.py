# SPDX-License-Identifier: Apache-2.0
"""KV hints: what the sender of a request says of its blocks. What each does is in
``docs/decisions/0040-hints.md``. Scheduler thread only."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Final

from kvdisk.blocks import BlockKey
from kvdisk.errors import QuietLog
from kvdisk.manager.catalog import NONE
from kvdisk.manager.parts import Parts
from kvdisk.manager.prefetch import Promotions
from kvdisk.manager.requests import RequestState
from kvdisk.manager.standings import DEMOTED, MOST_STANDINGS, PINNED, RETAINED
from kvdisk.manager.tiers import Tiers

RETAIN, PIN, PREFETCH, DEMOTE = ACTIONS = ("retain", "pin", "prefetch", "demote")
DEMOTED_S: Final = 3600.0
"""How long a block that is on its way to a tier will leave that first."""


class KVHints:
    """Applies the KV hints of requests: standings of blocks, and prefetches."""

    def __init__(self, parts: Parts, tiers: Tiers, promotions: Promotions) -> None:
        self._config = parts.config
        self._geometry = parts.geometry
        self._catalog = parts.catalog
        self._tiers = tiers
        self._promotions = promotions
        self._standings = parts.standings
        self._log = QuietLog(lambda: parts.standings.now, logging.getLogger("kvdisk.manager"))

    def apply(self, request: RequestState, *, ended: bool) -> None:
        """Do what a request's hints say when it has come, or when it has ended: then what they keep
        is kept for as long again, and what they demote leaves first."""
        request.update_keys()
        keys: list[BlockKey] = []
        for hint in request.kv_hints:
            most = request.prompt_tokens if hint.tokens is None else min(hint.tokens, request.prompt_tokens)
            if hint.action == PREFETCH:
                if not ended and not self._promotions.ask(request, most):
                    self._log.warn("prefetch", "more prefetches are asked for than fit the queue; ignored.")
            elif hint.action != DEMOTE:
                hinted = self._prompt(request, most)
                for key in hinted:
                    self._standings.set(key, PINNED if hint.action == PIN else RETAINED, hint.seconds)
                keys += hinted
            elif ended:
                hinted = list(self._own(request))
                for key in hinted:
                    self._standings.set(key, DEMOTED, DEMOTED_S)
                keys += hinted
        self._rank(keys)

    def refresh(self, now: float) -> None:
        """Set the time, once a step, and end the standings that are over."""
        ended = self._standings.take_ended(now)
        if ended:
            self._rank(ended)
        if self._standings.clipped:
            self._standings.clipped = False
            share = self._config.pin_share
            self._log.warn(
                "clipped",
                f"KV hints pin more blocks than pin_share ({share:g}) of a tier, or name more than {MOST_STANDINGS:,} "
                "blocks. What is over is retained, or left as it is.",
            )

    def reset(self) -> None:
        """The blocks are of use to nobody any more: forget what was said of them."""
        keys = list(self._standings.held)
        for key in keys:
            self._standings.forget(key)
        self._rank(keys)

    def _prompt(self, request: RequestState, tokens: int) -> list[BlockKey]:
        """Return a prompt's full blocks within its first ``tokens``, in order over all groups."""
        places = [
            ((at + 1) * group.block_tokens, key)
            for group in self._geometry.groups
            for at, key in enumerate(request.keys[group.group][: tokens // group.block_tokens])
        ]
        return [key for _, key in sorted(places)]

    def _own(self, request: RequestState) -> Iterator[BlockKey]:
        """Yield a request's blocks that no other block follows, the tail first."""
        for keys in request.keys:
            followers = 0
            for key in reversed(keys):
                row = self._catalog.find(key)
                if row == NONE:
                    followers = 0
                elif self._catalog.follower_count(row) > followers:
                    break
                else:
                    followers = 1
                    yield key

    def _rank(self, keys: list[BlockKey]) -> None:
        rows = [row for row in self._catalog.find_all(keys) if row != NONE]
        for space in self._tiers if rows else ():
            space.reorder(rows)
