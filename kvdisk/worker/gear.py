# SPDX-License-Identifier: Apache-2.0
"""What a rank moves bytes with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvdisk.device.base import Buffer, Device
from kvdisk.geometry import Geometry
from kvdisk.worker.arena import Arena
from kvdisk.worker.files import SegmentFiles

if TYPE_CHECKING:
    from kvdisk.worker.copier import Copier
    from kvdisk.worker.direct import Direct


@dataclass(frozen=True, slots=True, eq=False)
class Gear:
    """``Mover`` describes each."""

    geometry: Geometry
    rank: int
    arena: Arena | None
    staging: Arena
    copier: Copier
    device: Device
    files: SegmentFiles
    direct: Direct | None = None

    @property
    def memories(self) -> list[Buffer]:
        """All memory that the device moves."""
        found = [arena.memory for arena in (self.staging, self.arena) if arena is not None]
        return found if self.direct is None else [*found, self.direct.staging.memory]
