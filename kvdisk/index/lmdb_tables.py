# SPDX-License-Identifier: Apache-2.0
"""The LMDB environment under an index: transactions, errors, one writer.

The environment runs with ``sync=False``: a commit is in the operating system's cache when it
returns. A crash of the process does not lose it. A crash of the machine may, and the engine store
then rebuilds the index from the slot headers.

LMDB has no checksums, and a damaged file can end the process (an assertion of LMDB's, SIGBUS). So
all this runs in a process of its own: see ``index_process``.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

import lmdb

from kvdisk.errors import CorruptRecord, DeviceError, KvdiskError, NumberTaken, StoreLocked
from kvdisk.index.map_size import MAX_TRANSACTION, RESERVE_UNITS, STEP_BYTES, planned_bytes
from kvdisk.index.packed import Operation, Packed, Table

LOCK_WAIT_S = 15.0
"""Seconds that an owner waits for the owner before it: the process of a killed engine ends its
commit first."""
_LOCK_POLL_S = 0.02
_PART_RECORDS = 16384
_TRIED_PUTS = 100
_LOCK_FILE_BYTES = 8192
"""The length of LMDB's lock file as LMDB makes it, for 126 readers."""
_DAMAGED = (
    lmdb.InvalidError,
    lmdb.CorruptedError,
    lmdb.VersionMismatchError,
    lmdb.PageNotFoundError,
    lmdb.BadTxnError,  # while reading: what LMDB says from the second look at a damaged file on
    lmdb.CursorFullError,
)
_TABLE_NAMES = {Table.BLOCKS: b"blocks", Table.SEGMENTS: b"segments"}


class LmdbTables:
    """The environment and its two named databases. No error of LMDB's leaves this class.

    ``readonly``: for readers other than the owner. A reader makes no file. Where there is no lock
    file, or it cannot be opened (a copy in a read-only directory), it reads without a lock, which
    is safe only while nobody writes. ``map_bytes``: the map's size for an owner; a reader takes the
    owner's.

    An owner holds an exclusive flock on the directory until it closes. Once it has the lock, and
    before it touches a file, it asks ``is_wanted``: does the engine that it works for still live?

    LMDB opens files by path. So this changes for a moment into the directory that was opened and
    checked: whoever may rename a directory above could have put another in its place.

    Raises StoreLocked where another owner does not let go, CorruptRecord where the files are no
    index, NumberTaken, DeviceError where the system refuses, or the directory is another user's.
    """

    def __init__(
        self,
        path: Path,
        map_bytes: int = 0,
        *,
        readonly: bool = False,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        self._path = path
        self._map_bytes = map_bytes
        self._readonly = readonly
        self._last_error: lmdb.Error | None = None
        self._planned_bytes = 0
        with _translating(path):
            if not readonly:
                path.mkdir(mode=0o700, exist_ok=True)
            self._directory_fd = _open_own_directory(path)
            try:
                if not readonly:
                    _take_lock(self._directory_fd, path)
                if not is_wanted():
                    raise StoreLocked(f"index {path}: nobody wants it any more")
                self._open()
            except lmdb.LockError as error:
                self._let_go()
                raise NumberTaken(errno.EAGAIN, f"index {path}: process number {os.getpid()} reads it") from error
            except BaseException:
                self._let_go()
                raise

    @property
    def transaction(self) -> int:
        """The number of the last transaction. It rises with each transaction that changes
        something."""
        return int(self._environment.info()["last_txnid"])

    @property
    def complete(self) -> bool:
        """Whether the owner had made the tables when this was opened to read."""
        return bool(self._databases)

    @contextmanager
    def _reading(self) -> Iterator[lmdb.Transaction[bytes]]:
        """Open a read transaction. LMDB's errors in it become ours."""
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

    def scan(self, table: Table) -> Iterator[Packed]:
        """Yield the records of a table, ascending, in one read transaction, part by part."""
        with self._reading() as txn:
            if not self._databases:
                return
            keys = txn.cursor(self._databases[table]).iternext(keys=True, values=False)
            values = txn.cursor(self._databases[table]).iternext(keys=False, values=True)
            while part := list(islice(keys, _PART_RECORDS)):
                yield Packed.of(part, list(islice(values, _PART_RECORDS)))

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
                    raise lmdb.MapFullError("the map is full, except for its reserve for deletions")
        except lmdb.Error as error:
            if not isinstance(self._last_error, lmdb.PanicError):
                self._last_error = error
            raise _translated(error, self._path) from error
        self._allocate(record_count)

    def append(self, table: Table, items: Iterable[tuple[bytes, bytes]]) -> None:
        """Commit many records fast. They must ascend, and come after all records in the table.

        Nothing of value may be in these files until all records are in them. Raises DeviceError.
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
            raise _translated(again, self._path) from again
        self._last_error = None

    def close(self) -> None:
        """Sync and close, even where the sync raises."""
        try:
            with _translating(self._path):
                if not self._readonly:
                    self._environment.sync(True)
        finally:
            self._environment.close()
            self._let_go()

    def _let_go(self) -> None:
        """Close the directory, and so release its lock."""
        if self._directory_fd >= 0:
            with suppress(OSError):  # it is closed whatever a file system says that has gone away
                os.close(self._directory_fd)
            self._directory_fd = -1

    def _open(self) -> None:
        with _inside(self._directory_fd):
            _check_files(self._path, self._readonly)
            self._environment = _open_environment(self._map_bytes, self._readonly)
        try:
            self._unit_bytes = self._environment.stat()["psize"]
            self._map_units = self._environment.info()["map_size"] // self._unit_bytes
            if not self._readonly:
                self._environment.reader_check()
            self._databases = {
                table: self._environment.open_db(name, create=not self._readonly)
                for table, name in _TABLE_NAMES.items()
            }
            if not self._readonly:
                self._try_to_write()
        except lmdb.NotFoundError:
            self._databases = {}  # read-only, and the owner has just begun: there is nothing yet
        except BaseException:
            self._environment.close()
            raise

    def _try_to_write(self) -> None:
        """Put records and abort, which reads the list of free units: damage in it shows now."""
        txn = self._environment.begin(write=True)
        try:
            with suppress(lmdb.MapFullError):  # an index may be full
                for number in range(_TRIED_PUTS):
                    txn.put(number.to_bytes(16, "big"), bytes(100), db=self._databases[Table.BLOCKS])
        finally:
            txn.abort()

    def _allocate(self, record_count: int) -> None:
        """Write the file to the length that ``record_count`` records can come to need, so that
        replacing records never makes it grow: on a full drive blocks can still leave for others.

        Where the drive refuses that, the file grows as LMDB writes it, and the next step is tried
        again.
        """
        wanted_bytes = min(planned_bytes(record_count), self._map_units * self._unit_bytes)
        if wanted_bytes <= self._planned_bytes:
            return
        self._planned_bytes = wanted_bytes
        with suppress(OSError):
            fd = os.open("data.mdb", os.O_WRONLY | os.O_NOFOLLOW, dir_fd=self._directory_fd)
            try:
                length = os.fstat(fd).st_size
                while length < wanted_bytes:  # written, because a file system needs room for an allocation in pieces
                    length += os.pwrite(fd, bytes(min(STEP_BYTES, wanted_bytes - length)), length)
            finally:
                os.close(fd)

    def _has_room(self, txn: lmdb.Transaction) -> bool:
        """Return whether deletions will find free units after this transaction and one more of
        puts.

        LMDB copies what it changes, and units that a transaction frees can be taken by the next but
        one. So besides the live units there must be room for those that one transaction of full
        size frees, for the list of free units, and for two small transactions of deletions; the
        third lives on what the first has freed. An open read transaction of another process holds
        freed units back: then deletions can fail and are retried.
        """
        stats = [txn.stat(database) for database in self._databases.values()]
        leaves = sum(each["leaf_pages"] for each in stats)
        branches = sum(each["branch_pages"] for each in stats)
        freed = min(MAX_TRANSACTION, leaves) + branches
        listed = self._map_units // 256
        return bool(leaves + branches + freed + listed + RESERVE_UNITS <= self._map_units)


def _open_own_directory(path: Path) -> int:
    """Open a directory that this user, or root, has written alone. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    status = os.fstat(fd)
    if status.st_uid in {0, os.geteuid()} and not status.st_mode & 0o002:
        return fd
    os.close(fd)
    raise PermissionError(errno.EACCES, f"another user than {os.geteuid()} could have written it")


@contextmanager
def _inside(directory_fd: int) -> Iterator[None]:
    """Be in a directory; then again where this process was, as far as it may look there."""
    before = -1
    with suppress(OSError):
        before = os.open(".", os.O_PATH | os.O_DIRECTORY)
    try:
        os.fchdir(directory_fd)
        yield
    finally:
        if before >= 0:
            os.fchdir(before)
            os.close(before)


def _open_environment(map_bytes: int, readonly: bool) -> lmdb.Environment:
    """Open the environment in this process's directory."""

    def opened(map_size: int, **how: bool) -> lmdb.Environment:
        return lmdb.Environment(
            ".", map_size=map_size, create=False, mode=0o600, max_dbs=len(_TABLE_NAMES), lib_version=0, **how
        )

    if not readonly:
        _make_lock_file(Path("lock.mdb"))
        return opened(map_bytes, sync=False)
    if not os.path.exists("data.mdb"):  # LMDB would leave a lock file
        raise FileNotFoundError(errno.ENOENT, "no index")
    as_the_owner_made_it = 0
    if _is_file(Path("lock.mdb")):  # LMDB would make one; an owner's is there before its data file
        try:
            return opened(as_the_owner_made_it, readonly=True)
        except lmdb.LockError:  # others have it open, so its owner may write
            raise
        except lmdb.Error:
            pass
    return opened(as_the_owner_made_it, readonly=True, lock=False)


def _make_lock_file(path: Path) -> None:
    """Make LMDB's lock file with all its bytes written: LMDB would map a hole, and SIGBUS would
    kill it on a full drive."""
    made = not path.exists()
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    try:
        missing = _LOCK_FILE_BYTES - os.fstat(fd).st_size
        if missing > 0 and os.pwrite(fd, bytes(missing), _LOCK_FILE_BYTES - missing) != missing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        if made:
            path.unlink()
        raise
    finally:
        os.close(fd)


def _take_lock(fd: int, path: Path) -> None:
    """Take an exclusive flock on an open directory. A file system without such locks counts as one
    that gave it. Raises StoreLocked."""
    end_s = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end_s:
                raise StoreLocked(f"index {path}: another process has had it open for {LOCK_WAIT_S:g} s") from None
            time.sleep(_LOCK_POLL_S)
        except OSError:
            return
        else:
            return


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def _check_files(path: Path, readonly: bool) -> None:
    """Raise CorruptRecord where LMDB would follow a symlink, wait for ever at a pipe, or begin anew
    in a file that was emptied, in this process's directory. ``path``: its name."""
    for name in ("data.mdb",) if readonly else ("data.mdb", "lock.mdb"):
        if os.path.lexists(name) and not _is_file(Path(name)):
            raise CorruptRecord(f"index {path}: {name} is not a file")
    if _is_file(Path("data.mdb")) and not os.stat("data.mdb").st_size:
        raise CorruptRecord(f"index {path}: data.mdb is empty")


@contextmanager
def _translating(path: Path) -> Iterator[None]:
    try:
        yield
    except (lmdb.Error, OSError) as error:
        raise _translated(error, path) from error


def _translated(error: lmdb.Error | OSError, path: Path) -> KvdiskError:
    """Return our error for one of LMDB's or the system's."""
    what = f"index {path}: {error}"
    if isinstance(error, OSError):
        return DeviceError(error.errno or errno.EIO, what)
    if isinstance(error, _DAMAGED):
        return CorruptRecord(what)
    if isinstance(error, lmdb.MapFullError):
        return DeviceError(errno.ENOSPC, what)
    code = getattr(error, "code", 0)
    return DeviceError(code if code > 0 else errno.EIO, what)
