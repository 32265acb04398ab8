# SPDX-License-Identifier: Apache-2.0
"""What holds for every process of ours, whatever it does: it cannot start, dies, hangs, is killed,
does not read, or loses its parent."""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support import acting_child
from support.orphans import await_orphans_end
from support.refusing import run_refusing
from support.waits import WAIT_S, lives, stop, until

from kvdisk.child import ChildProcess, Ended

MAIN = acting_child.__name__
MIB = 1 << 20
SOON_S = 0.2


class Children:
    def __init__(self) -> None:
        self.made: list[ChildProcess] = []

    def start(self, act: str, *arguments: object, **settings: object) -> ChildProcess:
        self.made.append(ChildProcess(MAIN, act, *arguments, **settings))
        return self.made[-1]


@pytest.fixture
def children() -> Iterator[Children]:
    made = Children()
    yield made
    for child in made.made:
        child.end()
        assert not lives(child.pid)


def descriptors() -> set[str]:
    """Return what this process has open of the kinds that a child's parent opens: local sockets,
    pipes and files of memory. Threads that other tests left open and close files meanwhile."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(fd))) as end:
                    if end.family == socket.AF_UNIX:
                        found.add(target)
            elif target.startswith(("pipe:", "/memfd:kvdisk")):
                found.add(target)
    return found


# -- the pipe --------------------------------------------------------------------------------------


def test_messages_of_any_length_come_whole_and_in_order(children):
    child = children.start("echo")
    sizes = [0, 1, 5 * MIB, 7, 300_000]
    for size in sizes:
        child.pipe.post(bytes(size))
    assert [len(child.pipe.receive(WAIT_S)) for _ in sizes] == sizes
    assert child.end() == Ended(-signal.SIGKILL)


def test_messages_that_came_together_are_not_lost_between_two_ways_of_reading(children):
    child = children.start("echo")
    for number in range(100):
        child.pipe.post(number)
    heard = [child.pipe.receive(WAIT_S)]
    while len(heard) < 50:
        heard += child.pipe.look(WAIT_S)
    while len(heard) < 100:
        heard.append(child.pipe.receive(WAIT_S))
    assert heard == list(range(100))
    assert list(child.pipe.look()) == [] and not child.pipe.has_something()


def test_to_one_that_stands_still_nothing_waits_and_nothing_is_lost(children):
    child = children.start("echo")
    child.pipe.post("ready")
    assert child.pipe.receive(WAIT_S) == "ready"
    stop(child.pid)
    for number in range(20):
        child.pipe.post((number, bytes(MIB)))
    assert child.pipe.is_full and not list(child.pipe.look(SOON_S))
    with pytest.raises(TimeoutError):
        child.pipe.receive(SOON_S)
    os.kill(child.pid, signal.SIGCONT)
    assert [child.pipe.receive(WAIT_S)[0] for _ in range(20)] == list(range(20))
    assert not child.pipe.is_full


def test_half_a_message_is_none(children):
    child = children.start("stutter")
    until(child.pipe.has_something)
    with pytest.raises(TimeoutError):
        child.pipe.receive(SOON_S)
    assert list(child.pipe.look(SOON_S)) == []


def test_what_was_said_before_the_end_is_heard_and_then_the_end(children):
    child = children.start("echo")
    child.pipe.post("last")
    child.pipe.finish()
    assert [child.pipe.receive(WAIT_S) for _ in range(2)] == ["last", "bye"]
    with pytest.raises(EOFError):
        child.pipe.receive(WAIT_S)
    assert child.pipe.has_ended and list(child.pipe.look(WAIT_S)) == []
    child.pipe.post("to nobody")
    assert child.end(WAIT_S) == Ended(0)


def test_a_process_with_many_open_files_can_wait_for_one(children):
    """``select`` itself refuses descriptors above 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("no process may have so many open files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        child = children.start("echo")
        assert child.pipe.fileno() > 1023
        child.pipe.post("heard")
        assert child.pipe.receive(WAIT_S) == "heard"
        child.end()
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# -- the start -------------------------------------------------------------------------------------


def test_one_that_cannot_start_raises_and_leaves_nothing_open(monkeypatch):
    before = descriptors()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(OSError, match="No such file"):
        ChildProcess(MAIN, "echo")
    assert descriptors() == before


@pytest.mark.parametrize(
    ("start", "ended"),
    [
        (lambda: ChildProcess("no.such.module"), Ended(1, "ModuleNotFoundError: No module named 'no'")),
        (lambda: ChildProcess(MAIN, "complain"), Ended(1, "there is no such thing")),
        (lambda: ChildProcess(MAIN, "complain", keeps_words=False), Ended(1)),
    ],
)
def test_one_that_ends_at_once_has_last_words(start, ended):
    before = descriptors()
    child = start()
    with pytest.raises(EOFError):
        child.pipe.receive(WAIT_S)
    assert child.end(reap_s=WAIT_S) == ended, "it is not killed while it says them"
    assert child.end() == ended, "once"
    assert ended.how == (ended.last_words or "status 1")
    assert descriptors() == before


@pytest.mark.parametrize(("number", "how"), [(signal.SIGBUS, "SIGBUS"), (signal.SIGRTMIN + 2, "signal 36")])
def test_the_signal_that_ended_it_has_a_name(children, number, how):
    child = children.start("die", int(number))
    with pytest.raises(EOFError):
        child.pipe.receive(WAIT_S)
    assert child.end(reap_s=WAIT_S).how == how


def test_one_that_hangs_at_its_start_is_given_up_and_killed(children):
    child = children.start("hang")
    with pytest.raises(TimeoutError):
        child.pipe.receive(SOON_S)
    assert child.end().how == "SIGKILL"


def test_it_finds_modules_where_the_parent_does(children, tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("def main(descriptor, parent): raise SystemExit('found')")
    monkeypatch.syspath_prepend(tmp_path)
    child = ChildProcess("only_here")
    with pytest.raises(EOFError):
        child.pipe.receive(WAIT_S)
    assert child.end(WAIT_S).how == "found"


def test_nothing_lies_in_the_way_of_its_modules(tmp_path, monkeypatch):
    """Python looks into the working directory first, unless it is told not to."""
    (tmp_path / "pickle.py").write_text("raise SystemExit('of the working directory')")
    monkeypatch.chdir(tmp_path)
    child = ChildProcess(MAIN, "echo")
    child.pipe.post("heard")
    assert child.pipe.receive(WAIT_S) == "heard"
    child.end()


def test_it_has_the_descriptors_and_the_environment_that_it_is_given_and_no_others(children, tmp_path, monkeypatch):
    given, secret = tmp_path / "given", tmp_path / "secret"
    monkeypatch.setenv("OF_THE_USER", "his")
    with given.open("w") as file, secret.open("w") as other:
        os.set_inheritable(other.fileno(), True)
        for name, value in (("OURS", "ours"), ("OF_THE_USER", "his")):
            child = children.start("tell", name, fds=[file.fileno()], environment={"OURS": "ours", "OF_THE_USER": "no"})
            found, files, session, ignores = child.pipe.receive(WAIT_S)
            assert found == value, "the user's own counts more"
            assert str(given) in files and str(secret) not in files
            assert session == child.pid and ignores, "Ctrl-C and the end of a service do not reach it"


def test_where_memory_for_last_words_is_refused_they_are_lost_and_nothing_else():
    def serve() -> None:
        child = ChildProcess(MAIN, "echo")
        child.pipe.post("heard")
        assert child.pipe.receive(WAIT_S) == "heard"
        child.end()
        child = ChildProcess(MAIN, "complain")
        with pytest.raises(EOFError):
            child.pipe.receive(WAIT_S)
        assert child.end(WAIT_S) == Ended(1)

    run_refusing({"memfd_create": errno.EPERM}, serve)


# -- the end ---------------------------------------------------------------------------------------


def test_one_that_ends_when_its_pipe_is_closed_is_not_killed(children):
    child = children.start("echo")
    child.pipe.post("ready")
    child.pipe.receive(WAIT_S)
    assert child.end(WAIT_S) == Ended(0)


@pytest.mark.parametrize("stopped", [False, True])
def test_one_that_hangs_at_its_end_is_killed(children, stopped):
    child = children.start("hang")
    if stopped:
        stop(child.pid)
    assert child.end(SOON_S) == Ended(-signal.SIGKILL)
    assert not child.may_run


def test_killed_by_another_thread_who_waits_hears_of_it(children):
    child = children.start("hang")
    killing = threading.Timer(SOON_S, child.kill)
    killing.start()
    with pytest.raises(EOFError):
        child.pipe.receive()
    killing.join()
    assert child.end().how == "SIGKILL"
    child.kill()


def test_while_it_is_stopped_it_may_run_and_once_it_was_killed_it_may_not(children):
    child = children.start("hang")
    stop(child.pid)
    assert child.may_run, "it may be told to go on"
    child.kill()
    until(lambda: not child.may_run)
    assert child.end() == Ended(-signal.SIGKILL)


@pytest.mark.parametrize("act", ["echo", "flood"])
@pytest.mark.parametrize("forks", [False, True], ids=["alone", "with a fork"])
def test_it_ends_with_its_parent(act, forks):
    """Also where it waits for room in a full pipe, and a fork of the parent holds the other end."""
    script = textwrap.dedent(
        f"""
        import os, signal, time
        from kvdisk.child import ChildProcess
        child = ChildProcess({MAIN!r}, {act!r})
        child.pipe.post("ready")
        child.pipe.receive()
        if {forks} and os.fork() == 0:
            time.sleep(600)
        print(child.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    await_orphans_end(script, str(Path(acting_child.__file__).parents[1]))
