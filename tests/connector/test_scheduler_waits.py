# SPDX-License-Identifier: Apache-2.0
"""On vLLM's real scheduler, with held jobs: waits for blocks that are being read, and reading ahead
in the queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from schedulers import BLOCK_TOKENS, BLOCKS, OTHER, PROMPT, Bench, Engines, prompt_of
from support.fake_neighbours import FakeNeighbours

from kvdisk import assembly
from kvdisk.blocks import Tier
from kvdisk.messages import Job, JobKind

NEW = prompt_of(7, 3 * BLOCK_TOKENS + 5)
STAGED: dict[str, Any] = {"extra": {"cpu_bytes": 0}}
ALONE: dict[str, Any] = {"max_seqs": 1}

Restart = Callable[..., Bench]


@pytest.fixture
def restarted(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> Restart:
    """Makes a bench in whose store the full blocks of these prompts lie, and in whose memory none;
    there are no other engines."""
    monkeypatch.setattr(assembly, "NeighbourReader", lambda _: FakeNeighbours([]))

    def restart(*prompts: list[int], extra: dict[str, Any] | None = None, **more: Any) -> Bench:
        bench = engines.make(nvme=True, **more)
        for at, prompt in enumerate(prompts):
            bench.serve(f"before {at}", prompt)
        engines.close()
        return engines.make(nvme=True, extra=extra, **more)

    return restart


def sources(job: Job) -> list[str]:
    """Return where the blocks of a load come from, and whether a CPU copy is left."""
    names = {(False, True): "cpu", (True, False): "nvme", (True, True): "nvme, kept"}
    return [names[Tier.NVME in move.slots, Tier.CPU in move.slots] for move in job.moves]


def read(bench: Bench) -> list[list[str]]:
    """Return the sources of each load."""
    return [sources(job) for job in bench.jobs_of(JobKind.LOAD)]


def add(bench: Bench, names: str, prompt: list[int]) -> None:
    for name in names:
        bench.add(name, prompt)


# -- requests that arrive together with one prefix -------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "source"),
    [({}, "nvme, kept"), ({"cpu_bytes": 0}, "nvme"), ({"cpu_admission": "reuse(9)"}, "nvme")],
    ids=["into memory", "no CPU tier", "through staging"],
)
def test_a_prefix_that_many_ask_for_is_loaded_once(restarted, extra, source):
    shared = [token % 499 for token in range(97 * BLOCK_TOKENS)]
    names = "abcdefgh"
    bench = restarted([*shared, 420], max_model_len=4096, num_blocks=1000, extra=extra)
    free = bench.pool.get_num_free_blocks()
    bench.hold = {JobKind.LOAD}
    for number, name in enumerate(names):
        bench.add(name, [*shared, *[400 + number] * 5])
    for _ in range(3):
        assert not bench.step().num_scheduled_tokens
    assert read(bench) == [[source] * 97]
    assert free - bench.pool.get_num_free_blocks() == 97, "GPU blocks for one load"
    bench.release()
    bench.step()
    assert len(bench.step().num_scheduled_tokens) == len(names), "all go on in the step in which the first does"
    bench.finish(*names)
    assert bench.loads() == [("a", 97)]


@pytest.mark.parametrize(
    ("more", "first"),
    [
        ({"extra": {"cpu_admission": "reuse(4)"}, "prefix_caching": False}, "nvme"),
        ({"extra": {"cpu_bytes": 0}, "prefix_caching": False}, "nvme"),
        ({"extra": {"lookup_wait_s": 0}}, "nvme, kept"),
    ],
    ids=["refused by memory", "no CPU tier", "no waiting"],
)
def test_where_no_copy_will_be_left_or_in_no_time_the_second_reads_at_once(restarted, more, first):
    bench = restarted(PROMPT, **more)
    bench.hold = {JobKind.LOAD}
    add(bench, "ab", PROMPT)
    bench.step()
    assert bench.loads() == [("a", BLOCKS), ("b", BLOCKS)]
    assert read(bench) == [[first] * BLOCKS, ["nvme"] * BLOCKS]
    bench.finish(*"ab")


def test_with_a_sliding_window_one_waits_only_for_what_it_can_use(restarted):
    longer = PROMPT[: 2 * BLOCK_TOKENS] + [7] * (8 * BLOCK_TOKENS)
    bench = restarted(PROMPT, longer, window_tokens=2 * BLOCK_TOKENS, num_blocks=200, **STAGED)
    bench.hold = {JobKind.LOAD}
    add(bench, "a", PROMPT)
    add(bench, "b", [*PROMPT, 9])
    add(bench, "c", longer)
    bench.step()
    # The first loads the window before the end of its prompt: the third needs the one before the
    # end of its own.
    assert [name for name, _ in bench.loads()] == ["a", "c"]
    bench.finish(*"abc")
    assert [name for name, _ in bench.loads()] == ["a", "c"]


# -- reading ahead ---------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_queued_request_finds_its_blocks_in_memory(restarted, prefetch):
    """The queue hides the disk: when its turn comes, nothing is read from NVMe any more."""
    bench = restarted(PROMPT, OTHER, **ALONE, extra={"prefetch": prefetch})
    bench.add("running", NEW, max_tokens=6)
    add(bench, "a", PROMPT)
    add(bench, "b", OTHER)
    bench.step()
    promotions = bench.jobs_of(JobKind.PROMOTE)
    wanted = [bench.keys(name) for name in "ab"] if prefetch else []
    assert [[move.key for move in job.moves] for job in promotions] == wanted, "in order of arrival"
    assert all(
        not move.gpu_blocks and {*move.slots} == {Tier.CPU, Tier.NVME} for job in promotions for move in job.moves
    )
    bench.finish(*"ab")
    assert bench.counters().get("prefetched_blocks", 0) == 2 * BLOCKS * prefetch
    assert read(bench)[0] == (["cpu"] if prefetch else ["nvme, kept"]) * BLOCKS


# -- requests that may load from memory alone ------------------------------------------------------


@pytest.mark.parametrize("leaves", [False, True], ids=["the head stays", "the head leaves memory"])
def test_what_comes_to_memory_or_leaves_it_renews_the_answer_of_who_loads_from_there_alone(engines, leaves):
    """Though the drive has all of it throughout. Requests may wait for longer than the test takes."""
    bench = engines.make(nvme=True, extra={"nvme_admission": "all"})
    bench.serve("before", PROMPT)
    bench.forget(Tier.CPU)
    bench.serve("short", PROMPT[: 2 * BLOCK_TOKENS + 1])  # the first two come back to memory
    bench.forget()
    keys, bench.hold = bench.keys("before"), {JobKind.PROMOTE}
    hint = {"kv_hints": {"actions": [{"action_type": "kv.prefetch", "payload": {}}]}}
    bench.add("hinted", PROMPT, params=hint | {"max_load_tokens": 0, "max_offload_tokens": 0})
    bench.abort("hinted")
    bench.step(3)
    assert [len(job.moves) for job in bench.jobs_of(JobKind.PROMOTE)] == [2], "the last two are on their way"
    bench.add("r", PROMPT, params={"kv_load_tiers": [{"medium": "cpu"}]})
    bench.step(2)
    assert not bench.jobs_of(JobKind.LOAD, "r")
    if leaves:
        catalog = bench.manager._catalog
        bench.manager._tiers[Tier.CPU].discard(*map(catalog.find, keys[:2]))
    bench.release()
    bench.step(20)
    assert len(bench.sampled("r")) == 2, "it waits, and nothing comes"
    assert [len(job.moves) for job in bench.jobs_of(JobKind.LOAD, "r")] == ([] if leaves else [BLOCKS])
    bench.finish("r")
    assert not {"failed_loads", "wait_timeouts"} & bench.counters().keys()
