# SPDX-License-Identifier: Apache-2.0
"""Stores of blocks without payloads, made through the real index: many of them, or a few with
names."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from cli_stores import CAP, Model

from kvdisk.assembly import describe_geometry
from kvdisk.blocks import BlockKey, Slot, make_block_key
from kvdisk.device.segment import create_segment
from kvdisk.device.store import Store
from kvdisk.device.uses import USES_RECORD, write_uses
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.index.base import BlockColumns, BlockRecord, SegmentRecord
from kvdisk.index.columns import ascending
from kvdisk.index.lmdb_index import LmdbIndex, map_bytes_for, write_index
from kvdisk.messages import SegmentSpec

MASS_GEOMETRY = Geometry((GroupGeometry(0, 16, 4000),), rank_count=1, hash_tokens=16)
MASS_FINGERPRINT = b"\x6d" * 32
MASS_DESCRIPTION: dict[str, Any] = {"model": "mass/model-1B", "dtype": "torch.bfloat16", "tensor_parallel": 1} | {
    "geometry": describe_geometry(MASS_GEOMETRY)
}
SEGMENT_SLOTS = 4096


class Mass(NamedTuple):
    """What was put into a store: one home."""

    home_id: str
    prompts: int
    conversations: int
    blocks: int


@contextmanager
def sparse_files() -> Iterator[None]:
    """Segment files that take no space: their headers are real, their slots are holes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", lambda fd, at, length: os.ftruncate(fd, at + length))
        yield


def build_mass(
    path: Path, *, prompts: int, prompt_blocks: int, conversations: int, turn_blocks: int, now_s: int, uses: bool = True
) -> Mass:
    """Make a store with ``prompts`` chains, each of them the beginning of ``conversations`` others.

    The n-th prompt's blocks were used n + 1 times, those of conversations never.
    """
    per_prompt = prompt_blocks + conversations * turn_blocks
    count = prompts * per_prompt
    hashes = np.random.default_rng(7).bytes(32 * count)
    keys = [make_block_key(hashes[32 * row : 32 * row + 32], 0) for row in range(count)]
    within = np.arange(count) % per_prompt
    first = np.arange(count) - within
    is_prompt = within < prompt_blocks
    turn = (within - prompt_blocks) % turn_blocks
    parents = np.where(is_prompt | (turn > 0), np.arange(count) - 1, first + prompt_blocks - 1)
    parents[first[within == 0]] = -1
    rows = ascending(np.zeros(count, np.uint64), keys).tolist()
    joined = [keys[parents[row]] if parents[row] >= 0 else BlockKey(b"") for row in rows]
    places = np.array(rows)
    columns = BlockColumns(
        np.zeros(count, np.uint64),
        [keys[row] for row in rows],
        (places // SEGMENT_SLOTS).astype(np.uint32),
        (places % SEGMENT_SLOTS).astype(np.uint32),
        (places + 1).astype(np.uint64),
        b"".join(joined),
        np.array(list(map(len, joined)), np.int64),
        (now_s - 7 - 3600 * (places % 50)).astype(np.uint32),
    )
    segments = -(-count // SEGMENT_SLOTS)
    home = Store.open(path, clock=lambda: now_s).acquire_home(MASS_FINGERPRINT, MASS_DESCRIPTION, 1 << 40)
    records = [
        SegmentRecord(segment, MASS_GEOMETRY.groups[0].slot_bytes, min(SEGMENT_SLOTS, count - segment * SEGMENT_SLOTS))
        for segment in range(segments)
    ]
    with sparse_files():
        for record in records:
            spec = SegmentSpec(record.segment, record.slot_bytes, record.slot_count)
            create_segment(home, spec, 0, 1, MASS_FINGERPRINT).close()
    write_index(home.index_path, records, columns, map_bytes=map_bytes_for(count))
    if uses:
        counts = np.where(is_prompt, np.arange(count) // per_prompt + 1, 0).astype(np.uint32)
        write_all_uses(home.path, counts, np.where(counts, now_s - 30, 0).astype(np.uint32))
    home.close(clean=True)
    return Mass(home.id, prompts, prompts * conversations, count)


def write_all_uses(home_path: Path, counts: Any, last_use_s: Any) -> None:
    """Write USES of blocks with generations from 1 on."""
    records = np.zeros(len(counts), USES_RECORD)
    records["generation"] = np.arange(1, len(counts) + 1)
    records["uses"], records["last_use_s"] = counts, last_use_s
    write_uses(home_path, records)


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
        ranks = model.geometry.rank_count
        with sparse_files():
            for group in model.geometry.groups:
                spec = SegmentSpec(group.group, group.slot_bytes, slots)
                for rank in range(ranks):
                    create_segment(self.home, spec, rank, ranks, model.fingerprint).close()
                self.index.put_segment(SegmentRecord(group.group, group.slot_bytes, slots))

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
