# SPDX-License-Identifier: Apache-2.0
"""On vLLM's real scheduler, with held jobs: waits for blocks that are being read, and reading ahead
in the queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from schedulers import BLOCK_TOKENS, Bench, Engines
from support.fake_neighbours import FakeHome, FakeNeighbours

from kvdisk import assembly
from kvdisk.blocks import BlockKey, Tier
from kvdisk.index.base import SegmentRecord
from kvdisk.manager.loads import GpuLoads
from kvdisk.messages import FOREIGN_SEGMENTS, Job, JobKind

pytestmark = pytest.mark.vllm

BLOCKS = 4
PROMPT = list(range(100, 100 + BLOCKS * BLOCK_TOKENS + 5))
OTHER = list(range(300, 300 + BLOCKS * BLOCK_TOKENS + 5))
NEW = list(range(50, 50 + 3 * BLOCK_TOKENS + 5))
SLOT_BYTES = 20480
"""Of a block of the bench's model, header included."""
STAGED: dict[str, Any] = {"extra": {"cpu_bytes": 0}}
ALONE: dict[str, Any] = {"max_seqs": 1}

Restart = Callable[..., Bench]


@pytest.fixture
def homes(monkeypatch: pytest.MonkeyPatch) -> list[FakeHome]:
    """Other engines' homes in the store."""
    found: list[FakeHome] = []
    monkeypatch.setattr(assembly, "_meet_neighbours", lambda *_: FakeNeighbours(found))
    return found


@pytest.fixture
def restarted(plain: Engines, homes: list[FakeHome]) -> Restart:
    """Makes a bench in whose store the full blocks of these prompts lie, and in whose memory
    none."""

    def restart(*prompts: list[int], extra: dict[str, Any] | None = None, **more: Any) -> Bench:
        bench = plain.make(nvme=True, **more)
        for at, prompt in enumerate(prompts):
            bench.serve(f"before {at}", prompt)
        plain.close()
        return plain.make(nvme=True, extra=extra, **more)

    return restart


def sources(job: Job) -> list[str]:
    """Return where the blocks of a load come from, and whether a CPU copy is left."""
    names = {(False, True): "cpu", (True, False): "nvme", (True, True): "nvme, kept"}
    return [names[Tier.NVME in move.slots, Tier.CPU in move.slots] for move in job.moves]


def read(bench: Bench) -> list[list[str]]:
    """Return the sources of each load."""
    return [sources(job) for job in bench.jobs_of(JobKind.LOAD)]


def add(bench: Bench, names: str, prompt: list[int], **more: Any) -> None:
    for name in names:
        bench.add(name, prompt, **more)


def finish(bench: Bench, *names: str) -> None:
    """Let go what is held, and step until nothing is left to do: each of these requests has its two
    tokens."""
    bench.release()
    bench.run()
    assert [len(bench.tokens[name]) for name in names] == [2] * len(names)
    assert not bench._manager._gpu_loads.any
    bench.assert_quiet()


# -- requests that arrive together with one prefix
# ---------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "source"),
    [({}, "nvme, kept"), ({"cpu_bytes": 0}, "nvme"), ({"cpu_admission": "reuse(9)"}, "nvme")],
    ids=["into memory", "no CPU tier", "through staging"],
)
def test_a_prefix_that_many_ask_for_is_loaded_once(restarted: Restart, extra: dict[str, Any], source: str) -> None:
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
    finish(bench, *names)
    assert bench.loads() == [("a", 97)]


def test_the_second_loads_what_an_aborted_one_left_in_memory(restarted: Restart) -> None:
    bench = restarted(PROMPT)
    bench.hold = {JobKind.LOAD}
    bench.add("a", PROMPT)
    bench.step()
    bench.abort("a")  # its blocks are not to be had on the GPU
    bench.add("b", PROMPT)
    assert not bench.step().num_scheduled_tokens
    finish(bench, "b")
    assert read(bench) == [["nvme, kept"] * BLOCKS, ["cpu"] * BLOCKS]


@pytest.mark.parametrize(
    ("more", "first"),
    [
        ({"extra": {"cpu_admission": "reuse(3)"}, "prefix_caching": False}, "nvme"),
        ({"extra": {"cpu_bytes": 0}, "prefix_caching": False}, "nvme"),
        ({"extra": {"lookup_wait_s": 0}}, "nvme, kept"),
    ],
    ids=["refused by memory", "no CPU tier", "no waiting"],
)
def test_where_no_copy_will_be_left_or_in_no_time_the_second_reads_at_once(
    restarted: Restart, more: dict[str, Any], first: str
) -> None:
    bench = restarted(PROMPT, **more)
    bench.hold = {JobKind.LOAD}
    add(bench, "ab", PROMPT)
    bench.step()
    assert bench.loads() == [("a", BLOCKS), ("b", BLOCKS)]
    assert read(bench) == [[first] * BLOCKS, ["nvme"] * BLOCKS]
    finish(bench, *"ab")


@pytest.mark.parametrize("more", [{}, STAGED], ids=["into memory", "staging"])
@pytest.mark.parametrize("failed", [0, 2])
def test_when_the_first_fails_the_others_wait_no_more(restarted: Restart, failed: int, more: dict[str, Any]) -> None:
    bench = restarted(PROMPT, **more)
    bench.hold, bench.fail = {JobKind.LOAD}, {JobKind.LOAD: (failed,)}
    add(bench, "abc", PROMPT)
    bench.step()
    bench.release()
    bench.step()
    bench.fail = {}
    bench.step()
    finish(bench, *"abc")
    assert all(count <= failed for _, count in bench.loads()[1:]), "nobody asks for the bad copy"


def test_when_the_first_is_aborted_the_next_loads_and_the_others_wait_for_it(restarted: Restart) -> None:
    bench = restarted(PROMPT, **STAGED)
    bench.hold = {JobKind.LOAD}
    add(bench, "abc", PROMPT)
    bench.step()
    bench.abort("a")
    for _ in range(3):
        bench.step()
    finish(bench, *"bc")
    assert bench.loads() == [("a", BLOCKS), ("b", BLOCKS)]


def test_when_the_time_is_over_one_loads_and_the_others_wait_for_it(
    restarted: Restart, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = restarted(PROMPT, extra={"cpu_bytes": 0, "lookup_wait_s": 10.0})
    clock = SimpleNamespace(monotonic=lambda: clock.now, time=lambda: clock.now, now=1000.0)
    monkeypatch.setattr("kvdisk.connector.scheduler_side.time", clock)
    bench.hold = {JobKind.LOAD}
    add(bench, "abcd", PROMPT)
    loading = []
    for _ in range(5):
        bench.step()
        clock.now += 6.0
        loading.append("".join(name for name, _ in bench.loads()))
    assert loading == ["a", "a", "ab", "ab", "abc"], "10 s each"
    finish(bench, *"abcd")
    assert bench.loads() == [(name, BLOCKS) for name in "abc"]


def test_what_the_gpu_has_lost_before_their_turn_one_loads_for_all(restarted: Restart) -> None:
    bench = restarted(PROMPT, **STAGED, **ALONE)
    bench.add("a", PROMPT, max_tokens=3)
    add(bench, "bcd", PROMPT)
    bench.run_until_finished("a")
    assert bench.scheduler.reset_prefix_cache()
    finish(bench, *"bcd")
    assert bench.loads() == [("a", BLOCKS), ("b", BLOCKS)]


def test_with_a_sliding_window_one_waits_only_for_what_it_can_use(restarted: Restart) -> None:
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
    finish(bench, *"abc")
    assert [name for name, _ in bench.loads()] == ["a", "c"]


def test_who_waits_for_a_load_looks_for_it_once(restarted: Restart, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    presences = GpuLoads.presences

    def counted(loads: GpuLoads, keys: Sequence[BlockKey]) -> bytes:
        asked.append(len(keys))
        return presences(loads, keys)

    monkeypatch.setattr(GpuLoads, "presences", counted)
    bench = restarted(PROMPT, OTHER, **STAGED)
    bench.hold = {JobKind.LOAD}
    add(bench, "abcdef", PROMPT)
    for number in range(20):
        bench.step()
        if number == 10:
            bench.add("other", OTHER)
    assert asked == [BLOCKS] * 6, "each of the six that came second, or found another's load, has looked once"
    finish(bench)


def test_a_reset_lets_them_go(restarted: Restart) -> None:
    bench = restarted(PROMPT)
    bench.hold = {JobKind.LOAD}
    add(bench, "abc", PROMPT)
    bench.step()
    bench.scheduler.reset_connector_cache()
    assert set(bench.step().num_scheduled_tokens) == {"b", "c"}
    finish(bench, *"abc")
    assert bench.loads() == [("a", BLOCKS)]


# -- the tiers while they are full, and short hits
# ---------------------------------------------------


def test_a_full_cpu_tier_makes_no_miss_of_a_hit(restarted: Restart) -> None:
    """What has no slot is read through staging, however much of the tier is in use."""
    bench = restarted(PROMPT, OTHER, extra={"cpu_bytes": 3 * SLOT_BYTES})
    bench.hold = {JobKind.STORE, JobKind.LOAD}
    bench.add("new", NEW, max_tokens=1)
    bench.step()
    assert len(bench.stored()) == 3, "every slot of the tier is being written"
    add(bench, "a", PROMPT)
    add(bench, "b", OTHER)
    bench.step()
    assert read(bench) == [["nvme"] * BLOCKS] * 2
    finish(bench, *"ab")
    assert bench.counters()["hit_tokens.nvme"] == 2 * BLOCKS * BLOCK_TOKENS


def test_a_short_hit_is_left_to_recompute(restarted: Restart) -> None:
    bench = restarted(PROMPT, extra={"min_load_tokens": 3 * BLOCK_TOKENS, "prefetch": False})
    short = PROMPT[: 2 * BLOCK_TOKENS + 1]
    bench.add("short", short, max_tokens=1)
    assert bench.step().num_scheduled_tokens == {"short": len(short)}
    assert bench.counters()["short_hits"] == 1
    bench.run()
    bench.forget()
    bench.serve("long", PROMPT)
    assert bench.loads() == [("long", BLOCKS)]


# -- other engines' homes
# ----------------------------------------------------------------------------


def have(bench: Bench, home: FakeHome, prompt: list[int], blocks: int = BLOCKS) -> list[BlockKey]:
    """Let another engine's home have the first blocks of a prompt; return their keys."""
    bench.make_request("any", prompt)
    keys = bench.keys("any")[:blocks]
    for slot, key in enumerate(keys):
        home.put(key, slot, 7 + slot, [])
    return keys


@pytest.mark.parametrize("more", [{}, STAGED], ids=["into memory", "staging"])
def test_requests_wait_for_the_neighbours_and_load_their_hit_once(
    restarted: Restart, homes: list[FakeHome], more: dict[str, Any]
) -> None:
    homes.append(FakeHome("a" * 32, SegmentRecord(0, SLOT_BYTES, 64)))
    bench = restarted(**more)
    keys = have(bench, homes[0], PROMPT)
    add(bench, "abc", PROMPT)
    for _ in range(3):
        assert not bench.step().num_scheduled_tokens, "no answer yet"
    bench.connector.scheduler._parts.neighbours.answer(8)
    finish(bench, *"abc")
    (load,) = bench.jobs_of(JobKind.LOAD)
    assert [move.key for move in load.moves] == keys
    assert [move.generation for move in load.moves] == [7, 8, 9, 10]
    assert all(move.slots[Tier.NVME].segment >= FOREIGN_SEGMENTS for move in load.moves)
    assert bench.counters()["loaded_blocks_foreign"] == BLOCKS
    assert bench.counters().get("demoted_blocks", 0) == 0, "what another home has is not written again"


@pytest.mark.parametrize("why", ["time over", "not there", "gone away"])
def test_what_the_neighbours_do_not_give_is_computed(restarted: Restart, homes: list[FakeHome], why: str) -> None:
    homes.append(FakeHome("a" * 32, SegmentRecord(0, SLOT_BYTES, 64)))
    bench = restarted(extra={"lookup_wait_s": 0} if why == "time over" else {})
    have(bench, homes[0], PROMPT, 0 if why == "not there" else BLOCKS)
    bench.add("a", PROMPT)
    neighbours = bench.connector.scheduler._parts.neighbours
    if why != "time over":
        assert not bench.step().num_scheduled_tokens
    if why == "gone away":
        neighbours.homes.clear()
    elif why == "not there":
        neighbours.answer(8)
    assert bench.step().num_scheduled_tokens == {"a": len(PROMPT)}
    neighbours.answer(8)
    finish(bench, "a")


def test_what_another_home_has_is_read_ahead(restarted: Restart, homes: list[FakeHome]) -> None:
    homes.append(FakeHome("a" * 32, SegmentRecord(0, SLOT_BYTES, 64)))
    bench = restarted(**ALONE)
    neighbours = bench.connector.scheduler._parts.neighbours
    bench.add("running", NEW, max_tokens=8)
    neighbours.answer(8)
    bench.step()
    have(bench, homes[0], PROMPT)
    bench.add("second", PROMPT)
    bench.step()
    assert not bench.jobs_of(JobKind.PROMOTE), "the other home has not answered"
    neighbours.answer(8)
    finish(bench, "second")
    (promotion,) = bench.jobs_of(JobKind.PROMOTE)
    assert len(promotion.moves) == BLOCKS
    assert all(move.slots[Tier.NVME].segment >= FOREIGN_SEGMENTS for move in promotion.moves)
    assert read(bench) == [["cpu"] * BLOCKS]


# -- reading ahead
# -----------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_queued_request_finds_its_blocks_in_memory(restarted: Restart, prefetch: bool) -> None:
    """The queue hides the disk: when its turn comes, nothing is read from NVMe any more."""
    bench = restarted(PROMPT, OTHER, **ALONE, extra={"prefetch": prefetch})
    bench.add("running", NEW, max_tokens=6)
    add(bench, "a", PROMPT)
    add(bench, "b", OTHER)
    bench.step()
    promotions = bench.jobs_of(JobKind.PROMOTE)
    wanted = [bench.keys(name) for name in "ab"] if prefetch else []
    assert [[move.key for move in job.moves] for job in promotions] == wanted, "in order of arrival"
    assert all(move.block == -1 and {*move.slots} == {Tier.CPU, Tier.NVME} for job in promotions for move in job.moves)
    finish(bench, *"ab")
    assert bench.counters().get("prefetched_blocks", 0) == 2 * BLOCKS * prefetch
    assert read(bench)[0] == (["cpu"] if prefetch else ["nvme, kept"]) * BLOCKS


def test_one_that_waits_for_gpu_blocks_is_read_ahead_too(restarted: Restart) -> None:
    """It is looked up in every step, and nothing of it fits."""
    bench = restarted(PROMPT, num_blocks=8)
    bench.add("running", NEW, max_tokens=20)
    bench.add("second", PROMPT)
    for _ in range(4):
        bench.step()
    assert [len(job.moves) for job in bench.jobs_of(JobKind.PROMOTE)] == [BLOCKS]
    finish(bench, "second")
    assert read(bench) == [["cpu"] * BLOCKS]


@pytest.mark.parametrize("bad", [None, 2], ids=["good", "the third fails"])
def test_one_whose_turn_comes_waits_for_the_promotion_and_reads_nothing_twice(
    restarted: Restart, bad: int | None
) -> None:
    bench = restarted(PROMPT, **ALONE)
    bench.hold, bench.fail = {JobKind.PROMOTE}, {} if bad is None else {JobKind.PROMOTE: (bad,)}
    bench.add("running", NEW, max_tokens=2)
    bench.add("second", PROMPT)
    for _ in range(5):
        bench.step()
    assert not bench.scheduler.running, "its turn has come"
    assert not bench.loads()
    finish(bench, "second")
    # The bad copy on NVMe is dropped; what lies before it is served, and the rest computed and
    # stored again.
    assert read(bench) == [["cpu"] * (BLOCKS if bad is None else bad)]
    assert bench.counters().get("failed_promotions", 0) == (bad is not None)
    assert bad is None or bench.jobs_of(JobKind.PROMOTE)[0].moves[bad].key in bench.stored()


def test_reading_ahead_takes_its_share_of_the_tier_and_no_more(restarted: Restart) -> None:
    bench = restarted(PROMPT, OTHER, **ALONE, extra={"cpu_bytes": 12 * SLOT_BYTES})
    bench.add("running", NEW, max_tokens=6)
    add(bench, "a", PROMPT)
    add(bench, "b", OTHER)
    for _ in range(4):
        bench.step()
    assert [len(job.moves) for job in bench.jobs_of(JobKind.PROMOTE)] == [BLOCKS, 2], "half of twelve slots"
    finish(bench, *"ab")
    # The second's turn comes with the first's, whose load leaves the engine free: the rest it reads
    # itself.
    assert read(bench) == [["cpu"] * BLOCKS, ["cpu", "cpu", "nvme, kept", "nvme, kept"]]


def test_what_the_gpu_has_is_not_read_ahead(restarted: Restart) -> None:
    bench = restarted(PROMPT, **ALONE)
    bench.add("first", PROMPT[: 2 * BLOCK_TOKENS + 1], max_tokens=6)
    bench.step()
    bench.step()
    for key in bench.keys("first"):  # its blocks have left the CPU tier since
        bench._manager._tiers.get(Tier.CPU).discard(bench._manager._catalog.find(key))
    bench.add("second", PROMPT)
    finish(bench, "second")
    assert [len(job.moves) for job in bench.jobs_of(JobKind.PROMOTE)] == [BLOCKS - 2]


@pytest.mark.parametrize("held", [set(), {JobKind.PROMOTE}], ids=["before its end", "after its end"])
def test_a_reset_leaves_nothing_of_what_was_read_ahead(restarted: Restart, held: set[JobKind]) -> None:
    bench = restarted(PROMPT, **ALONE)
    bench.hold = set(held)
    bench.add("running", NEW, max_tokens=9)
    bench.add("second", PROMPT)
    bench.step()
    bench.step()
    bench.scheduler.reset_connector_cache()
    finish(bench, "second")
    assert not bench.loads()
    assert len(bench.jobs_of(JobKind.PROMOTE)) == 1
