# SPDX-License-Identifier: Apache-2.0
"""Headers and checksums of a batch's slots: written after a gather, verified before a scatter.

Of slots in GPU memory only headers and sums are in host memory; payloads are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
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
from kvdisk.errors import QuietLog
from kvdisk.geometry import Geometry, Namespace
from kvdisk.messages import Move, Reason
from kvdisk.remote.base import RemoteObject, object_name
from kvdisk.worker.routes import Batch, Leg

if TYPE_CHECKING:
    from kvdisk.worker.direct import Direct


class SlotHeaders:
    """Seals and verifies the batches of one rank. ``fingerprint`` is replaced when an engine store
    is opened.

    ``direct``: its staging has the slots of direct routes, with their sums computed, and it says
    which kind of checksum the other slots get.
    """

    def __init__(self, geometry: Geometry, rank: int, fingerprint: bytes, direct: Direct | None) -> None:
        self.fingerprint = fingerprint
        self._geometry = geometry
        self._part = geometry.shard_of(rank)
        self._direct = direct

    def seal(self, batch: Batch) -> None:
        """Write the header of every slot of a batch; on a direct route into host memory."""
        size_class, direct = batch.size_class, self._direct
        kind = XXH3_128 if direct is None else direct.checksum_kind(size_class)
        for _, slot, move, identity in self._each(batch):
            if direct is not None and batch.route.direct:
                header, digest = direct.staging.header(size_class, slot), direct.staging.digest(size_class, slot)
                fill_header(header, identity, move.parent, digest, MULTILINEAR)
            else:
                seal_slot(batch.memory.view(size_class, slot), identity, move.parent, kind)

    def check(self, batch: Batch) -> tuple[dict[int, Reason], list[int]]:
        """Verify every slot of a batch. Return the reason, HEADER or CHECKSUM, of each bad one by
        its position. A slot from the remote store gets its move's generation.

        Also returns the positions on a direct route whose kind of checksum a GPU does not compute:
        those payloads are not verified.
        """
        check = adopt_slot if batch.is_of_objects else check_slot
        bad: dict[int, Reason] = {}
        unknown: list[int] = []
        for position, slot, _, identity in self._each(batch):
            if self._direct is not None and batch.route.direct:
                staging = self._direct.staging
                named = named_checksum(staging.header(batch.size_class, slot), identity)
                if named is None:
                    bad[position] = Reason.HEADER
                elif named[0] != MULTILINEAR:
                    unknown.append(position)
                elif named[1] != staging.digest(batch.size_class, slot):
                    bad[position] = Reason.CHECKSUM
            else:
                reason = check(batch.memory.view(batch.size_class, slot), identity)
                if reason is not None:
                    bad[position] = reason
        return bad, unknown

    def object_name(self, batch: Batch, position: int) -> str:
        """Return the name of the remote store's object that a move reads or writes."""
        job = batch.work.job
        namespace = Namespace(self.fingerprint, job.epoch)
        return object_name(namespace, job.moves[position].key, self._part, self._geometry.shard_count)

    def objects(self, batch: Batch) -> list[RemoteObject]:
        """Return the remote store's objects that a batch reads or writes. One that is written from
        memory was sealed long ago; what comes from a drive was verified on the way."""
        written = batch.leg is Leg.WRITE and not batch.route.relays
        return [
            RemoteObject(
                self.object_name(batch, position),
                batch.memory.view(batch.size_class, slot),
                self._geometry.groups[batch.group].element_bytes,
                partial(_is_whole, identity) if written else None,
            )
            for position, slot, _, identity in self._each(batch)
        ]

    def warn_of_object(self, log: QuietLog, batch: Batch, position: int, what: str) -> None:
        """Log that an object is not used, as something of it is wrong."""
        name = self.object_name(batch, position)
        log.warn(f"object's {what}", f"wrong {what}: object {name} of the remote store is not used")

    def _each(self, batch: Batch) -> Iterator[tuple[int, int, Move, SlotIdentity]]:
        """Yield each position of a batch with its slot, its move, and the identity that its header
        must have."""
        job, geometry = batch.work.job, self._geometry
        namespace = Namespace(self.fingerprint, job.epoch)
        payload_bytes = geometry.groups[batch.group].payload_bytes
        for position, slot in zip(batch.positions, batch.slots, strict=True):
            move = job.moves[position]
            identity = SlotIdentity(
                namespace, move.key, move.generation, payload_bytes, self._part, geometry.shard_count
            )
            yield position, slot, move, identity


def _is_whole(identity: SlotIdentity, slot_view: memoryview) -> bool:
    return check_slot(slot_view, identity) is None
