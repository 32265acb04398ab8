# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from support.drive_blocks import bytes_for, make_room, open_drive

from kvdisk.store import BlockKind, Rows
from kvdisk.store_face import BlockStoreFace
from kvdisk.testing.memory_blocks import MemoryBlocks
from kvdisk.testing.store_conformance import BlockStoreConformance


class TestMemoryBlocks(BlockStoreConformance):
    def open_store(self, path: Path, kinds: Sequence[BlockKind], memory: Rows, most_blocks: int) -> BlockStoreFace:
        return MemoryBlocks(kinds, memory, most_blocks)


class TestBlockStore(BlockStoreConformance):
    def open_store(self, path: Path, kinds: Sequence[BlockKind], memory: Rows, most_blocks: int) -> BlockStoreFace:
        store = open_drive(path, kinds, memory, bytes_for(kinds, most_blocks))
        make_room(store)
        return store
