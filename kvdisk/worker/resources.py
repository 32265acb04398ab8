# SPDX-License-Identifier: Apache-2.0
"""The memory, device, files and copier of one rank, as ``assembly`` hands them to its mover."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvdisk.blocks import Medium, Tier
from kvdisk.device.base import Device
from kvdisk.geometry import Geometry
from kvdisk.remote.base import Objects
from kvdisk.worker.arena import Arena, SlotMemory
from kvdisk.worker.routes import Memory, Staging

if TYPE_CHECKING:
    from kvdisk.worker.copier_base import Copier
    from kvdisk.worker.direct import Direct
    from kvdisk.worker.files import SegmentFiles


@dataclass(frozen=True, slots=True, eq=False)
class Resources:
    """The memory, device, files and copier that a mover works with.

    ``arenas``: one for each tier of the MEMORY medium that there is. ``staging``: has at least one
    slot of each size class where there is an NVMe tier. ``direct``: the direct way between drive
    and GPU, where ``device`` has one. The caller owns all memory, and closes it after the mover.
    The mover owns and closes ``device``, ``files`` and ``remote``, the remote store.
    ``checksum_threads``: threads that seal and verify slots in host memory, several batches at
    once; 0: the mover's own thread does it.
    """

    geometry: Geometry
    rank: int
    arenas: Mapping[Tier, Arena]
    staging: Arena
    copier: Copier
    device: Device
    files: SegmentFiles
    direct: Direct | None = None
    remote: Objects | None = None
    checksum_threads: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.geometry.rank_count
        assert all(tier.medium is Medium.MEMORY for tier in self.arenas)
        assert all(slots.slot_sizes == self.geometry.slot_sizes for slots in self.memories.values())

    @property
    def memories(self) -> dict[Memory, SlotMemory]:
        """All slots that the device moves, by where they are."""
        found: dict[Memory, SlotMemory] = {Staging.HOST: self.staging, **dict(self.arenas.items())}
        if self.direct is not None:
            found[Staging.GPU] = self.direct.staging
        return found
