# SPDX-License-Identifier: Apache-2.0
"""The few blocks that each of many requests fills in a step are one offer, and one job: each
request keeps what became of its own."""

from __future__ import annotations

from tier_bench import GEOMETRY, TierBench

from kvdisk.blocks import Tier
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.manager import stores
from kvdisk.messages import JobKind, Reason

PROMPTS = ("aabb", "ccdd", "eeff")
TWO_GROUPS = Geometry((GroupGeometry(0, 2, 4096), GroupGeometry(1, 2, 8192)), 1, 2)


def bench_of(slots: tuple[int, ...] = (20,), geometry: Geometry = GEOMETRY, **how: object) -> TierBench:
    return TierBench(slots, geometry=geometry, gpu_blocks=200, min_load_tokens=0, store_decode=True, **how)


def stores_of(bench: TierBench) -> list[list[str]]:
    """Return the keys of each store that is out."""
    records = bench.parts.transfers._records.values()
    return [
        [move.key[:-2].decode() for move in record.job.moves] for record in records if record.job.kind is JobKind.STORE
    ]


def test_what_many_requests_fill_in_a_step_is_one_job():
    bench = bench_of()
    for prompt in PROMPTS:
        bench.add(prompt, finishing=False)
    bench.step(work=False)
    assert stores_of(bench) == [["aa", "aabb", "cc", "ccdd", "ee", "eeff"]]
    bench.step()
    assert all(bench.held(prompt, Tier.CPU) == [True, True] for prompt in PROMPTS)


def test_what_lies_beside_each_other_in_slots_is_whose_it_was():
    """A job has its moves group by group."""
    bench = bench_of((20, 20), TWO_GROUPS)
    for prompt in PROMPTS:
        bench.add(prompt, finishing=False)
    bench.step(work=False)
    (record,) = bench.parts.transfers._records.values()
    asked = {request.request_id: request for request in bench.manager._requests.values()}
    for move, detail, owner in zip(record.job.moves, record.details, record.owners, strict=True):
        assert asked[owner].keys[detail.group][detail.position] == move.key


def test_more_than_a_job_may_have_are_several_jobs(monkeypatch):
    monkeypatch.setattr(stores, "_TOGETHER", 4)
    bench = bench_of()
    for prompt in (*PROMPTS, "gghhiijjkk"):
        bench.add(prompt, finishing=False)
    bench.step(work=False)
    assert [len(keys) for keys in stores_of(bench)] == [4, 2, 4], "a long one's is its own"


def test_what_two_requests_fill_at_once_is_stored_once():
    bench = bench_of()
    for _ in range(2):
        bench.add("aabb", finishing=False)
    bench.add("ccdd", finishing=False)
    bench.step(work=False)
    assert sorted(key for keys in stores_of(bench) for key in keys) == ["aa", "aabb", "cc", "ccdd"]
    bench.step()
    assert bench.stats["stored_blocks"] == 4


def test_what_has_failed_is_offered_again_for_its_own_request():
    bench = bench_of()
    first, second, third = (bench.add(prompt, finishing=False) for prompt in PROMPTS)
    bench.step(work=False)
    (job_id,) = bench.rank.runnable
    works = bench.rank._works[job_id]
    for way in works.open_ways[1:4]:
        works.fail(way, Reason.IO_ERROR)
    bench.step()
    asked = [bench.manager._requests[each.id] for each in (first, second, third)]
    assert [each.due for each in asked] == [[(0, 1)], [(0, 0), (0, 1)], []]
    assert asked[2].back_off.seconds == 0.0 < min(each.back_off.seconds for each in asked[:2])
    for _ in range(3):
        bench.step(1, seconds=3.0)
    assert bench.stats["failed_stores"] == 3 and bench.stats["stored_blocks"] == 6


def test_an_ended_request_leaves_the_others_what_has_failed_of_them():
    bench = bench_of()
    first, second = (bench.add(prompt, finishing=False) for prompt in PROMPTS[:2])
    bench.step(work=False)
    (job_id,) = bench.rank.runnable
    bench.rank.fail_job(job_id, Reason.IO_ERROR)
    bench.engine.abort(first)
    for _ in range(3):
        bench.step(1, seconds=3.0)
    assert bench.held(PROMPTS[0], Tier.CPU) == [False, False]
    assert bench.held(PROMPTS[1], Tier.CPU) == [True, True]
    assert not bench.manager._requests[second.id].due


def test_each_waits_for_room_by_itself_from_its_first_block_without_it_on():
    bench = bench_of((3,))
    asked = [bench.add(prompt, finishing=False) for prompt in PROMPTS]
    bench.step()
    bench.catalog.pin(bench.catalog.rows_in(Tier.CPU), Tier.CPU)
    due = [bench.manager._requests[each.id].due for each in asked]
    assert due == [[], [(0, 1)], [(0, 0), (0, 1)]]


def test_a_tenant_that_has_its_share_does_not_stand_before_others():
    bench = bench_of((12,), salt_share=0.25)
    for prompt in ("aabbccddee", "ffgg"):  # a tenant is the first letter
        bench.add(prompt, finishing=False)
    bench.step(20)
    assert bench.held("aabbccddee", Tier.CPU) == [True, True, True, False, False]
    assert bench.held("ffgg", Tier.CPU) == [True, True]
