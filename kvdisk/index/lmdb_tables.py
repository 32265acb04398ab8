# SPDX-License-Identifier: Apache-2.0
"""The LMDB environment under an index: transactions, errors, damaged files.

The environment runs with ``sync=False``: a commit is in the operating system's cache when it
returns. A crash of the process does not lose it; a crash of the machine may, and then the home
rebuilds the index from the slot headers.

LMDB has no checksums, and in a damaged file it can end the process (an assertion of its own,
SIGBUS). So that this happens once and not at every start, an owner leaves a mark while it has the
index open; one that finds the mark of an owner which did not close lets a child process read the
index first (``try_tables``). Damage that a commit meets makes another mark of that one: by a
rename, which takes no room and asks nothing of LMDB.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

import lmdb

from kvdisk.errors import CorruptRecord, DeviceError, KvdiskError, StoreLocked
from kvdisk.index.commit_writer import MAX_TRANSACTION
from kvdisk.index.records import Operation, Table

logger = logging.getLogger(__name__)

MIN_MAP_BYTES = 1 << 20

_MARK = "open"
"""A file beside LMDB's, there while an owner has the index open, and after one that was killed."""
_NO_MARK = "closed"
"""What it becomes when an owner closes: a rename takes no room, and a new file may."""
_DAMAGED_MARK = "damaged"
"""What it becomes when a commit meets damage: no owner opens it any more (see ``device.home``)."""
_PART_RECORDS = 16384
_UNIT_BYTES = 4096
"""What LMDB allocates in, on machines with memory in units of 4 KiB."""
_RESERVE_UNITS = 128
_LOCK_BYTES = 8192
"""Of LMDB's lock file: as it would make it, for 126 readers."""
_BLOCK_RECORD_BYTES = 256
"""For a record with sha256 keys: 118-162 bytes at first, 221 after many replacements (measured)."""
_STEP_BYTES = 256 << 10
_DAMAGED = (
    lmdb.InvalidError,
    lmdb.CorruptedError,
    lmdb.VersionMismatchError,
    lmdb.PageNotFoundError,
    lmdb.BadTxnError,  # while reading: what LMDB says from the second look at a damaged file on
    lmdb.CursorFullError,
)
_TABLE_NAMES = {Table.BLOCKS: b"blocks", Table.SEGMENTS: b"segments"}


def map_bytes_for(block_count: int) -> int:
    """Return a map size in bytes for so many blocks, and what is kept for deletions."""
    kept_units = 2 * (MAX_TRANSACTION + _RESERVE_UNITS)
    return MIN_MAP_BYTES + _UNIT_BYTES * kept_units + _BLOCK_RECORD_BYTES * block_count


def planned_bytes(record_count: int) -> int:
    """Return how long LMDB's file can become by replacing so many records; in whole steps.

    Beside the records as loosely as they come to be packed, there are the units that the last two
    transactions have freed: only the next but one can take them.
    """
    packed_units = -(-_BLOCK_RECORD_BYTES * record_count // _UNIT_BYTES)
    units = packed_units + 2 * min(MAX_TRANSACTION, packed_units) + _RESERVE_UNITS // 4
    return -(-_UNIT_BYTES * units // _STEP_BYTES) * _STEP_BYTES


class LmdbTables:
    """The environment and its two named databases. LMDB's errors end here.

    ``readonly``: for another process than the owner's. It makes no file; where there is no lock
    file, or it cannot be opened (a copy in a read-only directory), it reads without a lock, which
    is safe only while nobody writes. ``map_bytes``: of the owner.

    The thread that opens it scans and closes; ``commit`` and ``recover`` are for the writer's
    thread.
    """

    def __init__(self, path: Path, map_bytes: int = 0, *, readonly: bool = False) -> None:
        self._path = path
        self._map_bytes = map_bytes
        self._readonly = readonly
        self._last_error: lmdb.Error | None = None
        self._planned_bytes = 0
        self.damaged = False
        """Whether a commit has met damage, which is noted for the next owner."""
        with _translating(path):
            if not readonly:
                path.mkdir(mode=0o700, exist_ok=True)
            _check_files(path, readonly)
            if not readonly:
                _leave_mark(path)
            self._open()

    @property
    def complete(self) -> bool:
        """Whether the owner had made the tables when this was opened to read."""
        return bool(self._databases)

    @contextmanager
    def _reading(self) -> Iterator[lmdb.Transaction[bytes]]:
        """A read transaction; LMDB's errors in it are ours outside."""
        with _translating(self._path):
            try:
                txn = self._environment.begin()
            except lmdb.MapResizedError:  # the owner has opened it anew with a larger map
                self._environment.set_mapsize(0)
                txn = self._environment.begin()
            with txn:
                yield txn

    def get(self, table: Table, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the value of each key, None where there is none, in one read transaction."""
        with self._reading() as txn:
            if not self._databases:
                return [None] * len(keys)
            database = self._databases[table]
            return [txn.get(key, db=database) for key in keys]

    def scan(self, table: Table) -> Iterator[tuple[list[bytes], list[bytes]]]:
        """Yield lists of keys and of values, ascending, in one read transaction, part by part."""
        with self._reading() as txn:
            if not self._databases:
                return
            keys = txn.cursor(self._databases[table]).iternext(keys=True, values=False)
            values = txn.cursor(self._databases[table]).iternext(keys=False, values=True)
            while part := list(islice(keys, _PART_RECORDS)):
                yield part, list(islice(values, _PART_RECORDS))

    def commit(self, operations: Sequence[Operation]) -> None:
        """See ``Tables.commit``."""
        try:
            with self._environment.begin(write=True) as txn:
                for operation in operations:
                    database = self._databases[operation.table]
                    if operation.value is None:
                        txn.delete(operation.key, db=database)
                    else:
                        txn.put(operation.key, operation.value, db=database)
                record_count = sum(txn.stat(database)["entries"] for database in self._databases.values())
                if any(operation.droppable for operation in operations) and not self._has_room(txn):
                    raise lmdb.MapFullError("map full, but for what is kept for deletions")
        except lmdb.Error as error:
            if not isinstance(self._last_error, lmdb.PanicError):
                self._last_error = error
            self._note_damage(error)
            raise _translated(error, self._path) from error
        self._allocate(record_count)

    def append(self, table: Table, items: Iterable[tuple[bytes, bytes]]) -> None:
        """Commit many records, ascending, that come after all that the table has: fast.

        Nothing of value may be in these files until all is in them. Raises DeviceError.
        """
        left, count = iter(items), 0
        with _translating(self._path):
            while part := list(islice(left, _PART_RECORDS)):
                with self._environment.begin(write=True) as txn:
                    txn.cursor(self._databases[table]).putmulti(part, append=True)
                count += len(part)
        self._allocate(count)

    def recover(self) -> None:
        """See ``Tables.recover``."""
        error = self._last_error
        try:
            if isinstance(error, lmdb.MapFullError):
                self._environment.reader_check()  # the slot of a killed reader holds freed space back
            elif isinstance(error, lmdb.PanicError):
                # A failed write of the meta block ends an environment. Until a new one can be had,
                # the error stays.
                self._environment.close()
                self._open()
        except (lmdb.Error, OSError) as again:
            self._note_damage(again)
            raise _translated(again, self._path) from again
        self._last_error = None

    def _note_damage(self, error: lmdb.Error | OSError) -> None:
        if self.damaged or not isinstance(error, _DAMAGED):
            return
        self.damaged = True
        logger.warning("index %s is damaged: the next start makes it anew; %s", self._path, error)
        with suppress(OSError):  # as it is, the mark has a child read the index
            (self._path / _MARK).rename(self._path / _DAMAGED_MARK)

    def close(self, *, in_order: bool = True) -> None:
        """Sync and close, even where the sync raises. Not ``in_order``: the next owner tries it."""
        try:
            if not self._readonly:
                self._environment.sync(True)
        except lmdb.Error as error:
            in_order = False
            raise _translated(error, self._path) from error
        finally:
            self._environment.close()
            if not self._readonly and in_order and not self.damaged:
                with suppress(OSError):
                    (self._path / _MARK).rename(self._path / _NO_MARK)

    def _open(self) -> None:
        self._environment = _open_environment(self._path, self._map_bytes, self._readonly)
        try:
            self._unit_bytes = self._environment.stat()["psize"]
            self._map_units = self._environment.info()["map_size"] // self._unit_bytes
            if not self._readonly:
                self._environment.reader_check()
                self._extend_file()
            self._databases = {
                table: self._environment.open_db(name, create=not self._readonly)
                for table, name in _TABLE_NAMES.items()
            }
        except lmdb.NotFoundError:
            self._databases = {}  # read-only, and the owner has just begun: there is nothing yet
        except BaseException:
            self._environment.close()
            raise

    def _extend_file(self) -> None:
        """Make the file as long as its meta block says it is.

        Reading a map beyond the end of a file that was cut short kills the process (SIGBUS); zeros
        are only an error. A sound file may be some units short, too: its length proves nothing.
        """
        length = (self._environment.info()["last_pgno"] + 1) * self._unit_bytes
        data_file = self._path / "data.mdb"
        if data_file.stat().st_size < length:
            os.truncate(data_file, length)

    def _allocate(self, record_count: int) -> None:
        """Make the file as long as so many records can need, so that it never grows by
        replacements: on a full drive blocks can still leave for others.

        Where the drive refuses that, it grows as LMDB writes it; the next step is tried again.
        """
        wanted_bytes = min(planned_bytes(record_count), self._map_units * self._unit_bytes)
        if wanted_bytes <= self._planned_bytes:
            return
        self._planned_bytes = wanted_bytes
        with suppress(OSError):
            fd = os.open(self._path / "data.mdb", os.O_WRONLY | os.O_NOFOLLOW)
            try:
                length = os.fstat(fd).st_size
                while length < wanted_bytes:  # written, because a file system needs room for an allocation in pieces
                    length += os.pwrite(fd, bytes(min(_STEP_BYTES, wanted_bytes - length)), length)
            finally:
                os.close(fd)

    def _has_room(self, txn: lmdb.Transaction) -> bool:
        """Whether deletions find free units after this transaction, and one more of puts.

        LMDB copies what it changes, and units that a transaction frees can be taken by the next but
        one. So besides the live units there must be place for those that one transaction of full
        size frees, for the list of free units, and a reserve for two small transactions of
        deletions; the third lives on what the first has freed. An open read transaction of another
        process holds freed units back: then deletions can fail and are retried.
        """
        stats = [txn.stat(database) for database in self._databases.values()]
        leaves = sum(each["leaf_pages"] for each in stats)
        branches = sum(each["branch_pages"] for each in stats)
        freed = min(MAX_TRANSACTION, leaves) + branches
        listed = self._map_units // 256
        return bool(leaves + branches + freed + listed + _RESERVE_UNITS <= self._map_units)


def _open_environment(path: Path, map_bytes: int, readonly: bool) -> lmdb.Environment:
    def opened(map_size: int, **how: bool) -> lmdb.Environment:
        return lmdb.Environment(
            str(path), map_size=map_size, create=False, mode=0o600, max_dbs=len(_TABLE_NAMES), lib_version=0, **how
        )

    if not readonly:
        _make_lock_file(path / "lock.mdb")
        return opened(map_bytes, sync=False)
    if not (path / "data.mdb").exists():  # LMDB would leave a lock file
        raise FileNotFoundError(errno.ENOENT, "no index", str(path))
    as_the_owner_made_it = 0
    if _is_file(path / "lock.mdb"):  # LMDB would make one; an owner's is there before its data file
        with suppress(lmdb.Error):
            return opened(as_the_owner_made_it, readonly=True)
    return opened(as_the_owner_made_it, readonly=True, lock=False)


def _make_lock_file(path: Path) -> None:
    """Make LMDB's lock file: LMDB would map a hole, and be killed (SIGBUS) on a full drive."""
    if not path.exists():
        fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
        try:
            if os.write(fd, bytes(_LOCK_BYTES)) != _LOCK_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(fd)


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def _check_files(path: Path, readonly: bool) -> None:
    """Raise CorruptRecord where LMDB would follow a symlink, or wait for ever at a pipe."""
    for name in ("data.mdb",) if readonly else ("data.mdb", "lock.mdb"):
        if os.path.lexists(path / name) and not _is_file(path / name):
            raise CorruptRecord(f"index {path}: {name} is not a file")


def was_left_open(path: Path) -> bool:
    """Whether there is an index whose last owner did not close it."""
    with _translating(path):
        return (path / _MARK).exists() and (path / "data.mdb").exists()


def _leave_mark(path: Path) -> None:
    """Leave the mark of an owner. Raises CorruptRecord where one has found the index damaged."""
    mark = path / _MARK
    if (path / _DAMAGED_MARK).exists():
        raise CorruptRecord(f"index {path}: it was found to be damaged")
    with suppress(FileNotFoundError):
        (path / _NO_MARK).rename(mark)
        return
    os.close(os.open(mark, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o600))


def try_tables(path: Path) -> None:
    """Read all, and go through the motions of a write, in a process that may end over it. Whatever
    is raised says that the index is damaged."""
    _check_files(path, readonly=False)
    with _translating(path):
        environment = _open_environment(path, 0, readonly=False)
        databases = [environment.open_db(name, create=False) for name in _TABLE_NAMES.values()]
        with environment.begin() as txn:
            for database in databases:
                deque(txn.cursor(database), maxlen=0)  # as fast as it can be gone through
        txn = environment.begin(write=True)
        with suppress(lmdb.MapFullError):  # an index may be full
            for number in range(100):
                txn.put(number.to_bytes(16, "big"), bytes(100), db=databases[0])
        txn.abort()
        environment.close()


@contextmanager
def _translating(path: Path) -> Iterator[None]:
    try:
        yield
    except (lmdb.Error, OSError) as error:
        raise _translated(error, path) from error


def _translated(error: lmdb.Error | OSError, path: Path) -> KvdiskError:
    """Return what leaves the room in place of LMDB's or the system's error."""
    what = f"index {path}: {error}"
    if isinstance(error, OSError):
        return DeviceError(error.errno or errno.EIO, what)
    if "already open in this process" in str(error):
        return StoreLocked(what)
    if isinstance(error, _DAMAGED):
        return CorruptRecord(what)
    if isinstance(error, lmdb.MapFullError):
        return DeviceError(errno.ENOSPC, what)
    code = getattr(error, "code", 0)
    return DeviceError(code if code > 0 else errno.EIO, what)
