# SPDX-License-Identifier: Apache-2.0
"""Which other homes of a store an engine may read from. Takes no lock, and looks only into what has changed."""

from __future__ import annotations

import json
import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from kvdisk.device.control import HOME_FILE, HOMES, INDEX, HomeRecord, home_ids, read_record
from kvdisk.errors import CorruptRecord

_TICK_NS = 100_000_000


class ReadableHome(NamedTuple):
    """Another engine's home, or an orphan. ``index_path``: its LMDB environment, to be opened read-only.

    ``stamp`` changes when the index at that path becomes another one; the id when the home's owner does.
    """

    id: str
    index_path: Path
    stamp: tuple[int, ...]


class Neighbours:
    """The homes of the store in ``store_path``, as they were when last looked at. One thread calls everything."""

    def __init__(self, store_path: Path, boot_id: str) -> None:
        self._store_path = store_path
        self._homes = str(store_path / HOMES)  # paths as text: this is asked for often
        self._boot_id = boot_id
        self._listed_at: tuple[int, int] | None = None
        self._ids: list[str] = []
        self._records: dict[str, tuple[tuple[int, int], HomeRecord | None]] = {}
        self._geometry: tuple[object, object] = (None, None)

    def readable(self, fingerprint: bytes, description: dict[str, Any], except_id: str) -> list[ReadableHome]:
        """See ``Store.readable_homes``. Raises OSError."""
        if self._geometry[0] is not description:
            self._geometry = (description, json.loads(json.dumps(description)))
        wanted = self._geometry[1]
        assert isinstance(wanted, dict)
        self._list()
        found = []
        for home_id in self._ids:
            record = self._record(home_id) if home_id != except_id else None
            # An index that was not closed in order is whole only while the machine that wrote it runs.
            if record and record.suits(fingerprint, wanted) and (record.index_sum or record.boot_id == self._boot_id):
                index_path = f"{self._homes}/{home_id}/{INDEX}"
                with suppress(FileNotFoundError, NotADirectoryError):
                    status = os.lstat(index_path)
                    if not stat.S_ISDIR(status.st_mode):
                        continue
                    found.append(ReadableHome(home_id, Path(index_path), (status.st_ino, status.st_mtime_ns)))
        return found

    def _list(self) -> None:
        try:
            status = os.lstat(self._homes)
        except FileNotFoundError:
            self._ids, self._listed_at = [], None
            return
        if self._listed_at != (status.st_ino, status.st_mtime_ns):
            self._ids = home_ids(self._store_path)
            # A second change within a tick of the file system's clock would not show.
            settled = abs(time.time_ns() - status.st_mtime_ns) > _TICK_NS
            self._listed_at = (status.st_ino, status.st_mtime_ns) if settled else None
            self._records = {home_id: found for home_id, found in self._records.items() if home_id in self._ids}

    def _record(self, home_id: str) -> HomeRecord | None:
        path = f"{self._homes}/{home_id}"
        try:
            status = os.lstat(f"{path}/{HOME_FILE}")
        except (FileNotFoundError, NotADirectoryError):
            return None
        at = (status.st_ino, status.st_mtime_ns)
        known = self._records.get(home_id)
        if known is None or known[0] != at:
            record = None
            try:
                record = read_record(Path(path))
            except CorruptRecord:
                pass
            except OSError:
                return None  # one home that cannot be read now shall not hide the others
            known = self._records[home_id] = (at, record)
        return known[1]
