# SPDX-License-Identifier: Apache-2.0
"""Owners in processes of their own: who lives, who was killed, and who comes after."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvdisk.device.listing import list_homes
from kvdisk.device.store import Store
from kvdisk.errors import StoreLocked

MINE = bytes(range(32))
CAP = 64 << 20
GEOMETRY = {"geometry": {"ranks": 2}}

OWNER = """
import json, sys
from kvdisk.device.store import Store
path, fingerprint = sys.argv[1:]
home = Store.open(path).acquire_home(bytes.fromhex(fingerprint), {"geometry": {"ranks": 2}}, 64 << 20)
print(json.dumps({"id": home.id, "fresh": home.fresh}), flush=True)
for line in sys.stdin:
    if line == "mark\\n":
        (home.index_path / "mark").write_text(home.id)
    else:
        home.close(clean=True)
    print("done", flush=True)
"""


class Process:
    """A Python process that answers in lines."""

    def __init__(self, script: str, *arguments: str) -> None:
        command = [sys.executable, "-c", script, *arguments]
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def answer(self) -> str:
        line = self.child.stdout.readline().strip()
        assert line, "the process died"
        return line

    def ask(self, line: str) -> str:
        self.child.stdin.write(line + "\n")
        self.child.stdin.flush()
        return self.answer()

    def kill(self) -> None:
        """Kill -9 and wait until the kernel has taken its locks away."""
        self.child.kill()
        self.child.wait()
        self.child.stdin.close()
        self.child.stdout.close()


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "store")


@pytest.fixture
def start():
    started = []

    def run(script, *arguments) -> Process:
        started.append(Process(script, *arguments))
        return started[-1]

    yield run
    for process in started:
        process.kill()


def owner(start, path) -> tuple[Process, dict]:
    process = start(OWNER, path, MINE.hex())
    return process, json.loads(process.answer())


def alive(path) -> dict[str, bool]:
    return {summary.id: summary.alive for summary in list_homes(path)}


def test_a_living_owner_is_left_alone_and_a_killed_ones_home_is_taken_over(path, start):
    first, said = owner(start, path)
    first.ask("mark")
    store = Store.open(path)
    beside = store.acquire_home(MINE, GEOMETRY, CAP)
    assert beside.fresh
    assert alive(path) == {said["id"]: True, beside.id: True}
    first.kill()
    assert alive(path) == {said["id"]: False, beside.id: True}
    after = store.acquire_home(MINE, GEOMETRY, CAP)
    assert not after.fresh
    assert (after.index_path / "mark").read_text() == said["id"]
    assert alive(path) == {after.id: True, beside.id: True}
    for home in (after, beside):
        home.close(clean=True)


def test_engines_that_start_at_once_get_homes_of_their_own(path, start):
    first, _ = owner(start, path)
    first.ask("mark")
    first.kill()
    started = [start(OWNER, path, MINE.hex()) for _ in range(4)]
    answers = [json.loads(process.answer()) for process in started]
    assert sorted(answer["fresh"] for answer in answers) == [False, True, True, True], "one took the orphan over"
    assert alive(path) == {answer["id"]: True for answer in answers}
    assert len(alive(path)) == 4


HOLDS_THE_STORE = """
import sys
from kvdisk.device.store import Store
with Store.open(sys.argv[1]).locked():
    print("in", flush=True)
    sys.stdin.readline()
print("out", flush=True)
"""


def test_a_process_stopped_with_the_store_lock_holds_nobody_up(tmp_path):
    store = Store.open(tmp_path / "store")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS_THE_STORE, str(store.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        assert holder.stdout.readline() == "in\n"
        with pytest.raises(StoreLocked), store.locked(timeout_s=0.1):
            pass
        with pytest.raises(StoreLocked), store.locked(timeout_s=2.5):  # it is only slow
            pass
        os.kill(holder.pid, signal.SIGSTOP)
        with store.locked(timeout_s=600):
            with pytest.raises(StoreLocked), store.locked(timeout_s=0.1):
                pass
            os.kill(holder.pid, signal.SIGCONT)
            print(file=holder.stdin, flush=True)
            assert holder.stdout.readline() == "out\n"
            with pytest.raises(StoreLocked), store.locked(timeout_s=0.1):
                pass  # what it let go of was nothing
        with store.locked(timeout_s=0.1):
            assert int((store.path / "lock").read_text()) == os.getpid()
        assert (store.path / "lock").read_text().strip() == "", "who let go of it is not named"
    finally:
        holder.kill()
        holder.communicate()


STOPS_ONCE = """
import os, signal, sys
from kvdisk.device.store import Store
real = Store.measure
def stop_once(*arguments):
    Store.measure = real
    os.kill(os.getpid(), signal.SIGSTOP)
    return real(*arguments)
Store.measure = stop_once
home = Store.open(sys.argv[1:3]).acquire_home(bytes.fromhex(sys.argv[3]), {"geometry": {"ranks": 2}}, 64 << 20)
print(home.folder(1).path, flush=True)
sys.stdin.readline()
"""


def test_who_was_stopped_while_it_looked_at_the_homes_looks_again(path, tmp_path, start):
    """Else the folders of a home that was made meanwhile would be nobody's, and go."""
    dirs = [path, str(tmp_path / "further")]
    first = Store.open(dirs).acquire_home(MINE, GEOMETRY, CAP)
    stopped = start(STOPS_ONCE, *dirs, MINE.hex())
    _, status = os.waitpid(stopped.child.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    second = Store.open(dirs).acquire_home(MINE, GEOMETRY, CAP)
    os.kill(stopped.child.pid, signal.SIGCONT)
    third = Path(stopped.answer())
    assert first.folder(1).segments_path.is_dir() and second.folder(1).segments_path.is_dir() and third.is_dir()
    assert len(alive(dirs)) == 3
    for home in (first, second):
        home.close(clean=True)
