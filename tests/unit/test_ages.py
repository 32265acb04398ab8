# SPDX-License-Identifier: Apache-2.0
"""``max_age_s``: what was first stored longer ago is neither served nor kept, wherever it lies and
however often it is used."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from support.fake_neighbours import FakeHome
from support.low_bounds import lower_shares
from tier_bench import GEOMETRY, TierBench, keys_of

from kvdisk.blocks import Tier
from kvdisk.index.base import SegmentRecord
from kvdisk.manager import ages
from kvdisk.manager.step_work import Kind
from kvdisk.messages import JobKind
from kvdisk.stats import Miss

AGE_S = 1000
DAY_S = 86_400
PROMPT, OTHER = "aabbccddx", "aabbeeffx"
BLOCKS = len(keys_of(PROMPT))


def bench_of(cpu: int = 16, nvme: int = 64, **more: Any) -> TierBench:
    how = {"max_age_s": float(AGE_S), "nvme_admission": "all", "min_load_tokens": 0, "io_deadline_s": 1e9}
    return TierBench((cpu,) if cpu else (), (nvme,) if nvme else (), **how | more)


def loaded(bench: TierBench, prompt: str = PROMPT) -> int:
    """Serve a prompt that the GPU has forgotten; return how many of its blocks were loaded."""
    before = bench.stats["loaded_blocks"]
    bench.serve(prompt, cold=True)
    return bench.stats["loaded_blocks"] - before


def records(bench: TierBench) -> dict[Any, int]:
    """Return when each block on the drive was first stored, as its record says."""
    bench.index.commit()
    return {record.key: record.stored_s for record in bench.index.blocks()}


@pytest.mark.parametrize(("cpu", "nvme"), [(16, 64), (16, 0), (0, 64)], ids=["both", "memory", "drive"])
def test_a_block_is_served_up_to_its_age_and_stored_anew_after_it(cpu, nvme):
    bench = bench_of(cpu, nvme)
    bench.serve(PROMPT)
    stored_s = int(bench.now)
    for _ in range(3):  # each use refreshes its recency, and not its age
        bench.advance(AGE_S / 4)
        assert loaded(bench) == BLOCKS
    bench.advance(stored_s + AGE_S - bench.now)
    assert loaded(bench) == BLOCKS
    bench.advance(2.0)
    assert loaded(bench) == 0
    assert bench.stats[f"misses.{Miss.EXPIRED}"] == 1
    expired = {tier: bench.stats[f"expired_blocks.{tier.label}"] for tier in (Tier.CPU, Tier.NVME)}
    assert expired == {Tier.CPU: BLOCKS * bool(cpu), Tier.NVME: BLOCKS * bool(nvme)}
    assert loaded(bench) == BLOCKS, "the computed blocks are new"
    assert not nvme or min(records(bench).values()) > stored_s + AGE_S
    bench.advance(AGE_S / 2)
    assert loaded(bench) == BLOCKS


def test_without_it_nothing_ends():
    bench = bench_of(max_age_s=None)
    bench.serve(PROMPT)
    bench.advance(100 * AGE_S)
    assert loaded(bench) == BLOCKS and records(bench).keys() == set(keys_of(PROMPT))


def test_what_shares_a_beginning_ends_with_it_or_later():
    """A later prompt's blocks are younger than those that it begins with."""
    bench = bench_of()
    bench.serve(PROMPT)
    bench.advance(AGE_S / 2)
    bench.serve(OTHER)
    bench.advance(AGE_S / 2 + 20)
    assert loaded(bench, OTHER) == 0, "behind a gap nothing serves"
    assert bench.held(OTHER) == [True] * BLOCKS
    assert loaded(bench, OTHER) == BLOCKS


def test_a_restart_keeps_the_ages_and_promotions_and_demotions_do_too():
    bench = bench_of()
    bench.serve(PROMPT)
    stored_s = records(bench)
    for _ in range(3):
        bench.advance(AGE_S / 4)
        bench.restart()
        assert loaded(bench) == BLOCKS
        assert bench.held(PROMPT, Tier.CPU) == [True] * BLOCKS, "read from the drive, it has a copy in memory"
        rows = bench.rows(PROMPT)
        bench.parts.nvme.end(rows[::-1])
        bench.parts.cpu.offer(rows[::-1])
        bench.finish()
        assert bench.held(PROMPT) == [True] * BLOCKS
        assert records(bench) == stored_s, "written once more, it is as old as before"
    bench.advance(AGE_S / 2)
    bench.restart()
    assert loaded(bench) == 0, "in the first step after the start"


def test_the_drive_forgets_them_in_pieces_and_an_idle_engine_goes_on_until_it_has(monkeypatch):
    lower_shares(monkeypatch, 3, Kind.AGES)
    bench = bench_of(cpu=0)
    bench.serve(PROMPT)
    bench.serve("eeffgghhx")
    bench.restart()
    bench.step()
    bench.advance(AGE_S + 1)
    left = []
    for _ in range(3):
        bench.step()
        left.append(len(bench.catalog.rows_in(Tier.NVME)))
        assert bench.manager.has_pending_work(bench.now) or not left[-1]
    assert left == [5, 2, 0]
    assert not bench.held(PROMPT)[0] and not records(bench)
    bench.idle()


def test_a_block_that_is_being_read_ends_when_nobody_reads_it(monkeypatch):
    bench = bench_of(cpu=0)
    bench.serve(PROMPT)
    bench.engine.pool.forget_all()
    bench.add(PROMPT)
    while not bench.engine.work or JobKind.LOAD not in {job.kind for job in bench.engine.work.plan.jobs}:
        bench.step(work=False)
    bench.advance(AGE_S + 11)
    bench.step(work=False)
    assert bench.parts.transfers.count(JobKind.LOAD) == 1
    assert len(bench.catalog.rows_in(Tier.NVME)) == BLOCKS and bench.held(PROMPT) == [False] * BLOCKS
    bench.finish()
    assert bench.stats["failed_loads"] == 0
    assert bench.stats["expired_blocks.nvme"] == BLOCKS


@pytest.mark.parametrize(("age_s", "served"), [(0, True), (AGE_S - 301, True), (AGE_S - 298, False), (AGE_S, False)])
def test_a_neighbours_block_is_as_old_as_its_record_says(age_s, served):
    """Its hint lives for five minutes: what is too old by then is not taken. What is taken keeps
    its time here."""
    bench = bench_of()
    home = FakeHome("n" * 32, SegmentRecord(0, GEOMETRY.groups[0].slot_bytes, 16, 0))
    bench.advance(5000.0)
    for place, key in enumerate(keys_of(PROMPT)):
        home.store(key, place, 7 + place, 1, None, GEOMETRY.groups[0])
        home.copies[key] = home.copies[key]._replace(stored_s=int(bench.now) - age_s)
    bench.neighbours.homes.append(home)
    bench.step()
    bench.add(PROMPT)
    bench.neighbours.answer()
    bench.finish()
    assert bench.stats["loaded_blocks_foreign"] == (BLOCKS if served else 0)
    if served:
        taken = [bench.catalog.stored_s[row] for row in bench.rows(PROMPT)]
        assert taken == [home.copies[key].stored_s for key in keys_of(PROMPT)]
        bench.advance(AGE_S - age_s + 1)
        bench.neighbours.homes.clear()
        assert loaded(bench) == 0


def test_a_rank_of_another_host_whose_clock_is_ahead_offers_nothing():
    bench = bench_of()
    home = FakeHome("n" * 32, SegmentRecord(0, GEOMETRY.groups[0].slot_bytes, 16, 0))
    for place, key in enumerate(keys_of(PROMPT)):
        home.store(key, place, 7 + place, 1, None, GEOMETRY.groups[0])
        home.copies[key] = home.copies[key]._replace(stored_s=int(bench.now) + DAY_S)
    bench.neighbours.homes.append(home)
    bench.step()
    bench.add(PROMPT)
    bench.neighbours.answer()
    bench.finish()
    assert bench.stats["loaded_blocks_foreign"] == 0


@pytest.mark.parametrize(("cpu", "nvme"), [(16, 0), (0, 64)], ids=["memory", "drive"])
@pytest.mark.parametrize("ahead_s", [DAY_S, 200 * 365 * DAY_S, -DAY_S], ids=["day", "2170", "behind"])
def test_a_clock_that_was_wrong_for_a_moment_takes_nothing_with_it(cpu, nvme, ahead_s, caplog):
    """What was stored before it serves again, and what is stored after it serves at once."""
    bench = bench_of(cpu, nvme)
    bench.advance(2 * DAY_S)
    bench.serve(PROMPT)
    bench.engine.clock_ahead_s = ahead_s
    for _ in range(20):
        bench.step(seconds=0.1)
        assert bench.catalog.presences(keys_of(PROMPT)) == bytes(BLOCKS), "judged by the clock as it is"
    bench.engine.clock_ahead_s = 0
    bench.step()
    assert loaded(bench) == BLOCKS
    bench.serve(OTHER)
    assert loaded(bench, OTHER) == BLOCKS
    assert bench.stats["expired_blocks.cpu"] == bench.stats["expired_blocks.nvme"] == 0
    said = [record.message.partition("the clock was moved by ")[2][:1] for record in caplog.records]
    assert said == (["+", "-"] if ahead_s > 0 else ["-", "+"])


@pytest.mark.parametrize(("cpu", "nvme"), [(16, 0), (0, 64)], ids=["memory", "drive"])
def test_what_was_stored_while_the_clock_was_ahead_is_in_nobodys_way(cpu, nvme):
    """Nobody knows how old it is: it is not served, and is stored anew when it is computed."""
    bench = bench_of(cpu, nvme)
    bench.engine.clock_ahead_s = DAY_S
    bench.serve(PROMPT)
    assert loaded(bench) == BLOCKS
    bench.engine.clock_ahead_s = 0
    bench.step()
    assert loaded(bench) == 0
    assert loaded(bench) == BLOCKS
    assert bench.stats["failed_loads"] == 0


def test_a_store_of_a_host_whose_clock_was_ahead_ends_once_it_must_be_old_enough():
    bench = bench_of(cpu=0)
    bench.engine.clock_ahead_s = DAY_S
    bench.serve(PROMPT)
    bench.restart()
    bench.step()
    assert bench.held(PROMPT) == [False] * BLOCKS
    bench.advance(AGE_S - 1)
    bench.idle()
    assert len(bench.catalog.rows_in(Tier.NVME)) == BLOCKS, "it may be this host's clock that is behind"
    bench.advance(20)
    bench.idle()
    assert not records(bench)


def test_a_start_with_a_clock_that_is_put_right_then_takes_nothing_with_it():
    bench = bench_of(cpu=0)
    bench.serve(PROMPT)
    bench.restart()
    bench.engine.clock_ahead_s = DAY_S
    for _ in range(20):
        bench.step(seconds=1.0)
        assert bench.catalog.presences(keys_of(PROMPT)) == bytes(BLOCKS), "none is served"
    bench.engine.clock_ahead_s = 0
    bench.step()
    assert loaded(bench) == BLOCKS


def test_a_small_correction_of_the_clock_is_no_news(caplog):
    bench = bench_of()
    bench.serve(PROMPT)
    bench.engine.clock_ahead_s = -5
    assert loaded(bench) == BLOCKS and not caplog.records


def test_a_clock_that_is_put_right_for_good_ends_what_is_too_old_by_it():
    bench = bench_of(cpu=0)
    bench.serve(PROMPT)
    bench.engine.clock_ahead_s = DAY_S
    bench.step()
    bench.advance(ages.SETTLE_S + 1)
    bench.idle()
    assert not records(bench)


def test_what_a_drive_has_that_rests_is_no_younger_when_it_is_stored_anew_beside_it():
    """Its blocks are computed again, and stored in memory; then the drive is back."""
    bench = bench_of()
    bench.serve(PROMPT)
    bench.parts.cpu.end(bench.rows(PROMPT)[::-1])
    bench.advance(AGE_S / 2)
    catalog, segments = bench.catalog, frozenset(range(bench.sizes.segments))
    with mock.patch.object(bench.parts.nvme, "_hide"):
        catalog.hide(Tier.NVME, segments)
        assert loaded(bench) == 0 and bench.held(PROMPT, Tier.CPU) == [True] * BLOCKS
        catalog.hide(Tier.NVME, frozenset())
    bench.parts.cpu.end(bench.rows(PROMPT)[::-1])
    assert loaded(bench) == BLOCKS
    bench.advance(AGE_S / 2 + 1)
    assert loaded(bench) == 0
