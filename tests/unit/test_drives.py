# SPDX-License-Identifier: Apache-2.0
"""Stores with a directory on each of several drives, and other engines' homes."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest

from kvdisk.blocks import JobId
from kvdisk.device import drives, mounts
from kvdisk.device.listing import list_homes, readable_indexes
from kvdisk.device.store import Store
from kvdisk.device.watch import HomeWatch
from kvdisk.errors import ConfigError, CorruptRecord, DeviceError
from kvdisk.messages import FOREIGN_SEGMENTS, ForeignSegment, HomeSpec, Job, JobKind, Reason, SegmentSpec
from kvdisk.stats import Stats
from kvdisk.worker.device_io import DeviceIo
from kvdisk.worker.files import FileJobs, HomeFiles

MINE = bytes(range(32))
OTHER = b"\x77" * 32
CAP = 64 << 20
GEOMETRY = {"geometry": {"ranks": 1}}
SPEC = SegmentSpec(3, 8192, 4)


@pytest.fixture
def dirs(tmp_path):
    return [tmp_path / name for name in "abc"]


def acquire(dirs, fingerprint=MINE):
    return Store.open(dirs).acquire_home(fingerprint, GEOMETRY, CAP)


def joined(dirs, home) -> HomeFiles:
    files = HomeFiles(dirs, 0, 1)
    files.open_home(HomeSpec(home.id, home.fingerprint, (3,)))
    return files


def folders(path: Path) -> list[str]:
    return sorted(os.listdir(path / "homes"))


def jobs_over(files: HomeFiles) -> FileJobs:
    """Return jobs of files with no batch at the device."""
    device_io = DeviceIo(Mock(), None, io_deadline_s=60.0, stats=Stats(), log=Mock())
    return FileJobs(files, device_io, Mock(), threaded=False)


def test_all_files_of_a_home_are_written_in_place(dirs, monkeypatch):
    """What is made in a directory of btrfs does as that did then; on a full one a copy has no
    room."""
    found = {}

    def note(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        found[path] = {name for name in os.listdir(path) if name != "segments"}

    monkeypatch.setattr(drives, "write_in_place", note)
    home = acquire(dirs)
    parts = [folder.path for folder in home.folders]
    assert found == {path: set() for part in parts[1:] for path in (part, part / "segments")} | {
        parts[0]: {"lock"},
        parts[0] / "segments": set(),
    }
    assert (home.path / "index").is_dir()


def test_each_further_directory_is_part_of_the_first(dirs):
    home = acquire(dirs)
    assert home.drive_count == 3
    said = [json.loads((path / "STORE").read_text()) for path in dirs]
    assert "part_of" not in said[0]
    assert said[1]["part_of"] == said[2]["part_of"] == said[0]["store_id"]
    drives = json.loads((home.path / "HOME").read_text())["drives"]
    assert [drive["store_id"] for drive in drives] == [one["store_id"] for one in said]
    assert len({drive["store_id"] for drive in drives}) == 3
    assert [drive["folder"] for drive in drives] == ["", *folders(dirs[1]), *folders(dirs[2])]
    for path in (home.folder(1).path, home.folder(2).segments_path, dirs[1], dirs[2]):
        assert path.stat().st_mode & 0o777 == 0o700
    with pytest.raises(DeviceError):
        home.folder(3)
    home.close(clean=True)


def test_what_may_not_be_a_directory_of_a_store(dirs, tmp_path):
    acquire(dirs[:2]).close(clean=True)
    Store.open(tmp_path / "own")
    for wrong, why in [
        ([dirs[1]], "cannot be the first"),
        ([dirs[0], dirs[1], dirs[1]], "listed twice"),
        ([dirs[0], tmp_path / "own"], "store of its own"),
        ([tmp_path / "own", dirs[1]], "part of another store"),
        ([dirs[0], tmp_path / "x" / "y"], "is not a directory"),
    ]:
        with pytest.raises(ConfigError, match=why):
            Store.open(wrong)
    dirs[2].mkdir(mode=0o700)
    with pytest.raises(ConfigError, match="is not a kvdisk store"):
        Store.open(dirs, create=False)
    (tmp_path / "own" / "STORE").write_text("{")
    with pytest.raises(CorruptRecord):
        Store.open(tmp_path / "own")


def test_a_takeover_renames_in_the_first_directory_only_and_adds_new_drives(dirs):
    first = acquire(dirs[:2])
    files = joined(dirs[:2], first)
    files.open_segment(SPEC._replace(drive=1))
    files.close()
    first.close(clean=True)
    (folder,) = folders(dirs[1])
    home = acquire([dirs[0], dirs[2], dirs[1]])  # in another order
    assert not home.fresh and home.id != first.id
    assert folders(dirs[1]) == [folder]
    assert (home.folder(1).segments_path / "3" / "rank0.kv").exists(), "positions stay"
    assert home.folder(2).path.parent.parent == dirs[2]
    home.close(clean=True)
    beside = acquire(dirs[:2])
    assert beside.fresh, "a drive of the other is missing"
    assert {summary.id for summary in list_homes(dirs)} == {home.id, beside.id}
    beside.close(clean=True)


def test_a_deletion_takes_all_folders_and_the_cap_counts_them(dirs):
    home = acquire(dirs, OTHER)
    files = joined(dirs, home)
    for drive in range(3):
        files.open_segment(SegmentSpec(drive, 8192, 2500, drive))
    files.close()
    home.close(clean=True)
    (summary,) = list_homes(dirs)
    assert summary.allocated_bytes > 60_000_000
    assert [(file.segment, file.drive) for file in summary.segments] == [(0, 0), (1, 1), (2, 2)]
    mine = acquire(dirs)
    assert [len(folders(path)) for path in dirs] == [2, 2, 2]
    files = joined(dirs, mine)
    files.open_segment(SegmentSpec(9, 8192, 1000, 1))  # needs room
    assert [len(folders(path)) for path in dirs] == [1, 1, 1]
    files.close()
    mine.close(clean=True)


def test_folders_that_no_home_names_are_removed_at_a_start_unless_a_live_home_is_dumb(dirs):
    home = acquire(dirs)
    loose = dirs[1] / "homes" / ("d" * 32)
    (loose / "segments").mkdir(parents=True)
    (dirs[1] / "homes" / "notes").mkdir()
    text = (home.path / "HOME").read_text()
    (home.path / "HOME").write_text("{")
    beside = acquire(dirs)
    assert loose.exists(), "it may belong to the home that says nothing"
    (home.path / "HOME").write_text(text)
    third = acquire(dirs)
    assert not loose.exists() and (dirs[1] / "homes" / "notes").exists()
    assert home.folder(1).path.exists() and beside.folder(1).path.exists()
    for one in (home, beside, third):
        one.close(clean=True)


# -- other engines' homes ----------------------------------------------------------------------


def test_a_neighbours_segment_is_on_a_drive_of_our_own_list(dirs):
    theirs = acquire(dirs)
    their_files = joined(dirs, theirs)
    for drive in range(3):
        their_files.open_segment(SPEC._replace(segment=drive, drive=drive))
    ours = [dirs[0], dirs[2], dirs[1]]
    mine = acquire(ours)

    def open_theirs() -> tuple[list[Reason | None], dict[int, int]]:
        jobs = jobs_over(joined(ours, mine))
        for drive in range(3):
            source = ForeignSegment(theirs.id, drive)
            spec = SPEC._replace(segment=FOREIGN_SEGMENTS + drive, drive=drive, create=False, source=source)
            jobs.add(Job(JobId(drive), JobKind.OPEN_SEGMENT, segment=spec))
        reasons = [reason for _, reason in jobs.turn()]
        found = {segment - FOREIGN_SEGMENTS: file.drive for segment, file in jobs._device_io.open.items()}
        jobs.close()
        return reasons, found

    assert open_theirs() == ([None] * 3, {0: 0, 1: 2, 2: 1})
    mine.folder(1).segments_path.rmdir()
    mine.folder(1).segments_path.touch()
    assert open_theirs() == ([None, None, Reason.IO_ERROR], {0: 0, 1: 2}), "what is not open for ours is not for theirs"
    their_files.close()
    theirs.close(clean=True)
    mine.close(clean=True)


def test_which_homes_may_be_read(dirs):
    path = dirs[0]
    store = Store.open(path, boot_id="boot")
    mine, live, strange, damaged = (store.acquire_home(name, GEOMETRY, CAP) for name in (MINE, MINE, OTHER, MINE))
    other = store.acquire_home(MINE, {"geometry": {"ranks": 2}}, CAP)
    (damaged.path / "HOME").unlink()
    os.mkfifo(damaged.path / "HOME")  # hides none of the others

    def readable(boot_id: str = "boot") -> dict[str, Path]:
        return readable_indexes(Store.open(path, boot_id=boot_id), GEOMETRY, mine)

    assert readable() == {live.id: live.index_path}
    live.close(clean=False)
    assert readable().keys() == {live.id}, "nobody owns it, and it is of this boot"
    assert readable("later") == {}
    taken = store.acquire_home(MINE, GEOMETRY, CAP)
    assert readable().keys() == {taken.id}
    taken.remove_index()
    assert readable() == {}, "it is being rebuilt"
    (taken.new_index_path / "data.mdb").write_bytes(b"index")
    taken.place_index()
    assert readable() == {}
    taken.adopt_index()
    assert readable().keys() == {taken.id}
    taken.close(clean=True)
    assert readable("later").keys() == {taken.id}, "closed in order"
    for name in ("HOME", "HOME.tmp"):
        (path / "homes" / taken.id / name).write_text("{")
    assert readable() == {}
    shutil.rmtree(path / "homes" / taken.id)
    assert readable() == {}
    for home in (mine, strange, damaged, other):
        home.close(clean=True)


# -- drives that are away ----------------------------------------------------------------------


def mounted_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *points: Path, volumes: Sequence[Path] = ()) -> None:
    """Let the system say that these are mounts of their own, and all else is the root's.
    ``volumes``: of a container, which the host has on its own root."""
    lines = [f"1 1 8:{at} / {point} rw - ext4 /dev/x rw" for at, point in enumerate((Path("/"), *points))]
    lines += [f"1 1 9:1 /some/{at} {point} rw - ext4 /dev/y rw" for at, point in enumerate(volumes)]
    (tmp_path / "mountinfo").write_text("\n".join(lines))
    monkeypatch.setattr(mounts, "MOUNTINFO_PATH", tmp_path / "mountinfo")


@pytest.mark.parametrize("contained", [False, True])
def test_a_start_without_a_drive_whose_mount_point_is_there_is_refused(dirs, tmp_path, monkeypatch, contained):
    """As one whose directory is not there: nothing is made in its place, and nothing is lost."""
    mounted_at(tmp_path, monkeypatch, *dirs[:2])
    home = acquire(dirs[:2])
    files = joined(dirs[:2], home)
    files.open_segment(SPEC._replace(drive=1))
    files.close()
    home.close(clean=True)
    dirs[1].rename(tmp_path / "later")
    dirs[1].mkdir(mode=0o700)
    mounted_at(tmp_path, monkeypatch, dirs[0], volumes=[Path("/etc/hosts"), dirs[1]] if contained else ())
    with pytest.raises(ConfigError, match="mount it, or delete that engine store"):
        acquire(dirs[:2])
    assert not list(dirs[1].iterdir())
    mounted_at(tmp_path, monkeypatch, *dirs[:2])
    acquire(dirs[:2]).close(clean=True)
    shutil.rmtree(dirs[1])
    (tmp_path / "later").rename(dirs[1])
    after = acquire(dirs[:2])
    assert (after.folder(1).segments_path / "3" / "rank0.kv").exists()
    after.close(clean=True)


def test_a_directory_on_the_root_file_system_may_be_added(dirs, tmp_path, monkeypatch):
    mounted_at(tmp_path, monkeypatch, dirs[0])
    acquire(dirs[:1]).close(clean=True)
    home = acquire(dirs[:2])
    assert not home.fresh and home.drive_count == 2
    home.close(clean=True)


def test_a_rank_opens_a_drive_that_comes_later_and_the_watch_takes_one_that_goes_for_no_loss(dirs, tmp_path):
    home = acquire(dirs[:2])
    files = joined(dirs[:2], home)
    for drive in range(2):
        files.open_segment(SPEC._replace(segment=3 + drive, drive=drive))
    specs = {3 + drive: SPEC._replace(segment=3 + drive, drive=drive, create=False) for drive in range(2)}
    watch = HomeWatch(home, 1)
    assert not watch.lost_segments(specs)
    dirs[1].rename(tmp_path / "later")
    dirs[1].mkdir(mode=0o700)
    assert not watch.lost_segments(specs), "it is not there, with all that it has"
    files.close()
    again = HomeFiles(dirs[:2], 0, 1)
    spec = HomeSpec(home.id, home.fingerprint, (3, 4))
    again.open_home(spec)
    assert again.open_segment(specs[3])
    with pytest.raises(DeviceError) as caught:
        again.open_segment(specs[4])
    assert caught.value.errno == errno.ENODEV and not list(dirs[1].iterdir())
    dirs[1].rmdir()
    (tmp_path / "later").rename(dirs[1])
    again.open_home(spec)
    assert again.open_segment(specs[4]) and again.open_segment(specs[4]) is None, "it is open"
    (home.folder(1).segments_path / "4" / "rank0.kv").unlink()
    assert watch.lost_segments(specs) == {4}
    again.close()
    home.close(clean=True)


def test_a_process_with_few_descriptors_opens_what_it_may_and_leaves_some_to_others(dirs, monkeypatch):
    home = acquire(dirs[:1])
    files = joined(dirs[:1], home)
    for segment in range(40):
        files.open_segment(SPEC._replace(segment=segment))
    files.close()
    least = len(os.listdir("/proc/self/fd"))
    limit = (least + 20) * 4 // 3  # a quarter of few stays free
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    files = HomeFiles(dirs[:1], 0, 1)
    files.open_home(HomeSpec(home.id, home.fingerprint, tuple(range(40))))
    jobs = jobs_over(files)
    for segment in range(40):
        jobs.add(Job(JobId(segment), JobKind.OPEN_SEGMENT, segment=SPEC._replace(segment=segment, create=False)))
    reasons = [reason for _, reason in jobs.turn()]
    assert 10 < reasons.count(None) < 25 and reasons.count(Reason.IO_ERROR) == 40 - reasons.count(None)
    jobs.close()
    home.close(clean=True)


@pytest.mark.parametrize(
    ("number", "reason"),
    [(errno.ENOENT, Reason.ABSENT)]
    + [
        (number, Reason.IO_ERROR)
        for number in (
            errno.EMFILE,
            errno.ENFILE,
            errno.ENOMEM,
            errno.EAGAIN,
            errno.EACCES,
            errno.EIO,
            errno.ETIMEDOUT,
            errno.EROFS,
        )
    ],
)
def test_what_an_errno_says_of_a_segment(dirs, monkeypatch, number, reason):
    home = acquire(dirs[:1])
    files = joined(dirs[:1], home)
    files.open_segment(SPEC)
    files.close()
    jobs = jobs_over(joined(dirs[:1], home))
    real = os.open

    def opening(path, *more, **how):
        if str(path).endswith("rank0.kv"):
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *more, **how)

    monkeypatch.setattr(os, "open", opening)
    jobs.add(Job(JobId(1), JobKind.OPEN_SEGMENT, segment=SPEC._replace(create=False)))
    assert [reason for _, reason in jobs.turn()] == [reason]
    monkeypatch.undo()
    assert (home.segments_path / "3" / "rank0.kv").exists()
    jobs.close()
    home.close(clean=True)
