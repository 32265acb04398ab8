# SPDX-License-Identifier: Apache-2.0
"""kvdisk's exceptions, and warnings that can neither flood the log nor forge a line of it.

An operating failure within a transfer is a value (``messages.Reason``), not an exception.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

WARNING_INTERVAL_S = 60.0
OF_PROCESS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""By which the system says that this process, or the machine, lacks open files or memory."""


def printable(value: object) -> str:
    """Return a value of unknown origin as text of one line that cannot control a terminal; ``?``
    for None."""
    if value is None:
        return "?"
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in str(value))


class KvdiskError(Exception):
    """The base of every exception that kvdisk raises on purpose.

    ``is_of_process``: True where this process or the machine lacks open files or memory, so that
    the store is not at fault.
    """

    is_of_process = False


class ConfigError(KvdiskError):
    """The configuration, or the model, cannot be served. The text is one sentence for the user."""


class GeometryMismatch(KvdiskError):
    """A file or record was made for other sizes or another namespace than those at hand."""


class StoreLocked(KvdiskError):
    """Another live process owns what was asked for."""


class CorruptRecord(KvdiskError):
    """The bytes of a header, record or control file do not decode."""


class DeviceError(KvdiskError):
    """A system call on the store failed. ``errno`` says how (``errno.EIO`` for a short
    transfer)."""

    def __init__(self, errno_: int, what: str) -> None:
        super().__init__(f"{what}: errno {errno_}")
        self.errno = errno_
        self._what = what
        self.is_of_process = errno_ in OF_PROCESS

    def __reduce__(self) -> tuple[type[DeviceError], tuple[int, str]]:
        return type(self), (self.errno, self._what)


class NoThread(DeviceError):
    """This process, its container or the machine may have no more threads."""

    def __init__(self) -> None:
        super().__init__(errno.EAGAIN, "no thread can be started: ulimit -u, or the container's pids.max, is too low")
        self.is_of_process = True

    def __reduce__(self) -> tuple[type[NoThread], tuple[()]]:  # type: ignore[override]
        return type(self), ()


class NumberTaken(DeviceError):
    """Another container has a process of this one's number, which has the same index open. LMDB
    knows its readers by their numbers, so a process of another one has to open it."""


@contextmanager
def thread_errors() -> Iterator[None]:
    """Turn Python's error where a thread cannot be started in the body into NoThread."""
    try:
        yield
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        raise NoThread from error


def start_thread(thread: threading.Thread) -> None:
    """Start a thread. Raises NoThread."""
    with thread_errors():
        thread.start()


class QuietLog:
    """Warns once per cause and interval, so that nothing floods the log. One thread makes all
    calls."""

    def __init__(self, clock: Callable[[], float], log: logging.Logger) -> None:
        self._clock = clock
        self._log = log
        self._last_s: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def warn(self, cause: str, text: str) -> None:
        """Log ``text``, unless this ``cause`` (one of a closed list) was logged within
        WARNING_INTERVAL_S. What others have written may be in it."""
        now_s = self._clock()
        last_s = self._last_s.get(cause)
        if last_s is not None and now_s - last_s < WARNING_INTERVAL_S:
            self._left_out[cause] = self._left_out.get(cause, 0) + 1
            return
        self._last_s[cause] = now_s
        left_out = self._left_out.pop(cause, 0)
        self._log.warning("kvdisk: %s%s", printable(text), f" ({left_out} more like it before)" if left_out else "")


class EngineLog:
    """Logs what another engine's threads must not see: they end, or the engine does, with an
    exception of ours. Any thread. ``engine``: its name, as its users write it."""

    def __init__(self, engine: str, log: logging.Logger) -> None:
        self._engine = engine
        self._log = log
        self._quiet = QuietLog(time.monotonic, log)
        self._lock = threading.Lock()
        self._traced: set[str] = set()

    def error(self, call: str, error: Exception) -> None:
        """Log an exception: whence it came once for each kind, and after that a line a minute at
        most. ``call``: what failed, one of a closed list."""
        cause = f"{call}: {type(error).__name__}"
        with self._lock:
            is_new = cause not in self._traced
            self._traced.add(cause)
        if is_new:
            self._log.error("kvdisk's %s failed, and %s goes on without it", call, self._engine, exc_info=error)
        else:
            self.warn(cause, f"{call} failed, and {self._engine} goes on without it: {error}")

    def warn(self, cause: str, text: str) -> None:
        """See ``QuietLog.warn``."""
        with self._lock:
            self._quiet.warn(cause, text)
