# SPDX-License-Identifier: Apache-2.0
"""On vLLM's real scheduler, with held jobs: waits for blocks that are being read, and reading ahead in the queue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from schedulers import BLOCK_TOKENS, Bench
from support.fake_neighbours import FakeHome, FakeNeighbours
from vllm.sampling_params import SamplingParams

from kvdisk import assembly
from kvdisk.blocks import BlockKey, Tier, make_block_key
from kvdisk.index.base import SegmentRecord
from kvdisk.manager.prefetch import GpuLoads
from kvdisk.messages import FOREIGN_SEGMENTS, Job, JobKind

pytestmark = pytest.mark.vllm

BLOCKS = 4
PROMPT = list(range(100, 100 + BLOCKS * BLOCK_TOKENS + 5))
OTHER = list(range(300, 300 + BLOCKS * BLOCK_TOKENS + 5))
NEW = list(range(50, 50 + 3 * BLOCK_TOKENS + 5))
SLOT_BYTES = 20480
"""Of a block of the bench's model, header included."""


_OF_THE_MODEL = {"max_model_len", "window_tokens", "num_blocks"}


class Place:
    """A store, and the benches that serve from it one after the other. ``homes``: other engines' homes in it."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.homes: list[FakeHome] = []
        self._folder = folder
        self._open: list[Bench] = []
        patch.setattr(assembly, "_meet_neighbours", lambda *_: FakeNeighbours(self.homes))
        (folder / "model").mkdir()
        (folder / "model" / "weights.bin").write_bytes(b"a store needs weights that have an identity")

    def start(
        self,
        max_seqs: int = 8,
        num_blocks: int = 64,
        max_model_len: int = 2048,
        caches: bool = True,
        window_tokens: int | None = None,
        **extra: Any,
    ) -> Bench:
        """End the last bench, if any, and start another one, whose CPU tier is empty."""
        self.close()
        store = {"store_dirs": str(self._folder / "store"), "nvme_bytes": "64MiB", "segment_bytes": "1MiB"}
        extra = store | {"lookup_wait_s": 600.0} | extra
        bench = Bench(
            self._folder / "model",
            max_seqs=max_seqs,
            num_blocks=num_blocks,
            extra=extra,
            max_model_len=max_model_len,
            prefix_caching=caches,
            window_tokens=window_tokens,
        )
        self._open.append(bench)
        return bench

    def restarted(self, *prompts: list[int], **settings: Any) -> Bench:
        """Return a bench in whose store the full blocks of these prompts lie, and in whose memory none."""
        bench = self.start(**{name: settings[name] for name in _OF_THE_MODEL & settings.keys()})
        for at, prompt in enumerate(prompts):
            bench.add(f"before {at}", prompt)
            finish(bench)
        return self.start(**settings)

    def close(self) -> None:
        while self._open:
            self._open.pop().connector.shutdown()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    made = Place(tmp_path, monkeypatch)
    yield made
    made.close()


def finish(bench: Bench, steps: int = 80) -> None:
    """Step until nothing is left to do, waiting for the index's commits."""
    for _ in range(steps):
        if not bench.scheduler.has_requests() and not bench.connector.has_pending_push_work():
            return
        bench.step()
        assert bench.connector.scheduler._parts.index.flush(600.0)
    raise AssertionError("still busy")


def jobs(bench: Bench, kind: JobKind) -> list[Job]:
    return [job for job in bench.jobs if job.kind is kind]


def sources(job: Job) -> list[str]:
    """Return where the blocks of a load come from, and whether a CPU copy is left."""
    names = {(False, True): "cpu", (True, False): "nvme", (True, True): "nvme, kept"}
    return [names[Tier.NVME in move.slots, Tier.CPU in move.slots] for move in job.moves]


# -- waits -----------------------------------------------------------------------------------------


def test_two_requests_read_a_block_of_nvme_once(place: Place) -> None:
    bench = place.restarted(PROMPT)
    bench.hold = {JobKind.LOAD}
    bench.add("a", PROMPT)
    bench.add("b", PROMPT)
    for _ in range(3):
        assert not bench.step().num_scheduled_tokens
    (first,) = jobs(bench, JobKind.LOAD)
    assert (first.request_id, sources(first)) == ("a", ["nvme, kept"] * BLOCKS)
    bench.release()
    finish(bench)
    # By the time that the second may go on, its blocks are on the GPU: those of the first.
    assert len(jobs(bench, JobKind.LOAD)) == 1
    assert [len(bench.tokens[name]) for name in "ab"] == [2, 2]


def test_the_second_loads_what_the_first_left_in_memory(place: Place) -> None:
    bench = place.restarted(PROMPT)
    bench.hold = {JobKind.LOAD}
    bench.add("a", PROMPT)
    bench.step()
    bench.abort("a")  # its blocks are not to be had on the GPU
    bench.add("b", PROMPT)
    assert not bench.step().num_scheduled_tokens
    bench.release()
    finish(bench)
    assert [sources(job) for job in jobs(bench, JobKind.LOAD)] == [["nvme, kept"] * BLOCKS, ["cpu"] * BLOCKS]


@pytest.mark.parametrize("settings", [{"cpu_admission": "reuse(3)"}, {"cpu_bytes": 0}], ids=["refused", "no CPU tier"])
def test_where_no_copy_is_left_anywhere_the_second_reads_at_once(place: Place, settings: dict[str, Any]) -> None:
    """Nor on the GPU, whose own prefix cache is off."""
    bench = place.restarted(PROMPT, caches=False, **settings)
    bench.hold = {JobKind.LOAD}
    bench.add("a", PROMPT)
    bench.add("b", PROMPT)
    bench.step()
    assert [job.request_id for job in jobs(bench, JobKind.LOAD)] == ["a", "b"]
    assert all(sources(job) == ["nvme"] * BLOCKS for job in jobs(bench, JobKind.LOAD))
    bench.release()
    finish(bench)


def test_the_wait_for_a_read_is_bounded(place: Place) -> None:
    bench = place.restarted(PROMPT, lookup_wait_s=0)
    bench.hold = {JobKind.LOAD}
    bench.add("a", PROMPT)
    bench.add("b", PROMPT)
    bench.step()
    first, second = jobs(bench, JobKind.LOAD)
    assert (sources(first), sources(second)) == (["nvme, kept"] * BLOCKS, ["nvme"] * BLOCKS)
    assert bench.counters()["wait_timeouts"] >= 1
    bench.release()
    finish(bench)


def test_a_read_that_fails_lets_the_second_go_on(place: Place) -> None:
    bench = place.restarted(PROMPT)
    bench.hold, bench.fail = {JobKind.LOAD}, {JobKind.LOAD: (1,)}
    bench.add("a", PROMPT)
    bench.add("b", PROMPT)
    bench.step()
    bench.release()
    bench.step()
    bench.fail = {}
    finish(bench)
    assert [len(bench.tokens[name]) for name in "ab"] == [2, 2]
    # The bad copy is gone, and nobody asks for it: the second gets what lies before it, or computes.
    assert all(len(job.moves) <= 1 for job in jobs(bench, JobKind.LOAD)[1:])


def test_a_full_cpu_tier_makes_no_miss_of_a_hit(place: Place) -> None:
    """What has no slot is read through staging, however much of the tier is in use."""
    bench = place.restarted(PROMPT, OTHER, cpu_bytes=3 * SLOT_BYTES)
    bench.hold = {JobKind.STORE, JobKind.LOAD}
    bench.add("new", NEW, max_tokens=1)
    bench.step()
    (store,) = jobs(bench, JobKind.STORE)
    assert len(store.moves) == 3, "every slot of the tier is being written"
    bench.add("a", PROMPT)
    bench.add("b", OTHER)
    bench.step()
    assert [sources(job) for job in jobs(bench, JobKind.LOAD)] == [["nvme"] * BLOCKS] * 2
    bench.release()
    finish(bench)
    assert bench.counters()["hit_tokens.nvme"] == 2 * BLOCKS * BLOCK_TOKENS


# -- requests that arrive together with one prefix --------------------------------------------------

SHARED_BLOCKS = 97
SHARED = [token % 499 for token in range(SHARED_BLOCKS * BLOCK_TOKENS)]
LONG = {"max_model_len": 4096, "num_blocks": 1000}
MANY = [f"r{number}" for number in range(8)]


def tail(number: int, tokens: int = 5) -> list[int]:
    """Return tokens that no other prompt has there."""
    return [400 + number] * tokens


def add_many(bench: Bench) -> None:
    for number, name in enumerate(MANY):
        bench.add(name, SHARED + tail(number))


def moves(bench: Bench) -> list[int]:
    """Return how many blocks each load has brought."""
    return [len(job.moves) for job in jobs(bench, JobKind.LOAD)]


@pytest.mark.parametrize(
    ("settings", "source"),
    [({}, "nvme, kept"), ({"cpu_bytes": 0}, "nvme"), ({"cpu_admission": "reuse(9)"}, "nvme")],
    ids=["into memory", "no CPU tier", "through staging"],
)
def test_a_prefix_that_many_ask_for_is_loaded_once(place: Place, settings: dict[str, Any], source: str) -> None:
    bench = place.restarted(SHARED + tail(20), **LONG, **settings)
    free = bench.pool.get_num_free_blocks()
    bench.hold = {JobKind.LOAD}
    add_many(bench)
    for _ in range(3):
        assert not bench.step().num_scheduled_tokens
    assert [sources(job) for job in jobs(bench, JobKind.LOAD)] == [[source] * SHARED_BLOCKS]
    assert free - bench.pool.get_num_free_blocks() == SHARED_BLOCKS, "GPU blocks for one load"
    bench.release()
    bench.step()
    assert len(bench.step().num_scheduled_tokens) == len(MANY), "all go on in the step in which the first does"
    finish(bench)
    assert moves(bench) == [SHARED_BLOCKS]
    assert [len(bench.tokens[name]) for name in MANY] == [2] * len(MANY)


def test_a_prefix_in_memory_that_many_ask_for_is_loaded_once(place: Place) -> None:
    bench = place.start(**LONG)
    bench.add("before", SHARED + tail(20))
    finish(bench)
    assert bench.scheduler.reset_prefix_cache()
    add_many(bench)
    finish(bench)
    assert [sources(job) for job in jobs(bench, JobKind.LOAD)] == [["cpu"] * SHARED_BLOCKS]
    assert [len(bench.tokens[name]) for name in MANY] == [2] * len(MANY)


def test_a_prefix_of_another_home_that_many_ask_for_is_loaded_once(place: Place) -> None:
    home = FakeHome("a" * 32, SegmentRecord(0, SLOT_BYTES, 64))
    place.homes.append(home)
    bench = place.start(cpu_bytes=0)
    request = bench.make_request("any", PROMPT)
    for slot, block_hash in enumerate(request.block_hashes):
        home.put(make_block_key(block_hash, 0), slot, 7 + slot, [])
    for name in "abc":
        bench.add(name, PROMPT)
    bench.connector.scheduler._parts.neighbours.answer(8)
    finish(bench)
    assert moves(bench) == [BLOCKS]
    assert [len(bench.tokens[name]) for name in "abc"] == [2] * 3


def test_one_that_does_not_read_the_prefix_cache_does_not_wait(place: Place) -> None:
    bench = place.restarted(PROMPT)
    bench.hold = {JobKind.LOAD}
    bench.add("a", PROMPT)
    bench.add(
        "b", PROMPT, sampling_params=SamplingParams(max_tokens=2, ignore_eos=True, skip_reading_prefix_cache=True)
    )
    assert bench.step().num_scheduled_tokens == {"b": len(PROMPT)}
    bench.release()
    finish(bench)


@pytest.mark.parametrize("shared", [60, 1])
def test_one_that_shares_a_part_waits_and_loads_its_own_rest(place: Place, shared: int) -> None:
    mine = SHARED[: shared * BLOCK_TOKENS] + tail(30, (SHARED_BLOCKS - shared) * BLOCK_TOKENS + 5)
    bench = place.restarted(SHARED + tail(20), mine, **LONG, cpu_bytes=0)
    bench.hold = {JobKind.LOAD}
    bench.add("a", SHARED + tail(0))
    bench.add("b", mine)
    bench.step()
    assert moves(bench) == [SHARED_BLOCKS]
    bench.release()
    finish(bench)
    assert moves(bench) == [SHARED_BLOCKS, SHARED_BLOCKS - shared]


def test_with_a_sliding_window_one_waits_only_for_what_it_can_use(place: Place) -> None:
    window = {"window_tokens": 2 * BLOCK_TOKENS, "num_blocks": 200, "cpu_bytes": 0}
    longer = PROMPT[: 2 * BLOCK_TOKENS] + [7] * (8 * BLOCK_TOKENS)
    bench = place.restarted(PROMPT, longer, **window)
    bench.hold = {JobKind.LOAD}
    bench.add("a", PROMPT)
    bench.add("b", PROMPT + tail(1))
    bench.add("c", longer)
    bench.step()
    loads = jobs(bench, JobKind.LOAD)
    # The first loads the window before the end of its prompt: the third needs the one before the end of its own.
    assert [job.request_id for job in loads] == ["a", "c"]
    bench.release()
    finish(bench)
    assert [job.request_id for job in jobs(bench, JobKind.LOAD)] == ["a", "c"]
    assert [len(bench.tokens[name]) for name in "abc"] == [2] * 3


def test_when_the_first_is_aborted_the_next_loads_and_the_others_wait_for_it(place: Place) -> None:
    bench = place.restarted(PROMPT, cpu_bytes=0)
    bench.hold = {JobKind.LOAD}
    for name in "abc":
        bench.add(name, PROMPT)
    bench.step()
    bench.abort("a")
    bench.step()
    bench.step()
    assert [job.request_id for job in jobs(bench, JobKind.LOAD)] == ["a", "b"], "nobody waits for an aborted one"
    bench.release()
    finish(bench)
    assert [job.request_id for job in jobs(bench, JobKind.LOAD)] == ["a", "b"]
    assert [len(bench.tokens[name]) for name in "bc"] == [2] * 2


@pytest.mark.parametrize("failed", [0, 2])
def test_when_the_first_fails_the_others_wait_no_more(place: Place, failed: int) -> None:
    bench = place.restarted(PROMPT, cpu_bytes=0)
    bench.hold, bench.fail = {JobKind.LOAD}, {JobKind.LOAD: (failed,)}
    for name in "abc":
        bench.add(name, PROMPT)
    bench.step()
    bench.release()
    bench.step()
    bench.fail = {}
    assert len(bench.step().num_scheduled_tokens) == 3, "what was loaded before it is there, and the rest is computed"
    finish(bench)
    assert moves(bench) == [BLOCKS]
    assert [len(bench.tokens[name]) for name in "abc"] == [2] * 3


def test_when_the_time_is_over_one_loads_and_the_others_wait_for_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = place.restarted(PROMPT, cpu_bytes=0, lookup_wait_s=10.0)
    clock = FakeClock()
    monkeypatch.setattr("kvdisk.connector.scheduler_side.time", clock)
    bench.hold = {JobKind.LOAD}
    loading = []
    for name in "abcd":
        bench.add(name, PROMPT)
    for _ in range(5):
        bench.step()
        clock.now += 6.0
        loading.append("".join(job.request_id or "" for job in jobs(bench, JobKind.LOAD)))
    assert loading == ["a", "a", "ab", "ab", "abc"], "10 s each"
    bench.release()
    finish(bench)
    assert moves(bench) == [BLOCKS] * 3
    assert [len(bench.tokens[name]) for name in "abcd"] == [2] * 4


class FakeClock:
    """Stands for the module ``time``."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


def test_what_the_gpu_has_lost_before_their_turn_one_loads_for_all(place: Place) -> None:
    bench = place.restarted(PROMPT, cpu_bytes=0, max_seqs=1)
    for name in "abcd":
        bench.add(name, PROMPT, max_tokens=3 if name == "a" else 2)
    while "a" in bench.scheduler.requests:
        bench.step()
    assert bench.scheduler.reset_prefix_cache()
    finish(bench)
    assert [job.request_id for job in jobs(bench, JobKind.LOAD)] == ["a", "b"]
    assert [len(bench.tokens[name]) for name in "bcd"] == [2] * 3


def test_who_waits_for_a_load_looks_for_it_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    presences = GpuLoads.presences

    def counted(loads: GpuLoads, keys: Sequence[BlockKey]) -> bytes:
        asked.append(len(keys))
        return presences(loads, keys)

    monkeypatch.setattr(GpuLoads, "presences", counted)
    bench = place.restarted(PROMPT, OTHER, cpu_bytes=0)
    bench.hold = {JobKind.LOAD}
    for name in "abcdef":
        bench.add(name, PROMPT)
    for number in range(20):
        bench.step()
        if number == 10:
            bench.add("other", OTHER)
    assert asked == [BLOCKS] * 6, "each of the six that came second, or found another's load, has looked once"
    bench.release()
    finish(bench)


def test_a_reset_lets_them_go(place: Place) -> None:
    bench = place.restarted(PROMPT)
    bench.hold = {JobKind.LOAD}
    for name in "abc":
        bench.add(name, PROMPT)
    bench.step()
    bench.scheduler.reset_connector_cache()
    assert set(bench.step().num_scheduled_tokens) == {"b", "c"}
    bench.release()
    finish(bench)
    assert moves(bench) == [BLOCKS]
    assert not bench.connector.scheduler._manager._reads.to_gpu.any


# -- reading ahead ---------------------------------------------------------------------------------


def test_a_queued_request_finds_its_blocks_in_memory(place: Place) -> None:
    """The queue hides the disk: when its turn comes, nothing is read from NVMe any more."""
    bench = place.restarted(PROMPT, OTHER, max_seqs=1)
    bench.add("running", NEW, max_tokens=6)
    bench.add("second", PROMPT)
    bench.add("third", OTHER)
    bench.step()
    promotions = jobs(bench, JobKind.PROMOTE)
    wanted = [
        [make_block_key(one, 0) for one in bench.scheduler.requests[name].block_hashes] for name in ("second", "third")
    ]
    assert [[move.key for move in job.moves] for job in promotions] == wanted, "in order of arrival"
    assert all(move.block == -1 and {*move.slots} == {Tier.CPU, Tier.NVME} for job in promotions for move in job.moves)
    finish(bench)
    assert [sources(job) for job in jobs(bench, JobKind.LOAD)] == [["cpu"] * BLOCKS] * 2
    counters = bench.counters()
    assert counters["prefetched_blocks"] == 2 * BLOCKS
    assert counters["hit_tokens.cpu"] == 2 * BLOCKS * BLOCK_TOKENS
    assert "lookup_waits" not in counters


def test_without_reading_ahead_it_reads_them_in_its_turn(place: Place) -> None:
    bench = place.restarted(PROMPT, max_seqs=1, prefetch=False)
    bench.add("running", NEW, max_tokens=6)
    bench.add("second", PROMPT)
    finish(bench)
    assert jobs(bench, JobKind.PROMOTE) == []
    assert [sources(job) for job in jobs(bench, JobKind.LOAD)] == [["nvme, kept"] * BLOCKS]


def test_one_that_waits_for_gpu_blocks_is_read_ahead_too(place: Place) -> None:
    """It is looked up in every step, and nothing of it fits."""
    bench = place.restarted(PROMPT, num_blocks=8)
    bench.add("running", NEW, max_tokens=20)
    bench.add("second", PROMPT)
    for _ in range(4):
        bench.step()
    assert [len(job.moves) for job in jobs(bench, JobKind.PROMOTE)] == [BLOCKS]
    finish(bench)
    assert [sources(job) for job in jobs(bench, JobKind.LOAD)] == [["cpu"] * BLOCKS]


def test_one_whose_turn_comes_waits_for_the_promotion_and_reads_nothing_twice(place: Place) -> None:
    bench = place.restarted(PROMPT, max_seqs=1)
    bench.hold = {JobKind.PROMOTE}
    bench.add("running", NEW, max_tokens=2)
    bench.add("second", PROMPT)
    for _ in range(5):
        bench.step()
    assert not bench.scheduler.running, "its turn has come"
    assert jobs(bench, JobKind.LOAD) == []
    bench.release()
    finish(bench)
    assert [sources(job) for job in jobs(bench, JobKind.LOAD)] == [["cpu"] * BLOCKS]


def test_a_promotion_that_fails_costs_no_more_than_itself(place: Place) -> None:
    bench = place.restarted(PROMPT, max_seqs=1)
    bench.hold, bench.fail = {JobKind.PROMOTE}, {JobKind.PROMOTE: (2,)}
    bench.add("running", NEW, max_tokens=3)
    bench.add("second", PROMPT)
    bench.step()
    bench.release()
    finish(bench)
    # The bad copy on NVMe is dropped; what lies before it is served, and the rest computed and stored again.
    (load,) = jobs(bench, JobKind.LOAD)
    assert sources(load) == ["cpu"] * 2
    assert bench.counters()["failed_promotions"] == 1
    assert bench.counters().get("failed_loads", 0) == 0
    assert len(bench.tokens["second"]) == 2
    stored = {move.key for job in jobs(bench, JobKind.STORE) for move in job.moves}
    assert jobs(bench, JobKind.PROMOTE)[0].moves[2].key in stored


def test_reading_ahead_takes_its_share_of_the_tier_and_no_more(place: Place) -> None:
    bench = place.restarted(PROMPT, OTHER, max_seqs=1, cpu_bytes=12 * SLOT_BYTES)
    bench.add("running", NEW, max_tokens=6)
    bench.add("second", PROMPT)
    bench.add("third", OTHER)
    for _ in range(4):
        bench.step()
    assert [len(job.moves) for job in jobs(bench, JobKind.PROMOTE)] == [BLOCKS, 2], "half of twelve slots"
    finish(bench)
    # The third's turn comes with the second's, whose load leaves the engine free: the rest it reads itself.
    rest = ["cpu", "cpu", "nvme, kept", "nvme, kept"]
    assert [sources(job) for job in jobs(bench, JobKind.LOAD)] == [["cpu"] * BLOCKS, rest]


def test_what_the_gpu_has_is_not_read_ahead(place: Place) -> None:
    bench = place.restarted(PROMPT, max_seqs=1)
    first = bench.add("first", PROMPT[: 2 * BLOCK_TOKENS + 1], max_tokens=6)
    bench.step()
    bench.step()
    manager = bench.connector.scheduler._manager
    for block_hash in first.block_hashes:  # its blocks have left the CPU tier since
        manager._tiers.get(Tier.CPU).discard(manager._catalog.find(make_block_key(block_hash, 0)))
    bench.add("second", PROMPT)
    finish(bench)
    (promotion,) = jobs(bench, JobKind.PROMOTE)
    assert len(promotion.moves) == BLOCKS - 2


def test_what_another_home_has_is_read_ahead(place: Place) -> None:
    bench = place.start(max_seqs=1)
    (slot_bytes,) = bench.connector.scheduler._geometry.slot_sizes
    assert slot_bytes == SLOT_BYTES
    home = FakeHome("a" * 32, SegmentRecord(0, slot_bytes, 64))
    place.homes.append(home)
    bench = place.start(max_seqs=1)
    neighbours = bench.connector.scheduler._parts.neighbours
    bench.add("running", NEW, max_tokens=8)
    neighbours.answer(8)
    bench.step()
    request = bench.add("second", PROMPT)
    for slot, block_hash in enumerate(request.block_hashes):
        home.put(make_block_key(block_hash, 0), slot, 7 + slot, [])
    bench.step()
    assert jobs(bench, JobKind.PROMOTE) == [], "the other home has not answered"
    neighbours.answer(8)
    finish(bench)
    (promotion,) = jobs(bench, JobKind.PROMOTE)
    segments = [move.slots[Tier.NVME].segment for move in promotion.moves]
    assert len(segments) == BLOCKS and min(segments) >= FOREIGN_SEGMENTS
    assert [sources(job) for job in jobs(bench, JobKind.LOAD)] == [["cpu"] * BLOCKS]


@pytest.mark.parametrize("answered", ["before", "after"])
def test_a_reset_leaves_nothing_of_what_was_read_ahead(place: Place, answered: str) -> None:
    bench = place.restarted(PROMPT, max_seqs=1)
    bench.hold = {JobKind.PROMOTE} if answered == "after" else set()
    bench.add("running", NEW, max_tokens=9)
    bench.add("second", PROMPT)
    bench.step()
    assert len(jobs(bench, JobKind.PROMOTE)) == 1
    bench.step()
    bench.scheduler.reset_connector_cache()
    bench.release()
    finish(bench)
    assert jobs(bench, JobKind.LOAD) == []
    assert len(jobs(bench, JobKind.PROMOTE)) == 1


# -- short hits ------------------------------------------------------------------------------------


def test_a_short_hit_is_left_to_recompute(place: Place) -> None:
    bench = place.restarted(PROMPT, min_load_tokens=3 * BLOCK_TOKENS, prefetch=False)
    short = PROMPT[: 2 * BLOCK_TOKENS + 1]
    bench.add("short", short, max_tokens=1)
    assert bench.step().num_scheduled_tokens == {"short": len(short)}
    assert bench.counters()["short_hits"] == 1
    finish(bench)
    assert bench.scheduler.reset_prefix_cache()
    bench.add("long", PROMPT)
    finish(bench)
    assert [len(job.moves) for job in jobs(bench, JobKind.LOAD)] == [BLOCKS]
