# SPDX-License-Identifier: Apache-2.0
"""What a store by key learns of requests, which it sees put by put."""

from __future__ import annotations

import pytest
from tier_bench import TierBench

from kvdisk.blocks import BlockKey, make_block_key
from kvdisk.manager import bounds
from kvdisk.manager.block_jobs import BlockJobs
from kvdisk.manager.chances import ORIGINS, TEMPOS
from kvdisk.manager.copies import Offers
from kvdisk.manager.reuse import ReuseHistory

NEW, SECOND_TURN = 0, 2
"""Kinds of blocks."""


@pytest.fixture
def jobs() -> BlockJobs:
    """Of a tier that is full, whose admission asks what comes back."""
    bench = TierBench([], [4], nvme_admission="learned")
    bench.idle()
    blocks: BlockJobs = bench.manager.blocks
    blocks.target.admission.note_room(0, 4)
    return blocks


def chain(name: str, count: int) -> list[BlockKey]:
    return [make_block_key(f"{name} {at}".encode(), 0) for at in range(count)]


def put(jobs: BlockJobs, keys: list[BlockKey], start: int = 0, stop: int | None = None) -> None:
    parents = [None, *keys]
    keys, parents = keys[start:stop], parents[start : len(keys) if stop is None else stop]
    zeros, blocks = [0] * len(keys), [(at,) for at in range(len(keys))]
    jobs.store(Offers(keys, parents, (), zeros, zeros, range(len(keys)), blocks), 0.0, is_new=True)


def kinds(history: ReuseHistory, keys: list[BlockKey]) -> set[int]:
    return {number // TEMPOS % ORIGINS for number in history.classes_of(keys)}


def test_what_is_reached_by_key_is_reached_now(jobs):
    """However long nobody has asked for a step."""
    history, keys = jobs._demand._history, chain("chat", 6)
    ticks = []
    for now in (5000.0, 9000.0):
        jobs.reached("one", keys, now)
        assert {history.known(key).ticks for key in keys} == {0}
        ticks.append(history.tick)
    assert ticks[1] - ticks[0] == 4000 * 16


@pytest.mark.parametrize("most", [bounds.CHAINS, 0])
def test_a_second_turn_is_told_from_a_new_prompt(jobs, most, monkeypatch):
    monkeypatch.setattr(bounds, "CHAINS", most)
    keys = chain("chat", 12)
    put(jobs, keys, 0, 6)
    jobs.reached("first turn", keys[:6], 0.0)
    put(jobs, keys, 6)
    assert kinds(jobs._demand._history, keys[:6]) == {NEW}
    assert kinds(jobs._demand._history, keys[6:]) == {SECOND_TURN}


def test_a_prompt_in_parts_is_one_visit_of_one_kind(jobs):
    """Else a long one would look like many that never come back: like a scan."""
    history = jobs._demand._history
    seen: list[tuple[int, float]] = []
    count, before = history.count, history.now

    def watched(keys, start, stop, origin, visit=None):
        seen.append((visit.before, (stop - start) / (visit.now - visit.before)))
        return count(keys, start, stop, origin, visit)

    history.count = watched
    keys = chain("long", 64)
    for start in range(0, 64, 8):
        put(jobs, keys, start, start + 8)
    assert kinds(history, keys) == {NEW}
    assert {began for began, _ in seen} == {before}, "it was wanted at once"
    assert [part for _, part in seen] == [1 / number for number in range(1, 9)]
    assert history.now == before + 64
