# SPDX-License-Identifier: Apache-2.0
"""``SharedStore`` over the stores that there are, and what only one on a drive can show."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.drive_blocks import bytes_for, gated_device, make_room, open_drive
from support.shared_rows import make_shared_rows
from support.waits import until

from kvdisk import shared_store
from kvdisk.mover_process import MoverProcess
from kvdisk.shared_store import SharedStore
from kvdisk.store import BlockKind, Memory
from kvdisk.store_face import BlockStoreFace, Ended, Get, Presence, Result
from kvdisk.testing.memory_blocks import MemoryBlocks
from kvdisk.testing.shared_conformance import SAFETY_S, SharedStoreConformance, chain_of, get_all, put_all
from kvdisk.testing.store_conformance import KINDS, ROWS, content_of, holds, key_of, make_rows

PLENTY = bytes_for(KINDS, 1000)
KEYS = [key_of(number) for number in range(12)]


class TestSharedMemoryBlocks(SharedStoreConformance):
    def open_store(self, path: Path, kinds: Sequence[BlockKind], memory: Memory, most_blocks: int) -> BlockStoreFace:
        return MemoryBlocks(kinds, memory, most_blocks)


class TestSharedBlockStore(SharedStoreConformance):
    """New stores: each test's first put finds no segment."""

    def open_store(self, path: Path, kinds: Sequence[BlockKind], memory: Memory, most_blocks: int) -> BlockStoreFace:
        return open_drive(path, kinds, memory, bytes_for(kinds, most_blocks))


def test_what_is_there_is_told_while_a_drive_hangs(tmp_path: Path) -> None:
    """Questions do not wait for jobs. Jobs end by their deadline, also where the store is being
    closed, and no row is touched afterwards."""
    rows = make_rows()
    with gated_device() as device:
        inner = open_drive(tmp_path, KINDS, rows, PLENTY, io_deadline_s=1.0)
        make_room(inner)
        store = SharedStore(inner)
        assert put_all(store, rows, KEYS) == [Result.DONE] * 12
        device.plan.hold = True
        hung = store.get([Get(KEYS[0], 20)])
        assert not hung.done()
        assert store.presence(KEYS) == bytes([Presence.READY] * 12)
        assert not store.close(0.0)
        assert hung.result(SAFETY_S) == [Result.DEADLINE]
        rows[20] = 55
        assert store.get([Get(KEYS[2], 22)]).result(0) == [Result.CANCELLED]
        device.opens.set()
        assert store.close(SAFETY_S)
        assert (rows[20] == 55).all()


def test_close_says_that_it_waits() -> None:
    """A drive that hangs holds it up; other calls answer meanwhile."""

    class Hanging(MemoryBlocks):
        goes_on = threading.Event()

        def close(self) -> None:
            self.goes_on.wait(SAFETY_S)
            super().close()

    store = SharedStore(Hanging(KINDS, make_rows()))
    assert not store.close(0.1)
    assert store.is_off
    assert store.presence(KEYS) == bytes(12)
    assert store.put(chain_of(KEYS)).result(0) == [Result.CANCELLED] * 12
    Hanging.goes_on.set()
    assert store.close(SAFETY_S)


def test_a_job_ends_before_the_step_after_it() -> None:
    listens, seen = threading.Event(), list[str]()

    class Watched(MemoryBlocks):
        def wait(self, wait_s: float) -> None:
            assert listens.wait(SAFETY_S)
            seen.append("answered")
            super().wait(wait_s)

        def poll(self, wait_s: float = 0.0) -> list[Ended]:
            return super().poll(wait_s) if "answered" in seen else []

        def step(self, now: float) -> bool:
            seen.append("step")
            return super().step(now)

    store = SharedStore(Watched(KINDS, make_rows()))
    future = store.put(chain_of(KEYS))
    future.add_done_callback(lambda _: seen.append("heard"))
    listens.set()
    assert future.result(SAFETY_S) == [Result.DONE] * 12
    assert store.close(SAFETY_S)
    assert seen[seen.index("answered") + 1] == "heard"


def test_questions_leave_the_stores_thread_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold the lock while it waits for the interpreter."""
    monkeypatch.setattr(shared_store, "_REST_S", 10 * SAFETY_S)
    monkeypatch.setattr(shared_store, "_SOON_S", 0.0)  # who waits at all waits for the rest's end
    steps = 0

    class Counted(MemoryBlocks):
        def step(self, now: float) -> bool:
            nonlocal steps
            steps += 1
            super().step(now)
            return False

    store = SharedStore(Counted(KINDS, make_rows()))
    assert store.put(chain_of(KEYS)).result(SAFETY_S) == [Result.DONE] * 12
    until(lambda: store._has_work._cond._waiters, "rest")  # type: ignore[attr-defined]
    before = steps
    for _ in range(50):
        store.reached(KEYS)
        assert store.longest_prefix(KEYS, 1.0) == 12
        store.hold(KEYS, 1.0)
        assert len(store.keys()) == 12 and store.usage().total_bytes and store.figures()
    assert not store._has_work.is_set() and steps == before
    assert store.delete(KEYS).result(SAFETY_S) == [Result.DONE] * 12, "a job wakes it"
    assert store.close(SAFETY_S)


def test_a_question_does_not_wait_for_the_mover(tmp_path: Path) -> None:
    """The store's thread waits for its mover without the lock."""

    class Waiting(MemoryBlocks):
        waits, goes_on = threading.Event(), threading.Event()

        def poll(self, wait_s: float = 0.0) -> list[Ended]:
            return super().poll(wait_s) if self.goes_on.is_set() else []

        def wait(self, wait_s: float) -> None:
            self.waits.set()
            self.goes_on.wait(SAFETY_S)

    rows = make_rows()
    inner = Waiting(KINDS, rows)
    store = SharedStore(inner)
    future = store.put(chain_of(KEYS))
    assert inner.waits.wait(SAFETY_S)
    assert store.presence(KEYS) == bytes([Presence.COMING] * 12)
    more = store.get([Get(KEYS[0], 30)])
    assert not future.done()
    inner.goes_on.set()
    assert future.result(SAFETY_S) == [Result.DONE] * 12
    assert more.result(SAFETY_S) == [Result.ABSENT]
    assert store.close(SAFETY_S)


def test_an_error_of_ours_is_a_result(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged once; the store is off, and every job is CANCELLED."""
    rows = make_rows()
    with gated_device() as device:
        inner = open_drive(tmp_path, KINDS, rows, PLENTY)
        make_room(inner)
        store = SharedStore(inner)
        put_all(store, rows, KEYS)
        device.plan.hold = True
        out = store.get([Get(KEYS[0], 20)])
        device.fails = True
        until(lambda: store.is_off)
        device.opens.set()
        assert out.result(SAFETY_S) in ([Result.CANCELLED], [Result.DONE])
        assert store.put(chain_of(KEYS)).result(SAFETY_S) == [Result.CANCELLED] * 12
        assert store.presence(KEYS) == bytes(12)
        assert store.find(KEYS) == bytes(12)
        assert store.close(SAFETY_S)
    assert [record.levelno for record in caplog.records if "has a bug" in record.message] == [logging.ERROR]


def test_a_step_that_fails_is_a_result(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also on the thread of a caller."""

    class Failing(MemoryBlocks):
        fails = False

        def step(self, now: float) -> bool:
            if self.fails:
                raise RuntimeError("ours")
            return super().step(now)

    rows = make_rows()
    inner = Failing(KINDS, rows)
    store = SharedStore(inner)
    put_all(store, rows, KEYS)
    inner.fails = True
    assert store.get([Get(KEYS[0], 20)]).result(SAFETY_S) == [Result.CANCELLED]
    assert store.is_off
    assert store.close(SAFETY_S)
    assert sum("has a bug" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("call", ["put", "get", "hold", "reached", "usage", "wait"])
def test_a_bug_in_any_call_is_no_exception(caplog: pytest.LogCaptureFixture, call: str) -> None:
    """Nor does it leave a job without an end: the store goes off, and says so once."""

    def fail(*_: object) -> None:
        raise RuntimeError("ours")

    class Stuck(MemoryBlocks):
        def poll(self, wait_s: float = 0.0) -> list[Ended]:
            return super().poll(wait_s) if self.is_off else []

    inner = Stuck(KINDS, make_rows())
    store = SharedStore(inner)
    out = store.put(chain_of(KEYS))
    setattr(inner, call, fail)
    jobs = [out, store.put(chain_of(KEYS)), store.get([Get(KEYS[0], 0)])]
    store.hold(KEYS, 1.0)
    store.reached(KEYS)
    assert store.usage() == (0, {}, 0)
    assert [set(job.result(SAFETY_S)) for job in jobs] == [{Result.CANCELLED}] * 3
    assert store.is_off
    assert store.close(SAFETY_S)
    assert sum("has a bug" in record.message for record in caplog.records) == 1


def test_a_callback_that_ends_its_thread_harms_nobody() -> None:
    """Whatever it raises: the jobs of others end."""

    def leave(_: object) -> None:
        raise SystemExit

    rows = make_rows()
    store = SharedStore(MemoryBlocks(KINDS, rows))
    store.put(chain_of(KEYS)).add_done_callback(leave)
    assert put_all(store, rows, [key_of(50)]) == [Result.DONE]
    assert store.close(SAFETY_S)


def test_over_a_mover_process_that_dies(tmp_path: Path) -> None:
    """Bytes move through rows that both map; after its death every job is CANCELLED."""
    rows = make_shared_rows(ROWS)
    movers = list[MoverProcess]()

    def start(*arguments: object) -> MoverProcess:
        movers.append(MoverProcess(*arguments))  # type: ignore[arg-type]
        return movers[0]

    store = SharedStore(open_drive(tmp_path, KINDS, rows, PLENTY, start))
    assert put_all(store, rows, KEYS) == [Result.DONE] * 12
    rows[:] = 0
    assert get_all(store, KEYS) == [Result.DONE] * 12
    assert all(holds(rows, at, key, KINDS) for at, key in enumerate(KEYS))
    os.kill(movers[0].pid, signal.SIGKILL)
    until(lambda: store.is_off)
    assert get_all(store, KEYS) == [Result.CANCELLED] * 12
    assert store.presence(KEYS) == bytes(12)
    assert store.close(SAFETY_S)


def test_a_put_waits_as_long_as_it_says(tmp_path: Path) -> None:
    """A new store has no room at first: what may not wait is NO_ROOM, and what may is DONE."""
    rows = make_rows()
    store = SharedStore(open_drive(tmp_path, KINDS, rows, PLENTY))
    assert store.put(chain_of(KEYS), wait_s=0.0).result(SAFETY_S) == [Result.NO_ROOM] * 12
    for at, key in enumerate(KEYS):
        rows[at] = content_of(key)
    assert store.put(chain_of(KEYS), wait_s=SAFETY_S).result(SAFETY_S) == [Result.DONE] * 12
    assert store.close(SAFETY_S)
