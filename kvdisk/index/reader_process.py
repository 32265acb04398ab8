# SPDX-License-Identifier: Apache-2.0
"""The one process that reads the indexes of other owners: for an engine, and for the tools.

LMDB has no checksums. A damaged file can end the process that maps it (SIGBUS, SIGSEGV), and an
owner that was stopped can hold the locks of its reader table. So neither an engine nor a tool maps
the index of another owner: a child process does, and answers questions. It ends when its input
does, however its parent ended.

A message is its length (u64) and that many pickled bytes. Both ends run this module.
"""

from __future__ import annotations

import errno
import math
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple

from kvdisk.blocks import BlockKey
from kvdisk.errors import CorruptRecord, DeviceError, KvdiskError
from kvdisk.index.base import BlockColumns, BlockRecord, SegmentRecord
from kvdisk.index.lmdb_index import LmdbIndex

START_S = 15.0
"""What the first answer may take besides: the process has to start, on a machine that may be
busy."""
MOST_OPEN = 64
"""Indexes that the process keeps open. It closes the least recently used first."""
_LENGTH = struct.Struct("<Q")
_LONGEST_READ_BYTES = 1 << 20
_MOST_ANSWER_BYTES = 1 << 40
_DAMAGED = frozenset({signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT})


class ReaderFailed(KvdiskError):
    """The process has ended, or did not answer in time."""


class IndexContent(NamedTuple):
    """All that one index holds.

    ``exists``: False where no index has been made yet. ``problem``: one sentence, where it cannot
    be read. In both cases the rest is empty, and ``blocks`` is None.
    """

    segments: tuple[SegmentRecord, ...] = ()
    blocks: BlockColumns | None = None
    exists: bool = True
    problem: str | None = None


class FoundRecords(NamedTuple):
    """Committed records of the keys asked for, with each key's position; segments by number."""

    segments: dict[int, SegmentRecord]
    records: list[tuple[int, BlockRecord]]


def read_indexes(paths: Sequence[Path], timeout_s: float = math.inf) -> list[IndexContent]:
    """Read the indexes in these directories, in order. Never raises for what is wrong with one.

    ``timeout_s``: for each; one that takes longer cannot be read, since its drive may hang. Writes
    nothing but the mark that a reader of LMDB leaves in ``lock.mdb``, where that is possible.
    """
    reader = ReaderProcess()
    try:
        return [_content(reader, path, timeout_s) for path in paths]
    finally:
        reader.stop()


def _content(reader: ReaderProcess, path: Path, timeout_s: float) -> IndexContent:
    try:
        return reader.read(path, timeout_s)
    except KvdiskError as error:
        return IndexContent(problem=str(error))


class ReaderProcess:
    """The parent's end. The first question starts the process; one thread calls everything.

    ``find`` and ``read`` raise CorruptRecord where the index cannot be read, and ReaderFailed where
    the process ended over it; the next question starts another one.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes] | None = None
        self._is_new = False

    def find(self, index_path: Path, epoch: int, keys: Sequence[BlockKey], timeout_s: float) -> FoundRecords:
        """Return which of ``keys`` an index holds. An index that is not there holds none."""
        found: FoundRecords = self._ask((str(index_path), epoch, tuple(keys)), timeout_s) or FoundRecords({}, [])
        return found

    def read(self, index_path: Path, timeout_s: float = math.inf) -> IndexContent:
        """Return all that an index holds."""
        content: IndexContent = self._ask((str(index_path),), timeout_s) or IndexContent(exists=False)
        return content

    def close_gone(self, timeout_s: float) -> None:
        """Have indexes closed whose files are gone: open, they would keep their space on the
        drive."""
        if self._process is not None:
            self._ask((), timeout_s)

    def stop(self) -> str:
        """End the process, if there is one; return how it has ended."""
        process, self._process = self._process, None
        if process is None or self._said is None:
            return ""
        process.kill()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
        code = process.wait()
        with self._said as said:
            said.seek(0)
            last_words = said.read().decode(errors="replace").strip().splitlines()[-1:] or [f"status {code}"]
        if -code in _DAMAGED:
            return f"the file is damaged, reading it ended in {signal.Signals(-code).name}"
        return f"the process that reads it failed, {last_words[0]}"

    def _ask(self, question: tuple[object, ...], timeout_s: float) -> Any:
        try:
            process = self._process or self._start()
        except OSError as error:
            raise ReaderFailed(f"the process that reads it could not be started: {error}") from error
        assert process.stdin is not None and process.stdout is not None
        deadline_s = time.monotonic() + timeout_s
        if self._is_new:
            deadline_s, self._is_new = deadline_s + START_S, False
        try:
            _write(process.stdin.fileno(), _message(question), deadline_s)
            (length,) = _LENGTH.unpack(_read(process.stdout.fileno(), _LENGTH.size, deadline_s))
            if length > _MOST_ANSWER_BYTES:
                raise ValueError(length)
            problem, answer = pickle.loads(_read(process.stdout.fileno(), length, deadline_s))  # noqa: S301 - our own
        except TimeoutError as error:
            self.stop()
            raise ReaderFailed(f"the process that reads it did not answer within {timeout_s:g} s") from error
        except (OSError, EOFError) as error:
            raise ReaderFailed(self.stop()) from error
        except Exception as error:  # another version was installed meanwhile, or something printed
            self.stop()
            raise ReaderFailed("the process that reads it gave no sound answer") from error
        if problem is not None:
            raise CorruptRecord(problem)
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        # In memory: a tool that frees room on a full drive must need none.
        said = os.fdopen(os.memfd_create("kvdisk"), "w+b")
        try:
            process = subprocess.Popen(  # noqa: S603 - this module, in this same interpreter
                [sys.executable, "-c", f"from {__name__} import main; main()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                bufsize=0,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"},
            )
        except OSError:
            said.close()
            raise
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        self._process, self._said, self._is_new = process, said, True
        return process


def _message(value: object) -> bytes:
    body = pickle.dumps(value, protocol=5)
    return _LENGTH.pack(len(body)) + body


def _write(fd: int, message: bytes, deadline_s: float) -> None:
    view = memoryview(message)
    while view:
        _wait(fd, select.POLLOUT, deadline_s)
        view = view[os.write(fd, view) :]


def _read(fd: int, count: int, deadline_s: float) -> bytes:
    parts = []
    while count:
        _wait(fd, select.POLLIN, deadline_s)
        part = os.read(fd, min(count, _LONGEST_READ_BYTES))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _wait(fd: int, event: int, deadline_s: float) -> None:
    # Not select.select: it takes no descriptor above 1023, and an engine can have thousands of
    # files open.
    waiting = select.poll()
    waiting.register(fd, event)
    wait_ms = None if deadline_s == math.inf else 1000 * max(0.0, deadline_s - time.monotonic())
    if not waiting.poll(wait_ms):
        raise TimeoutError


# -- the child's end ---------------------------------------------------------------------------


class OpenIndexes:
    """Read-only indexes by directory, opened on demand. Every read is its own transaction."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, tuple[int, LmdbIndex]] = OrderedDict()

    def answer(self, path: str, *asked: Any) -> tuple[str | None, object]:
        """Return why an index cannot be read, and the answer: None where there is no index yet."""
        try:
            index = self._get(path)
            return None, _find(index, *asked) if asked else _read_all(index)
        except (KvdiskError, OSError) as error:
            self._close(path)
            if isinstance(error, DeviceError) and error.errno == errno.ENOENT:
                return None, None
            return str(error).replace(f"{path}: ", "").removeprefix("index "), None

    def close_gone(self) -> None:
        """Close indexes whose files are gone, or are others: one that was rebuilt is a new file in
        the old place."""
        for path, (inode, _) in list(self._open.items()):
            if _inode(path) != inode:
                self._close(path)

    def _get(self, path: str) -> LmdbIndex:
        known = self._open.get(path)
        if known is not None and known[1].complete:
            self._open.move_to_end(path)
            return known[1]
        self._close(path)
        inode, index = _inode(path), LmdbIndex(path, readonly=True)
        self._open[path] = (inode, index)
        if len(self._open) > MOST_OPEN:
            self._close(next(iter(self._open)))
        return index

    def _close(self, path: str) -> None:
        known = self._open.pop(path, None)
        if known is not None:
            known[1].close()


def _find(index: LmdbIndex, epoch: int, keys: Sequence[BlockKey]) -> FoundRecords:
    records = index.find(epoch, keys)
    wanted = {record.slot.segment for _, record in records}
    return FoundRecords({each.segment: each for each in index.segments() if each.segment in wanted}, records)


def _read_all(index: LmdbIndex) -> IndexContent:
    blocks = index.block_columns()
    # After the blocks: a segment's record is committed before those of its blocks.
    return IndexContent(tuple(index.segments()), blocks)


def _inode(path: str) -> int:
    try:
        return os.stat(Path(path) / "data.mdb", follow_symlinks=False).st_ino
    except OSError:
        return -1


def serve(source: BinaryIO, target: BinaryIO) -> None:
    """Answer questions until the source ends. An empty one only closes what is gone."""
    indexes = OpenIndexes()
    while len(head := source.read(_LENGTH.size)) == _LENGTH.size:
        question = pickle.loads(source.read(_LENGTH.unpack(head)[0]))  # noqa: S301 - our own parent
        indexes.close_gone()
        target.write(_message(indexes.answer(*question) if question else (None, None)))
        target.flush()


def main() -> None:
    """Be the child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the parent and to its children
    serve(sys.stdin.buffer, sys.stdout.buffer)
