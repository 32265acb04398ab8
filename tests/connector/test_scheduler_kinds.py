# SPDX-License-Identifier: Apache-2.0
"""On vLLM's real scheduler: what a hit needs of groups that do not read the whole prefix, and how
recurrent state comes to the tiers: as the engine hands it off, never by its place in a table."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
from schedulers import BLOCK_TOKENS, BLOCKS, SIZES, SLOT_BYTES, Bench, prompt_of
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    RSWASpec,
    SlidingWindowMLASpec,
)

from kvdisk.blocks import Tier, group_of
from kvdisk.manager.store_policy import OnCompute
from kvdisk.messages import JobKind, Reason

BLOCK: dict[str, Any] = {"block_size": BLOCK_TOKENS, **SIZES}
STATES: dict[str, Any] = {"state_tokens": BLOCK_TOKENS, "num_blocks": 256, "max_batched_tokens": BLOCK_TOKENS}
"""vLLM has a state only where a step ends: here at each block's end."""


def stored(bench: Bench, group: int) -> list[int]:
    """Return after how many blocks of their requests the blocks of a group end that were to be
    stored."""
    places = {key: at + 1 for name in bench.known for at, key in enumerate(bench.keys(name, group))}
    return [places[key] for key in bench.stored() if group_of(key) == group]


def loaded(bench: Bench, name: str) -> list[int]:
    """Return how many blocks of each group the loads of a request bring."""
    keys = [move.key for job in bench.jobs_of(JobKind.LOAD, name) for move in job.moves]
    return [sum(group_of(key) == group for key in keys) for group in range(2)]


# -- recurrent state -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("retention_tokens", "states"), [(0, [9]), (None, list(range(1, 10))), (4 * BLOCK_TOKENS, [4, 8, 9])]
)
def test_the_states_that_the_engine_keeps_are_stored_and_each_serves_alone(engines, retention_tokens, states):
    """The prompt has 9 full blocks, and a tenth that it fills with what it samples."""
    bench = engines.make(retention_tokens=retention_tokens, **STATES)
    prompt = prompt_of(1, 9 * BLOCK_TOKENS + 5)
    bench.serve("a", prompt, 40)
    assert stored(bench, 0) == list(range(1, 10)), "attention by position"
    assert stored(bench, 1) == states
    for end in range(9, 0, -1):  # what each leaves itself is longer than the next
        bench.forget()
        name = f"{end} blocks"
        bench.serve(name, [*prompt[: end * BLOCK_TOKENS], 1, 2, 3])
        hit = max((at for at in states if at <= end), default=0)
        assert loaded(bench, name) == [hit, int(hit > 0)], "one state, at the hit's end"


def test_a_whole_prompt_of_full_blocks_leaves_one_block_to_compute(engines):
    bench = engines.make(**STATES)
    bench.serve_twice(prompt_of(1, 4 * BLOCK_TOKENS))
    assert stored(bench, 1) == [3], "the state that the same prompt can begin with"
    assert loaded(bench, "b") == [3, 1]


@pytest.mark.parametrize("pipelined", [False, True])
def test_states_of_generated_tokens_are_stored_with_them(engines, pipelined):
    bench = engines.make(retention_tokens=None, pipelined=pipelined, extra={"store_decode": True}, **STATES)
    bench.serve("a", prompt_of(1, 100), 2 * BLOCK_TOKENS)
    assert stored(bench, 0) == stored(bench, 1) == [1, 2, 3, 4, 5]
    bench.forget()
    bench.serve("b", bench.texts["a"].tokens[:164])
    assert loaded(bench, "b") == [5, 1]


def test_what_a_request_may_store_holds_for_its_states(engines):
    bench = engines.make(retention_tokens=None, **STATES)
    bench.serve("a", prompt_of(1), params={"max_offload_tokens": 2 * BLOCK_TOKENS + 1})
    assert stored(bench, 0) == stored(bench, 1) == [1, 2]


def test_states_after_a_part_of_a_block_are_left_out(engines):
    """vLLM hashes in smaller pieces, and hits after a part of a block."""
    bench = engines.make(state_tokens=2 * BLOCK_TOKENS, num_blocks=256)
    prompt = prompt_of(1, 5 * BLOCK_TOKENS + 3)
    bench.serve("a", prompt)
    handed = [key for key in bench.stored() if group_of(key) == 1]
    assert handed == [bench.keys("a", 1)[3]], "after two blocks of two, and not after half a third"
    bench.forget()
    bench.serve("b", prompt)
    assert loaded(bench, "b") == [2, 1]


@pytest.mark.parametrize("blocks", [1, 2])
def test_states_that_are_kept_after_parts_of_blocks_are_told_of(engines, blocks, caplog):
    """A block is as long as what is hashed, or longer."""
    with caplog.at_level(logging.WARNING, "kvdisk"):
        engines.make(state_tokens=blocks * BLOCK_TOKENS, checkpoints=True)
    assert ("leave out prefix_match_unit" in caplog.text) == (blocks > 1)


def test_a_hand_off_that_the_engine_does_not_know_by_its_key_is_not_stored(engines, monkeypatch):
    """Whatever it says: here each comes with the block of another request."""
    bench = engines.make(retention_tokens=None, **STATES)
    bench.add("other", prompt_of(2), max_tokens=200)
    bench.step()
    take = bench.scheduler.kv_cache_manager.take_boundary_state_offloads
    wrong = bench.table("other", 1)[-1]

    def taken() -> Any:
        return {name: [(group, wrong, end) for group, _, end in states] for name, states in take().items()}

    monkeypatch.setattr(bench.scheduler.kv_cache_manager, "take_boundary_state_offloads", taken)
    before = len(stored(bench, 1))
    bench.add("a", prompt_of(1))
    bench.run_until_finished("a")
    assert len(stored(bench, 1)) == before
    bench.abort("other")


@pytest.mark.parametrize("policy", ["on_compute", "spillover"])
def test_a_state_whose_block_is_given_away_before_the_copy_is_not_stored(engines, policy):
    """The pool is small: what a prompt has left is soon another's. The bench compares what is
    loaded."""
    bench = engines.make(state_tokens=BLOCK_TOKENS, num_blocks=24, extra={"store_policy": policy, "cpu_bytes": "16MiB"})
    for turn in range(3):
        bench.hold = set() if turn else {JobKind.STORE}
        for number in range(8):
            bench.add(f"{turn} {number}", prompt_of(number, 9 * BLOCK_TOKENS + 2 + turn), max_tokens=3)
            bench.step()
        bench.finish(*[f"{turn} {number}" for number in range(8)], count=3)
        bench.forget()
    assert [key for key in bench.stored() if group_of(key) == 1]
    bench.run()
    counts = bench.counters()
    assert counts["overwritten_blocks"] > 0 and counts["stored_blocks"] > 0
    assert bench.jobs_of(JobKind.LOAD)


def test_a_state_waits_for_room_while_the_engine_has_it(engines):
    """All slots are being read from when it is handed off."""
    bench = engines.make(state_tokens=BLOCK_TOKENS, extra={"cpu_bytes": 5 * SLOT_BYTES})
    bench.hold = {JobKind.STORE}
    bench.add("a", prompt_of(1), max_tokens=60)
    bench.add("b", prompt_of(2), max_tokens=60)
    bench.step(3)
    assert bench.counters()["refused_blocks.room"] > 0
    bench.finish("a", "b", count=60)
    assert stored(bench, 1).count(4) == 2, "both states came in the end"


def test_a_state_whose_store_failed_comes_again(engines):
    bench = engines.make(state_tokens=BLOCK_TOKENS, num_blocks=256)
    bench.hold = {JobKind.STORE}
    bench.add("a", prompt_of(1), max_tokens=60)
    bench.step()
    bench.manager.fail_stores()
    bench.finish("a", count=60)
    assert stored(bench, 1) == [4, 4]
    assert {key for key in bench.in_tier(Tier.CPU) if group_of(key) == 1} == {bench.keys("a", 1)[3]}


@pytest.mark.parametrize("lost", ["the weights", "the GPU"])
def test_a_state_whose_store_failed_does_not_come_again_after(lost, engines):
    """vLLM still knows the block by its key: a request runs, so its own cache is not reset."""
    bench = engines.make(state_tokens=BLOCK_TOKENS, num_blocks=256)
    bench.hold = {JobKind.STORE}
    bench.add("a", prompt_of(1), max_tokens=60)
    bench.step()
    out = [record for record in bench.manager._transfers._records.values() if record.job.kind is JobKind.STORE]
    assert {1} in [{group_of(move.key) for move in record.job.moves} for record in out]
    assert not bench.scheduler.reset_prefix_cache()
    if lost == "the GPU":
        bench.manager.lose_gpu()
    else:
        bench.manager.reset(77)
    for record in out:
        record.failed[0] = Reason.DEADLINE
    before = len(bench.jobs)
    bench.finish("a", count=60)
    assert not [move for job in bench.jobs[before:] for move in job.moves if group_of(move.key) == 1]


class Saving(OnCompute):
    """Stores what a step completes, and what a preemption would lose."""

    saves_victims = True

    def preempted(self, request_id: str, group: int, storable: int) -> Sequence[int]:
        return range(storable)


@pytest.mark.parametrize("policy", ["on_compute", "test_scheduler_kinds:Saving"])
def test_victims_of_a_preemption_leave_only_states_that_their_keys_name(engines, policy):
    """What else they have is the state after another token."""
    extra = {"store_decode": True, "store_policy": policy}
    bench = engines.make(state_tokens=BLOCK_TOKENS, num_blocks=16, extra=extra)
    for number in range(3):
        bench.add(f"r{number}", prompt_of(number), max_tokens=60)
    bench.finish(*[f"r{number}" for number in range(3)], count=60)
    assert sum(request.num_preemptions for request in bench.known.values()) > 0
    assert stored(bench, 1).count(4) == 3
    for name in ("r0", "r1", "r2"):
        bench.forget()
        bench.serve(f"{name} again", bench.texts[name].tokens[:190])


@pytest.mark.parametrize("eviction", ["lru", "learned"])
def test_a_state_that_memory_serves_counts_as_used_on_nvme_too(engines, eviction):
    bench = engines.make(nvme=True, extra={"eviction": eviction}, **STATES)
    for number in (1, 2):
        bench.serve(f"before {number}", prompt_of(number))
    bench.forget()
    bench.serve("a", prompt_of(1))
    assert loaded(bench, "a") == [BLOCKS, 1]
    nvme, catalog = bench.manager._tiers.get(Tier.NVME), bench.manager._catalog
    state = {name: catalog.find(bench.keys(name, 1)[BLOCKS - 1]) for name in ("before 1", "before 2")}
    assert not nvme.uses.table[state["before 2"]]["uses"] and nvme.uses.table[state["before 1"]]["uses"] == 1
    ((size_class, _),) = nvme.by_class((state["before 1"],))
    assert nvme._victims(size_class, 1, keep_dirty=False) == [state["before 2"]]


def test_nothing_but_states(engines):
    bench = engines.make(state_only=True, retention_tokens=2 * BLOCK_TOKENS, **STATES)
    bench.serve("a", prompt_of(1, 205))
    assert stored(bench, 0) == [2, 4, 6]
    bench.forget()
    bench.serve("b", prompt_of(1, 150))
    assert loaded(bench, "b") == [1, 0]


def test_a_state_that_cannot_be_read_is_computed_again(engines):
    """The whole request is: attention without its state serves nobody."""
    bench = engines.make(retention_tokens=None, **STATES).warm(1)
    bench.fail = {JobKind.LOAD: (4,)}
    bench.add("a", prompt_of(1), max_tokens=3)
    bench.step()
    assert group_of(bench.jobs_of(JobKind.LOAD)[0].moves[4].key) == 1
    bench.finish("a", count=3)
    assert bench.counters()["failed_loads"] == 1
    (again,) = bench.jobs_of(JobKind.LOAD)[1:]
    assert [group_of(move.key) for move in again.moves] == [0, 0, 0, 1], "up to the state before"


# -- other kinds -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("blocks", "needed"), [(2, 2), (3, 3), (4, 0), (5, 1), (8, 0), (9, 1)])
def test_a_hit_on_a_chunks_border_needs_no_block_of_it(engines, blocks, needed):
    chunked = ChunkedLocalAttentionSpec(**BLOCK, attention_chunk_size=4 * BLOCK_TOKENS)
    bench = engines.make(other=chunked, num_blocks=256)
    bench.serve_twice(prompt_of(1, blocks * BLOCK_TOKENS + 7))
    assert loaded(bench, "b") == [blocks, needed]


def test_of_reference_windows_only_the_prompt_is_stored(engines):
    """What is generated sees less than a prompt does, so its KV is not that of a prompt's."""
    bench = engines.make(other=RSWASpec(**BLOCK, rswa_window=BLOCK_TOKENS), extra={"store_decode": True})
    bench.serve("a", prompt_of(1), 3 * BLOCK_TOKENS)
    assert stored(bench, 0) == stored(bench, 1) == [1, 2, 3, 4]
    bench.forget()
    bench.serve("b", prompt_of(1))
    assert loaded(bench, "b") == [4, 4]


def test_of_a_sessions_reference_windows_only_the_first_prompt_is_stored(engines):
    """Its next prompt takes in what was generated, whose KV stays what it was."""
    bench = engines.make(other=RSWASpec(**BLOCK, rswa_window=BLOCK_TOKENS), num_blocks=256)
    session = bench.add("s", prompt_of(1), max_tokens=100, resumable=True)
    while session.num_tokens < len(prompt_of(1)) + 100:
        bench.step()
    bench.add("s", prompt_of(3, 40), max_tokens=3, resumable=True)
    bench.step(6)
    assert session.num_prompt_tokens > 200, "the prompt has grown"
    assert stored(bench, 0) == stored(bench, 1) == [1, 2, 3, 4]
    bench.abort("s")


RING = CircularBufferSpec(**BLOCK)
REPLAYED = SlidingWindowMLASpec(**BLOCK, sliding_window=2 * BLOCK_TOKENS, bounded_replay=True)


@pytest.mark.parametrize(
    ("groups", "hit"),
    [({"left_out": REPLAYED}, [9, 0]), ({"left_out": RING, "state_tokens": BLOCK_TOKENS}, [9, 1])],
)
def test_a_group_that_the_prefix_cache_leaves_out_is_left_out(engines, groups, hit):
    """vLLM computes again what it needs; events name the others by vLLM's numbers."""
    bench = engines.make(events=True, **groups)
    bench.serve_twice(prompt_of(1, 300))
    assert loaded(bench, "b") == hit
    ours = [event for event in bench.published if getattr(event, "medium", None) == "CPU"]
    assert {event.group_idx for event in ours} == {at + 1 for at, blocks in enumerate(hit) if blocks}


def test_a_load_that_fails_beside_a_group_that_is_left_out_takes_all_of_the_request(engines):
    """vLLM counts all groups, and ends the engine where there are several and blocks are named."""
    bench = engines.make(left_out=REPLAYED, num_blocks=256).warm(1)
    (request,) = bench.loading(1)
    bench.fail = {JobKind.LOAD: (2,)}
    bench.release()
    bench.step()
    bench.assert_waits(request, 0)
    bench.fail = {}
    bench.finish("r1", count=3)
