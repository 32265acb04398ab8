# SPDX-License-Identifier: Apache-2.0
"""Stores of blocks with names and without payloads, made through the real index."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from cli_stores import CAP, Model, add_segment

from kvdisk.blocks import BlockKey, Slot, make_block_key
from kvdisk.device.store import Store
from kvdisk.device.uses import USES_RECORD, write_uses
from kvdisk.index.base import BlockRecord
from kvdisk.index.lmdb_index import LmdbIndex, map_bytes_for


def key(name: str, group: int = 0) -> BlockKey:
    return make_block_key(name.encode().ljust(32, b"."), group)


class Layer:
    """A home in the making: blocks by name, each in the next slot of its group's segment."""

    def __init__(self, path: Path, model: Model, slots: int = 64) -> None:
        self.model = model
        self.home = Store.open(path).acquire_home(model.fingerprint, model.description, CAP)
        self.index = LmdbIndex(self.home.index_path, map_bytes=map_bytes_for(1000))
        self.slots = slots
        self.generation = 0
        self.records: list[BlockRecord] = []
        for group in model.geometry.groups:
            add_segment(self.home, self.index, model, group.group, group.slot_bytes, slots)

    def put(self, name: str, parent: str | None, slot: int, *, group: int = 0, age_s: int = 0, epoch: int = 0) -> None:
        self.generation += 1
        above = None if parent is None else key(parent, group)
        stored_s = int(time.time()) - age_s
        record = BlockRecord(epoch, key(name, group), Slot(group, slot), self.generation, above, stored_s)
        self.records.append(record)

    def put_chain(self, names: str, parent: str | None = None, *, first: int = 0, **how: Any) -> None:
        for at, name in enumerate(names):
            self.put(name, names[at - 1] if at else parent, first + at, **how)

    def write_uses(self, uses: dict[str, int], *, generation_of: dict[str, int] | None = None) -> None:
        found = []
        for record in self.records:
            name = record.key.decode("latin-1")[0]
            if name in uses:
                generation = (generation_of or {}).get(name, record.generation)
                found.append((generation, uses[name], int(time.time()) - 7200 if uses[name] else 0))
        write_uses(self.home.path, np.array(found, USES_RECORD))

    def leave(self) -> str:
        self.index.put(self.records)
        assert self.index.flush(600)
        self.index.close()
        self.home.close(clean=True)
        return self.home.id
