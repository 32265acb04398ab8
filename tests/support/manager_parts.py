# SPDX-License-Identifier: Apache-2.0
"""A ``TierManager`` with what it stands on, put together for a fake engine, with two rooms that
watch themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvdisk.blocks import BlockKey, Slot, Tier, group_of
from kvdisk.config import Config
from kvdisk.geometry import Geometry, segment_charge_bytes
from kvdisk.index.memory_index import MemoryIndex
from kvdisk.manager.admission import make_admission
from kvdisk.manager.catalog import Catalog, CopyState, TierChoice
from kvdisk.manager.dirty import Dirty
from kvdisk.manager.jobs import Transfers
from kvdisk.manager.manager import TierManager
from kvdisk.manager.nvme import NvmeSpace
from kvdisk.manager.parts import Parts
from kvdisk.manager.segments import NvmeLayout
from kvdisk.manager.store_policy import make_store_policy
from kvdisk.manager.tiers import MemorySpace, Tiers
from kvdisk.manager.write_budget import WriteBudget
from kvdisk.messages import FOREIGN_SEGMENTS, SegmentSpec
from support.fake_engine import FakeEngine
from support.fake_neighbours import FakeNeighbours
from support.fake_remote import FakeRemote
from support.watched_policy import WatchedPolicy

FINGERPRINT = b"f" * 32
HOME_ID = "0" * 32
DAY_S = 240.0
"""A day of the budget of written bytes: short, so that it is spent and comes back."""


def two_tiers(**changes: object) -> Config:
    """Return a configuration with both tiers, whose order is that of last use, but for ``changes``;
    how large they are says ``Sizes``."""
    values = {"store_dirs": (Path("/nowhere"),), "nvme_bytes": 1, "cpu_bytes": 1, "eviction": "lru"}
    return Config(**(values | changes))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Sizes:
    """What a manager is built with. ``cpu_slots``, ``segment_slots`` and ``segments`` by size
    class.

    ``segments``: on all ``drives`` together. ``zeroes``: the engine overwrites new blocks before
    urgent copies can begin, as some of vLLM's runners do. ``stored``: so many of the prompts lie on
    NVMe at the start. ``load_tiers``: what requests may load from, in turn; None: all tiers.
    """

    geometry: Geometry
    config: Config
    block_count: int
    cpu_slots: tuple[int, ...]
    segment_slots: tuple[int, ...]
    segments: int
    prompts: tuple[str, ...]
    most_outputs: int = 3
    drives: int = 1
    zeroes: bool = False
    most_running: int = 2**31
    stored: int = 0
    load_tiers: tuple[TierChoice, ...] = (None,)

    @property
    def largest_bytes(self) -> int:
        return max(self.geometry.slot_sizes) * self.geometry.rank_count

    def slot_bytes_of(self, key: BlockKey) -> int:
        return self.geometry.groups[group_of(key)].slot_bytes

    @property
    def has_nvme(self) -> bool:
        return bool(self.segment_slots)

    @property
    def has_cpu(self) -> bool:
        return bool(self.cpu_slots)


def is_neighbours(slot: Slot | None) -> bool:
    return slot is not None and slot.segment >= FOREIGN_SEGMENTS


def ready_copies(catalog: Catalog, tier: Tier) -> dict[tuple[int, BlockKey], BlockKey | None]:
    """Return the parent of each block with a copy in a tier, by epoch and key, but for dropped
    copies, and what a reset has left in memory: that leaves in any order."""
    return {
        (catalog.epochs[row], catalog.keys[row]): catalog.parent(row)
        for row in catalog.kept_in(tier)
        if (tier is Tier.NVME or catalog.find(catalog.keys[row]) == row)
    }


def check_tails_first(before: dict[tuple[int, BlockKey], BlockKey | None], catalog: Catalog, tier: Tier) -> None:
    """Assert that of the copies that left a tier since ``before``, for room, none has left another
    behind it."""
    after = ready_copies(catalog, tier)
    for epoch, key in before.keys() & after.keys():
        parent = before[epoch, key]
        left = parent is not None and (epoch, parent) in before and (epoch, parent) not in after
        assert not left, f"{parent!r} left the {tier.name} tier before {key!r}, which follows it"


class WatchedNvmeSpace(NvmeSpace):
    """``NvmeSpace`` that fails where the head of a chain leaves it before its tail. ``came_back``:
    how many segments did that were away."""

    came_back = 0

    def _enter(self, spec: SegmentSpec, used: NDArray[np.uint32] | None = None) -> None:
        self.came_back += spec.segment in self.segments.away
        super()._enter(spec, used)

    def make_room(self, now: float, wanted: Sequence[int]) -> None:
        before = ready_copies(self._catalog, Tier.NVME)
        super().make_room(now, wanted)
        check_tails_first(before, self._catalog, Tier.NVME)


class WatchedCpuSpace(MemorySpace):
    """``MemorySpace`` that fails where a copy leaves it that the NVMe tier wants and has not got.

    Nor may the head of a chain leave before its tail.

    ``wanted(key)``: whether the NVMe tier's admission must let a block in. ``ended_forgotten``: how
    often copies ended that a reset has left.
    """

    wanted: Callable[[BlockKey], bool]
    ended_forgotten = 0

    def end(self, rows: Sequence[int]) -> None:
        epochs, now = self._catalog.epochs, self._step_state.epoch
        self.ended_forgotten += any(epochs[row] != now for row in rows)
        super().end(rows)

    def allocate(self, size_class: int, count: int, *, keep_dirty: bool = False) -> list[Slot]:
        catalog = self._catalog
        only_here = [
            (row, catalog.keys[row])
            for row in catalog.rows_in(Tier.CPU)
            if catalog.state(row, Tier.CPU) == CopyState.READY
            and catalog.state(row, Tier.NVME) == CopyState.ABSENT
            and not catalog.columns(Tier.CPU).is_of_no_age(row)  # nobody would be served
            and catalog.find(catalog.keys[row]) == row  # nor from what a reset has left
            and self._geometry.size_classes[group_of(catalog.keys[row])] == size_class
        ]
        before = ready_copies(catalog, Tier.CPU)
        dirty = self.dirty
        waiting = [] if dirty is None else list(dirty.walk(size_class))
        short = count - self.pool.free[size_class]
        useless = set() if dirty is None else {row for row, _ in only_here if self._is_useless_below(dirty, row)}
        slots = super().allocate(size_class, count, keep_dirty=keep_dirty)
        kept = dirty is None or all(row in dirty for row in waiting)
        assert kept or not keep_dirty, "a copy that was to be demoted has left for a block read ahead"
        check_tails_first(before, catalog, Tier.CPU)
        lost = [
            key
            for row, key in only_here
            if catalog.state(row, Tier.CPU) == CopyState.ABSENT and self.wanted(key) and row not in useless
        ]
        if lost and dirty is not None and not dirty.blocked:
            full = dirty.counts[size_class] >= dirty.limit(size_class)
            assert full, f"{lost!r} left the CPU tier, and NVMe was not asked"
            assert len(lost) <= short, f"{lost!r} left the CPU tier, and room was needed for {short} blocks"
        return slots

    def _is_useless_below(self, dirty: Dirty, row: int) -> bool:
        """Whether NVMe would not serve a copy: what it follows has been refused there, or is in no
        tier."""
        states = [self._catalog.columns(tier).states for tier in (Tier.CPU, Tier.NVME)]
        while row >= 0 and states[1][row] == CopyState.ABSENT:
            if row in dirty._behind or states[0][row] == CopyState.ABSENT:
                return True
            row = self._catalog.parent_rows[row]
        return False


@dataclass
class ManagerParts:
    """A manager and what it stands on, as the assembly would put it together.

    The spaces watch themselves.
    """

    manager: TierManager
    catalog: Catalog
    transfers: Transfers
    cpu: MemorySpace | None
    nvme: NvmeSpace | None

    def neighbour_has(self, key: BlockKey) -> bool:
        return key in self.manager._hints.neighbours.near(Tier.NVME)

    def remote_has(self, key: BlockKey) -> bool:
        return key in self.manager._remote.hints

    @property
    def dirty(self) -> Dirty | None:
        """What is to go from the CPU tier to NVMe."""
        return None if self.cpu is None else self.cpu.dirty

    @classmethod
    def make(
        cls,
        sizes: Sizes,
        engine: FakeEngine,
        index: MemoryIndex,
        first_generation: int,
        neighbours: FakeNeighbours | None = None,
        remote: FakeRemote | None = None,
    ) -> ManagerParts:
        """Build a manager over an engine's pool, and restore what the index knows."""
        parts = Parts.make(sizes.config, sizes.geometry, engine.pool)
        policy = WatchedPolicy(make_store_policy(sizes.config.store_policy))
        cpu = None
        if sizes.has_cpu:
            admission = make_admission(sizes.config.cpu_admission, parts.history)
            cpu = WatchedCpuSpace(parts, sizes.cpu_slots, admission)
        nvme = None
        if sizes.has_nvme:
            layout = layout_of(sizes)
            bytes_per_day = sizes.config.nvme_write_bytes_per_day
            budget = None if bytes_per_day is None else WriteBudget.within(bytes_per_day, DAY_S, sizes.largest_bytes)
            admission = make_admission(sizes.config.nvme_admission, parts.history)
            nvme = WatchedNvmeSpace(parts, layout, index, admission, sizes.drives, budget)
            nvme.restore(HOME_ID, FINGERPRINT)
        tiers = Tiers(cpu, nvme)
        manager = TierManager(
            parts,
            tiers,
            policy,
            first_generation,
            neighbours if sizes.has_nvme else None,
            remote=remote if sizes.config.remote else None,
        )
        return cls(manager, parts.catalog, parts.transfers, cpu, nvme)


def layout_of(sizes: Sizes) -> NvmeLayout:
    """Return room for exactly ``sizes.segments`` segments of each size class, if none takes
    another's."""
    geometry = sizes.geometry
    file_bytes = [
        segment_charge_bytes(size, count) for size, count in zip(geometry.slot_sizes, sizes.segment_slots, strict=True)
    ]
    return NvmeLayout(0, sizes.segment_slots, sizes.segments * sum(file_bytes) * geometry.rank_count)
