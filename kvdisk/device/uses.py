# SPDX-License-Identifier: Apache-2.0
r"""A home's USES file: how often each block was used, and when last. Advisory: no engine needs it, none trusts it.

Layout, little-endian, in units of 4096 bytes; the first is the file's header, each other one stands for itself::

    file header    0  magic "KVDUSES\0", version u16, records in a unit u16, bytes of a record u16
                4088  xxh3_64 of the 4088 bytes before it, u64
    unit           0  magic "KVDUSEU\0", version u16, record count u16, segment u32, first slot u32, written_s u32
                  32  records of the slots from the first on: generation u64, uses u32, last use u32
                4088  xxh3_64 of the 4088 bytes before it, u64

A record speaks of the block of its generation in that slot, and of no other that came there since; generation 0: of
none. Times are seconds since the Unix epoch, 0: never. All that is not said here is zeros. A unit that is damaged, or
was being written, says nothing; the others do. Only units that have changed are written.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kvdisk.device import paths
from kvdisk.device.control import USES_FILE
from kvdisk.errors import DeviceError
from kvdisk.geometry import USES_UNIT_BYTES, USES_UNIT_SLOTS

logger = logging.getLogger("kvdisk.device")

UNIT_BYTES = USES_UNIT_BYTES
UNIT_RECORDS = USES_UNIT_SLOTS
MOST_FILE_BYTES = 256 << 20
"""More is not read: of sixteen million blocks."""

_VERSION = 1
_FILE = struct.Struct("<8sHHH")
_FILE_MAGIC, _UNIT_MAGIC = b"KVDUSES\0", b"KVDUSEU\0"
_HEAD = struct.Struct("<8sHHIII8x")
_SUM = struct.Struct("<Q")
_SUM_OFFSET = UNIT_BYTES - _SUM.size
_RECORD = np.dtype([("generation", "<u8"), ("uses", "<u4"), ("last_use_s", "<u4")])
_PIECE_UNITS = 1024
assert _HEAD.size + UNIT_RECORDS * _RECORD.itemsize <= _SUM_OFFSET


class UsesUnit(NamedTuple):
    """The uses of blocks in slots of one segment, from ``first`` on; columns of one length, at most UNIT_RECORDS."""

    segment: int
    first: int
    generations: NDArray[np.uint64]
    uses: NDArray[np.uint32]
    last_use_s: NDArray[np.uint32]


def read_uses(path: Path) -> list[UsesUnit] | None:
    """Return what can be read of a USES file; None where there is none, or nothing in it is to be relied on.

    Waits for the disk. Writes nothing, follows no symlink, and never raises: what is wrong with it is as if it were
    not there.
    """
    try:
        fd = paths.open_regular(path, os.O_RDONLY)
    except OSError:
        return None
    if fd < 0:
        return None
    try:
        return [unit for _, unit in _units(fd)] if _has_header(fd) else None
    except OSError:
        return None
    finally:
        os.close(fd)


def _has_header(fd: int) -> bool:
    return os.pread(fd, UNIT_BYTES, 0) == _encoded_header()


def _encoded_header() -> bytes:
    return _sealed(_FILE.pack(_FILE_MAGIC, _VERSION, UNIT_RECORDS, _RECORD.itemsize))


def _sealed(fields: bytes) -> bytes:
    padded = fields.ljust(_SUM_OFFSET, b"\0")
    return padded + _SUM.pack(xxh3_64_intdigest(padded))


def _units(fd: int) -> Iterator[tuple[int, UsesUnit]]:
    """Yield the sound units of a file with their numbers. Raises OSError."""
    count = min(os.fstat(fd).st_size, MOST_FILE_BYTES) // UNIT_BYTES
    for first in range(1, count, _PIECE_UNITS):
        piece = os.pread(fd, UNIT_BYTES * min(_PIECE_UNITS, count - first), UNIT_BYTES * first)
        for at in range(len(piece) // UNIT_BYTES):
            unit = _decode(piece[at * UNIT_BYTES : (at + 1) * UNIT_BYTES])
            if unit is not None:
                yield first + at, unit


def _decode(encoded: bytes) -> UsesUnit | None:
    magic, version, count, segment, first, _ = _HEAD.unpack_from(encoded)
    if (
        magic != _UNIT_MAGIC
        or version != _VERSION
        or count > UNIT_RECORDS
        or xxh3_64_intdigest(encoded[:_SUM_OFFSET]) != _SUM.unpack_from(encoded, _SUM_OFFSET)[0]
    ):
        return None
    records = np.frombuffer(encoded, _RECORD, count, _HEAD.size)
    columns = (np.ascontiguousarray(records[name]) for name in ("generation", "uses", "last_use_s"))
    return UsesUnit(segment, first, *columns)


def _encode(unit: UsesUnit, now_s: int) -> bytes:
    count = len(unit.generations)
    assert count <= UNIT_RECORDS
    records = np.zeros(count, _RECORD)
    records["generation"], records["uses"], records["last_use_s"] = unit.generations, unit.uses, unit.last_use_s
    head = _HEAD.pack(_UNIT_MAGIC, _VERSION, count, unit.segment, unit.first, now_s)
    return _sealed(head + records.tobytes())


class UsesFile:
    """The USES file of a home that this process owns. One thread at a time calls everything; all of it waits.

    ``recall`` comes first. The file is no longer than all units that were ever wanted at a time.
    """

    def __init__(self, home_path: Path) -> None:
        self._path = home_path / USES_FILE
        self._places: dict[tuple[int, int], int] = {}
        self._vacant: list[int] = []
        self._length = 1

    def recall(self, slot_counts: Mapping[int, int]) -> list[UsesUnit]:
        """Return what the file says of these segments; where the rest of it stands others may be written.

        A file that cannot be read is replaced by the first ``write``. ``slot_counts``: slots by segment.
        """
        self._places, self._vacant, self._length = {}, [], 1
        found: list[UsesUnit] = []
        fd = self._open()
        if fd < 0:
            return found
        try:
            if not _has_header(fd):
                return found
            for number, unit in _units(fd):
                name = (unit.segment, unit.first)
                slots = min(UNIT_RECORDS, slot_counts.get(unit.segment, 0) - unit.first)
                if unit.first % UNIT_RECORDS == 0 and len(unit.generations) == slots and name not in self._places:
                    self._places[name] = number
                    found.append(unit)
            self._length = 1 + max(self._places.values(), default=0)
            taken = set(self._places.values())
            self._vacant = [number for number in range(self._length - 1, 0, -1) if number not in taken]
        except OSError as error:
            logger.debug("reading %s: %s", self._path, error)
        finally:
            os.close(fd)
        return found

    def write(self, units: Sequence[UsesUnit], segments: frozenset[int], now_s: int) -> bool:
        """Write units that have changed. ``segments``: all that there are; the place of others is free.

        Returns False where the file had to be made anew: then all other units are wanted, too. Raises DeviceError;
        what was not written is to be given again.
        """
        for name in [name for name in self._places if name[0] not in segments]:
            self._vacant.append(self._places.pop(name))
        if not units:
            return True
        with paths.device_errors(f"writing {self._path}"):
            fd, is_old = self._open_to_write()
            try:
                for unit in units:
                    self._write_all(fd, _encode(unit, now_s), self._place_of((unit.segment, unit.first)))
            finally:
                os.close(fd)
        return is_old

    def _place_of(self, name: tuple[int, int]) -> int:
        if name not in self._places:
            if not self._vacant:
                self._vacant.append(self._length)
                self._length += 1
            self._places[name] = self._vacant.pop()
        return self._places[name]

    def _write_all(self, fd: int, encoded: bytes, number: int) -> None:
        if os.pwrite(fd, encoded, number * UNIT_BYTES) != UNIT_BYTES:
            raise DeviceError(errno.ENOSPC, f"{self._path} was written in part")

    def _open(self) -> int:
        with suppress(OSError):
            return paths.open_regular(self._path, os.O_RDONLY)
        return -1

    def _open_to_write(self) -> tuple[int, bool]:
        """Open the file, or make it anew where it is not what it should be; return whether it was. Raises OSError."""
        with suppress(FileNotFoundError):
            fd = paths.open_regular(self._path, os.O_RDWR)
            if fd >= 0:
                if _has_header(fd):
                    if os.fstat(fd).st_size > self._length * UNIT_BYTES:
                        os.ftruncate(fd, self._length * UNIT_BYTES)
                    return fd, True
                os.close(fd)
        temporary = self._path.with_name(USES_FILE + ".tmp")
        for path in (temporary, self._path):
            paths.remove_anything(path.parent, path.name)
        self._places, self._vacant, self._length = {}, [], 1
        fd = paths.create_file(temporary)
        try:
            self._write_all(fd, _encoded_header(), 0)
            temporary.rename(self._path)
        except BaseException:
            os.close(fd)
            with suppress(OSError):
                temporary.unlink()
            raise
        return fd, False
