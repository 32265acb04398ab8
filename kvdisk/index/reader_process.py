# SPDX-License-Identifier: Apache-2.0
"""Reads the indexes of others through a process, for an engine and for the tools."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvdisk.blocks import BlockKey
from kvdisk.errors import CorruptRecord, DeviceError, KvdiskError
from kvdisk.index.base import BlockColumns, ForeignCopy, SegmentRecord
from kvdisk.index.columns import join_columns
from kvdisk.index.index_process import IndexProcess
from kvdisk.index.packed import Table
from kvdisk.index.records import decode_blocks, decode_segments, encode_block_key


class IndexContent(NamedTuple):
    """All that one index holds. ``blocks`` is None where the index does not exist (``exists``), or
    cannot be read: ``problem`` says why in one sentence."""

    segments: tuple[SegmentRecord, ...] = ()
    blocks: BlockColumns | None = None
    exists: bool = True
    problem: str | None = None


def read_indexes(paths: Sequence[Path]) -> list[IndexContent]:
    """Read the indexes in these directories, in order. An index that cannot be read is no exception
    but a ``problem``.

    It writes nothing but the mark that a reader of LMDB leaves in ``lock.mdb``, where that is
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


class ReaderProcess(IndexProcess):
    """A process that reads indexes. ``find`` and ``read`` raise CorruptRecord where the index
    cannot be read, and what ``IndexProcess`` raises; the next question then starts another process.
    One thread makes all calls."""

    def find(
        self, home_id: str, index_path: Path, epoch: int, keys: Sequence[BlockKey], timeout_s: float
    ) -> dict[BlockKey, ForeignCopy]:
        """Return the copies of ``keys`` in the index of an engine store; none where there is no
        index."""
        names = [encode_block_key(epoch, key) for key in keys]
        try:
            blocks, segments = self.ask(timeout_s, "find", str(index_path), names)
            by_number = {each.segment: each for each in decode_segments(segments)}
            return {
                block.key: ForeignCopy(
                    home_id, by_number[block.slot.segment], block.slot.index, block.generation, block.stored_s
                )
                for block in decode_blocks(blocks).records()
                if block.slot.segment in by_number
            }
        except (CorruptRecord, DeviceError) as error:
            raise _without_path(error, index_path) from error

    def read(self, index_path: Path) -> IndexContent:
        """Return all that an index holds."""
        exists = False
        blocks: list[BlockColumns] = []
        segments: list[SegmentRecord] = []
        try:
            for table, packed in self.parts(math.inf, "read", str(index_path)):
                exists = True
                if table is Table.BLOCKS:
                    blocks.append(decode_blocks(packed))
                else:
                    segments += decode_segments(packed)
        except (CorruptRecord, DeviceError) as error:
            raise _without_path(error, index_path) from error
        return IndexContent(tuple(segments), join_columns(blocks)) if exists else IndexContent(exists=False)


def _without_path(error: KvdiskError, path: Path) -> CorruptRecord:
    return CorruptRecord(str(error).replace(f"{path}: ", "").removeprefix("index "))
