# SPDX-License-Identifier: Apache-2.0
"""A private directory on the drive that is measured, and the file in it. Nothing of it is left afterwards."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from kvdisk.cli.output import size
from kvdisk.device.drives import write_in_place
from kvdisk.errors import ConfigError, DeviceError

PREFIX = ".kvdisk-bench-"
LEFT_FREE_BYTES = 1 << 30
"""What a file system has free beside the files of a run, or the run does not begin."""
_ABANDONED_S = 60
_PIECE_BYTES = 8 << 20
_NOT_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Scratch:
    """The directory, and an allocated and overwritten file of ``file_bytes`` in it, open as ``fd``.

    ``direct``: transfers bypass the system's memory; False where the file system refused O_DIRECT.
    """

    def __init__(self, path: Path, fd: int, direct: bool, file_bytes: int) -> None:
        self.path = path
        self.file = path / "slots"
        self.fd = fd
        self.direct = direct
        self.file_bytes = file_bytes

    def reopen(self) -> int:
        """Return another descriptor of the file, which is the caller's to close. Raises OSError."""
        return os.open(self.file, os.O_RDWR | (os.O_DIRECT if self.direct else 0))


@contextmanager
def scratch(directory: Path, file_bytes: int, beside_bytes: int, content: memoryview) -> Iterator[Scratch]:
    """Make the directory and the file, and remove both, however the run ends short of ``kill -9``.

    What a killed run left in ``directory`` is removed first. ``beside_bytes``: what others will write beside the
    file. ``file_bytes``: a multiple of 4096. ``content``: aligned bytes that the file is filled with. Raises
    ConfigError where the directory is not writable or has too little free space, and DeviceError where the
    drive fails. Waits for the disk.
    """
    _remove_abandoned(directory)
    needed = file_bytes + beside_bytes
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    if free - needed < LEFT_FREE_BYTES:
        raise ConfigError(
            f"{directory} has {size(free)} free; this run needs {size(needed)} and leaves {size(LEFT_FREE_BYTES)}"
            " free. Give it less with --total, or another directory."
        )
    try:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=directory))
    except OSError as error:
        raise ConfigError(f"cannot write in {directory}: {error.strerror}.") from None
    lock = fd = -1
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            fd, direct = _make_file(path / "slots", file_bytes, content)
        except OSError as error:
            raise DeviceError(error.errno or errno.EIO, "making the file that is measured on") from error
        yield Scratch(path, fd, direct, file_bytes)
    finally:
        if fd >= 0:
            os.close(fd)
        shutil.rmtree(path, ignore_errors=True)
        if lock >= 0:
            os.close(lock)


def _make_file(path: Path, file_bytes: int, content: memoryview) -> tuple[int, bool]:
    """Allocate and overwrite it, as the slots of a store that has been in use are; return it open, and if direct."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        write_in_place(fd)
        os.posix_fallocate(fd, 0, file_bytes)
    finally:
        os.close(fd)
    for direct in (True, False):
        fd = -1
        try:
            fd = os.open(path, os.O_RDWR | (os.O_DIRECT if direct else 0))
            for start in range(0, file_bytes, _PIECE_BYTES):
                _write_all(fd, content[: min(_PIECE_BYTES, file_bytes - start)], start)
            os.fsync(fd)
            return fd, direct
        except BaseException as error:
            if fd >= 0:
                os.close(fd)
            if not direct or not isinstance(error, OSError) or error.errno not in _NOT_DIRECT:
                raise
    raise AssertionError("unreachable")


def _write_all(fd: int, content: memoryview, offset: int) -> None:
    while content.nbytes:
        moved = os.pwrite(fd, content, offset)
        offset += moved
        content = content[moved:]


def _remove_abandoned(directory: Path) -> None:
    """Remove what runs that were killed left: a live one holds its directory's lock."""
    for path in directory.glob(f"{PREFIX}*"):
        with suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                old = time.time() - os.fstat(fd).st_mtime > _ABANDONED_S
                if old:  # a younger one may not have come to its lock yet
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(fd)


class _Held:
    """``depth``: of ``signals_held``; ``number``: of the signal that came, 0: none. Main thread only."""

    depth = 0
    number = 0


_held = _Held()


@contextmanager
def signals_held() -> Iterator[None]:
    """Let a signal end the program only afterwards.

    An exception out of nowhere in the middle of a device's call would lose a batch, which is waited for later.
    """
    _held.depth += 1
    try:
        yield
    finally:
        _held.depth -= 1
        if _held.number and not _held.depth:
            raise SystemExit(128 + _held.number)


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP end the program in order (exit code 128 + signal), so that it cleans up.

    A second signal does not disturb the cleaning up. For the main thread.
    """

    def end(number: int, _: FrameType | None) -> None:
        for one in _SIGNALS:
            signal.signal(one, signal.SIG_IGN)
        _held.number = number
        if not _held.depth:
            raise SystemExit(128 + number)

    _held.number = 0
    before = {number: signal.signal(number, end) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
