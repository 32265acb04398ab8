# SPDX-License-Identifier: Apache-2.0
"""What a drive does not take all of: it gets prompts whole, in all their groups, whatever the sizes
of these."""

from __future__ import annotations

import pytest
from support.manager_parts import DAY_S
from tier_bench import TierBench

from kvdisk.blocks import Tier, make_block_key
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.manager import bounds
from kvdisk.manager.admission import AdmissionPolicy
from kvdisk.manager.eviction import TailFirst

PAYLOADS = {"small and large": (4096, 16384), "large and small": (16384, 4096), "three": (8192, 4096, 28672)}
PROMPTS = 60
BLOCKS = 4
"""Of a prompt, in each group."""
LARGE_MEMORY, SMALL_MEMORY = 3 * PROMPTS * BLOCKS, PROMPTS * BLOCKS // 3


def prompt_of(number: int) -> str:
    return f"{number:02}" * BLOCKS


class Bench(TierBench):
    """Groups of full attention with blocks of several sizes, and more stored than is written."""

    def __init__(self, payloads: tuple[int, ...], memory_blocks: int, **how: object) -> None:
        geometry = Geometry(tuple(GroupGeometry(at, 2, size) for at, size in enumerate(payloads)), 1, 2)
        super().__init__(
            [memory_blocks] * len(payloads),
            [PROMPTS * BLOCKS] * len(payloads),
            geometry=geometry,
            gpu_blocks=1000,
            segments=2,
            nvme_admission="all",
            **how,
        )
        self.idle()

    def whole(self) -> list[int]:
        """Return the prompts all of whose blocks of all groups are on the drive."""
        groups = range(len(self.sizes.geometry.groups))
        return [number for number in range(PROMPTS) if all(self.there(number, group) == BLOCKS for group in groups)]

    def there(self, number: int, group: int) -> int:
        ends = range(2, 2 * BLOCKS + 1, 2)
        rows = [self.catalog.find(make_block_key(prompt_of(number)[:end].encode(), group)) for end in ends]
        return sum(row >= 0 and self.catalog.readable(row, Tier.NVME) for row in rows)

    def written_prompts(self) -> float:
        """Return how many whole prompts all that was written would be."""
        groups = self.sizes.geometry.groups
        written = sum(
            self.there(number, at) * each.slot_bytes for at, each in enumerate(groups) for number in range(PROMPTS)
        )
        return written / (BLOCKS * sum(each.slot_bytes for each in groups))

    def come_one_by_one(self, seconds: float) -> None:
        for number in range(PROMPTS):
            self.add(prompt_of(number))
            while self.engine.requests:
                self.step(16, seconds=seconds)


@pytest.mark.parametrize("memory_blocks", [LARGE_MEMORY, SMALL_MEMORY])
@pytest.mark.parametrize("payloads", PAYLOADS.values(), ids=PAYLOADS)
@pytest.mark.parametrize("share", [pytest.param(0.25, marks=pytest.mark.torture), 0.5])
def test_under_a_budget_prompts_are_written_whole(share, payloads, memory_blocks):
    """The drive gets the budget's share of the prompts, and can serve nearly all of it."""
    bench = Bench(payloads, memory_blocks, nvme_write_bytes_per_day=int(share * PROMPTS * 44 * 4096))
    bench.come_one_by_one(DAY_S / PROMPTS / 4)
    for _ in range(40):
        bench.step(seconds=0.5)
    written = bench.written_prompts()
    assert 2 < written < PROMPTS / 2
    assert len(bench.whole()) >= 0.85 * written - 1


@pytest.mark.parametrize("memory_blocks", [LARGE_MEMORY, SMALL_MEMORY])
@pytest.mark.parametrize("payloads", PAYLOADS.values(), ids=PAYLOADS)
def test_a_drive_that_lags_behind_gets_prompts_whole(payloads, memory_blocks, monkeypatch):
    monkeypatch.setattr(bounds, "JOBS", 1)
    monkeypatch.setattr(bounds, "MOVES", BLOCKS)
    bench = Bench(payloads, memory_blocks)
    bench.come_one_by_one(0.01)
    written = bench.written_prompts()
    assert 10 < written < PROMPTS / 2
    assert len(bench.whole()) >= 0.85 * written - 1
    bench.restart()
    assert len(bench.whole()) >= 0.85 * written - 1


def given_up() -> tuple[TierBench, int]:
    """Return a bench, and the row of a block that memory was to give up, and has written first."""
    bench = TierBench([8], [8], nvme_admission="all")
    bench.idle()
    bench.add("abcdefgh")
    bench.finish()
    assert bench.held("abcdefgh") == [True] * 4
    *_, tail = bench.rows("abcdefgh")
    bench.parts.nvme.end([tail])
    assert bench.parts.cpu.offer_before_eviction([tail]) == []
    bench.idle()
    assert bench.held("abcdefgh") == [True] * 4
    return bench, tail


def test_what_memory_gives_up_stays_on_the_drive_until_memory_has_let_go():
    """Else the tail of a chain that fills the drive is written, leaves, and is written again."""
    bench, tail = given_up()
    assert bench.parts.nvme._victims(0, 1, keep_dirty=False) == []
    bench.parts.cpu.end(bench.parts.cpu.offer_before_eviction([tail]))
    assert bench.parts.nvme._victims(0, 1, keep_dirty=False) == [tail]


def test_what_memory_uses_again_may_leave_the_drive():
    bench, tail = given_up()
    bench.parts.cpu.touch([tail])
    assert bench.parts.nvme._victims(0, 1, keep_dirty=False) == [tail]


def test_a_search_that_ends_early_for_ever_is_given_up(monkeypatch):
    """What finds nothing, and so drops nothing, does not begin it anew: an idle engine would go on
    looking."""
    monkeypatch.setattr(bounds, "TAILS_SKIPPED", 1)
    bench = TierBench([4])
    for prompt in ("abcd", "efgh"):
        bench.add(prompt)
        bench.finish()
    cpu, rows = bench.parts.cpu, [*bench.rows("abcd"), *bench.rows("efgh")]
    bench.catalog.pin(rows, Tier.CPU)
    for _ in range(2 * len(rows)):
        assert cpu.allocate(0, 1) == []
    assert not cpu.is_searching


def test_what_is_queued_instead_of_leaving_makes_no_step_longer(monkeypatch):
    """Each search finds what has to wait for the drive: the next one goes on by the same bound, and
    in the next step by another one."""
    monkeypatch.setattr(bounds, "TAILS_SKIPPED", 4)
    looked, tails = [0], TailFirst._tails

    def counted(order, found, tenant=0):
        for row in tails(order, found, tenant):
            looked[-1] += 1
            yield row

    bench = TierBench([400], [800], nvme_admission="reuse(2)", gpu_blocks=1000)
    bench.idle()
    for number in range(100, 150):
        bench.serve(f"{number}" * 6)  # once: nothing of it is wanted on the drive
    monkeypatch.setattr(bench.parts.nvme, "admission", AdmissionPolicy())  # now all is
    monkeypatch.setattr(TailFirst, "_tails", counted)
    cpu = bench.parts.cpu
    cpu.allocate(0, 2)
    while cpu.is_searching:
        looked.append(0)
        cpu.allocate(0, 2)
    assert cpu.dirty.counts[0] > 20, "queued are"
    assert len(looked) > 3
    assert max(looked) <= 4 + 4 * 2


def test_a_search_on_the_drive_repeats_no_offers_to_memory(monkeypatch):
    """Memory gets room from the drive by a demotion alone, and that settles."""
    bench = TierBench([4], [4])
    bench.serve("abcd")
    bench.idle()
    bench.parts.nvme._evictors[0].ended_early = True
    before = bench.manager._state.released
    bench.manager.take_plan(bench.now, idle=True)
    assert bench.parts.nvme.is_searching
    assert bench.manager._state.released == before
    bench.parts.cpu._evictors[0].ended_early = True
    bench.manager.take_plan(bench.now, idle=True)
    assert bench.manager._state.released == before + 1


def test_offers_are_numbered_for_longer_than_an_engine_lives():
    """A thousand in a second are 2**32 in fifty days."""
    bench = Bench((4096, 16384), LARGE_MEMORY)
    bench.parts.dirty._offers = (1 << 32) - PROMPTS // 2
    bench.come_one_by_one(0.01)
    bench.idle()
    assert len(bench.whole()) == PROMPTS
    assert bench.parts.dirty._offers > 1 << 32
