# SPDX-License-Identifier: Apache-2.0
"""What is measured, and what a measurement gave. Pure; no I/O."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from kvdisk.errors import KvdiskError


class Unmeasured(KvdiskError):
    """A contender cannot be measured here; the message says why, in a sentence."""


class Flow(Enum):
    """Which way bytes go. MIXED: half each, taken in turn."""

    READ = "read"
    WRITE = "write"
    MIXED = "mixed"


class Layout(Enum):
    """Where on the drive the blocks lie that are moved one after the other."""

    CONTIGUOUS = "contiguous"
    SCATTERED = "scattered"


class Role(Enum):
    """What a contender is there for."""

    LIMIT = "limit"
    """What the hardware gives to a program that does nothing else."""
    PEER = "peer"
    OURS = "ours"


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to measure.

    ``depth``: blocks under way at once. ``total_bytes``: moved in one pass, each block once; a multiple of
    ``block_bytes``. ``busy``: with a Python thread in the process that never waits. ``passes``: of one measurement.
    ``route``: what the bytes go through: ``drive``, ``mover``, ``gpu``.
    """

    flow: Flow
    block_bytes: int
    depth: int
    layout: Layout
    total_bytes: int
    busy: bool = False
    passes: int = 1
    route: str = "drive"

    def __post_init__(self) -> None:
        assert self.block_bytes > 0 and self.depth > 0 and self.passes > 0
        assert self.total_bytes > 0 and self.total_bytes % self.block_bytes == 0

    @property
    def block_count(self) -> int:
        """Blocks of one pass."""
        return self.total_bytes // self.block_bytes

    def plain(self) -> dict[str, Any]:
        """Return it as plain values, for JSON."""
        return {
            "route": self.route,
            "flow": self.flow.value,
            "block_bytes": self.block_bytes,
            "depth": self.depth,
            "layout": self.layout.value,
            "busy_thread": self.busy,
            "bytes": self.total_bytes * self.passes,
        }


class Sample(NamedTuple):
    """One measurement: wall time, and the processor time of this process or None where another one moved the bytes."""

    seconds: float
    cpu_seconds: float | None = None


class Contender(NamedTuple):
    """One of those that are measured in turn.

    ``measure(passes)`` moves all bytes of its case so many times and returns what that took; what it has to prepare
    is not in there. It raises KvdiskError or OSError where it cannot. ``in_process``: the busy thread, where the case
    has one, runs beside it.
    """

    name: str
    role: Role
    measure: Callable[[int], Sample]
    in_process: bool = True


class Group(NamedTuple):
    """Contenders that are measured together, round by round.

    ``make(stack)`` builds them just before; what they need until the last round is entered into the stack.
    """

    case: Case
    make: Callable[[ExitStack], Sequence[Contender]]


@dataclass(slots=True)
class Series:
    """The samples of one contender, one for each round."""

    name: str
    role: Role
    moved_bytes: int
    samples: list[Sample] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        """Bytes a second, by round."""
        return [self.moved_bytes / sample.seconds for sample in self.samples]

    @property
    def rate(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.rates)

    @property
    def cpu_rates(self) -> list[float]:
        """Seconds of processor time for a GiB, by round; empty where it is not known."""
        gib = self.moved_bytes / 2**30
        return [sample.cpu_seconds / gib for sample in self.samples if sample.cpu_seconds is not None]


@dataclass(slots=True)
class GroupResult:
    """What the rounds of a group gave. ``dropped``: why a contender was left out, by name."""

    case: Case
    series: list[Series]
    dropped: dict[str, str] = field(default_factory=dict)

    def best(self, role: Role) -> Series | None:
        """Return the series of that role with the highest median, if there is one."""
        return max((one for one in self.series if one.role is role), key=lambda one: one.rate, default=None)

    def named(self, name: str) -> Series | None:
        """Return the series of a contender, if it was measured."""
        return next((one for one in self.series if one.name == name), None)


def ratio(mine: Series, other: Series) -> float:
    """Return the median over the rounds of ``mine`` to ``other`` in the same round: drift of the drive cancels out."""
    return statistics.median(one / two for one, two in zip(mine.rates, other.rates, strict=True))


def cpu_ratio(mine: Series, other: Series) -> float:
    """As ``ratio``, of the processor time for a GiB."""
    return statistics.median(one / two for one, two in zip(mine.cpu_rates, other.cpu_rates, strict=True))
