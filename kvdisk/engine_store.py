# SPDX-License-Identifier: Apache-2.0
"""The store of one engine, from its directories to its blocks in the catalog. ``open_engine_store``
is the one way in, ``EngineStore.close`` the one way out.

``device.store`` knows who owns which engine store, ``recovery`` makes an index whole, and
``NvmeSpace`` reads it. This module has their order, and what happens where one of them fails.
"""

from __future__ import annotations

import errno
import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvdisk.blocks import in_record_s
from kvdisk.config import Config
from kvdisk.device.cap import HOME_OVERHEAD_BYTES, uses_charge_bytes
from kvdisk.device.control import JointCap
from kvdisk.device.home import Home
from kvdisk.device.listing import latest_like
from kvdisk.device.mounts import is_on_root
from kvdisk.device.store import LEFT_TEXT, Store
from kvdisk.device.uses import read_uses
from kvdisk.errors import ConfigError, CorruptRecord, DeviceError, StoreLocked
from kvdisk.geometry import Geometry
from kvdisk.identity import Named
from kvdisk.index.index_process import CannotStart, Killed
from kvdisk.index.lmdb_index import LmdbIndex, map_bytes_for
from kvdisk.index.record_index import Index
from kvdisk.manager.admission import make_admission
from kvdisk.manager.nvme import NvmeSpace
from kvdisk.manager.parts import Parts
from kvdisk.manager.segments import NvmeLayout
from kvdisk.manager.write_budget import WriteBudget
from kvdisk.messages import GuestSpec
from kvdisk.recovery import open_index, rebuild_index

logger = logging.getLogger("kvdisk")

_CLOSE_TIMEOUT_S = 30.0
_DAY_S = 86_400.0
_MOST_INDEX_BYTES = 1 << 46
"""Half of what a process can address on most machines: the index of some petabytes."""


@dataclass(frozen=True, slots=True)
class EngineStore:
    """An engine store that is open: the store that it is in, the hold on it (``home``), its index,
    and the NVMe tier whose blocks are those of the index."""

    store: Store
    home: Home
    index: LmdbIndex
    nvme: NvmeSpace

    def close(self) -> None:
        """Commit what is queued, note a clean end, and release the engine store. The workers are
        gone already. A failure is a warning: the next start looks at it."""
        committed = False
        try:
            committed = self.index.flush(_CLOSE_TIMEOUT_S)
            self.index.close()
        except (CorruptRecord, DeviceError) as error:
            committed = False
            logger.warning("kvdisk could not close its index cleanly; the next start checks it: %s", error)
            if isinstance(error, DeviceError) and error.errno == errno.ETIMEDOUT:
                # The file system hangs, and writing HOME would hang too. HOME says already that the
                # end was not clean. Whoever takes the engine store over waits for the end of the
                # commit.
                self.home.release()
                return
        try:
            self.home.close(clean=committed)
        except DeviceError as error:
            text = "kvdisk could not close its engine store cleanly; the next start checks it: %s"
            logger.warning(text, error)


def open_engine_store(
    store: Store, parts: Parts, named: Named, *, is_known: bool = True, joint: JointCap | None = None
) -> EngineStore:
    """Take over the fullest engine store of a namespace that nobody owns, or make one; its blocks
    are in the catalog then.

    1. Own a home: its lock, its id, and as much room as the cap says (``Store.acquire_home``).
    2. Wait for the process that had its index open (``Home.await_index``).
    3. Open the index, rebuilt from slot headers where it cannot be trusted, and cut to the cap
       (``open_index``).
    4. Fill the catalog from it (``NvmeSpace.restore``).

    An index that looked sound and cannot be read is rebuilt, once. A home that can never be rebuilt
    is deleted, and one that its drive does not let us rebuild now is left for the next start; then
    another one is taken. ``named``: what HOME shall say; unless ``is_known`` it is a guess, and the
    namespace that was used last with this guess is assumed. ``joint``: what bounds it together
    with others, beside ``nvme_bytes``. Waits for the disk. Raises ConfigError, StoreLocked,
    DeviceError.
    """
    config, geometry = parts.config, parts.geometry
    assert config.nvme_bytes is not None
    layout = nvme_layout_in(config.nvme_bytes, config.segment_bytes, geometry, len(config.store_dirs))
    if joint is not None:
        _check_joint(joint, config.nvme_bytes, layout.first_bytes(geometry) + HOME_OVERHEAD_BYTES)
    described = {**named.description, "geometry": describe_geometry(geometry)}
    fingerprint = None if is_known else latest_like(store, described, config.nvme_bytes)
    left_alone: set[str] = set()
    while True:
        home = store.acquire_home(
            fingerprint or named.fingerprint,
            described,
            config.nvme_bytes,
            index_bytes=layout.index_bytes,
            spread=geometry.hosts > 1,
            except_ids=left_alone,
            joint=joint,
        )
        left_alone.add(home.id)
        try:
            home.await_index()
            return EngineStore(store, home, *_read_or_rebuild(parts, layout, store, home))
        except (CorruptRecord, DeviceError) as error:
            if home.fresh or error.is_of_process:
                _leave(store, home)
                raise
            _give_up(store, home, error)
        except BaseException:
            _leave(store, home)
            raise


def _read_or_rebuild(parts: Parts, layout: NvmeLayout, store: Store, home: Home) -> tuple[LmdbIndex, NvmeSpace]:
    """Open and read the index of an engine store; where that fails, rebuild it and try again.
    Raises CorruptRecord where it can never be rebuilt, DeviceError."""
    try:
        return _read_twice(parts, layout, store, home)
    except (CorruptRecord, DeviceError) as error:
        if home.fresh:
            raise _unreadable(home, error) from error
        if error.is_of_process or isinstance(error, CannotStart | Killed):
            raise
        logger.warning("kvdisk cannot read the index of engine store %s: %s", home.id, error)
    rebuild_index(home, layout.index_bytes, leave_unread=True)
    try:
        return _read_twice(parts, layout, store, home)
    except CorruptRecord as error:
        raise _unreadable(home, error) from error


def _unreadable(home: Home, error: CorruptRecord | DeviceError) -> DeviceError:
    """Return what to raise for an index that cannot be read though it is new: that says nothing of
    the blocks."""
    if isinstance(error, DeviceError):
        return error
    return DeviceError(errno.EIO, f"the new index of engine store {home.id} cannot be read: {error}")


def _read_twice(parts: Parts, layout: NvmeLayout, store: Store, home: Home) -> tuple[LmdbIndex, NvmeSpace]:
    """Open and read the index of an engine store; once more where its process was killed. Raises
    CorruptRecord, DeviceError."""
    try:
        return _read(parts, layout, store, home)
    except Killed as error:
        logger.warning("kvdisk reads the index of engine store %s once more: %s", home.id, error)
    return _read(parts, layout, store, home)


def _read(parts: Parts, layout: NvmeLayout, store: Store, home: Home) -> tuple[LmdbIndex, NvmeSpace]:
    config, geometry = parts.config, parts.geometry
    index = open_index(
        home,
        index_bytes=layout.index_bytes,
        slot_sizes=geometry.slot_sizes,
        segments_bytes=layout.segments_bytes,
        commit_s=config.index_commit_s,
    )
    try:
        nvme = make_nvme(parts, _cut_to_room(layout, store, home, config, geometry), index, home.drive_count)
        nvme.restore(home.id, home.fingerprint, read_uses(home.path), guests_of(home, geometry.rank_count))
        nvme.note_time(in_record_s(time.time()))
    except BaseException:
        index.abandon()
        raise
    return index, nvme


def _leave(store: Store, home: Home) -> None:
    """Release an engine store that could not be opened. One that was made just now has nothing, and
    goes, or each start that fails would leave one more."""
    with suppress(StoreLocked, DeviceError):
        if home.fresh:
            store.discard(home)
    home.close(clean=False)


def _give_up(store: Store, home: Home, error: Exception) -> None:
    """Delete an engine store that can never be rebuilt; leave one alone that cannot be read now.
    Raises StoreLocked, DeviceError."""
    if isinstance(error, CorruptRecord):
        logger.warning("kvdisk gives up engine store %s, which cannot be rebuilt: %s", home.id, error)
        try:
            store.discard(home)
        except BaseException:
            home.close(clean=False)
            raise
        return
    logger.warning(LEFT_TEXT, home.id, error)
    with suppress(DeviceError):
        home.close(clean=False)


def guests_of(home: Home, rank_count: int) -> GuestSpec | None:
    """Return what ranks on other hosts than the home's need; None where it says that all are on its
    host."""
    if not home.is_spread:
        return None
    rank_bytes, mounted = -(-home.cap_bytes // rank_count), not is_on_root(home.path)
    return GuestSpec(home.record.lineage, home.previous_id, rank_bytes, home.record.description, mounted)


# -- sizes -----------------------------------------------------------------------------------------


def nvme_layout_in(nvme_bytes: int, segment_bytes: int, geometry: Geometry, drive_count: int) -> NvmeLayout:
    """Return how an NVMe tier of ``nvme_bytes`` is cut. Raises ConfigError where nothing fits, or
    no process could map the index."""
    budget_bytes = max(0, nvme_bytes - HOME_OVERHEAD_BYTES)
    layout = NvmeLayout.make(budget_bytes, segment_bytes, geometry, map_bytes_for, uses_charge_bytes, drive_count)
    if layout.index_bytes > _MOST_INDEX_BYTES:
        raise ConfigError(f"nvme_bytes {nvme_bytes} is more than drives have: give it what store_dirs has room for.")
    return layout


def _check_joint(joint: JointCap, nvme_bytes: int, least_bytes: int) -> None:
    if joint.nvme_bytes < least_bytes:
        raise ConfigError(
            f"The joint cap {joint.name!r} of {joint.nvme_bytes} bytes has no room for what a store with nvme_bytes "
            f"{nvme_bytes} begins with: make it {least_bytes} or more, or nvme_bytes less."
        )


def make_nvme(parts: Parts, layout: NvmeLayout, index: Index, drive_count: int = 1) -> NvmeSpace:
    """Return an NVMe tier that has read nothing yet. Raises ConfigError."""
    parts.history.reserve(sum(layout.class_slots(parts.geometry, layout.expected_bytes)))
    admission = make_admission(parts.config.nvme_admission, parts.history, "nvme_admission")
    return NvmeSpace(parts, layout, index, admission, drive_count, make_budget(parts.config, parts.geometry))


def make_budget(config: Config, geometry: Geometry) -> WriteBudget | None:
    """Return the budget of written bytes; None where there is none. Raises ConfigError where it
    would never allow a block."""
    bytes_per_day = config.nvme_write_bytes_per_day
    if bytes_per_day is None:
        return None
    largest = max(geometry.slot_sizes) * geometry.shard_count
    if bytes_per_day < 2 * largest:
        raise ConfigError(f"nvme_write_bytes_per_day {bytes_per_day} is less than two blocks of {largest} bytes.")
    return WriteBudget.within(bytes_per_day, _DAY_S, largest)


def _cut_to_room(layout: NvmeLayout, store: Store, home: Home, config: Config, geometry: Geometry) -> NvmeLayout:
    """Return a layout whose segments fit what the drives have room for; say so where that is less
    than the cap. Other hosts' drives count as if they had as much room as those of this one. Raises
    StoreLocked, DeviceError."""
    room_bytes = store.room_bytes(home.id) * geometry.hosts
    if room_bytes >= home.cap_bytes:
        return layout
    logger.warning(
        "kvdisk: nvme_bytes is %s GiB, but store_dirs has room for %s GiB: the NVMe tier uses that, and more when "
        "space is freed.",
        short(home.cap_bytes / (1 << 30)),
        short(room_bytes / (1 << 30)),
    )
    return layout.cut(config.segment_bytes, geometry, home.drive_count, max(0, room_bytes - HOME_OVERHEAD_BYTES))


def describe_geometry(geometry: Geometry) -> dict[str, Any]:
    """Return a geometry as plain values, as HOME keeps it for takeovers and tools."""
    names = ("block_tokens", "payload_bytes", "slot_bytes", "window_tokens")
    groups = [{name: getattr(group, name) for name in names} for group in geometry.groups]
    for said, group in zip(groups, geometry.groups, strict=True):
        if group.chunk_tokens is not None:  # only there: what HOME says must stay equal for a takeover
            said["chunk_tokens"] = group.chunk_tokens
        if group.gpu_blocks > 1:
            said["gpu_blocks"] = group.gpu_blocks
    return {"ranks": geometry.shard_count, "hash_tokens": geometry.hash_tokens, "groups": groups}


def short(value: float) -> str:
    """Return a number with at most two digits behind the point."""
    return f"{value:,.2f}".rstrip("0").rstrip(".")
