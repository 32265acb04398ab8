# SPDX-License-Identifier: Apache-2.0
"""Units of several GPU blocks: each of these counts, wherever the engine may have taken one."""

from __future__ import annotations

import pytest
from support.fake_pool import FakePool
from support.manager_parts import Sizes, two_tiers
from support.small_engine import SmallEngine

from kvdisk.blocks import Slot, Tier, make_block_key
from kvdisk.geometry import Geometry, GroupGeometry, in_units
from kvdisk.manager.jobs import MoveDetail, StoreSources, Transfers
from kvdisk.manager.stores import _Offer
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
    left = stores._left_offer(_Offer(state.keys[0][1], state.keys[0][0], blocks, 0), state.keys[0], 1)
    assert stores._is_cached(left)
    bench.engine.pool.forget(blocks[lost])
    assert not stores._is_cached(left)


@pytest.mark.parametrize("lost", range(5))
def test_of_a_victim_what_the_window_has_passed_is_looked_at_block_by_block(bench, lost):
    """At 15 tokens it reads from the eighth on: the second unit begins before that."""
    request = bench.add("aabbccddeeffggz")
    bench.step()
    stores, keys = bench.manager._stores, bench.manager._requests[request.id].keys[1]
    table = list(request.table[1])
    bench.engine.pool.forget(table[lost])
    stores._leave_out_what_has_gone(GEOMETRY.groups[1], keys, table, 14)
    assert (table[lost] == 0) == (lost < 3), "what is read is the victim's own"
    (found,) = stores._gpu_blocks(1, table, (lost // 2,))
    assert bool(found) == (lost >= 3)


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
