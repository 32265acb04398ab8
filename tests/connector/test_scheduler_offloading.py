# SPDX-License-Identifier: Apache-2.0
"""What is stored, kept and loaded, on vLLM's real scheduler and kvdisk's real workers.

The scenarios are those of vLLM's own tests of its offloading connector and of its simple CPU
offload.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from byte_bench import SLOT_BYTES, ByteBench
from schedulers import BLOCK_TOKENS, Engines, prompt_of
from vllm.v1.request import RequestStatus

from kvdisk.blocks import Tier, group_of
from kvdisk.messages import JobKind

pytestmark = pytest.mark.vllm

GROUPS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"window_tokens": 2 * BLOCK_TOKENS},
    "narrow window": {"window_tokens": 40},
    "large blocks": {"window_tokens": 3 * BLOCK_TOKENS, "window_block_tokens": 2 * BLOCK_TOKENS},
    "drafter": {"drafter": True},
}


def per_group(bench: ByteBench, keys: list[bytes]) -> list[int]:
    """Return how many of these keys are of each group."""
    return [sum(group_of(key) == group for key in keys) for group in range(bench.group_count)]


# -- what is stored, and what of it is loaded ------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "sampled", "stored", "with_decode", "hit"),
    [
        (31, 1, 0, 0, 0),  # the last token sampled has no KV
        (31, 2, 0, 1, 0),
        (32, 1, 1, 1, 0),  # one token is left to compute
        (64, 33, 2, 3, 1),
        (100, 30, 3, 4, 3),
        (600, 2, 18, 18, 18),  # in more than one step
    ],
)
@pytest.mark.parametrize(("groups", "pipelined"), [(name, at % 2 == 0) for at, name in enumerate(GROUPS)])
def test_what_a_prompt_leaves_and_what_the_next_one_finds(
    engines: Engines, pipelined: bool, groups: str, prompt: int, sampled: int, stored: int, with_decode: int, hit: int
) -> None:
    tokens = prompt_of(prompt, prompt)
    for store_decode, full in ((False, stored), (True, with_decode)):
        extra = {"store_decode": store_decode}
        bench = engines.make(pipelined=pipelined, num_blocks=256, extra=extra, **GROUPS[groups])
        bench.serve("a", tokens, sampled)
        keys = bench.stored()
        assert len(keys) == len(set(keys)), "each once"
        assert per_group(bench, keys)[0] == full
        assert bench.in_tier(Tier.CPU) == set(keys)
        bench.forget()
        bench.serve("b", tokens, sampled)
        loaded = [move.key for job in bench.jobs_of(JobKind.LOAD) for move in job.moves]
        whole = hit // 2 * 2 if groups == "large blocks" else hit
        # What a drafter's last block was computed for is another token now.
        least = whole - 1 if groups == "drafter" else whole
        assert least <= per_group(bench, loaded)[0] <= whole
        assert set(loaded) <= set(keys)
        assert bench.sampled("b") == bench.sampled("a")
        bench.assert_quiet()


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("source", ["cpu", "nvme", "nvme through staging", "nvme, after a restart", "nvme, read ahead"])
def test_every_way_back_to_the_gpu(engines: Engines, source: str, groups: str) -> None:
    extra = {"cpu_bytes": 0} if "staging" in source else {}
    more = {"max_seqs": 1} if "ahead" in source else {}
    ranks = 2 if source == "nvme" else 1
    bench = engines.make(nvme=source != "cpu", extra=extra, ranks=ranks, **more, **GROUPS[groups])
    prompts = {name: prompt_of(number, 290) for number, name in enumerate("abc")}
    bench.serve("first", prompt_of(9, 290))  # while it runs the first segment is made
    for name, prompt in prompts.items():
        bench.serve(name, prompt, 3)
    stored = set(bench.stored())
    if "restart" in source:
        bench.assert_quiet()
        bench.close()
        bench = engines.make(nvme=True, extra=extra, **GROUPS[groups])
        assert bench.in_tier(Tier.NVME) == stored
    else:
        bench.forget(*([Tier.CPU] if source in {"nvme", "nvme, read ahead"} else []))
    if "ahead" in source:
        bench.add("running", prompt_of(8, 100), 8)
    for name, prompt in prompts.items():
        for again in (
            ("again", "third") if groups == "full" else ("again",)
        ):  # the third waits, and hits the GPU's cache
            bench.add(f"{name} {again}", prompt, 3)
    bench.run()
    loads = bench.jobs_of(JobKind.LOAD)
    assert [job.request_id for job in loads] == ["a again", "b again", "c again"]
    in_memory = source in {"cpu", "nvme, read ahead"}
    assert all((Tier.NVME not in move.slots) == in_memory for job in loads for move in job.moves)
    assert "failed_loads" not in bench.counters()
    bench.assert_quiet()


def test_blocks_are_stored_as_a_long_prompt_is_computed(engines: Engines) -> None:
    bench = engines.make(max_batched_tokens=100)
    bench.add("a", prompt_of(1, 330), max_tokens=1)
    seen = []
    while bench.scheduler.requests:
        bench.step()
        seen.append(len(bench.stored()))
    assert seen == [3, 6, 9, 10]
    assert bench.stored() == bench.keys("a")[:10], "none is left out between two steps"
    bench.run()
    bench.assert_quiet()


def test_of_a_prefix_on_the_gpu_the_rest_is_loaded_into_the_blocks_behind_it(engines: Engines) -> None:
    bench = engines.make()
    bench.serve("a", prompt_of(1, 200))
    bench.forget()
    bench.serve("local", prompt_of(1, 70))
    bench.hold = {JobKind.LOAD}
    bench.add("b", prompt_of(1, 230), max_tokens=2)
    bench.step()
    (load,) = bench.jobs_of(JobKind.LOAD, "b")
    assert [move.key for move in load.moves] == bench.keys("b")[2:6]
    assert [move.block for move in load.moves] == bench.table("b")[2:6]
    assert bench.hashed(bench.table("b")) == [True, True, False, False, False, False]
    bench.release()
    bench.run()
    bench.assert_quiet()


# -- stores that are out ---------------------------------------------------------------------------


def test_what_is_being_stored_is_not_stored_again(engines: Engines) -> None:
    bench = engines.make()
    bench.hold = {JobKind.STORE}
    bench.add("a", prompt_of(1, 100), max_tokens=4)
    bench.step()
    bench.add("b", prompt_of(1, 100), max_tokens=4)
    assert bench.step().num_scheduled_tokens == {"a": 1, "b": 4}, "a hit on the GPU"
    bench.step()
    assert len(bench.stored()) == 3
    bench.release()
    bench.run()
    assert len(bench.stored()) == 3
    bench.assert_quiet()


def test_a_store_counts_when_every_rank_has_answered(engines: Engines) -> None:
    bench = engines.make(ranks=2)
    bench.hold, bench.hold_rank = {JobKind.STORE}, 1
    bench.add("a", prompt_of(1, 100), max_tokens=30)
    for _ in range(3):
        bench.step()
        assert not bench.in_tier(Tier.CPU)
    bench.release()
    bench.step()
    assert bench.in_tier(Tier.CPU) == set(bench.keys("a")[:3])
    bench.run()
    bench.assert_quiet()


def test_a_window_that_moves_on_while_nothing_is_taken_leaves_no_wrong_copy(engines: Engines) -> None:
    """Blocks that were refused leave the window, and their GPU blocks are soon others': none is
    stored as what it was.

    The tier is full of copies that are being written, so that there is room for nothing.
    """
    extra = {"cpu_bytes": 6 * SLOT_BYTES, "store_decode": True}
    bench = engines.make(num_blocks=24, window_tokens=BLOCK_TOKENS + 1, extra=extra)
    bench.hold = {JobKind.STORE}
    bench.add("fills", prompt_of(1, 100), max_tokens=2)
    bench.run_until_finished("fills")
    bench.add("a", prompt_of(2, 100), max_tokens=150)
    for _ in range(90):
        bench.step()
    bench.release()
    bench.run()
    bench.forget()
    for number in (1, 2):
        bench.serve(f"later {number}", prompt_of(number, 200))
    bench.assert_quiet()


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("held", [(), (JobKind.STORE,)], ids=["done", "held"])
def test_victims_come_back_with_right_bytes(engines: Engines, held: tuple[JobKind, ...], pipelined: bool) -> None:
    bench = engines.make(num_blocks=12, pipelined=pipelined, extra={"store_decode": True})
    bench.hold = set(held)
    requests = [bench.add(f"r{number}", prompt_of(number, 130), max_tokens=100) for number in range(3)]
    for _ in range(140):
        bench.step()
    bench.release()
    bench.run(steps=2000)
    assert sum(request.num_preemptions for request in requests) > 0
    assert [len(bench.sampled(request.request_id)) for request in requests] == [100] * 3
    bench.assert_quiet()


def test_a_victim_may_come_back_before_anybody_heard_of_its_stores(engines: Engines) -> None:
    """Two steps are scheduled before the results of the first one arrive: the victim's copies are
    still out then."""
    bench = engines.make(pipelined=True)
    bench.hold = {JobKind.STORE}
    request = bench.add("a", prompt_of(1, 200), max_tokens=20)
    for _ in range(4):
        bench.step()
    bench.scheduler.running.remove(request)
    bench.scheduler._preempt_request(request, 0.0)
    bench.release()
    bench.schedule()
    bench.schedule()
    while len(bench.behind) > 1:
        bench.update()
    bench.run()
    assert request.status is RequestStatus.FINISHED_LENGTH_CAPPED
    assert len(bench.sampled("a")) == 20
    bench.assert_quiet()


# -- any order of all of it ------------------------------------------------------------------------

PLACES: list[dict[str, Any]] = [
    {},
    {"pipelined": True},
    {"nvme": True},
    {"nvme": True, "pipelined": True, "window_tokens": 2 * BLOCK_TOKENS},
    {"ranks": 2, "nvme": True},
    {"nvme": True, "extra": {"cpu_bytes": 0}, "pipelined": True},
    {"extra": {"store_policy": "on_preemption"}, "pipelined": True, "num_blocks": 14},
    {"extra": {"store_policy": "spillover"}, "drafter": True},
]


@pytest.mark.parametrize("seed", range(len(PLACES)))
def test_any_order_of_requests_failures_and_resets_leaves_right_bytes(engines: Engines, seed: int) -> None:
    place, rng = PLACES[seed], random.Random(seed)
    base = {"cpu_bytes": "400KiB", "store_decode": bool(seed % 2), "lookup_wait_s": 0.01}
    bench = engines.make(**{"num_blocks": 26} | place | {"extra": base | place.get("extra", {})})
    kinds = (JobKind.STORE, JobKind.LOAD, JobKind.DEMOTE, JobKind.PROMOTE)
    for step in range(150):
        if rng.random() < 0.25:
            prompt = prompt_of(rng.choice([1, 1, 2, 3]), rng.randrange(10, 6 * BLOCK_TOKENS))
            bench.add(f"r{step}", prompt, max_tokens=rng.randrange(1, 40))
        if rng.random() < 0.1 and bench.scheduler.requests:
            bench.abort(rng.choice(sorted(bench.scheduler.requests)))
        if rng.random() < 0.1:
            bench.hold = set(rng.sample(kinds, rng.randrange(3)))
            bench.fail = {JobKind.LOAD: (rng.randrange(4),)} if rng.random() < 0.5 else {}
            bench.damage = rng.choice(["payload", "header", "late"])
        if rng.random() < 0.15:
            bench.scheduler.reset_prefix_cache(reset_connector=rng.random() < 0.1)
        bench.step()
    bench.release()
    bench.fail = {}
    bench.run(steps=2000)
    assert bench.jobs_of(JobKind.LOAD) and bench.stored()
    bench.assert_quiet()
