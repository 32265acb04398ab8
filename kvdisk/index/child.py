# SPDX-License-Identifier: Apache-2.0
"""The parent's end of a process that maps LMDB files: start, questions, answers, and its death.

LMDB maps its files and has no checksums. A file that was cut short, an unreadable place on a drive
or a damaged record can end the process that maps it (SIGBUS, SIGSEGV, SIGABRT). So neither an
engine nor a tool maps one. A child process does, and answers questions, pickled on a pipe. It is a
new program and no fork, so it has none of the parent's memory or descriptors. It has a session of
its own, so that Ctrl-C in a terminal does not reach it. It ends with its parent, however the parent
ends.
"""

from __future__ import annotations

import errno
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection, Pipe
from typing import IO, Any

from kvdisk.errors import DeviceError, KvdiskError, NoThread, start_thread

MAIN = "kvdisk.index.child_main"
"""The module whose ``main`` the process runs. It alone imports LMDB."""
START_S = 120.0
"""Seconds that the process may take to start, on a machine that may be busy."""
REAP_S = 5.0
"""Seconds to wait for the end of a killed process: one that waits for a drive may not end."""
_DAMAGED = frozenset({signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT})


def open_last_words() -> IO[bytes]:
    """Open a file for what a process says when it fails: in memory, as a drive may be full. Where
    that is refused, it is not kept."""
    try:
        fd = os.memfd_create("kvdisk")
    except OSError:
        fd = os.open(os.devnull, os.O_RDWR)
    return os.fdopen(fd, "w+b")


class ChildEnded(KvdiskError):
    """The process has ended. ``damaged``: reading the file ended it. ``late``: it did not answer in
    time."""

    def __init__(self, what: str, *, damaged: bool = False, late: bool = False) -> None:
        super().__init__(what)
        self.damaged = damaged
        self.late = late


class CannotStart(DeviceError):
    """The process cannot start, which says nothing about an index."""


class Child:
    """The parent's end. The first question starts the process, and so does the first question after
    the process has ended.

    One thread at a time makes all calls but ``kill``. A question raises the KvdiskError that the
    process answers with; ChildEnded where the process ended meanwhile or did not answer in time;
    DeviceError where no process can be started.
    """

    def __init__(self, main: str = MAIN) -> None:
        self._main = main
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._said: IO[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process's number, None while there is none."""
        return None if self._process is None else self._process.pid

    def ask(self, timeout_s: float, *question: Any) -> Any:
        """Return the answer to a question that has one part."""
        (answer,) = self.parts(timeout_s, *question)
        return answer

    def parts(self, timeout_s: float, *question: Any) -> Generator[Any]:
        """Yield the parts of an answer as they come, each within ``timeout_s``. A caller that does
        not take all parts ends the process."""
        pipe = self._start() if self._pipe is None else self._pipe
        more = True
        try:
            with self._killed_after(2 * timeout_s):
                pipe.send(question)
                while True:
                    more, part = _received(pipe, timeout_s)
                    if not more:
                        break
                    yield part
        except TimeoutError as error:
            self.stop()
            raise ChildEnded(f"the process that reads it did not answer within {timeout_s:g} s", late=True) from error
        except (OSError, EOFError) as error:
            raise self._ended() from error
        except Exception as error:  # another version was installed meanwhile
            self.stop()
            raise ChildEnded("the process that reads it gave no sound answer") from error
        finally:
            if more:
                self.stop()
        if part is not None:
            raise part

    def kill(self) -> None:
        """Kill the process now: whoever waits for its answer gets ChildEnded. Any thread may call
        this."""
        process = self._process
        if process is not None:
            process.kill()

    def stop(self) -> str:
        """End the process, and return how it ended; "" where there is none."""
        return str(self._ended()) if self._process is not None else ""

    def _ended(self) -> ChildEnded:
        process, pipe, said = self._process, self._pipe, self._said
        assert process is not None and pipe is not None and said is not None
        self._process = self._pipe = self._said = None
        process.kill()
        pipe.close()
        with said:
            try:
                code = process.wait(REAP_S)
            except subprocess.TimeoutExpired:
                return ChildEnded("the process that reads it cannot be ended")
            said.seek(0)
            last_words = said.read().decode(errors="replace").strip().splitlines()[-1:]
        if -code in _DAMAGED:
            name = signal.Signals(-code).name
            return ChildEnded(f"the file is damaged, reading it ended in {name}", damaged=True)
        how = signal.Signals(-code).name if code < 0 else (last_words or [f"status {code}"])[0]
        return ChildEnded(f"the process that reads it failed, {how}")

    def _start(self) -> Connection:
        with ExitStack() as undo:
            try:
                said = undo.enter_context(open_last_words())
                ours, theirs = Pipe()
                undo.enter_context(ours)
                with theirs:
                    self._process = subprocess.Popen(  # noqa: S603 - our own module, in this same interpreter
                        [sys.executable, "-c", f"from {self._main} import main; main({theirs.fileno()})"],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=said,
                        pass_fds=[theirs.fileno()],
                        start_new_session=True,
                        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"},
                    )
            except OSError as error:
                raise CannotStart(error.errno or errno.EIO, "the process that reads indexes cannot start") from error
            self._pipe, self._said = ours, said
            undo.pop_all()
        try:
            _received(ours, START_S)
        except (TimeoutError, OSError, EOFError) as error:
            raise CannotStart(errno.EIO, f"the process that reads indexes cannot start, {self.stop()}") from error
        return ours

    @contextmanager
    def _killed_after(self, limit_s: float) -> Iterator[None]:
        """Kill the process after ``limit_s`` in the body: a write to the pipe, and the rest of a
        message that has begun to come, have no limit of their own."""
        if limit_s == math.inf:
            yield
            return
        timer = threading.Timer(min(limit_s, threading.TIMEOUT_MAX), self.kill)
        timer.daemon = True
        with suppress(NoThread):  # then there is no limit for these
            start_thread(timer)
        try:
            yield
        finally:
            timer.cancel()


def _received(pipe: Connection, timeout_s: float) -> Any:
    if not pipe.poll(None if timeout_s == math.inf else timeout_s):
        raise TimeoutError
    return pipe.recv()
