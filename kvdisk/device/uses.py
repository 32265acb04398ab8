# SPDX-License-Identifier: Apache-2.0
r"""How often the blocks of an engine store were used, and when last: counted in memory, and kept in
its USES file.

A use is a request that came to a block and found it, wherever. After a restart the eviction goes on
with it, and it is shown to people (``kvdisk inspect``). The file is advisory: no engine needs it,
and none trusts it. Layout, little-endian::

    0        magic "KVDUSES\0", version u16, bytes of a record u16, 4 zeros, record count u64
    24       records, of a block each: generation u64, uses u32, last use u32
    the end  xxh3_64 of all before it, u64

A generation names one block and one time that it was stored. Times are seconds since the Unix
epoch, 0: never. The file is replaced as a whole. One that is damaged, or of another version, says
nothing.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64, xxh3_64_intdigest

from kvdisk.device import paths
from kvdisk.device.control import USES_FILE

USES_RECORD = np.dtype([("generation", "<u8"), ("uses", "<u4"), ("last_use_s", "<u4")])
MOST_FILE_BYTES = 1 << 30
"""Bytes of the file that are read at most: enough for sixty million blocks."""
_PIECE_RECORDS = 1 << 16
"""Records that are written at a time."""
_HEAD = struct.Struct("<8sHHxxxxQ")
_SUM = struct.Struct("<Q")
_MAGIC, _VERSION = b"KVDUSES\0", 2

UsesRecords = NDArray[np.void]
"""An array of ``USES_RECORD``."""


def read_uses(home_path: Path) -> UsesRecords | None:
    """Return what an engine store's USES file says; None where there is none, or it is not to be
    relied on.

    Waits for the drive. Writes nothing, follows no symlink, and never raises.
    """
    try:
        fd = paths.open_own(home_path / USES_FILE, os.O_RDONLY)
        if fd < 0:
            return None
        with os.fdopen(fd, "rb") as file:
            data = file.read(MOST_FILE_BYTES)
    except OSError:
        return None
    count, rest = divmod(len(data) - _HEAD.size - _SUM.size, USES_RECORD.itemsize)
    if count < 0 or rest or data[: _HEAD.size] != _head(count):
        return None
    if data[-_SUM.size :] != _SUM.pack(xxh3_64_intdigest(memoryview(data)[: -_SUM.size])):
        return None
    return np.frombuffer(data, USES_RECORD, count, _HEAD.size)


def write_uses(home_path: Path, records: UsesRecords) -> None:
    """Replace an engine store's USES file in one step, whatever is in its place. Waits for the
    drive. Raises OSError."""
    paths.replace_file(home_path / USES_FILE, _encode(records))


def _encode(records: UsesRecords) -> Iterator[bytes]:
    """Yield the file's bytes in pieces, so that no call holds the interpreter lock for long."""
    hasher = xxh3_64(head := _head(len(records)))
    yield head
    for first in range(0, len(records), _PIECE_RECORDS):
        piece = records[first : first + _PIECE_RECORDS].tobytes()
        hasher.update(piece)
        yield piece
    yield _SUM.pack(hasher.intdigest())


def find_uses(records: UsesRecords, generations: NDArray[np.uint64]) -> tuple[UsesRecords, NDArray[np.bool_]]:
    """Return the record of each generation (zeros where there is none), and whether there is
    one."""
    found, known = np.zeros(len(generations), USES_RECORD), np.zeros(len(generations), np.bool_)
    if not len(records):
        return found, known
    _, places, rows = np.intersect1d(records["generation"], generations, return_indices=True)
    found[rows], known[rows] = records[places], True
    return found, known


def _head(count: int) -> bytes:
    return _HEAD.pack(_MAGIC, _VERSION, USES_RECORD.itemsize, count)


class Uses:
    """The uses of each NVMe copy since it was stored, by row of the catalog. Only the scheduler's
    thread changes it; one other thread may call ``records``.

    ``now_s``: seconds since the Unix epoch, as of the current step. ``changes``: rises with each
    change of ``records``.
    """

    def __init__(self) -> None:
        self.table: UsesRecords = np.zeros(0, USES_RECORD)
        self.now_s = 0
        self.changes = 0

    def fill(self, generations: NDArray[np.uint64], known: UsesRecords) -> None:
        """Begin with rows 0, 1, ... of these generations, and with what was ``known`` of them
        before."""
        self.table, _ = find_uses(known, generations)
        self.table["generation"] = generations

    def begin(self, rows: Sequence[int], generations: Sequence[int]) -> None:
        """Count the uses of these copies from 0: they became READY."""
        places = self._places_of(rows)
        self.table[places] = 0  # a reader shall not see another block's uses meanwhile
        self.table["generation"][places] = generations
        self.changes += 1

    def end(self, rows: Sequence[int]) -> None:
        """Forget the uses of these copies: they have left."""
        places = self._places_of(rows)
        self.table["generation"][places] = 0

    def reached(self, rows: Sequence[int]) -> None:
        """Count a use of these blocks by one request. A block without an NVMe copy is not
        counted."""
        if not rows:
            return
        places = self._places_of(rows)
        np.add.at(self.table["uses"], places, 1)
        self.table["last_use_s"][places] = self.now_s
        self.changes += 1

    def records(self) -> UsesRecords:
        """Return the records of all NVMe copies."""
        table = self.table
        found: UsesRecords = table[table["generation"] != 0]
        return found

    def _places_of(self, rows: Sequence[int]) -> NDArray[np.intp]:
        places = np.array(rows, np.intp)
        lacking = max(rows, default=-1) + 1 - len(self.table)
        if lacking > 0:
            more = np.zeros(lacking + len(self.table) // 8, USES_RECORD)
            self.table = np.concatenate((self.table, more))
        return places
