# SPDX-License-Identifier: Apache-2.0
"""What of a request's prefix can be loaded. Scheduler thread only."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from kvdisk.blocks import JobId
from kvdisk.manager.hits import HitCounts
from kvdisk.manager.load_jobs import GpuLoads
from kvdisk.manager.load_threshold import LoadThreshold
from kvdisk.manager.parts import Parts
from kvdisk.manager.peer_hints import PeerHints
from kvdisk.manager.prefix_match import Lookups, first_needed
from kvdisk.manager.requests import Asked, RequestState
from kvdisk.manager.tiers import Tiers
from kvdisk.messages import JobKind


class Wait(StrEnum):
    """What a request waits for that may have more for it soon."""

    WRITTEN = "a block is being written to a tier"
    READ = "a block is being read into memory"
    LOADED = "another request's load brings it to the GPU"


class Found(NamedTuple):
    """What of a request's prefix is there. ``end``: up to which token it can be loaded now.
    ``wait``: why it is worth to ask again, if it is. ``loader``: with LOADED, the load that brings
    it."""

    end: int
    wait: Wait | None = None
    loader: JobId | None = None


class HitLookup:
    """Answers lookups: what is there (``find``) changes nothing, and ``lookup`` decides whether to
    wait, keeps the clocks of that, and counts."""

    def __init__(
        self,
        parts: Parts,
        tiers: Tiers,
        hits: HitCounts,
        hints: PeerHints,
        gpu_loads: GpuLoads,
        threshold: LoadThreshold,
    ) -> None:
        self._config = parts.config
        self._geometry = parts.geometry
        self._catalog = parts.catalog
        self._transfers = parts.transfers
        self._stats = parts.stats
        self._state = parts.state
        self._tiers = tiers
        self._hits = hits
        self._hints = hints
        self._gpu_loads = gpu_loads
        self._threshold = threshold

    def lookup(self, request: RequestState, local_tokens: int, total_tokens: int, now: float) -> int | None:
        """See ``TierManager.lookup``."""
        if request.limits.most_load_tokens == 0:
            request.asked = Asked(local_tokens, local_tokens, 0, total_tokens, now=now)
            return 0
        request.update_keys()
        if request.load_limit_tokens is not None and request.asked is not None and request.asked.promised_tokens:
            # vLLM: for a load it reserves what loads before it still need. It counts the load that
            # has failed among these, so that there may never be room for another one.
            request.limit_loads(0)
        limit = self._limit_of(request, local_tokens, total_tokens)
        self._hints.refresh(request)
        if self._is_answer_due(request, local_tokens, limit) and self._wait_or_give_up(request, now):
            self._hits.waits(request, now)  # at once: many may wait, and with each answer a hit may be longer
            return None
        found = self.find(request, local_tokens, limit, now)
        if found.loader is not None:
            request.await_load(found.loader)
        if found.wait is not None and not request.gave_up_waiting and self._wait_or_give_up(request, now):
            self._state.read_awaited |= found.wait is Wait.READ and self._transfers.count(JobKind.PROMOTE) > 0
            self._hits.waits(request, now)
            return None
        tokens, short = found.end - local_tokens, False
        if tokens <= 0 or not self._is_worth(request, local_tokens, found.end):
            tokens, short = 0, tokens > 0
            self._stats.add("short_hits", int(short))
        else:
            request.wait_started_s = None
        request.asked = Asked(local_tokens, limit, tokens, total_tokens, short, now)
        self._hits.waited(request, now)
        return tokens

    def _limit_of(self, request: RequestState, local_tokens: int, total_tokens: int) -> int:
        """Return up to which token a request may load: one at least is left to compute."""
        limit = total_tokens - 1
        if request.load_limit_tokens is not None:
            limit = min(limit, request.load_limit_tokens)
        if request.limits.most_load_tokens is not None:
            limit = min(limit, local_tokens + request.limits.most_load_tokens)
        return limit

    def _is_answer_due(self, request: RequestState, local_tokens: int, limit: int) -> bool:
        """Whether others were asked for a request that a hit could help, and have not answered."""
        step = self._geometry.alignment_tokens
        may_hit = limit // step * step > local_tokens
        return may_hit and not request.gave_up_waiting and self._hints.is_asking(request)

    def find(self, request: RequestState, local_tokens: int, limit: int, now: float) -> Found:
        """Return what is there of a request's prefix from ``local_tokens`` on, up to ``limit``.
        Changes nothing, but what ``request.lookups`` remembers to be faster the next time."""
        hints = self._hints.usable_in(request.load_tiers)
        hit, coming = request.lookups.hits(
            self._catalog,
            self._geometry,
            request.keys,
            local_tokens,
            limit,
            hints,
            self._hints.changes if hints else -1,
            request.load_tiers,
        )
        loader = self._loader_of(request, local_tokens, hit, now)
        if self._is_being_read(request, local_tokens, hit):
            return Found(hit, Wait.READ, loader)
        if loader is not None:
            return Found(hit, Wait.LOADED, loader)
        return Found(hit, Wait.WRITTEN if coming > hit else None)

    def _is_being_read(self, request: RequestState, local_tokens: int, hit: int) -> bool:
        """Whether a block of a hit is just being read into memory: once is enough."""
        arriving, space = self._state.arriving, self._tiers.arrival_tier
        if not arriving or space is None or hit <= local_tokens:
            return False
        for group in self._geometry.groups:
            keys, stop = request.keys[group.group], hit // group.block_tokens
            if group.reads_all:
                needed = request.lookups.arriving(self._catalog, space.tier, group.group, keys, stop)
            else:
                needed = keys[first_needed(group, local_tokens, hit) : stop]
            if not arriving.isdisjoint(needed):
                return True
        return False

    def _loader_of(self, request: RequestState, local_tokens: int, hit: int, now: float) -> JobId | None:
        """Return the load of another request after which the GPU will have a part of a hit, if
        there is one.

        It is looked for once for each load that is waited for, and when the time for it is over
        again, whenever another load begins or ends.
        """
        loads, awaited = self._gpu_loads, request.awaited_load
        if not loads.any or hit <= local_tokens:
            return None
        is_waiting = request.wait_started_s is not None
        if is_waiting and loads.is_out(awaited) and not request.gave_up_waiting and not self._is_over(request, now):
            return awaited
        asked = (loads.changes, local_tokens, hit)
        if request.lookups.brought[0] != asked:
            found = Lookups().find(loads.presences, self._geometry, request.keys, local_tokens, hit)
            request.lookups.brought = asked, found.ready
        _, end = request.lookups.brought
        if end <= local_tokens or not self._is_worth(request, local_tokens, end):
            return None
        places = ((group, first_needed(group, local_tokens, end)) for group in self._geometry.groups)
        first = next(request.keys[group.group][at] for group, at in places if at < end // group.block_tokens)
        loader = loads.loader_of(first)
        return loader if (is_waiting and loader == awaited) or loader not in request.awaited_loads else None

    def _is_worth(self, request: RequestState, local_tokens: int, hit: int) -> bool:
        """Whether a hit is long enough to be worth its load."""
        if hit - local_tokens >= self._threshold.enough_tokens:
            return True
        slowest, tiers = self._tiers.first.tier, request.load_tiers
        for group in self._geometry.groups:
            first = first_needed(group, local_tokens, hit)
            keys = request.keys[group.group][first : hit // group.block_tokens]
            found = self._catalog.readable_in_turn(self._catalog.find_all(keys), tiers)
            for key, tier in zip(keys, found, strict=True):
                slowest = max(slowest, tier or self._hints.tier_of(key, tiers))
        return self._threshold.is_worth(hit - local_tokens, slowest, request.arrival)

    def _wait_or_give_up(self, request: RequestState, now: float) -> bool:
        """Return whether the request waits on: its wait begins here, and ends after
        ``lookup_wait_s``."""
        if request.wait_started_s is None:
            request.wait_started_s = now
        if not self._is_over(request, now):
            return True
        request.gave_up_waiting = True
        self._stats.add("wait_timeouts")
        return False

    def _is_over(self, request: RequestState, now: float) -> bool:
        started_s = request.wait_started_s
        return started_s is not None and now - started_s >= self._config.lookup_wait_s
