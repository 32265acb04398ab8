# SPDX-License-Identifier: Apache-2.0
"""Room follows use: which size class has how much of the NVMe tier, and a drive that has less than
the cap."""

from __future__ import annotations

import logging
from collections import Counter
from itertools import islice, pairwise, product

import pytest
from support.manager_parts import layout_of
from tier_bench import TierBench

from kvdisk.blocks import Tier, make_block_key
from kvdisk.config import EVICTIONS, Config
from kvdisk.engine_store import nvme_layout_in
from kvdisk.geometry import Geometry, GroupGeometry, segment_charge_bytes
from kvdisk.index.base import SegmentRecord
from kvdisk.manager import bounds
from kvdisk.manager.segments import NvmeLayout
from kvdisk.messages import JobKind, Reason
from kvdisk.recovery import excess

MIB = 1 << 20
TWO_SIZES = Geometry((GroupGeometry(0, 2, 4096), GroupGeometry(1, 4, 12288)), 1, 2)
"""A short prompt has blocks of the first group only, as one that is over before a state is kept."""
SMALL, LARGE = range(2)
SHORT = [f"{first}{second}x" for first, second in product("abcdefgh", "ijklmnop")]
LONG = [f"{first}{second}yyy" for first, second in product("ABCDEFGH", "IJKLMNOP")]


class Store(TierBench):
    """An engine whose prompts have blocks of two sizes, and four segments for each if they were
    dealt out alike. ``room_bytes``: what the drive has room for; None: for all."""

    room_bytes: int | None = None

    def __init__(self, **how: object) -> None:
        super().__init__((16, 16), (8, 4), geometry=TWO_SIZES, segments=4, nvme_admission="all", **how)
        self.failed = 0

    @property
    def nvme(self):
        return self.parts.nvme

    def work(self) -> None:
        """Work all off, but make no segment that the drive has no room for."""
        while self.room_bytes is not None and self.rank.runnable:
            job_id = self.rank.runnable[0]
            job = self.parts.transfers._records[job_id].job
            if job.kind is JobKind.OPEN_SEGMENT and job.segment.create and self.on_drive() > self.room_bytes:
                self.failed += 1
                self.rank.run_leg(job_id, 0, Reason.NO_SPACE)
            else:
                self.rank.run_job(job_id)
        super().work()

    def on_drive(self) -> int:
        """Bytes of the files that there are, and of those that are to be made."""
        return self.nvme.segments.held_bytes

    def serve(self, prompts) -> None:
        for prompt in prompts:
            self.add(prompt)
            self.finish()
            self.engine.pool.forget_all()

    def slots(self, size_class: int) -> int:
        return self.nvme.pool.total[size_class]

    def is_held(self, prompt: str) -> bool:
        """Whether NVMe has all full blocks of a prompt."""
        return all(
            (row := self.catalog.find(make_block_key(prompt[:end].encode(), group.group))) >= 0
            and self.catalog.readable(row, Tier.NVME)
            for group in TWO_SIZES.groups
            for end in range(group.block_tokens, len(prompt) + 1, group.block_tokens)
        )


def test_short_prompts_use_the_room_of_blocks_that_they_do_not_have():
    """With a fixed split they had half of the store, and the rest stayed empty."""
    store = Store()
    store.serve(SHORT)
    layout = layout_of(store.sizes)
    assert store.slots(LARGE) == 0
    kept = segment_charge_bytes(16384, 4)  # for the first segment of the other size
    assert 0 <= layout.segments_bytes - kept - store.nvme.segments.held_bytes < 2 * 8192
    assert sum(map(store.is_held, SHORT)) >= store.slots(SMALL) - 8 > 4 * 8


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_a_size_that_comes_late_gets_room_and_gives_it_back(eviction):
    store = Store(eviction=eviction)
    for _ in range(2):
        store.serve(SHORT)
        small = store.slots(SMALL)
        store.serve(LONG[:24])
        store.serve(LONG[:24])
        assert store.slots(LARGE) >= 12 and store.slots(SMALL) < small
        assert sum(map(store.is_held, LONG[:24])) >= 8, "prompts hit that need both sizes"
        held = store.nvme.segments.held_bytes
        assert held <= layout_of(store.sizes).segments_bytes


def test_two_sizes_that_are_used_alike_take_nothing_from_each_other_for_good():
    store = Store()
    store.serve(LONG)
    store.serve(LONG)
    moved = store.stats["moved_segments"]
    for _ in range(4):
        store.serve(LONG)
    assert store.stats["moved_segments"] - moved <= 1
    assert min(store.slots(SMALL), store.slots(LARGE)) > 0


def test_what_is_loaded_again_and_again_does_not_go_for_what_comes_once():
    store = Store()
    loved = LONG[:6]
    once = iter(SHORT + [f"{first}{second}x" for first, second in product("qrstuv", "qrstuv")])
    store.serve(loved)
    while batch := list(islice(once, 2)):
        store.serve(batch + loved)
    assert store.slots(LARGE) >= 6
    assert all(map(store.is_held, loved))


def test_a_restart_keeps_the_split():
    store = Store()
    store.serve(SHORT)
    store.serve(LONG[:24])
    held = [prompt for prompt in SHORT + LONG if store.is_held(prompt)]
    before = store.slots(SMALL), store.slots(LARGE)
    store.restart()
    store.idle()
    assert (store.slots(SMALL), store.slots(LARGE)) == before
    assert [prompt for prompt in SHORT + LONG if store.is_held(prompt)] == held


def test_an_end_between_giving_up_and_making_keeps_the_rest():
    """The process is killed when the files of the one are gone, and before those of the other are
    there; and once while it is being emptied."""
    store = Store()
    store.serve(SHORT)
    seen = Counter()
    store.add(LONG[0])
    for prompt in LONG[1:]:
        if len(seen) == 2:
            break
        shift = store.nvme._shift
        for _ in range(40):
            store.step()
            state = (shift.taker is not None, shift.giving is not None)
            if state[0] and not seen[state]:
                seen[state] += 1
                store.succeed()
                store.idle()
                assert store.nvme.segments.held_bytes <= layout_of(store.sizes).segments_bytes
                store.watch.check()
                break
        store.add(prompt)
    assert seen.keys() >= {(True, True), (True, False)}
    store.finish()
    assert store.slots(LARGE) > 0


# -- the drive has less than the cap -----------------------------------------------------------


def test_a_drive_with_less_room_than_the_cap_is_used(caplog):
    """The shortest segments are tried, too; one line says so; and what comes free is used."""
    store = Store()
    whole = segment_charge_bytes(8192, 8)
    store.room_bytes = whole * 3 + whole // 2
    with caplog.at_level(logging.WARNING, "kvdisk"):
        store.serve(SHORT)
        store.serve(SHORT)
    assert store.failed > 1
    assert 0 <= store.room_bytes - store.nvme.segments.held_bytes < segment_charge_bytes(8192, 2)
    said = [record.message for record in caplog.records]
    assert len(said) == 1 and "no room for another segment" in said[0]
    _, total = store.nvme.free_and_total
    assert total == store.slots(SMALL), "no more is promised than there is"
    held = store.slots(SMALL)
    store.room_bytes = None
    store.advance(100.0)
    store.serve(SHORT)
    assert store.slots(SMALL) > held + 16


def test_on_a_full_drive_the_other_size_gets_room_too():
    store = Store()
    store.room_bytes = segment_charge_bytes(8192, 8) * 4
    store.serve(SHORT)
    store.serve(SHORT)
    store.serve(LONG[:24])
    store.serve(LONG[:24])
    assert store.slots(LARGE) > 0 < store.slots(SMALL)
    assert any(map(store.is_held, LONG[:24]))


# -- layouts -----------------------------------------------------------------------------------


def test_segments_fit_the_room_that_there_is():
    geometry, config = TWO_SIZES, Config()
    layout = nvme_layout_in(4096 * MIB, config.segment_bytes, geometry, 1)
    cut = layout.cut(config.segment_bytes, geometry, 1, 100 * MIB)
    assert (cut.segments_bytes, cut.expected_bytes) == (layout.segments_bytes, 100 * MIB)
    charges = [segment_charge_bytes(*each) for each in zip(geometry.slot_sizes, cut.slot_counts, strict=True)]
    assert 4 <= 100 * MIB // sum(charges) <= 9
    assert layout.cut(config.segment_bytes, geometry, 1, 0).slot_counts == (1, 1), "a block may fit all the same"


def test_a_smaller_cap_takes_of_each_size_its_part():
    sizes = {0: 8192, 1: 16384}
    records = [SegmentRecord(number, sizes[number % 4 == 3], 8) for number in range(16)]
    assert not excess(records, sizes.values(), 1 << 62, 2)
    one, other = (segment_charge_bytes(size, 8) * 2 for size in sizes.values())
    dropped = excess(records, sizes.values(), 6 * one + 2 * other, 2)
    assert Counter(record.slot_bytes for record in dropped) == {8192: 6, 16384: 2}
    assert {record.segment for record in dropped} == {8, 9, 10, 11, 12, 13, 14, 15}
    assert Counter(record.slot_bytes for record in excess(records, [8192], 1 << 62, 2)) == {16384: 4}
    left = set(records) - set(excess(records, sizes.values(), one + other, 2))
    assert Counter(record.slot_bytes for record in left) == {8192: 1, 16384: 1}, "a hit needs both"
    assert not set(records) - set(excess(records, sizes.values(), 0, 2))


def test_what_an_index_has_room_for_covers_any_split():
    layout = NvmeLayout.make(1 << 30, 64 * MIB, TWO_SIZES, lambda count: 1000 + 256 * count, None)
    assert layout.index_bytes - 1000 >= 256 * layout.most_slots(TWO_SIZES)


# -- memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("slots", "together"), [(15, 1), (24, 3)])
def test_a_full_tier_of_memory_looks_for_room_once_for_some_stores(monkeypatch, slots, together):
    monkeypatch.setattr(bounds, "SLOTS_PER_AHEAD", 8)
    bench = TierBench((slots,))
    evicted = [0]
    for number in range(slots + 4 * together):
        bench.add(chr(32 + number // 64) + chr(32 + number % 64))
        bench.finish()
        bench.engine.pool.forget_all()
        evicted.append(bench.stats["evicted_blocks.cpu"])
    assert bench.stats["stored_blocks"] == slots + 4 * together
    rises = [after - before for before, after in pairwise(evicted)]
    assert rises == [0] * slots + [together, *[0] * (together - 1)] * 4
