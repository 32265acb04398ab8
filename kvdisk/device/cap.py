# SPDX-License-Identifier: Apache-2.0
"""The cap: allocated bytes of all homes together never exceed the caps of the live owners together.

Checked under the store lock when an engine starts and when a segment is made; orphans are deleted when room is needed:
those of other namespaces first, then the oldest use first. An owner keeps within its own cap by itself (its layout),
so room can always be had from orphans, except for what cannot be deleted. The index of a live owner grows without
asking, and is counted at its full size.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvdisk.device import paths
from kvdisk.device.control import INDEX, LOCK_FILE, DriveFolder, HomeRecord, home_ids, read_record
from kvdisk.device.drives import list_folders, remove_folder
from kvdisk.device.segment import SegmentFile, create_segment, drop_segment
from kvdisk.errors import CorruptRecord, DeviceError, StoreLocked
from kvdisk.geometry import segment_charge_bytes, uses_bytes_for
from kvdisk.messages import SegmentSpec

if TYPE_CHECKING:
    from kvdisk.device.store import Store

HOME_OVERHEAD_BYTES = 128 << 10
"""Of a home, beside index and segments: directories, HOME, LMDB's lock file, and so much of USES:"""
USES_OVERHEAD_BYTES = 32 << 10
LOCK_WAIT_S = 2.0
"""How long a worker, or a thread beside an engine, waits for the store lock."""


def uses_charge_bytes(slot_count: int, segment_count: int) -> int:
    """Return what a home's USES, of so many slots in so many segments, can take beyond HOME_OVERHEAD_BYTES."""
    return max(0, uses_bytes_for(slot_count, segment_count) - USES_OVERHEAD_BYTES)


class Holding(NamedTuple):
    """A home while the store is locked. ``record`` is None where HOME or the lock is missing, or HOME does not decode.

    ``live``: it has an owner; else ``lock_fd`` holds its lock exclusively (-1: it has no lock file, so nobody can own
    it). ``charged_bytes``: as allocated, and a live owner's index at its full size.
    """

    id: str
    record: HomeRecord | None
    live: bool
    allocated_bytes: int
    charged_bytes: int
    lock_fd: int


@dataclass(slots=True)
class Stock:
    """All homes of a store while it is locked. ``loose``: folders on further drives that no home names, and bytes."""

    homes: list[Holding]
    loose: list[Path]
    loose_bytes: int

    @property
    def orphans(self) -> list[Holding]:
        """Homes without an owner, oldest use first; what is not complete comes before."""
        return sorted(
            (home for home in self.homes if not home.live),
            key=lambda home: home.record.last_use_s if home.record else -1,
        )

    def orphans_to_delete(self, fingerprint: bytes) -> list[Holding]:
        """``orphans``, those of this namespace after all others."""
        return sorted(self.orphans, key=lambda home: bool(home.record and home.record.fingerprint == fingerprint))

    @property
    def excess_bytes(self) -> int:
        """What is allocated beyond the caps of the live owners; negative: so much may be allocated."""
        caps = sum(home.record.cap_bytes for home in self.homes if home.live and home.record)
        return sum(home.charged_bytes for home in self.homes) + self.loose_bytes - caps


@contextmanager
def stock_of(store: Store, timeout_s: float | None = None) -> Iterator[Stock]:
    """Hold the store lock, and of each orphan the lock, with a stock that was taken meanwhile.

    A process that was stopped may have lost the store lock, and what it has seen is then of two times: it begins anew.
    So does one under whose eyes such a process went on and took a home over. One that is stopped later does no harm:
    what it may delete then is locked, or was nobody's for good. Raises StoreLocked, DeviceError.
    """
    while True:
        with store.locked(timeout_s=timeout_s) as still_holds, ExitStack() as stack:
            stock = _take_stock(store, stack)
            if still_holds() and [home.id for home in stock.homes] == home_ids(store.path):
                yield stock
                return


def _take_stock(store: Store, stack: ExitStack) -> Stock:
    """Measure every home, and lock each orphan until ``stack`` ends. Raises OSError."""
    folders = list_folders(store.drives)  # first: who makes one has made the home before
    homes = []
    for home_id in home_ids(store.path):
        path = store.home_path(home_id)
        lock_fd = -1
        with suppress(FileNotFoundError):  # without a lock file it was never finished: nobody can own it
            lock_fd = paths.open_regular(path / LOCK_FILE, os.O_RDWR)
            if lock_fd >= 0:
                stack.callback(os.close, lock_fd)
        live = lock_fd >= 0 and not paths.try_lock(lock_fd, fcntl.LOCK_EX)
        record = None
        if lock_fd >= 0:
            with suppress(FileNotFoundError, CorruptRecord):
                record = read_record(path)
        allocated = charged = measure(store, home_id, record)
        if live and record is not None:
            charged += max(0, record.index_bytes - paths.allocated_bytes(path / INDEX))
        homes.append(Holding(home_id, record, live, allocated, charged, lock_fd))
    named = {name for home in homes if home.record for name in home.record.drives}
    loose = [path for name, path in folders.items() if name not in named]
    return Stock(homes, loose, sum(_measured(store, DriveFolder(path)) for path in loose))


def measure(store: Store, home_id: str, record: HomeRecord | None) -> int:
    """Return the bytes allocated for a home on the store's drives. Raises OSError, for the first drive only."""
    total = paths.allocated_bytes(store.home_path(home_id))
    if record is not None:
        total += sum(_measured(store, folder) for folder in store.folders(home_id, record)[1:] if folder is not None)
    return total


def _measured(store: Store, folder: DriveFolder) -> int:
    # A drive that fails shall not stop the others: its part counts as it was when it last could be measured.
    with suppress(OSError):
        store.measured[folder.path] = paths.allocated_bytes(folder.path)
    return store.measured.get(folder.path, 0)


def remove_loose(store: Store, stock: Stock) -> None:
    """Remove the folders that no home names, unless a live home's HOME cannot be read: they may be its own."""
    if all(home.record is not None for home in stock.homes if home.live):
        stock.loose = [path for path in stock.loose if not remove_folder(path)]
        stock.loose_bytes = sum(_measured(store, DriveFolder(path)) for path in stock.loose)


def tidy_store(store: Store) -> None:
    """Remove the folders that no home names. Raises StoreLocked, DeviceError."""
    with stock_of(store) as stock:
        remove_loose(store, stock)


def trim(store: Store, stock: Stock, fingerprint: bytes, needed_bytes: int, unused_since_s: float = math.inf) -> bool:
    """Delete orphans until ``needed_bytes`` more fit; return whether they do. The caller holds the store lock.

    Those used after ``unused_since_s`` are spared. What a deletion that was broken off has left goes before them.
    """
    if stock.excess_bytes + needed_bytes > 0:
        remove_loose(store, stock)
    for orphan in stock.orphans_to_delete(fingerprint):
        if stock.excess_bytes + needed_bytes <= 0:
            break
        if orphan.record is not None and orphan.record.last_use_s > unused_since_s:
            continue
        delete(store, stock, orphan)
    return stock.excess_bytes + needed_bytes <= 0


def delete(store: Store, stock: Stock, orphan: Holding) -> None:
    """Delete an orphan. What cannot be deleted still counts, and nobody may take it over."""
    stock.homes.remove(orphan)
    if not store.delete_home(orphan.id, orphan.record):
        stock.homes.append(orphan._replace(record=None))


def trim_store(store: Store, fingerprint: bytes, unused_since_s: float) -> bool:
    """Delete orphans not used since until the sum fits; return whether it does. Raises StoreLocked, DeviceError."""
    with stock_of(store, LOCK_WAIT_S) as stock:
        return trim(store, stock, fingerprint, 0, unused_since_s)


def make_segment(
    store: Store, home_id: str, folder: DriveFolder, spec: SegmentSpec, rank: int, rank_count: int
) -> SegmentFile:
    """Make a rank's file of a segment of a live home, if the cap allows it; the store stays locked meanwhile.

    Raises DeviceError with nothing left behind: ENOSPC where the cap or the drive has no room, EAGAIN where another
    process holds the store lock for long, and as ``create_segment``.
    """
    needed_bytes = segment_charge_bytes(spec.slot_bytes, spec.slot_count)
    what = f"making segment {spec.segment} for rank {rank}"
    try:
        with stock_of(store, LOCK_WAIT_S) as stock:
            mine = next((home for home in stock.homes if home.id == home_id), None)
            if mine is None or mine.record is None:
                raise DeviceError(errno.ENOENT, f"{what}: the home is gone, or its HOME does not decode")
            if mine.charged_bytes + needed_bytes > mine.record.cap_bytes:
                raise DeviceError(errno.ENOSPC, f"{what}: the cap of this engine is reached")
            if not trim(store, stock, mine.record.fingerprint, needed_bytes):
                raise DeviceError(errno.ENOSPC, f"{what}: the caps of all engines of the store are reached")
            file = create_segment(folder, spec, rank, rank_count, mine.record.fingerprint)
            if os.fstat(file.fd).st_blocks * paths.STAT_BLOCK_BYTES > needed_bytes:
                file.close()
                drop_segment(folder, spec.segment, rank)
                raise DeviceError(errno.ENOSPC, f"{what}: the file system needs more for it than it has bytes")
            return file
    except StoreLocked as error:
        raise DeviceError(errno.EAGAIN, f"{what}: {error}") from None
