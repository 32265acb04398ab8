# SPDX-License-Identifier: Apache-2.0
"""Blocks in other engines' homes: what is known of them, asked once per request, and their segments while loads read.

What a neighbour said is a hint. Its owner may evict or overwrite the slot at any time, so a load from it fails
verification then and is recomputed; and a copy that failed so is not asked for again. A segment is open only
while a load uses it: an open file would keep its space on the drive after its owner dropped it. Scheduler thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import compress

from kvdisk.blocks import BlockKey, Slot, group_of
from kvdisk.geometry import FILE_EPOCH, Geometry
from kvdisk.index.base import ForeignCopy, Neighbours
from kvdisk.manager.catalog import Catalog, Presence
from kvdisk.manager.jobs import Transfers
from kvdisk.manager.requests import RequestState
from kvdisk.messages import FOREIGN_SEGMENTS, ForeignSegment, JobKind, SegmentSpec
from kvdisk.stats import Stats

MOST_KEYS = 16384
"""Keys of one question: of a longer prompt, the first."""
MOST_KNOWN = 65536
"""Copies remembered, about 350 bytes each; the first heard of are forgotten first."""
MOST_DENIED = 8192
MOST_FILE_JOBS = 1024
"""With so many segments being opened or dropped nothing is promised: where files hang, each load would add two more."""
BELIEVED_S = 300.0
"""How long after an answer a copy is thought to be there."""
MOST_FORGOTTEN = 256
"""Copies that are forgotten at a time: bounds a step."""
ASK_AGAIN_S = 30.0
"""A request that is looked up so long after it asked asks again, and goes on with what is known."""

_NOT_READY = bytes(presence != Presence.READY for presence in range(256))


@dataclass(slots=True)
class _OpenSegment:
    name: ForeignSegment
    spec: SegmentSpec
    users: int = 0


class ForeignCopies:
    """See the module. Without ``neighbours`` (no NVMe tier) nothing is known and nobody is asked."""

    def __init__(
        self, geometry: Geometry, catalog: Catalog, transfers: Transfers, stats: Stats, neighbours: Neighbours | None
    ) -> None:
        self._geometry = geometry
        self._catalog = catalog
        self._transfers = transfers
        self._stats = stats
        self._neighbours = neighbours
        self.known: OrderedDict[BlockKey, tuple[ForeignCopy, float]] = OrderedDict()
        """Believed copies and when they were heard of, the oldest first. Read only, but for this class."""
        self.changes = 0
        """Rises with each change of which keys are in ``known``."""
        self._denied: OrderedDict[tuple[str, BlockKey, int], None] = OrderedDict()
        self._unanswered: dict[int, list[BlockKey]] = {}
        self._last_ticket = 0
        self._next_segment = FOREIGN_SEGMENTS
        self._numbers: dict[ForeignSegment, int] = {}
        self._open: dict[int, _OpenSegment] = {}

    # -- questions -----------------------------------------------------------------------------

    def ask(self, request: RequestState) -> None:
        """Ask the neighbours for what of a request's blocks this engine has not got. ``keys`` are up to date."""
        neighbours = self._neighbours
        if neighbours is None or not neighbours.any:
            return
        presences = self._catalog.presences
        missing = [key for keys in request.keys for key in compress(keys, presences(keys).translate(_NOT_READY))]
        if not missing:
            return
        self._last_ticket += 1
        del missing[MOST_KEYS:]
        if neighbours.ask(self._last_ticket, FILE_EPOCH, missing):
            self._unanswered[self._last_ticket] = missing
            request.question = self._last_ticket
            self._stats.add("foreign_questions")

    def refresh(self, request: RequestState, now: float) -> None:
        """Take in answers before a request is looked up, and ask again where its question is long ago."""
        if self._neighbours is None:
            return
        self.absorb(now)
        if request.asked_s is None:
            request.asked_s = now
        elif now - request.asked_s > ASK_AGAIN_S:
            request.asked_s = now
            self.ask(request)
            request.question = 0  # nobody waits for it

    def is_asking(self, request: RequestState) -> bool:
        """Whether the answer to a request's question is still to come."""
        return request.question in self._unanswered and self._neighbours is not None and self._neighbours.any

    def absorb(self, now: float) -> None:
        """Take in the answers that have come, and forget what was heard of too long ago."""
        if self._neighbours is None:
            return
        for answer in self._neighbours.poll():
            self.changes += 1
            for key in self._unanswered.pop(answer.ticket, ()):
                self.known.pop(key, None)
                believed = next((copy for copy in answer.copies.get(key, ()) if self._is_fit(key, copy)), None)
                if believed is not None:
                    self.known[key] = (believed, now)
        for _ in range(min(MOST_FORGOTTEN, len(self.known))):
            key = next(iter(self.known))
            if len(self.known) <= MOST_KNOWN and now - self.known[key][1] <= BELIEVED_S:
                break
            self.changes += 1
            del self.known[key]

    def _is_fit(self, key: BlockKey, copy: ForeignCopy) -> bool:
        groups, group = self._geometry.groups, group_of(key)
        return (
            group < len(groups)
            and copy.segment.slot_bytes == groups[group].slot_bytes
            and copy.slot_index < copy.segment.slot_count
            and (copy.home_id, key, copy.generation) not in self._denied
        )

    def holds(self, key: BlockKey) -> bool:
        """Whether a neighbour is thought to have the block, so that it need not be written a second time."""
        return key in self.known

    def stop(self) -> None:
        """Ask nobody any more: this engine's weights are no longer those of the files."""
        self._neighbours = None
        self.changes += 1
        self.known.clear()
        self._unanswered.clear()

    # -- loads ---------------------------------------------------------------------------------

    @property
    def promised(self) -> Mapping[BlockKey, tuple[ForeignCopy, float]]:
        """What of ``known`` may be promised to a request now: all or nothing."""
        if not self.known:
            return self.known
        count = self._transfers.count
        return self.known if count(JobKind.OPEN_SEGMENT) + count(JobKind.DROP_SEGMENT) < MOST_FILE_JOBS else {}

    def find(self, key: BlockKey) -> ForeignCopy | None:
        """Return the believed copy of a key."""
        believed = self.known.get(key)
        return believed[0] if believed is not None else None

    def pin(self, copy: ForeignCopy) -> Slot:
        """Return the slot that a move reads a copy from; its segment is opened first, by a job of its own."""
        name = ForeignSegment(copy.home_id, copy.segment.segment)
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = self._next_segment
            self._next_segment += 1
            _, slot_bytes, slot_count, drive = copy.segment
            spec = SegmentSpec(number, slot_bytes, slot_count, drive, create=False, source=name)
            self._open[number] = _OpenSegment(name, spec)
            self._transfers.add(JobKind.OPEN_SEGMENT, [], [], segment=spec)
        self._open[number].users += 1
        return Slot(number, copy.slot_index)

    def unpin(self, slot: Slot) -> None:
        """Note that a move is settled; the last one's segment is closed."""
        segment = self._open[slot.segment]
        segment.users -= 1
        if segment.users == 0:
            del self._open[slot.segment], self._numbers[segment.name]
            self._transfers.add(JobKind.DROP_SEGMENT, [], [], segment=segment.spec)

    def deny(self, key: BlockKey, home_id: str, generation: int) -> None:
        """Never ask for this copy again: it did not hold what its index said."""
        self._stats.add("foreign_failures")
        self._denied[home_id, key, generation] = None
        if len(self._denied) > MOST_DENIED:
            self._denied.popitem(last=False)
        believed = self.find(key)
        if believed is not None and (believed.home_id, believed.generation) == (home_id, generation):
            self.changes += 1
            del self.known[key]

    def home_of(self, slot: Slot) -> str:
        """Return the id of the home that a pinned slot is in."""
        return self._open[slot.segment].name.home_id

    @property
    def open_count(self) -> int:
        """Segments that loads on their way use. For tests."""
        return len(self._open)


def is_foreign(slot: Slot | None) -> bool:
    """Return whether a move's NVMe slot is one of another home."""
    return slot is not None and slot.segment >= FOREIGN_SEGMENTS
