# SPDX-License-Identifier: Apache-2.0
"""What is counted of a request's hit: by tier, in tokens and blocks, once for each time it is taken
up."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from unittest import mock

import hypothesis.strategies as st
import pytest
from hypothesis import given
from tier_bench import TierBench

from kvdisk.blocks import Tier
from kvdisk.config import Config
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.manager import hits
from kvdisk.manager.admission import AdmissionPolicy
from kvdisk.manager.hits import HitCounts, LoadedBlocks
from kvdisk.manager.load_threshold import LoadThreshold
from kvdisk.manager.parts import Parts
from kvdisk.manager.requests import Asked, RequestOutcome, RequestState
from kvdisk.manager.tiers import Tiers, TierSpace
from kvdisk.stats import Miss

ONE = Geometry((GroupGeometry(0, 4, 4096),), 1, 4)
TWO = Geometry((GroupGeometry(0, 4, 4096), GroupGeometry(1, 2, 4096, window_tokens=5)), 1, 2)
STATE = Geometry((GroupGeometry(0, 4, 4096, window_tokens=2, state_tokens=16),), 1, 4)
CPU, NVME = Tier.CPU, Tier.NVME


NOTHING = (0, 0)
COUNTED = ("hit_tokens", "hit_blocks", "missed_tokens", "missed_blocks")
"""Of memory and NVMe each; before them ``lookup_tokens``."""


def blocks_of(blocks: Iterable[tuple[int, int, int]]) -> LoadedBlocks:
    """Return blocks that each are a group, a position, and a tier, or 0."""
    groups, positions, tiers = zip(*blocks, strict=True)
    return LoadedBlocks(bytes(groups), array("q", positions), bytes(tiers))


def counts_of(geometry: Geometry, tiers: Sequence[Tier]) -> HitCounts:
    parts = Parts.make(Config(), geometry, None)
    spaces = Tiers(*(TierSpace(parts, tier, AdmissionPolicy()) for tier in tiers))
    return HitCounts(parts, spaces, LoadThreshold(None, geometry.alignment_tokens))


@pytest.mark.parametrize(
    ("geometry", "tiers", "asked", "load", "sources", "expected"),
    [
        # Partly on the GPU, in memory and on NVMe; the last multiple of a block is asked for.
        (ONE, (CPU, NVME), (8, 27, 12), (8, 12), "0.2 cpu 0.3 nvme 0.4 cpu", (16, (8, 4), (2, 1), (8, 4), (2, 1))),
        # A window's blocks that the engine did not want have no move, and are tokens of the hit.
        (ONE, (NVME,), (0, 21, 12), (0, 12), "0.1 nvme 0.2 none", (20, (0, 12), (0, 1), (0, 8), (0, 2))),
        # Of several groups a token is of the slowest tier that one of its blocks came from.
        (
            *(TWO, (CPU, NVME), (4, 17, 8), (4, 8), "0.1 cpu 0.2 cpu 1.4 nvme 1.5 cpu"),
            (12, (6, 2), (3, 1), (6, 4), (4, 3)),
        ),
        # The one state of a hit stands for all of it.
        (STATE, (CPU, NVME), (4, 17, 12), (4, 12), "0.3 nvme", (12, (0, 12), (0, 1), (12, 0), (1, 0))),
        # A miss; and a promise that the engine did not take, which is none.
        (ONE, (CPU, NVME), (0, 17, 0), None, "", (16, NOTHING, NOTHING, (16, 16), (4, 4))),
        (ONE, (CPU, NVME), (0, 17, 8), None, "", (0, NOTHING, NOTHING, NOTHING, NOTHING)),
    ],
)
def test_each_token_and_block_of_a_hit_is_counted_for_one_tier(geometry, tiers, asked, load, sources, expected):
    counts, request = counts_of(geometry, tiers), RequestState("r", [], 100, geometry)
    stats, words = counts._stats, sources.split()
    request.asked = Asked(*asked, total_tokens=100)
    if load is not None:
        places = [tuple(map(int, place.split("."))) for place in words[::2]]
        froms = [{"cpu": CPU, "nvme": NVME}.get(word) for word in words[1::2]]
        blocks = blocks_of((*place, tier or 0) for place, tier in zip(places, froms, strict=True))
        counts.scheduled(request, load[1], blocks)
        assert (request.hit_tokens[CPU], request.hit_tokens[NVME]) == expected[1]
    for _ in range(2):
        counts.scheduled(request)
    assert (
        stats["lookup_tokens"],
        *((stats[f"{name}.cpu"], stats[f"{name}.nvme"]) for name in COUNTED),
    ) == expected


@given(data=st.data(), geometry=st.sampled_from([ONE, TWO, STATE]))
def test_few_blocks_divide_as_many_do(data, geometry):
    counts, step = counts_of(geometry, (CPU, NVME)), geometry.hash_tokens
    start, tokens = (data.draw(st.integers(0, 12)) * step for _ in range(2))
    places = st.tuples(st.integers(0, len(geometry.groups) - 1), st.integers(0, 12), st.sampled_from([0, CPU, NVME]))
    blocks = blocks_of(sorted(data.draw(st.lists(places, min_size=1, max_size=12))))
    assert blocks.slowest == max(blocks.tiers)
    found = []
    for few in (0, 12):
        with mock.patch.object(hits, "_FEW", few):
            found.append(counts._tokens_by_tier(start, tokens, blocks))
    assert found[0] == found[1] and sum(found[0].values()) <= tokens


def test_a_wait_is_measured_once_from_its_first_answer_to_the_last():
    counts, request = counts_of(ONE, [CPU]), RequestState("r", [], 100, ONE)
    stats = counts._stats
    for now in (10.0, 10.5, 11.0):
        counts.waits(request, now)
    for now in (12.5, 20.0):
        counts.waited(request, now)
    samples = stats.samples["wait_seconds"]
    assert (samples.count, samples.total, stats["lookup_waits"]) == (1, 2.5, 3)


@pytest.mark.parametrize("cold", [False, True], ids=["in the GPU's cache", "in the tier"])
def test_what_is_asked_for_again_stays(cold):
    """A request that has its blocks, from a tier or from the GPU's own cache, counts as a use of
    their copies."""
    bench = TierBench((4,))
    for text in ("aabbx", "ccddx"):
        bench.serve(text)
    bench.serve("aabbx", cold=cold)
    bench.serve("iijjx")
    assert [bench.held(text, CPU) for text in ("aabb", "iijj", "ccdd")] == [[True] * 2, [True] * 2, [False] * 2]


@pytest.mark.parametrize(("left", "reason"), [(0, Miss.EVICTED_NVME), (1, Miss.EVICTED)])
def test_what_the_last_tier_has_evicted_is_told_apart_as_far_as_it_can_be(left, reason):
    """A copy may have left memory where NVMe took nothing, or NVMe: with both, nobody knows
    which."""
    bench = TierBench((4,), (4,), nvme_admission="all", prefetch=False)
    found: list[RequestOutcome] = []
    bench.manager._hits._tell = found.append
    bench.finish()
    prompts = ("aabbx", "ccddx", "eeffx", "gghhx", "iijjx", "kkllx")
    for prompt in prompts:
        bench.add(prompt)
        bench.finish()
    bench.stats.add("evicted_unwritten.room", left)
    bench.engine.pool.forget_all()
    bench.add(prompts[0])
    bench.finish()
    assert [outcome.miss for outcome in found] == [Miss.NEVER_SEEN] * 6 + [reason]
    ago_s = found[-1].asked_ago_s
    assert ago_s is not None and 0 < ago_s <= bench.now


@pytest.mark.parametrize(
    ("geometry", "failed", "rate", "load_s", "saved_s", "miss"),
    [
        (ONE, (), 8.0, 0.5, 16 / 8 - 0.5, None),
        (ONE, (), 8.0, 60.0, 0.0, None),
        (ONE, (), 0.0, 0.5, None, None),
        (ONE, (4,), 8.0, 0.5, 8 / 8 - 0.5, Miss.LOAD_FAILED),
        # Where there are several groups vLLM computes everything.
        (TWO, (4,), 8.0, 0.5, 0.0, Miss.LOAD_FAILED),
    ],
)
def test_what_a_load_saves_is_what_it_brought_at_the_measured_rate_less_its_time(
    geometry, failed, rate, load_s, saved_s, miss
):
    counts, request = counts_of(geometry, [CPU, NVME]), RequestState("r", [], 24, geometry)
    told: list[RequestOutcome] = []
    counts._tell, counts._threshold.rate = told.append, rate
    request.asked = Asked(8, 24, 16, total_tokens=25)
    blocks = blocks_of((0, at, CPU) for at in (2, 3, 4, 5))
    counts.scheduled(request, 16, blocks)
    assert not told, "it is not known yet what comes of the load"
    for _ in range(2):
        counts.loaded(request, blocks, min(failed, default=None), load_s)
    (outcome,) = told
    assert (outcome.saved_s, outcome.load_s, outcome.miss) == (saved_s, load_s, miss)
    assert counts._stats["saved_seconds"] == int(saved_s or 0)
    rest = (saved_s or 0) % 1
    assert counts._saved_s == rest, "less than a second is counted with what comes"
