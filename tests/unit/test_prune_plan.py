# SPDX-License-Identifier: Apache-2.0
"""What ``kvdisk prune`` chooses."""

from __future__ import annotations

from collections.abc import Iterable

from kvdisk.blocks import Slot, make_block_key
from kvdisk.cli.delete import HomePlan, HomeState, Wish, _ages, make_plan
from kvdisk.device.control import DriveName, HomeRecord
from kvdisk.geometry import FORMAT_VERSION
from kvdisk.index.base import BlockRecord

ONE, TWO = b"\x01" * 32, b"\x02" * 32


def record(last_use_s: int, fingerprint: bytes = ONE) -> HomeRecord:
    return HomeRecord(
        FORMAT_VERSION, fingerprint, {}, "", True, 1 << 40, last_use_s, 0, 0, "", (DriveName("a" * 32, ""),)
    )


def key(number: int) -> bytes:
    return make_block_key(number.to_bytes(4, "big") * 8, 0)


def chain(segments: Iterable[int], stored_s: int, first: int = 0) -> list[BlockRecord]:
    """A block in each of these segments, each after the one before."""
    return [
        BlockRecord(
            0, key(first + at), Slot(segment, first + at), at + 1, key(first + at - 1) if at else None, stored_s
        )
        for at, segment in enumerate(segments)
    ]


def home(
    name: str, last_use_s: int, blocks: list[BlockRecord] | None = None, *, sizes: dict[int, int] | None = None, **more
) -> HomeState:
    """Segments of 100 bytes, and 50 bytes beside them."""
    used = sorted({block.slot.segment for block in blocks or ()} | set(sizes or {}))
    given = {"alive": False, "blocks": blocks, "record": record(last_use_s)} | more
    return HomeState(
        name,
        allocated_bytes=100 * len(used) + 50,
        segment_bytes=dict.fromkeys(used, 100),
        slot_bytes={segment: (sizes or {}).get(segment, 8192) for segment in used},
        **given,
    )


def chosen(plans: list[HomePlan]) -> list[tuple[str, bool, list[int], int]]:
    return [(one.home.id, one.whole, sorted(one.segments), len(one.keys)) for one in plans]


def test_a_head_is_as_young_as_its_youngest_tail():
    old = chain([0, 0, 1], 100)
    young = BlockRecord(0, key(77), Slot(2, 0), 1, key(1), 900)
    ages = {age.block.key: (age.last_use_s, age.needed_by) for age in _ages([*old, young])}
    assert ages == {key(0): (900, 4), key(1): (900, 3), key(2): (100, 1), key(77): (900, 1)}


def test_epochs_are_apart_and_a_chain_in_a_circle_does_no_harm():
    block = chain([0, 0], 100)
    other = block[1]._replace(epoch=5, stored_s=900)
    circle = [BlockRecord(0, key(8), Slot(0, 8), 1, key(9), 1), BlockRecord(0, key(9), Slot(0, 9), 1, key(8), 2)]
    assert [age.last_use_s for age in _ages([*block, other, *circle])] == [100, 100, 900, 1, 2]


def test_whole_homes_go_from_the_oldest_on():
    homes = [home("b", 300, chain([0], 1)), home("a", 200, chain([0, 1], 1)), home("c", 400, chain([0], 1))]
    assert chosen(make_plan(Wish(to_bytes=550), homes).homes) == []
    assert chosen(make_plan(Wish(to_bytes=300), homes).homes) == [("a", True, [0, 1], 0)]
    plan = make_plan(Wish(to_bytes=0), homes)
    assert ([one.home.id for one in plan.homes], plan.byte_count, plan.block_count) == (["a", "b", "c"], 550, 4)
    assert plan.short_bytes == 0


def test_what_nobody_can_read_goes_first():
    homes = [home("a", 200, chain([0], 1)), home("x", 0, None, record=None, why_whole="unreadable")]
    plan = make_plan(Wish(to_bytes=199), homes)
    assert chosen(plan.homes) == [("x", True, [], 0)]
    assert plan.homes[0].block_count is None


def test_of_one_home_the_segments_with_old_tails_go_first():
    young = chain([3, 4], 900, first=50)
    prompt = chain([0, 0, 1, 2], 100)  # its head is needed by most
    plan = make_plan(Wish(to_bytes=450), [home("a", 1000, [*prompt, *young])])
    assert chosen(plan.homes) == [("a", False, [2], 0)]
    plan = make_plan(Wish(to_bytes=250), [home("a", 1000, [*prompt, *young])])
    assert chosen(plan.homes) == [("a", False, [0, 1, 2], 0)]
    plan = make_plan(Wish(to_bytes=100), [home("a", 1000, [*prompt, *young])])
    assert chosen(plan.homes) == [("a", True, [0, 1, 2, 3, 4], 0)], "without segments a home is nothing"


def test_slot_sizes_go_down_together():
    sizes = {segment: 8192 if segment < 6 else 12288 for segment in range(9)}
    blocks = [block for segment in sizes for block in chain([segment], 100 + segment, first=100 * segment)]
    (plan,) = make_plan(Wish(to_bytes=950 - 300), [home("a", 1000, blocks, sizes=sizes)]).homes
    assert sorted(plan.segments) == [0, 1, 6], "two of six and one of three"


def test_segments_that_the_index_does_not_know_go_with_any_cut():
    one = home("a", 1000, chain([0, 1, 2], 100))
    unknown = {**one.segment_bytes, 7: 100}
    one = HomeState("a", one.record, False, 450, one.blocks, unknown, one.slot_bytes)
    assert chosen(make_plan(Wish(to_bytes=350), [one]).homes) == [("a", False, [7], 0)]
    assert chosen(make_plan(Wish(to_bytes=250), [one]).homes) == [("a", False, [2, 7], 0)]


def test_a_home_that_cannot_be_cut_goes_whole_or_stays():
    one = home("a", 1000, None, sizes={0: 8192, 1: 8192}, why_whole="its index cannot be read (it is missing)")
    assert chosen(make_plan(Wish(to_bytes=200), [one]).homes) == [("a", True, [0, 1], 0)]
    plan = make_plan(Wish(before_s=900), [one])
    assert (plan.homes, plan.kept) == ([], ["home a stays as it is: its index cannot be read (it is missing)"])
    assert chosen(make_plan(Wish(before_s=1001), [one]).homes) == [("a", True, [0, 1], 0)], "all in it is older"
    assert make_plan(Wish(before_s=1 << 40), [home("x", 0, record=None, why_whole="?")]).homes == []


def test_old_blocks_go_and_segments_that_have_no_others():
    blocks = [*chain([0, 0], 100), *chain([1, 2], 100, first=10), *chain([2], 900, first=20)]
    plan = make_plan(Wish(before_s=500), [home("a", 1000, blocks)])
    assert chosen(plan.homes) == [("a", False, [0, 1], 1)]
    (one,) = plan.homes
    assert (one.keys, one.block_count, one.byte_count) == (((0, key(11)),), 4, 200)
    assert make_plan(Wish(before_s=50), [home("a", 1000, blocks)]).homes == []
    assert chosen(make_plan(Wish(before_s=950), [home("a", 1000, blocks)]).homes) == [("a", True, [0, 1, 2], 0)]
    assert make_plan(Wish(before_s=950), [home("a", 1000, [])]).homes == [], "used since, and empty"
    assert chosen(make_plan(Wish(before_s=1001), [home("a", 1000, [])]).homes) == [("a", True, [], 0)]


def test_both_are_an_and():
    blocks = [*chain([0], 100), *chain([1], 200, first=10), *chain([2], 900, first=20)]
    both = Wish(to_bytes=0, before_s=500)
    plan = make_plan(both, [home("a", 1000, blocks)])
    assert (chosen(plan.homes), plan.short_bytes) == ([("a", False, [0, 1], 0)], 150)
    plan = make_plan(both._replace(to_bytes=250), [home("a", 1000, blocks)])
    assert (chosen(plan.homes), plan.short_bytes) == ([("a", False, [0], 0)], 0)


def test_a_namespace_is_left_alone_unless_it_is_the_one():
    homes = [home("a", 200, chain([0], 1)), home("b", 100, chain([0], 1), record=record(100, TWO))]
    assert chosen(make_plan(Wish(fingerprint=ONE), homes).homes) == [("a", True, [0], 0)]
    assert chosen(make_plan(Wish(fingerprint=ONE, to_bytes=299), homes).homes) == [("a", True, [0], 0)]
    assert len(make_plan(Wish(), homes).homes) == 2


def test_live_homes_are_named_where_they_would_have_to_change():
    homes = [home("live", 100, chain([0], 100), alive=True), home("orphan", 200, chain([0], 150))]
    for wish, expected in [
        (Wish(), ["live"]),
        (Wish(to_bytes=150), []),
        (Wish(to_bytes=149), ["live"]),
        (Wish(before_s=50), []),
        (Wish(before_s=120), ["live"]),
        (Wish(fingerprint=TWO), []),
    ]:
        plan = make_plan(wish, homes)
        assert [one.id for one in plan.in_use] == expected, wish
        assert all(not one.home.alive for one in plan.homes)
    assert make_plan(Wish(to_bytes=100), homes).short_bytes == 50
