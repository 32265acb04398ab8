# SPDX-License-Identifier: Apache-2.0
"""The allocated bytes of all homes never exceed the caps of the live owners together."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from kvdisk.device import paths
from kvdisk.device import store as store_module
from kvdisk.device.cap import ORPHAN_SPARED_S
from kvdisk.device.control import JointCap, home_ids
from kvdisk.device.store import Store
from kvdisk.errors import DeviceError
from kvdisk.messages import HomeSpec, SegmentSpec
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
    ) -> None:
        store = Store.open(path, clock=lambda: now)
        fingerprint = name.encode() * 32
        self.home = store.acquire_home(fingerprint, {"geometry": 1}, cap_bytes, index_bytes=index_bytes, joint=joint)
        self.files = HomeFiles(path, 0, 1)
        known = tuple(int(name) for name in os.listdir(self.home.segments_path))
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
    gone_in_order = []
    known = ids(path)
    while beside.makes():
        gone_in_order += known - ids(path)
        known = ids(path)
        assert allocated(path) <= CAP
    assert gone_in_order == [old["c"].home.id, old["b"].home.id, same.home.id]
    beside.leave()


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


def test_a_start_deletes_what_does_not_fit_and_no_more(path):
    engines = [Engine(path, name, cap_bytes=4 * MIB, now=now) for now, name in enumerate("abc")]
    for engine in engines:
        engine.fill()
    left = [engine.leave() for engine in engines]
    new = Engine(path, "d", cap_bytes=8 * MIB, now=9)
    assert ids(path) == {new.home.id, left[1], left[2]}
    assert allocated(path) <= 8 * MIB
    again = Engine(path, "c", cap_bytes=2 * MIB, now=9)
    assert left[1] in ids(path), "one to be cut to its cap does not take more than its cap from others"
    again.leave()
    new.leave()


def test_a_segment_that_took_more_than_it_has_is_undone(path, monkeypatch):
    engine = Engine(path, "a")
    before, real = allocated(path), os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, offset, count: real(fd, offset, count + MIB))
    assert not engine.makes()
    assert allocated(path) == before
    engine.leave()


@pytest.mark.parametrize("used_s", [1_000_000, 5_000_000_000], ids=["now", "to come"])
def test_an_orphan_is_spared_for_a_while_whatever_clock_its_owner_had(path, used_s):
    dead, engine, now = Engine(path, "o", now=used_s), Engine(path, "a"), [1_000_000]
    assert dead.fill() == engine.fill() == 7
    dead.leave()
    store = Store.open(path, clock=lambda: now[0])
    assert not store.trim(engine.home.fingerprint, unused_s=ORPHAN_SPARED_S), "it may be starting again"
    now[0] += ORPHAN_SPARED_S
    assert store.trim(engine.home.fingerprint, unused_s=ORPHAN_SPARED_S)
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
    for last_use_s, goes in ((int(time.time()), False), (0, True)):
        left = Engine(drive, "a", now=last_use_s)
        assert left.fill() == 3 * (not goes)  # the second time it has what it made
        left.leave()
        engine = Engine(drive, "b")
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
