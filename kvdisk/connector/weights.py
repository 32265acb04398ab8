# SPDX-License-Identifier: Apache-2.0
"""The digest by which weight files are known: of every byte. And a sample, which costs little and
proves nothing.

Weights take seconds to minutes to read. So many reads go on at once, each start reads beside the
loading of the weights, one process of a machine reads for all, and the digest is remembered for as
long as the file system shows that no file has changed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import stat
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from operator import index
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_128

from kvdisk.device.mounts import kind_of
from kvdisk.errors import ConfigError, KvdiskError, NoThread, start_thread, thread_errors

logger = logging.getLogger("kvdisk.connector")

Read = Callable[[int, Sequence[bytearray | memoryview], int], int]
"""A function like ``os.preadv``: descriptor, buffers, offset."""

_PIECE_BYTES = 16 << 20
_THREADS = 16
"""Threads that read and hash: what one waits for, another one hashes."""
_SAMPLES, _SAMPLE_BYTES = 64, 4096
"""Of each file, evenly spread."""
_MOST_HEADER_BYTES = 100_000_000
"""The safetensors format's own limit."""
_SAID_AFTER_S, _LOOK_S = 3.0, 1.0
_WORTH_S = 1.0
"""Seconds that a digest must take to be remembered: a quicker one is read again rather than
trusted."""
_SETTLED_NS = 2 * 10**9
"""A file that changed a shorter time ago may change once more at the same time of its clock."""
_ALONE_WAIT_S, _ALONE_LOOK_S = 600.0, 0.2
"""How long a process waits for another one that reads, at most, and how often it looks."""
_MOST_MEMORY_BYTES = 4096
"""Bytes of a file that remembers a digest that are read at most."""
_BY_KERNEL = frozenset(
    (
        *("bcachefs", "btrfs", "ceph", "ext2", "ext3", "ext4", "f2fs", "gfs2", "gpfs", "jfs"),
        *("lustre", "nfs", "nfs4", "ocfs2", "reiserfs", "xfs", "zfs"),
    )
)
"""File systems on which each change of a file moves its change time, which no program sets. In
images (squashfs, erofs, iso9660), of lower layers (overlay) and of FUSE it is whatever their maker
wrote: two files may have all alike, and differ."""
_WHILE_MOUNTED = _BY_KERNEL | {"erofs", "iso9660", "overlay", "ramfs", "squashfs", "tmpfs"}
"""The same as long as one is mounted. Elsewhere, as with FUSE, a file may change in silence."""
_LOCKS: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)
"""Of this process, by what is remembered: locks of a file are the process's own."""
os.register_at_fork(after_in_child=_LOCKS.clear)


_EARLY_BYTES = 1 << 30
"""Weights from which on they are read beside their loading: fewer are read in a second."""


class WeightsChanged(KvdiskError):
    """Files changed while they were read, or loaded: which ones the model has is not known."""


def known_digest(
    files: Sequence[Path],
    memory: Path,
    *,
    seen: Sequence[Facts] | None = None,
    read: Read = os.preadv,
    worth_s: float = _WORTH_S,
) -> str:
    """Return the digest of files, read or remembered, and log how long that took, unless it was
    quick. Any thread; waits for the drive, and for another process of this user that is reading the
    same files.

    ``memory``: a directory of this user's, made where that is possible. Where it cannot be written,
    or belongs to another user, nothing is remembered, nor where change times say nothing
    (``_BY_KERNEL``). ``seen``: the ``facts`` that the files must still have; None: those of now.
    Raises WeightsChanged, OSError, NoThread.
    """
    began_ns, began_s = time.time_ns(), time.monotonic()
    found = facts(files)
    if seen is not None and found != seen:
        raise WeightsChanged(f"weight files in {files[0].parent} have changed since they were loaded")
    which = json.dumps([(each.path, each.device) for each in found])  # other hosts may share the directory
    place = memory / f"weights-{hashlib.sha256(which.encode()).hexdigest()[:32]}"
    key = hashlib.sha256(json.dumps(found).encode()).hexdigest() if _may_remember(files, found, began_ns) else ""
    with ExitStack() as stack:
        if key:
            stack.enter_context(_alone(place))
            if (remembered := _recall(place, key)) is not None:
                logger.info("kvdisk has identified the weights: they have not changed since it last read them.")
                return remembered
        digest = content_digest(files, read)
        taken_s = time.monotonic() - began_s
        if facts(files) != found:
            raise WeightsChanged(f"weight files in {files[0].parent} changed while they were read")
        if key and taken_s >= worth_s:
            _remember(place, key, digest)
    if taken_s >= worth_s:
        size = sum(each.size for each in found)
        logger.info("kvdisk has identified the weights: it read %.1f GB in %.1f s.", size / 1e9, taken_s)
    return digest


def read_early(files: Sequence[Path], memory: Path) -> None:
    """Begin to read large weights, for this process and those that it starts, while they are
    loaded. Where it could not be remembered that would be in vain, and nothing is read. Raises
    OSError, NoThread."""
    found = facts(files)
    if sum(each.size for each in found) < _EARLY_BYTES or not _may_remember(files, found, time.time_ns()):
        return

    def read() -> None:
        with suppress(OSError, KvdiskError):  # who needs the digest meets the same
            known_digest(files, memory)

    start_thread(threading.Thread(target=read, name="kvdisk-weights", daemon=True))


def content_digest(files: Sequence[Path], read: Read = os.preadv, clock: Callable[[], float] = time.monotonic) -> str:
    """Return a digest of names, sizes and every byte of files, in order. Logs a line where it takes
    longer than a start should be silent. Raises OSError, NoThread."""
    sizes = [file.stat().st_size for file in files]
    pieces = [(file, at) for file, size in zip(files, sizes, strict=True) for at in range(0, size, _PIECE_BYTES)]
    began_s, said = clock(), False
    reading = _Reading(pieces, read)
    while not reading.ended.wait(_LOOK_S):
        if not said and clock() - began_s >= _SAID_AFTER_S:
            said = True
            done_bytes = len(reading.hashes) * _PIECE_BYTES
            text = "kvdisk reads the weights to identify them: %.1f of %.1f GB so far."
            logger.info(text, done_bytes / 1e9, sum(sizes) / 1e9)
    digest = hashlib.sha256(json.dumps([[file.name for file in files], sizes, _PIECE_BYTES]).encode())
    digest.update(b"".join(reading.result()))
    return digest.hexdigest()


class _Reading:
    """Threads that read and hash pieces of files. They are daemons: nothing waits for a drive when
    the process ends. ``hashes``: by number of the piece, as far as they are known. ``ended``: they
    are done, or have failed."""

    def __init__(self, pieces: Sequence[tuple[Path, int]], read: Read) -> None:
        self.hashes: dict[int, bytes] = {}
        self.ended = threading.Event()
        self._pieces = pieces
        self._read = read
        self._next = count()
        self._error: Exception | None = None
        if not pieces:
            self.ended.set()
        try:
            for _ in range(min(_THREADS, len(pieces))):
                start_thread(threading.Thread(target=self._run, name="kvdisk-weights", daemon=True))
        except NoThread as error:
            self._error = error
            self.ended.set()

    def result(self) -> Iterator[bytes]:
        """Return the hash of each piece, in order; call it once they have ended. Raises OSError."""
        if self._error is not None:
            raise self._error
        return map(self.hashes.__getitem__, range(len(self._pieces)))

    def _run(self) -> None:
        buffer = memoryview(bytearray(_PIECE_BYTES))
        try:
            while not self.ended.is_set() and (number := next(self._next)) < len(self._pieces):
                self.hashes[number] = self._hash(*self._pieces[number], buffer)
                if len(self.hashes) == len(self._pieces):
                    self.ended.set()
        except Exception as error:  # who waits raises it
            self._error = error
            self.ended.set()

    def _hash(self, file: Path, offset: int, buffer: memoryview) -> bytes:
        """Return the hash of a piece of a file, which is shorter at its end."""
        length = 0
        with file.open("rb", buffering=0) as stream:
            while length < _PIECE_BYTES and (more := self._read(stream.fileno(), [buffer[length:]], offset + length)):
                length += more
        return xxh3_128(buffer[:length]).digest()


def sample_digest(files: Sequence[Path]) -> str:
    """Return a digest of each file's name, size, header, and some of its bytes: files of which this
    differs differ. Raises ConfigError where a file is damaged, OSError, NoThread."""
    digest = hashlib.sha256()
    with thread_errors(), ThreadPoolExecutor(_THREADS, "kvdisk-sample") as pool:
        digest.update(b"".join(pool.map(_sample, files)))
    return digest.hexdigest()


def _sample(file: Path) -> bytes:
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as stream:
        size = os.fstat(stream.fileno()).st_size
        digest.update(f"{file.name}:{size}:".encode())
        if file.suffix == ".safetensors":
            digest.update(_read_header(file, stream.fileno(), size))
        for offset in sorted({at * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1) for at in range(_SAMPLES)}):
            digest.update(_read_all(stream.fileno(), _SAMPLE_BYTES, offset))
    return digest.digest()


def _read_all(fd: int, length: int, offset: int) -> bytes:
    """Read so many bytes, or up to the end of the file."""
    found = b""
    while len(found) < length and (more := os.pread(fd, length - len(found), offset + len(found))):
        found += more
    return found


def _read_header(file: Path, fd: int, file_bytes: int) -> bytes:
    """Return a file's header. The safetensors format is: u64 length, JSON, data. Raises ConfigError
    where the file is not of that format."""
    header_bytes = int.from_bytes(_read_all(fd, 8, 0), "little")
    data_bytes = file_bytes - 8 - header_bytes
    fits = data_bytes >= 0 and header_bytes <= _MOST_HEADER_BYTES
    header = _read_all(fd, header_bytes, 8) if fits else b""
    try:
        tensors = [tensor for name, tensor in json.loads(header).items() if name != "__metadata__"]
        spans = [tuple(map(index, tensor["data_offsets"])) for tensor in tensors]
        sound = all(0 <= start <= end <= data_bytes for start, end in spans)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        sound = False
    if not sound:
        raise ConfigError(f"kvdisk needs sound weight files, and {file} is a damaged one.")
    return header


# -- what is remembered --------------------------------------------------------------------------


class Facts(NamedTuple):
    """What changes when a file does. ``inode_changed_ns``: no program can set it back. ``system``:
    the id that the file system has of its own: numbers of devices are given again."""

    path: str
    system: int
    device: int
    inode: int
    size: int
    changed_ns: int
    inode_changed_ns: int


def facts(files: Sequence[Path]) -> list[Facts]:
    """Return the facts of files. Raises OSError."""
    found = []
    for file in files:
        now, path = file.stat(), str(file.absolute())
        system = os.statvfs(file).f_fsid
        found.append(Facts(path, system, now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns))
    return found


def changes_show(path: Path) -> bool:
    """Return whether each change of a file there moves its change time, as long as it is
    mounted."""
    mount = kind_of(path)
    return mount is not None and mount.kind in _WHILE_MOUNTED


def _may_remember(files: Sequence[Path], found: Sequence[Facts], now_ns: int) -> bool:
    """Return whether equal facts mean equal files from now on."""
    mounts = {file.resolve().parent for file in files}
    kinds = {mount.kind if (mount := kind_of(place)) else "" for place in mounts}
    # A change time in whole seconds was written by a tool that makes images, or by a file system
    # that keeps no finer one.
    fine = all(each.inode_changed_ns % 10**9 for each in found)
    settled = max(max(each.changed_ns, each.inode_changed_ns) for each in found) < now_ns - _SETTLED_NS
    return kinds <= _BY_KERNEL and fine and settled


@contextmanager
def _alone(place: Path) -> Iterator[None]:
    """Hold what is remembered, so that others of this machine wait for it and read nothing. Where
    files cannot be locked, or the other takes too long, each reads for itself."""
    with _LOCKS[place]:
        fd = -1
        with suppress(OSError):
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(place.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            end_s = time.monotonic() + _ALONE_WAIT_S
            while not _try_lock(fd) and time.monotonic() < end_s:
                time.sleep(_ALONE_LOOK_S)
        try:
            yield
        finally:
            if fd >= 0:
                os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a process's own: one forked meanwhile does not hold it
    except BlockingIOError:
        return False
    return True


def _recall(place: Path, key: str) -> str | None:
    """Return the digest that this user remembered under a key; None where there is none, or where
    another user could have written it."""
    try:
        fd = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as stream:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
                return None
            known, found, check = stream.read(_MOST_MEMORY_BYTES).decode("ascii").split()
    except (OSError, ValueError):
        return None
    return found if (known, check) == (key, _check_of(key, found)) else None


def _remember(place: Path, key: str, found: str) -> None:
    """Write a digest. The file gets its name when it is complete."""
    with suppress(OSError):
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd, temporary = tempfile.mkstemp(prefix=f".{place.name}.", dir=place.parent)
        try:
            with open(fd, "w", encoding="ascii") as stream:
                stream.write(f"{key} {found} {_check_of(key, found)}\n")
            Path(temporary).replace(place)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise


def _check_of(key: str, found: str) -> str:
    """Return a checksum that shows that a file is complete."""
    return hashlib.sha256(f"{key} {found}".encode()).hexdigest()
