# SPDX-License-Identifier: Apache-2.0
"""What a run of ``kvdisk bench`` is asked to measure, and what each measurement gave. Pure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from kvdisk.cli.output import size
from kvdisk.errors import ConfigError
from kvdisk.geometry import ALIGNMENT

LARGEST_TOTAL_BYTES = 16 << 30
_MOST_ROUNDS = 1000


class Part(Enum):
    """What a run measures."""

    DRIVE = "drive"
    """Each device alone on the drive, and which one ``device: auto`` would choose."""
    MOVER = "mover"
    """Stores and loads between GPU and NVMe through the mover, over each device."""
    MEMORY = "memory"
    """Stores and loads between GPU and the CPU tier through the mover."""


class Flow(Enum):
    """Which way the bytes go: towards the GPU, or from it."""

    LOAD = "load"
    STORE = "store"


@dataclass(frozen=True)
class Settings:
    """The options of a run. One measurement through the mover moves about ``total_bytes``."""

    directory: Path
    parts: tuple[Part, ...]
    block_sizes: tuple[int, ...]
    total_bytes: int
    rounds: int

    def check(self) -> None:
        """Raise ConfigError, in one sentence, where a run cannot be made so."""
        if not self.directory.is_dir():
            raise ConfigError(f"{self.directory} is not a directory.")
        if not 1 <= self.rounds <= _MOST_ROUNDS:
            raise ConfigError(f"--rounds must be 1 to {_MOST_ROUNDS}, not {self.rounds}.")
        for block_bytes in self.block_sizes:
            if block_bytes % ALIGNMENT or not 2 * ALIGNMENT <= block_bytes <= 1 << 30:
                raise ConfigError(f"--block-size must be a multiple of 4 KiB, 8 KiB to 1 GiB, not {block_bytes} bytes.")
        largest = max(self.block_sizes)
        if not 2 * largest <= self.total_bytes <= LARGEST_TOTAL_BYTES:
            raise ConfigError(
                f"--total must be at least two blocks ({size(2 * largest)}) and at most {size(LARGEST_TOTAL_BYTES)},"
                f" not {size(self.total_bytes)}."
            )


@dataclass(frozen=True)
class Case:
    """One thing to measure through the mover: so many blocks, each moved once."""

    part: Part
    flow: Flow
    block_bytes: int
    block_count: int

    @property
    def total_bytes(self) -> int:
        """Of one measurement."""
        return self.block_bytes * self.block_count

    @property
    def words(self) -> str:
        """The case in words: ``load 64 KiB``."""
        return f"{self.flow.value} {short_size(self.block_bytes)}"


@dataclass(frozen=True)
class Sample:
    """One measurement: wall time, and processor time of the whole process."""

    seconds: float
    cpu_seconds: float


@dataclass(frozen=True)
class Speed:
    """MB/s over the rounds."""

    median: float
    lowest: float
    highest: float


@dataclass
class Result:
    """What the rounds of one contender, a device or the CPU tier, gave."""

    case: Case
    name: str
    samples: list[Sample]
    mb_per_s: Speed = field(init=False)
    cpu_s_per_gib: float = field(init=False)

    def __post_init__(self) -> None:
        rates = [self.case.total_bytes / 1e6 / sample.seconds for sample in self.samples]
        gib = self.case.total_bytes / 2**30
        self.mb_per_s = Speed(statistics.median(rates), min(rates), max(rates))
        self.cpu_s_per_gib = statistics.median(sample.cpu_seconds / gib for sample in self.samples)


def short_size(count_bytes: int) -> str:
    """Return a size without decimals where it has none: ``64 KiB``."""
    return size(count_bytes).replace(".0 ", " ")
