# SPDX-License-Identifier: Apache-2.0
"""What homes a store has, as tools see them, and as an engine sees those of its neighbours."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from kvdisk.device import paths
from kvdisk.device.control import (
    INDEX,
    HomeRecord,
    HomeSummary,
    home_ids,
    read_record,
)
from kvdisk.device.drives import Directories
from kvdisk.device.home import Home
from kvdisk.device.home_lock import HomeLock
from kvdisk.device.segment import DriveFolder, scan_folders
from kvdisk.device.store import Store
from kvdisk.errors import CorruptRecord
from kvdisk.identity import GUESS


class HomeOwner(NamedTuple):
    """A home as ``list_owners`` found it. ``alive``: a process of its owner lives."""

    id: str
    path: Path
    record: HomeRecord | None
    alive: bool


def list_owners(directories: Directories, timeout_s: float) -> list[HomeOwner]:
    """Say of every home of a store, by id, whether it has an owner. Writes and measures nothing.

    For those who look again and again. Waits so long for the store lock; raises as ``Store.open``.
    """
    return _list_owners(Store.open(directories, create=False, need_all=False), timeout_s, OSError)


def _list_owners(store: Store, timeout_s: float | None, ignored: type[OSError]) -> list[HomeOwner]:
    with store.locked(readonly=True, timeout_s=timeout_s):
        alive = {home_id: _is_owned(store, home_id) for home_id in home_ids(store.path)}
    owners = []
    for home_id in sorted(alive):
        path, record = store.home_path(home_id), None
        with paths.device_errors(f"reading engine store {home_id}"), suppress(ignored, CorruptRecord):
            record = read_record(path)
        if record is not None or os.path.lexists(path):  # it can be gone by now
            owners.append(HomeOwner(home_id, path, record, alive[home_id]))
    return owners


def list_homes(directories: Directories) -> list[HomeSummary]:
    """Describe every home of a store, by id. Writes nothing.

    ``directories``: the store's first, and those of the others that shall be looked into. Holds the
    store lock while it tries the homes' locks, not while it measures. Raises as ``Store.open``.
    """
    store = Store.open(directories, create=False)
    homes = []
    for home_id, path, record, alive in _list_owners(store, None, FileNotFoundError):
        with paths.device_errors(f"reading engine store {home_id}"):
            allocated_bytes = store.measure(home_id, record)
            folders = store.folders(home_id, record) if record else (DriveFolder(path),)
            segments = scan_folders(folders)
        homes.append(HomeSummary(home_id, path, record, alive, allocated_bytes, segments, folders))
    return homes


def _is_owned(store: Store, home_id: str) -> bool:
    path, record = store.home_path(home_id), None
    lock = HomeLock.look(path, readonly=True)
    try:
        with suppress(OSError, CorruptRecord):
            record = read_record(path)
        return not lock.try_exclusive() or store.is_used(record, lock)
    finally:
        lock.close()


def of_other_namespaces(store: Store, fingerprint: bytes, model: str) -> int:
    """Return how many engine stores are of a model and not of this fingerprint: what they hold is
    of no use here, though it may be of the same prompts. Takes no lock. Raises DeviceError."""
    return sum(
        record.fingerprint != fingerprint and record.description.get("model") == model
        for _, record in _readable_records(store)
    )


def latest_like(store: Store, description: Mapping[str, Any], cap_bytes: int) -> bytes | None:
    """Return the fingerprint of the engine store that was used last of those whose description has
    the same guess and geometry, and whose cap is no larger, so that nothing of it would be cut;
    None where there is none. Takes no lock. Raises DeviceError."""
    wanted = json.loads(json.dumps(dict(description)))
    alike = [
        record
        for _, record in _readable_records(store)
        if not record.guest
        and record.cap_bytes <= cap_bytes
        and all(record.description.get(name) == wanted[name] for name in (GUESS, "geometry"))
    ]
    return max(alike, key=lambda record: record.last_use_s).fingerprint if alike else None


def readable_indexes(store: Store, description: dict[str, Any], mine: Home) -> dict[str, Path]:
    """Return, by id, the directory of the index of each other engine store that an engine of this
    home and geometry may read: where its ranks are spread, those whose ranks are, too.

    Takes no lock: any of them may vanish, and one that cannot be read hides no other. Raises
    DeviceError.
    """
    wanted = json.loads(json.dumps(description))
    found = {}
    for home_id, record in _readable_records(store):
        index_path = store.home_path(home_id) / INDEX
        # An index that was not closed in order is whole only while the machine that wrote it runs.
        is_whole = record.index_sum or record.boot_id == store.boot_id
        with suppress(OSError):
            if (
                home_id != mine.id
                and record.suits(mine.fingerprint, wanted)
                and record.is_spread == mine.is_spread
                and is_whole
                and paths.is_directory(index_path)
            ):
                found[home_id] = index_path
    return found


def _readable_records(store: Store) -> Iterator[tuple[str, HomeRecord]]:
    """Yield the engine stores whose HOME can be read, by id, with what it says."""
    with paths.device_errors(f"looking into the store {store.path}"):
        found = home_ids(store.path)
    for home_id in found:
        with suppress(OSError, CorruptRecord):
            yield home_id, read_record(store.home_path(home_id))
