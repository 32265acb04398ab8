# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

from support.index_conformance import IndexConformance

from kvdisk.index.lmdb_index import LmdbIndex
from kvdisk.index.memory_index import MemoryIndex
from kvdisk.index.record_index import Index

MAP_BYTES = 32 << 20
ONLY_WHEN_TOLD_S = 3600.0


class TestMemoryIndex(IndexConformance):
    def open_index(self, path: Path, max_queued: int) -> Index:
        return MemoryIndex(max_queued=max_queued)

    def reopen_index(self, index: Index, path: Path) -> Index:
        assert isinstance(index, MemoryIndex)
        index.close()
        return index.reopened()


class TestLmdbIndex(IndexConformance):
    def open_index(self, path: Path, max_queued: int) -> Index:
        return LmdbIndex(path / "index", map_bytes=MAP_BYTES, commit_s=ONLY_WHEN_TOLD_S, max_queued=max_queued)

    def reopen_index(self, index: Index, path: Path) -> Index:
        index.close()
        return self.open_index(path, 100_000)
