# SPDX-License-Identifier: Apache-2.0
"""The one process that reads the indexes of other owners: for an engine, and for the tools.

LMDB has no checksums. A damaged file can end the process that maps it (SIGBUS, SIGSEGV), and an
owner that was stopped can hold the locks of its reader table. So neither an engine nor a tool maps
the index of another owner: a child does, and answers questions, pickled on a pipe. It ends with its
parent, however that ended.
"""

from __future__ import annotations

import errno
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import IO, Any, NamedTuple

from kvdisk.blocks import BlockKey
from kvdisk.errors import CorruptRecord, DeviceError, KvdiskError
from kvdisk.index.base import BlockColumns, ForeignCopy, SegmentRecord
from kvdisk.index.lmdb_tables import LmdbTables, try_tables
from kvdisk.index.record_index import read_columns, read_segments
from kvdisk.index.records import Table, decode_blocks, encode_block_key

START_S = 15.0
"""What the process may take to start, on a machine that may be busy."""
_TRY_S = 300.0
MOST_OPEN = 64
"""Indexes that the process keeps open. It closes the oldest first."""
_DAMAGED = frozenset({signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT})


class ReaderFailed(KvdiskError):
    """The process has ended, or did not answer in time."""


class IndexContent(NamedTuple):
    """All that one index holds: nothing, and ``blocks`` None, where none ``exists`` yet, or where
    ``problem`` says in one sentence why it cannot be read."""

    segments: tuple[SegmentRecord, ...] = ()
    blocks: BlockColumns | None = None
    exists: bool = True
    problem: str | None = None


def read_indexes(paths: Sequence[Path]) -> list[IndexContent]:
    """Read the indexes in these directories, in order. Never raises for what is wrong with one.

    Writes nothing but the mark that a reader of LMDB leaves in ``lock.mdb``, where that is
    possible.
    """
    reader, found = ReaderProcess(), []
    try:
        for path in paths:
            try:
                found.append(reader.read(path))
            except KvdiskError as error:
                found.append(IndexContent(problem=str(error)))
    finally:
        reader.stop()
    return found


def try_out(path: Path) -> None:
    """Have a child read an index, and go through the motions of a write. Raises CorruptRecord where
    it cannot, DeviceError where there can be no child."""
    reader = ReaderProcess()
    try:
        reader.ask(_TRY_S, "try", str(path))
    except (CorruptRecord, ReaderFailed) as error:
        raise CorruptRecord(f"index {path}: {error}") from error
    finally:
        reader.stop()


class ReaderProcess:
    """The parent's end. The first question starts the process; one thread calls everything.

    ``find`` and ``read`` raise CorruptRecord where the index cannot be read, and ReaderFailed where
    the process ended over it; the next question starts another one.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._said: IO[bytes] | None = None

    def find(
        self, home_id: str, index_path: Path, epoch: int, keys: Sequence[BlockKey], timeout_s: float
    ) -> dict[BlockKey, ForeignCopy]:
        """Return the copies of ``keys`` in a home's index, none where there is no index."""
        found: dict[BlockKey, ForeignCopy] = (
            self.ask(timeout_s, "find", str(index_path), home_id, epoch, tuple(keys)) or {}
        )
        return found

    def read(self, index_path: Path) -> IndexContent:
        """Return all that an index holds."""
        content: IndexContent = self.ask(math.inf, "read", str(index_path)) or IndexContent(exists=False)
        return content

    def stop(self) -> str:
        """End the process, if there is one; return how it has ended."""
        process, self._process = self._process, None
        if process is None or self._pipe is None or self._said is None:
            return ""
        process.kill()
        self._pipe.close()
        code = process.wait()
        with self._said as said:
            said.seek(0)
            last_words = said.read().decode(errors="replace").strip().splitlines()[-1:] or [f"status {code}"]
        if -code in _DAMAGED:
            return f"the file is damaged, reading it ended in {signal.Signals(-code).name}"
        return f"the process that reads it failed, {last_words[0]}"

    def ask(self, timeout_s: float, *question: object) -> Any:
        """Return the answer to what ``OpenIndexes.answer`` is asked."""
        is_new = self._process is None
        if is_new:
            self._start()
        assert self._pipe is not None and self._process is not None
        try:
            if is_new:
                _received(self._pipe, max(START_S, timeout_s))
            with _killed_after(self._process, 2 * timeout_s):
                self._pipe.send(question)
                problem, answer = _received(self._pipe, timeout_s)
        except TimeoutError as error:
            self.stop()
            raise ReaderFailed(f"the process that reads it did not answer within {timeout_s:g} s") from error
        except (OSError, EOFError) as error:
            raise ReaderFailed(self.stop()) from error
        except Exception as error:  # another version was installed meanwhile
            self.stop()
            raise ReaderFailed("the process that reads it gave no sound answer") from error
        if problem is not None:
            raise CorruptRecord(problem)
        return answer

    def _start(self) -> None:
        with ExitStack() as undo:
            try:
                said = undo.enter_context(os.fdopen(os.memfd_create("kvdisk"), "w+b"))  # in memory: a drive may be full
                ours, theirs = Pipe()
                undo.enter_context(ours)
                with theirs:
                    self._process = subprocess.Popen(  # noqa: S603 - this module, in this same interpreter
                        [sys.executable, "-c", f"from {__name__} import main; main({theirs.fileno()})"],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=said,
                        pass_fds=[theirs.fileno()],
                        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"},
                    )
            except OSError as error:
                raise DeviceError(error.errno or errno.EIO, "the process that reads indexes cannot start") from error
            self._pipe, self._said = ours, said
            undo.pop_all()


@contextmanager
def _killed_after(process: subprocess.Popen[bytes], limit_s: float) -> Iterator[None]:
    """Kill a process that takes longer: writing to it, and reading what has begun to come, have no
    limit of their own."""
    timer = threading.Timer(min(limit_s, threading.TIMEOUT_MAX), process.kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _received(pipe: Connection, timeout_s: float) -> Any:
    if not pipe.poll(None if timeout_s == math.inf else timeout_s):
        raise TimeoutError
    return pipe.recv()


# -- the child's end ---------------------------------------------------------------------------


class OpenIndexes:
    """Answers questions about indexes. Those in which keys are looked up stay open."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[int, LmdbTables]] = {}

    def answer(self, what: str, path: str, *asked: Any) -> tuple[str | None, object]:
        """Return why an index cannot be read, and the answer: None where there is no index yet.

        ``what``: "find" with a home's id, an epoch and keys, "read", or "try".
        """
        try:
            if what == "find":
                return None, _find(self._get(path), *asked)
            if what == "read":
                with closing(LmdbTables(Path(path), readonly=True)) as tables:
                    return None, _read_all(tables)
            try_tables(Path(path))
        except (KvdiskError, OSError) as error:
            self._close(path)
            if not (isinstance(error, DeviceError) and error.errno == errno.ENOENT):
                return str(error).replace(f"{path}: ", "").removeprefix("index "), None
        return None, None

    def _get(self, path: str) -> LmdbTables:
        inode, known = _inode(path), self._open.get(path)
        # One that was rebuilt is a new file in the old place.
        if known is not None and known[0] == inode and known[1].complete:
            return known[1]
        self._close(path)
        tables = LmdbTables(Path(path), readonly=True)
        self._open[path] = (inode, tables)
        if len(self._open) > MOST_OPEN:
            self._close(next(iter(self._open)))
        return tables

    def _close(self, path: str) -> None:
        known = self._open.pop(path, None)
        if known is not None:
            known[1].close()


def _find(tables: LmdbTables, home_id: str, epoch: int, keys: Sequence[BlockKey]) -> dict[BlockKey, ForeignCopy]:
    names = [encode_block_key(epoch, key) for key in keys]
    found = [
        (name, value) for name, value in zip(names, tables.get(Table.BLOCKS, names), strict=True) if value is not None
    ]
    records = list(decode_blocks([name for name, _ in found], [value for _, value in found]).records())
    wanted = {record.slot.segment for record in records}
    segments = {each.segment: each for each in read_segments(tables.scan(Table.SEGMENTS)) if each.segment in wanted}
    return {
        record.key: ForeignCopy(
            home_id, segments[record.slot.segment], record.slot.index, record.generation, record.stored_s
        )
        for record in records
        if record.slot.segment in segments
    }


def _read_all(tables: LmdbTables) -> IndexContent:
    blocks = read_columns(tables.scan(Table.BLOCKS))
    # After the blocks: a segment's record is committed before those of its blocks.
    return IndexContent(tuple(read_segments(tables.scan(Table.SEGMENTS))), blocks)


def _inode(path: str) -> int:
    try:
        return os.stat(Path(path) / "data.mdb", follow_symlinks=False).st_ino
    except OSError:
        return -1


def main(descriptor: int) -> None:
    """Be the child: answer questions until the parent's end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the parent and to its children
    indexes = OpenIndexes()
    with Connection(descriptor) as pipe, suppress(EOFError, ConnectionError):
        pipe.send("started")
        while True:
            pipe.send(indexes.answer(*pipe.recv()))
