# SPDX-License-Identifier: Apache-2.0
"""kvdisk's exceptions, and warnings that cannot flood the log.

An operating failure within a transfer is a value (``messages.Reason``), not an exception.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable

WARNING_INTERVAL_S = 60.0
OF_PROCESS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""By which the system says that this process, or the machine, lacks open files or memory."""


class KvdiskError(Exception):
    """The base of every exception that kvdisk raises on purpose.

    ``is_of_process``: True where this process or the machine lacks open files or memory, so that
    the store is not at fault.
    """

    is_of_process = False


class ConfigError(KvdiskError):
    """The configuration, or the model, cannot be served. The text is one sentence for the user."""


class GeometryMismatch(KvdiskError):
    """A file or record was made for other sizes or another namespace than those at hand."""


class StoreLocked(KvdiskError):
    """Another live process owns what was asked for."""


class CorruptRecord(KvdiskError):
    """The bytes of a header, record or control file do not decode."""


class DeviceError(KvdiskError):
    """A system call on the store failed. ``errno`` says how (``errno.EIO`` for a short
    transfer)."""

    def __init__(self, errno_: int, what: str) -> None:
        super().__init__(f"{what}: errno {errno_}")
        self.errno = errno_
        self._what = what
        self.is_of_process = errno_ in OF_PROCESS

    def __reduce__(self) -> tuple[type[DeviceError], tuple[int, str]]:
        return type(self), (self.errno, self._what)


class QuietLog:
    """Warns once per cause and interval, so that nothing floods the log. One thread makes all
    calls."""

    def __init__(self, clock: Callable[[], float], log: logging.Logger) -> None:
        self._clock = clock
        self._log = log
        self._last_s: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def warn(self, cause: str, text: str) -> None:
        """Log ``text``, unless this ``cause`` (one of a closed list) was logged within
        WARNING_INTERVAL_S."""
        now_s = self._clock()
        last_s = self._last_s.get(cause)
        if last_s is not None and now_s - last_s < WARNING_INTERVAL_S:
            self._left_out[cause] = self._left_out.get(cause, 0) + 1
            return
        self._last_s[cause] = now_s
        left_out = self._left_out.pop(cause, 0)
        self._log.warning("kvdisk: %s%s", text, f" ({left_out} more like it before)" if left_out else "")
