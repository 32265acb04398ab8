# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from support.drive_blocks import bytes_for, make_room, open_drive
from support.shared_rows import make_shared_rows

from kvdisk.mover_process import MoverProcess
from kvdisk.store import BlockKind, Memory, Rows
from kvdisk.store_face import BlockStoreFace
from kvdisk.testing.memory_blocks import MemoryBlocks
from kvdisk.testing.store_conformance import KINDS, ROW_BYTES, ROWS, BlockStoreConformance


class TestMemoryBlocks(BlockStoreConformance):
    def open_store(self, path: Path, kinds: Sequence[BlockKind], memory: Memory, most_blocks: int) -> BlockStoreFace:
        return MemoryBlocks(kinds, memory, most_blocks)


class TestBlockStore(BlockStoreConformance):
    def open_store(self, path: Path, kinds: Sequence[BlockKind], memory: Memory, most_blocks: int) -> BlockStoreFace:
        store = open_drive(path, kinds, memory, bytes_for(KINDS, most_blocks))
        make_room(store)
        return store


@pytest.mark.torture
class TestOverAProcess(TestBlockStore):
    """Its mover in a process of its own, over rows that both map."""

    def make_rows(self, count: int = ROWS, row_bytes: int = ROW_BYTES, apart: int = 321) -> Rows:
        return make_shared_rows(count, row_bytes, apart)

    def open_store(self, path: Path, kinds: Sequence[BlockKind], memory: Memory, most_blocks: int) -> BlockStoreFace:
        store = open_drive(path, kinds, memory, bytes_for(KINDS, most_blocks), start_mover=MoverProcess)
        make_room(store)
        return store
