# SPDX-License-Identifier: Apache-2.0
"""The health of the home's drives: which may be written, and which are read. Scheduler thread only.

A write that fails stops writes to its drive for a while, longer each time; reads go on. A segment that cannot be
made only stops the making of segments: old copies leave for new ones in the slots that are there. A drive that fails
to read block after block, or that does not end a read in time, is quarantined: nothing on it is promised, read or
written until its time is over. Then it is on probation: its next failure is enough.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvdisk.stats import Stats

PIECE_BYTES = 16 << 20
"""Of one rank's file: what of a run of slots goes to one drive before the next one's turn."""

logger = logging.getLogger("kvdisk.manager")

FIRST_BACK_OFF_S = 1.0
LAST_BACK_OFF_S = 60.0
FIRST_QUARANTINE_S = 60.0
LAST_QUARANTINE_S = 3600.0
FAILURES_IN_A_ROW = 8
"""Blocks that a drive fails to read, with none between that it reads, before it is quarantined."""


@dataclass(slots=True)
class _BackOff:
    """A time in which something is not tried again, twice as long after each failure."""

    until_s: float = 0.0
    next_s: float = FIRST_BACK_OFF_S
    running: bool = False

    def begin(self, now: float) -> float:
        """Begin one; return how long it takes."""
        length_s = self.next_s
        self.until_s, self.running = now + length_s, True
        self.next_s = min(length_s * 2, LAST_BACK_OFF_S)
        return length_s

    def has_ended(self, now: float) -> bool:
        """Whether one has ended since this was last asked."""
        ended = self.running and now >= self.until_s
        self.running = self.running and not ended
        return ended

    def reset(self) -> None:
        """It worked: the next failure starts with a short one again."""
        self.next_s = FIRST_BACK_OFF_S


@dataclass(slots=True)
class _Drive:
    writes: _BackOff = field(default_factory=_BackOff)
    segments: _BackOff = field(default_factory=_BackOff)
    failures: int = 0
    quarantined_until_s: float | None = None
    quarantine_s: float = FIRST_QUARANTINE_S


class Drives:
    """See the module. Drives are named by their position in the home's list."""

    def __init__(self, count: int, stats: Stats) -> None:
        assert count > 0
        self._drives = [_Drive() for _ in range(count)]
        self._stats = stats
        self.quarantined: frozenset[int] = frozenset()
        """As of the last failure or ``look``."""

    def __len__(self) -> int:
        return len(self._drives)

    def look(self, now: float) -> bool:
        """End quarantines whose time is over; return whether that, or the end of a back-off, lets writes return."""
        returned = False
        for number, drive in enumerate(self._drives):
            if drive.quarantined_until_s is not None and now >= drive.quarantined_until_s:
                drive.quarantined_until_s = None
                drive.failures = FAILURES_IN_A_ROW - 1
                returned = True
                self._note_quarantined()
                logger.warning("kvdisk tries drive %d of the store again.", number)
            if drive.quarantined_until_s is None and drive.writes.has_ended(now):
                returned = True
            if drive.segments.has_ended(now):
                returned = True
        return returned

    def may_write(self, number: int, now: float) -> bool:
        """Whether nothing keeps a drive from being written."""
        drive = self._drives[number]
        return drive.quarantined_until_s is None and now >= drive.writes.until_s

    def writable(self, now: float) -> list[int]:
        """Return the drives that may be written."""
        return [number for number in range(len(self._drives)) if self.may_write(number, now)]

    def write_failed(self, number: int, now: float, what: str) -> None:
        """Stop writing to a drive for a while; what was on its way at that time does not lengthen it."""
        drive = self._drives[number]
        if now >= drive.writes.until_s:
            length_s = drive.writes.begin(now)
            self._stats.add("write_pauses")
            logger.warning(
                "kvdisk: %s; no writes to drive %d of the store for %.0f s, reads go on.", what, number, length_s
            )

    def write_succeeded(self, number: int) -> None:
        """A write worked: the next failure starts with a short back-off again."""
        self._drives[number].writes.reset()

    def may_make(self, number: int, now: float) -> bool:
        """Whether a segment may be made on a drive that may be written."""
        return now >= self._drives[number].segments.until_s

    def segment_failed(self, number: int, now: float) -> None:
        """Make no segments on a drive for a while: one could not be made on some rank."""
        length_s = self._drives[number].segments.begin(now)
        self._stats.add("segment_failures")
        logger.warning(
            "kvdisk could not make a segment on drive %d of the store; next try in %.0f s.", number, length_s
        )

    def segment_made(self, number: int) -> None:
        """A segment was made: the next failure starts with a short back-off again."""
        self._drives[number].segments.reset()

    def read_succeeded(self, number: int) -> None:
        """A block was read, whatever was in it."""
        drive = self._drives[number]
        drive.failures = 0
        drive.quarantine_s = FIRST_QUARANTINE_S

    def read_failed(self, number: int, now: float, *, hangs: bool = False) -> None:
        """A block could not be read; ``hangs``: not in time, which is enough."""
        drive = self._drives[number]
        drive.failures += 1
        if drive.quarantined_until_s is not None or (drive.failures < FAILURES_IN_A_ROW and not hangs):
            return
        drive.quarantined_until_s = now + drive.quarantine_s
        self._stats.add("drive_quarantines")
        logger.error(
            "kvdisk: drive %d of the store %s; it is left alone for %.0f s, and what is on it is computed again.",
            number,
            "does not answer" if hangs else f"failed to read {drive.failures} blocks in a row",
            drive.quarantine_s,
        )
        drive.quarantine_s = min(drive.quarantine_s * 2, LAST_QUARANTINE_S)
        self._note_quarantined()

    def _note_quarantined(self) -> None:
        self.quarantined = frozenset(
            number for number, drive in enumerate(self._drives) if drive.quarantined_until_s is not None
        )


class Turns:
    """Whose turn it is: of each size class a piece goes to one drive, the next to the next; so a load reads from all.

    ``piece_slots``: slots of a piece by size class.
    """

    def __init__(self, piece_slots: Sequence[int]) -> None:
        assert all(count > 0 for count in piece_slots)
        self._piece_slots = tuple(piece_slots)
        self._drive = [0] * len(self._piece_slots)
        self._left = list(self._piece_slots)

    @classmethod
    def of_slots(cls, slot_sizes: Sequence[int]) -> Turns:
        """Return the turns for slots of these sizes in bytes."""
        return cls([max(1, PIECE_BYTES // size) for size in slot_sizes])

    def next_piece(self, size_class: int, drives: Sequence[int]) -> tuple[int, int]:
        """Return which of ``drives`` (ascending, not empty) is to take how many slots at most."""
        drive = next((drive for drive in drives if drive >= self._drive[size_class]), drives[0])
        if drive != self._drive[size_class]:
            self._drive[size_class] = drive
            self._left[size_class] = self._piece_slots[size_class]
        return drive, self._left[size_class]

    def took(self, size_class: int, count: int) -> None:
        """Note that so many slots of the piece were taken; with the last one the turn ends."""
        self._left[size_class] -= count
        assert self._left[size_class] >= 0
        if self._left[size_class] == 0:
            self._drive[size_class] += 1
            self._left[size_class] = self._piece_slots[size_class]
