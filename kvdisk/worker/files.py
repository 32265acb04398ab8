# SPDX-License-Identifier: Apache-2.0
"""The segment files of one rank as its mover sees them: numbers in, file descriptors out.

All calls wait for the disk; they come one after the other from ``FileJobs``, on its thread or the mover's.
"""

from __future__ import annotations

import errno
import os
from typing import Protocol

from kvdisk.device import segment as segments
from kvdisk.device.home import JoinedHome
from kvdisk.device.store import Store
from kvdisk.errors import DeviceError
from kvdisk.messages import HomeSpec, SegmentSpec


class SegmentFiles(Protocol):
    """Opens and drops what ``SegmentSpec`` and ``HomeSpec`` name.

    Operating failures are a KvdiskError: DeviceError, GeometryMismatch, CorruptRecord, StoreLocked or
    ConfigError. A call that raises leaves things as they were.
    """

    def open_home(self, spec: HomeSpec) -> None:
        """Join the home, once, before any segment, and remove this rank's files of segments it does not know."""

    def open_segment(self, spec: SegmentSpec) -> int:
        """Make (``spec.create``) or open this rank's file; return its descriptor, which stays this object's."""

    def drop_segment(self, spec: SegmentSpec) -> None:
        """Close and remove this rank's file; what was never opened or is gone is no error."""

    def close(self) -> None:
        """Close all files and leave the home. Idempotent."""


class HomeFiles:
    """``SegmentFiles`` of the home that the scheduler has acquired in ``store_dir``; None: there is no NVMe tier."""

    def __init__(self, store_dir: str | os.PathLike[str] | None, rank: int, rank_count: int) -> None:
        assert 0 <= rank < rank_count
        self._store_dir = store_dir
        self._rank = rank
        self._rank_count = rank_count
        self._home: JoinedHome | None = None
        self._open: dict[int, segments.SegmentFile] = {}

    def open_home(self, spec: HomeSpec) -> None:
        """See ``SegmentFiles``."""
        assert self._home is None, "a rank joins one home"
        assert self._store_dir is not None, "a home was named, and there is no NVMe tier"
        home = Store.open(self._store_dir, create=False).join_home(spec.home_id, spec.fingerprint)
        try:
            segments.remove_unknown_segments(home, self._rank, spec.known_segments)
        except BaseException:
            home.close()
            raise
        self._home = home

    def open_segment(self, spec: SegmentSpec) -> int:
        """See ``SegmentFiles``."""
        assert spec.segment not in self._open
        home = self._joined(spec)
        make = segments.create_segment if spec.create else segments.open_segment
        file = make(home, spec, self._rank, self._rank_count, home.fingerprint)
        self._open[spec.segment] = file
        return file.fd

    def drop_segment(self, spec: SegmentSpec) -> None:
        """See ``SegmentFiles``."""
        home = self._joined(spec)
        file = self._open.pop(spec.segment, None)
        if file is not None:
            file.close()
        segments.drop_segment(home, spec.segment, self._rank)

    def close(self) -> None:
        """See ``SegmentFiles``."""
        for file in self._open.values():
            file.close()
        self._open.clear()
        if self._home is not None:
            self._home.close()
            self._home = None

    def _joined(self, spec: SegmentSpec) -> JoinedHome:
        assert spec.drive == 0, "one store directory, one drive"
        if self._home is None:
            raise DeviceError(errno.ENOENT, "the home of this segment is not open")
        return self._home
