# SPDX-License-Identifier: Apache-2.0
"""What ``kvdisk prune`` chooses."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from kvdisk.blocks import Slot, make_block_key
from kvdisk.cli.delete import HomeState, Plan, make_plan
from kvdisk.device.control import DriveName, HomeRecord, HomeSummary
from kvdisk.device.segment import SegmentFileSummary
from kvdisk.geometry import FORMAT_VERSION
from kvdisk.index.base import BlockRecord, SegmentRecord
from kvdisk.index.memory_index import MemoryIndex
from kvdisk.index.reader_process import IndexContent

ONE, TWO = b"\x01" * 32, b"\x02" * 32
NOW_S = 10_000


def key(number: int) -> bytes:
    return make_block_key(number.to_bytes(4, "big") * 8, 0)


def chain(segments: Iterable[int], stored_s: int, first: int = 0) -> list[BlockRecord]:
    """A block in each of these segments, each after the one before."""
    parents = [None, *(key(first + at) for at, _ in enumerate(segments))]
    return [
        BlockRecord(0, key(first + at), Slot(segment, first + at), at + 1, parents[at], stored_s)
        for at, segment in enumerate(segments)
    ]


def home(
    name: str, last_use_s: int, blocks: list[BlockRecord] | None = None, *, segments: tuple[int, ...] = (),
    unknown: tuple[int, ...] = (), alive: bool = False, fingerprint: bytes | None = ONE, why_whole: str = "",
) -> HomeState:  # fmt: skip
    """Segments of 100 bytes, and 50 bytes beside them. ``unknown``: segments that the index does
    not have."""
    known = {*segments, *(block.slot.segment for block in blocks or ())}
    numbers = [*sorted(known), *unknown]
    drives = (DriveName("a" * 32, ""),)
    record = HomeRecord(FORMAT_VERSION, fingerprint or b"", {}, "", True, 1 << 40, last_use_s, 0, 0, "", drives)
    files = tuple(SegmentFileSummary(number, 0, 0, 100, 100) for number in numbers)
    summary = HomeSummary(name, Path("nowhere"), record if fingerprint else None, alive, 100 * len(numbers) + 50, files)
    index = MemoryIndex()
    index.put(blocks or [])
    for segment in known:
        index.put_segment(SegmentRecord(segment, 8192, 8))
    index.commit()
    content = IndexContent(tuple(index.segments()), index.block_columns())
    return HomeState(summary, IndexContent(problem="damaged") if why_whole else content, why_whole)


def plan_of(homes: list[HomeState], before_s: int | None = None, **asked: object) -> Plan:
    return make_plan(homes, NOW_S, older_than_s=None if before_s is None else NOW_S - before_s, **asked)


ABC = [home("b", 300, chain([0], 1)), home("a", 200, chain([0, 1], 1)), home("c", 400, chain([0], 1))]
UNREADABLE = home("x", 0, fingerprint=None, why_whole="unreadable")
DAMAGED = home("d", 300, segments=(0, 1), why_whole="its index is damaged")
YOUNG_TAIL = home("a", 1000, [*chain([0, 0, 1, 2], 100), *chain([3, 4], 900, first=50)])
UNKNOWN = home("a", 1000, [*chain([0, 1, 2], 100), *chain([3], 900, first=10)], unknown=(7,))
EMPTY = home("a", 1000, [*chain([0], 100), *chain([1], 900, first=10)], segments=(0, 1, 2))
MIXED = home("a", 1000, [*chain([0, 0], 100), *chain([1, 2], 100, first=10), *chain([2], 900, first=20)])
AGES = home("a", 1000, [*chain([0], 100), *chain([1], 200, first=10), *chain([2], 900, first=20)])
TREE = home(
    "a", 1000,
    [
        *chain([0, 1], 100), BlockRecord(0, key(77), Slot(2, 0), 1, key(1), 900),
        BlockRecord(0, key(8), Slot(3, 8), 1, key(9), 1), BlockRecord(0, key(9), Slot(3, 9), 1, key(8), 2),
    ],
)  # fmt: skip
OTHERS = [home("a", 200, chain([0], 1)), home("b", 100, chain([0], 1), fingerprint=TWO)]


@pytest.mark.parametrize(
    ("homes", "asked", "chosen"),
    [
        # Whole engine stores, from that which was used longest ago on.
        (ABC, {"to_bytes": 550}, []),
        (ABC, {"to_bytes": 300}, [("a", True, [0, 1], 0)]),
        (ABC, {"to_bytes": 0}, [("a", True, [0, 1], 0), ("b", True, [0], 0), ("c", True, [0], 0)]),
        ([home("a", 200, chain([0], 1)), UNREADABLE], {"to_bytes": 199}, [("x", True, [], 0)]),
        ([home("a", 200, chain([0], 1)), DAMAGED], {"to_bytes": 250}, [("a", True, [0], 0)]),
        # Of one, the segments with old tails first; a head is needed by all that follow.
        ([YOUNG_TAIL], {"to_bytes": 450}, [("a", False, [2], 0)]),
        ([YOUNG_TAIL], {"to_bytes": 250}, [("a", False, [0, 1, 2], 0)]),
        ([YOUNG_TAIL], {"to_bytes": 100}, [("a", True, [0, 1, 2, 3, 4], 0)]),
        # Segments that the index does not know go with any cut, those without blocks for room.
        ([UNKNOWN], {"to_bytes": 450}, [("a", False, [7], 0)]),
        ([UNKNOWN], {"to_bytes": 350}, [("a", False, [2, 7], 0)]),
        ([UNKNOWN], {"before_s": 500}, [("a", False, [0, 1, 2, 7], 0)]),
        ([EMPTY], {"to_bytes": 250}, [("a", False, [2], 0)]),
        ([EMPTY], {"before_s": 500}, [("a", False, [0], 0)]),
        # What cannot be cut goes as a whole, or stays.
        ([DAMAGED], {"to_bytes": 200}, [("d", True, [0, 1], 0)]),
        ([DAMAGED], {"before_s": 200}, []),
        ([DAMAGED], {"before_s": 301}, [("d", True, [0, 1], 0)]),
        ([UNREADABLE], {"before_s": 1 << 40}, []),
        # Old blocks, and segments that have no others.
        ([MIXED], {"before_s": 50}, []),
        ([MIXED], {"before_s": 500}, [("a", False, [0, 1], 1)]),
        ([MIXED], {"before_s": 950}, [("a", True, [0, 1, 2], 0)]),
        ([home("a", 1000)], {"before_s": 950}, []),
        ([home("a", 1000)], {"before_s": 1001}, [("a", True, [], 0)]),
        # A head is as young as its youngest tail, and a circle no harm.
        ([TREE], {"before_s": 500}, [("a", False, [3], 0)]),
        # Of several conditions all hold.
        ([AGES], {"to_bytes": 0, "before_s": 500}, [("a", False, [0, 1], 0)]),
        ([AGES], {"to_bytes": 250, "before_s": 500}, [("a", False, [0], 0)]),
        (OTHERS, {"namespace": ONE}, [("a", True, [0], 0)]),
        (OTHERS, {"namespace": ONE, "to_bytes": 299}, [("a", True, [0], 0)]),
        (OTHERS, {}, [("b", True, [0], 0), ("a", True, [0], 0)]),
    ],
)
def test_what_goes(homes, asked, chosen):
    """Id, whether it goes as a whole, segments, and how many blocks of other segments."""
    plan = plan_of(homes, **asked)
    assert [
        (one.id, one.whole, list(one.segments), len(plan.keys.get(one.id, []))) for one in plan.engine_stores
    ] == chosen


@pytest.mark.parametrize("last_use_s", [1000, NOW_S + 86_400])
def test_what_has_a_time_that_is_still_to_come_stays_and_is_said(last_use_s):
    """Its clock was ahead, or the one of this host is behind: nobody knows how old it is."""
    ahead = home("a", last_use_s, [*chain([0], 100), *chain([1], NOW_S + 86_400, first=10), *chain([2], 200, first=20)])
    plan = plan_of([ahead, home("b", NOW_S - 10, chain([0], NOW_S - 10))], before_s=500)
    assert [one.segments for one in plan.engine_stores] == [(0, 2)]
    assert plan.kept == [
        "engine store a: kept is 1 block whose time is still to come: a clock was ahead, or this one is behind"
    ]


def test_what_is_said_of_it():
    plan = plan_of([MIXED], before_s=500)
    assert (plan.keys, plan.engine_stores[0].blocks, plan.engine_stores[0].bytes) == ({"a": [(0, key(11))]}, 4, 200)
    plan = plan_of(ABC, to_bytes=0)
    assert [(one.id, one.blocks, one.bytes) for one in plan.engine_stores] == [
        ("a", 2, 250),
        ("b", 1, 150),
        ("c", 1, 150),
    ]
    assert plan_of([AGES], to_bytes=0, before_s=500).short_bytes == 150
    live = [home("live", 100, chain([0], 100), alive=True), home("stopped", 200, chain([0], 150))]
    found = [(plan.in_use, plan.short_bytes) for plan in (plan_of(live, to_bytes=150), plan_of(live, to_bytes=100))]
    assert found == [([], 0), (["live"], 50)]
    assert [plan_of(live, before_s=before_s).in_use for before_s in (50, 120)] == [[], ["live"]]
    plan = plan_of([DAMAGED], to_bytes=200)
    assert plan.engine_stores[0].blocks is None and "as a whole: its index is damaged" in plan.notes[0]
    assert plan_of([DAMAGED], before_s=200).kept == ["engine store d stays as it is: its index is damaged"]
