# SPDX-License-Identifier: Apache-2.0
"""What must be so of a quiet live engine, and of its home on the drive: every block, slot and file
accounted for.

Reads the insides of manager and catalog, and changes nothing. Everything fails by assertion.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvdisk.blocks import Tier, group_of
from kvdisk.device.cap import HOME_OVERHEAD_BYTES
from kvdisk.device.header import read_header
from kvdisk.device.paths import allocated_bytes
from kvdisk.geometry import FILE_EPOCH, HEADER_BYTES, Namespace, segment_file_bytes, slot_offset
from kvdisk.index.base import BlockRecord, SegmentRecord
from kvdisk.worker.arena import Arena
from support.live_engine import STUCK_S, LiveEngine
from support.live_model import LiveModel
from support.pool_check import check_pool

SHORT_FLUSH_S = 0.5


def audit(
    engine: LiveEngine,
    *,
    records_hold: bool = True,
    files_hold: bool = True,
    segments_paths: Sequence[Path] | None = None,
) -> int:
    """Assert all that must hold of a quiet engine without requests; return how many blocks its
    index has.

    ``records_hold``: every committed record's slot holds its block, which is so unless the drive
    lost something. ``files_hold``: nobody but kvdisk has changed the files and the index; otherwise
    -1 is returned where the index does not come to an end. ``segments_paths``: where the segments
    of each part lie; None: all in the home.
    """
    assert not engine.requests, engine.describe()
    index, home = engine.parts.index, engine.parts.home
    end_s = time.monotonic() + STUCK_S
    pending = True
    while pending:  # a step takes note of the last commit, and may find work that it allows
        if index is not None and not index.flush(STUCK_S if files_hold else SHORT_FLUSH_S):
            assert not files_hold, "the index does not come to an end"
            return -1
        engine.step()
        pending = engine.manager.has_pending_work(engine.now)
        assert not pending or time.monotonic() < end_s, f"stuck: {engine.describe()}"
    _audit_pool(engine)
    audit_manager(engine.manager)
    if index is None or home is None:
        return 0
    records, segments = list(index.blocks()), list(index.segments())
    paths = segments_paths or [home.segments_path] * engine.model.geometry.shard_count
    if files_hold:
        audit_files(paths, segments)
    audit_records(paths, segments, records, engine.model, records_hold=records_hold)
    assert allocated_bytes(home.path) <= home.cap_bytes - HOME_OVERHEAD_BYTES
    return len(records)


def _audit_pool(engine: LiveEngine) -> None:
    held = [block for block in range(1, engine.pool.block_count) if engine.pool.get_block(block).ref_cnt]
    assert not held, f"GPU blocks are held that nobody uses: {held}"


def audit_manager(manager: Any) -> None:
    """Assert what must hold of a manager without requests, with nothing under way."""
    assert not manager._requests and not manager._urgent and not manager._void
    assert len(manager._transfers) == 0, "jobs are on their way"
    assert not manager._loads.gpu_loads.any
    assert not manager._loads._under_way and not manager.unplanned_loads and not manager._loads._by_job
    assert not len(manager._stores.sources), "blocks are watched that nobody copies from"
    for space in manager._tiers:
        check_pool(space.pool)
        pinned = [row for row in manager._catalog.rows() if manager._catalog.pins(row, space.tier)]
        assert not pinned, f"copies stay pinned in {space.tier.name}"


def audit_memory(engine: LiveEngine, rank: int, arenas: Mapping[Tier, Arena]) -> None:
    """Assert that the slots of a rank's tiers in memory hold their blocks. After ``audit``."""
    catalog, model = engine.manager._catalog, engine.model
    for tier, arena in arenas.items():
        for row in catalog.rows_in(tier):
            key, slot = catalog.keys[row], catalog.slot(row, tier)
            group = model.geometry.groups[group_of(key)]
            view = arena.view(model.geometry.size_classes[group.group], slot.index)
            payload = view[HEADER_BYTES : HEADER_BYTES + group.payload_bytes]
            expected = model.content_of(engine.weights, key, rank)
            assert payload == expected, f"slot {slot.index} of rank {rank} in {tier.name} holds wrong bytes"


def audit_files(segments_paths: Sequence[Path], segments: list[SegmentRecord]) -> None:
    """Assert that the files of a home are those of its segments, one for each part, as long as they
    must be, and where they must be."""
    expected = {
        path / str(record.segment) / f"rank{rank}.kv": segment_file_bytes(record.slot_bytes, record.slot_count)
        for record in segments
        for rank, path in enumerate(segments_paths)
    }
    files = [path for place in set(segments_paths) for path in place.rglob("*") if not path.is_dir()]
    found = {file: file.stat().st_size for file in files}
    assert found == expected, (
        f"on the drive only: {found.items() - expected.items()}, missing: {expected.keys() - found.keys()}"
    )


def audit_records(
    segments_paths: Sequence[Path],
    segments: list[SegmentRecord],
    records: list[BlockRecord],
    model: LiveModel,
    *,
    records_hold: bool = True,
) -> None:
    """Assert that records point into segments, no two of them to one slot, and that the slots hold
    what they say."""
    by_number = {record.segment: record for record in segments}
    assert len({record.slot for record in records}) == len(records), "two records share a slot"
    for record in records:
        segment = by_number.get(record.slot.segment)
        assert segment is not None, f"{record} points into no segment"
        assert record.slot.index < segment.slot_count, f"{record} points behind its segment"
        if records_hold:
            for rank, path in enumerate(segments_paths):
                _audit_slot(path, segment, record, model, rank)


def _audit_slot(path: Path, segment: SegmentRecord, record: BlockRecord, model: LiveModel, rank: int) -> None:
    with (path / str(segment.segment) / f"rank{rank}.kv").open("rb") as file:
        file.seek(slot_offset(segment.slot_bytes, record.slot.index))
        slot = memoryview(file.read(segment.slot_bytes))
    found, namespace = read_header(slot).identity, Namespace(model.fingerprint, record.epoch)
    named = (namespace, record.key, record.generation, found.payload_bytes, rank, model.geometry.shard_count)
    assert found == named, f"{record} names another block's slot"
    # An epoch is the number of its weights, and that of the files is 0.
    content = model.content_of(record.epoch, record.key, rank)
    payload = slot[HEADER_BYTES : HEADER_BYTES + found.payload_bytes]
    assert payload == content, f"{record}: the slot of rank {rank} holds wrong bytes"


assert FILE_EPOCH == 0, "the weights' number 0 is the files' epoch"
