# SPDX-License-Identifier: Apache-2.0
"""On vLLM's real scheduler: KV-cache events and the limits that come with a request.

``View`` is what a router makes of the events; it must be what the engine could load.
"""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import torch
from adapter_files import write_adapter
from schedulers import BLOCK_TOKENS, BLOCKS, OTHER, PROMPT, Bench, prompt_of
from test_scheduler_adapters import start
from vllm.distributed.kv_events import AllBlocksCleared, BlockStored
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from kvdisk.blocks import HIT_TIERS, KEPT_TIERS, Tier, make_block_key
from kvdisk.connector.tier_names import VLLM_TIERS
from kvdisk.manager import bounds
from kvdisk.manager.requests import BlockKeys
from kvdisk.messages import JobKind

MEDIA = {"CPU": Tier.CPU, "STORAGE": Tier.NVME}


def test_vllm_has_a_name_for_each_tier():
    assert set(VLLM_TIERS) == set(HIT_TIERS)
    assert {tier for tier, named in VLLM_TIERS.items() if named.medium is not None} == set(KEPT_TIERS)


@pytest.fixture(autouse=True)
def whole_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have hashes published whole; vLLM's default is their last 64 bits."""
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")


class View:
    """What a router believes of one engine's tiers, and that no event contradicts what it believed
    before. It knows vLLM's blocks, and nothing of units."""

    def __init__(self) -> None:
        self.held: dict[Tier, set[bytes]] = {tier: set() for tier in MEDIA.values()}
        self.hash_alone: dict[Tier, set[bytes]] = {tier: set() for tier in MEDIA.values()}
        """Of those, the ones that were told without tokens."""

    def check(self, bench: Bench) -> None:
        """Read what was published, and compare."""
        for event in bench.published:
            if isinstance(event, AllBlocksCleared) or event.medium not in MEDIA:
                continue  # the GPU's
            held, hash_alone = self.held[MEDIA[event.medium]], self.hash_alone[MEDIA[event.medium]]
            keys = {make_block_key(block_hash, event.group_idx) for block_hash in event.block_hashes}
            if isinstance(event, BlockStored):
                assert not keys & (held - hash_alone), "told twice"
                held |= keys
                hash_alone -= keys
                hash_alone |= keys if event.block_size == 0 else set()
            else:
                assert keys <= held, "gone before it was there"
                held -= keys
                hash_alone -= keys
        bench.published.clear()
        for tier, held in self.held.items():
            assert held == self._blocks_in(bench, tier), tier

    def _blocks_in(self, bench: Bench, tier: Tier) -> set[bytes]:
        """Return vLLM's blocks of what a tier has: of a unit all, or its name."""
        geometry, members = bench.connector.scheduler._geometry, {}
        for request in bench.known.values():
            for group in geometry.groups:
                keys = BlockKeys(request.block_hashes, group, geometry.hash_tokens)
                members |= {key: keys.of_gpu(at) for at, key in enumerate(keys)}
        stored = bench.in_tier(tier)
        return {block for key in stored - self.hash_alone[tier] for block in members[key]} | (
            stored & self.hash_alone[tier]
        )


def told(bench: Bench, medium: str = "", group: int | None = None) -> list[Any]:
    """Return what was published of blocks that kvdisk stored, in order."""
    stored = [event for event in bench.published if isinstance(event, BlockStored) and event.medium in MEDIA]
    return [event for event in stored if medium in {"", event.medium} and group in {None, event.group_idx}]


def tell_all(bench: Bench) -> list[int]:
    """Step until the journal is told; return how much each step told."""
    steps = []
    while bench.connector.scheduler._journal.waits:
        before = len(told(bench))
        bench.step()
        steps.append(len(told(bench)) - before)
    return steps


# -- events ----------------------------------------------------------------------------------------


def test_a_stored_block_is_told_with_its_tokens_and_its_parent(engines):
    bench = engines.make(nvme=True, events=True, extra={"store_decode": True})
    request = bench.serve("a", PROMPT, max_tokens=BLOCK_TOKENS + 1)
    for medium in MEDIA:
        stored = {event.block_hashes[0]: event for event in told(bench, medium)}
        assert list(stored) == request.block_hashes[: BLOCKS + 1], "parents first, though the tail is ready first"
        for at, event in enumerate(map(stored.__getitem__, request.block_hashes[: BLOCKS + 1])):
            assert event.token_ids == request.all_token_ids[at * BLOCK_TOKENS : (at + 1) * BLOCK_TOKENS]
            assert event.parent_block_hash == (request.block_hashes[at - 1] if at else None)
            assert (event.block_size, event.group_idx, event.kv_cache_spec_kind) == (BLOCK_TOKENS, 0, "full_attention")
            assert (event.lora_id, event.lora_name, event.locality) == (None, None, "LOCAL")
    # The engine's own events of the same blocks say the same.
    own = next(event for event in bench.published if event.medium == "GPU")
    assert own.token_ids == PROMPT[: BLOCKS * BLOCK_TOKENS]
    assert own.block_hashes == request.block_hashes[:BLOCKS] and own.parent_block_hash is None


def test_groups_with_blocks_of_different_sizes_are_told_apart(engines):
    bench = engines.make(window_tokens=3 * BLOCK_TOKENS, window_block_tokens=2 * BLOCK_TOKENS, events=True)
    hashes = bench.serve("a", PROMPT).block_hashes
    window = {event.block_hashes[0]: event for event in told(bench, group=1)}
    assert set(window) == {hashes[1], hashes[3]}
    second = window[hashes[3]]
    assert second.token_ids == PROMPT[2 * BLOCK_TOKENS : 4 * BLOCK_TOKENS]
    assert (second.parent_block_hash, window[hashes[1]].parent_block_hash) == (hashes[1], None)
    assert (second.kv_cache_spec_kind, second.kv_cache_spec_sliding_window) == ("sliding_window", 3 * BLOCK_TOKENS)


def by_block(events: list[Any]) -> dict[tuple[int, bytes], tuple[Any, ...]]:
    """Return what stored blocks' events say of each block, by its group and hash."""
    said: dict[tuple[int, bytes], tuple[Any, ...]] = {}
    for event in events:
        parent, size = event.parent_block_hash, event.block_size
        for at, block_hash in enumerate(event.block_hashes):
            tokens, keys = event.token_ids[at * size : (at + 1) * size], event.extra_keys[at]
            rest = (event.lora_id, event.lora_name, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window)
            said[event.group_idx, block_hash] = (parent, tokens, size, keys, *rest)
            parent = block_hash
    return said


def image(name: str, offset: int, length: int) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset, length))


SPANNING = [image("first", 5, 2 * BLOCK_TOKENS), image("second", 3 * BLOCK_TOKENS, 8)]
EMBEDDINGS = torch.arange(len(PROMPT) * 4, dtype=torch.float32).reshape(-1, 4)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"cache_salt": "tenant"},
        {"mm_features": SPANNING},
        {"prompt_embeds": EMBEDDINGS},
        {"adapter": "tuned"},
        {"adapter": "tuned", "cache_salt": "tenant", "mm_features": SPANNING, "prompt_embeds": EMBEDDINGS},
    ],
    ids=["plain", "salt", "images", "embeddings", "adapter", "all"],
)
@pytest.mark.parametrize("unit_tokens", ["off", 2 * BLOCK_TOKENS])
def test_a_block_is_told_as_the_engine_tells_its_own(unit_tokens, more, engines, tmp_path):
    """Of two groups, one with blocks of twice the size."""
    adapter = LoRARequest(name, 1, str(write_adapter(tmp_path / name, 1))) if (name := more.get("adapter")) else None
    sizes = {"window_tokens": 3 * BLOCK_TOKENS, "window_block_tokens": 2 * BLOCK_TOKENS}
    bench = start(engines, nvme=True, events=True, extra={"unit_tokens": unit_tokens}, **sizes)
    bench.sees_images()
    known = {key: value for key, value in more.items() if key != "adapter"}
    bench.serve("a", PROMPT, max_tokens=BLOCK_TOKENS, lora_request=adapter, **known)
    own = by_block([event for event in bench.published if isinstance(event, BlockStored) and event.medium == "GPU"])
    for medium in MEDIA:
        ours = by_block(told(bench, medium))
        assert len(ours) == BLOCKS + BLOCKS // 2
        assert ours == {name: own[name] for name in ours}
        assert any(said[3] for said in ours.values()) == bool(more)


def test_what_a_hash_covers_is_forgotten_with_its_tokens(engines, monkeypatch):
    """A router that hashed the tokens alone would take the blocks for those that everybody may
    have."""
    monkeypatch.delenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES")
    bench = engines.make(events=True)
    bench.connector.scheduler._writer.descriptions._most = 0
    bench.serve("a", PROMPT, cache_salt="tenant")
    assert [(event.token_ids, event.block_size, event.extra_keys) for event in told(bench)] == [([], 0, None)] * BLOCKS
    (own,) = [event for event in bench.published if event.medium == "GPU"]
    assert {event.block_hashes[0] for event in told(bench)} == set(own.block_hashes), "numbers, as the engine's own"


def test_tokens_are_remembered_of_the_last_blocks_only(engines):
    bench = engines.make(events=True)
    bench.connector.scheduler._writer.descriptions._most = 2
    request = bench.serve("a", PROMPT)
    described = [event for event in told(bench) if event.token_ids]
    assert [event.block_hashes[0] for event in described] == request.block_hashes[2:4]
    assert described[0].parent_block_hash == request.block_hashes[1]


def test_what_a_start_finds_on_the_drive_is_told_once_and_in_pieces(engines, monkeypatch):
    bench = engines.make(nvme=True, events=True)
    request = bench.serve("a", PROMPT)
    engines.close()
    monkeypatch.setattr(bounds, "EVENT_KEYS", 3)
    bench = engines.make(nvme=True, events=True)
    assert bench.scheduler.has_requests(), "steps are asked for, until all is told"
    assert tell_all(bench) == [3, 1]
    assert {event.block_hashes[0] for event in told(bench)} == set(request.block_hashes[:BLOCKS])
    assert {(event.medium, event.block_size) for event in told(bench)} == {("STORAGE", 0)}
    View().check(bench)


@pytest.mark.parametrize(("seed", "unit_tokens"), [(0, "off"), (1, "off"), (2, 64), (3, 128)])
def test_a_router_knows_what_is_there(seed, unit_tokens, engines):
    """Tiny tiers: copies come and leave all the time; jobs fail, the caches are reset, the engine
    starts again."""
    rng = random.Random(seed)
    extra = {"cpu_bytes": "200KiB", "nvme_bytes": "11MiB", "segment_bytes": "256KiB", "unit_tokens": unit_tokens}
    for run in range(2):
        bench, view = engines.make(nvme=True, events=True, extra=extra), View()
        tell_all(bench)
        for number in range(40):
            first = 100 * rng.randrange(8)
            prompt = list(range(first, first + rng.randrange(40, 9 * BLOCK_TOKENS)))
            own = rng.randrange(30, len(prompt)) if unit_tokens != "off" else len(prompt)  # prompts part anywhere
            bench.add(f"r{number}", prompt[:own] + [token + 7 * number for token in prompt[own:]])
            bench.fail = {rng.choice([JobKind.STORE, JobKind.DEMOTE, JobKind.LOAD]): (rng.randrange(3),)}
            bench.damage = rng.choice(["payload", "late"])
            bench.run()
            view.check(bench)
            if rng.random() < 0.4:
                assert bench.scheduler.reset_prefix_cache(reset_connector=rng.random() < 0.2 and run > 0)
        assert any(view.held.values())
        assert bench.counters()["evicted_blocks.cpu"] > 0
        assert run == 0 or bench.counters()["evicted_blocks.nvme"] > 0
        engines.close()


def test_a_reset_takes_back_what_was_told_and_keeps_the_order(engines):
    bench, view = engines.make(nvme=True, events=True), View()
    bench.serve("a", PROMPT)
    view.check(bench)
    assert len(view.held[Tier.NVME]) == BLOCKS
    bench.add("b", OTHER, max_tokens=1)
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
    catalog = bench.manager._catalog
    hidden = [row for row in catalog.rows() if catalog.find(catalog.keys[row]) != row]
    assert len(hidden) == BLOCKS
    bench.manager._tiers.get(Tier.NVME).end(hidden)
    bench.run()
    view.check(bench)


# -- units -----------------------------------------------------------------------------------------

UNIT = 4 * BLOCK_TOKENS
LONG = prompt_of(1, 2 * UNIT + 5)


def of_units(engines, **more: Any) -> Bench:
    bench: Bench = engines.make(nvme=True, events=True, extra={"unit_tokens": UNIT}, max_model_len=4096, **more)
    return bench


def test_a_unit_is_told_as_the_blocks_that_it_is(engines):
    bench = of_units(engines)
    request = bench.serve("a", LONG)
    for medium in MEDIA:
        first, second = told(bench, medium)
        assert (first.block_hashes, second.block_hashes) == (request.block_hashes[:4], request.block_hashes[4:8])
        assert (first.parent_block_hash, second.parent_block_hash) == (None, request.block_hashes[3])
        assert first.token_ids + second.token_ids == LONG[: 2 * UNIT]
        assert {first.block_size, second.block_size} == {BLOCK_TOKENS} and len(first.extra_keys) == 4
    View().check(bench)


def test_blocks_that_two_units_share_are_told_once_and_gone_with_the_last(engines):
    """The prompts part after three blocks of a unit of four."""
    bench, view = of_units(engines), View()
    other = LONG[: 3 * BLOCK_TOKENS] + prompt_of(2, UNIT)
    hashes = [bench.serve(name, prompt).block_hashes for name, prompt in (("a", LONG), ("b", other))]
    of_other = told(bench, "STORAGE")[-1]
    assert of_other.block_hashes == hashes[1][3:4] and of_other.parent_block_hash == hashes[1][2] == hashes[0][2]
    assert of_other.token_ids == other[3 * BLOCK_TOKENS : UNIT]
    view.check(bench)
    catalog = bench.manager._catalog
    for hashes_left in (hashes[0][2], None):
        row = catalog.find(make_block_key(hashes[hashes_left is None][3], 0))
        bench.manager._tiers.get(Tier.NVME).end([row])
        bench.run()
        removed = [block for event in bench.published if event.medium == "STORAGE" for block in event.block_hashes]
        assert (hashes[0][0] in removed) == (hashes_left is None)
        view.check(bench)


def test_a_unit_of_before_a_start_is_told_whole_when_its_prompt_comes(engines):
    """Until then its name is: of its blocks nobody knows the other hashes."""
    request = of_units(engines).serve("a", LONG)
    engines.close()
    bench, view = of_units(engines), View()
    tell_all(bench)
    assert {(event.block_hashes[0], event.block_size) for event in told(bench)} == {
        (request.block_hashes[at], 0) for at in (3, 7)
    }
    view.check(bench)
    bench.serve("b", LONG)
    on_drive = told(bench, "STORAGE")
    assert [event.block_hashes for event in on_drive] == [request.block_hashes[:4], request.block_hashes[4:8]]
    assert [event.parent_block_hash for event in on_drive] == [None, request.block_hashes[3]]
    view.check(bench)
    bench.serve("c", LONG)
    assert not told(bench, "STORAGE"), "once"


# -- limits of a request ---------------------------------------------------------------------------


def test_so_much_is_loaded_and_stored_as_the_request_allows(engines):
    bench = engines.make(extra={"store_decode": True})
    limits = {0: 0, BLOCK_TOKENS - 1: 0, 2 * BLOCK_TOKENS: 2, 3 * BLOCK_TOKENS - 1: 2, 9999: 4}
    for number, (tokens, blocks) in enumerate(limits.items()):
        prompt = prompt_of(number)
        bench.jobs.clear()
        bench.serve(f"a{number}", prompt, params={"max_offload_tokens": tokens})
        assert len(bench.stored()) == blocks
        bench.serve(f"b{number}", prompt)
        assert len(bench.stored()) == BLOCKS, "the next request has no such limit"
        bench.forget()
        bench.serve(f"c{number}", prompt, params={"max_load_tokens": tokens})
        assert sum(count for _, count in bench.loads()) == blocks


def test_a_request_loads_from_the_tiers_that_it_names(engines):
    """And computes the rest; the next one that names none has all."""
    bench = engines.make(nvme=True, extra={"prefetch": False}).warm(1)
    memory, catalog = bench.manager._tiers[Tier.CPU], bench.manager._catalog
    for name, said, blocks in (
        ("b", [{"medium": "cpu"}], 0),
        ("c", [{"medium": "storage"}], BLOCKS),
        ("d", [{"medium": "cpu"}], BLOCKS),
        ("e", [], 1),
    ):
        if name == "e":
            memory.end(sorted(catalog.rows_in(Tier.CPU), key=lambda row: catalog.generations[row])[:0:-1])
        bench.forget(*([Tier.CPU] if name == "c" else []))
        bench.serve(name, PROMPT, params={"kv_load_tiers": said})
        assert sum(count for of, count in bench.loads() if of == name) == blocks, name
    assert bench.manager.stats["misses.excluded"] == 2


def test_the_limit_of_loads_counts_from_what_is_on_the_gpu(engines):
    bench = engines.make().warm(1)
    for name, prompt in (("b", PROMPT[: BLOCK_TOKENS + 1]), ("c", PROMPT)):
        bench.serve(name, prompt, params={"max_load_tokens": BLOCK_TOKENS})
    assert bench.loads() == [("b", 1), ("c", 1)]


def test_a_wrong_value_is_ignored_and_said_once(engines, caplog):
    for number, value in enumerate([-1, -(10**5000), 1.5, "64", True, [], {"a": 1}, "x" * 1000]):
        bench = engines.make()
        caplog.clear()
        with caplog.at_level(logging.WARNING, "kvdisk.connector"):
            for at in range(2):
                params = {"max_offload_tokens": value, "max_load_tokens": 0, "do_remote_decode": False, "other": at}
                bench.serve(f"a{at}", prompt_of(10 * number + at), params=params)
        assert len(bench.stored()) == 2 * BLOCKS
        (said,) = [line for record in caplog.records if "max_offload_tokens" in (line := record.getMessage())]
        assert len(said) < 200
