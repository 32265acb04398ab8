# SPDX-License-Identifier: Apache-2.0
"""What a survey of a store finds, as plain values; see ``survey``.

A count that cannot be known, because a home's index or HOME file cannot be read, is None, and ``problems`` of the home
says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from kvdisk.cli.block_facts import BlockTally, HomeBlocks, PrefixTree, SegmentLayout
from kvdisk.device.control import DriveFolder, HomeRecord
from kvdisk.device.segment import SegmentFileSummary

_MOST_RANKS = 1 << 16


@dataclass(frozen=True, slots=True)
class SegmentFacts:
    """A segment of a home. ``files``: those that exist, by rank.

    ``used_slots`` is None where the index cannot be read; ``slot_bytes`` and ``slots`` then come from a file's header,
    and are None where that cannot be read either. ``indexed``: the index has a record of it; one that is being
    made, or that a crash has left, has none yet. ``layout``: None where the index cannot be read or has no record of
    it.
    """

    segment: int
    drive: int
    slot_bytes: int | None
    slots: int | None
    used_slots: int | None
    indexed: bool
    files: tuple[SegmentFileSummary, ...]
    layout: SegmentLayout | None = None

    @property
    def fragmentation(self) -> float | None:
        """Share of the free slots that lie in runs of less than 2 MiB on a rank, 0 to 1; None without a free slot."""
        return fragmentation([self])

    @property
    def read_run_blocks(self) -> float | None:
        """Blocks that are read at a time, in the mean, where a chain is read from its head on."""
        return read_run_blocks([self])

    @property
    def fill(self) -> float | None:
        """Share of the slots that hold blocks, 0 to 1."""
        return self.used_slots / self.slots if self.slots and self.used_slots is not None else None

    def used_bytes(self, ranks: int) -> int | None:
        """Bytes of the slots that hold blocks, on all ranks, headers included."""
        if self.used_slots is None or self.slot_bytes is None:
            return None
        return self.used_slots * self.slot_bytes * ranks


@dataclass(frozen=True)
class HomeFacts:
    """A home. ``alive``: a process of its owner lives. ``record``: what HOME says, None where it cannot be read.

    ``tallies`` and ``blocks_in_mass``: of all blocks in its index, None where that cannot be read. ``folders``: by
    drive; None where its directory was not named.
    """

    id: str
    path: Path
    alive: bool
    record: HomeRecord | None
    allocated_bytes: int
    segments: tuple[SegmentFacts, ...]
    tallies: tuple[BlockTally, ...] | None
    problems: tuple[str, ...]
    folders: tuple[DriveFolder | None, ...] = ()
    blocks_in_mass: HomeBlocks | None = None

    @cached_property
    def ranks(self) -> int:
        """Ranks that hold a part of each block: as HOME says, else as many as have files."""
        return ranks_of(self.record, (file for segment in self.segments for file in segment.files))

    @cached_property
    def blocks(self) -> int | None:
        """Blocks in the index; a block has a slot on every rank and counts once."""
        return None if self.tallies is None else sum(tally.blocks for tally in self.tallies)

    @cached_property
    def slots(self) -> int:
        """Slots of all segments whose size is known; a slot is there on every rank and counts once."""
        return sum(segment.slots or 0 for segment in self.segments)

    @cached_property
    def used_bytes(self) -> int | None:
        """Bytes of the slots that hold blocks, on all ranks, headers included."""
        if self.tallies is None:
            return None
        return sum(segment.used_bytes(self.ranks) or 0 for segment in self.segments)

    @property
    def fill(self) -> float | None:
        """Share of the cap that blocks take, 0 to 1."""
        if self.record is None or self.record.cap_bytes <= 0 or self.used_bytes is None:
            return None
        return self.used_bytes / self.record.cap_bytes


@dataclass(frozen=True)
class NamespaceFacts:
    """All homes of one fingerprint, the last used first. ``tree``: None where it could not be made."""

    fingerprint: bytes
    homes: tuple[HomeFacts, ...]
    tree: PrefixTree | None = None

    @cached_property
    def description(self) -> dict[str, Any]:
        """What the engine that used it last says of itself, in one flat dictionary; nothing in it is certain."""
        record = self.homes[0].record
        assert record is not None
        geometry = record.description.get("geometry")
        return record.description | (geometry if isinstance(geometry, dict) else {})

    @cached_property
    def blocks_by_epoch(self) -> dict[int, int]:
        """Blocks of each epoch, over the homes whose index can be read; a block that two homes hold counts twice."""
        return _sum_blocks((tally.epoch, tally.blocks) for tally in _tallies(self.homes))

    @cached_property
    def blocks_by_group(self) -> dict[int, int]:
        """Blocks of each KV-cache group, over the homes whose index can be read."""
        return _sum_blocks((tally.group, tally.blocks) for tally in _tallies(self.homes))

    @cached_property
    def used_bytes(self) -> int:
        """``used_bytes`` of the homes whose index can be read."""
        return sum(home.used_bytes or 0 for home in self.homes)


class DriveFacts(NamedTuple):
    """A directory of the store. ``path``: None where it was not named. ``segments`` and ``allocated_bytes``: of
    segment files there; the other counts leave out ``unreadable_homes``."""

    store_id: str | None
    path: Path | None
    homes: int
    unreadable_homes: int
    segments: int
    slots: int
    blocks: int
    used_bytes: int
    allocated_bytes: int


@dataclass(frozen=True)
class StoreFacts:
    """A store at one moment. Times: whole seconds since the Unix epoch; ``homes`` by last use, the last first.

    ``trees``: the prefixes of a namespace, by fingerprint.
    """

    path: Path
    store_id: str | None
    format_version: int
    created_s: int | None
    surveyed_s: int
    homes: tuple[HomeFacts, ...]
    trees: Mapping[bytes, PrefixTree | None] = field(default_factory=dict)

    @cached_property
    def namespaces(self) -> tuple[NamespaceFacts, ...]:
        """The homes whose HOME can be read, by fingerprint, in the order of ``homes``."""
        found: dict[bytes, list[HomeFacts]] = {}
        for home in self.homes:
            if home.record is not None:
                found.setdefault(home.record.fingerprint, []).append(home)
        return tuple(
            NamespaceFacts(fingerprint, tuple(homes), self.trees.get(fingerprint))
            for fingerprint, homes in found.items()
        )

    @cached_property
    def drives(self) -> tuple[DriveFacts, ...]:
        """The store's directories, the first one first, then in the order of the homes that use them."""
        found: dict[str | None, list[tuple[HomeFacts, int]]] = {self.store_id: []}
        for home in self.homes:
            names = [drive.store_id for drive in home.record.drives] if home.record else [self.store_id]
            for drive, store_id in enumerate(names):
                found.setdefault(store_id, []).append((home, drive))
        return tuple(self._drive(store_id, parts) for store_id, parts in found.items())

    def _drive(self, store_id: str | None, parts: list[tuple[HomeFacts, int]]) -> DriveFacts:
        segments = [(home, each) for home, drive in parts for each in home.segments if each.drive == drive]
        named = [home.folders[drive] for home, drive in parts if drive < len(home.folders)]
        folder = next((folder.path for folder in named if folder is not None), None)
        return DriveFacts(
            store_id,
            self.path if store_id == self.store_id else None if folder is None else folder.parent.parent,
            len({home.id for home, _ in segments}),
            len({home.id for home, _ in segments if home.tallies is None}),
            len(segments),
            sum(segment.slots or 0 for _, segment in segments),
            sum(segment.used_slots or 0 for _, segment in segments),
            sum(segment.used_bytes(home.ranks) or 0 for home, segment in segments),
            sum(file.allocated_bytes for _, segment in segments for file in segment.files),
        )

    @cached_property
    def cap_bytes(self) -> int | None:
        """What all files may come to: the caps of the live owners together, None while none lives."""
        caps = [home.record.cap_bytes for home in self.homes if home.alive and home.record is not None]
        return sum(caps) if caps else None

    @property
    def problems(self) -> tuple[str, ...]:
        """Everything that is wrong, a sentence each, with the home it is wrong in."""
        return tuple(f"home {home.id}: {problem}" for home in self.homes for problem in home.problems)


def stored_range(homes: Iterable[HomeFacts]) -> tuple[int, int] | None:
    """Return when the oldest and the newest block of these homes were stored, or None where there are none."""
    tallies = list(_tallies(homes))
    if not tallies:
        return None
    return min(tally.oldest_stored_s for tally in tallies), max(tally.newest_stored_s for tally in tallies)


def fragmentation(segments: Iterable[SegmentFacts]) -> float | None:
    """Return the share of free bytes that lie in runs of less than 2 MiB on a rank; None where nothing is free."""
    known = [(each.layout, each.slot_bytes or 0) for each in segments if each.layout is not None]
    free_bytes = sum(layout.free_slots * slot_bytes for layout, slot_bytes in known)
    return (
        sum(layout.short_free_slots * slot_bytes for layout, slot_bytes in known) / free_bytes if free_bytes else None
    )


def read_run_blocks(segments: Iterable[SegmentFacts]) -> float | None:
    """Return how many blocks are read at a time, in the mean, where chains are read; None where there are no blocks."""
    known = [each.layout for each in segments if each.layout is not None]
    reads = sum(layout.reads for layout in known)
    return sum(layout.blocks for layout in known) / reads if reads else None


def read_run_bytes(segments: Iterable[SegmentFacts]) -> float | None:
    """Return how many bytes of a rank are read at a time, in the mean; None where there are no blocks."""
    known = [(each.layout, each.slot_bytes or 0) for each in segments if each.layout is not None]
    reads = sum(layout.reads for layout, _ in known)
    return sum(layout.blocks * slot_bytes for layout, slot_bytes in known) / reads if reads else None


def add_classes(counts: Iterable[tuple[int, ...] | None]) -> tuple[int, ...] | None:
    """Return the sums of counts by class; None where there are none."""
    known = [each for each in counts if each is not None]
    return tuple(map(sum, zip(*known, strict=True))) if known else None


def ranks_of(record: HomeRecord | None, files: Iterable[SegmentFileSummary]) -> int:
    """Return how many parts a block has on the drive: as HOME says, else as many as have files."""
    description = record.description if record else {}
    geometry = description.get("geometry")
    ranks = (geometry if isinstance(geometry, dict) else description).get("ranks")
    if isinstance(ranks, int) and 0 < ranks <= _MOST_RANKS:
        return ranks
    return max(1, len({file.rank for file in files}))


def _tallies(homes: Iterable[HomeFacts]) -> Iterator[BlockTally]:
    return (tally for home in homes for tally in home.tallies or ())


def _sum_blocks(counts: Iterable[tuple[int, int]]) -> dict[int, int]:
    total: dict[int, int] = {}
    for name, blocks in counts:
        total[name] = total.get(name, 0) + blocks
    return dict(sorted(total.items()))
