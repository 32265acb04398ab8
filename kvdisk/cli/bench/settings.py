# SPDX-License-Identifier: Apache-2.0
"""What a run is asked to measure. Pure; loads nothing that is slow to load."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from kvdisk.cli.bench.cases import Flow, Layout
from kvdisk.cli.output import size
from kvdisk.errors import ConfigError
from kvdisk.geometry import ALIGNMENT

DEVICES = {"posix": ("kvdisk.device.posix", "PosixDevice"), "nixl": ("kvdisk.device.nixl", "NixlDevice")}
"""Devices that move bytes of host memory, by name: the module and class of each, which takes no arguments."""
LARGEST_TOTAL_BYTES = 16 << 30
_MOST_ROUNDS = 1000


class Part(Enum):
    """What a run measures."""

    PROBE = "probe"
    """What ``device: auto`` would choose, and why."""
    DRIVE = "drive"
    """CPU to NVMe and back, each device."""
    MOVER = "mover"
    """NVMe to CPU to GPU and back, through the mover; the GPU's blocks are in host memory."""
    GPU = "gpu"
    """GPU to CPU and back, where there is a GPU."""
    CPU = "cpu"
    """Processor time for a GiB, without and with verification."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of a run. ``depth``: None: as the mover has it. ``total_bytes``: one measurement moves about so much.

    ``devices``: by name; empty: all there are. ``cpu_bytes``: what each contender of the part ``cpu`` moves in all
    rounds together.
    """

    directory: Path
    parts: tuple[Part, ...]
    block_sizes: tuple[int, ...]
    flows: tuple[Flow, ...]
    layouts: tuple[Layout, ...]
    depth: int | None
    busy: bool
    total_bytes: int
    rounds: int
    devices: tuple[str, ...]
    cpu_bytes: int
    figures: bool

    def plain(self) -> dict[str, Any]:
        """Return them as plain values, for JSON."""
        return {
            "parts": [part.value for part in self.parts],
            "block_bytes": list(self.block_sizes),
            "flows": [flow.value for flow in self.flows],
            "layouts": [layout.value for layout in self.layouts],
            "depth": self.depth,
            "busy_thread": self.busy,
            "total_bytes": self.total_bytes,
            "rounds": self.rounds,
            "devices": list(self.devices),
            "cpu_bytes": self.cpu_bytes,
            "figures": self.figures,
        }


def check(settings: Settings) -> None:
    """Raise ConfigError, one sentence for people, where a run cannot be made so."""
    if not settings.directory.is_dir():
        raise ConfigError(f"{settings.directory} is not a directory.")
    if not 1 <= settings.rounds <= _MOST_ROUNDS:
        raise ConfigError(f"--rounds must be 1 to {_MOST_ROUNDS}, not {settings.rounds}.")
    if settings.depth is not None and not 1 <= settings.depth <= 4096:
        raise ConfigError(f"--depth must be 1 to 4096, not {settings.depth}.")
    for block_bytes in settings.block_sizes:
        if block_bytes % ALIGNMENT or not 2 * ALIGNMENT <= block_bytes <= 1 << 30:
            raise ConfigError(f"--block-size must be a multiple of 4 KiB, 8 KiB to 1 GiB, not {block_bytes} bytes.")
    largest = max(settings.block_sizes, default=0)
    if not 2 * largest <= settings.total_bytes <= LARGEST_TOTAL_BYTES:
        raise ConfigError(
            f"--total must be at least two blocks ({size(2 * largest)}) and at most {size(LARGEST_TOTAL_BYTES)},"
            f" not {size(settings.total_bytes)}."
        )
    for name in settings.devices:
        if name not in DEVICES:
            raise ConfigError(f"there is no device {name}: --device takes {', '.join(DEVICES)}.")
    if settings.depth is not None and settings.depth * largest > settings.total_bytes:
        raise ConfigError(f"--depth {settings.depth} is more than all the blocks of a measurement; see --total.")
