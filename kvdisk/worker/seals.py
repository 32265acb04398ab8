# SPDX-License-Identifier: Apache-2.0
"""Headers and checksums of a part's slots, in memory: written behind a gather, verified before a scatter."""

from __future__ import annotations

from kvdisk.device.header import check_slot, seal_slot
from kvdisk.geometry import Geometry, Namespace
from kvdisk.messages import Reason
from kvdisk.worker.legs import Part


def seal_part(part: Part, fingerprint: bytes, geometry: Geometry, rank: int) -> None:
    """Write the header of every slot of a part, whose payloads are in place."""
    job, view, size_class = part.work.job, part.arena.view, part.size_class
    namespace = Namespace(fingerprint, job.epoch)
    payload_bytes = geometry.groups[part.group].payload_bytes
    for position, slot in zip(part.positions, part.slots, strict=True):
        move = job.moves[position]
        seal_slot(
            view(size_class, slot),
            namespace=namespace,
            key=move.key,
            generation=move.generation,
            parent=move.parent,
            payload_bytes=payload_bytes,
            rank=geometry.part_of(rank),
            rank_count=geometry.part_count,
        )


def check_part(part: Part, fingerprint: bytes, geometry: Geometry, rank: int) -> dict[int, Reason]:
    """Verify every slot of a part; return HEADER or CHECKSUM, by position, for those that must not be used."""
    job, view, size_class = part.work.job, part.arena.view, part.size_class
    namespace = Namespace(fingerprint, job.epoch)
    payload_bytes = geometry.groups[part.group].payload_bytes
    bad: dict[int, Reason] = {}
    for position, slot in zip(part.positions, part.slots, strict=True):
        move = job.moves[position]
        reason = check_slot(
            view(size_class, slot),
            namespace=namespace,
            key=move.key,
            generation=move.generation,
            payload_bytes=payload_bytes,
            rank=geometry.part_of(rank),
            rank_count=geometry.part_count,
        )
        if reason is not None:
            bad[position] = reason
    return bad
