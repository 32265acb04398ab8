# SPDX-License-Identifier: Apache-2.0
"""On vLLM's real scheduler: KV-cache events and the limits that come with a request.

``View`` is what a router makes of the events; it must be what the engine could load.
"""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
from schedulers import BLOCK_TOKENS, Bench, Engines
from vllm.distributed.kv_events import AllBlocksCleared, BlockStored

from kvdisk.blocks import Tier, make_block_key
from kvdisk.connector import events, scheduler_side
from kvdisk.manager import events as journal_room
from kvdisk.manager.catalog import TIERS
from kvdisk.messages import JobKind
from kvdisk.stats import TIER_WORDS

pytestmark = pytest.mark.vllm

BLOCKS = 4
PROMPT = list(range(100, 100 + BLOCKS * BLOCK_TOKENS + 5))
MEDIA = {"CPU": Tier.CPU, "STORAGE": Tier.NVME}


def test_every_table_of_tiers_has_each_of_them():
    assert set(events._MEDIA) == set(scheduler_side._SOURCES) == set(TIERS)
    assert list(TIER_WORDS) == [tier.name.lower() for tier in Tier]


@pytest.fixture(autouse=True)
def whole_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have hashes published whole; vLLM's default is their last 64 bits."""
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")


class View:
    """What a router believes of one engine's tiers, and that no event contradicts what it believed
    before."""

    def __init__(self) -> None:
        self.held: dict[Tier, set[bytes]] = {tier: set() for tier in MEDIA.values()}

    def read(self, published: list[Any]) -> None:
        for event in published:
            if isinstance(event, AllBlocksCleared):
                continue  # the GPU's
            if event.medium not in MEDIA:
                continue
            held = self.held[MEDIA[event.medium]]
            keys = {make_block_key(block_hash, event.group_idx) for block_hash in event.block_hashes}
            if isinstance(event, BlockStored):
                assert not keys & held, "told twice"
                held |= keys
            else:
                assert keys <= held, "gone before it was there"
                held -= keys
        published.clear()

    def check(self, bench: Bench) -> None:
        self.read(bench.published)
        catalog = bench.connector.scheduler._manager._catalog
        for tier, held in self.held.items():
            assert held == set(catalog.ready_keys(tier)), tier


def of_kvdisk(bench: Bench, kind: type) -> list[Any]:
    return [event for event in bench.published if isinstance(event, kind) and event.medium in MEDIA]


# -- events ----------------------------------------------------------------------------------------


def test_a_stored_block_is_told_with_its_tokens_and_its_parent(plain: Engines) -> None:
    bench = plain.make(nvme=True, events=True)
    request = bench.serve("a", PROMPT)
    for medium in MEDIA:
        stored = {event.block_hashes[0]: event for event in of_kvdisk(bench, BlockStored) if event.medium == medium}
        assert list(stored) == [*reversed(request.block_hashes[:BLOCKS])], "the tail is ready first"
        for at, block_hash in enumerate(request.block_hashes[:BLOCKS]):
            event = stored[block_hash]
            assert event.token_ids == PROMPT[at * BLOCK_TOKENS : (at + 1) * BLOCK_TOKENS]
            assert event.block_size == BLOCK_TOKENS
            assert event.parent_block_hash == (request.block_hashes[at - 1] if at else None)
            assert (event.group_idx, event.kv_cache_spec_kind) == (0, "full_attention")
            assert (event.lora_id, event.lora_name, event.locality) == (None, None, "LOCAL")
    # The engine's own events of the same blocks say the same.
    own = [event for event in bench.published if event.medium == "GPU"]
    assert [event.token_ids for event in own] == [PROMPT[: BLOCKS * BLOCK_TOKENS]]
    assert own[0].block_hashes == request.block_hashes[:BLOCKS]
    assert own[0].parent_block_hash is None


def test_groups_with_blocks_of_different_sizes_are_told_apart(plain: Engines) -> None:
    bench = plain.make(window_tokens=3 * BLOCK_TOKENS, window_block_tokens=2 * BLOCK_TOKENS, events=True)
    request = bench.serve("a", PROMPT)
    window = {event.block_hashes[0]: event for event in of_kvdisk(bench, BlockStored) if event.group_idx == 1}
    assert set(window) == {request.block_hashes[1], request.block_hashes[3]}
    second = window[request.block_hashes[3]]
    assert second.token_ids == PROMPT[2 * BLOCK_TOKENS : 4 * BLOCK_TOKENS]
    assert second.parent_block_hash == request.block_hashes[1]
    assert window[request.block_hashes[1]].parent_block_hash is None
    assert (second.kv_cache_spec_kind, second.kv_cache_spec_sliding_window) == ("sliding_window", 3 * BLOCK_TOKENS)


def test_blocks_of_a_salted_prompt_are_told_by_hash_alone(plain: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that hashed the tokens would take them for blocks that everybody may have."""
    monkeypatch.delenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES")
    bench = plain.make(events=True)
    bench.serve("a", PROMPT, cache_salt="tenant")
    stored = of_kvdisk(bench, BlockStored)
    assert len(stored) == BLOCKS
    assert all((event.token_ids, event.block_size) == ([], 0) for event in stored)
    (own,) = [event for event in bench.published if event.medium == "GPU"]
    assert {event.block_hashes[0] for event in stored} == set(own.block_hashes), "numbers, as the engine's own are"


def test_decoded_blocks_are_told_with_their_tokens(plain: Engines) -> None:
    bench = plain.make(events=True, extra={"store_decode": True})
    request = bench.serve("a", PROMPT, max_tokens=BLOCK_TOKENS + 1)
    last = of_kvdisk(bench, BlockStored)[-1]
    assert last.token_ids == list(request.all_token_ids)[BLOCKS * BLOCK_TOKENS : (BLOCKS + 1) * BLOCK_TOKENS]
    assert last.parent_block_hash == request.block_hashes[BLOCKS - 1]
    assert not bench.connector.scheduler._described, "nothing is kept of a request that is gone"


def test_tokens_are_remembered_of_the_last_blocks_only(plain: Engines) -> None:
    bench = plain.make(events=True)
    bench.connector.scheduler._writer.descriptions._most = 2
    request = bench.serve("a", PROMPT)
    described = [event for event in of_kvdisk(bench, BlockStored) if event.token_ids]
    assert [event.block_hashes[0] for event in described] == request.block_hashes[3:1:-1]
    assert described[1].parent_block_hash == request.block_hashes[1]


def test_what_a_start_finds_on_the_drive_is_told_once_and_in_pieces(
    plain: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = plain.make(nvme=True, events=True)
    request = bench.serve("a", PROMPT)
    plain.close()
    monkeypatch.setattr(journal_room, "MOST_TAKEN", 3)
    bench = plain.make(nvme=True, events=True)
    assert bench.scheduler.has_requests(), "steps are asked for, until all is told"
    steps = []
    while bench.connector.scheduler._journal.waits:
        before = len(of_kvdisk(bench, BlockStored))
        bench.step()
        steps.append(len(of_kvdisk(bench, BlockStored)) - before)
    assert steps == [3, 1]
    stored = of_kvdisk(bench, BlockStored)
    assert {event.block_hashes[0] for event in stored} == set(request.block_hashes[:BLOCKS])
    assert {(event.medium, event.block_size) for event in stored} == {("STORAGE", 0)}
    bench.run()
    View().check(bench)


@pytest.mark.parametrize("seed", range(2))
def test_a_router_knows_what_is_there(seed: int, plain: Engines) -> None:
    """Tiny tiers: copies come and leave all the time; jobs fail, the caches are reset, the engine
    starts again."""
    view, rng = View(), random.Random(seed)
    extra = {"cpu_bytes": "200KiB", "nvme_bytes": "11MiB", "segment_bytes": "256KiB"}
    for start in range(2):
        bench = plain.make(nvme=True, events=True, extra=extra)
        if start:
            view = View()  # another engine's
            while bench.connector.scheduler._journal.waits:
                bench.step()
        for number in range(40):
            first = 100 * rng.randrange(8)
            bench.add(f"r{number}", range(first, first + rng.randrange(40, 9 * BLOCK_TOKENS)))
            bench.fail = {rng.choice([JobKind.STORE, JobKind.DEMOTE, JobKind.LOAD]): (rng.randrange(3),)}
            bench.run()
            view.check(bench)
            if rng.random() < 0.4:
                assert bench.scheduler.reset_prefix_cache(reset_connector=rng.random() < 0.2 and start > 0)
        assert any(view.held.values())
        assert bench.counters()["evicted_blocks.cpu"] > 0
        assert start == 0 or bench.counters()["evicted_blocks.nvme"] > 0
        plain.close()


def test_a_reset_takes_back_what_was_told_and_keeps_the_order(plain: Engines) -> None:
    bench, view = plain.make(nvme=True, events=True), View()
    bench.serve("a", PROMPT)
    view.check(bench)
    assert len(view.held[Tier.NVME]) == BLOCKS
    bench.add("b", [token + 1 for token in PROMPT], max_tokens=1)
    bench.hold = {JobKind.STORE, JobKind.DEMOTE}
    bench.step()
    bench.scheduler.reset_connector_cache()
    bench.release()
    bench.step()
    view.check(bench)
    assert not any(view.held.values()), "nor is what was on its way told when it ends"
    assert bench.scheduler.reset_prefix_cache()
    bench.serve("c", PROMPT)
    view.check(bench)
    assert [len(held) for held in view.held.values()] == [BLOCKS, BLOCKS], "told again, of the new epoch"
    # The record of the old epoch leaves: the block of that key is still there.
    manager = bench.connector.scheduler._manager
    hidden = [row for row in manager._catalog.rows() if manager._catalog.find(manager._catalog.keys[row]) != row]
    assert len(hidden) == BLOCKS
    manager._tiers.get(Tier.NVME).drop(hidden)
    bench.run()
    view.check(bench)


# -- limits of a request ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(0, 0), (BLOCK_TOKENS - 1, 0), (2 * BLOCK_TOKENS, 2), (3 * BLOCK_TOKENS - 1, 2), (9999, 4)]
)
def test_so_much_is_loaded_and_stored_as_the_request_allows(tokens: int, blocks: int, plain: Engines) -> None:
    bench = plain.make(extra={"store_decode": True})
    bench.serve("a", PROMPT, params={"max_offload_tokens": tokens})
    assert len(bench.stored()) == blocks
    bench.serve("b", PROMPT)
    assert len(bench.stored()) == BLOCKS, "the next request has no such limit"
    bench.forget()
    bench.serve("c", PROMPT, params={"max_load_tokens": tokens})
    assert sum(count for _, count in bench.loads()) == blocks


def test_the_limit_of_loads_counts_from_what_is_on_the_gpu(plain: Engines) -> None:
    bench = plain.make()
    bench.serve("a", PROMPT)
    bench.forget()
    for name, prompt in (("b", PROMPT[: BLOCK_TOKENS + 1]), ("c", PROMPT)):
        bench.serve(name, prompt, params={"max_load_tokens": BLOCK_TOKENS})
    assert bench.loads() == [("b", 1), ("c", 1)]


def test_a_request_that_may_not_load_waits_for_nothing(plain: Engines) -> None:
    bench = plain.make()
    bench.hold = {JobKind.STORE}
    bench.add("a", PROMPT, max_tokens=1)
    bench.step()
    assert bench.scheduler.reset_prefix_cache()
    bench.add("b", PROMPT, params={"max_load_tokens": 0})
    assert bench.step().num_scheduled_tokens == {"b": len(PROMPT)}


@pytest.mark.parametrize("value", [-1, 1.5, "64", True, [], {"a": 1}, "x" * 1000])
def test_a_wrong_value_is_ignored_and_said_once(
    value: object, plain: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    bench = plain.make()
    with caplog.at_level(logging.WARNING, "kvdisk.connector"):
        for at in range(3):
            params = {"max_offload_tokens": value, "max_load_tokens": 0, "do_remote_decode": False, "other": at}
            bench.serve(f"a{at}", [token + at for token in PROMPT], params=params)
    assert len(bench.stored()) == 3 * BLOCKS
    said = [record.getMessage() for record in caplog.records if "max_offload_tokens" in record.getMessage()]
    assert len(said) == 1
    assert len(said[0]) < 200
