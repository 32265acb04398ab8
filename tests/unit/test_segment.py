# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from pathlib import Path

import pytest
from segment_files import FILE_BYTES, FINGERPRINT, SPEC, create, home_in, names, path_of

from kvdisk.device import segment as segment_room
from kvdisk.device.segment import (
    create_segment,
    drop_segment,
    open_segment,
    remove_unknown_segments,
)
from kvdisk.errors import CorruptRecord, DeviceError, GeometryMismatch
from kvdisk.geometry import slot_offset


@pytest.fixture
def home(tmp_path):
    return home_in(tmp_path)


def open_below(home) -> list[str]:
    """Return what this process has open in a directory: of other files somebody else may open and
    close some."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [name for name in found if name.startswith(f"{os.path.realpath(home.segments_path)}/")]


@pytest.fixture
def no_direct_transfer(monkeypatch):
    """A file system that takes O_DIRECT and refuses the transfers."""

    def wrap(real):
        def refuse(fd, *rest):
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return real(fd, *rest)

        return refuse

    monkeypatch.setattr(os, "preadv", wrap(os.preadv))
    monkeypatch.setattr(os, "pwritev", wrap(os.pwritev))


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


@pytest.mark.usefixtures("no_direct_transfer")
def test_without_o_direct_the_file_is_buffered_and_says_so(home):
    made = create(home)
    assert not fcntl.fcntl(made.fd, fcntl.F_GETFL) & os.O_DIRECT
    os.pwritev(made.fd, [b"x"], slot_offset(SPEC.slot_bytes, 0))
    made.close()
    open_segment(home, SPEC, 0, 2, FINGERPRINT).close()
    assert open_below(home) == []


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda path: flip(path, 8), CorruptRecord),
        (lambda path: flip(path, 3000), CorruptRecord),
        (lambda path: os.truncate(path, 0), CorruptRecord),
        (lambda path: os.truncate(path, FILE_BYTES - 1), CorruptRecord),
        (SPEC._replace(slot_bytes=8192), GeometryMismatch),
        (SPEC._replace(slot_count=2), GeometryMismatch),
    ],
)
def test_a_file_that_is_not_what_is_asked_for_is_refused(home, damage, error):
    create(home).close()
    if callable(damage):
        damage(path_of(home))
    with pytest.raises(error):
        open_segment(home, SPEC if callable(damage) else damage, 0, 2, FINGERPRINT)
    with pytest.raises((error, GeometryMismatch)):
        open_segment(home, SPEC, 0, 4, FINGERPRINT)
    assert open_below(home) == []


def test_a_segment_is_never_made_over_another(home):
    create(home).close()
    before = path_of(home).stat().st_ino
    with pytest.raises(DeviceError) as caught:
        create(home)
    assert caught.value.errno == errno.EEXIST
    assert path_of(home).stat().st_ino == before
    assert names(home) == ["5", "5/rank0.kv"]


def test_a_full_drive_gives_everything_back(home, monkeypatch):
    real = os.posix_fallocate
    kept = []

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
    assert open_below(home) == []


def test_drop_removes_one_ranks_file_and_the_directory_with_the_last(home):
    create(home, rank=0).close()
    create(home, rank=1).close()
    create(home, SPEC._replace(segment=6)).close()
    drop_segment(home, 5, 0)
    assert names(home) == ["5", "5/rank1.kv", "6", "6/rank0.kv"]
    drop_segment(home, 5, 1)
    drop_segment(home, 5, 1)
    assert names(home) == ["6", "6/rank0.kv"]


def test_unknown_segments_and_unfinished_files_of_this_rank_go(home):
    for segment in (1, 2, 10):
        for rank in (0, 1):
            create(home, SPEC._replace(segment=segment), rank=rank).close()
    for name in ("2/rank0.kv.tmp", "2/rank1.kv.tmp", "10/rank0.kv.tmp"):
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
    place = {"segment": path_of(home).parent, "segments": home.segments_path, "home": home.segments_path.parent}[level]
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    for spec, call in ((SPEC, open_segment), (SPEC._replace(segment=6), create_segment)):
        if level != "segment" or call is open_segment:
            with pytest.raises(DeviceError) as caught:
                call(home, spec, 0, 2, FINGERPRINT)
            assert caught.value.errno == errno.ENOTDIR
    if level == "segment":
        drop_segment(home, 5, 0)
        assert names(home) == []
        assert (tmp_path / "elsewhere" / "rank0.kv").exists()


def test_a_folder_that_another_rank_removes_while_it_is_empty_is_made_again(home, monkeypatch):
    """As the cleaning of a rank that joins a little later does."""
    allocate, removed = segment_room._allocate, []

    def remove_first(path: Path, byte_count: int) -> None:
        if not removed:
            removed.append(path.parent.rmdir())
        allocate(path, byte_count)

    monkeypatch.setattr(segment_room, "_allocate", remove_first)
    os.close(create(home).fd)
    assert names(home) == ["5", "5/rank0.kv"]
