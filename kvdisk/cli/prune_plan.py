# SPDX-License-Identifier: Apache-2.0
"""Which homes, segments and blocks of a store shall go. Pure: no I/O, no clock.

What gives space back to the drive is a segment, whose file goes, or a whole home; a block that goes leaves a slot for
the next owner. See docs/decisions/0024-prune.md for the order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvdisk.blocks import BlockKey
from kvdisk.device.control import HomeRecord
from kvdisk.index.base import BlockRecord


class Wish(NamedTuple):
    """What shall go: what all of these that are not None say. None of them: everything.

    ``to_bytes``: only until no more than that is allocated. ``before_s``: only blocks last used before this moment, in
    seconds since the Unix epoch. ``fingerprint``: only of this namespace.
    """

    to_bytes: int | None = None
    before_s: int | None = None
    fingerprint: bytes | None = None


@dataclass(frozen=True)
class Stocked:
    """A home as far as it matters here. ``record``: None where HOME cannot be read.

    ``blocks``: None where the index cannot be read. ``why_whole``: why it can only stay or go as a whole; empty: it
    can be cut. ``segment_bytes``: allocated, by segment; ``slot_bytes``: of those that the index knows.
    """

    id: str
    record: HomeRecord | None
    alive: bool
    allocated_bytes: int
    blocks: Sequence[BlockRecord] | None
    segment_bytes: Mapping[int, int]
    slot_bytes: Mapping[int, int]
    why_whole: str = ""

    @property
    def last_use_s(self) -> int:
        """When it was last used; what cannot be read comes before all others."""
        return self.record.last_use_s if self.record else -1


@dataclass(frozen=True)
class HomePlan:
    """What goes of one home. ``whole``: all, as one directory. ``keys``: of blocks whose segments stay.

    ``block_count``: of all blocks that go, None where that is not known. ``byte_count``: what the drive gets back.
    """

    home: Stocked
    whole: bool
    segments: frozenset[int]
    keys: tuple[tuple[int, BlockKey], ...]
    block_count: int | None
    byte_count: int


@dataclass
class Plan:
    """``in_use``: live homes that would have to change. ``kept``: sentences about homes that stay, and might have gone.

    ``short_bytes``: what would be allocated beyond ``Wish.to_bytes`` even so.
    """

    homes: list[HomePlan] = field(default_factory=list)
    in_use: list[Stocked] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    short_bytes: int = 0

    @property
    def byte_count(self) -> int:
        """What the drives get back."""
        return sum(home.byte_count for home in self.homes)

    @property
    def block_count(self) -> int:
        """Blocks that go, as far as that is known."""
        return sum(home.block_count or 0 for home in self.homes)


def make_plan(wish: Wish, homes: Sequence[Stocked]) -> Plan:
    """Choose."""
    plan = Plan()
    wanted = [
        home
        for home in sorted(homes, key=lambda home: home.last_use_s)
        if wish.fingerprint is None or (home.record is not None and home.record.fingerprint == wish.fingerprint)
    ]
    excess_bytes = None
    if wish.to_bytes is not None:
        excess_bytes = sum(home.allocated_bytes for home in homes) - wish.to_bytes
    for home in wanted:
        if excess_bytes is not None and excess_bytes <= 0:
            break
        if home.alive and excess_bytes is not None:
            continue
        chosen = _choose(home, wish.before_s, excess_bytes, plan.kept)
        if chosen is None:
            continue
        if home.alive:
            plan.in_use.append(home)
        else:
            plan.homes.append(chosen)
            excess_bytes = None if excess_bytes is None else excess_bytes - chosen.byte_count
    if excess_bytes is not None and excess_bytes > 0:
        plan.short_bytes = excess_bytes
        plan.in_use += [home for home in wanted if home.alive and _choose(home, wish.before_s, excess_bytes, [])]
    return plan


def _choose(home: Stocked, before_s: int | None, excess_bytes: int | None, kept: list[str]) -> HomePlan | None:
    """Choose of one home; None: nothing."""
    if before_s is None:
        if excess_bytes is None or home.allocated_bytes <= excess_bytes or home.why_whole or not home.segment_bytes:
            return _whole(home)
        return _cut_to(home, home.segment_bytes, excess_bytes, _ages(home.blocks or ()))
    if home.record is None:
        return None  # nobody knows how old it is
    if home.record.last_use_s < before_s and not home.alive:
        return _whole(home) if excess_bytes is None or home.why_whole else _choose(home, None, excess_bytes, kept)
    if home.blocks is None or (home.why_whole and not home.alive):
        kept.append(f"home {home.id} stays as it is: {home.why_whole or 'its index cannot be read'}")
        return None
    return _cut_old(home, home.blocks, before_s, excess_bytes)


def _whole(home: Stocked) -> HomePlan:
    count = None if home.blocks is None else len(home.blocks)
    return HomePlan(home, True, frozenset(home.segment_bytes), (), count, home.allocated_bytes)


def _cut_old(home: Stocked, blocks: Sequence[BlockRecord], before_s: int, excess_bytes: int | None) -> HomePlan | None:
    """Choose the blocks not used since, and the segments that have no others left."""
    ages = _ages(blocks)
    old = [age for age in ages if age.last_use_s < before_s]
    if not old:
        return None
    if len(old) == len(blocks) and (excess_bytes is None or home.allocated_bytes <= excess_bytes):
        return _whole(home)
    young = {age.block.slot.segment for age in ages if age.last_use_s >= before_s}
    emptied = {age.block.slot.segment for age in old} - young
    if excess_bytes is not None:
        bytes_of = {segment: home.segment_bytes.get(segment, 0) for segment in emptied}
        return _cut_to(home, bytes_of, excess_bytes, ages) if emptied else None
    keys = tuple((age.block.epoch, age.block.key) for age in old if age.block.slot.segment not in emptied)
    freed = sum(home.segment_bytes.get(segment, 0) for segment in emptied)
    return HomePlan(home, False, frozenset(emptied), keys, len(old), freed)


# -- segments ----------------------------------------------------------------------------------


def _cut_to(home: Stocked, among: Mapping[int, int], excess_bytes: int, ages: Sequence[Age]) -> HomePlan | None:
    """Choose segments until so many bytes are free: of the slot size that has most left, the least worth first."""
    of_segment: dict[int, list[Age]] = {segment: [] for segment in among}
    for age in ages:
        if age.block.slot.segment in of_segment:
            of_segment[age.block.slot.segment].append(age)
    unknown = [segment for segment in among if segment not in home.slot_bytes]
    queues: dict[int, list[int]] = {}
    for segment in sorted(of_segment, key=lambda one: (_worth(of_segment[one]), one), reverse=True):
        if segment in home.slot_bytes:
            queues.setdefault(home.slot_bytes[segment], []).append(segment)
    totals = {size: sum(among[segment] for segment in queue) or 1 for size, queue in queues.items()}
    chosen = set(unknown)  # of no use to anybody, and removed with any cut
    freed = sum(among[segment] for segment in unknown)
    while freed < excess_bytes and any(queues.values()):
        fullest = max(queues, key=lambda size: sum(among[segment] for segment in queues[size]) / totals[size])
        segment = queues[fullest].pop()
        chosen.add(segment)
        freed += among[segment]
    if not chosen:
        return None
    if chosen == set(home.segment_bytes):
        return _whole(home)
    blocks = sum(len(of_segment[segment]) for segment in chosen)
    return HomePlan(home, False, frozenset(chosen), (), blocks, freed)


def _worth(ages: Sequence[Age]) -> tuple[float, int]:
    """Return what a segment is worth: how recently its blocks were used, then how many blocks need them."""
    if not ages:
        return (-1.0, 0)
    return sum(age.last_use_s for age in ages) / len(ages), sum(age.needed_by for age in ages)


class Age(NamedTuple):
    """A block, when it was last known to be used, and how many blocks need it, itself included."""

    block: BlockRecord
    last_use_s: int
    needed_by: int


def _ages(blocks: Iterable[BlockRecord]) -> list[Age]:
    """Return the ages of a home's blocks.

    Who stored a block had used all that come before it in its chain: so a head is never older than its tails.
    """
    listed = list(blocks)
    place = {(block.epoch, block.key): at for at, block in enumerate(listed)}
    parents = [-1 if block.parent is None else place.get((block.epoch, block.parent), -1) for block in listed]
    last_use_s = [block.stored_s for block in listed]
    needed_by = [1] * len(listed)
    children = [0] * len(listed)
    for parent in parents:
        if parent >= 0:
            children[parent] += 1
    ready = [at for at, count in enumerate(children) if not count]
    while ready:  # tails first; a chain that bites its own tail, as in a damaged index, is left as it is
        at = ready.pop()
        parent = parents[at]
        if parent >= 0:
            last_use_s[parent] = max(last_use_s[parent], last_use_s[at])
            needed_by[parent] += needed_by[at]
            children[parent] -= 1
            if not children[parent]:
                ready.append(parent)
    return [Age(*fields) for fields in zip(listed, last_use_s, needed_by, strict=True)]
