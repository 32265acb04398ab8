# SPDX-License-Identifier: Apache-2.0
"""A rank's segment file: made whole or not at all, refused unless it is what is asked for, and
removed without harm to others."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from pathlib import Path

import pytest
from support.open_files import open_below

from kvdisk.device import paths
from kvdisk.device.segment import DriveFolder, create_segment, drop_segment, open_segment, remove_unknown_segments
from kvdisk.errors import CorruptRecord, DeviceError, GeometryMismatch
from kvdisk.geometry import segment_file_bytes, slot_offset
from kvdisk.messages import SegmentSpec

FINGERPRINT = bytes(range(32))
SPEC = SegmentSpec(segment=5, slot_bytes=12288, slot_count=3)
FILE_BYTES = segment_file_bytes(SPEC.slot_bytes, SPEC.slot_count)


@pytest.fixture
def home(tmp_path):
    folder = DriveFolder(tmp_path / "homes" / ("a" * 32))
    folder.segments_path.mkdir(parents=True)
    return folder


def create(home, segment=5, rank=0):
    return create_segment(home, SPEC._replace(segment=segment), rank, 2, FINGERPRINT)


def path_of(home, rank=0) -> Path:
    return home.segments_path / "5" / f"rank{rank}.kv"


def names(home) -> list[str]:
    return sorted(path.relative_to(home.segments_path).as_posix() for path in home.segments_path.rglob("*"))


@pytest.mark.parametrize("umask", [0, 0o377])
def test_a_segment_is_made_whole_allocated_and_private(home, umask):
    before = os.umask(umask)
    try:
        made = create(home)
    finally:
        os.umask(before)
    assert (made.segment, made.rank, made.slot_bytes, made.slot_count) == (5, 0, 12288, 3)
    status = os.fstat(made.fd)
    assert status.st_size == FILE_BYTES == slot_offset(SPEC.slot_bytes, SPEC.slot_count)
    assert status.st_blocks * 512 >= FILE_BYTES
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert stat.S_IMODE(path_of(home).parent.stat().st_mode) == 0o700
    assert os.path.samestat(status, path_of(home).stat())
    assert not os.get_inheritable(made.fd)
    made.close()
    made.close()
    assert made.fd == -1
    assert names(home) == ["5", "5/rank0.kv"]


@pytest.mark.parametrize("at", ["flag", "transfer"])
def test_without_o_direct_the_file_is_buffered(home, monkeypatch, at):
    """Some file systems refuse the flag, others the transfers."""

    def refuses(real, refused):
        def call(*arguments):
            if refused(*arguments):
                raise OSError(errno.EINVAL, "Invalid argument")
            return real(*arguments)

        return call

    flags = fcntl.fcntl
    with monkeypatch.context() as patch:
        if at == "flag":
            refuse = refuses(flags, lambda _fd, _command, value=0: value & os.O_DIRECT)
            patch.setattr(fcntl, "fcntl", refuse)
        for name in ("preadv", "pwritev"):
            refuse = refuses(getattr(os, name), lambda fd, *_: flags(fd, fcntl.F_GETFL) & os.O_DIRECT)
            patch.setattr(os, name, refuse)
        made = create(home)
        opened = open_segment(home, SPEC, 0, 2, FINGERPRINT)
        os.pwritev(made.fd, [b"x"], slot_offset(SPEC.slot_bytes, 0))
    for file in (made, opened):
        assert not flags(file.fd, fcntl.F_GETFL) & (os.O_DIRECT | os.O_NONBLOCK)
        file.close()
    assert open_below(home.segments_path) == []


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def instead(make):
    return lambda path: (path.unlink(), make(path))


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda path: flip(path, 8), CorruptRecord),
        (lambda path: flip(path, 3000), CorruptRecord),
        (lambda path: os.truncate(path, 0), CorruptRecord),
        (lambda path: os.truncate(path, FILE_BYTES - 1), CorruptRecord),
        (instead(os.mkfifo), CorruptRecord),
        (instead(os.mkdir), CorruptRecord),
        (instead(lambda path: path.symlink_to("rank1.kv")), CorruptRecord),
        (SPEC._replace(slot_bytes=8192), GeometryMismatch),
        (SPEC._replace(slot_count=2), GeometryMismatch),
    ],
)
def test_a_file_that_is_not_what_is_asked_for_is_refused(home, damage, error):
    create(home).close()
    create(home, rank=1).close()
    if callable(damage):
        damage(path_of(home))
    with pytest.raises(error):
        open_segment(home, SPEC if callable(damage) else damage, 0, 2, FINGERPRINT)
    with pytest.raises((error, GeometryMismatch)):
        open_segment(home, SPEC, 0, 4, FINGERPRINT)
    assert open_below(home.segments_path) == []


def test_a_segment_is_never_made_over_another(home):
    create(home).close()
    before = path_of(home).stat().st_ino
    with pytest.raises(DeviceError) as caught:
        create(home)
    assert caught.value.errno == errno.EEXIST
    assert path_of(home).stat().st_ino == before
    assert names(home) == ["5", "5/rank0.kv"]


def test_a_full_drive_gives_everything_back(home, monkeypatch):
    real, kept = os.posix_fallocate, []

    def runs_out(fd, offset, length):
        real(fd, offset, length // 2)  # as the real one does, it leaves what it took
        kept.append(os.dup(fd))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", runs_out)
    with pytest.raises(DeviceError) as caught:
        create(home)
    assert caught.value.errno == errno.ENOSPC
    assert names(home) == []
    # Unlinking alone would leave the space to whoever has the file open.
    assert os.fstat(kept[0]).st_blocks == 0
    os.close(kept[0])
    assert open_below(home.segments_path) == []


def test_a_file_system_that_fails_as_a_file_is_closed_has_closed_it(home, monkeypatch):
    """As NFS and FUSE do: it is no error, and the number is not closed again, which others may have
    by then."""
    made, numbers, real = create(home), list[int](), os.close

    def fails(fd):
        numbers.append(fd)
        real(fd)
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "close", fails)
    made.close()
    made.close()
    monkeypatch.undo()
    assert len(numbers) == 1
    with pytest.raises(OSError, match="Bad file descriptor"):
        paths.close(numbers[0])  # a mistake of ours


def test_drops_and_what_a_crash_left_go_rank_by_rank(home):
    for segment in (1, 2, 5, 10):
        for rank in (0, 1):
            create(home, segment, rank).close()
    drop_segment(home, 5, 0)
    assert {"5", "5/rank1.kv"} <= set(names(home)) and "5/rank0.kv" not in names(home)
    drop_segment(home, 5, 1)
    drop_segment(home, 5, 1)
    assert "5" not in names(home)
    for name in ("2/rank0.kv.tmp", "2/rank1.kv.tmp", "10/rank0.kv.tmp", "7"):
        (home.segments_path / name).write_bytes(b"unfinished")
    (home.segments_path / "notes").mkdir()
    (home.segments_path / "notes" / "rank0.kv").write_bytes(b"not a segment")
    remove_unknown_segments(home, 0, {2, 3})
    rest = ["1", "1/rank1.kv", "10", "10/rank1.kv", "2", "2/rank0.kv", "2/rank1.kv", "2/rank1.kv.tmp"]
    assert names(home) == [*rest, "notes", "notes/rank0.kv"]
    remove_unknown_segments(home, 1, {2, 3})
    assert names(home) == ["2", "2/rank0.kv", "2/rank1.kv", "notes", "notes/rank0.kv"]


@pytest.mark.parametrize("level", ["segment", "segments", "home"])
def test_no_segment_is_reached_through_a_symlinked_directory(home, level, tmp_path):
    create(home).close()
    place = {"segment": path_of(home).parent, "segments": home.segments_path, "home": home.path}[level]
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    for spec, call in ((SPEC, open_segment), (SPEC._replace(segment=6), create_segment)):
        if level != "segment" or call is open_segment:
            with pytest.raises(DeviceError) as caught:
                call(home, spec, 0, 2, FINGERPRINT)
            assert caught.value.errno == errno.ENOTDIR
    with contextlib.suppress(DeviceError):
        drop_segment(home, 5, 0)
    assert list((tmp_path / "elsewhere").rglob("rank0.kv"))
    assert level != "segment" or names(home) == []


def test_a_folder_that_another_rank_removes_while_it_is_empty_is_made_again(home, monkeypatch):
    """As the cleaning of a rank that joins a little later does."""
    real, removed = paths.create_file, []

    def remove_first(path: Path) -> int:
        if not removed:
            removed.append(path.parent.rmdir())
        return real(path)

    monkeypatch.setattr(paths, "create_file", remove_first)
    create(home).close()
    assert names(home) == ["5", "5/rank0.kv"]
