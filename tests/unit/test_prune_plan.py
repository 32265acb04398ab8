# SPDX-License-Identifier: Apache-2.0
"""What ``kvdisk prune`` chooses."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from kvdisk.blocks import Slot, make_block_key
from kvdisk.cli.delete import Condition, HomeState, Plan, make_plan
from kvdisk.device.control import DriveName, HomeRecord, HomeSummary
from kvdisk.device.segment import SegmentFileSummary
from kvdisk.geometry import FORMAT_VERSION
from kvdisk.index.base import BlockColumns, BlockRecord, SegmentRecord
from kvdisk.index.reader_process import IndexContent

ONE, TWO = b"\x01" * 32, b"\x02" * 32
NOW_S = 10_000


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


def columns_of(blocks: list[BlockRecord]) -> BlockColumns:
    epochs, keys, slots, generations, parents, stored_s = zip(*sorted(blocks), strict=True)
    joined = [parent or b"" for parent in parents]
    return BlockColumns(
        np.array(epochs, np.uint64),
        list(keys),
        np.array([slot.segment for slot in slots], np.uint32),
        np.array([slot.index for slot in slots], np.uint32),
        np.array(generations, np.uint64),
        b"".join(joined),
        np.array(list(map(len, joined)), np.int64),
        np.array(stored_s, np.uint32),
    )


def home(
    name: str,
    last_use_s: int,
    blocks: list[BlockRecord] | None = None,
    *,
    sizes: dict[int, int] | None = None,
    unknown: tuple[int, ...] = (),
    alive: bool = False,
    fingerprint: bytes | None = ONE,
    why_whole: str = "",
) -> HomeState:
    """Segments of 100 bytes, and 50 bytes beside them. ``unknown``: segments that the index does
    not have."""
    sizes = sizes or dict.fromkeys(sorted({block.slot.segment for block in blocks or ()}), 8192)
    numbers = [*sizes, *unknown]
    record = None
    if fingerprint is not None:
        drives = (DriveName("a" * 32, ""),)
        record = HomeRecord(FORMAT_VERSION, fingerprint, {}, "", True, 1 << 40, last_use_s, 0, 0, "", drives)
    files = tuple(SegmentFileSummary(number, 0, 0, 100, 100) for number in numbers)
    summary = HomeSummary(name, Path("nowhere"), record, alive, 100 * len(numbers) + 50, files)
    records = tuple(SegmentRecord(segment, slot_bytes, 8) for segment, slot_bytes in sizes.items())
    index = (
        IndexContent(problem="damaged") if why_whole else IndexContent(records, columns_of(blocks) if blocks else None)
    )
    return HomeState(summary, index, why_whole)


def plan_of(*homes: HomeState, before_s: int | None = None, **asked: object) -> Plan:
    age_s = None if before_s is None else NOW_S - before_s
    return make_plan(Condition(older_than_s=age_s, **asked), homes, NOW_S)


def chosen(plan: Plan) -> list[tuple[str, bool, list[int], int]]:
    return [(one.id, one.whole, list(one.segments), len(plan.keys.get(one.id, []))) for one in plan.homes]


def ages(blocks: list[BlockRecord]) -> list[tuple[int, int]]:
    found = home("a", 1000, blocks).ages
    return list(zip(found.last_use_s.tolist(), found.needed_by.tolist(), strict=True))


def test_a_head_is_as_young_as_its_youngest_tail():
    young = BlockRecord(0, key(77), Slot(2, 0), 1, key(1), 900)
    assert ages([*chain([0, 0, 1], 100), young]) == [(900, 4), (900, 3), (100, 1), (900, 1)]
    block = chain([0, 0], 100)
    circle = [BlockRecord(0, key(8), Slot(0, 8), 1, key(9), 1), BlockRecord(0, key(9), Slot(0, 9), 1, key(8), 2)]
    other_epoch = block[1]._replace(epoch=5, stored_s=900)
    assert [last_use_s for last_use_s, _ in ages([*block, *circle, other_epoch])] == [100, 100, 1, 2, 900]


def test_whole_engine_stores_go_from_the_oldest_on():
    homes = [home("b", 300, chain([0], 1)), home("a", 200, chain([0, 1], 1)), home("c", 400, chain([0], 1))]
    assert chosen(plan_of(*homes, to_bytes=550)) == []
    assert chosen(plan_of(*homes, to_bytes=300)) == [("a", True, [0, 1], 0)]
    plan = plan_of(*homes, to_bytes=0)
    assert [(one.id, one.blocks, one.bytes) for one in plan.homes] == [("a", 2, 250), ("b", 1, 150), ("c", 1, 150)]
    assert plan.short_bytes == 0
    unreadable = home("x", 0, fingerprint=None, why_whole="unreadable")
    plan = plan_of(home("a", 200, chain([0], 1)), unreadable, to_bytes=199)
    assert chosen(plan) == [("x", True, [], 0)] and plan.homes[0].blocks is None
    damaged = home("d", 300, sizes={0: 8192}, why_whole="damaged")
    assert chosen(plan_of(home("a", 200, chain([0], 1)), damaged, to_bytes=150)) == [("a", True, [0], 0)], "enough"


def test_of_one_engine_store_the_segments_with_old_tails_go_first():
    young = chain([3, 4], 900, first=50)
    one = home("a", 1000, [*chain([0, 0, 1, 2], 100), *young])  # the head is needed by most
    assert chosen(plan_of(one, to_bytes=450)) == [("a", False, [2], 0)]
    assert chosen(plan_of(one, to_bytes=250)) == [("a", False, [0, 1, 2], 0)]
    assert chosen(plan_of(one, to_bytes=100)) == [("a", True, [0, 1, 2, 3, 4], 0)], "without segments it is nothing"


def test_slot_sizes_go_down_together():
    sizes = {segment: 8192 if segment < 6 else 12288 for segment in range(9)}
    blocks = [block for segment in sizes for block in chain([segment], 100 + segment, first=100 * segment)]
    (plan,) = plan_of(home("a", 1000, blocks, sizes=sizes), to_bytes=950 - 300).homes
    assert plan.segments == (0, 1, 6), "two of six and one of three"


def test_segments_that_the_index_does_not_know_go_with_any_cut():
    one = home("a", 1000, chain([0, 1, 2], 100), unknown=(7,))
    assert chosen(plan_of(one, to_bytes=350)) == [("a", False, [7], 0)]
    assert chosen(plan_of(one, to_bytes=250)) == [("a", False, [2, 7], 0)]


def test_what_cannot_be_cut_goes_whole_or_stays():
    one = home("a", 1000, sizes={0: 8192, 1: 8192}, why_whole="its index is damaged")
    plan = plan_of(one, to_bytes=200)
    assert chosen(plan) == [("a", True, [0, 1], 0)] and "as a whole: its index is damaged" in plan.notes[0]
    plan = plan_of(one, before_s=900)
    assert (plan.homes, plan.kept) == ([], ["engine store a stays as it is: its index is damaged"])
    assert chosen(plan_of(one, before_s=1001)) == [("a", True, [0, 1], 0)], "all in it is older"
    assert plan_of(home("x", 0, fingerprint=None, why_whole="?"), before_s=1 << 40).homes == []


def test_old_blocks_go_and_segments_that_have_no_others():
    blocks = [*chain([0, 0], 100), *chain([1, 2], 100, first=10), *chain([2], 900, first=20)]
    plan = plan_of(home("a", 1000, blocks), before_s=500)
    assert chosen(plan) == [("a", False, [0, 1], 1)]
    assert (plan.keys, plan.homes[0].blocks, plan.homes[0].bytes) == ({"a": [(0, key(11))]}, 4, 200)
    assert plan_of(home("a", 1000, blocks), before_s=50).homes == []
    assert chosen(plan_of(home("a", 1000, blocks), before_s=950)) == [("a", True, [0, 1, 2], 0)]
    assert plan_of(home("a", 1000), before_s=950).homes == [], "used since, and empty"
    assert chosen(plan_of(home("a", 1000), before_s=1001)) == [("a", True, [], 0)]


def test_of_two_conditions_both_hold():
    one = home("a", 1000, [*chain([0], 100), *chain([1], 200, first=10), *chain([2], 900, first=20)])
    plan = plan_of(one, to_bytes=0, before_s=500)
    assert (chosen(plan), plan.short_bytes) == ([("a", False, [0, 1], 0)], 150)
    plan = plan_of(one, to_bytes=250, before_s=500)
    assert (chosen(plan), plan.short_bytes) == ([("a", False, [0], 0)], 0)
    homes = [home("a", 200, chain([0], 1)), home("b", 100, chain([0], 1), fingerprint=TWO)]
    assert chosen(plan_of(*homes, namespace=ONE)) == [("a", True, [0], 0)]
    assert chosen(plan_of(*homes, namespace=ONE, to_bytes=299)) == [("a", True, [0], 0)]
    assert len(plan_of(*homes).homes) == 2


def test_live_engines_are_named_where_their_stores_would_have_to_change():
    homes = [home("live", 100, chain([0], 100), alive=True), home("stopped", 200, chain([0], 150))]
    for asked, expected in [
        ({}, ["live"]),
        ({"to_bytes": 150}, []),
        ({"to_bytes": 149}, ["live"]),
        ({"before_s": 50}, []),
        ({"before_s": 120}, ["live"]),
        ({"namespace": TWO}, []),
    ]:
        plan = plan_of(*homes, **asked)
        assert plan.in_use == expected, asked
        assert all(one.id != "live" for one in plan.homes)
    assert plan_of(*homes, to_bytes=100).short_bytes == 50
