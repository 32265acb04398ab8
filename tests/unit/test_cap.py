# SPDX-License-Identifier: Apache-2.0
"""The allocated bytes of all homes never exceed the caps of the live owners together."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from kvdisk.device import paths
from kvdisk.device import store as store_module
from kvdisk.device.cap import ORPHAN_SPARED_S
from kvdisk.device.control import JointCap, home_ids, read_record, write_record
from kvdisk.device.store import Store
from kvdisk.errors import DeviceError
from kvdisk.geometry import round_up
from kvdisk.messages import HomeSpec, SegmentSpec
from kvdisk.worker import files as files_module
from kvdisk.worker.files import HomeFiles

MIB = 1 << 20
CAP = 8 * MIB
SLOTS = (MIB - 4096) // 8192
"""Slots of 8 KiB in a segment of almost 1 MiB."""


class Engine:
    """An owner with one rank, that makes segments until it is told that there is no room."""

    def __init__(
        self,
        path: Path,
        name: str,
        *,
        cap_bytes: int = CAP,
        index_bytes: int = 0,
        now: int = 0,
        joint: JointCap | None = None,
        beside: Collection[str] = (),
    ) -> None:
        self.now_s, self.moved_s = now, 0
        times: dict[str, Any] = {"clock": lambda: self.now_s, "steady": lambda: self.now_s - self.moved_s}
        self.store = store = Store.open(path, **times)
        fingerprint = name.encode() * 32
        self.home = store.acquire_home(
            fingerprint, {"geometry": 1}, cap_bytes, index_bytes=index_bytes, joint=joint, except_ids=beside
        )
        self.files = HomeFiles(path, 0, 1)
        own_clock = SimpleNamespace(open=partial(Store.open, **times))
        known = tuple(int(name) for name in os.listdir(self.home.segments_path))
        with mock.patch.object(files_module, "Store", own_clock):
            self.files.open_home(HomeSpec(self.home.id, fingerprint, known))
        self.next = max(known, default=-1) + 1

    def makes(self) -> bool:
        """Make a segment; return whether there was room."""
        failed = 0
        try:
            self.files.open_segment(SegmentSpec(self.next, 8192, SLOTS))
            self.next += 1
        except DeviceError as error:
            failed = error.errno
        assert failed in {0, errno.ENOSPC}
        return not failed

    def fill(self) -> int:
        """Make segments until there is no room; return how many."""
        made = 0
        while self.makes():
            made += 1
        return made

    def keep(self, now_s: int) -> bool:
        """Do an owner's upkeep at a time; return whether all that is there fits."""
        self.now_s = now_s
        return self.store.keep(self.home)

    def move_clock(self, seconds: int) -> None:
        """Have somebody set this machine's clock."""
        self.now_s += seconds
        self.moved_s += seconds

    def leave(self) -> str:
        self.files.close()
        self.home.close(clean=True)
        return self.home.id


def allocated(path: Path) -> int:
    return sum(paths.allocated_bytes(home) for home in (path / "homes").iterdir())


def ids(path: Path) -> set[str]:
    return set(home_ids(path))


def test_three_engines_of_two_namespaces_fill_the_store_to_the_cap_and_no_further(path):
    left = Engine(path, "o", now=1)
    assert left.fill() == 7, "of 8 MiB, a part is for what surrounds the segments"
    left.leave()
    engines = [Engine(path, name, now=2) for name in "aab"]
    assert left.home.id in ids(path), "readable until its room is needed"
    made = [0, 0, 0]
    for turn in range(30):
        made[turn % 3] += engines[turn % 3].makes()
        assert allocated(path) <= 3 * CAP
        if sum(made) * MIB < 3 * CAP - 9 * MIB:
            assert left.home.id in ids(path)
    assert made == [7, 7, 7]
    assert ids(path) == {engine.home.id for engine in engines}, "what nobody owned made room"
    for engine in engines:
        engine.leave()


def test_other_namespaces_go_first_and_the_oldest_of_them(path):
    old = {name: Engine(path, name, cap_bytes=4 * MIB, now=now) for now, name in ((5, "a"), (20, "b"), (10, "c"))}
    for engine in old.values():
        assert engine.makes()
    for engine in old.values():
        engine.leave()
    same = Engine(path, "a", now=1)  # takes a over
    assert ids(path) == {same.home.id, old["b"].home.id, old["c"].home.id}
    beside = Engine(path, "a", now=30)
    same.leave()  # of the same namespace, and the oldest
    beside.now_s += ORPHAN_SPARED_S  # until then what both might have counts
    gone_in_order = []
    known = ids(path)
    while beside.makes():
        gone_in_order += known - ids(path)
        known = ids(path)
        assert allocated(path) <= CAP
    assert gone_in_order == [old["c"].home.id, old["b"].home.id, same.home.id]
    beside.leave()


@pytest.mark.parametrize("joint", [None, JointCap("all", 2 * CAP, "0")])
def test_what_an_owner_cannot_open_stays_while_it_lives_whoever_needs_room(path, joint):
    old = Engine(path, "a", now=1, joint=joint)
    assert old.fill() == 7
    left = old.leave()
    engine = Engine(path, "a", now=2, joint=joint, beside=[left])
    other = Engine(path, "b", now=2, joint=joint and joint._replace(member="1"))
    for owner in (engine, other):
        owner.now_s += 2 * ORPHAN_SPARED_S
        owner.keep(owner.now_s)
    assert other.fill() == 7
    assert engine.fill() == 1, "which the two have beyond whole segments"
    assert left in ids(path) and allocated(path) <= 2 * CAP
    engine.leave()
    other.leave()
    assert Engine(path, "a", now=3, joint=joint).next == 7, "the next one has it"


def test_what_ranks_on_this_host_have_of_it_stays_as_well(path):
    """A guest is named by the lineage of the home that an owner elsewhere could not open."""
    old = Engine(path, "a", now=1)
    assert old.fill() == 7
    record = replace(old.home.record, guest=True, lineage="1" * 32)
    old.leave()
    write_record(path / "homes" / old.home.id, record)
    live = Engine(path, "b", now=2)
    write_record(live.home.path, replace(live.home.record, description={"geometry": 1, "leaves": ["1" * 32, 5]}))
    live.now_s += 2 * ORPHAN_SPARED_S
    live.fill()
    assert old.home.id in ids(path) and allocated(path) <= CAP


def test_a_live_home_never_goes_and_its_index_counts_as_it_may_become(path):
    other = Engine(path, "a", cap_bytes=6 * MIB, index_bytes=3 * MIB)
    assert other.fill() == 2
    mine = Engine(path, "b", cap_bytes=6 * MIB, index_bytes=4 * MIB)
    assert mine.fill() == 1
    (other.home.index_path / "data.mdb").write_bytes(bytes(3 * MIB))
    assert allocated(path) <= 12 * MIB
    assert other.fill() == 0
    other.leave()
    mine.leave()


def test_a_start_leaves_what_others_had_who_may_start_after_it(path):
    """All engines of a machine were down, for however long: the first one back is alone."""
    engines = [Engine(path, name, now=now) for now, name in enumerate("aab")]
    assert [engine.fill() for engine in engines] == [7, 7, 7]
    left = {engine.leave() for engine in engines}
    again = []
    for number, name in enumerate("baa"):
        again.append(Engine(path, name, now=10**6 + 500 * number))
        assert again[-1].fill() == 0, "it has taken over what one of its namespace had"
        assert all(engine.keep(10**6 + 500 * number + 30) for engine in again)
        assert len(ids(path)) == 3 and allocated(path) <= 3 * CAP
    assert not left & ids(path)
    for engine in again:
        engine.leave()


@pytest.mark.parametrize("late", [False, True], ids=["upkeep first", "a segment first"])
@pytest.mark.parametrize("wrong_s", [-(10**8), -3600, 3600, 10**8])
def test_a_clock_that_is_put_right_while_engines_start_costs_none_of_them_its_store(path, wrong_s, late):
    """The machine was down for a day, and starts with a wrong clock."""
    right_s = 2 * 10**9
    engines = [Engine(path, name, now=right_s - 86_400) for name in "aab"]
    assert [engine.fill() for engine in engines] == [7, 7, 7]
    left = {engine.leave() for engine in engines}
    first = Engine(path, "b", now=right_s + wrong_s)
    assert first.keep(first.now_s + 30)
    first.move_clock(-wrong_s)
    (again,) = ids(path) - left
    for _ in range(3):
        assert not late or not first.makes()
        assert first.keep(first.now_s + 30)
        assert len(ids(path)) == 3, "others may be starting"
    others = [Engine(path, name, now=first.now_s) for name in "aa"]
    assert ids(path) == {again, *(engine.home.id for engine in others)}
    others.pop().leave()
    assert all(engine.keep(first.now_s + 2 * ORPHAN_SPARED_S + 1) for engine in (*others, first))
    assert all(engine.keep(first.now_s + 2 * ORPHAN_SPARED_S + 1) for engine in (*others, first))
    assert len(ids(path)) == 2, "for no longer than others are waited for"
    for engine in (*others, first):
        engine.leave()


def test_what_none_comes_back_for_goes_after_a_while(path):
    engines = [Engine(path, name, now=now) for now, name in enumerate("ab")]
    assert [engine.fill() for engine in engines] == [7, 7]
    gone, _ = (engine.leave() for engine in engines)
    for now_s in (10**6, 10**6 + 600):  # others may start after each start
        alone = Engine(path, "b", now=now_s)
        assert alone.keep(now_s + 500)
        if now_s == 10**6:
            alone.leave()
    assert alone.keep(10**6 + 600 + ORPHAN_SPARED_S - 1)
    assert gone in ids(path)
    assert alone.keep(10**6 + 600 + ORPHAN_SPARED_S)
    assert gone not in ids(path)
    alone.leave()
    new = Engine(path, "c", now=10**7)
    assert new.fill() == 7
    assert ids(path) == {new.home.id}, "the engine of before was alone, so nobody else is awaited"
    new.leave()


def test_what_one_had_that_ended_before_the_others_looked_stays_for_a_while(path):
    """It starts again and again, and ends within seconds: they may never see it live."""
    alone, other = Engine(path, "a", cap_bytes=2 * CAP), Engine(path, "b")
    assert other.fill() == 7 and all(alone.makes() for _ in range(7))
    other.leave()
    assert alone.keep(2 * ORPHAN_SPARED_S) and alone.keep(4 * ORPHAN_SPARED_S), "there is room for both"
    now_s = 4 * ORPHAN_SPARED_S + 10
    left = Engine(path, "b", now=now_s).leave()
    alone.now_s = now_s + ORPHAN_SPARED_S - 1
    assert alone.fill() == 8 and allocated(path) <= 3 * CAP
    assert left in ids(path)
    assert alone.keep(now_s + ORPHAN_SPARED_S)
    assert left not in ids(path)
    alone.leave()


def test_a_start_deletes_what_does_not_fit_and_no_more(path):
    for now, name in enumerate("abc"):  # one after the other: none had more than its own
        engine = Engine(path, name, cap_bytes=4 * MIB * (now + 1), now=now)
        for _ in range(3):
            assert engine.makes()
        engine.leave()
    left = sorted(ids(path), key=lambda name: read_record(path / "homes" / name).last_use_s)
    new = Engine(path, "d", cap_bytes=8 * MIB, now=9)
    assert ids(path) == {new.home.id, *left}
    assert new.fill() == 7
    assert ids(path) == {new.home.id, left[2]}
    assert allocated(path) <= 12 * MIB
    new.leave()


def test_a_segment_that_took_more_than_it_has_is_undone(path, monkeypatch):
    engine = Engine(path, "a")
    before, real = allocated(path), os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, offset, count: real(fd, offset, count + CAP))
    assert not engine.makes()
    assert allocated(path) == before
    engine.leave()


def test_a_file_system_that_takes_more_for_a_segment_holds_fewer(path, monkeypatch):
    """As one with large clusters does. What is there counts as it is, also after a restart."""
    engine, real = Engine(path, "a"), os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, _, count: real(fd, 0, round_up(count, 2 * MIB)))
    assert engine.fill() == 3
    assert 6 * MIB < allocated(path) <= CAP
    engine.leave()
    engine = Engine(path, "a")
    assert engine.next == 3
    assert not engine.makes()
    engine.leave()


@pytest.mark.parametrize("used_s", [1_000_000, 5_000_000_000], ids=["now", "to come"])
def test_an_orphan_is_spared_for_a_while_whatever_clock_its_owner_had(path, used_s):
    dead, engine, now = Engine(path, "o", now=used_s), Engine(path, "a", now=1_000_000), 1_000_000
    assert dead.fill() == engine.fill() == 7
    dead.leave()
    assert engine.keep(now), "it may be starting again"
    assert engine.keep(now + ORPHAN_SPARED_S)
    assert ids(path) == {engine.home.id}
    engine.leave()


# -- the drive has less than the cap -----------------------------------------------------------


@pytest.fixture
def drive(tmp_path, monkeypatch):
    """A drive of 4 MiB."""
    monkeypatch.setattr(store_module, "_free_bytes", lambda path: 4 * MIB - allocated(tmp_path))
    return tmp_path


def test_an_unused_home_goes_for_room_on_the_drive(drive):
    """Of another namespace as well; not one that an engine may be about to take over."""
    for waited_s, goes in ((ORPHAN_SPARED_S - 1, False), (ORPHAN_SPARED_S, True)):
        left = Engine(drive, "a")
        assert left.fill() == 3 * (not goes)  # the second time it has what it made
        left.leave()
        engine = Engine(drive, "b", now=10**6)
        assert engine.fill() == 0, "its owner may start after this one"
        engine.now_s += waited_s
        assert engine.fill() == 3 * goes
        assert (home_ids(drive) == [engine.home.id]) is goes
        engine.leave()


def test_what_the_index_needs_is_left_on_a_full_drive(drive):
    engine = Engine(drive, "a", index_bytes=2 * MIB)
    assert engine.fill() == 2
    segments_bytes = allocated(drive) - paths.allocated_bytes(engine.home.index_path)
    assert 4 * MIB - allocated(drive) >= 2 * MIB * segments_bytes // CAP
    engine.leave()


def test_what_a_home_has_room_for(drive):
    left = Engine(drive, "a")
    left.fill()
    left.leave()
    engine = Engine(drive, "b", now=100)
    assert Store.open(drive).room_bytes(engine.home.id) == 4 * MIB
    engine.leave()
