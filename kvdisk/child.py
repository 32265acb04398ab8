# SPDX-License-Identifier: Apache-2.0
"""A process of ours beside this one: its start, the pipe to it, and its end.

What may hang, crash or be held up by a drive runs in a process of its own. It is a new program and
no fork, so it has none of the parent's memory, and of its descriptors only those that it is given.
It is of the same Python, and finds modules where the parent does. It has a session of its own and
ignores SIGINT and SIGTERM: who ends a terminal, a group or a service ends the parent, too. It ends
with its parent, however the parent ends, also where a fork of the parent holds the pipe open.
"""

from __future__ import annotations

import math
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple

LOOK_S = 1.0
"""How often a process that waits looks whether its parent is still there."""
REAP_S = 5.0
"""How long the end of a killed process is awaited: one that waits for a drive may not end."""
_LENGTH = struct.Struct("!Q")
_CHUNK_BYTES = 1 << 18
"""More than the kernel keeps of one pipe by default."""
_MOST_WAIT_S = 3600.0
"""Longer waits are several: the kernel counts milliseconds in 31 bits."""


class Pipe:
    """One end of the pipe between a process and its parent: pickles, each behind its length.

    One thread at a time makes all calls but ``wait``. ``has_ended``: whether the other end was
    found closed; what had come before is still returned.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._unsent, self._unread = bytearray(), bytearray()
        self.has_ended = False

    def fileno(self) -> int:
        """Return the descriptor, to wait for it elsewhere."""
        return self._socket.fileno()

    @property
    def is_full(self) -> bool:
        """Whether something that was posted is not sent yet."""
        return bool(self._unsent)

    def post(self, what: Any) -> None:
        """Send as much as the pipe takes. ``look`` and ``receive`` send the rest. Does not wait,
        and says nothing of an end: that is seen where answers are read."""
        if not self.has_ended:
            self._unsent += _framed(what)
            self._flush()

    def look(self, wait_s: float = 0.0) -> Iterator[Any]:
        """Yield what has come. Where that is nothing, wait up to ``wait_s`` for something to come,
        or for room for what is to be sent. Raises what unpickling raises."""
        self._flush()
        if wait_s > 0 and not self._whole_bytes() and not self.has_ended:
            self._wait(select.POLLIN | (select.POLLOUT if self._unsent else 0), wait_s)
            self._flush()
        while True:
            if end := self._whole_bytes():
                message = bytes(memoryview(self._unread)[_LENGTH.size : end])
                del self._unread[:end]
                yield pickle.loads(message)  # noqa: S301 - our own process
            elif self.has_ended or not self._read():
                return

    def receive(self, timeout_s: float = math.inf) -> Any:
        """Return the next message, and send meanwhile what was posted. Raises TimeoutError where it
        has not come whole by then, EOFError where the other end was closed."""
        end_s = time.monotonic() + timeout_s
        while True:
            for message in self.look(left_s := max(0.0, end_s - time.monotonic())):
                return message
            if self.has_ended:
                raise EOFError
            if left_s <= 0:
                raise TimeoutError

    def wait(self, wait_s: float) -> None:
        """Wait up to ``wait_s`` for something to read, or for room for what is to be sent. It
        changes nothing, so another thread may make other calls meanwhile, but ``close``."""
        self._wait(select.POLLIN | (select.POLLOUT if self._unsent else 0), wait_s)

    def has_something(self) -> bool:
        """Whether a message, or the other end's end, can be read now."""
        return bool(self._unread) or self.has_ended or self._wait(select.POLLIN, 0.0)

    def finish(self) -> None:
        """Tell the other end that nothing more is said. What it says can still be read."""
        self._unsent.clear()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close this end. Idempotent."""
        self.has_ended = True
        self._socket.close()

    def _wait(self, events: int, wait_s: float) -> bool:
        waiter = select.poll()  # select itself takes no descriptor above 1023
        waiter.register(self._socket, events)
        return bool(waiter.poll(math.ceil(1000 * min(wait_s, _MOST_WAIT_S))))

    def _flush(self) -> None:
        if not self._unsent:
            return
        with suppress(BlockingIOError, ConnectionError):
            while self._unsent and not self.has_ended:
                del self._unsent[: self._socket.send(self._unsent, socket.MSG_DONTWAIT)]

    def _read(self) -> bool:
        """Read what is there now. Return whether that is anything."""
        try:
            received = self._socket.recv(_CHUNK_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionError:
            received = b""
        self._unread += received
        self.has_ended = not received
        return bool(received)

    def _whole_bytes(self) -> int:
        """Return the bytes of the next message with its length; 0 where it has not come whole."""
        if len(self._unread) < _LENGTH.size:
            return 0
        end: int = _LENGTH.size + _LENGTH.unpack_from(self._unread)[0]
        return end if len(self._unread) >= end else 0


def _framed(what: Any) -> bytes:
    data = pickle.dumps(what, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


# -- the parent's side -----------------------------------------------------------------------------


class Ended(NamedTuple):
    """How a process has ended. ``code``: its status, or below 0 the signal; None: it waits for a
    drive, and cannot be ended. ``last_words``: the last line that it wrote to stderr, or ""."""

    code: int | None
    last_words: str = ""

    @property
    def how(self) -> str:
        """The signal, its last words, or its status."""
        if self.code is None:
            return "it waits for a drive, and cannot be ended"
        return _signal_name(-self.code) if self.code < 0 else self.last_words or f"status {self.code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # of those for real time only the first and the last have names
        return f"signal {number}"


class ChildProcess:
    """The parent's end: the process and ``pipe``, the way to it.

    It calls ``main(descriptor, parent, *arguments)`` of a module: see ``ParentPipe``. ``fds``:
    descriptors that it has under the same numbers. ``environment``: what it has beside the
    parent's, whose values count more. ``keeps_words``: keep what it writes to stderr, in memory;
    otherwise it writes to the parent's. Raises OSError where it cannot be started.

    One thread at a time makes all calls but ``kill``.
    """

    def __init__(
        self,
        module: str,
        *arguments: object,
        fds: Sequence[int] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
        keeps_words: bool = True,
    ) -> None:
        self._ended: Ended | None = None
        with ExitStack() as undo:
            self._said = undo.enter_context(_open_last_words()) if keeps_words else None
            ours, theirs = socket.socketpair()
            undo.enter_context(ours)
            with theirs:
                given = ", ".join(map(repr, (theirs.fileno(), os.getpid(), *arguments)))
                self._process = subprocess.Popen(  # noqa: S603 - our own module, in this same interpreter
                    [sys.executable, "-c", f"from {module} import main; main({given})"],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self._said,
                    pass_fds=[theirs.fileno(), *fds],
                    start_new_session=True,
                    env={**environment, **os.environ, **_module_path()},
                )
            self.pipe = Pipe(ours)
            undo.pop_all()

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    @property
    def may_run(self) -> bool:
        """Whether any thread of a process that was killed may still run its own code. One that
        waits in the kernel for a drive does not: it ends where it would come back."""
        stats = []
        with suppress(FileNotFoundError, ProcessLookupError):
            for task in list(Path(f"/proc/{self.pid}/task").iterdir()):
                with suppress(FileNotFoundError, ProcessLookupError):
                    stats.append((task / "stat").read_text())
        return any(stat.rpartition(")")[2].split()[0] not in "DZX" for stat in stats)

    def kill(self) -> None:
        """Kill the process now, and wait for nothing: who waits for its answer gets EOFError. Any
        thread may call this."""
        self._process.kill()

    def end(self, patience_s: float = 0.0, reap_s: float = REAP_S) -> Ended:
        """End the process, and return how it ended. With ``patience_s`` it may end by itself: its
        pipe is closed. One that has closed the pipe itself is about to end, and may, too. After
        that it is killed, and ``reap_s`` is waited for that. Idempotent."""
        if self._ended is None:
            if self.pipe.has_ended:
                patience_s = max(patience_s, reap_s)
            if patience_s > 0:
                self.pipe.close()
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(patience_s)
            self._process.kill()
            self.pipe.close()
            try:
                self._ended = Ended(self._process.wait(reap_s), self._last_words())
            except subprocess.TimeoutExpired:
                self._ended = Ended(None)
            if self._said is not None:
                self._said.close()
        return self._ended

    def _last_words(self) -> str:
        if self._said is None:
            return ""
        self._said.seek(0)
        return "".join(self._said.read().decode(errors="replace").strip().splitlines()[-1:])


def _module_path() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"}


def _open_last_words() -> IO[bytes]:
    """Open a file for what a process says when it fails: in memory, as a drive may be full. Where
    that is refused, it is not kept."""
    try:
        fd = os.memfd_create("kvdisk")
    except OSError:
        fd = os.open(os.devnull, os.O_RDWR)
    return os.fdopen(fd, "w+b")


# -- the process's side ----------------------------------------------------------------------------


class ParentPipe(Pipe):
    """The process's end, which its ``main`` makes first of all of what it was called with.

    ``descriptor``: of the pipe. ``parent``: the parent's number. Any thread may call ``send``.
    """

    def __init__(self, descriptor: int, parent: int) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        super().__init__(socket.socket(fileno=descriptor))
        self._parent = parent
        self._sending = threading.Lock()

    @property
    def has_parent(self) -> bool:
        """Whether the parent lives."""
        return os.getppid() == self._parent

    def send(self, what: Any) -> None:
        """Send a message, and wait until the pipe has it. Raises OSError where the parent is
        gone."""
        left = memoryview(_framed(what))
        with self._sending:
            while left:
                with suppress(BlockingIOError):
                    left = left[self._socket.send(left, socket.MSG_DONTWAIT) :]
                    continue
                if not self._wait(select.POLLOUT, LOOK_S) and not self.has_parent:
                    raise BrokenPipeError

    def receive(self, timeout_s: float = math.inf) -> Any:
        """See ``Pipe.receive``. EOFError also says that the parent is gone."""
        end_s = time.monotonic() + timeout_s
        while True:
            try:
                return super().receive(min(LOOK_S, max(0.0, end_s - time.monotonic())))
            except TimeoutError:
                if not self.has_parent:
                    raise EOFError from None
                if time.monotonic() >= end_s:
                    raise
