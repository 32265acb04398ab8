# SPDX-License-Identifier: Apache-2.0
"""Ranks that make, drop and clean up files of one segment at the same time."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from segment_files import create, home_in, names, path_of

from kvdisk.device import segment as segment_room
from kvdisk.device.segment import drop_segment, remove_unknown_segments
from kvdisk.errors import DeviceError


@pytest.fixture
def home(tmp_path):
    return home_in(tmp_path)


@pytest.mark.parametrize("times", [1, 1000])
def test_a_folder_that_another_rank_removes_while_it_is_empty_is_made_again(home, monkeypatch, times):
    """As the cleaning of a rank that joins a little later does. For ever only where somebody else is at work there."""
    allocate, removed = segment_room._allocate, []

    def remove_first(path: Path, byte_count: int) -> None:
        if len(removed) < times:
            removed.append(path.parent.rmdir())
        allocate(path, byte_count)

    monkeypatch.setattr(segment_room, "_allocate", remove_first)
    if times == 1:
        os.close(create(home).fd)
        assert names(home) == ["5", "5/rank0.kv"]
    else:
        with pytest.raises(DeviceError) as caught:
            create(home)
        assert caught.value.errno == errno.ENOENT
        assert names(home) == []


@pytest.mark.parametrize("there_first", [False, True])
def test_a_folder_that_goes_while_it_is_being_made_is_made_again(home, monkeypatch, there_first):
    """Between making it and setting its mode, or between finding it there and looking at what it is."""
    folder, gone = path_of(home).parent, []
    meant = "lstat" if there_first else "chmod"
    real = getattr(Path, meant)

    def remove_first(path: Path, *arguments, **named):
        if path == folder and folder.exists() and not gone:
            gone.append(folder.rmdir())
        return real(path, *arguments, **named)

    def make(path: Path, mode: int) -> None:
        if there_first and not gone and path == folder:
            mkdir(path)
            monkeypatch.setattr(Path, meant, remove_first)
        mkdir(path, mode)

    mkdir = Path.mkdir
    monkeypatch.setattr(Path, "mkdir", make)
    if not there_first:
        monkeypatch.setattr(Path, meant, remove_first)
    create(home).close()
    assert gone == [None]
    assert names(home) == ["5", "5/rank0.kv"]


def test_what_another_rank_makes_while_this_one_cleans_up_stays(home, monkeypatch):
    """The folder is not there when the cleaning looks, and is when it removes what is there."""
    other, real = create(home, rank=1), segment_room.remove_anything
    folder = path_of(home).parent
    aside = folder.with_name("aside")
    folder.rename(aside)
    folder.write_bytes(b"no directory")

    def put_back(*arguments, **named) -> None:
        folder.unlink()
        aside.rename(folder)
        real(*arguments, **named)

    monkeypatch.setattr(segment_room, "remove_anything", put_back)
    remove_unknown_segments(home, 0, [])
    other.close()
    assert names(home) == ["5", "5/rank1.kv"]


def test_ranks_that_clean_up_and_make_at_once(home):
    """As two ranks do whose first jobs run at once: none takes from another what that is just making."""
    stop = threading.Event()

    def clean() -> None:
        while not stop.is_set():
            remove_unknown_segments(home, 1, [5])

    with ThreadPoolExecutor(1) as pool:
        cleaning = pool.submit(clean)
        try:
            for _ in range(200):
                create(home).close()
                drop_segment(home, 5, 0)
        finally:
            stop.set()
        cleaning.result()
    assert names(home) == []
