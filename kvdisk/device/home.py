# SPDX-License-Identifier: Apache-2.0
"""Holds on one home: its owner's, and those of the owner's ranks. ``store`` hands them out."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvdisk.device import paths
from kvdisk.device.control import HomePaths, HomeRecord, write_record

if TYPE_CHECKING:
    from kvdisk.device.store import Store


class JoinedHome(HomePaths):
    """A rank's hold on its engine's home, from ``Store.join_home`` until ``close``."""

    def __init__(self, path: Path, fingerprint: bytes, lock_fd: int) -> None:
        self.id = path.name
        self.path = path
        self.fingerprint = fingerprint
        self._lock_fd = lock_fd

    def close(self) -> None:
        """Release the home. The caller closed its segment files before. Idempotent."""
        self._lock_fd = paths.unlock(self._lock_fd)


class Home(HomePaths):
    """The owner's hold on a home, from ``Store.acquire_home`` until ``close``. One thread calls everything.

    ``fresh``: made new, so that index and segments are empty. ``budget_bytes``: what all files of the home may
    come to; a home that was taken over under a smaller cap can be above it, and its owner then drops segments
    first. All calls wait for the disk: none belongs into a scheduler's step.
    """

    def __init__(
        self, store: Store, home_id: str, record: HomeRecord, *, lock_fd: int, kept_bytes: int, fresh: bool
    ) -> None:
        self.id = home_id
        self.path = store.home_path(home_id)
        self.fingerprint = record.fingerprint
        self.cap_bytes = record.cap_bytes
        self.budget_bytes = max(0, self.cap_bytes - kept_bytes)
        self.fresh = fresh
        self._store = store
        self._record = record
        self._lock_fd = lock_fd

    def allocated_bytes(self) -> int:
        """Return the bytes that the file system holds for this home, index and segments together."""
        with paths.device_errors(f"measuring home {self.id}"):
            return paths.allocated_bytes(self.path)

    def foreign_bytes(self) -> int:
        """Return the allocated bytes of all orphans in the store. Raises StoreLocked, DeviceError."""
        with self._store.locked(), ExitStack() as stack:
            return sum(orphan.allocated_bytes for orphan in self._store.find_orphans(stack))

    def make_room(self, bytes_needed: int) -> int:
        """Delete orphans, oldest use first, until the rest, this home and ``bytes_needed`` fit into the cap.

        Sets ``budget_bytes`` anew, and returns the bytes that this home may allocate beyond what it has
        (0 or more). Raises StoreLocked, DeviceError.
        """
        with self._store.locked(), ExitStack() as stack:
            mine_bytes = paths.allocated_bytes(self.path)
            orphans = self._store.find_orphans(stack)
            kept_bytes = self._store.delete_oldest(orphans, self.cap_bytes - mine_bytes - bytes_needed)
        self.budget_bytes = max(0, self.cap_bytes - kept_bytes)
        return max(0, self.budget_bytes - mine_bytes)

    def mark_used(self) -> None:
        """Note in HOME that the home is used now. Raises DeviceError."""
        assert self._lock_fd >= 0, "the home is closed"
        self._write(replace(self._record, last_use_s=self._store.now_s()), durable=False)

    def discard(self) -> None:
        """Release and delete a home that cannot be read. No rank has joined. Raises StoreLocked, DeviceError."""
        with self._store.locked():
            self._store.delete_home(self.id)
            self._lock_fd = paths.unlock(self._lock_fd)

    def close(self, clean: bool) -> None:
        """Release the home. The owner's index and segment files are closed, its ranks have left. Idempotent.

        With ``clean`` all files are synced and HOME says afterwards that they can be trusted whatever happens to
        the machine; False is for an owner that could not commit. Raises DeviceError; the home is released then, too.
        """
        if self._lock_fd < 0:
            return
        try:
            with paths.device_errors(f"closing home {self.id}"):
                if clean:
                    paths.sync_tree(self.path)
            self._write(replace(self._record, last_use_s=self._store.now_s(), clean=clean), durable=True)
        finally:
            self._lock_fd = paths.unlock(self._lock_fd)

    def _write(self, record: HomeRecord, *, durable: bool) -> None:
        with paths.device_errors(f"writing HOME of {self.id}"):
            write_record(self.path, record, durable=durable)
        self._record = record
