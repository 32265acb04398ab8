# SPDX-License-Identifier: Apache-2.0
"""The exceptions of kvdisk. Operating failures inside a transfer are values (``messages.Reason``), not exceptions."""

from __future__ import annotations

import errno


class KvdiskError(Exception):
    """Base of every exception that kvdisk raises on purpose."""


class ConfigError(KvdiskError):
    """The configuration, or the model, cannot be served; the text is one sentence for the user."""


class GeometryMismatch(KvdiskError):
    """A file or record was made for other sizes or another namespace than the ones at hand."""


class StoreLocked(KvdiskError):
    """Another live process owns what was asked for."""


class CorruptRecord(KvdiskError):
    """Bytes of a header, record or control file do not decode."""


class DeviceError(KvdiskError):
    """A system call on the store failed; ``errno`` says how (``errno.EIO`` for a short transfer)."""

    def __init__(self, errno_: int, what: str) -> None:
        super().__init__(f"{what}: errno {errno_}")
        self.errno = errno_

    @property
    def is_of_process(self) -> bool:
        """Whether this process, or the machine, lacks open files or memory: that says nothing about the store."""
        return self.errno in {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
