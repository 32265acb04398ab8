# SPDX-License-Identifier: Apache-2.0
"""Watches whether the files that an engine has open are still at their paths.

A process reads and writes on in a file that was removed. The file's bytes stay taken, and nobody
finds it again, the next start included.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvdisk.device.home import INDEX_FILE, Home, Place
from kvdisk.device.paths import is_directory
from kvdisk.device.segment import DriveFolder, segment_path
from kvdisk.messages import SegmentSpec

_Identity = tuple[int, int]


class HomeWatch:
    """Compares the files of this engine's own store with what they were. One thread makes all
    calls; they wait for the drive.

    ``parts``: the files of each segment, one for each rank.
    """

    def __init__(self, home: Home, parts: int) -> None:
        self._home = home
        self._parts = parts
        self._index = _identity(home.index_path / INDEX_FILE)
        self._seen: dict[tuple[int, int], _Identity | None] = {}
        """What was found first at each segment and rank."""

    def index_is_there(self) -> bool:
        """Return whether the index's file is the one that was opened."""
        return self._home.place() is Place.THERE and _identity(self._home.index_path / INDEX_FILE) == self._index

    def lost_segments(self, segments: Mapping[int, SegmentSpec]) -> frozenset[int]:
        """Return the segments that lack the file of some rank, or have another in its place. A
        drive that does not answer, or is not there, counts as if all files were there."""
        self._seen = {key: found for key, found in self._seen.items() if key[0] in segments}
        return frozenset(number for number, spec in segments.items() if self._is_lost(spec))

    def _is_lost(self, spec: SegmentSpec) -> bool:
        folder = self._home.folders[spec.drive]
        if folder is None:
            return False
        if spec.drive == 0:  # by the directory that is open, which may have been moved with all that is in it
            folder = DriveFolder(self._home.open_path)
        for rank in range(self._parts):
            try:
                found = _identity(segment_path(folder, spec.segment, rank))
            except OSError:
                return False
            if found is None and self._home.is_spread and (spec.segment, rank) not in self._seen:
                continue  # it is on another host
            if found is None and spec.drive > 0 and not is_directory(folder.segments_path):
                return False  # a drive that was taken away has all that it had
            if found is None or self._seen.setdefault((spec.segment, rank), found) != found:
                return True
        return False


def _identity(path: Path) -> _Identity | None:
    """Return what distinguishes a file from any other; None where there is none. Raises OSError."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino
