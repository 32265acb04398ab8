# SPDX-License-Identifier: Apache-2.0
"""KV hints: what the sender of a request says of its blocks. What each does is in
``docs/decisions/0040-hints.md``. Scheduler thread only."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, Protocol

from kvdisk.blocks import BlockKey, group_of
from kvdisk.errors import QuietLog
from kvdisk.manager import bounds
from kvdisk.manager.catalog import NONE
from kvdisk.manager.garbage import let_go
from kvdisk.manager.parts import Parts
from kvdisk.manager.prefetch import Promotions
from kvdisk.manager.requests import KVHint, RequestState
from kvdisk.manager.standings import DEMOTED, PINNED, RETAINED
from kvdisk.manager.step_work import Kind, Work
from kvdisk.manager.tiers import Tiers, TierSpace

RETAIN, PIN, PREFETCH, DEMOTE = ACTIONS = ("retain", "pin", "prefetch", "demote")
DEMOTED_S: Final = 3600.0
"""How long a block that is on its way to a tier will leave that first."""


class Hinted(Protocol):
    """A prompt, and what its sender says of it.

    ``keys``: of its full blocks, by group, each from its start; more may follow the prompt's own.
    """

    @property
    def kv_hints(self) -> Sequence[KVHint]:
        """What its sender says."""

    @property
    def prompt_tokens(self) -> int:
        """Of the prompt."""

    @property
    def keys(self) -> Sequence[Sequence[BlockKey]]:
        """See the class."""


class KVHints:
    """Applies the KV hints of requests: standings of blocks, and prefetches."""

    def __init__(self, parts: Parts, tiers: Tiers, promotions: Promotions) -> None:
        self._config = parts.config
        self._geometry = parts.geometry
        self._catalog = parts.catalog
        self._tiers = tiers
        self._promotions = promotions
        self._standings = parts.standings
        self._state = parts.state
        self._work = parts.work
        self._log = QuietLog(lambda: parts.state.now, logging.getLogger("kvdisk.manager"))

    def apply(self, request: RequestState, *, ended: bool) -> None:
        """Do what a request's hints say when it has come, or when it has ended: then what they keep
        is kept for as long again, and what they demote leaves first. Steps do the rest of a long
        prompt."""
        request.update_keys()
        for hint in request.kv_hints:
            if hint.action == PREFETCH and not ended and not self._promotions.ask(request, _most_of(request, hint)):
                self._log.warn("prefetch", "more prefetches are asked for than fit the queue; ignored.")
        self.place(request, ended=ended)

    def place(self, prompt: Hinted, *, ended: bool) -> None:
        """As ``apply``, of a prompt that nobody can prefetch."""
        for hint in prompt.kv_hints:
            if hint.action in {RETAIN, PIN}:
                standing = PINNED if hint.action == PIN else RETAINED
                kept = self._keep(prompt, _most_of(prompt, hint), standing, hint.seconds)
                self._work.add(Kind.KV_HINTS, self, kept)
            elif hint.action == DEMOTE and ended:
                self._work.add(Kind.KV_HINTS, self, self._demote(prompt))
        self._work.run(Kind.KV_HINTS)

    def hold(self, keys: Sequence[BlockKey], seconds: float) -> None:
        """Let blocks of the first tier stay for so long, with what they follow: a copy may only
        stay if what is before it does. As many as may stay yet, from the heads on; the others are
        left as they are."""
        self.refresh()
        catalog, end, going = self._catalog, self._state.now + seconds, dict[int, None]()
        for found in reversed(catalog.find_all(keys)):
            row = found
            while row != NONE and row not in going and not self._standings.stays_until(catalog.keys[row], end):
                going[row] = None
                row = catalog.parent_rows[row]
        tier, class_of = self._tiers.first, self._geometry.size_classes
        left = [tier.left_to_stay(size_class) for size_class in range(len(self._geometry.slot_sizes))]
        held: list[BlockKey] = []
        for key in (catalog.keys[row] for row in reversed(going)):
            if self._standings.of(key) != PINNED:
                left[class_of[group_of(key)]] -= 1
                if min(left) < 0:
                    break
            held.append(key)
        self._place(held, PINNED, seconds)

    def refresh(self) -> None:
        """Have standings end, once a step, that are over."""
        if self._standings.held and not self._work.has(Kind.STANDINGS):
            self._work.add(Kind.STANDINGS, self, self._end_standings())
        if self._standings.clipped:
            self._standings.clipped = False
            share = self._config.pin_share
            self._log.warn(
                "clipped",
                f"KV hints pin more blocks than pin_share ({share:g}) of a tier, or name more than "
                f"{bounds.STANDINGS:,} blocks. What is over is retained, or left as it is.",
            )

    def _end_standings(self) -> Work:
        while self._standings.held:
            ended = self._standings.take_ended(self._state.now, self._work.left(Kind.STANDINGS))
            self._rank(ended)
            yield len(ended)

    def reset(self) -> None:
        """The blocks are of use to nobody any more: forget what was said of them. Copies that stay
        in files are not held any more in later steps."""
        let_go(self._work, *self._standings.clear())
        for space in self._tiers:
            self._work.add(Kind.GONE, self, self._rank_again(space, space.held_rows()))

    def _rank_again(self, space: TierSpace, rows: Sequence[int]) -> Work:
        """Place copies in a tier's order as others, whose blocks nothing is said of any more."""
        at = 0
        while at < len(rows):
            some = rows[at : at + self._work.left(Kind.GONE)]
            space.reorder(some)
            at += len(some)
            yield len(some)

    def _keep(self, prompt: Hinted, tokens: int, standing: int, seconds: float) -> Work:
        """Keep a prompt's full blocks within its first ``tokens``, in order over all groups."""
        groups, step = self._geometry.groups, self._geometry.alignment_tokens
        step_blocks = sum(step // group.block_tokens for group in groups)
        start = 0
        while start < tokens:
            end = min(tokens, start + max(1, self._work.left(Kind.KV_HINTS) // step_blocks) * step)
            places = [
                ((at + 1) * group.block_tokens, key)
                for group in groups
                for at, key in enumerate(
                    prompt.keys[group.group][start // group.block_tokens : end // group.block_tokens],
                    start // group.block_tokens,
                )
            ]
            keys = [key for _, key in sorted(places)]
            self._place(keys, standing, seconds)
            start = end
            yield max(1, len(keys))

    def _demote(self, prompt: Hinted) -> Work:
        """Let those of a prompt's blocks leave first that no other block follows, the tail
        first."""
        for keys in prompt.keys:
            stop, followers = len(keys), 0
            while stop > 0:
                start = max(0, stop - self._work.left(Kind.KV_HINTS))
                some, own = keys[start:stop], []
                for key, row in zip(reversed(some), reversed(self._catalog.find_all(some)), strict=True):
                    if row == NONE:
                        followers = 0
                    elif self._catalog.follower_count(row) > followers:
                        start = 0  # what is before it is others', too
                        break
                    else:
                        followers = 1
                        own.append(key)
                self._place(own, DEMOTED, DEMOTED_S)
                stop = start
                yield len(some)

    def _place(self, keys: list[BlockKey], standing: int, seconds: float) -> None:
        end_s = self._state.now + seconds
        for key in keys:
            self._standings.set(key, standing, end_s)
        self._rank(keys)

    def _rank(self, keys: list[BlockKey]) -> None:
        rows = [row for row in self._catalog.find_all(keys) if row != NONE]
        for space in self._tiers if rows else ():
            space.reorder(rows)


def _most_of(prompt: Hinted, hint: KVHint) -> int:
    """Return of how many of a prompt's first tokens a hint is."""
    return prompt.prompt_tokens if hint.tokens is None else min(hint.tokens, prompt.prompt_tokens)
