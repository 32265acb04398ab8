# SPDX-License-Identifier: Apache-2.0
"""Units of several GPU blocks: each of these counts, wherever the engine may have taken one."""

from __future__ import annotations

import pytest
from support.fake_pool import FakePool
from support.manager_parts import Sizes, two_tiers
from support.small_engine import SmallEngine
from tier_bench import TierBench

from kvdisk.blocks import Slot, Tier, make_block_key
from kvdisk.geometry import Geometry, GroupGeometry, in_units
from kvdisk.manager.copies import Offers
from kvdisk.manager.free_units import FreeUnits
from kvdisk.manager.jobs import MoveDetail, StoreSources, Transfers
from kvdisk.manager.requests import BlockKeys
from kvdisk.messages import JobKind, Move, Reason

WINDOW = GroupGeometry(1, 2, 4096, window_tokens=9)
GEOMETRY = Geometry(in_units((GroupGeometry(0, 2, 4096), WINDOW), 4), 1, 2)
SIZES = Sizes(GEOMETRY, two_tiers(nvme_admission="all", store_decode=True), 40, (6,), (4,), 2, ("aabb",))


@pytest.fixture
def bench() -> SmallEngine:
    return SmallEngine(SIZES)


@pytest.mark.parametrize("lost", [0, 1])
def test_what_a_request_has_left_is_stored_only_while_all_of_it_is_cached(bench, lost):
    request = bench.add("aabbccddz")
    bench.step()
    stores, state = bench.manager._stores, bench.manager._requests[request.id]
    blocks = tuple(request.table[0][2:4])
    left = Offers([state.keys[0][1]], [state.keys[0][0]], gpu_blocks=[blocks], gpu_keys=[state.keys[0].of_gpu(1)])
    assert stores._offers.cached(left) == [0]
    bench.engine.pool.forget(blocks[lost])
    assert stores._offers.cached(left) == []


@pytest.mark.parametrize("lost", range(5))
def test_of_a_victim_what_the_window_has_passed_is_looked_at_block_by_block(bench, lost):
    """At 15 tokens it reads from the eighth on: the second unit begins before that."""
    request = bench.add("aabbccddeeffggz")
    bench.step()
    victims, state = bench.manager._victims, bench.manager._requests[request.id]
    bench.engine.pool.forget(request.table[1][lost])
    offers = victims._offers.of_request(state, [(1, 0), (1, 1), (1, 2)], state.held_blocks)
    kept = victims._still_held(offers, state, ()).positions
    assert state.held_tokens == 15 and offers.positions == [0, 1, 2]
    assert (lost // 2 in kept) == (lost >= 3), "what is read is the victim's own"
    assert [at for at in kept if at != lost // 2] == [at for at in (0, 1, 2) if at != lost // 2]


@pytest.mark.parametrize("overwritten", range(5))
def test_of_a_victim_no_unit_is_saved_a_block_of_which_is_written_to(bench, overwritten):
    request = bench.add("aabbccddeeffggz")
    bench.step()
    victims, state = bench.manager._victims, bench.manager._requests[request.id]
    offers = victims._offers.of_request(state, [(1, 0), (1, 1), (1, 2)], state.held_blocks)
    kept = victims._still_held(offers, state, {request.table[1][overwritten]}).positions
    assert kept == [at for at in (0, 1, 2) if at != overwritten // 2]


@pytest.mark.parametrize("taken", [1, 2, 3])
def test_a_store_that_loses_any_block_of_a_unit_fails_for_the_whole(taken):
    pool, transfers = FakePool(5, lambda _: None), Transfers(1)
    sources = StoreSources(pool)
    own = pool.take(3)
    moves = [
        Move(make_block_key(bytes([at]), 0), 1, blocks, {Tier.CPU: Slot(0, at)})
        for at, blocks in enumerate([(own[0], own[1]), (own[2],)])
    ]
    record = transfers.add(JobKind.STORE, moves, [MoveDetail(at, 0, at) for at in range(2)])
    sources.add(record)
    pool.free_blocks([own[taken - 1]])
    pool.take(2)
    assert sources.take_fence({own[taken - 1]}) == (record.job.id,)
    assert record.failed == {(taken - 1) // 2: Reason.OVERWRITTEN}
    sources.end(record)
    assert len(sources) == 0


# -- units of which the engine frees the blocks one by one -----------------------------------------

HASHES = [bytes([at]) for at in range(24)]


def units_of(pool: FakePool) -> list[bytes | None]:
    """Return the free blocks' keys as a policy sees them."""
    return [block.key for block in pool.iter_free_blocks()]


def test_a_free_block_goes_by_its_unit_while_all_of_that_is_cached():
    pool = FakePool(9, lambda _: None)
    units, keys = FreeUnits(pool, GEOMETRY), BlockKeys(HASHES[:7], GEOMETRY.groups[0], 2)
    blocks = pool.take(7)
    for at, block in enumerate(blocks):
        pool.cache(make_block_key(HASHES[at], 0), block)
    pool.free_blocks(reversed(blocks))
    assert set(units_of(units)) == {None}, "nobody has reached a unit"
    units.reached(0, keys, 0, 3)
    assert units_of(units) == [None, None, *(keys[at] for at in (2, 2, 1, 1, 0, 0))]
    assert units.find(keys[1]) == (tuple(blocks[2:4]), keys.of_gpu(1))
    pool.touch(blocks[:3])
    assert units_of(units).count(keys[1]) == 1, "the other block of it is in use, and there"
    assert units.find(keys[1])[0] == tuple(blocks[2:4])
    pool.forget(blocks[2])
    assert keys[1] not in units_of(units) and units.find(keys[1]) == ((), ())
    units.clear()
    assert set(units_of(units)) == {None}


def test_of_two_units_that_share_a_block_each_is_found():
    """The prompts part within them."""
    pool = FakePool(9, lambda _: None)
    units = FreeUnits(pool, GEOMETRY)
    one, other = (BlockKeys([b"same", last], GEOMETRY.groups[0], 2) for last in (b"one", b"other"))
    for block, name in enumerate((b"same", b"one", b"other"), start=1):
        pool.cache(make_block_key(name, 0), block)
    units.reached(0, one, 0, 1)
    units.reached(0, other, 0, 1)
    assert units_of(units)[:3] == [other[0], one[0], other[0]]
    assert [units.find(keys[0])[0] for keys in (one, other)] == [(1, 2), (1, 3)]


def test_what_is_known_of_units_is_bounded():
    pool = FakePool(5, lambda _: None)
    units, hashes = FreeUnits(pool, GEOMETRY), [number.to_bytes(2, "big") for number in range(1000)]
    for at in range(500):
        units.reached(0, BlockKeys(hashes, GEOMETRY.groups[0], 2), at, at + 1)
    assert len(units._unit_of) == 2 * len(units._members) == 2 * pool.block_count


@pytest.mark.parametrize("tier", [Tier.CPU, Tier.NVME])
def test_spillover_stores_units_before_the_engine_takes_one_of_their_blocks(tier):
    slots = {Tier.CPU: ((40,), ()), Tier.NVME: ((), (40,))}[tier]
    geometry = Geometry(GEOMETRY.groups[:1], 1, 2)
    bench = TierBench(*slots, geometry=geometry, gpu_blocks=13, store_policy="spillover")
    bench.serve("zzx", cold=True)  # opens a file
    for prompt in ("aabbccddeet", "ffgghhiijjt", "kkllmmnnoot"):
        bench.serve(prompt)
    rows = [bench.catalog.find(make_block_key(name, 0)) for name in (b"aabb", b"aabbccdd")]
    assert all(row >= 0 and bench.catalog.readable(row, tier) for row in rows)
    bench.serve("aabbccddeet", cold=True)
    assert bench.stats["loaded_blocks"] == 2


def test_of_a_load_each_block_of_a_unit_counts_as_taken(monkeypatch):
    bench, asked = TierBench((16,), geometry=Geometry(GEOMETRY.groups[:1], 1, 2), gpu_blocks=60), []
    bench.serve("aabbccddeeffgghhx")
    monkeypatch.setattr(bench.manager._stores._store_policy, "free_offers", lambda _: asked.append(1) or ())
    monkeypatch.setattr(bench.engine.pool, "step_blocks", 8)
    bench.serve("aabbccddeeffgghhx", cold=True)
    assert bench.stats["loaded_blocks"] == 4 and asked == [1]


def test_a_unit_that_has_lost_a_block_before_there_was_room_is_not_stored():
    geometry = Geometry(GEOMETRY.groups[:1], 1, 2)
    bench = TierBench((40,), geometry=geometry, gpu_blocks=13, store_policy="spillover")
    bench.serve("aabbccddeet")
    keys = [make_block_key(name, 0) for name in (b"aa", b"aabb", b"aabbcc", b"aabbccdd")]
    bench.engine.pool.forget(bench.engine.pool.find(keys[0]))
    for prompt in ("ffgghhiijjt", "kkllmmnnoot"):
        bench.serve(prompt)
    assert [bench.catalog.find(keys[at]) >= 0 for at in (1, 3)] == [False, True]
