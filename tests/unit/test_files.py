# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest
from support.open_files import open_below

from kvdisk.device import store as stores
from kvdisk.device.store import Store
from kvdisk.errors import DeviceError, GeometryMismatch
from kvdisk.messages import HomeSpec, SegmentSpec
from kvdisk.worker.files import HomeFiles

FINGERPRINT = bytes(range(32))
SPEC = SegmentSpec(3, 8192, 4)


@pytest.fixture
def home(tmp_path):
    made = Store.open(tmp_path).acquire_home(FINGERPRINT, {}, 1 << 30)
    yield made
    made.close(clean=True)


@pytest.fixture
def spec(home):
    return HomeSpec(home.id, FINGERPRINT, (3,))


def test_files_that_the_index_does_not_know_are_removed(tmp_path, home, spec):
    for rank in range(2):
        files = HomeFiles(tmp_path, rank, 2)
        files.open_home(spec)
        for segment in (3, 4):
            files.open_segment(SPEC._replace(segment=segment))
        files.close()
    files = HomeFiles(tmp_path, 0, 2)
    files.open_home(spec)
    files.close()
    left = {path.relative_to(home.segments_path).as_posix() for path in home.segments_path.glob("*/*")}
    assert left == {"3/rank0.kv", "3/rank1.kv", "4/rank1.kv"}  # the other rank's are its own affair


def test_what_others_removed_gives_its_bytes_back_while_it_is_open(tmp_path, home, spec):
    """And no other file does; one that was only moved has a name yet."""
    files = HomeFiles(tmp_path, 0, 1)
    files.open_home(spec)
    opened = [files.open_segment(SPEC._replace(segment=segment)) for segment in (3, 4, 5)]
    length = os.fstat(opened[0].fd).st_size
    (home.segments_path / "3" / "rank0.kv").unlink()
    (home.segments_path / "4" / "rank0.kv").rename(tmp_path / "moved")
    for _ in range(2):
        files.give_back()
    found = [os.fstat(file.fd) for file in opened]
    assert [status.st_size for status in found] == [length] * 3
    assert found[0].st_blocks == 0 and min(found[1].st_blocks, found[2].st_blocks) > 0
    files.drop_segment(SPEC)
    files.close()
    files.give_back()


def test_what_cannot_be_opened_leaves_nothing_behind(tmp_path, home, spec):
    before = open_below(tmp_path)
    files = HomeFiles(tmp_path, 0, 1)
    with pytest.raises(DeviceError):
        files.open_segment(SPEC)  # no home
    with pytest.raises(DeviceError):
        files.open_home(spec._replace(home_id="0" * 32))
    with pytest.raises(GeometryMismatch):
        files.open_home(spec._replace(fingerprint=bytes(32)))
    assert open_below(tmp_path) == before
    files.open_home(spec)
    joined = open_below(tmp_path)
    with pytest.raises(DeviceError):
        files.open_segment(SPEC._replace(slot_count=1 << 40))
    with pytest.raises(DeviceError):
        files.open_segment(SPEC._replace(create=False))
    assert open_below(tmp_path) == joined
    assert os.listdir(home.segments_path) == []
    files.open_segment(SPEC)
    files.close()
    assert open_below(tmp_path) == before


def test_a_segment_is_not_made_while_another_holds_the_store(tmp_path, home, spec, monkeypatch):
    monkeypatch.setattr(stores, "LOCK_WAIT_S", 0.05)
    files = HomeFiles(tmp_path, 0, 1)
    files.open_home(spec)
    with Store.open(tmp_path).locked(), pytest.raises(DeviceError) as caught:
        files.open_segment(SPEC)
    assert caught.value.errno == errno.EAGAIN
    assert files.open_segment(SPEC) is not None
    files.close()


FEW_FILES = """
import resource, sys
from kvdisk.messages import HomeSpec, SegmentSpec
from kvdisk.worker.files import HomeFiles
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
files = HomeFiles(sys.argv[1], 0, 1)
files.open_home(HomeSpec(sys.argv[2], bytes(range(32)), ()))
print(len({files.open_segment(SegmentSpec(segment, 8192, 1)).fd for segment in range(80)}))
"""


def test_a_rank_has_as_many_files_open_as_the_system_allows_it(tmp_path, home):
    """A segment that could not be opened for want of descriptors would be given up, and its file
    removed."""
    done = subprocess.run(
        [sys.executable, "-c", FEW_FILES, str(tmp_path), home.id], capture_output=True, text=True, check=False
    )
    assert done.stdout == "80\n", done.stderr
