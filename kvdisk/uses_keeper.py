# SPDX-License-Identifier: Apache-2.0
"""What is known of the uses of a home's blocks, kept from one engine to the next: in its USES file."""

from __future__ import annotations

import time
from pathlib import Path

from kvdisk.device.uses import UsesFile, UsesUnit
from kvdisk.errors import DeviceError
from kvdisk.manager.uses import Uses

WRITE_S = 60.0
"""How often what has changed is written."""


class UsesKeeper:
    """Reads the file when it is made, at start, and writes it when told. Nothing that is wrong with it is an error.

    ``write`` is for one thread at a time; it waits for the disk, and the scheduler's thread does not wait for it.
    """

    def __init__(self, uses: Uses, home_path: Path) -> None:
        self._uses = uses
        self._file = UsesFile(home_path)
        counts = {segment: slot_count for segment, (_, slot_count) in uses.view.places.items()}
        for unit in self._file.recall(counts):
            uses.recall(*unit)

    def write(self) -> None:
        """Write what has changed. Raises DeviceError; it is written the next time then."""
        changed, segments = self._uses.take_changed()
        try:
            is_whole = self._file.write([UsesUnit(*unit) for unit in changed], segments, int(time.time()))
        except DeviceError:
            self._uses.want_all()  # it may have been made anew, and lack the rest
            raise
        if not is_whole:
            self._uses.want_all()
