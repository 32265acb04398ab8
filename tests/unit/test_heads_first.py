# SPDX-License-Identifier: Apache-2.0
"""What cannot be stored whole is stored from its head: a tier that is full leaves no hole in a
prompt."""

from __future__ import annotations

from string import ascii_letters

import pytest
from tier_bench import GEOMETRY, TierBench

from kvdisk.blocks import Tier
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.manager import bounds
from kvdisk.manager.catalog import DROPPED
from kvdisk.messages import Reason

SAME_SIZE = Geometry((GroupGeometry(0, 2, 4096), GroupGeometry(1, 2, 4096)), 1, 2)
TWO_SIZES = Geometry((GroupGeometry(0, 2, 4096), GroupGeometry(1, 2, 8192)), 1, 2)
PROMPT = "abcdefghijklmnopqrstuvwxyz"


@pytest.mark.parametrize("step_tokens", [26, 8, 2])
@pytest.mark.parametrize(
    ("geometry", "slots", "blocks"),
    [(GEOMETRY, (8,), 8), (SAME_SIZE, (8,), 4), (TWO_SIZES, (10, 4), 4), (TWO_SIZES, (4, 10), 4)],
)
def test_a_prompt_longer_than_the_tier_fills_it_with_its_head_in_all_groups(geometry, slots, blocks, step_tokens):
    bench = TierBench(slots, geometry=geometry, gpu_blocks=200, min_load_tokens=0)
    bench.add(PROMPT)
    while bench.engine.requests or bench.manager.has_pending_work(bench.engine.now):
        bench.step(step_tokens)
    bench.engine.pool.forget_all()
    hashes = [PROMPT[:end].encode() for end in range(2, len(PROMPT) + 1, 2)]
    bench.manager.new_request("asks", hashes, len(PROMPT), bench.engine.now)
    assert bench.manager.lookup("asks", 0, len(PROMPT) + 1, bench.engine.now) == blocks * 2


@pytest.mark.parametrize("step_tokens", [26, 8, 2])
def test_of_a_prompt_longer_than_memory_the_drive_gets_all(step_tokens):
    """What lies before a block that finds no room may wait for nothing but the drive."""
    bench = TierBench((4,), (16,))
    bench.idle()
    bench.add(PROMPT, finishing=False)
    for _ in range(60):
        bench.step(step_tokens, seconds=3.0)
    assert bench.stats["stored_blocks"] == len(PROMPT) // 2
    assert bench.stats["demoted_blocks"] >= len(PROMPT) // 2 - 4


@pytest.mark.parametrize("memory", [4, 8, 16])
@pytest.mark.parametrize("step_tokens", [52, 16, 8])
def test_of_a_prompt_longer_than_the_drive_it_keeps_the_head(step_tokens, memory):
    """What follows it, and waits in memory, takes no place of it: that would serve nobody."""
    prompt = ascii_letters
    bench = TierBench((memory,), (16,), gpu_blocks=200, nvme_admission="all", min_load_tokens=0)
    bench.idle()
    kept = []
    for _ in range(8):
        bench.engine.pool.forget_all()
        bench.add(prompt)
        while bench.engine.requests or bench.manager.has_pending_work(bench.engine.now):
            bench.step(step_tokens, seconds=3.0)
        held = bench.held(prompt)
        kept.append(sum(held))
        assert all(held[: kept[-1]]), f"a hole: {held}"
    assert min(kept[5:]) >= 12, f"of 16 places the head has {kept}"
    assert bench.stats["demoted_blocks"] <= 2 * 16, "the same blocks are written again and again"


@pytest.mark.parametrize("most", [0, 1, 4096])
def test_what_a_block_follows_goes_to_the_drive_before_it(most, monkeypatch):
    """Also where that had been there, and had left; far behind the block goes alone, as a step is
    not held up for the rest."""
    monkeypatch.setattr(bounds, "LOOKED_AT", most)
    bench = TierBench((32,), (64,), nvme_admission="all")
    bench.idle()
    bench.serve("aabbccddeeff")
    nvme, rows = bench.parts.nvme, bench.rows("aabbccddeeff")
    nvme.end(rows[:1:-1])
    bench.parts.cpu.offer(rows[-1:])
    bench.idle()
    held = bench.held("aabbccddeeff")
    assert held == ([True] * 6 if most > 1 else [True, True, False, False, False, True])


def test_one_offer_looks_at_a_bounded_number_of_copies(monkeypatch):
    """Of a million tokens it once took 14 s: each of its copies walked as far as one call may."""
    monkeypatch.setattr(bounds, "LOOKED_AT", 4)
    bench = TierBench((64,), (64,), gpu_blocks=200, nvme_admission="all")
    bench.idle()
    bench.serve(ascii_letters)
    rows, asked, waiting = bench.rows(ascii_letters), [], bench.parts.dirty
    bench.parts.nvme.end(rows[::-1])
    look = waiting._missing_parent
    monkeypatch.setattr(waiting, "_missing_parent", lambda row: asked.append(row) or look(row))
    bench.parts.cpu.offer(rows[::-1])
    assert waiting.total == len(rows)
    assert len(rows) <= len(asked) <= 4 + 2 * len(rows)


def test_a_copy_that_a_drive_holds_for_long_keeps_no_other_block_out():
    """It is refused alone; what lies behind it is stored all the same."""
    bench = TierBench((20,))
    bench.serve("aabb")
    row = bench.rows("aabb")[1]
    bench.catalog.pin((row,), Tier.CPU)  # as a late move does
    bench.parts.cpu.discard(row)
    bench.serve("aabbccdd", cold=True)
    assert bench.held("aabbccdd", Tier.CPU) == [True, False, True, True]
    assert bench.catalog.state(row, Tier.CPU) == DROPPED
    bench.parts.cpu.unpin((row,))


def test_what_a_failed_store_was_to_write_is_offered_again():
    bench = TierBench((20,))
    bench.add("aabbccdd", finishing=False)
    bench.step(work=False)
    (job_id,) = bench.rank.runnable
    bench.rank.fail_job(job_id, Reason.IO_ERROR)
    for _ in range(3):
        bench.step(1, seconds=3.0)
    assert bench.stats["failed_stores"] == 4 == bench.stats["stored_blocks"]


def test_what_waits_for_room_is_not_offered_before_it_is_computed_again():
    """A load has failed, so that the request holds less than it did."""
    bench = TierBench((2,))
    bench.add("aabbccdd", finishing=False)
    bench.step()
    offered, plan = [], bench.manager._stores.store
    bench.manager._stores.store = lambda offers, *rest: offered.extend(offers.positions) or plan(offers, *rest)
    (request,) = bench.manager._requests.values()
    assert len(request.due) == 2
    bench.parts.cpu.discard(*bench.catalog.rows_in(Tier.CPU))
    bench.manager._state.released += 1
    bench.manager.plan_store(request.request_id, 6, request.held_blocks, bench.now + 3.0)
    assert offered == [2]


def test_a_cpu_tier_of_one_slot_feeds_the_drive():
    bench = TierBench((1,), (32,))
    for prompt in ("aabb", "ccdd", "eeff"):
        bench.serve(prompt)
    assert bench.stats["demoted_blocks"] > 1


def test_what_something_queued_follows_stays_below_and_the_queued_copies_are_refused():
    """They are lost only when they leave memory, too, and are counted then."""
    bench = TierBench((32,), (64,), nvme_admission="all")
    bench.idle()
    bench.serve("aabbccddeeff")
    rows, waiting = bench.rows("aabbccddeeff"), bench.parts.dirty
    bench.parts.nvme.end(rows[:3:-1])
    bench.parts.cpu.offer(rows[4:])
    assert waiting.total == 2
    assert waiting.leaving_below(rows[3::-1]) == []
    assert waiting.total == 0 == bench.stats["evicted_unwritten.room"]
    assert waiting.leaving_below(rows[3::-1]) == rows[3::-1]
    bench.parts.cpu.offer(rows[4:])
    assert waiting.total == 0, "refused until they are used"
    assert bench.parts.cpu.offer_before_eviction(rows[:3:-1]) == rows[:3:-1]
    assert bench.stats["evicted_unwritten.room"] == 2
    bench.parts.cpu.touch(rows[:3:-1])
    bench.parts.cpu.offer(rows[4:])
    assert waiting.total == 2


def test_what_the_drive_has_no_room_for_may_leave_for_what_waits():
    """A copy is dirty when a block finds no room, and clean a step later: the drive has no room for
    it. It can leave then."""
    bench = TierBench((3,), (2,), nvme_admission="all", min_load_tokens=0)
    bench.idle()
    for _ in range(2):
        bench.serve("aabbcc")
        bench.idle(seconds=3.0)
    assert bench.held("aabbcc") == [True, True, False] and all(bench.held("aabbcc", Tier.CPU))
    for prompt in ("aabbcc", "aabbdd"):
        bench.add(prompt, finishing=False)
    for _ in range(6):
        bench.step(1, seconds=3.0)
    assert bench.held("aabbdd", Tier.CPU) == [True, True, True]
