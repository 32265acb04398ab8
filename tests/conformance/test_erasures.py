# SPDX-License-Identifier: Apache-2.0
"""What is deleted or cleared on a drive is found by no later start, whatever ends this one. This
file is also the program that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.drive_blocks import bytes_for, gated_device, make_room, open_drive

from kvdisk.index.base import IndexState, Progress
from kvdisk.index.record_index import Index
from kvdisk.manager import bounds
from kvdisk.store import BlockStore, Get, Presence, Result
from kvdisk.testing.store_conformance import KINDS, finish, get_all, holds, key_of, make_rows, put_all, run_until

PLENTY = bytes_for(KINDS, 1000)
KEYS = [key_of(number) for number in range(40)]
GONE = KEYS[5:20]
LEFT = [*KEYS[:5], *KEYS[20:]]


def opened(path: Path, **settings: object) -> BlockStore:
    store = open_drive(path, KINDS, make_rows(), PLENTY, **settings)
    make_room(store)
    return store


def full(path: Path, **settings: object) -> BlockStore:
    """Return a store with all KEYS, committed."""
    rows = make_rows()
    store = open_drive(path, KINDS, rows, PLENTY, **settings)
    make_room(store)
    assert put_all(store, rows, KEYS) == [Result.DONE] * len(KEYS)
    run_until(store, lambda: not store.step(time.monotonic()), [])
    return store


def erase(store: BlockStore, how: str) -> list[Result]:
    """Delete GONE, or clear; return the results once that has ended."""
    if how == "delete":
        store.delete(90, GONE)
    else:
        store.clear(90)
    return list(finish(store, 90)[90].results)


def left_after(how: str) -> list[bytes]:
    return [bytes(key) for key in LEFT] if how == "delete" else []


def found_in(store: BlockStore) -> list[bytes]:
    return [bytes(key) for key, each in zip(KEYS, store.presence(KEYS), strict=True) if each == Presence.READY]


@pytest.mark.parametrize("how", ["delete", "clear"])
def test_a_restart_does_not_find_it(tmp_path: Path, how: str) -> None:
    """The rest is found, with its bytes, and what is put under a deleted key comes back."""
    store = full(tmp_path)
    assert set(erase(store, how)) == {Result.DONE}
    store.close()
    rows = make_rows()
    store = open_drive(tmp_path, KINDS, rows, PLENTY)
    assert sorted(found_in(store)) == sorted(left_after(how))
    found = dict(zip(KEYS, get_all(store, KEYS), strict=True))
    assert {result for key, result in found.items() if bytes(key) in left_after(how)} <= {Result.DONE}
    assert all(holds(rows, at, key, KINDS) for at, key in enumerate(KEYS) if found[key] is Result.DONE)
    make_room(store)
    assert put_all(store, rows, GONE, version=1) == [Result.DONE] * len(GONE)
    store.close()
    store = open_drive(tmp_path, KINDS, rows, PLENTY)
    assert get_all(store, GONE) == [Result.DONE] * len(GONE)
    assert all(holds(rows, at, key, KINDS, version=1) for at, key in enumerate(GONE))
    store.close()


def live(path: Path, how: str, reads: bool) -> None:
    """Erase, say that it is durable, and wait to be killed; ``reads``: while a drive hangs that
    reads what is erased. Steps end few copies each."""
    bounds.ENDED = 3
    with gated_device() as device:
        store = full(path)
        if reads:
            device.plan.hold = True
            store.get(80, [Get(key, at) for at, key in enumerate(GONE)])
            store.step(time.monotonic())
        results = erase(store, how)
        print(*{result.name for result in results}, flush=True)
        signal.pause()


@pytest.mark.parametrize("how", ["delete", "clear"])
@pytest.mark.parametrize("reads", [False, True])
def test_a_killed_store_does_not_bring_it_back(tmp_path: Path, how: str, reads: bool) -> None:
    """Once it has ended as DONE, also while a drive that hangs holds what is deleted."""
    command = [sys.executable, __file__, str(tmp_path), how, str(int(reads))]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "DONE\n"
        child.send_signal(signal.SIGKILL)
    store = open_drive(tmp_path, KINDS, make_rows(), PLENTY)
    assert sorted(found_in(store)) == sorted(left_after(how))
    assert get_all(store, LEFT).count(Result.DONE) == len(left_after(how))
    store.close()


@pytest.mark.parametrize("how", ["delete", "clear"])
def test_what_a_new_epoch_hides_is_erased_too(tmp_path: Path, how: str) -> None:
    """Nothing of before is here, and yet no later start finds it."""
    store = full(tmp_path)
    store.forget(77)
    assert set(erase(store, how)) == ({Result.ABSENT} if how == "delete" else {Result.DONE})
    store.close()
    store = open_drive(tmp_path, KINDS, make_rows(), PLENTY)
    assert sorted(found_in(store)) == sorted(left_after(how))
    store.close()


def test_a_new_epoch_does_not_take_an_erasure_back(tmp_path: Path) -> None:
    """``forget`` cancels other jobs; what is being deleted is durable all the same when it ends."""
    store = full(tmp_path)
    store.delete(90, GONE)
    store.forget(77)
    assert finish(store, 90)[90].results == [Result.DONE] * len(GONE)
    store.close()
    store = open_drive(tmp_path, KINDS, make_rows(), PLENTY)
    assert sorted(found_in(store)) == sorted(left_after("delete"))
    store.close()


def test_cleared_segments_give_their_bytes_back(tmp_path: Path) -> None:
    store = full(tmp_path)
    nvme = store._parts.nvme
    assert nvme is not None
    before = set(nvme.segments.specs)
    assert before
    assert erase(store, "clear") == [Result.DONE]
    run_until(store, lambda: not before & set(nvme.segments.specs), [])
    store.close()


@pytest.mark.parametrize(
    ("state", "result"), [(IndexState.REFUSING, Result.DEADLINE), (IndexState.GONE, Result.IO_ERROR)]
)
@pytest.mark.parametrize("how", ["delete", "clear"])
def test_what_cannot_be_committed_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: IndexState, result: Result, how: str
) -> None:
    """It is gone for this process, and the result is none of those that promise more."""
    store = full(tmp_path, io_deadline_s=0.5)
    nvme = store._parts.nvme
    assert nvme is not None
    index: Index = nvme._index
    said = index.poll()
    with monkeypatch.context() as patched:
        patched.setattr(index, "poll", lambda: Progress(said.committed, state, 0))
        assert set(erase(store, how)) == {result}
        assert sorted(found_in(store)) == sorted(left_after(how))
    store.close()


def test_copies_of_others_stay(tmp_path: Path) -> None:
    """Another engine of the store keeps its own, which are found there again; those who read what
    is deleted here get right bytes, or none."""
    other, rows = full(tmp_path), make_rows()
    store = open_drive(tmp_path, KINDS, rows, PLENTY)
    make_room(store)
    give_up_s = time.monotonic() + 60.0
    while len(found_in(store)) < len(KEYS):
        assert time.monotonic() < give_up_s
        store.ask(KEYS)
        run_until(store, lambda: Presence.ASKED not in store.presence(KEYS), [])
    assert set(erase(store, "delete")) == {Result.ABSENT}
    assert get_all(store, GONE) == [Result.DONE] * len(GONE)
    assert all(holds(rows, at, key, KINDS) for at, key in enumerate(GONE))
    assert erase(other, "clear") == [Result.DONE]
    for at, result in enumerate(get_all(store, KEYS)):
        assert result is not Result.DONE or holds(rows, at, KEYS[at], KINDS)
    store.close()
    other.close()


if __name__ == "__main__":
    live(Path(sys.argv[1]), sys.argv[2], bool(int(sys.argv[3])))
