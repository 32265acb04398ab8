# SPDX-License-Identifier: Apache-2.0
"""The index of an engine store that is taken over: trusted, or rebuilt from slot headers, and cut
to the cap.

``open_index`` is the one call at a start. ``rebuild_index`` is also what ``kvdisk repair`` does,
``cut_home`` part of what ``kvdisk prune`` does. All wait for the drive.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import time
from collections.abc import Collection, Sequence
from contextlib import suppress

import numpy as np

from kvdisk.blocks import BlockKey, Slot
from kvdisk.device.home import INDEX_FILE, Home
from kvdisk.device.paths import device_errors, fsync, is_directory, remove_anything
from kvdisk.device.rebuild import Blocks, Findings, HomeShape, remove_lost, scan_home
from kvdisk.device.segment import drop_segment, remove_unknown_segments, scan_file, segment_numbers
from kvdisk.errors import CorruptRecord, DeviceError, KvdiskError
from kvdisk.geometry import segment_charge_bytes, slot_offset
from kvdisk.index.base import BlockColumns, IndexState, SegmentRecord
from kvdisk.index.columns import ascending, stored_times
from kvdisk.index.lmdb_index import LmdbIndex, map_bytes_for, write_index

logger = logging.getLogger("kvdisk")

PROGRESS_S = 5.0
_FLUSH_S = 300.0


def open_index(
    home: Home, *, index_bytes: int, slot_sizes: Collection[int], segments_bytes: int, commit_s: float
) -> LmdbIndex:
    """Open the index of an engine store, rebuilt where it cannot be trusted, and cut the engine
    store to its cap.

    ``index_bytes``: the size that the index may grow to. ``segments_bytes``: what segments with
    slots of ``slot_sizes`` may take on all ranks; segments with other slots are dropped. The caller
    has called ``Home.await_index``, and closes the index. Raises CorruptRecord where the index
    cannot be read though it looked sound (the remedy is ``rebuild_index``, and this once more),
    DeviceError, StoreLocked.
    """
    if not home.index_is_sound():
        rebuild_index(home, index_bytes, leave_unread=True)
    index = _open(home, index_bytes, commit_s)
    try:
        records = list(index.segments())
        dropped = excess(records, slot_sizes, segments_bytes, _ranks(home)) if records else []
        too_long = _file_bytes(home) > index_bytes
        if dropped or too_long:
            _cut(home, index, dropped)
        if not too_long:
            return index
        segments, blocks = list(index.segments()), index.block_columns()
    except BaseException:
        index.abandon()
        raise
    index.close()
    home.remove_index()  # LMDB's file never shrinks
    _write_index(home, segments, blocks, index_bytes)
    return LmdbIndex(home.index_path, map_bytes=index_bytes, commit_s=commit_s)


def rebuild_index(home: Home, index_bytes: int, *, leave_unread: bool = False) -> Findings:
    """Make the index of an engine store anew from its slot headers, and return what they said.
    Files of segments that are of no use are removed; of those that cannot be read, too, unless
    ``leave_unread``, which raises DeviceError for one.

    ``index_bytes``: the size that it may grow to; more where the blocks need more. If it is broken
    off at any point it has to be done again, and ``Home.index_is_sound`` says so. Nothing else may
    have the engine store's files open. Raises CorruptRecord where HOME does not say enough,
    DeviceError.
    """
    shape = HomeShape.of(home.fingerprint, home.record.description)
    logger.warning("kvdisk rebuilds the index of engine store %s from the headers of its slots.", home.id)
    home.await_index()
    home.remove_index()
    began_s = said_s = time.monotonic()

    def watch(done: int, total: int) -> None:
        nonlocal said_s
        if time.monotonic() - said_s >= PROGRESS_S:
            said_s = time.monotonic()
            logger.warning("kvdisk rebuilds engine store %s: %d of %d segments read.", home.id, done, total)

    found = scan_home(home.folders, shape, watch, spread=home.is_spread, leave_unread=leave_unread)
    remove_lost(home.folders, list(found.lost))
    segments = list(map(SegmentRecord.of, found.segments))
    blocks = _as_records(found.blocks)
    _write_index(home, segments, blocks, max(index_bytes, map_bytes_for(len(blocks.keys))))
    for (drive, segment), why in found.lost.items():
        logger.warning("kvdisk dropped segment %d on drive %d of engine store %s: %s", segment, drive, home.id, why)
    logger.warning(
        "kvdisk rebuilt the index of engine store %s in %.1f s: %d blocks in %d segments; %d segments dropped.",
        home.id,
        time.monotonic() - began_s,
        len(blocks.keys),
        len(segments),
        len(found.lost),
    )
    return found


def _as_records(found: Blocks) -> BlockColumns:
    """Return blocks that a rebuild found as index records, in the order of an index."""
    found = found[ascending(found["epoch"], found["key"].tolist())]
    keys, parents = found["key"].tolist(), found["parent"].tolist()
    return BlockColumns(
        found["epoch"].copy(),
        keys,
        found["segment"].copy(),
        found["index"].copy(),
        found["generation"].copy(),
        b"".join(parents),
        np.fromiter(map(len, parents), np.int64, len(parents)),
        stored_times(found["epoch"], keys, parents, found["generation"]),
        np.zeros(len(keys), np.uint64),  # no header names a tenant
    )


def cut_home(
    home: Home, keys: Sequence[tuple[int, BlockKey]], segments: Collection[int], erased: Sequence[Slot] = ()
) -> None:
    """Delete blocks, by epoch and key, and whole segments, from an engine store that is held.
    ``erased``: slots that are first overwritten with zeros, so that no rebuild finds them again; a
    crash after that leaves records that no load believes.

    The records go first and are committed, then the files of the segments, and of those that the
    index does not know. What a crash leaves of them goes at the next start. Nothing else may have
    the engine store's files open. Raises CorruptRecord where the index cannot be trusted or read,
    DeviceError.
    """
    home.await_index()
    if not home.index_is_sound():
        raise CorruptRecord(f"the index of engine store {home.id} cannot be trusted")
    map_bytes = max(home.record.index_bytes, map_bytes_for(0) + 2 * _file_bytes(home))
    index = _open(home, map_bytes)
    try:
        records = list(index.segments())
        _erase(home, records, erased)
        _cut(home, index, [record for record in records if record.segment in segments], keys)
    finally:
        index.close()
    for drive in range(home.drive_count):
        known = {record.segment for record in records if record.drive == drive} - set(segments)
        for rank in range(_ranks(home)):
            with suppress(DeviceError):
                remove_unknown_segments(home.folder(drive), rank, known)


def _erase(home: Home, segments: Sequence[SegmentRecord], slots: Sequence[Slot]) -> None:
    """Overwrite slots with zeros on all ranks that have files here, and sync that. Raises
    CorruptRecord, DeviceError."""
    indices: dict[int, list[int]] = {}
    for slot in slots:
        indices.setdefault(slot.segment, []).append(slot.index)
    for record in segments:
        for rank in range(_ranks(home)) if record.segment in indices else ():
            try:
                file = scan_file(home.folder(record.drive), record.segment, rank, os.O_RDWR)
            except DeviceError as error:
                if home.is_spread and error.errno == errno.ENOENT:
                    continue  # it is on another host
                raise
            try:
                with (
                    device_errors(f"erasing slots of segment {record.segment}"),
                    mmap.mmap(-1, record.slot_bytes) as zeros,
                ):
                    for index in sorted(indices[record.segment]):
                        if os.pwrite(file.fd, zeros, slot_offset(record.slot_bytes, index)) != record.slot_bytes:
                            raise OSError(errno.EIO, os.strerror(errno.EIO))
                    fsync(file.fd)
            finally:
                file.close()


def _file_bytes(home: Home) -> int:
    """Return the size of the index's data file. Raises DeviceError."""
    with device_errors(f"looking at the index of engine store {home.id}"):
        return (home.index_path / INDEX_FILE).stat().st_size


def _open(home: Home, map_bytes: int, commit_s: float = 0.05) -> LmdbIndex:
    """Open an index to write. Raises CorruptRecord where it is not sound, DeviceError, StoreLocked.

    An index without segments beside segments has lost them, as after a file system was shut down
    and mounted again in the same boot: they were never synced. An engine drops the record of a
    segment after its files.
    """
    home.adopt_index()
    index = LmdbIndex(home.index_path, map_bytes=map_bytes, commit_s=commit_s)
    try:
        with device_errors(f"looking for the segments of engine store {home.id}"):
            parts = [folder.segments_path for folder in home.folders if folder is not None]
            found = (part / str(number) for part in parts for number in segment_numbers(part))
            if not list(index.segments()) and any(map(is_directory, found)):
                raise CorruptRecord("it knows none of the segments that there are")
    except BaseException:
        index.abandon()
        raise
    return index


def _write_index(home: Home, segments: Sequence[SegmentRecord], blocks: BlockColumns, index_bytes: int) -> None:
    """Make an index of these records, put it into its place and trust it. Raises DeviceError."""
    try:
        write_index(home.new_index_path, segments, blocks, map_bytes=index_bytes)
        home.place_index()
        home.adopt_index()
    except KvdiskError:
        with suppress(OSError):  # on a full drive it would keep the room from others
            remove_anything(home.path, home.new_index_path.name)
        raise


def excess(
    records: Sequence[SegmentRecord], slot_sizes: Collection[int], segments_bytes: int, rank_count: int
) -> list[SegmentRecord]:
    """Return the segments that are of no use, or beyond the cap on all ranks: from each size in
    proportion to what it has, the newest first."""
    dropped = [record for record in records if record.slot_bytes not in slot_sizes]
    kept = {size: sorted(record for record in records if record.slot_bytes == size) for size in slot_sizes}

    def charge(size: int) -> int:
        return sum(segment_charge_bytes(size, record.slot_count) for record in kept[size]) * rank_count

    charges = {size: charge(size) for size in kept}
    before = dict(charges)
    while sum(charges.values()) > segments_bytes:
        # The last one of a size goes after all others: a hit needs blocks of every size.
        size = max(kept, key=lambda size: (len(kept[size]) > 1, charges[size] / max(1, before[size]), size))
        dropped.append(kept[size].pop())
        charges[size] = charge(size)
    return dropped


def _cut(
    home: Home, index: LmdbIndex, dropped: Sequence[SegmentRecord], others: Sequence[tuple[int, BlockKey]] = ()
) -> None:
    """Delete the records of these segments, of their blocks and of ``others``; commit; delete the
    segments' files. Raises as ``cut_home``."""
    gone = {record.segment for record in dropped}
    keys = [*others, *((record.epoch, record.key) for record in index.blocks() if record.slot.segment in gone)]
    index.delete(keys)
    for segment in gone:
        index.delete_segment(segment)
    committed = index.flush(_FLUSH_S)
    if index.poll().state is IndexState.GONE:
        raise CorruptRecord("the index was found to be damaged")
    # On a full drive records may have to wait for the room that the files take. Records of a
    # segment without files do no harm.
    for record in dropped:
        for rank in range(_ranks(home)):
            with suppress(DeviceError):  # without a record it is used no more, and the rank that joins tries again
                drop_segment(home.folder(record.drive), record.segment, rank)
    if not committed and not index.flush(_FLUSH_S):
        raise DeviceError(errno.ENOSPC, "the index cannot be written")


def _ranks(home: Home) -> int:
    return HomeShape.of(home.fingerprint, home.record.description).rank_count
