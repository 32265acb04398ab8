# SPDX-License-Identifier: Apache-2.0
"""Being another Unix user for a while, which needs root."""

from __future__ import annotations

import codecs
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any
from unittest import mock

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
            child_main.main(pass_fds[0])
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


@contextmanager
def user(uid: int, *groups: int, gid: int | None = None) -> Iterator[None]:
    """Be another user, also in ``groups``. ``gid``: the first group; None: as ``uid``."""
    codecs.lookup("ascii")  # one that could not be read is never looked for again, and this user may not read it
    before = os.getgroups()
    os.setgroups(groups)
    os.setegid(uid if gid is None else gid)
    os.seteuid(uid)
    try:
        with mock.patch("kvdisk.index.child.subprocess.Popen", _Forked):
            yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(before)
