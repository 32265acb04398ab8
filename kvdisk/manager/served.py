# SPDX-License-Identifier: Apache-2.0
"""What requests found in the tiers, and how long they waited for it: counted once for each time one is taken up.

The tiers are asked in order: the CPU tier for every token beyond the GPU's own, the NVMe tier, which other homes of the
store belong to, for those that the CPU tier has not got. What is not loaded is missed, whatever the reason: it was not
there, the engine did not need it, or it was too little to be worth a load. A tier that does not exist is not asked.
Scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvdisk.blocks import Tier
from kvdisk.geometry import Geometry
from kvdisk.manager.lookup import first_needed
from kvdisk.manager.requests import RequestState
from kvdisk.manager.transfers import MoveDetail
from kvdisk.messages import Move
from kvdisk.stats import Stats


class _Asked(NamedTuple):
    """A lookup: what the GPU had of its own, where the longest hit would have ended, and what was promised of it."""

    local_tokens: int
    end_tokens: int
    promised_tokens: int


class _Found(NamedTuple):
    """Of one hit, what came from each tier."""

    cpu: int
    nvme: int


class Served:
    """See the module."""

    def __init__(self, geometry: Geometry, stats: Stats, *, has_cpu: bool, has_nvme: bool) -> None:
        self._geometry = geometry
        self._stats = stats
        self._has_cpu = has_cpu
        self._has_nvme = has_nvme

    def waits(self, request: RequestState, now: float) -> None:
        """A lookup was answered 'not yet'."""
        self._stats.add("lookup_waits")
        if request.waited_since_s is None:
            request.waited_since_s = now

    def gave_up_waiting(self) -> None:
        """A wait has run out."""
        self._stats.add("wait_timeouts")

    def found_too_little(self, tokens: int) -> None:
        """A hit of so many tokens, perhaps none, is not worth a load."""
        self._stats.add("short_hits", tokens > 0)

    def waited(self, request: RequestState, now: float) -> None:
        """A request that waited has got its answer."""
        assert request.waited_since_s is not None
        self._stats.observe("wait_seconds", max(0.0, now - request.waited_since_s))
        request.waited_since_s = None

    def _asked(self, request: RequestState) -> _Asked | None:
        """Return the last lookup, which is dealt with from here on."""
        asked, request.asked = request.asked, None
        if asked is None:
            return None
        local_tokens, limit_tokens, promised_tokens = asked
        step = self._geometry.step_tokens
        return _Asked(local_tokens, max(local_tokens, limit_tokens // step * step), promised_tokens)

    def passed_over(self, request: RequestState) -> None:
        """A request runs that was promised nothing, or whose promise the engine did not take: then nobody missed it."""
        asked = self._asked(request)
        if asked is not None and asked.promised_tokens == 0:
            self._count(asked, asked.local_tokens, _Found(0, 0), _Found(0, 0))

    def loaded(
        self,
        request: RequestState,
        local_tokens: int,
        external_tokens: int,
        moves: Sequence[Move],
        details: Sequence[MoveDetail],
    ) -> None:
        """A load of ``external_tokens`` was planned: note how it divides between the tiers in ``request.served``.

        A token is NVMe's where any of its groups' blocks comes from there.
        """
        end_tokens = local_tokens + external_tokens
        asked = self._asked(request) or _Asked(local_tokens, end_tokens, external_tokens)
        sources = [move.nvme for move in moves]
        nvme_blocks = len(sources) - sources.count(None)
        cpu_blocks = sum([nvme is None and move.cpu is not None for move, nvme in zip(moves, sources, strict=True)])
        blocks = _Found(cpu_blocks, nvme_blocks)
        if not self._has_cpu:
            nvme_tokens = external_tokens
        else:
            nvme_tokens = self._tokens_on_nvme(local_tokens, moves, details) if blocks.nvme else 0
            nvme_tokens = min(nvme_tokens, external_tokens)
        tokens = _Found(external_tokens - nvme_tokens, nvme_tokens)
        request.served = {Tier.CPU: tokens.cpu, Tier.NVME: tokens.nvme}
        self._count(asked, end_tokens, tokens, blocks)

    def _tokens_on_nvme(self, local_tokens: int, moves: Sequence[Move], details: Sequence[MoveDetail]) -> int:
        groups = self._geometry.groups
        step = min(group.block_tokens for group in groups)
        if len(groups) == 1:
            return sum([move.nvme is not None for move in moves]) * step
        found: set[int] = set()
        for move, detail in zip(moves, details, strict=True):
            if move.nvme is not None:
                start = detail.position * groups[detail.group].block_tokens
                found.update(range(max(start, local_tokens), start + groups[detail.group].block_tokens, step))
        return len(found) * step

    def _count(self, asked: _Asked, hit_end_tokens: int, tokens: _Found, blocks: _Found) -> None:
        """Count hits and misses. ``hit_end_tokens``: up to where the request has its KV now."""
        asked_tokens = asked.end_tokens - asked.local_tokens
        missed_tokens = max(0, asked_tokens - sum(tokens))
        missed_blocks = 0
        if asked.end_tokens > hit_end_tokens:
            for group in self._geometry.groups:
                first = max(
                    first_needed(group, asked.local_tokens, asked.end_tokens), hit_end_tokens // group.block_tokens
                )
                missed_blocks += max(0, asked.end_tokens // group.block_tokens - first)
        stats = self._stats
        stats.add("lookup_tokens", max(asked_tokens, sum(tokens)))
        if self._has_cpu:
            stats.add("hit_tokens.cpu", tokens.cpu)
            stats.add("hit_blocks.cpu", blocks.cpu)
            stats.add("missed_tokens.cpu", missed_tokens + tokens.nvme)
            stats.add("missed_blocks.cpu", missed_blocks + blocks.nvme)
        if self._has_nvme:
            stats.add("hit_tokens.nvme", tokens.nvme)
            stats.add("hit_blocks.nvme", blocks.nvme)
            stats.add("missed_tokens.nvme", missed_tokens)
            stats.add("missed_blocks.nvme", missed_blocks)
