# SPDX-License-Identifier: Apache-2.0
"""Memory that is taken ahead of use: all of it, no further than there is room, until the end."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path

import numpy as np
import pytest
from support.waits import until

from kvdisk.geometry import ALIGNMENT
from kvdisk.worker import populate
from kvdisk.worker.arena import Arena
from kvdisk.worker.populate import LEFT_FREE_BYTES, PIECE_BYTES, Populating

PIECES = 5
PLENTY = 1 << 50


def resident_bytes(arena: Arena) -> int:
    """Return how much of an arena the kernel has given."""
    start = np.frombuffer(arena.memory, np.uint8).ctypes.data
    pages = (arena.total_bytes + mmap.PAGESIZE - 1) // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(start // mmap.PAGESIZE * 8)
        entries = np.frombuffer(file.read(8 * pages), np.uint64)
    return int((entries >> np.uint64(63)).sum()) * mmap.PAGESIZE


def pieces_taken(arenas: list[Arena]) -> list[int]:
    """Return of each how many pieces; a huge page may reach into the next one."""
    return [resident_bytes(arena) // PIECE_BYTES for arena in arenas]


@pytest.fixture
def arenas():
    """Two of them, of whose memory nothing is taken."""
    made = [Arena([PIECE_BYTES], [PIECES], pin=False), Arena([3 * ALIGNMENT], [7], pin=False)]
    assert not any(map(resident_bytes, made))
    yield made
    for arena in made:
        arena.close()


@pytest.fixture(params=["populated", "locked"])
def kernel(request, monkeypatch):
    """One that populates, and an older one, where pages are locked for a moment instead."""
    if request.param == "locked":
        monkeypatch.setattr(populate, "_POPULATE_WRITE", 9999)
        monkeypatch.setattr(populate, "PIECE_BYTES", 1 << 20)  # who is not root may lock so much


def test_after_a_while_all_is_taken_and_what_is_there_stays(arenas, kernel):
    arenas[0].view(0, 2)[:3] = b"abc"
    populating = Populating(arenas, lambda: PLENTY)
    until(lambda: not populating._thread.is_alive())
    assert [resident_bytes(arena) for arena in arenas] == [arena.total_bytes for arena in arenas]
    assert bytes(arenas[0].view(0, 2)[:4]) == b"abc\0"
    populating.close()
    populating.close()


@pytest.mark.parametrize("pieces", [0, 2])
def test_it_stops_where_little_is_free(arenas, pieces, caplog):
    caplog.set_level("INFO", "kvdisk")
    left = [LEFT_FREE_BYTES + PIECE_BYTES] * pieces + [LEFT_FREE_BYTES + PIECE_BYTES - 1]
    populating = Populating(arenas, lambda: left.pop(0))
    until(lambda: not populating._thread.is_alive())
    assert pieces_taken(arenas) == [pieces, 0]
    assert len(caplog.records) == 1
    populating.close()


def test_close_ends_it_after_the_piece_that_is_under_way(arenas):
    asked, go_on = threading.Event(), threading.Event()

    def free_bytes() -> int:
        asked.set()
        assert go_on.wait(60)
        return PLENTY

    populating = Populating(arenas, free_bytes)
    assert asked.wait(60)
    closing = threading.Thread(target=populating.close)
    closing.start()
    until(populating._closing.is_set)
    go_on.set()
    closing.join(60)
    assert not closing.is_alive()
    assert pieces_taken(arenas) == [1, 0]
