# SPDX-License-Identifier: Apache-2.0
"""Homes with blocks that could be loaded, and the real scheduler's wing over them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvdisk.assembly import SchedulerHalf, assemble_scheduler
from kvdisk.blocks import BlockKey, Slot, Tier, make_block_key
from kvdisk.config import Config
from kvdisk.device.header import CHECKSUM_KINDS, SlotIdentity, seal_slot
from kvdisk.device.home import Home
from kvdisk.device.segment import create_segment
from kvdisk.device.store import Store
from kvdisk.engine_store import describe_geometry
from kvdisk.geometry import HEADER_BYTES, Geometry, GroupGeometry, Namespace, slot_offset
from kvdisk.identity import Identity
from kvdisk.index.base import BlockRecord, SegmentRecord
from kvdisk.index.lmdb_index import LmdbIndex
from kvdisk.manager.catalog import Catalog
from kvdisk.messages import SegmentSpec

MINE = b"\x3f" * 32
RANKS = 2
GEOMETRY = Geometry((GroupGeometry(0, 16, 4000), GroupGeometry(1, 32, 9000, 1024)), rank_count=RANKS, hash_tokens=16)
DESCRIPTION = {"model": "m", "geometry": describe_geometry(GEOMETRY)}
CAP = 64 << 20
SLOTS = 8


class Row(NamedTuple):
    """A block in the catalog."""

    key: BlockKey
    slot: Slot
    generation: int
    epoch: int
    parent: BlockKey | None


def config(path: Path | Sequence[Path], *, cap_bytes: int = CAP) -> Config:
    directories = [path] if isinstance(path, Path) else list(path)
    return Config.from_mapping({"store_dirs": directories, "nvme_bytes": cap_bytes, "cpu_bytes": 0})


class NoPool:
    """Stands where the engine's block pool would be; nothing here asks it for a block."""

    block_count = 100
    caches = True


def start(path: Path | Sequence[Path], *, cap_bytes: int = CAP) -> SchedulerHalf:
    return assemble_scheduler(
        config(path, cap_bytes=cap_bytes), GEOMETRY, NoPool(), Identity.certain(MINE, DESCRIPTION)
    )  # type: ignore[arg-type]


def rows(parts: SchedulerHalf) -> set[Row]:
    """Return the blocks that the manager knows on NVMe."""
    catalog: Catalog = parts.manager._catalog
    return {
        Row(
            catalog.keys[row],
            Slot(*catalog.slot(row, Tier.NVME)),
            catalog.generations[row],
            catalog.epochs[row],
            catalog.parent(row),
        )
        for row in catalog.rows()
    }


def served(path: Path | Sequence[Path], *, cap_bytes: int = CAP) -> set[Row]:
    """Start on a store, close in order, and return what would have been served."""
    parts = start(path, cap_bytes=cap_bytes)
    found = rows(parts)
    parts.close()
    return found


def key_of(number: int, group: int = 0) -> BlockKey:
    return make_block_key(number.to_bytes(4, "big") * 8, group)


def write_block(
    home: Home, slot: Slot, key: BlockKey, generation: int, *, parent: BlockKey | None = None, epoch: int = 0,
    ranks: Sequence[int] = range(RANKS), drive: int = 0,
) -> None:  # fmt: skip
    """Put a sealed block into a slot of a segment that exists, on these ranks."""
    group = GEOMETRY.groups[int.from_bytes(key[-2:], "big")]
    for rank in ranks:
        memory = mmap.mmap(-1, group.slot_bytes)
        with memoryview(memory) as view:
            view[HEADER_BYTES : HEADER_BYTES + len(key)] = key
            identity = SlotIdentity(Namespace(MINE, epoch), key, generation, group.payload_bytes, rank, RANKS)
            seal_slot(view, identity, parent, CHECKSUM_KINDS[slot.index % 2])  # whoever wrote it
            with file_of(home, slot.segment, rank, drive).open("r+b") as file:
                file.seek(slot_offset(group.slot_bytes, slot.index))
                file.write(view)


def file_of(home: Home, segment: int, rank: int, drive: int = 0) -> Path:
    return home.folder(drive).segments_path / str(segment) / f"rank{rank}.kv"


def make_segment(home: Home, segment: int, group: int = 0, *, drive: int = 0, slots: int = SLOTS) -> SegmentRecord:
    size = GEOMETRY.groups[group].slot_bytes
    for rank in range(RANKS):
        create_segment(home.folder(drive), SegmentSpec(segment, size, slots), rank, RANKS, MINE).close()
    return SegmentRecord(segment, size, slots, drive)


def fill(home: Home, index: LmdbIndex, segments: int = 4, *, drives: int = 1) -> None:
    """Make segments of each group in turn, each with a chain of blocks; the drives take turns."""
    generation = 1_700_000_000_000_000_000
    for segment in range(segments):
        group, drive = segment % 2, segment // 2 % drives
        index.put_segment(make_segment(home, segment, group, drive=drive))
        parent = None
        for slot in range(5):
            generation += 1
            key = key_of(100 * segment + slot, group)
            where = Slot(segment, slot)
            write_block(home, where, key, generation, parent=parent, drive=drive)
            index.put([BlockRecord(0, key, where, generation, parent, 1_700_000_000 + segment)])
            parent = key
    assert index.flush(600)


def make_store(path: Path | Sequence[Path], segments: int = 4, *, clean: bool = True, drives: int = 1) -> set[Row]:
    """Be an engine that fills a home and ends; return the blocks that the next one shall find."""
    parts = start(path)
    assert parts.home is not None and parts.index is not None
    fill(parts.home, parts.index, segments, drives=drives)
    end(parts, clean=clean)
    expected = served(path)
    assert len(expected) == 5 * segments
    if not clean:  # the look made it clean
        end(start(path), clean=False)
    return expected


def make_large_store(path: Path) -> None:
    """Be an engine that ends with a block in each of ten segments, of 31 MiB in all."""
    parts = start(path)
    assert parts.home is not None and parts.index is not None
    for segment in range(10):
        parts.index.put_segment(make_segment(parts.home, segment, slots=200))
        write_block(parts.home, Slot(segment, 0), key_of(segment), 5 + segment)
        parts.index.put([BlockRecord(0, key_of(segment), Slot(segment, 0), 5 + segment)])
    end(parts)


def stamp(path: Path | Sequence[Path], stored_s: Callable[[Slot], int], *, clean: bool = True) -> str:
    """Say when blocks were stored; return the id of the home."""
    parts = start(path)
    assert parts.home is not None and parts.index is not None
    for record in list(parts.index.blocks()):
        parts.index.put([record._replace(stored_s=stored_s(record.slot))])
    assert parts.index.flush(600)
    home_id = parts.home.id
    end(parts, clean=clean)
    return home_id


def end(parts: SchedulerHalf, *, clean: bool = True) -> None:
    """Close; not clean: as after kill -9."""
    assert parts.home is not None and parts.index is not None
    if clean:
        parts.close()
    else:
        for background in parts.backgrounds:  # its threads end with an engine, too
            background.close()
        parts.index.close()
        parts.home.close(clean=False)


def home_path(path: Path) -> Path:
    (home,) = (path / "homes").iterdir()
    return home


def allocated(*paths: Path) -> int:
    total = 0
    for file in [file for path in paths if path.exists() for file in [path, *path.rglob("*")]]:
        with suppress(FileNotFoundError):  # such as FIGURES.tmp, which an engine has just renamed
            total += file.lstat().st_blocks * 512
    return total


def hold(path: Path | Sequence[Path]) -> Home:
    """Own the one home of a store, without looking into its index."""
    store = Store.open(path)
    (name,) = os.listdir(store.path / "homes")
    return store.hold_home(name)
