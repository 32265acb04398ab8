# SPDX-License-Identifier: Apache-2.0
"""Headers and checksums of a part's slots: written behind a gather, verified before a scatter.

Of slots in GPU memory, headers and sums are in host memory; payloads are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvdisk.device.header import (
    MULTILINEAR,
    XXH3_128,
    SlotIdentity,
    adopt_slot,
    check_slot,
    fill_header,
    named_checksum,
    seal_slot,
)
from kvdisk.geometry import Geometry, Namespace
from kvdisk.messages import Move, Reason
from kvdisk.worker.routes import Part

if TYPE_CHECKING:
    from kvdisk.worker.direct import Direct


class SlotHeaders:
    """Seals and checks the parts of one rank. An opened home replaces ``fingerprint``.

    ``direct``: whose staging has the slots of direct routes, with their sums computed, and says
    which kind of checksum the others get.
    """

    def __init__(self, geometry: Geometry, rank: int, fingerprint: bytes, direct: Direct | None) -> None:
        self.fingerprint = fingerprint
        self._geometry = geometry
        self._part = geometry.part_of(rank)
        self._direct = direct

    def seal(self, part: Part) -> None:
        """Write the header of every slot of a part; of a direct one in host memory."""
        size_class, direct = part.size_class, self._direct
        kind = XXH3_128 if direct is None else direct.checksum_kind(size_class)
        for _, slot, move, identity in self._each(part):
            if direct is not None and part.route.direct:
                header, digest = direct.staging.header(size_class, slot), direct.staging.digest(size_class, slot)
                fill_header(header, identity, move.parent, digest, MULTILINEAR)
            else:
                seal_slot(part.memory.view(size_class, slot), identity, move.parent, kind)

    def check(self, part: Part) -> tuple[dict[int, Reason], list[int]]:
        """Verify every slot of a part; return HEADER or CHECKSUM by position of the bad ones. What
        came from the remote store gets its move's generation.

        Also returns the positions on a direct route whose checksum a GPU does not compute: nothing
        is known of these payloads.
        """
        check = adopt_slot if part.route.by_key else check_slot
        bad: dict[int, Reason] = {}
        unknown: list[int] = []
        for position, slot, _, identity in self._each(part):
            if self._direct is not None and part.route.direct:
                staging = self._direct.staging
                named = named_checksum(staging.header(part.size_class, slot), identity)
                if named is None:
                    bad[position] = Reason.HEADER
                elif named[0] != MULTILINEAR:
                    unknown.append(position)
                elif named[1] != staging.digest(part.size_class, slot):
                    bad[position] = Reason.CHECKSUM
            else:
                reason = check(part.memory.view(part.size_class, slot), identity)
                if reason is not None:
                    bad[position] = reason
        return bad, unknown

    def _each(self, part: Part) -> Iterator[tuple[int, int, Move, SlotIdentity]]:
        """Yield each position of a part with its slot, its move, and what its header says."""
        job, geometry = part.work.job, self._geometry
        namespace = Namespace(self.fingerprint, job.epoch)
        payload_bytes = geometry.groups[part.group].payload_bytes
        for position, slot in zip(part.positions, part.slots, strict=True):
            move = job.moves[position]
            identity = SlotIdentity(
                namespace, move.key, move.generation, payload_bytes, self._part, geometry.part_count
            )
            yield position, slot, move, identity
