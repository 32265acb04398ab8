# SPDX-License-Identifier: Apache-2.0
"""The parent's end of a process that maps LMDB files: questions, answers, and what its death means.

LMDB maps its files and has no checksums. A file that was cut short, an unreadable place on a drive
or a damaged record can end the process that maps it (SIGBUS, SIGSEGV, SIGABRT). So neither an
engine nor a tool maps one: a ``ChildProcess`` does, and answers questions.
"""

from __future__ import annotations

import errno
import signal
from collections.abc import Generator
from typing import Any

from kvdisk.child import ChildProcess
from kvdisk.errors import DeviceError, KvdiskError, NumberTaken

MAIN = "kvdisk.index.child_main"
"""The module whose ``main`` the process runs. It alone imports LMDB."""
START_S = 120.0
"""Seconds that the process may take to start, on a machine that may be busy."""
_MOST_NUMBERS = 16
"""Processes that are tried one after the other where their numbers are taken."""
_DAMAGED = frozenset({signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT})


class ChildEnded(KvdiskError):
    """The process has ended. ``damaged``: reading the file ended it. ``late``: it did not answer in
    time. ``killed``: a signal ended it that says nothing of the file, as where memory is short."""

    def __init__(self, what: str, *, damaged: bool = False, late: bool = False, killed: bool = False) -> None:
        super().__init__(what)
        self.damaged = damaged
        self.late = late
        self.killed = killed


class CannotStart(DeviceError):
    """The process cannot start, which says nothing about an index."""


class Killed(DeviceError):
    """The process was killed while it opened or read an index, which says nothing about that."""


class IndexProcess:
    """The parent's end. The first question starts the process, and so does the first question after
    the process has ended.

    One thread at a time makes all calls but ``kill``. A question raises the KvdiskError that the
    process answers with; ChildEnded where the process ended meanwhile or did not answer in time;
    DeviceError where no process can be started.
    """

    def __init__(self, main: str = MAIN) -> None:
        self._main = main
        self._child: ChildProcess | None = None

    @property
    def pid(self) -> int | None:
        """The process's number, None while there is none."""
        return None if self._child is None else self._child.pid

    def ask(self, timeout_s: float, *question: Any) -> Any:
        """Return the answer to a question that has one part."""
        (answer,) = self.parts(timeout_s, *question)
        return answer

    def parts(self, timeout_s: float, *question: Any) -> Generator[Any]:
        """Yield the parts of an answer as they come, each within ``timeout_s``. A caller that does
        not take all parts ends the process. One whose number is taken cannot open an index, so
        another one is asked."""
        for tries_left in reversed(range(_MOST_NUMBERS)):
            try:
                yield from self._parts(timeout_s, question)
            except NumberTaken:
                self.stop()
                if not tries_left:
                    raise
            else:
                return

    def _parts(self, timeout_s: float, question: tuple[Any, ...]) -> Generator[Any]:
        pipe = (self._child or self._start()).pipe
        more = True
        try:
            pipe.post(question)
            while True:
                more, part = pipe.receive(timeout_s)
                if not more:
                    break
                yield part
        except TimeoutError as error:
            self.stop()
            raise ChildEnded(f"the index process did not answer within {timeout_s:g} s", late=True) from error
        except (OSError, EOFError) as error:
            raise self._ended() from error
        except Exception as error:  # another version was installed meanwhile
            self.stop()
            raise ChildEnded("the index process gave a wrong answer") from error
        finally:
            if more:
                self.stop()
        if part is not None:
            raise part

    def kill(self) -> None:
        """Kill the process now: whoever waits for its answer gets ChildEnded. Any thread may call
        this."""
        child = self._child
        if child is not None:
            child.kill()

    def stop(self) -> None:
        """End the process. Idempotent."""
        if self._child is not None:
            self._ended()

    def _ended(self) -> ChildEnded:
        child, self._child = self._child, None
        assert child is not None
        ended = child.end()
        if ended.code is None:
            return ChildEnded("the index process cannot be killed")
        if -ended.code in _DAMAGED:
            return ChildEnded(f"the file is damaged: reading it ended in {ended.how}", damaged=True)
        return ChildEnded(f"the index process failed: {ended.how}", killed=ended.code < 0)

    def _start(self) -> ChildProcess:
        try:
            self._child = child = ChildProcess(self._main)
        except OSError as error:
            raise CannotStart(error.errno or errno.EIO, "the index process cannot start") from error
        try:
            child.pipe.receive(START_S)
        except (TimeoutError, OSError, EOFError) as error:
            how = self._ended()
            raise CannotStart(errno.EIO, f"the index process cannot start: {how}") from error
        return child
