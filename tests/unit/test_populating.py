# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ctypes
import itertools
import mmap
import threading
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvdisk import assembly
from kvdisk.assembly import WorkerParts
from kvdisk.config import Config
from kvdisk.errors import ConfigError
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.worker import populating
from kvdisk.worker.arena import Arena
from kvdisk.worker.populating import STEP_BYTES, Populating, in_order

MIB = 1 << 20
WAIT_S = 600.0
SLOT_BYTES = 260 * 1024
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
HAS_HUGE_PAGES = HUGE_PAGES.exists() and "[never]" not in HUGE_PAGES.read_text("ascii")


@pytest.fixture
def arena():
    made = Arena((SLOT_BYTES, 12 * 1024), (100, 500), pin=False)
    yield made
    made.close()


def taken_bytes(memory: memoryview) -> int:
    """How much of a mapping the kernel has given memory for."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    pages = (ctypes.c_ubyte * (-(-memory.nbytes // mmap.PAGESIZE)))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(memory.nbytes), pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def touched_by(monkeypatch) -> list[int]:
    """Let the addresses be noted that are touched from now on."""
    found: list[int] = []
    monkeypatch.setattr(populating, "_find_touch", lambda: found.append)
    return found


def test_all_memory_is_taken_and_no_byte_of_it_changes(arena):
    rng = np.random.default_rng(0)
    slots = [arena.view(0, 0), arena.view(0, 99), *(arena.view(1, index) for index in range(160, 340))]
    written = [rng.bytes(slot.nbytes) for slot in slots]
    for slot, data in zip(slots, written, strict=True):
        slot[:] = data
    assert taken_bytes(arena.memory) < arena.memory.nbytes / 2
    running = Populating(arena.regions, [])
    assert running.wait(WAIT_S)
    if HAS_HUGE_PAGES:
        assert taken_bytes(arena.memory) > 0.9 * arena.memory.nbytes  # but what is no whole huge page at the ends
    assert [bytes(slot) for slot in slots] == written
    others = np.frombuffer(arena.view(0, 50), np.uint8)
    assert not others.any()
    running.close()


def test_every_huge_page_of_every_region_is_touched_once(arena, monkeypatch):
    touched = touched_by(monkeypatch)
    running = Populating(arena.regions, [])
    assert running.wait(WAIT_S)
    start = ctypes.addressof(ctypes.c_char.from_buffer(arena.memory))
    assert all(start <= address < start + arena.memory.nbytes for address in touched)
    pages = {address // STEP_BYTES for address in touched}
    assert pages == set(range(start // STEP_BYTES, (start + arena.total_bytes - 1) // STEP_BYTES + 1))
    assert len(touched) <= len(pages) + 3  # where regions, and their first parts, meet within one
    running.close()


def test_what_is_used_first_is_touched_first():
    tier, staging = [memoryview(bytes(range(60))), memoryview(bytes(range(100, 130)))], [memoryview(b"st")]
    order = [bytes(region) for region in in_order(tier, staging, 30)]
    assert order == [bytes(tier[0][:20]), bytes(tier[1][:10]), b"st", bytes(tier[0][20:]), bytes(tier[1][10:])]
    assert b"".join(in_order([], staging, 30)) == b"st"
    assert b"".join(in_order(tier, [], 1000)) == bytes(tier[0]) + bytes(tier[1])
    assert list(map(bytes, in_order([memoryview(b"")], [], 30))) == [b"", b""]


def test_the_rest_is_taken_slowly(arena, monkeypatch):
    """Each touch takes 2 ms of a clock that nothing else moves."""
    pauses_s: list[float] = []
    touches = itertools.count(1)
    clock = SimpleNamespace(now=0.0)

    class Going:
        """An event that is never set."""

        def wait(self, timeout: float) -> bool:
            pauses_s.append(timeout)
            return False

    def touch(_: int) -> None:
        next(touches)
        clock.now += 0.002

    monkeypatch.setattr(populating, "_find_touch", lambda: touch)
    monkeypatch.setattr(populating, "time", SimpleNamespace(monotonic=lambda: clock.now))
    populating._run(deque(arena.regions), 16 * MIB, Going(), populating._MEMINFO)
    assert len(pauses_s) == next(touches) - 1 > 12
    at_once = pauses_s.index(pytest.approx(0.018))
    assert 16 * MIB / STEP_BYTES <= at_once <= 16 * MIB / STEP_BYTES + 2  # the first is not a whole huge page
    assert pauses_s[:at_once] == [0.0] * at_once
    assert pauses_s[at_once:] == pytest.approx([0.018] * (len(pauses_s) - at_once))


def test_where_little_memory_is_left_none_is_taken(arena, monkeypatch, tmp_path):
    touched = touched_by(monkeypatch)
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  8000 kB\nMemFree:  10 kB\nMemAvailable:  999 kB\nHugePages_Total:  0\n")
    running = Populating(arena.regions, [], meminfo=meminfo)
    assert running.wait(WAIT_S)
    assert not touched
    meminfo.write_text("MemTotal:  8000 kB\nMemFree:  10 kB\nMemAvailable:  1000 kB\nHugePages_Total:  0\n")
    assert Populating(arena.regions, [], meminfo=meminfo).wait(WAIT_S)
    assert touched


@pytest.mark.parametrize("text", [None, "", "what", "MemTotal:\n", "MemTotal: 5 kB\n"])
def test_where_the_kernel_does_not_say_what_is_left_it_is_taken(arena, monkeypatch, tmp_path, text):
    touched = touched_by(monkeypatch)
    if text is not None:
        (tmp_path / "meminfo").write_text(text)
    assert Populating(arena.regions, [], meminfo=tmp_path / "meminfo").wait(WAIT_S)
    assert touched


def test_without_the_library_nothing_is_taken(arena, monkeypatch):
    monkeypatch.setattr(populating, "_ATOMIC_ADD", "no_such_function")
    assert Populating(arena.regions, []).wait(WAIT_S)
    assert taken_bytes(arena.memory) == 0


def test_close_waits_for_the_touch_under_way_and_no_other_follows(arena, monkeypatch):
    began, go_on = threading.Event(), threading.Event()
    touched: list[int] = []

    def touch(address: int) -> None:
        touched.append(address)
        began.set()
        go_on.wait(WAIT_S)

    monkeypatch.setattr(populating, "_find_touch", lambda: touch)
    running = Populating(arena.regions, [])
    assert began.wait(WAIT_S)
    closing = threading.Thread(target=running.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    go_on.set()
    closing.join(WAIT_S)
    assert running.wait(0)
    assert len(touched) == 1
    running.close()


def test_memory_stays_mapped_while_a_touch_hangs(arena, monkeypatch):
    began, go_on = threading.Event(), threading.Event()

    def touch(address: int) -> None:
        began.set()
        go_on.wait(WAIT_S)
        ctypes.c_char.from_address(address).value = b"x"  # a segmentation fault where it was given back

    monkeypatch.setattr(populating, "_find_touch", lambda: touch)
    monkeypatch.setattr(populating, "_CLOSE_TIMEOUT_S", 0.01)
    mapping = arena.memory.obj
    running = Populating(arena.regions, [])
    assert began.wait(WAIT_S)
    running.close()
    arena.close()
    assert not mapping.closed
    go_on.set()
    assert running.wait(WAIT_S)


def test_it_gives_the_memory_free_at_its_end(arena):
    mapping = arena.memory.obj
    running = Populating(arena.regions, arena.regions)
    running.close()
    arena.close()
    assert mapping.closed


def test_other_threads_lose_no_write_to_it(arena):
    """A word that is counted up beside touches of the very same place."""
    word = np.frombuffer(arena.memory, np.int32)[:1]
    address = ctypes.addressof(ctypes.c_char.from_buffer(arena.memory))
    touch = populating._find_touch()
    assert touch is not None
    touches = 0
    stop = threading.Event()

    def keep_touching() -> None:
        nonlocal touches
        while not stop.is_set():
            touch(address)
            touches += 1

    beside = threading.Thread(target=keep_touching)
    beside.start()
    try:
        for count in range(1, 500):
            word[0] = count
            before = touches
            while touches < before + 2 and beside.is_alive():
                time.sleep(0)
            assert word[0] == count
    finally:
        stop.set()
        beside.join()


@pytest.mark.parametrize(
    ("cpu_bytes", "drives"), [(64 * MIB, True), (64 * MIB, False), (0, True)], ids=["both", "memory", "drive"]
)
def test_a_worker_takes_what_it_will_use(tmp_path, monkeypatch, cpu_bytes, drives):
    touched = touched_by(monkeypatch)
    worker = make_worker(tmp_path, cpu_bytes=cpu_bytes, drives=drives)
    assert worker.populating is not None
    assert worker.populating.wait(WAIT_S)
    *tier, staging = worker.memory
    for memory, used in ((staging, drives), *((memory, True) for memory in tier)):
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory.memory))
        count = len({page for page in touched if start <= page < start + memory.memory.nbytes})
        assert (count >= memory.memory.nbytes // STEP_BYTES) if used else (count == 0)
    worker.close()


def test_a_worker_ends_it_before_it_gives_memory_back(tmp_path, monkeypatch):
    monkeypatch.setattr(populating, "_find_touch", lambda: lambda _: time.sleep(0.001))
    worker = make_worker(tmp_path, cpu_bytes=1 << 30, drives=False)
    mapping = worker.memory[0].memory.obj
    worker.close()
    assert worker.populating is not None
    assert worker.populating.wait(0)
    assert mapping.closed


def test_a_worker_that_cannot_be_made_ends_it(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise ConfigError("no such device")

    monkeypatch.setattr(assembly, "choose_device", refuse)
    monkeypatch.setattr(populating, "_find_touch", lambda: lambda _: time.sleep(0.001))
    with pytest.raises(ConfigError, match="no such device"):
        make_worker(tmp_path, cpu_bytes=1 << 30, drives=False)
    assert not [thread for thread in threading.enumerate() if thread.name == "kvdisk-populate"]


def make_worker(tmp_path: Path, *, cpu_bytes: int, drives: bool) -> WorkerParts:
    geometry = Geometry((GroupGeometry(0, 16, 256 * 1024, None),), 1, 16)
    where = {"store_dirs": (tmp_path / "store",), "nvme_bytes": 1 << 30} if drives else {}
    config = Config(cpu_bytes=cpu_bytes, device="posix", **where)
    layers = [[torch.zeros((4, 128 * 1024), dtype=torch.uint8) for _ in range(2)]]
    return assembly.assemble_worker(config, geometry, 0, layers)
