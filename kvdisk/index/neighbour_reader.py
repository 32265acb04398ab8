# SPDX-License-Identifier: Apache-2.0
"""``Neighbours`` over a child process: a thread that takes questions, and the child that reads the other homes.

A home whose index ends the child, or holds it up, is left alone for a while, and the child is started anew for the
others. So nothing that another engine does, or that a drive does to its files, reaches this process.
"""

from __future__ import annotations

import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from kvdisk.blocks import BlockKey
from kvdisk.errors import CorruptRecord, KvdiskError
from kvdisk.index import probe_child
from kvdisk.index.base import Answer, ForeignCopy
from kvdisk.index.probe_wire import FRAME, LONGEST_FRAME_BYTES, Question, decode_answer, encode_question

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.25
"""How often the thread looks for homes that came or went, and how soon it stops."""
ANSWER_TIMEOUT_S = 2.0
CHILD_START_S = 15.0
"""What a child's first answer may take besides: it has to start, on a machine that may be busy."""
LEFT_ALONE_S = 60.0
MOST_QUESTIONS = 256
_CLOSE_TIMEOUT_S = 5.0


class Neighbour(NamedTuple):
    """Another engine's home, or one that nobody owns: its id, and the directory of its index."""

    home_id: str
    index_path: Path


class ProbeFailed(KvdiskError):
    """The child has ended, or did not answer in time."""


class ProbeChild:
    """The child process, started by the first question. The thread that asks calls everything."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: bytes, timeout_s: float) -> bytes:
        """Return the bytes of the answer. Raises ProbeFailed, and the next call starts a new child."""
        if self._process is None:
            timeout_s += CHILD_START_S
        try:
            process = self._process or self._start()
        except OSError as error:
            raise ProbeFailed(f"the process that reads it could not be started: {error}") from error
        assert process.stdin is not None and process.stdout is not None
        deadline_s = time.monotonic() + timeout_s
        try:
            self._write(process.stdin.fileno(), FRAME.pack(len(question)) + question, deadline_s)
            (length,) = FRAME.unpack(self._read(process.stdout.fileno(), FRAME.size, deadline_s))
            if length > LONGEST_FRAME_BYTES:
                raise ProbeFailed(f"an answer of {length} bytes")
            return self._read(process.stdout.fileno(), length, deadline_s)
        except (OSError, ProbeFailed) as error:
            code = self.stop()
            raise ProbeFailed(f"the process that reads it ended with {code} ({error})") from error

    def stop(self) -> int | None:
        """End the child; return its exit status, None where there was none."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.kill()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
        return process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(  # noqa: S603 - a module of this package, in this same interpreter
            [sys.executable, "-m", probe_child.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        return self._process

    @staticmethod
    def _write(fd: int, data: bytes, deadline_s: float) -> None:
        view = memoryview(data)
        while view:
            _wait(fd, select.POLLOUT, deadline_s)
            view = view[os.write(fd, view) :]

    @staticmethod
    def _read(fd: int, count: int, deadline_s: float) -> bytes:
        parts = []
        while count:
            _wait(fd, select.POLLIN, deadline_s)
            part = os.read(fd, min(count, 1 << 20))
            if not part:
                raise ProbeFailed("no more answers")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)


def _wait(fd: int, event: int, deadline_s: float) -> None:
    # Not select.select: it takes no descriptor above 1023, and an engine's segments can be as many open files.
    waiting = select.poll()
    waiting.register(fd, event)
    if not waiting.poll(1000 * max(0.0, deadline_s - time.monotonic())):
        raise ProbeFailed("no answer in time")


class _Asked(NamedTuple):
    ticket: int
    epoch: int
    keys: tuple[BlockKey, ...]


class NeighbourReader:
    """See ``Neighbours`` and the module.

    ``find_homes``: the homes to ask, at this moment; called on the reader's thread, cheap enough for every
    LOOK_INTERVAL_S. ``tend``: called there too, every so often, for what has to wait for the disk. Neither may raise
    anything but a KvdiskError or an OSError.
    """

    def __init__(
        self,
        find_homes: Callable[[], Sequence[Neighbour]],
        tend: Callable[[], object],
        *,
        tend_interval_s: float = 30.0,
    ) -> None:
        self._find_homes = find_homes
        self._tend = tend
        self._tend_interval_s = tend_interval_s
        self._tended_s = time.monotonic()
        self._child = ProbeChild()
        self._left_alone: dict[str, float] = {}
        self._homes: tuple[Neighbour, ...] = ()
        self._questions: deque[_Asked] = deque()
        self._answers: deque[Answer] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._look()
        self._thread = threading.Thread(target=self._run, name="kvdisk-neighbours", daemon=True)
        self._thread.start()

    # -- the scheduler's thread ----------------------------------------------------------------

    @property
    def any(self) -> bool:
        """See ``Neighbours.any``."""
        return bool(self._homes)

    def ask(self, ticket: int, epoch: int, keys: Sequence[BlockKey]) -> bool:
        """See ``Neighbours.ask``."""
        if len(self._questions) >= MOST_QUESTIONS or self._stopping:
            return False
        self._questions.append(_Asked(ticket, epoch, tuple(keys)))
        self._wake.set()
        return True

    def poll(self) -> list[Answer]:
        """See ``Neighbours.poll``."""
        answers = []
        while self._answers:
            answers.append(self._answers.popleft())
        return answers

    def close(self) -> None:
        """See ``Neighbours.close``. Waits for the question under way, at most a few seconds."""
        self._stopping = True
        self._wake.set()
        self._thread.join(_CLOSE_TIMEOUT_S)

    # -- the reader's thread -------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wake.wait(LOOK_INTERVAL_S)
                self._wake.clear()
                self._look()
                while self._questions and not self._stopping:
                    self._answer(self._questions.popleft())
                self._tend_now()
        finally:
            self._homes = ()
            self._child.stop()

    def _look(self) -> None:
        now = time.monotonic()
        before = self._homes
        try:
            homes = self._find_homes()
        except (KvdiskError, OSError) as error:
            logger.debug("looking for other homes: %s", error)
            homes = ()
        self._left_alone = {home_id: until_s for home_id, until_s in self._left_alone.items() if until_s > now}
        self._homes = tuple(home for home in homes if home.home_id not in self._left_alone)
        if not self._homes:
            self._child.stop()
        elif {home.home_id for home in before} - {home.home_id for home in self._homes}:
            try:
                self._child.ask(b"", ANSWER_TIMEOUT_S)  # an index of a home that is gone is closed
            except ProbeFailed as error:
                logger.debug("the reader of other homes: %s", error)

    def _answer(self, asked: _Asked) -> None:
        copies: dict[BlockKey, list[ForeignCopy]] = {}
        for home in self._homes:
            question = encode_question(Question(str(home.index_path), asked.epoch, asked.keys))
            try:
                segments, found = decode_answer(self._child.ask(question, ANSWER_TIMEOUT_S))
            except (ProbeFailed, CorruptRecord) as error:
                self._leave_alone(home, error)
                continue
            for copy in found:
                segment = segments.get(copy.segment)
                if segment is not None and copy.position < len(asked.keys):
                    foreign = ForeignCopy(home.home_id, segment, copy.slot_index, copy.generation)
                    copies.setdefault(asked.keys[copy.position], []).append(foreign)
        self._answers.append(Answer(asked.ticket, {key: tuple(found) for key, found in copies.items()}))

    def _leave_alone(self, home: Neighbour, error: KvdiskError) -> None:
        if home.index_path.exists():
            logger.warning("kvdisk does not read home %s for %.0f s: %s", home.home_id, LEFT_ALONE_S, error)
        self._left_alone[home.home_id] = time.monotonic() + LEFT_ALONE_S
        self._homes = tuple(other for other in self._homes if other.home_id != home.home_id)

    def _tend_now(self) -> None:
        now = time.monotonic()
        if now - self._tended_s >= self._tend_interval_s:
            self._tended_s = now
            try:
                self._tend()
            except (KvdiskError, OSError) as error:
                logger.debug("tending the store: %s", error)
