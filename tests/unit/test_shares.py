# SPDX-License-Identifier: Apache-2.0
"""One tenant that floods the tiers takes its share, and the others keep theirs. The first letter of
a prompt is its tenant, as a salt is in the first block's hash; that of a capital has none."""

from __future__ import annotations

import string
from array import array
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tier_bench import GEOMETRY, TierBench

from kvdisk.blocks import Tier, group_of, make_block_key
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.index.lmdb_index import MIN_MAP_BYTES, LmdbIndex
from kvdisk.manager.eviction import TailFirst
from kvdisk.manager.kv_hints import ACTIONS
from kvdisk.manager.requests import KVHint
from kvdisk.manager.shares import TenantLists
from kvdisk.manager.tiers import TierSpace

HOT = ("ahhhh1", "ahhhh2", "ahhhh3")
"""Prompts of the tenant that stores little: three blocks each, the first two in common."""
GEOMETRIES = {
    "one group": GEOMETRY,
    "two size classes": Geometry((GroupGeometry(0, 2, 4096), GroupGeometry(1, 2, 16384)), 1, 2),
    "seven groups": Geometry(
        (GroupGeometry(0, 2, 4096), *(GroupGeometry(at, 2, 8192, window_tokens=64) for at in range(1, 7))), 1, 2
    ),
}
TIERS = {"memory": ("cpu_slots",), "NVMe": ("nvme_slots",), "both": ("cpu_slots", "nvme_slots")}
SLOTS = 60
"""Of each group."""


def flood_of(tenant: str, count: int, blocks: int = 4) -> list[str]:
    """Return prompts of a tenant, of which no more than the first block is common to any two."""
    letters = string.ascii_letters
    return [
        (tenant + letters[number % len(letters)] + letters[number // len(letters)]).ljust(2 * blocks, "x")
        for number in range(count)
    ]


def bench_of(tiers: tuple[str, ...] = ("cpu_slots",), geometry: Geometry = GEOMETRY, **how: object) -> TierBench:
    counts = [SLOTS * geometry.size_classes.count(at) for at in range(len(geometry.slot_sizes))]
    how = {"salt_share": 0.25, "nvme_admission": "all", "min_load_tokens": 0} | how
    bench = TierBench(**dict.fromkeys(tiers, counts), geometry=geometry, gpu_blocks=200, **how)
    bench.idle()
    bench.serve("zz")  # while a segment is made, windows go on
    return bench


def has(bench: TierBench, prompt: str, tier: Tier) -> bool:
    """Whether a tier has all blocks of a prompt, of all groups."""
    ends, groups = range(2, len(prompt) + 1, 2), bench.sizes.geometry.groups
    rows = [bench.catalog.find(make_block_key(prompt[:end].encode(), each.group)) for end in ends for each in groups]
    return all(row >= 0 and bench.catalog.readable(row, tier) for row in rows)


def held_by(bench: TierBench, tenant: str, tier: Tier) -> list[int]:
    """Return how many copies a tenant has in a tier, by size class."""
    classes, found = bench.sizes.geometry.size_classes, [0] * len(bench.sizes.geometry.slot_sizes)
    for row in bench.catalog.rows_in(tier):
        key = bench.catalog.keys[row]
        found[classes[group_of(key)]] += key.startswith(tenant.encode())
    return found


def limits_of(bench: TierBench, tier: Tier) -> list[int]:
    share = bench.manager._tiers[tier].share
    return [share.limit(size_class) for size_class in range(len(bench.sizes.geometry.slot_sizes))]


# -- the bookkeeping ------------------------------------------------------------------------------

TENANTS = (0, 5, 5, 9, 9, 0, 5, 9)
"""By row."""
list_steps = st.lists(
    st.tuples(st.sampled_from(["append", "before", "remove"]), st.integers(0, 7), st.integers(0, 2)), max_size=40
)


@given(steps=list_steps)
def test_the_lists_of_tenants_are_lists(steps):
    lists, model = TenantLists(array("Q", TENANTS)), defaultdict(list)
    where: dict[int, tuple[int, int]] = {}
    for step, row, number in steps:
        name = TENANTS[row], number
        if step == "remove" or row in where:
            lists.remove([row, row])
            if row in where:
                model[where.pop(row)].remove(row)
        elif step == "append" or not name[0]:
            lists.append([row], [number])
            if name[0]:
                model[name].append(row)
                where[row] = name
        elif model[name]:
            newer = model[name][len(model[name]) // 2]
            lists.insert_before(row, newer)
            model[name].insert(model[name].index(newer), row)
            where[row] = name
    for tenant in (5, 9):
        for number in range(3):
            found, row = [], lists.oldest(tenant, number)
            while row >= 0:
                found.append(row)
                row = lists.newer(row)
            assert found == model[tenant, number]
    assert len(lists._ends) == sum(map(bool, model.values())), "what is empty takes no memory"


# -- two tenants ----------------------------------------------------------------------------------


@pytest.mark.parametrize("eviction", ["lru", "learned"])
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
@pytest.mark.parametrize(
    "tiers",
    [pytest.param(tiers, marks=() if name == "both" else pytest.mark.torture) for name, tiers in TIERS.items()],
    ids=TIERS,
)
def test_who_floods_takes_its_share_and_no_more(tiers, geometry, eviction):
    """In every tier and size class, also where others have used theirs long ago; and after a
    restart, which finds on the drive whose each block is."""
    bench = bench_of(tiers, geometry, eviction=eviction)
    kept = [space.tier for space in bench.manager._tiers]
    for prompt in HOT:
        bench.serve(prompt)
    for prompt in flood_of("b", 40):
        bench.serve(prompt)
    for tier in kept:
        assert all(has(bench, prompt, tier) for prompt in HOT)
        limits = limits_of(bench, tier)
        assert all(limit - 4 < held <= limit for held, limit in zip(held_by(bench, "b", tier), limits, strict=True))
        assert bench.stats[f"share_evicted_blocks.{tier.label}"] > 0
    if Tier.NVME in kept:
        bench.restart()
        for prompt in flood_of("b", 80)[40:]:
            bench.serve(prompt)
        assert all(has(bench, prompt, Tier.NVME) for prompt in HOT)
        held, limits = held_by(bench, "b", Tier.NVME), limits_of(bench, Tier.NVME)
        assert all(limit - 4 < count <= limit for count, limit in zip(held, limits, strict=True))


@pytest.mark.parametrize("tiers", TIERS.values(), ids=TIERS)
def test_without_a_share_who_floods_evicts_all_others(tiers):
    """What the tests above would not see if a flood were too small."""
    bench = bench_of(tiers, salt_share=None)
    for prompt in [*HOT, *flood_of("b", 40)]:
        bench.serve(prompt)
    for space in bench.manager._tiers:
        assert not any(has(bench, prompt, space.tier) for prompt in HOT)


class _RealIndex(LmdbIndex):
    """An index in LMDB, with what ``Life`` asks of one in memory."""

    refuse_puts = False

    def __init__(self, path: Path) -> None:
        super().__init__(path, map_bytes=4 * MIN_MAP_BYTES)
        self._path = path

    def commit(self) -> None:
        assert self.flush(600.0)

    def reopened(self) -> _RealIndex:
        self.close()
        return _RealIndex(self._path)


@contextmanager
def _in_lmdb(path: Path) -> Iterator[None]:
    with ExitStack() as stack:

        def make() -> _RealIndex:
            return _RealIndex(path / "index")

        stack.enter_context(mock.patch("support.small_engine.MemoryIndex", make))
        yield


def test_a_real_index_tells_tenants_apart_after_a_restart(tmp_path):
    with _in_lmdb(tmp_path):
        bench = bench_of(("cpu_slots", "nvme_slots"))
        for prompt in [*HOT, *flood_of("b", 40), *flood_of("C", 1)]:
            bench.serve(prompt)
        bench.restart()
    try:
        tenants = {bench.catalog.keys[row][:1]: bench.catalog.tenants[row] for row in bench.catalog.rows()}
        assert tenants == {b"a": ord("a"), b"b": ord("b"), b"z": ord("z"), b"C": 0}
        for prompt in flood_of("b", 80)[40:]:
            bench.serve(prompt)
        assert all(has(bench, prompt, Tier.NVME) for prompt in HOT)
        assert sum(held_by(bench, "b", Tier.NVME)) <= sum(limits_of(bench, Tier.NVME))
    finally:
        bench.index.close()


def test_requests_without_a_salt_have_no_bound():
    bench = bench_of()
    for prompt in flood_of("B", 40):
        bench.serve(prompt)
    assert held_by(bench, "B", Tier.CPU) == [SLOTS]


def test_a_tenant_keeps_what_it_uses():
    """Its own blocks leave in the order of the eviction: what was used longest ago first."""
    bench = bench_of()
    for prompt in flood_of("b", 20):
        bench.serve("bhot11", cold=True)
        bench.serve(prompt)
    assert has(bench, "bhot11", Tier.CPU)


def test_a_prompt_beyond_the_share_is_stored_up_to_it():
    """Its head, which alone is of use; and steps do not go on for what finds no room."""
    bench = bench_of()
    prompt = "b" + "x" * 59
    bench.serve(prompt)
    (limit,) = limits_of(bench, Tier.CPU)
    assert bench.held(prompt, Tier.CPU) == [True] * limit + [False] * (30 - limit)
    assert bench.stats["refused_blocks.share"] > 0
    assert bench.stats["refused_blocks.room"] == 0


def test_loads_and_prefetches_leave_no_more_in_memory_than_the_share():
    bench = bench_of(("cpu_slots", "nvme_slots"), most_running=1)
    prompts = flood_of("b", 3)
    for prompt in [*HOT, *prompts]:
        bench.serve(prompt)
    bench.restart()
    bench.manager._tiers[Tier.CPU].share._share = 0.1  # of memory, which is empty now
    (limit,) = limits_of(bench, Tier.CPU)
    assert limit == 6
    for _ in range(3):
        for prompt in [*HOT, *prompts]:
            bench.add(prompt)  # all but the first wait in line, and are read ahead for
        bench.engine.pool.forget_all()
        bench.finish()
        assert 4 <= held_by(bench, "b", Tier.CPU)[0] <= limit
        assert held_by(bench, "a", Tier.CPU)[0] <= limit
    assert bench.stats["promoted_blocks"] > 0
    assert bench.stats["loaded_blocks"] > 0


def test_what_free_blocks_spill_counts_for_the_tenant_that_reached_them():
    """No request has a free block any more, and its parent may be stored later or never."""
    bench = bench_of(store_policy="spillover")
    for prompt in flood_of("b", 60):
        bench.serve(prompt)
    assert 0 < held_by(bench, "b", Tier.CPU)[0] <= limits_of(bench, Tier.CPU)[0]


def test_what_waits_for_the_drive_holds_nobody_up():
    """A tenant that has its share of the drive does not stop what is queued behind its blocks."""
    bench = bench_of(("cpu_slots", "nvme_slots"))
    for prompt in flood_of("b", 10):
        bench.serve(prompt)
    nvme = bench.manager._tiers[Tier.NVME]
    held = bench.catalog.rows_in(Tier.NVME)
    bench.catalog.pin(held, Tier.NVME)  # as loads do: nothing of it may leave
    for prompt in ["bnew11", *HOT]:
        bench.serve(prompt)
    assert all(has(bench, prompt, Tier.NVME) for prompt in HOT)
    assert not has(bench, "bnew11", Tier.NVME)
    assert nvme.share.left(0, ord("b")) < 3
    assert bench.stats["evicted_unwritten.share"] == 0
    for prompt in flood_of("b", 20)[10:]:
        bench.serve(prompt)
    assert bench.stats["evicted_unwritten.share"] > 0 == bench.stats["evicted_unwritten.room"]
    bench.catalog.unpin(held, Tier.NVME)


def test_pinned_blocks_stay_and_what_leaves_first_leaves_first():
    bench = bench_of(pin_share=0.5)
    hinted = flood_of("b", 2)
    for prompt, action in zip(hinted, ("pin", "demote"), strict=True):
        assert action in ACTIONS
        request = bench.add(prompt)
        bench.manager.hint(request.id, (KVHint(action, None, 1000.0),), bench.now)
        bench.finish()
    for prompt in flood_of("b", 12)[2:]:
        bench.serve(prompt)
    assert has(bench, hinted[0], Tier.CPU)
    assert not has(bench, hinted[1], Tier.CPU)


def test_a_smaller_share_after_a_restart_is_reached_by_and_by(monkeypatch):
    """While it is not, the tenant may replace its own blocks; a step lets few more go."""
    monkeypatch.setattr("kvdisk.manager.bounds.EVICTED", 3)
    bench = bench_of(("nvme_slots",), salt_share=1.0)
    for prompt in flood_of("b", 13):
        bench.serve(prompt)
    share = bench.manager._tiers[Tier.NVME].share
    before = share.count(0, ord("b"))
    share._share = 0.1
    counts = []
    for prompt in flood_of("b", 40)[13:]:
        bench.watch._first_held[Tier.NVME][0, ord("b")] = before
        bench.serve(prompt)
        assert has(bench, prompt, Tier.NVME)
        counts.append(share.count(0, ord("b")))
    assert counts[0] >= before - 3 - 4
    assert counts[-1] <= share.limit(0) == 6


# -- what it costs --------------------------------------------------------------------------------


def test_no_search_walks_the_blocks_of_a_tenant(monkeypatch):
    """What is looked at for room in a share goes by the room that is needed, however much a tenant
    has, and however much others have that was used longer ago."""
    looked: list[int] = []
    tails, make_way = TailFirst._tails, TierSpace.make_way

    def counted(order: TailFirst, found: dict[int, None], tenant: int = 0) -> Iterator[int]:
        for row in tails(order, found, tenant):
            looked[-1] += bool(tenant)
            yield row

    def counting(space: TierSpace, size_class: int, tenant: int, count: int, **how: bool) -> int:
        looked.append(-count)
        return make_way(space, size_class, tenant, count, **how)

    bench = TierBench([800], gpu_blocks=200, salt_share=0.4)
    for prompt in [*flood_of("A", 40), *flood_of("c", 40), *flood_of("b", 100)]:
        bench.serve(prompt)
    monkeypatch.setattr(TailFirst, "_tails", counted)
    monkeypatch.setattr(TierSpace, "make_way", counting)
    for prompt in flood_of("b", 120)[100:]:
        bench.serve(prompt)
    assert max(looked) <= 1
    assert held_by(bench, "b", Tier.CPU) == [320]
