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
    check_slot,
    fill_header,
    named_checksum,
    seal_slot,
)
from kvdisk.geometry import Geometry, Namespace
from kvdisk.messages import Move, Reason
from kvdisk.worker.routes import Part

if TYPE_CHECKING:
    from kvdisk.worker.gpu_staging import GpuStaging


class SlotHeaders:
    """Seals and checks the parts of one rank. An opened home replaces ``fingerprint``."""

    def __init__(self, geometry: Geometry, rank: int, fingerprint: bytes) -> None:
        self.fingerprint = fingerprint
        self._geometry = geometry
        self._part = geometry.part_of(rank)

    def seal(self, part: Part, kind: int = XXH3_128) -> None:
        """Write the header of every slot of a part behind its payload's checksum of this kind."""
        for _, slot, move, identity in self._each(part):
            seal_slot(part.arena.view(part.size_class, slot), identity, move.parent, kind)

    def check(self, part: Part) -> dict[int, Reason]:
        """Verify every slot of a part; return HEADER or CHECKSUM by position of the bad ones."""
        bad: dict[int, Reason] = {}
        for position, slot, _, identity in self._each(part):
            reason = check_slot(part.arena.view(part.size_class, slot), identity)
            if reason is not None:
                bad[position] = reason
        return bad

    def seal_direct(self, part: Part, staging: GpuStaging) -> None:
        """Fill the headers of a part in GPU staging, whose sums are computed, to be copied there."""
        for _, slot, move, identity in self._each(part):
            digest = staging.digest(part.size_class, slot)
            fill_header(staging.header(part.size_class, slot), identity, move.parent, digest, MULTILINEAR)

    def check_direct(self, part: Part, staging: GpuStaging) -> tuple[dict[int, Reason], list[int]]:
        """As ``check`` for a part in GPU staging, whose sums have been computed.

        Also returns the positions of sound headers with a checksum that a GPU does not compute:
        nothing is known of their payloads.
        """
        bad: dict[int, Reason] = {}
        unknown: list[int] = []
        for position, slot, _, identity in self._each(part):
            named = named_checksum(staging.header(part.size_class, slot), identity)
            if named is None:
                bad[position] = Reason.HEADER
            elif named[0] != MULTILINEAR:
                unknown.append(position)
            elif named[1] != staging.digest(part.size_class, slot):
                bad[position] = Reason.CHECKSUM
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
