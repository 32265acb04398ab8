# SPDX-License-Identifier: Apache-2.0
"""Homes of ranks on other hosts than their scheduler's. Two hosts are two directories."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import rebuild_stores

from kvdisk.assembly import assemble_scheduler
from kvdisk.device import mounts
from kvdisk.device.cap import HOME_OVERHEAD_BYTES, ORPHAN_SPARED_S
from kvdisk.device.control import TOGETHER, HomeRecord, read_record, write_record
from kvdisk.device.home import Home
from kvdisk.device.listing import list_homes, readable_indexes
from kvdisk.device.store import Store
from kvdisk.engine_store import describe_geometry, guests_of
from kvdisk.errors import ConfigError, CorruptRecord, DeviceError, GeometryMismatch, StoreLocked
from kvdisk.geometry import segment_charge_bytes
from kvdisk.identity import Identity
from kvdisk.messages import GuestSpec, HomeSpec, SegmentSpec
from kvdisk.worker.files import HomeFiles

MINE, OTHER = bytes(range(32)), bytes(32)
GROUP = {"slot_bytes": 8192, "payload_bytes": 4096, "block_tokens": 16}
DESCRIBED = {"model": "m", "geometry": {"ranks": 4, "groups": [GROUP]}}
CAP = 64 << 20
SPEC = SegmentSpec(3, 8192, 16)
CHARGE = segment_charge_bytes(SPEC.slot_bytes, SPEC.slot_count)


class Hosts(NamedTuple):
    """``one``: where the scheduler runs, with ranks 0 and 1; ``two``: with ranks 2 and 3."""

    one: Path
    two: Path

    def of(self, rank: int) -> Path:
        return self.one if rank < 2 else self.two


@pytest.fixture
def hosts(tmp_path):
    return Hosts(tmp_path / "one", tmp_path / "two")


def acquire(path: Path, *, spread: bool = True) -> Home:
    return Store.open(path).acquire_home(MINE, DESCRIBED, CAP, spread=spread)


def spec_of(home: Home, known: tuple[int, ...] = ()) -> HomeSpec:
    return HomeSpec(home.id, MINE, known, guests_of(home, 4))


def join(path: Path, rank: int, spec: HomeSpec) -> HomeFiles:
    files = HomeFiles(path, rank, 4)
    files.open_home(spec)
    return files


def the_guest(path: Path) -> HomeRecord:
    (found,) = list_homes(path)
    assert found.record is not None and found.record.guest
    return found.record


def files_in(path: Path) -> set[str]:
    return {f"{file.parent.name}/{file.name}" for file in path.glob("homes/*/segments/*/*")}


def test_ranks_without_the_home_make_one_guest_of_its_id(hosts):
    home = acquire(hosts.one)
    ranks = [join(hosts.of(rank), rank, spec_of(home)) for rank in range(4)]
    opened = [files.open_segment(SPEC) for files in ranks]
    assert all(opened)
    assert files_in(hosts.one) == {"3/rank0.kv", "3/rank1.kv"}
    assert files_in(hosts.two) == {"3/rank2.kv", "3/rank3.kv"}
    (there,) = list_homes(hosts.two)
    assert there.id == home.id and there.alive
    record = the_guest(hosts.two)
    assert record.lineage == home.id
    assert record.cap_bytes == CAP // 4 * 2 + HOME_OVERHEAD_BYTES, "what the two ranks on this host may take"
    assert record.together is not None
    assert record.description == DESCRIBED | {"platform": "", TOGETHER: record.together._asdict()}
    assert not (there.path / "index").exists()
    (own,) = list_homes(hosts.one)
    assert own.record is not None and not own.record.guest and own.record.lineage == home.id
    for files in ranks:
        files.close()
    assert the_guest(hosts.two).clean
    home.close(clean=True)


def test_a_home_of_one_host_says_nothing_new(hosts):
    home = acquire(hosts.one, spread=False)
    said = json.loads((home.path / "HOME").read_text())
    assert not {"lineage", "guest"} & said.keys(), "an older kvdisk takes no field that it does not know"
    assert guests_of(home, 4) is None
    with pytest.raises(ConfigError):
        join(hosts.two, 2, spec_of(home))
    assert not hosts.two.exists()
    home.close(clean=True)


def test_a_missing_home_of_one_host_is_an_error_on_another(hosts):
    home = acquire(hosts.one, spread=False)
    Store.open(hosts.two)
    with pytest.raises(DeviceError) as caught:
        join(hosts.two, 2, spec_of(home))
    assert caught.value.errno == errno.ENOENT
    assert not list_homes(hosts.two)
    home.close(clean=True)


def test_a_directory_that_hosts_share_has_the_home_already(hosts):
    home = acquire(hosts.one)
    ranks = [join(hosts.one, rank, spec_of(home)) for rank in range(4)]
    for files in ranks:
        files.open_segment(SPEC)
    assert len(list_homes(hosts.one)) == 1
    assert len(files_in(hosts.one)) == 4
    for files in ranks:
        files.close()
    home.close(clean=True)


def run(hosts: Hosts, known: tuple[int, ...], make: tuple[SegmentSpec, ...]) -> str:
    """One life of an engine; return the id of its home."""
    home = acquire(hosts.one)
    ranks = [join(hosts.of(rank), rank, spec_of(home, known)) for rank in range(4)]
    for segment in known:
        for files in ranks:
            files.open_segment(SPEC._replace(segment=segment, create=False))
    for each in make:
        for files in ranks:
            files.open_segment(each)
    for files in ranks:
        files.close()
    home.close(clean=True)
    return home.id


def test_a_takeover_takes_the_guest_over(hosts):
    first = run(hosts, (), (SPEC, SPEC._replace(segment=4)))
    second = run(hosts, (3,), ())
    third = run(hosts, (3,), ())
    assert len({first, second, third}) == 3
    (there,) = list_homes(hosts.two)
    assert there.id == third and there.record is not None and there.record.lineage == first
    assert files_in(hosts.two) == {"3/rank2.kv", "3/rank3.kv"}, "the other segment is not known"


def test_a_guest_that_is_held_is_waited_for(hosts):
    """A worker of the owner before may write on. Beside another guest its files would be lost."""
    home = acquire(hosts.one)
    late = join(hosts.two, 2, spec_of(home))
    late.open_segment(SPEC)
    home.close(clean=False)
    again = acquire(hosts.one)
    assert again.record.lineage == home.id and again.id != home.id
    new = HomeFiles(hosts.two, 2, 4)
    for _ in range(2):
        with pytest.raises(StoreLocked, match="cannot be taken over yet"):
            new.open_home(spec_of(again, (3,)))
        with pytest.raises(DeviceError) as caught:
            new.open_segment(SPEC._replace(create=False))
        assert caught.value.errno == errno.ENODEV, "nothing says that it is gone"
    assert {one.id for one in list_homes(hosts.two)} == {home.id}
    late.close()
    new.open_home(spec_of(again, (3,)))
    assert new.open_segment(SPEC._replace(create=False))
    assert {one.id for one in list_homes(hosts.two)} == {again.id}
    new.close()
    again.close(clean=True)


def test_a_guest_whose_lock_was_removed_is_taken_over_at_once(hosts):
    """Who holds a guest holds its directory, too."""
    run(hosts, (), (SPEC,))
    (there,) = list_homes(hosts.two)
    write_record(there.path, replace(the_guest(hosts.two), clean=False))  # as after a kill
    (there.path / "lock").unlink()
    home = acquire(hosts.one)
    files = join(hosts.two, 2, spec_of(home, (3,)))
    assert files.open_segment(SPEC._replace(create=False))
    assert {one.id for one in list_homes(hosts.two)} == {home.id}
    files.close()
    home.close(clean=True)


def test_a_guest_that_cannot_be_read_now_is_waited_for(hosts, monkeypatch):
    before = run(hosts, (), (SPEC,))
    home = acquire(hosts.one)
    files, real = HomeFiles(hosts.two, 2, 4), os.open

    def opening(path, *more, **how):
        if str(path) == str(hosts.two / "homes" / before / "HOME"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path, *more, **how)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", opening)
        with pytest.raises(StoreLocked):
            files.open_home(spec_of(home, (3,)))
    files.open_home(spec_of(home, (3,)))
    assert files.open_segment(SPEC._replace(create=False))
    files.close()
    home.close(clean=True)


def mounted_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *points: Path) -> None:
    """Let the system say that these are mounts of their own, and all else is the root's."""
    lines = [f"1 1 8:1 / {point} rw - ext4 /dev/x rw" for point in (Path("/"), *points)]
    (tmp_path / "mountinfo").write_text("\n".join(lines))
    monkeypatch.setattr(mounts, "MOUNTINFO_PATH", tmp_path / "mountinfo")


def test_a_host_whose_drive_is_not_mounted_gets_no_files(hosts, tmp_path, monkeypatch):
    """The directory in which it is mounted is there, and empty."""
    mounted_at(tmp_path, monkeypatch, hosts.one, hosts.two)
    run(hosts, (), (SPEC,))
    hosts.two.rename(tmp_path / "later")
    hosts.two.mkdir(mode=0o700)
    mounted_at(tmp_path, monkeypatch, hosts.one)
    home = acquire(hosts.one)
    files = HomeFiles(hosts.two, 2, 4)
    with pytest.raises(DeviceError, match="is its drive mounted") as caught:
        files.open_home(spec_of(home, (3,)))
    assert caught.value.errno == errno.ENODEV and not list(hosts.two.iterdir())
    hosts.two.rmdir()
    (tmp_path / "later").rename(hosts.two)
    mounted_at(tmp_path, monkeypatch, hosts.one, hosts.two)
    files.open_home(spec_of(home, (3,)))
    assert files.open_segment(SPEC._replace(create=False))
    files.close()
    home.close(clean=True)


@pytest.mark.parametrize("known", [(), (3,)], ids=["nothing is stored yet", "its drive is new"])
def test_a_host_that_is_new_gets_a_guest(hosts, tmp_path, monkeypatch, known):
    mounted_at(tmp_path, monkeypatch, hosts.one, *([hosts.two] if known else []))
    run(hosts, (), (SPEC,) if known else ())
    shutil.rmtree(hosts.two)
    home = acquire(hosts.one)
    files = join(hosts.two, 2, spec_of(home, known))
    with pytest.raises(DeviceError) as caught:
        files.open_segment(SPEC._replace(create=False))
    assert caught.value.errno == errno.ENOENT, "it is known to be gone"
    files.close()
    home.close(clean=True)


def test_a_guest_keeps_what_is_on_a_further_drive_that_is_away(hosts, tmp_path):
    places = [hosts.two, tmp_path / "nvme" / "more"]
    places[1].parent.mkdir()
    spec = SPEC._replace(drive=1)

    def life(known: tuple[int, ...]) -> tuple[Home, HomeFiles]:
        home = Store.open([hosts.one, tmp_path / "beside one"]).acquire_home(MINE, DESCRIBED, CAP, spread=True)
        files = HomeFiles(places, 2, 4)
        files.open_home(spec_of(home, known))
        return home, files

    home, files = life(())
    files.open_segment(SPEC)
    files.open_segment(spec._replace(segment=4))
    files.close()
    home.close(clean=True)
    places[1].parent.rename(tmp_path / "later")
    home, files = life((3, 4))
    assert files.open_segment(SPEC._replace(create=False))
    with pytest.raises(DeviceError) as caught:
        files.open_segment(spec._replace(segment=4, create=False))
    assert caught.value.errno == errno.ENODEV
    (tmp_path / "later").rename(places[1].parent)
    files.open_home(spec_of(home, (3, 4)))
    assert files.open_segment(spec._replace(segment=4, create=False)), "it was mounted meanwhile"
    files.close()
    home.close(clean=True)


def test_a_worker_of_the_owner_before_that_comes_late_writes_into_no_guest_of_the_next(hosts):
    home = acquire(hosts.one)
    before = spec_of(home)
    home.close(clean=False)
    again = acquire(hosts.one)
    new = join(hosts.two, 2, spec_of(again))
    new.open_segment(SPEC)
    late = join(hosts.two, 2, before)
    late.open_segment(SPEC)
    one, other = (list((hosts.two / "homes" / each.id).glob("segments/*/*")) for each in (again, home))
    assert len(one) == len(other) == 1
    for files in (new, late):
        files.close()
    again.close(clean=False)


@pytest.mark.parametrize("what", ["lineage", "fingerprint", "geometry"])
def test_another_engines_guest_is_left_alone(hosts, what):
    run(hosts, (), (SPEC,))
    (before,) = list_homes(hosts.two)
    lineage = "0" * 32 if what == "lineage" else the_guest(hosts.two).lineage
    described = {"model": "m", "geometry": {"ranks": 8}} if what == "geometry" else DESCRIBED
    spec = HomeSpec(
        "1" * 32, OTHER if what == "fingerprint" else MINE, (), GuestSpec(lineage, before.id, CAP, described)
    )
    join(hosts.two, 2, spec).close()
    assert {one.id for one in list_homes(hosts.two)} == {before.id, "1" * 32}
    assert files_in(hosts.two) == {"3/rank2.kv", "3/rank3.kv"}


def test_what_another_platform_has_computed_is_left_alone(hosts):
    """As where the drive of a host that is replaced comes along: the fingerprint has the platform
    of the scheduler's host alone."""
    run(hosts, (), (SPEC,))
    for platform, found in (("another", False), ("", True)):
        home = acquire(hosts.one)
        files = HomeFiles(hosts.two, 2, 4, platform=platform)
        files.open_home(spec_of(home, (3,)))
        with nullcontext() if found else pytest.raises(DeviceError):
            files.open_segment(SPEC._replace(create=False))
        files.close()
        home.close(clean=True)


def test_a_guest_of_another_namespace_is_not_joined(hosts):
    home = acquire(hosts.one)
    files = join(hosts.two, 2, spec_of(home))
    with pytest.raises(GeometryMismatch):
        join(hosts.two, 3, spec_of(home)._replace(fingerprint=OTHER))
    assert the_guest(hosts.two).fingerprint == MINE
    files.close()
    home.close(clean=True)


def test_what_a_crash_left_half_made_is_made_anew(hosts):
    run(hosts, (), (SPEC,))
    (there,) = list_homes(hosts.two)
    home = acquire(hosts.one)
    half = hosts.two / "homes" / home.id
    half.mkdir(mode=0o700)
    (half / "lock").touch(mode=0o600)
    files = join(hosts.two, 2, spec_of(home, (3,)))
    assert files.open_segment(SPEC._replace(create=False))
    assert not there.path.exists()
    files.close()
    home.close(clean=True)


def test_no_engine_takes_a_guest_for_its_own_store_nor_reads_its_index(hosts):
    run(hosts, (), (SPEC,))
    own = acquire(hosts.two)
    assert own.fresh
    assert readable_indexes(Store.open(hosts.two), DESCRIBED, own) == {}
    assert len(list_homes(hosts.two)) == 2
    own.close(clean=True)


def test_neighbours_are_those_whose_ranks_are_spread_as_ones_own(hosts):
    mine, alike, other = (acquire(hosts.one, spread=spread) for spread in (True, True, False))
    store = Store.open(hosts.one)
    assert readable_indexes(store, DESCRIBED, mine).keys() == {alike.id}
    assert readable_indexes(store, DESCRIBED, other) == {}
    for home in (mine, alike, other):
        home.close(clean=True)


def test_a_rank_opens_the_files_of_a_neighbours_guest(hosts):
    from kvdisk.messages import FOREIGN_SEGMENTS, ForeignSegment

    mine, theirs = acquire(hosts.one), acquire(hosts.one)
    reader, writer = join(hosts.two, 2, spec_of(mine)), join(hosts.two, 2, spec_of(theirs))
    writer.open_segment(SPEC)
    foreign = SPEC._replace(segment=FOREIGN_SEGMENTS, create=False, source=ForeignSegment(theirs.id, SPEC.segment))
    assert reader.open_segment(foreign)
    for held in (reader, writer, mine, theirs):
        held.close(clean=True) if isinstance(held, Home) else held.close()


# -- room ------------------------------------------------------------------------------------------


def test_a_guests_cap_is_its_ranks_share(hosts):
    home = acquire(hosts.one)
    few = spec_of(home)
    assert few.guests is not None
    few = few._replace(guests=few.guests._replace(rank_bytes=2 * CHARGE))
    files = join(hosts.two, 2, few)
    for segment in (0, 1):
        files.open_segment(SPEC._replace(segment=segment))
    more = SPEC._replace(segment=2, slot_count=64)
    with pytest.raises(DeviceError) as caught:
        files.open_segment(more)
    assert caught.value.errno == errno.ENOSPC
    other = join(hosts.two, 3, few._replace(guests=few.guests._replace(rank_bytes=CAP)))
    assert files.open_segment(more), "the other rank's share came with it"
    for each in (files, other):
        each.close()
    home.close(clean=True)


def test_orphans_make_way_for_a_guest_and_a_guest_that_is_one_for_others(hosts):
    run(hosts, (), (SPEC,))
    (old,) = list_homes(hosts.two)
    now = [time.time()]
    store = Store.open(hosts.two, clock=lambda: now[0])
    other = store.acquire_home(OTHER, {}, HOME_OVERHEAD_BYTES)
    assert old.path.exists(), "its engine may start after this one"
    now[0] += ORPHAN_SPARED_S + 1
    store.keep(other)
    assert not old.path.exists(), "no engine's cap has room for it"
    other.close(clean=True)
    home = acquire(hosts.one)
    few = spec_of(home)
    assert few.guests is not None
    files = join(hosts.two, 2, few._replace(guests=few.guests._replace(rank_bytes=CHARGE)))
    files.open_segment(SPEC)
    assert [one.id for one in list_homes(hosts.two) if one.record and one.record.guest] == [home.id]
    files.close()
    home.close(clean=True)


def test_what_a_dead_engine_left_is_trimmed_beside_a_guest(hosts):
    now = [2_000_000_000.0]
    store = Store.open(hosts.two, clock=lambda: now[0])
    dead = store.acquire_home(OTHER, {}, CAP)
    rank = store.join_home(dead.id, OTHER)
    store.make_segment(rank, SegmentSpec(1, 8192, 6000), 0, 1).close()
    home = acquire(hosts.one)
    spec = spec_of(home)
    assert spec.guests is not None
    guest = store.join_home(home.id, MINE, spec.guests._replace(rank_bytes=CHARGE))
    rank.close()
    dead.close(clean=True)
    now[0] += ORPHAN_SPARED_S + 1
    store.tend(guest)
    assert not dead.path.exists()
    guest.close()
    home.close(clean=True)


@pytest.mark.parametrize("count", [1, 2])
def test_other_hosts_have_room_for_their_ranks_part(hosts, count, monkeypatch, caplog):
    """As the scheduler's host has for its own, which is all that can be seen from there."""
    monkeypatch.setattr(Store, "room_bytes", lambda *_: rebuild_stores.CAP * 2 // 3)
    geometry = replace(rebuild_stores.GEOMETRY, hosts=count)
    described = {"model": "m", "geometry": describe_geometry(geometry)}
    config = rebuild_stores.config(hosts.one)
    parts = assemble_scheduler(config, geometry, rebuild_stores.NoPool(), Identity.certain(MINE, described))
    assert parts.home is not None and parts.home.is_spread == (count > 1)
    assert ("has room for" in caplog.text) == (count == 1)
    parts.close()


# -- what others do to it --------------------------------------------------------------------------


def test_ranks_look_after_their_guest(hosts):
    now = [2_000_000_000.0]
    home = acquire(hosts.one)
    store = Store.open(hosts.two, clock=lambda: now[0])
    guest = store.join_home(home.id, MINE, spec_of(home).guests)
    now[0] += 100
    for gone in (guest.path / "lock", hosts.two / "lock", hosts.two / "STORE"):
        gone.unlink()
    store.tend(guest)
    assert the_guest(hosts.two).last_use_s == now[0]
    assert (hosts.two / "STORE").exists()
    before = os.stat(guest.path / "HOME").st_ino
    store.tend(guest)
    assert os.stat(guest.path / "HOME").st_ino == before, "another rank has just done so"
    (listed,) = list_homes(hosts.two)
    assert listed.alive
    write_record(guest.path, replace(read_record(guest.path), last_use_s=int(now[0]) + 86_400))
    store.tend(guest)
    assert the_guest(hosts.two).last_use_s == now[0], "a clock was ahead, and nobody has tended it"
    store.leave(guest)
    assert the_guest(hosts.two).clean
    (listed,) = list_homes(hosts.two)
    assert not listed.alive
    home.close(clean=True)


def test_a_rank_says_that_it_cannot_look_after_its_guest(hosts, caplog):
    home = acquire(hosts.one)
    files = join(hosts.two, 2, spec_of(home))
    path = next(hosts.two.glob("homes/*/HOME"))
    record = path.read_bytes()
    path.unlink()
    assert not files.give_back()
    assert "a rank cannot maintain its part of the engine store" in caplog.text
    path.write_bytes(record)
    files.close()
    home.close(clean=True)


def test_a_guest_that_was_moved_away_is_left_alone(hosts):
    home = acquire(hosts.one)
    store = Store.open(hosts.two)
    guest = store.join_home(home.id, MINE, spec_of(home).guests)
    before = (guest.path / "HOME").read_bytes()
    guest.path.rename(hosts.two / "away")
    store.tend(guest)
    store.leave(guest)
    assert (hosts.two / "away" / "HOME").read_bytes() == before
    assert not guest.path.exists()
    home.close(clean=True)


def test_a_rank_says_whose_file_was_removed(hosts):
    home = acquire(hosts.one)
    files = join(hosts.two, 2, spec_of(home))
    opened = files.open_segment(SPEC)
    assert opened is not None and not files.give_back()
    shutil.rmtree(hosts.two / "homes")
    assert list(files.give_back()) == [3]
    assert os.fstat(opened.fd).st_blocks == 0
    assert list(files.give_back()) == [3], "as long as it is open"
    files.drop_segment(SPEC)
    assert not files.give_back()
    files.close()
    home.close(clean=True)


def test_a_segment_goes_with_the_files_of_ranks_that_were_here_before(hosts):
    """Such as after hosts have changed their numbers: nobody else removes them."""
    run(hosts, (), (SPEC, SPEC._replace(segment=4)))
    home = acquire(hosts.one)
    others = [HomeFiles(hosts.two, rank, 4) for rank in (0, 1)]
    for files in others:
        files.open_home(spec_of(home, (3,)))
    assert files_in(hosts.two) == {"3/rank2.kv", "3/rank3.kv"}
    with pytest.raises(DeviceError):
        others[0].open_segment(SPEC._replace(create=False))
    for files in others:
        files.drop_segment(SPEC)
    assert not files_in(hosts.two)
    for files in others:
        files.close()
    home.close(clean=True)


@pytest.mark.parametrize(
    "wrong", [{"lineage": "x"}, {"lineage": 3}, {"guest": 1, "lineage": "0" * 32}, {"guest": True}, {"other": ""}]
)
def test_a_home_with_wrong_fields_does_not_decode(hosts, wrong):
    home = acquire(hosts.one)
    file = home.path / "HOME"
    said = json.loads(file.read_text())
    del said["lineage"]
    file.write_text(json.dumps(said | wrong))
    with pytest.raises(CorruptRecord):
        read_record(home.path)
    home.release()


# -- KV that all ranks share -----------------------------------------------------------------------


def test_ranks_of_a_host_share_its_file(hosts):
    home = acquire(hosts.one)
    ranks = [HomeFiles(hosts.of(rank), rank, 4, sharers=2) for rank in range(4)]
    for files in ranks:
        files.open_home(spec_of(home))
    made = [files.open_segment(SPEC) for files in ranks]
    assert [file is not None for file in made] == [False, True, False, True], "segment 3 is of the odd ones"
    opened = [files.open_segment(SPEC._replace(create=False)) for files in ranks]
    assert [file is not None for file in opened] == [True, False, True, False]
    assert files_in(hosts.one) == {"3/rank0.kv"}
    assert files_in(hosts.two) == {"3/rank1.kv"}
    for files in ranks:
        files.drop_segment(SPEC)
    assert not files_in(hosts.one) | files_in(hosts.two)
    for files in ranks:
        files.close()
    home.close(clean=True)
