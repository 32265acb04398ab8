# SPDX-License-Identifier: Apache-2.0
"""Headers and checksums of a part's slots: written behind a gather, verified before a scatter. Of slots in GPU memory
headers and sums are here, payloads are not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdisk.device.header import (
    MULTILINEAR,
    XXH3_128,
    SlotHeader,
    check_slot,
    named_checksum,
    seal_slot,
    write_header,
)
from kvdisk.geometry import Geometry, Namespace
from kvdisk.messages import Reason
from kvdisk.worker.routes import Part

if TYPE_CHECKING:
    from kvdisk.worker.gpu_staging import GpuStaging


def seal_part(part: Part, fingerprint: bytes, geometry: Geometry, rank: int, kind: int = XXH3_128) -> None:
    """Write the header of every slot of a part, whose payloads are in place, with a checksum of a kind."""
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
            kind=kind,
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


def seal_direct(part: Part, staging: GpuStaging, fingerprint: bytes, geometry: Geometry, rank: int) -> None:
    """Fill the headers of a part in GPU staging, whose sums have been computed; they are to be copied there."""
    namespace = Namespace(fingerprint, part.work.job.epoch)
    for position, slot in zip(part.positions, part.slots, strict=True):
        move = part.work.job.moves[position]
        header = SlotHeader(
            namespace=namespace,
            key=move.key,
            generation=move.generation,
            parent=move.parent,
            payload_bytes=geometry.groups[part.group].payload_bytes,
            rank=geometry.part_of(rank),
            rank_count=geometry.part_count,
            checksum=staging.digest(part.size_class, slot),
            checksum_kind=MULTILINEAR,
        )
        write_header(staging.header(part.size_class, slot), header)


def check_direct(
    part: Part, staging: GpuStaging, fingerprint: bytes, geometry: Geometry, rank: int
) -> tuple[dict[int, Reason], list[int]]:
    """As ``check_part`` for a part in GPU staging, whose sums have been computed.

    Also returns the positions of sound headers with a checksum that a GPU does not compute: nothing is known of
    their payloads.
    """
    namespace = Namespace(fingerprint, part.work.job.epoch)
    bad: dict[int, Reason] = {}
    unknown: list[int] = []
    for position, slot in zip(part.positions, part.slots, strict=True):
        move = part.work.job.moves[position]
        named = named_checksum(
            staging.header(part.size_class, slot),
            namespace=namespace,
            key=move.key,
            generation=move.generation,
            payload_bytes=geometry.groups[part.group].payload_bytes,
            rank=geometry.part_of(rank),
            rank_count=geometry.part_count,
        )
        if named is None:
            bad[position] = Reason.HEADER
        elif named[0] != MULTILINEAR:
            unknown.append(position)
        elif named[1] != staging.digest(part.size_class, slot):
            bad[position] = Reason.CHECKSUM
    return bad, unknown
