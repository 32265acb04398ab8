# SPDX-License-Identifier: Apache-2.0
"""Units of several of vLLM's blocks, on vLLM's real scheduler and kvdisk's real workers. ``Bench``
compares every byte that a step reads, and that the prefix cache has."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import pytest
from schedulers import BLOCK_TOKENS, SIZES, Bench, Engines, prompt_of
from test_scheduler_stages import handshakes, tell
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvdisk.blocks import Tier, group_of
from kvdisk.errors import ConfigError
from kvdisk.manager.store_policy import Spillover
from kvdisk.messages import NO_BLOCK, JobKind

UNIT_TOKENS = 2 * BLOCK_TOKENS
TOKENS = 3 * UNIT_TOKENS + 5
WINDOW = {"window_tokens": 5 * BLOCK_TOKENS}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": WINDOW,
    "window alone": {**WINDOW, "window_only": True},
    "two sizes": {"two_sizes": True},
    "MLA, two ranks": {"latent": True, "ranks": 2},
    "stages": {"by_stage": True, "stages": 2},
    "states": {"state_tokens": UNIT_TOKENS, "other": FullAttentionSpec(block_size=BLOCK_TOKENS, **SIZES)},
    "no prefix cache": {"prefix_caching": False},
    "pipelined": {"pipelined": True},
    "spillover": {},
    "spillover, window": WINDOW,
    "events": {"events": True},
}
POLICIES = {"plain": "on_preemption", "spillover": "spillover", "spillover, window": "spillover"}


def make(engines: Engines, unit_tokens: int | str = UNIT_TOKENS, extra: Any = None, **more: Any) -> Bench:
    bench: Bench = engines.make(extra={"unit_tokens": unit_tokens, **dict(extra or {})}, **more)
    return bench


def loads(bench: Bench, name: str) -> list[tuple[int, ...]]:
    return [move.gpu_blocks for job in bench.jobs_of(JobKind.LOAD, name) for move in job.moves]


def test_a_hit_ends_with_a_unit(engines):
    bench = make(engines)
    bench.serve("a", prompt_of(1, TOKENS + BLOCK_TOKENS))
    assert bench.stored() == bench.keys("a")[1:6:2], "a unit has the name of its last block"
    bench.forget()
    bench.serve("b", prompt_of(1, TOKENS + BLOCK_TOKENS))
    assert bench.counters()["hit_tokens.cpu"] == 3 * UNIT_TOKENS
    assert [len(blocks) for blocks in loads(bench, "b")] == [2, 2, 2]


@pytest.mark.parametrize("nvme", [False, True])
def test_of_a_unit_that_the_gpu_has_in_part_the_rest_is_loaded(engines, nvme):
    bench = make(engines, nvme=nvme)
    bench.warm(1, tokens=TOKENS)
    bench.serve("short", prompt_of(1, 3 * BLOCK_TOKENS + 1))
    bench.serve("b", prompt_of(1, TOKENS))
    found = loads(bench, "b")
    assert [blocks.count(NO_BLOCK) for blocks in found] == [1, 0] and found[0][0] == NO_BLOCK
    counters = bench.counters()
    assert counters["loaded_blocks"] == len([*loads(bench, "short"), *found])
    tokens = [counters.get(f"{name}.cpu", 0) + counters.get(f"{name}.nvme", 0) for name in ("hit_tokens", "hit_blocks")]
    assert tokens == [UNIT_TOKENS + 3 * UNIT_TOKENS - 3 * BLOCK_TOKENS, 3], "what was loaded, to the token"


def test_a_window_loads_the_units_that_it_reads(engines):
    """vLLM takes no block before the window: of the unit that it begins in, none for a part."""
    bench = make(engines, num_blocks=128, **WINDOW)
    bench.warm(1, tokens=8 * UNIT_TOKENS + 5)
    bench.serve("b", prompt_of(1, 8 * UNIT_TOKENS + 5))
    moves = [move for job in bench.jobs_of(JobKind.LOAD) for move in job.moves if group_of(move.key) == 1]
    assert [[block == NO_BLOCK for block in move.gpu_blocks] for move in moves] == [
        [True, False],
        [False, False],
        [False, False],
    ]
    assert bench.counters()["hit_tokens.cpu"] == 8 * UNIT_TOKENS


@pytest.mark.parametrize("bad", [0, 2])
def test_a_unit_that_cannot_be_read_is_computed_whole(engines, bad):
    bench = make(engines)
    bench.warm(1, tokens=TOKENS)
    bench.fail = {JobKind.LOAD: (bad,)}
    bench.add("b", prompt_of(1, TOKENS), max_tokens=3)
    while not bench.scheduler.failed_recving_kv_req_ids:
        bench.step()
    assert bench.step().num_scheduled_tokens == {"b": TOKENS - bad * UNIT_TOKENS}
    bench.fail = {}
    bench.finish("b", count=3)
    assert bench.counters()["failed_loads"] == 1


def test_a_victims_units_come_back(engines):
    bench = make(engines, num_blocks=13, extra={"store_policy": "on_preemption"})
    for name, number in (("a", 1), ("b", 2)):
        bench.add(name, prompt_of(number, 3 * UNIT_TOKENS - 5), max_tokens=2 * UNIT_TOKENS)
    bench.run(steps=2000)
    counters = bench.counters()
    assert counters["hit_tokens.cpu"] >= 2 * UNIT_TOKENS and not counters.get("failed_loads")


@pytest.mark.parametrize("store_decode", [True, False])
@pytest.mark.parametrize("method", ["eagle", "mtp"])
def test_with_a_drafter_a_hit_has_one_unit_less(engines, method, store_decode):
    """Its layers know the KV of the last tokens only by those that follow."""
    more = {"drafter": True, "drafts": 3, "max_batched_tokens": 96}
    bench = make(engines, method=method, extra={"store_decode": store_decode}, **more)
    for name in ("first", "second"):
        for number in (1, 2):
            bench.add(f"{name} {number}", prompt_of(number, TOKENS), max_tokens=2 * UNIT_TOKENS)
        bench.run()
        bench.forget()
    assert bench.counters()["hit_tokens.cpu"] == 2 * 2 * UNIT_TOKENS
    assert {len(blocks) for number in (1, 2) for blocks in loads(bench, f"second {number}")} == {2}


@pytest.mark.parametrize("kind", KINDS)
def test_traffic(engines, kind):
    """Prompts that share beginnings of any length, over a GPU that is too small for them, aborted,
    failed and forgotten as it comes."""
    chance, more = random.Random(kind), dict(KINDS[kind])
    extra = {"store_decode": True, "store_policy": POLICIES.get(kind, "on_compute"), "cpu_bytes": "1MiB"}
    num_blocks = 60 if more else 30
    bench = make(engines, **{"nvme": True, "extra": extra, "num_blocks": num_blocks, "max_batched_tokens": 96} | more)
    if {"two_sizes", "stages"} & {*more}:
        tell(bench, *handshakes(bench))
    for at in range(60):
        beginning = prompt_of(chance.randrange(3), chance.randrange(1, 9 * BLOCK_TOKENS))
        name = f"r{at}"
        bench.add(name, beginning + prompt_of(100 + at, chance.randrange(1, 40)), max_tokens=chance.randrange(1, 50))
        bench.fail = {JobKind.LOAD: (chance.randrange(3),)} if chance.random() < 0.1 else {}
        bench.step(chance.randrange(1, 8))
        if chance.random() < 0.1 and name in bench.scheduler.requests:
            bench.abort(name)
        if chance.random() < 0.2:
            bench.finish()
            bench.forget(*([Tier.CPU] if chance.random() < 0.5 else []))
    bench.fail = {}
    bench.finish()
    counters = bench.counters()
    assert counters.get("hit_tokens.cpu", 0) + counters.get("hit_tokens.nvme", 0) > 5 * UNIT_TOKENS, counters
    sizes = {len(move.gpu_blocks) for job in bench.jobs_of(JobKind.STORE) for move in job.moves}
    assert max(sizes) == 2


def test_a_reset_leaves_no_unit(engines):
    bench = make(engines)
    bench.warm(1, tokens=TOKENS)
    bench.weights += 1
    assert bench.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    bench.serve("b", prompt_of(1, TOKENS))
    assert not loads(bench, "b")


def test_units_are_a_namespace_of_their_own(engines):
    make(engines, nvme=True).warm(1, tokens=TOKENS)
    engines.end()
    other = engines.make(nvme=True)
    other.serve("b", prompt_of(1, TOKENS))
    assert not loads(other, "b")
    engines.end()
    same = make(engines, nvme=True)
    same.serve("b", prompt_of(1, TOKENS))
    assert len(loads(same, "b")) == 3


def test_a_number_that_fits_no_group_is_refused(engines):
    said = "unit_tokens 48 fits no KV-cache group of this model, whose blocks have 32 tokens"
    with pytest.raises(ConfigError, match=said):
        make(engines, 48)


def sizes_of(bench: Bench) -> list[int]:
    """Return the tokens of each group's units."""
    return [group.block_tokens for group in bench.connector.scheduler._geometry.groups]


@pytest.mark.parametrize(
    ("max_model_len", "cpu_bytes", "kind", "found"),
    [
        (2048, "64MiB", {}, [BLOCK_TOKENS]),
        (262_144, "64MiB", {}, [BLOCK_TOKENS]),
        (524_288, "64MiB", {}, [2 * BLOCK_TOKENS]),
        (1_000_000, "64MiB", {}, [128]),
        (1_000_000, "1MiB", {}, [BLOCK_TOKENS]),
        (1_000_000, "64MiB", WINDOW, [128, 64]),
        (1_000_000, "64MiB", {"latent": True, "ranks": 2}, [128]),
        (1_000_000, "128MiB", {"by_stage": True, "stages": 2}, [128]),
        (1_000_000, "128MiB", {"two_sizes": True}, [128]),
        (1_000_000, "64MiB", {"drafter": True, "drafts": 3, "method": "eagle"}, [128, BLOCK_TOKENS]),
        (1_000_000, "64MiB", {"state_tokens": BLOCK_TOKENS}, [BLOCK_TOKENS] * 2),
        (1_000_000, "64MiB", {"store_policy": "spillover"}, [128]),
        (1_000_000, "64MiB", {"events": True}, [128]),
    ],
)
def test_by_default_the_longest_prompt_and_the_tiers_room_decide(engines, max_model_len, cpu_bytes, kind, found):
    """A prompt of 262,144 tokens has 8,192 of vLLM's blocks here."""
    extra = {"cpu_bytes": cpu_bytes, **({"store_policy": kind.pop("store_policy")} if "store_policy" in kind else {})}
    bench = engines.make(extra=extra, max_model_len=max_model_len, **kind)
    if {"two_sizes", "stages"} & {*kind}:
        tell(bench, *handshakes(bench))
    bench.serve("a", prompt_of(1, TOKENS))
    assert sizes_of(bench) == found
    assert {len(move.gpu_blocks) * BLOCK_TOKENS for job in bench.jobs_of(JobKind.STORE) for move in job.moves} <= {
        *found
    }


def test_a_short_context_has_the_names_that_it_had(engines):
    """And so the same namespace and the same blocks."""
    engines.make(nvme=True, extra={"unit_tokens": "off"}).warm(1, tokens=TOKENS)
    engines.end()
    bench = engines.make(nvme=True)
    bench.serve("b", prompt_of(1, TOKENS))
    assert len(loads(bench, "b")) == TOKENS // BLOCK_TOKENS


def test_another_longest_prompt_is_another_store_only_where_it_is_another_unit(engines):
    extra = {"cpu_bytes": "64MiB", "nvme_bytes": "64MiB"}
    engines.make(nvme=True, max_model_len=1_000_000, extra=extra).warm(1, tokens=TOKENS)
    for max_model_len, found in ((2_000_000, TOKENS // 128), (2048, 0)):
        engines.end()
        bench = engines.make(nvme=True, max_model_len=max_model_len, extra=extra)
        bench.serve("b", prompt_of(1, TOKENS))
        assert len(loads(bench, "b")) == found, max_model_len


def test_spillover_stores_what_the_gpu_is_about_to_drop_in_units(engines):
    """Its blocks leave one by one, the tail of a prompt first."""
    bench = make(engines, extra={"store_policy": "spillover"}, num_blocks=20)
    for number in range(6):
        bench.serve(f"first {number}", prompt_of(number, TOKENS))
    assert {len(move.gpu_blocks) for job in bench.jobs_of(JobKind.STORE) for move in job.moves} == {2}
    bench.forget()
    bench.serve("next", prompt_of(0, TOKENS))
    assert [len(blocks) for blocks in loads(bench, "next")] == [2, 2, 2]


def test_a_policy_of_ones_own_sees_units(engines):
    """In what a request reaches and in what is free."""
    bench = make(engines, extra={"store_policy": f"{__name__}:Own"}, num_blocks=20)
    bench.serve("a", prompt_of(1, TOKENS))
    assert bench.stored() == bench.keys("a")[1:2]
    assert Own.seen == set(bench.keys("a")[1:6:2]), "units, and no block of one"


class Own(Spillover):
    """Stores the first unit of each prompt at once, and notes what it sees."""

    seen: ClassVar[set[Any]] = set()

    def reached(self, request_id, keys, start, stop):
        super().reached(request_id, keys, start, stop)
        return range(start, min(stop, 1))

    def free_offers(self, context):
        Own.seen |= {block.key for block in context.iter_free_blocks() if block.key is not None}
        return [offer for offer in super().free_offers(context) if False]


def hit_by_the_next_turn(bench: Bench, prompts: int = 8) -> tuple[int, int]:
    """Serve prompts of any length, and each one's next turn. Return how many tokens of the first
    turns hit, and how many they are."""
    chance, hit, asked = random.Random(3), 0, 0
    for at in range(prompts):
        prompt = prompt_of(at, chance.randrange(3 * BLOCK_TOKENS, 13 * BLOCK_TOKENS))
        bench.serve(f"first {at}", prompt)
        bench.forget()
        before = bench.counters().get("hit_tokens.cpu", 0)
        bench.serve(f"next {at}", prompt + prompt_of(50 + at, 40))
        bench.forget()
        hit += bench.counters().get("hit_tokens.cpu", 0) - before
        asked += len(prompt)
    return hit, asked


@pytest.mark.parametrize("retention_tokens", [0, None])
@pytest.mark.parametrize("unit_tokens", [UNIT_TOKENS, 2 * UNIT_TOKENS, "auto"])
def test_beside_states_a_unit_costs_no_hit(engines, unit_tokens, retention_tokens, caplog):
    """Of a prompt vLLM keeps the state after its last whole block, and a hit must end there."""
    more = {"state_tokens": BLOCK_TOKENS, "retention_tokens": retention_tokens, "num_blocks": 200}
    more["max_model_len"] = 1_000_000
    bench = make(engines, unit_tokens, {"cpu_bytes": "32MiB"}, **more)
    hit, asked = hit_by_the_next_turn(bench)
    assert hit > asked - 8 * BLOCK_TOKENS
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("unit_tokens")]
    assert [f"unit_tokens {unit_tokens} is left out" in line for line in lines] == [True] * (unit_tokens != "auto")


@pytest.mark.parametrize("kind", [{}, WINDOW, {"drafter": True, "drafts": 3, "method": "eagle"}, {"latent": True}])
def test_auto_costs_half_a_unit_of_a_prompt(engines, kind):
    found = []
    for unit_tokens in ("off", "auto"):
        extra = {"cpu_bytes": "32MiB", "unit_tokens": unit_tokens}
        bench = engines.make(extra=extra, num_blocks=200, max_model_len=1_000_000, **kind)
        found.append(hit_by_the_next_turn(bench)[0])
        longest = bench.connector.scheduler._geometry.alignment_tokens
        engines.end()
    assert found[0] - found[1] <= 8 * longest / 2
