# SPDX-License-Identifier: Apache-2.0
"""The segment files of one rank as its mover sees them: numbers in, file descriptors out.

All calls wait for the disk; they come one after the other from ``FileJobs``, on its thread or the mover's.
"""

from __future__ import annotations

import errno
import resource
from contextlib import suppress
from typing import Protocol

from kvdisk.device import segment as segments
from kvdisk.device.drives import Directories
from kvdisk.device.home import JoinedHome
from kvdisk.device.store import Store
from kvdisk.errors import DeviceError
from kvdisk.messages import HomeSpec, SegmentSpec

_MOST_FILES = 65536


class SegmentFiles(Protocol):
    """Opens and drops what ``SegmentSpec`` and ``HomeSpec`` name.

    Operating failures are a KvdiskError: DeviceError, GeometryMismatch, CorruptRecord, StoreLocked or
    ConfigError. A call that raises leaves things as they were.
    """

    def open_home(self, spec: HomeSpec) -> None:
        """Join the home, once, before any segment, and remove this rank's files of segments it does not know."""

    def open_segment(self, spec: SegmentSpec) -> int:
        """Make (``spec.create``) or open this rank's file; return its descriptor, which stays this object's.

        -1: there is nothing to open. Where all ranks share a file, the one that writes it makes it and has it open
        from then on; the others open it with a second job. Of another home (``spec.source``) a file is opened to read
        only. To make one waits up to two seconds for the store.
        """

    def drop_segment(self, spec: SegmentSpec) -> None:
        """Close and remove this rank's file (of another home: close); never opened, or gone, is no error."""

    def close(self) -> None:
        """Close all files and leave the home. Idempotent."""


class HomeFiles:
    """``SegmentFiles`` of the home that the scheduler has acquired; ``directories`` None: there is no NVMe tier.

    A directory that this rank cannot open fails only what is to be opened or made on its drive. ``replicated``: the
    ranks share the file of each segment (``Geometry.replicated``).
    """

    def __init__(
        self, directories: Directories | None, rank: int, rank_count: int, *, replicated: bool = False
    ) -> None:
        assert 0 <= rank < rank_count
        self._directories = directories
        self._rank = rank
        self._rank_count = rank_count
        self._replicated = replicated
        self._part, self._part_count = (0, 1) if replicated else (rank, rank_count)
        self._home: JoinedHome | None = None
        self._open: dict[int, segments.SegmentFile] = {}

    def open_home(self, spec: HomeSpec) -> None:
        """See ``SegmentFiles``."""
        assert self._home is None, "a rank joins one home"
        assert self._directories is not None, "a home was named, and there is no NVMe tier"
        _allow_files()
        store = Store.open(self._directories, create=False, need_all=False)
        home = store.join_home(spec.home_id, spec.fingerprint)
        try:
            if self._rank == self._part:
                home.clean_drives(lambda part: segments.remove_unknown_segments(part, self._rank, spec.known_segments))
        except BaseException:
            home.close()
            raise
        self._home = home

    def open_segment(self, spec: SegmentSpec) -> int:
        """See ``SegmentFiles``."""
        writes = self._writes(spec)
        if self._replicated and (not writes if spec.create else spec.segment in self._open):
            return -1
        assert spec.segment not in self._open
        home, mine = self._joined(), (self._part, self._part_count)
        if spec.source is not None:
            folder = home.foreign_folder(spec.source, spec.drive)
            theirs = spec._replace(segment=spec.source.segment)
            file = segments.open_segment(folder, theirs, *mine, home.fingerprint, writable=False)
        elif spec.create:
            file = home.make_segment(spec, *mine)
        else:
            file = segments.open_segment(home.folder(spec.drive), spec, *mine, home.fingerprint, writable=writes)
        self._open[spec.segment] = file
        return file.fd

    def drop_segment(self, spec: SegmentSpec) -> None:
        """See ``SegmentFiles``."""
        home = self._joined()
        file = self._open.pop(spec.segment, None)
        if file is not None:
            file.close()
        if spec.source is None and self._writes(spec):
            segments.drop_segment(home.folder(spec.drive), spec.segment, self._part)

    def close(self) -> None:
        """See ``SegmentFiles``."""
        for file in self._open.values():
            file.close()
        self._open.clear()
        if self._home is not None:
            self._home.close()
            self._home = None

    def _writes(self, spec: SegmentSpec) -> bool:
        return not self._replicated or spec.segment % self._rank_count == self._rank

    def _joined(self) -> JoinedHome:
        if self._home is None:
            raise DeviceError(errno.ENOENT, "the home of this segment is not open")
        return self._home


def _allow_files() -> None:
    """Raise this process's limit of open files, 1024 on many systems: each segment is one as long as the home is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
