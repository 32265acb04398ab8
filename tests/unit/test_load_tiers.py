# SPDX-License-Identifier: Apache-2.0
"""``kv_load_tiers``: a request loads from the tiers that it names, and from memory."""

from __future__ import annotations

import pytest
from support.fake_neighbours import FakeHome
from support.fake_slots import Content
from tier_bench import GEOMETRY, TierBench, keys_of

from kvdisk.blocks import Tier
from kvdisk.connector.controls import Controls
from kvdisk.geometry import FILE_EPOCH
from kvdisk.index.base import SegmentRecord
from kvdisk.manager.requests import RequestLimits

PROMPT = "aabbccddx"
ALL = frozenset({Tier.CPU, Tier.NVME, Tier.REMOTE})


@pytest.mark.parametrize(
    ("said", "tiers"),
    [
        (None, None),
        ([{}], None),
        ([{"medium": "cpu"}, {"medium": "STORAGE"}], None),
        ([], {Tier.CPU}),
        ([{"medium": "cpu"}], {Tier.CPU}),
        ([{"medium": "storage", "locality": None}], None),
        ([{"medium": "storage", "locality": "local"}], {Tier.CPU, Tier.NVME}),
        ([{"locality": "Remote"}, "x", {"medium": "tape"}], {Tier.CPU, Tier.REMOTE}),
        ([{"medium": "cpu", "locality": "remote"}], {Tier.CPU}),
        ([{"medium": 3}], None),
        ({"medium": "cpu"}, None),
        ("cpu", None),
    ],
)
def test_which_tiers_a_list_names(said, tiers, caplog):
    """As vLLM's own connector reads it. What is wrong is ignored, and said."""
    found = Controls().limits({"kv_load_tiers": said}).load_tiers
    assert found == tiers
    is_wrong = said is not None and (not isinstance(said, list) or any(entry in ("x", {"medium": 3}) for entry in said))
    assert bool(caplog.messages) == is_wrong


def asked(bench: TierBench, tiers: frozenset[Tier] | None, name: str) -> int | None:
    """Return how many tokens of the prompt a request may load that names these tiers."""
    hashes = [PROMPT[:end].encode() for end in range(2, len(PROMPT) + 1, 2)]
    bench.manager.new_request(name, hashes, len(PROMPT), bench.now, RequestLimits(load_tiers=tiers))
    return bench.manager.lookup(name, 0, len(PROMPT), bench.now)


def test_what_lies_in_other_tiers_is_missed_and_the_reason_says_so():
    bench = TierBench((8,), (16,), nvme_admission="all", min_load_tokens=0, prefetch=False)
    bench.idle()
    bench.serve(PROMPT)
    tails = bench.rows(PROMPT)[2:]
    bench.parts.cpu.end(tails[::-1])
    assert bench.held(PROMPT) == [True] * 4 and bench.held(PROMPT, Tier.CPU) == [True, True, False, False]
    assert asked(bench, None, "all") == 8
    assert asked(bench, frozenset({Tier.CPU, Tier.NVME}), "both") == 8
    assert asked(bench, frozenset({Tier.CPU, Tier.REMOTE}), "memory") == 4
    bench.manager.note_scheduled("memory", 4)  # it runs with less than it could have had
    assert bench.stats["misses.excluded"] == 0, "what it was given it has not taken"
    bench.parts.cpu.end(bench.rows(PROMPT)[1::-1])
    assert asked(bench, frozenset({Tier.CPU}), "nothing") == 0
    bench.manager.note_scheduled("nothing", 4)
    assert bench.stats["misses.excluded"] == 1


def test_a_load_reads_a_tier_that_it_may_where_another_has_the_block_too():
    bench = TierBench((8,), (16,), nvme_admission="all", min_load_tokens=0)
    bench.idle()
    bench.serve(PROMPT)
    keys = keys_of(PROMPT)
    rows = bench.catalog.find_many(keys)
    assert bench.catalog.readable_tiers(rows).tolist() == [Tier.CPU] * 4
    assert bench.catalog.readable_tiers(rows, {Tier.NVME}).tolist() == [Tier.NVME] * 4
    assert bench.catalog.presences(keys, frozenset()) == bytes(4)
    assert bench.catalog.presences(keys[:1], {Tier.NVME}) == bench.catalog.presences(keys[:1])


def test_nothing_is_read_ahead_for_a_request_that_excludes_a_tier():
    bench = TierBench((8,), (16,), nvme_admission="all", min_load_tokens=0)
    bench.idle()
    bench.serve(PROMPT)
    for tiers in (frozenset({Tier.CPU}), None):
        asked(bench, tiers, f"loads from {tiers}")
    assert [request.request_id for request in bench.manager._promotions._waiting] == ["loads from None"]


@pytest.mark.parametrize("who", ["this engine", "a neighbour"])
def test_the_remote_store_is_asked_for_what_lies_in_a_tier_that_a_request_leaves_out(who):
    how = {"nvme_admission": "all", "min_load_tokens": 0, "prefetch": False}
    bench = TierBench((8,), (16,), **how, remote="s3://nowhere", remote_admission="all")
    if who == "this engine":
        bench.serve(PROMPT)
        bench.parts.cpu.end(bench.rows(PROMPT)[::-1])
        bench.advance(2 * bench.remote.hint_life_s)
    else:
        home = FakeHome("n" * 32, SegmentRecord(0, GEOMETRY.groups[0].slot_bytes, 16, 0))
        for at, key in enumerate(keys_of(PROMPT)):
            home.store(key, at, 7 + at, 1, None, GEOMETRY.groups[0])
        bench.neighbours.homes.append(home)
        asked(bench, frozenset({Tier.CPU, Tier.NVME}), "knows the neighbour's")
        bench.neighbours.answer()
    bench.remote.objects = {(FILE_EPOCH, key, 0): Content() for key in keys_of(PROMPT)}
    bench.step()
    assert not bench.parts.remote_has(keys_of(PROMPT)[0])
    assert asked(bench, frozenset({Tier.CPU, Tier.REMOTE}), "r") is None, "the answer is to come"
    bench.remote.answer()
    assert bench.manager.lookup("r", 0, len(PROMPT), bench.now) == 8
