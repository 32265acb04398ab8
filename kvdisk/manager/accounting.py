# SPDX-License-Identifier: Apache-2.0
"""What requests found in the tiers, how long they waited, and how full the tiers are. Scheduler thread only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvdisk.blocks import Tier
from kvdisk.geometry import Geometry
from kvdisk.manager.chains import TIERS
from kvdisk.manager.demotions import Demotions
from kvdisk.manager.jobs import MoveDetail, Transfers
from kvdisk.manager.lookup import first_needed
from kvdisk.manager.requests import RequestState
from kvdisk.manager.tiers import Tiers
from kvdisk.messages import JobKind
from kvdisk.stats import Stats

_Asked = tuple[int, int, int]
"""A lookup: what the GPU had of its own, where the longest hit would have ended, and what was promised beyond the GPU's
own, in tokens."""


class Served:
    """What requests found in the tiers, and how long they waited for it: counted once each time one is scheduled.

    The tiers are asked in order, the fastest for every token beyond the GPU's own, each other for what those before it
    have not got; a neighbour's copy counts as NVMe's. What is not loaded is missed, whatever the reason: it was not
    there, the engine did not need it, or it was too little to be worth a load. A tier that does not exist is not asked.
    """

    def __init__(self, geometry: Geometry, stats: Stats, tiers: Sequence[Tier]) -> None:
        self._geometry = geometry
        self._stats = stats
        self._tiers = tiers
        self._nothing = dict.fromkeys(tiers, 0)

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
        if tokens > 0:
            self._stats.add("short_hits")

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
        return local_tokens, max(local_tokens, limit_tokens // step * step), promised_tokens

    def passed_over(self, request: RequestState) -> None:
        """A request runs that was promised nothing, or whose promise the engine did not take: then nobody missed it."""
        asked = self._asked(request)
        if asked is not None and asked[2] == 0:
            self._count(asked, asked[0], self._nothing, self._nothing)

    def loaded(
        self, request: RequestState, local_tokens: int, external_tokens: int, details: Sequence[MoveDetail]
    ) -> None:
        """A load of ``external_tokens`` was planned: note in ``request.served`` how it divides between the tiers."""
        end_tokens = local_tokens + external_tokens
        asked = self._asked(request) or (local_tokens, end_tokens, external_tokens)
        sources = [detail.source for detail in details]
        blocks = {tier: sources.count(tier) for tier in self._tiers}
        tokens, left = dict(self._nothing), external_tokens
        if blocks[self._tiers[0]] < len(details):
            found = self._tokens_by_tier(local_tokens, details)
            for tier in reversed(self._tiers[1:]):
                tokens[tier] = min(found[tier], left)
                left -= tokens[tier]
        tokens[self._tiers[0]] = left
        request.served = {tier: tokens.get(tier, 0) for tier in TIERS}
        self._count(asked, end_tokens, tokens, blocks)

    def _tokens_by_tier(self, local_tokens: int, details: Sequence[MoveDetail]) -> Counter[Tier]:
        """Return the tokens of each tier but the fastest: one is of the slowest that a block of its groups is in."""
        groups, fastest = self._geometry.groups, self._tiers[0]
        step = min(group.block_tokens for group in groups)
        slowest: dict[int, Tier] = {}
        for detail in details:
            source = detail.source
            if source is not None and source is not fastest:
                start = detail.position * groups[detail.group].block_tokens
                for token in range(max(start, local_tokens), start + groups[detail.group].block_tokens, step):
                    slowest[token] = max(slowest.get(token, source), source)
        found: Counter[Tier] = Counter(slowest.values())
        return Counter({tier: count * step for tier, count in found.items()})

    def _count(self, asked: _Asked, hit_end_tokens: int, tokens: dict[Tier, int], blocks: dict[Tier, int]) -> None:
        """Count hits and misses. ``hit_end_tokens``: up to where the request has its KV now."""
        start_tokens, end_tokens, _ = asked
        asked_tokens, hit_tokens = end_tokens - start_tokens, sum(tokens.values())
        missed_tokens, missed_blocks = max(0, asked_tokens - hit_tokens), 0
        if end_tokens > hit_end_tokens:
            for group in self._geometry.groups:
                first = max(first_needed(group, start_tokens, end_tokens), hit_end_tokens // group.block_tokens)
                missed_blocks += max(0, end_tokens // group.block_tokens - first)
        stats = self._stats
        stats.add("lookup_tokens", max(asked_tokens, hit_tokens))
        for tier in reversed(self._tiers):  # what a slower one has, those before it have missed
            name = tier.name.lower()
            if tokens[tier] or blocks[tier]:
                stats.add(f"hit_tokens.{name}", tokens[tier])
                stats.add(f"hit_blocks.{name}", blocks[tier])
            if missed_tokens or missed_blocks:
                stats.add(f"missed_tokens.{name}", missed_tokens)
                stats.add(f"missed_blocks.{name}", missed_blocks)
            missed_tokens += tokens[tier]
            missed_blocks += blocks[tier]


_JOBS = {
    "queued_jobs.store": (JobKind.STORE,),
    "queued_jobs.load": (JobKind.LOAD,),
    "queued_jobs.demote": (JobKind.DEMOTE,),
    "queued_jobs.promote": (JobKind.PROMOTE,),
    "queued_jobs.files": (JobKind.OPEN_HOME, JobKind.OPEN_SEGMENT, JobKind.DROP_SEGMENT),
}


class Gauges:
    """How full the tiers are, and what waits: read now and then, see ``kvdisk.stats``."""

    def __init__(self, transfers: Transfers, tiers: Tiers, demotions: Sequence[Demotions]) -> None:
        self._transfers = transfers
        self._tiers = tiers
        self._demotions = demotions

    @property
    def busy(self) -> bool:
        """Whether a job is planned or under way, or a change of the index waits for its commit."""
        return len(self._transfers) > 0 or any(space.uncommitted for space in self._tiers)

    @property
    def planned_jobs(self) -> int:
        """Jobs that were ever planned. While that stays the same, and the engine is not busy, so does what is read."""
        return self._transfers.planned

    def read(self) -> dict[str, float]:
        """Return every gauge that there is, by series, but for those of the engine's own blocks."""
        count = self._transfers.count
        found: dict[str, float] = {series: sum(map(count, kinds)) for series, kinds in _JOBS.items()}
        for space in self._tiers:
            found |= space.gauges()
        if self._tiers.landing is not None:
            found["backlog_blocks"] = sum(demotions.total for demotions in self._demotions)
        return found
