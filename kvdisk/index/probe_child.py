# SPDX-License-Identifier: Apache-2.0
"""The child process that reads other homes' indexes for an engine: questions on standard input, answers on output.

LMDB has no checksums: a damaged file can end the process that reads it, and the locks of its reader table can be
held by an owner that was stopped. So the files of other engines are mapped here and never in the engine. The child
ends when its input does, however the engine ended.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections import OrderedDict
from pathlib import Path
from typing import BinaryIO

from kvdisk.errors import DeviceError, KvdiskError
from kvdisk.index.lmdb_index import LmdbIndex
from kvdisk.index.probe_wire import FRAME, FoundCopy, Question, decode_question, encode_answer, encode_failure

MOST_OPEN = 64
"""Indexes kept open; the least recently asked is closed first."""


class OpenIndexes:
    """Read-only indexes by directory, opened when asked for. Every read is a transaction of its own."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, tuple[int, LmdbIndex]] = OrderedDict()

    def answer(self, question: Question) -> bytes:
        """Return the answer's bytes; what cannot be read is a failure that says why."""
        try:
            index = self._get(question.path)
            records = index.find(question.epoch, question.keys)
            wanted = {record.slot.segment for _, record in records}
            segments = [segment for segment in index.segments() if segment.segment in wanted]
            return encode_answer(segments, [FoundCopy(at, *record.slot, record.generation) for at, record in records])
        except (KvdiskError, OSError) as error:
            self._close(question.path)
            if isinstance(error, DeviceError) and error.errno == errno.ENOENT:
                return encode_answer([], [])  # its owner has not made it yet, or it is gone
            return encode_failure(str(error))

    def close_gone(self) -> None:
        """Close indexes whose files are no longer there: open, they would keep their space on the drive."""
        for path, (inode, _) in list(self._open.items()):
            if _inode(path) != inode:
                self._close(path)

    def _get(self, path: str) -> LmdbIndex:
        # An index that was rebuilt is a new file in the old place.
        inode = _inode(path)
        known = self._open.get(path)
        if known is not None and known[0] == inode and known[1].complete:
            self._open.move_to_end(path)
            return known[1]
        self._close(path)
        index = LmdbIndex(path, readonly=True)
        self._open[path] = (inode, index)
        if len(self._open) > MOST_OPEN:
            self._close(next(iter(self._open)))
        return index

    def _close(self, path: str) -> None:
        known = self._open.pop(path, None)
        if known is not None:
            known[1].close()


def _inode(path: str) -> int:
    try:
        return os.stat(Path(path) / "data.mdb", follow_symlinks=False).st_ino
    except OSError:
        return -1


def serve(source: BinaryIO, target: BinaryIO) -> None:
    """Answer questions until the source ends. An empty one is only an occasion to close what is gone."""
    indexes = OpenIndexes()
    while len(head := source.read(FRAME.size)) == FRAME.size:
        body = source.read(FRAME.unpack(head)[0])
        indexes.close_gone()
        answer = indexes.answer(decode_question(body)) if body else b""
        target.write(FRAME.pack(len(answer)) + answer)
        target.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the engine and to its children
    serve(sys.stdin.buffer, sys.stdout.buffer)
