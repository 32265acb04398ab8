# SPDX-License-Identifier: Apache-2.0
"""Being another Unix user for a while, which needs root."""

from __future__ import annotations

import codecs
import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import IO, Any
from unittest import mock

import lmdb

from kvdisk.index import child_main


class _Forked:
    """The process of an index, as a fork: this Python may lie where the other user cannot run
    it."""

    def __init__(self, _: Sequence[str], *, stderr: IO[bytes], pass_fds: Sequence[int], **__: Any) -> None:
        self.pid = os.fork()
        if self.pid:
            return
        code = 1
        try:
            os.setsid()
            os.dup2(stderr.fileno(), 2)
            for fd in map(int, os.listdir("/proc/self/fd")):
                if fd > 2 and fd not in pass_fds:
                    with suppress(OSError):
                        os.close(fd)
            child_main.main(pass_fds[0], os.getppid())
            code = 0
        finally:
            os._exit(code)

    def kill(self) -> None:
        """See ``subprocess.Popen``."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:  # it was killed
        """See ``subprocess.Popen``."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@cache
def _open_lmdb_once() -> None:
    """Let LMDB import what it imports when it opens its first file: the other user may not read
    where that lies."""
    with tempfile.TemporaryDirectory() as folder:
        lmdb.open(folder).close()


@contextmanager
def user(uid: int, *groups: int, gid: int | None = None) -> Iterator[None]:
    """Be another user, also in ``groups``. ``gid``: the first group; None: as ``uid``."""
    codecs.lookup("ascii")  # one that could not be read is never looked for again, and this user may not read it
    _open_lmdb_once()
    before = os.getgroups()
    os.setgroups(groups)
    os.setegid(uid if gid is None else gid)
    os.seteuid(uid)
    try:
        with mock.patch("kvdisk.child.subprocess.Popen", _Forked):
            yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(before)
