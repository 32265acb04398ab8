# SPDX-License-Identifier: Apache-2.0
"""What the manager keeps of a live request, and counts of what requests found. Scheduler thread
only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvdisk.blocks import BlockKey, JobId, Tier, make_block_key, make_block_keys
from kvdisk.geometry import Geometry
from kvdisk.manager.catalog import TIERS
from kvdisk.manager.jobs import MoveDetail
from kvdisk.manager.lookup import Lookups, first_needed
from kvdisk.stats import Stats


class RequestLimits(NamedTuple):
    """What a request's user allows, in tokens; None: no limit, 0: nothing.

    ``most_load_tokens`` beyond those that are on the GPU already; ``store_limit_tokens`` from the
    prompt's start.
    """

    most_load_tokens: int | None = None
    store_limit_tokens: int | None = None


NO_LIMITS = RequestLimits()

FIRST_BACK_OFF_S = 0.05
LAST_BACK_OFF_S = 2.0


@dataclass(slots=True)
class BackOff:
    """How long nothing is offered after a refusal: until room came free, and some time passed.

    ``released``: the number at the last refusal. ``seconds``: how long the last one held, twice as
    long as the one before; 0: an offer was taken since, so that the next one is short again.
    """

    released: int = -1
    retry_s: float = 0.0
    seconds: float = 0.0

    def holds(self, released: int, now: float) -> bool:
        """Whether it is too early to offer anything."""
        return released <= self.released or now < self.retry_s

    def refuse(self, released: int, now: float) -> None:
        """Offers were refused. Those that are refused while it holds count as one refusal."""
        if now >= self.retry_s:
            self.seconds = min(self.seconds * 2, LAST_BACK_OFF_S) or FIRST_BACK_OFF_S
        self.released = max(self.released, released)
        self.retry_s = max(self.retry_s, now + (self.seconds or FIRST_BACK_OFF_S))

    def accept(self) -> None:
        """An offer was taken: there was room. One that needs none, or is not admitted, says nothing
        of it."""
        self.seconds = 0.0


_Asked = tuple[int, int, int]
"""A lookup, in tokens: what the GPU had, where the longest hit would have ended, what was promised
beyond the GPU's."""


@dataclass(eq=False, slots=True)
class RequestState:
    """One request between ``new_request`` and ``request_finished``.

    ``hashes``: the engine's own growing list of block hashes, one per ``hash_tokens``; read only.
    ``keys``: by group, of the first ``hash_count`` of them. ``arrival``: its number in order of
    arrival. ``stale``: what it has computed is of weights that are gone, and nothing of it is
    stored; until it starts again.
    """

    request_id: str
    hashes: Sequence[bytes]
    prompt_tokens: int
    geometry: Geometry
    limits: RequestLimits = NO_LIMITS
    arrival: int = 0
    keys: tuple[list[BlockKey], ...] = ()
    hash_count: int = 0
    stale: bool = False
    counted: list[int] = field(default_factory=list)
    """By group: how many of its blocks are counted as wanted."""
    kin: list[int] = field(default_factory=list)
    """By group: what ``ReuseHistory.count`` returned for these."""
    lookups: Lookups = field(default_factory=Lookups)
    held_tokens: int = 0
    held_blocks: Sequence[Sequence[int]] = ()
    """Its GPU blocks by group at its last step, 0 where it needs none, and how many tokens were
    computed in them: a victim is named when they have been freed. Of a group with a window the
    engine may have taken blocks since that lie wholly before the window."""
    reached: list[int] = field(default_factory=list)
    """By group, up to where its blocks were full and computed at its last step."""
    due: list[tuple[int, int]] = field(default_factory=list)
    """Blocks that the store policy offers and no tier has taken yet, by group and position."""
    back_off: BackOff = field(default_factory=BackOff)
    """Of its offers."""
    cut: dict[int, int] = field(default_factory=dict)
    """By group the position of the first block that was not admitted: what follows it would be of
    no use, even if another request stores that one, since those between are not offered again."""
    load_limit_tokens: int | None = None
    """No external hit reaches beyond this any more, because a load failed there; None: any may."""
    loading: bool = False
    load_job: JobId | None = None
    """Its last load."""
    awaited_load: JobId | None = None
    """Another's, for whose blocks it waits, or has waited."""
    wait_started_s: float | None = None
    gave_up_waiting: bool = False
    question: int = 0
    """Ticket of what the neighbours were asked; 0: nothing."""
    asked_s: float | None = None
    """When it was first looked up, or they were asked again."""
    hit_tokens: dict[Tier, int] = field(default_factory=dict)
    """Of the last planned load, by the tier they come from."""
    asked: _Asked | None = None
    """The last lookup, until it is known what came of it."""
    waited_since_s: float | None = None
    """When the wait that goes on began, whatever for."""

    first_prompt_tokens: int = field(init=False)
    """Of a session: before its prompt took in what it generated."""

    def __post_init__(self) -> None:
        self.first_prompt_tokens = self.prompt_tokens
        self.keys = tuple([[] for _ in self.geometry.groups])
        self.holds_nothing()
        self.count_anew()

    def update_keys(self) -> None:
        """Extend ``keys`` to what the engine has hashed by now: one key per full block and
        group."""
        if len(self.hashes) == self.hash_count:
            return
        self.hash_count = len(self.hashes)
        for group, keys in zip(self.geometry.groups, self.keys, strict=True):
            # Each hash covers its whole prefix, so the last one inside a block names the block.
            scale = group.block_tokens // self.geometry.hash_tokens
            hashes = self.hashes[(len(keys) + 1) * scale - 1 : self.hash_count : scale]
            keys.extend(make_block_keys(hashes, group.group))

    def holds_nothing(self) -> None:
        """Its GPU blocks are gone, or may hold what is wrong: it reaches again what it computes."""
        self.held_tokens, self.held_blocks = 0, ()
        self.reached = [0] * len(self.geometry.groups)
        self.due = []
        self.cut.clear()

    def count_anew(self) -> None:
        """What was counted of it is forgotten, or it has other keys."""
        self.counted, self.kin = ([0] * len(self.keys) for _ in range(2))

    def limit_loads(self, tokens: int) -> None:
        """Let no hit reach beyond this position any more, because a load failed there."""
        self.load_limit_tokens = tokens if self.load_limit_tokens is None else min(tokens, self.load_limit_tokens)

    def may_wait_again(self) -> None:
        """Begin a new wait, however the last one ended: it is preempted, or another load has
        begun."""
        self.wait_started_s = None
        self.gave_up_waiting = False

    def await_load(self, job_id: JobId) -> None:
        """Wait for another request's load, which is a wait of its own."""
        if job_id != self.awaited_load:
            self.awaited_load = job_id
            self.may_wait_again()

    def forget_changed_keys(self) -> bool:
        """Drop all keys where the engine has hashed the prompt anew; return whether it has.

        vLLM: each hash covers its whole prefix, so the last key of a group speaks for those before
        it.
        """
        for group, keys in zip(self.geometry.groups, self.keys, strict=True):
            last = len(keys) * (group.block_tokens // self.geometry.hash_tokens) - 1
            if keys and (last >= len(self.hashes) or make_block_key(self.hashes[last], group.group) != keys[-1]):
                for stale in self.keys:
                    stale.clear()
                self.hash_count = 0
                self.count_anew()
                self.lookups = Lookups()
                return True
        return False


class HitCounts:
    """Counts what requests found in the tiers, and how long they waited for it, each time one is
    scheduled.

    The fastest tier is asked for every token beyond the GPU's own, each other for what those before
    it have not got. A neighbour's copy counts as NVMe's. What is not loaded is missed, whatever the
    reason.
    """

    def __init__(self, geometry: Geometry, stats: Stats, tiers: Sequence[Tier]) -> None:
        self._geometry = geometry
        self._stats = stats
        self._tiers = tiers

    def waits(self, request: RequestState, now: float) -> None:
        """Count a lookup that was answered 'not yet'."""
        self._stats.add("lookup_waits")
        if request.waited_since_s is None:
            request.waited_since_s = now

    def waited(self, request: RequestState, now: float) -> None:
        """Measure the wait of a request that has got its answer, if it has waited."""
        if request.waited_since_s is not None:
            self._stats.observe("wait_seconds", max(0.0, now - request.waited_since_s))
            request.waited_since_s = None

    def scheduled(self, request: RequestState, loaded_tokens: int = 0, details: Sequence[MoveDetail] = ()) -> None:
        """Count what came of a request's last lookup, once: it runs, or a load is planned. Note in
        ``request.hit_tokens`` how that divides between the tiers.

        A promise that the engine did not take is none, and is not counted.
        """
        asked, request.asked = request.asked, None
        if asked is None or asked[2] != loaded_tokens:
            return
        start_tokens, limit_tokens, _ = asked
        step = self._geometry.step_tokens
        end_tokens, hit_end_tokens = max(start_tokens, limit_tokens // step * step), start_tokens + loaded_tokens
        tokens = request.hit_tokens = self._tokens_by_tier(start_tokens, loaded_tokens, details)
        sources = [detail.source for detail in details]
        missed_tokens, missed_blocks = max(0, end_tokens - hit_end_tokens), 0
        for group in self._geometry.groups:
            first = max(first_needed(group, start_tokens, end_tokens), hit_end_tokens // group.block_tokens)
            missed_blocks += max(0, end_tokens // group.block_tokens - first)
        self._stats.add("lookup_tokens", max(end_tokens, hit_end_tokens) - start_tokens)
        for tier in reversed(self._tiers):  # what a slower one has, those before it have missed
            found = {"hit_tokens": tokens[tier], "hit_blocks": sources.count(tier)}
            missed = {"missed_tokens": missed_tokens, "missed_blocks": missed_blocks}
            for name, count in (found | missed).items():
                self._stats.add(f"{name}.{tier.name.lower()}", count)
            missed_tokens += found["hit_tokens"]
            missed_blocks += found["hit_blocks"]

    def _tokens_by_tier(self, start_tokens: int, tokens: int, details: Sequence[MoveDetail]) -> dict[Tier, int]:
        """Return how a load divides: a token is of the slowest tier that a block of its groups is
        in. A state that is alone stands for all tokens before it."""
        groups = self._geometry.groups
        grain = math.gcd(*(group.block_tokens for group in groups))
        slowest = np.full(tokens // grain, int(self._tiers[0]), np.uint8)
        only_states = all(group.state_tokens is not None for group in groups)
        for detail in details:
            if detail.source is not None and detail.source is not self._tiers[0]:
                block_tokens = groups[detail.group].block_tokens
                first = detail.position * block_tokens - start_tokens
                begin = 0 if only_states else max(0, first)
                part = slowest[begin // grain : (first + block_tokens) // grain]
                np.maximum(part, np.uint8(detail.source), out=part)
        counts: list[int] = np.bincount(slowest, minlength=len(Tier)).tolist()
        return {tier: counts[tier] * grain for tier in TIERS}
