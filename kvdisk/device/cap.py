# SPDX-License-Identifier: Apache-2.0
"""The cap, as values: what all engine stores hold and may hold, and which must go for more room.

The allocated bytes of all engine stores never exceed the caps of the engines that live, or what
those that lived together had, for 15 minutes after one of them ended or was started again: the
others may be starting, too. An owner's layout keeps within its own cap, so deleting engine stores
without an owner can always make room. The index of a live owner grows without asking, and counts at
its full size from the first segment on: without one there is nothing to be noted in it. ``store``
measures and deletes.

Owners with a joint cap count as one owner with that cap, as long as one of them lives. What the
others of them left counts against it, and makes room for them alone: they may be starting again,
one after the other. See docs/decisions/0064-joint-cap.md.

What a live owner could not open at its start stays, and counts: the owner has the room beside it.
See docs/decisions/0058-cannot-now-is-not-lost.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvdisk.device.control import HomeRecord, JointCap, Together
from kvdisk.device.home_lock import HomeLock
from kvdisk.geometry import uses_bytes_for

HOME_OVERHEAD_BYTES = 128 << 10
"""Bytes that an engine store takes beside index and segments: directories, HOME, LMDB's lock file,
and USES_OVERHEAD_BYTES of USES."""
USES_OVERHEAD_BYTES = 32 << 10
BLANK_INDEX_BYTES = 384 << 10
"""Bytes that an index counts with while there is no segment. It has its first step by then, and few
records at most: their deletion fits in it."""

ORPHAN_SPARED_S = 900
"""Seconds for which an orphan keeps room that the caps of the live owners no longer cover, or that
another owner could use: since its last use, and since an owner was started."""
_INDEX_GROWTH = 3
"""The part of the index's full size that it may reach, as a multiple of the part of the cap that
segments take: while records are replaced, old ones are beside them."""


def reserve_bytes(record: HomeRecord, segments_bytes: int, index_bytes: int) -> int:
    """Return the bytes that an engine store with so many bytes of segments and of index needs
    besides segments, on the drive of its index: the rest of the index, and the other files.

    The index of a cap that is larger than the drive never reaches its full size.
    """
    part = min(1.0, _INDEX_GROWTH * segments_bytes / max(1, record.cap_bytes))
    whole = int(part * record.index_bytes)
    return max(0, whole - index_bytes) + whole // 8 + HOME_OVERHEAD_BYTES


def uses_charge_bytes(slot_count: int) -> int:
    """Return the bytes that a USES file for so many slots can take beyond HOME_OVERHEAD_BYTES."""
    return max(0, uses_bytes_for(slot_count) - USES_OVERHEAD_BYTES)


def joint_caps(live: Iterable[JointCap | None]) -> dict[str, int]:
    """Return the bytes of each joint cap of live owners, by name: the least that one of them
    says."""
    found: dict[str, int] = {}
    for joint in live:
        if joint is not None:
            found[joint.name] = min(joint.nvme_bytes, found.get(joint.name, joint.nvme_bytes))
    return found


def bytes_allowed(live: Iterable[tuple[int, JointCap | None]]) -> int:
    """Return what live owners may have together. ``live``: the cap of each, and its joint one."""
    live = list(live)
    alone = sum(cap_bytes for cap_bytes, joint in live if joint is None)
    return alone + sum(joint_caps(joint for _, joint in live).values())


class Holding(NamedTuple):
    """An engine store while the store is locked.

    ``record``: None where HOME or the lock is missing, or HOME does not decode. ``last_use_s``:
    what HOME says; of an unowned one whose time is still to come, when this process first saw it;
    -1 without a record.
    ``live``: it has an owner, or may have one; otherwise ``lock`` holds it exclusively.
    ``charged_bytes``: the allocated bytes, but with a live owner's index at its full size; without
    a segment at BLANK_INDEX_BYTES. ``owed_bytes``: what its first segment adds to that, beside its
    own bytes.
    """

    id: str
    record: HomeRecord | None
    last_use_s: int
    live: bool
    allocated_bytes: int
    charged_bytes: int
    lock: HomeLock
    owed_bytes: int = 0


@dataclass(slots=True)
class Stock:
    """All engine stores of a store while it is locked.

    ``loose``: folders on further drives that no engine store names. ``loose_bytes``: what they
    hold. ``now_s``: seconds since the Unix epoch. ``clock_was_moved``: a moment ago, so that times
    of before do not say how long ago they were: they count as of now.
    """

    homes: list[Holding]
    loose: list[Path]
    loose_bytes: int
    now_s: int
    clock_was_moved: bool = False
    _lived_bytes: int = 0
    """What owners might have that lived together a moment ago, as far as was seen here: what is
    deleted leaves it as it is."""

    @property
    def _said(self) -> list[Together]:
        together = (home.record.together for home in self.homes if home.record)
        return [each for each in together if each is not None]

    @property
    def unowned(self) -> list[Holding]:
        """The engine stores without an owner, the one with the oldest use first; those that are not
        complete come before all others."""
        return sorted((home for home in self.homes if not home.live), key=lambda home: home.last_use_s)

    @property
    def _live_caps(self) -> list[tuple[int, JointCap | None]]:
        return [(home.record.cap_bytes, home.record.joint_cap) for home in self.homes if home.live and home.record]

    @property
    def _joint_caps(self) -> dict[str, int]:
        return joint_caps(joint for _, joint in self._live_caps)

    @property
    def left(self) -> frozenset[str]:
        """The engine stores that live owners could not open: they are not deleted for room."""
        names = frozenset[str]().union(*(home.record.leaves for home in self.homes if home.live and home.record))
        return frozenset(
            home.id for home in self.homes if home.id in names or (home.record and home.record.lineage in names)
        )

    def unowned_to_delete(self, fingerprint: bytes) -> list[Holding]:
        """Return ``unowned`` but for ``left`` in the order of deletion: those of this namespace
        after others, and those that a joint cap of a live owner has room for after all."""
        spared = self._joint_caps

        def turn(home: Holding) -> tuple[bool, bool]:
            record = home.record
            joint = record and record.joint_cap
            return bool(joint and joint.name in spared), bool(record and record.fingerprint == fingerprint)

        left = self.left
        return sorted((home for home in self.unowned if home.id not in left), key=turn)

    def exceeds(self, needed_bytes: int) -> bool:
        """Return whether ``needed_bytes`` more would exceed the caps of the live owners."""
        charged = sum(home.charged_bytes for home in self.homes) + self.loose_bytes
        # By any HOME: an owner may have ended before the others noted that it lived.
        fresh = [each.nvme_bytes for each in self._said if self._is_fresh(each)]
        self._lived_bytes = max([self._lived_bytes, *fresh])
        return charged + needed_bytes > max(self._live_bytes, self._lived_bytes)

    def together(self, before: Together | None) -> Together:
        """Return what HOME of a live owner shall say next, which says ``before``."""
        if before is not None and self._is_fresh(before) and before.nvme_bytes > self._live_bytes:
            return before._replace(at_s=self.now_s) if self.clock_was_moved else before
        return Together(self._live_bytes, self.now_s)

    def together_at_start(self, cap_bytes: int, joint: JointCap | None) -> Together:
        """Return what HOME of an owner with these caps shall say that is being started: as much as
        those had that it may have lived with."""
        alone = bytes_allowed([*self._live_caps, (cap_bytes, joint)])
        return Together(max([alone, *(each.nvme_bytes for each in self._said)]), self.now_s)

    @property
    def _live_bytes(self) -> int:
        return bytes_allowed(self._live_caps)

    def _is_fresh(self, together: Together) -> bool:
        return self.clock_was_moved or abs(self.now_s - together.at_s) < ORPHAN_SPARED_S

    @property
    def spared_since_s(self) -> int:
        """What was used after that is spared, but for the room that an owner needs within its
        cap."""
        return -1 if self.clock_was_moved else self.now_s - ORPHAN_SPARED_S

    def of(self, joint: JointCap | None) -> list[Holding]:
        """Return the engine stores of a joint cap."""
        if joint is None:
            return []
        caps = [(home, home.record and home.record.joint_cap) for home in self.homes]
        return [home for home, cap in caps if cap and cap.name == joint.name]

    def exceeds_joint(self, joint: JointCap | None, needed_bytes: int) -> bool:
        """Return whether ``needed_bytes`` more would exceed a joint cap."""
        if joint is None:
            return False
        least = min(joint.nvme_bytes, self._joint_caps.get(joint.name, joint.nvme_bytes))
        return sum(home.charged_bytes for home in self.of(joint)) + needed_bytes > least
