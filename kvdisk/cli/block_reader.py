# SPDX-License-Identifier: Apache-2.0
"""Reads every record of homes' indexes, in a process of its own: a damaged file can end the one that reads it.

The child answers each path with a line of JSON (segments, count of blocks, whether there is an index, what is wrong)
and then the blocks, packed, each with its length (u16) before it. Packed blocks sort by segment and slot, and take less
than half the memory of a ``BlockRecord``.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, BinaryIO, NamedTuple

from kvdisk.blocks import BlockKey, Slot
from kvdisk.errors import DeviceError, KvdiskError
from kvdisk.index.base import BlockRecord, SegmentRecord
from kvdisk.index.lmdb_index import LmdbIndex
from kvdisk.index.reader_process import ReaderProcess

_PACKED = struct.Struct(">IIQQIB")  # big-endian, so that bytes sort as numbers do
_LENGTH = struct.Struct("<H")
_ASKED_AT_ONCE = 1000
_ANSWER_S = 60.0


class IndexBlocks(NamedTuple):
    """What one index holds. ``blocks``: packed, ascending by segment and slot.

    ``exists``: False where no index has been made yet. ``problem``: one sentence, where it cannot be read; the rest
    is empty then.
    """

    segments: tuple[SegmentRecord, ...] = ()
    blocks: tuple[bytes, ...] = ()
    exists: bool = True
    problem: str | None = None


def pack(record: BlockRecord) -> bytes:
    """Return a record as bytes."""
    segment, slot = record.slot
    fixed = _PACKED.pack(segment, slot, record.epoch, record.generation, record.stored_s, len(record.key))
    return fixed + record.key + (record.parent or b"")


def unpack(packed: bytes) -> BlockRecord:
    """Return the record of these bytes."""
    segment, slot, epoch, generation, stored_s, key_bytes = _PACKED.unpack_from(packed)
    key_end = _PACKED.size + key_bytes
    parent = packed[key_end:]
    return BlockRecord(
        epoch,
        BlockKey(packed[_PACKED.size : key_end]),
        Slot(segment, slot),
        generation,
        BlockKey(parent) if parent else None,
        stored_s,
    )


def segment_of(packed: bytes) -> int:
    """Return the segment of a packed block."""
    return int.from_bytes(packed[:4], "big")


def slot_of(packed: bytes) -> int:
    """Return the number of a packed block's slot in its segment."""
    return int.from_bytes(packed[4:8], "big")


# -- the parent's side -------------------------------------------------------------------------


def read_blocks(paths: Sequence[Path]) -> list[IndexBlocks]:
    """Read the indexes in these directories, in order. Never raises for what is wrong with one of them."""
    found: list[IndexBlocks] = []
    while len(found) < len(paths):
        rest = paths[len(found) :]
        # In memory: what frees room on a full drive shall need none.
        with os.fdopen(os.memfd_create("kvdisk"), "w+b") as said, _start(rest, said) as child:
            assert child.stdout is not None
            # What a child was writing when it died is not whole.
            while len(found) < len(paths) and (read := _read_answer(child.stdout)) is not None:
                found.append(read)
            child.stdout.close()
            code = child.wait()
            if len(found) < len(paths):
                found.append(IndexBlocks(problem=_cause_of_death(code, said)))
    return found


def _start(paths: Sequence[Path], said: IO[bytes]) -> subprocess.Popen[bytes]:
    child = subprocess.Popen(  # noqa: S603 - this same module, in this same interpreter
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=said,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"},
    )
    assert child.stdin is not None
    child.stdin.write(json.dumps([str(path) for path in paths]).encode())
    child.stdin.close()
    return child


def _read_answer(source: IO[bytes]) -> IndexBlocks | None:
    line = source.readline()
    if not line.endswith(b"\n"):
        return None
    segments, count, exists, problem = json.loads(line)
    blocks = []
    for _ in range(count):
        head = source.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            return None
        packed = source.read(length := _LENGTH.unpack(head)[0])
        if len(packed) < length:
            return None
        blocks.append(packed)
    return IndexBlocks(tuple(SegmentRecord(*fields) for fields in segments), tuple(blocks), exists, problem)


def _cause_of_death(code: int, said: IO[bytes]) -> str:
    if code < 0 and -code in {signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT}:
        return f"the file is damaged, reading it ended in {signal.Signals(-code).name}"
    said.seek(0)
    last_words = said.read().decode(errors="replace").strip().splitlines()[-1:] or [f"status {code}"]
    return f"the process that reads it failed, {last_words[0]}"


class RecordsNow:
    """Asks indexes anew, through a child process. Closed by ``close``; one thread calls everything."""

    def __init__(self) -> None:
        self._reader = ReaderProcess()

    def still_there(self, index_path: Path, records: Sequence[BlockRecord]) -> list[bool]:
        """Whether each record is still as it was: its slot and generation. True for all where that cannot be read."""
        still = [False] * len(records)
        by_epoch: dict[int, list[int]] = {}
        for position, record in enumerate(records):
            by_epoch.setdefault(record.epoch, []).append(position)
        for epoch, positions in by_epoch.items():
            for start in range(0, len(positions), _ASKED_AT_ONCE):
                asked = positions[start : start + _ASKED_AT_ONCE]
                keys = tuple(records[position].key for position in asked)
                try:
                    found = self._reader.find(index_path, epoch, keys, _ANSWER_S).records
                except KvdiskError:
                    for position in asked:
                        still[position] = True
                    continue
                for at, there in found:
                    record = records[asked[at]]
                    still[asked[at]] = (record.slot, record.generation) == (there.slot, there.generation)
        return still

    def close(self) -> None:
        """End the child."""
        self._reader.stop()


# -- the child's side --------------------------------------------------------------------------


def read_index(path: Path) -> IndexBlocks:
    """Read one index in this process: a damaged file may kill it."""
    try:
        index = LmdbIndex(path, readonly=True)
        try:
            blocks = sorted(map(pack, index.blocks()))
            # After the blocks: a segment's record is committed before those of its blocks.
            segments = tuple(index.segments())
        finally:
            index.close()
    except KvdiskError as error:
        if isinstance(error, DeviceError) and error.errno == errno.ENOENT:
            return IndexBlocks(exists=False)
        return IndexBlocks(problem=str(error).replace(f"{path}: ", "").removeprefix("index "))
    return IndexBlocks(segments, tuple(blocks))


def serve(paths: Sequence[Path], target: BinaryIO) -> None:
    """Be the child: write the answers."""
    for path in paths:
        read = read_index(path)
        line = json.dumps([read.segments, len(read.blocks), read.exists, read.problem])
        target.write(line.encode() + b"\n")
        target.writelines(_LENGTH.pack(len(packed)) + packed for packed in read.blocks)
        target.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a terminal sends it to the command and to its children
    serve([Path(path) for path in json.load(sys.stdin)], sys.stdout.buffer)
