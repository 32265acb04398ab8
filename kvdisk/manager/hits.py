# SPDX-License-Identifier: Apache-2.0
"""What requests found in the tiers, and why not more: counted, and told request by request.
Scheduler thread only."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvdisk.blocks import HIT_TIERS, KEPT_TIERS, BlockKey, Tier
from kvdisk.manager.catalog import ABSENT, NONE, READY, WRITING
from kvdisk.manager.load_threshold import LoadThreshold
from kvdisk.manager.parts import Parts
from kvdisk.manager.prefix_match import first_needed
from kvdisk.manager.requests import Asked, RequestOutcome, RequestState
from kvdisk.manager.tiers import Tiers
from kvdisk.stats import Miss

_SLOWEST_FIRST = tuple(reversed(HIT_TIERS))


class LoadedBlocks(NamedTuple):
    """What a load brings, block by block: its group, its position there, and the tier that it comes
    from; 0: none."""

    groups: bytes
    positions: array[int]
    tiers: bytes

    @property
    def slowest(self) -> Tier:
        """The slowest tier that a block comes from; the GPU where none comes from any. Quick,
        however many blocks there are."""
        return next((tier for tier in _SLOWEST_FIRST if tier in self.tiers), Tier.GPU)

    def before(self, position: int) -> LoadedBlocks:
        """Return the blocks of all groups that are before this position."""
        groups, positions, tiers = self.as_arrays()
        chosen = positions < position
        return LoadedBlocks(groups[chosen].tobytes(), array("q", positions[chosen].tobytes()), tiers[chosen].tobytes())

    def as_arrays(self) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint8]]:
        """Return the columns as arrays that share their memory."""
        return (
            np.frombuffer(self.groups, np.uint8),
            np.frombuffer(self.positions, np.int64),
            np.frombuffer(self.tiers, np.uint8),
        )


_FEW = 32
"""Up to so many blocks what Python loops over is faster than arrays."""
_NOTHING = LoadedBlocks(b"", array("q"), b"")


class HitCounts:
    """Counts what requests found in the tiers, and how long they waited for it, each time one is
    scheduled.

    The fastest tier is asked for every token beyond the GPU's own, each other for what those before
    it have not got. A neighbour's copy counts as NVMe's. What is not loaded is missed, whatever the
    reason.

    ``threshold``: knows how fast the engine computes. ``tell``: takes each outcome, once it is
    known.
    """

    def __init__(
        self, parts: Parts, tiers: Tiers, threshold: LoadThreshold, tell: Callable[[RequestOutcome], None] | None = None
    ) -> None:
        self._config = parts.config
        self._geometry = parts.geometry
        self._catalog = parts.catalog
        self._history = parts.history
        self._stats = parts.stats
        self._tiers = tiers
        self._sources = HIT_TIERS if parts.config.remote else KEPT_TIERS
        self._nothing = dict.fromkeys(self._sources, 0)
        there = [tier for tier in self._sources if tier is Tier.REMOTE or tiers.get(tier) is not None]
        self._counted = [(tier, tier.label) for tier in reversed(there)]
        """The tiers that there are, the slowest first, and their labels."""
        self._threshold = threshold
        self._tell = tell
        self._began: tuple[float, int] | None = None
        """Seconds, and the history's count, when the first request was scheduled."""
        self._saved_s = 0.0
        """Saved time below a second, which is not counted yet."""

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

    def scheduled(self, request: RequestState, loaded_tokens: int = 0, blocks: LoadedBlocks = _NOTHING) -> None:
        """Count what came of a request's last lookup, once: it runs, or a load is planned. Note in
        ``request.hit_tokens`` how that divides between the tiers.

        A promise that the engine did not take is none, and is not counted.
        """
        asked, request.asked = request.asked, None
        if asked is None or asked.promised_tokens != loaded_tokens:
            return
        start_tokens, limit_tokens = asked.start_tokens, asked.limit_tokens
        step = self._geometry.alignment_tokens
        end_tokens, hit_end_tokens = max(start_tokens, limit_tokens // step * step), start_tokens + loaded_tokens
        tokens = request.hit_tokens = self._tokens_by_tier(start_tokens, loaded_tokens, blocks)
        missed_tokens, missed_blocks = max(0, end_tokens - hit_end_tokens), 0
        for group in self._geometry.groups:
            first = max(first_needed(group, start_tokens, end_tokens), hit_end_tokens // group.block_tokens)
            missed_blocks += max(0, end_tokens // group.block_tokens - first)
        asked_tokens = max(end_tokens, hit_end_tokens) - start_tokens
        self._stats.add("lookup_tokens", asked_tokens)
        if asked_tokens:
            self._stats.observe("hit_ratio", loaded_tokens / asked_tokens)
        miss, asked_ago_s = None, None
        if asked.short or asked.total_tokens <= step:
            miss = Miss.SHORT
        elif missed_tokens:
            miss, asked_ago_s = self._why(request, asked, hit_end_tokens)
        for tier, label in self._counted:  # what a slower one has, those before it have missed
            found_tokens, found_blocks = tokens[tier], blocks.tiers.count(tier)
            if found_tokens or found_blocks:
                self._stats.add(f"hit_tokens.{label}", found_tokens)
                self._stats.add(f"hit_blocks.{label}", found_blocks)
            if missed_tokens or missed_blocks:
                self._stats.add(f"missed_tokens.{label}", missed_tokens)
                self._stats.add(f"missed_blocks.{label}", missed_blocks)
            missed_tokens += found_tokens
            missed_blocks += found_blocks
        request.outcome = RequestOutcome(
            request.request_id, request.prompt_tokens, asked.total_tokens, start_tokens, tokens, miss, asked_ago_s
        )
        if not loaded_tokens:
            self._end(request, request.outcome)

    def loaded(
        self, request: RequestState, blocks: LoadedBlocks, first_failed: int | None, load_s: float | None
    ) -> None:
        """Count what a request's load, which has ended, has saved: the seconds that the engine
        would have computed what it brought, at the rate that was measured, less those that it took.
        Nothing where that is less than nothing, or no rate is known.

        What it failed to bring saves nothing, though it stays in ``hit_tokens``: vLLM computes all
        from the first failed block on where there is one group of full attention, and everything
        elsewhere. ``first_failed``: its position; None: none has failed. ``load_s``: how long it
        took, None: it was never sent.
        """
        outcome = request.outcome
        if outcome is None:
            return
        if first_failed is not None:
            groups = self._geometry.groups
            kept = first_failed * groups[0].block_tokens - outcome.gpu_tokens
            kept = max(0, kept) if len(groups) == 1 and groups[0].reads_all else 0
            tokens = self._tokens_by_tier(outcome.gpu_tokens, kept, blocks.before(first_failed))
            outcome = outcome._replace(tokens=tokens, miss=Miss.LOAD_FAILED, asked_ago_s=None)
        rate, saved_s = self._threshold.rate, None
        if rate and load_s is not None:
            saved_s = max(0.0, sum(outcome.tokens.values()) / rate - load_s)
            whole_s, self._saved_s = divmod(self._saved_s + saved_s, 1.0)
            self._stats.add("saved_seconds", int(whole_s))
        self._end(request, outcome._replace(load_s=load_s, saved_s=saved_s))

    def _end(self, request: RequestState, outcome: RequestOutcome) -> None:
        request.outcome = None
        if outcome.miss is not None:
            self._stats.add(f"misses.{outcome.miss}")
        if self._tell is not None:
            self._tell(outcome)

    # -- why not more ----------------------------------------------------------------------------

    def _why(self, request: RequestState, asked: Asked, hit_end_tokens: int) -> tuple[Miss, float | None]:
        """Return what became of the first block that a longer hit would have needed, and how many
        seconds ago it was asked for before, if that is known.

        Looks at one block, or of a window at its few: whatever the length of the prompt.
        """
        began_s, began = self._began = self._began or (asked.now, self._history.came)
        key, presence, is_own = self._first_missing(request, asked.start_tokens, hit_end_tokens)
        if presence == WRITING:
            return Miss.WRITING, None
        if key is None:
            return Miss.NEVER_SEEN, None
        if request.load_tiers is not None and self._catalog.presences((key,))[0] == READY:
            return Miss.EXCLUDED, None
        known = self._history.known(key)
        if known.uses <= is_own:
            return Miss.NEVER_SEEN, None
        # The history's clock is what requests came to: at its mean pace since the start.
        count = self._history.came - began
        ago_s = None if is_own or known.blocks >= count else known.blocks * (asked.now - began_s) / count
        if self._config.max_age_s is not None and self._is_too_old(key):
            return Miss.EXPIRED, ago_s
        return self._how_it_left(key), ago_s

    def _is_too_old(self, key: BlockKey) -> bool:
        """Whether a block is older than ``max_age_s``; one whose copies have ended is taken to have
        been where no tier has evicted any."""
        row = self._catalog.find(key)
        if row != NONE:
            return any(self._catalog.columns(space.tier).is_of_no_age(row) for space in self._tiers)
        expired, evicted = (
            any(self._stats[f"{name}.{space.tier.label}"] for space in self._tiers)
            for name in ("expired_blocks", "evicted_blocks")
        )
        return expired and not evicted

    def _first_missing(
        self, request: RequestState, start_tokens: int, hit_end_tokens: int
    ) -> tuple[BlockKey | None, int, bool]:
        """Return the key of the first block that the next longer hit lacks, its presence, and
        whether this request itself has come to it before."""
        end = hit_end_tokens + self._geometry.alignment_tokens
        for group in self._geometry.groups:
            first = hit_end_tokens // group.block_tokens
            if not group.reads_all:
                first = first_needed(group, start_tokens, end)
            keys = request.keys[group.group][first : end // group.block_tokens]
            for at, presence in enumerate(self._catalog.presences(keys, request.load_tiers)):
                if presence != READY and group.state_tokens is not None:
                    # There may never be one just here: what counts is the last that there was.
                    last = self._history.last_known(request.keys[group.group][first:])
                    return last or keys[at], presence, False
                if presence != READY:
                    return keys[at], presence, request.counted[group.group] > first + at
        return None, ABSENT, False

    def _how_it_left(self, key: BlockKey) -> Miss:
        """Return why no tier has a block that was asked for before: the last tier would not take
        it; or one has evicted blocks, so that it is taken to be one of these; or none has."""
        *_, last = self._tiers
        if not (last.admission.admits_all or last.admission.admits((key,))[0]):
            return Miss.REFUSED
        of_memory, of_drive = (
            any(self._stats[f"evicted_blocks.{space.tier.label}"] for space in self._tiers if space.in_memory is is_so)
            for is_so in (True, False)
        )
        untaken = sum(self._stats[f"evicted_unwritten.{why}"] for why in ("room", "budget", "share"))
        if of_drive and untaken:
            return Miss.EVICTED
        if of_drive:
            return Miss.EVICTED_NVME
        return Miss.EVICTED_CPU if of_memory else Miss.NOT_STORED

    def _tokens_by_tier(self, start_tokens: int, tokens: int, blocks: LoadedBlocks) -> dict[Tier, int]:
        """Return how a load divides: a token is of the slowest tier that a block of its groups is
        in. A state that is alone stands for all tokens before it."""
        if not tokens:
            return self._nothing.copy()
        # Of a unit the GPU may have a part: what is loaded is whole blocks of the engine's.
        groups, grain, first = self._geometry.groups, self._geometry.hash_tokens, self._tiers.first.tier
        if blocks.slowest <= first:
            return self._nothing | {first: tokens // grain * grain}
        count = len(blocks.tiers)
        if (
            len(groups) == 1
            and count * groups[0].block_tokens >= tokens
            and blocks.tiers.count(blocks.tiers[0]) == count
        ):
            return self._nothing | {blocks.slowest: tokens // grain * grain}
        only_states = all(group.state_tokens is not None for group in groups)
        if len(blocks.tiers) <= _FEW:
            few = bytearray([first]) * (tokens // grain)
            columns = zip(blocks.tiers, blocks.groups, blocks.positions, strict=True)
            for tier, group_at, position in sorted(columns):  # the slowest last
                size = groups[group_at].block_tokens
                begin, end = position * size - start_tokens, (position + 1) * size - start_tokens
                begin, end = 0 if only_states else max(0, begin) // grain, min(end // grain, len(few))
                if begin < end and tier > first:
                    few[begin:end] = bytes([tier]) * (end - begin)
            return {tier: few.count(tier) * grain for tier in self._sources}
        slowest = np.full(tokens // grain, first, np.uint8)
        of_group, positions, of_tier = blocks.as_arrays()
        is_slower = of_tier > first
        for group in groups:
            chosen = is_slower & (of_group == group.group)
            tiers = of_tier[chosen]
            firsts = positions[chosen] * group.block_tokens - start_tokens
            for tier in np.unique(tiers):  # the slowest last, over what others have said
                ends = np.minimum((firsts[tiers == tier] + group.block_tokens) // grain, len(slowest))
                begins = np.zeros_like(ends) if only_states else np.maximum(0, firsts[tiers == tier]) // grain
                valid = begins < ends
                covered = np.bincount(begins[valid], minlength=len(slowest) + 1)
                covered -= np.bincount(ends[valid], minlength=len(slowest) + 1)
                np.maximum(slowest, tier, out=slowest, where=np.cumsum(covered[:-1]) > 0)
        return {tier: int(np.count_nonzero(slowest == tier)) * grain for tier in self._sources}
