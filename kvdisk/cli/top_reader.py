# SPDX-License-Identifier: Apache-2.0
"""What ``kvdisk top`` knows of a store in use: its engines and drives now, and how fast things are.

An engine's rates are the difference of two of its FIGURES. Prints nothing, writes nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvdisk.device import paths
from kvdisk.device.control import HomeRecord
from kvdisk.device.drives import list_directories
from kvdisk.device.listing import HomeOwner, list_owners
from kvdisk.device.telemetry_file import TelemetryRecord, read_telemetry
from kvdisk.errors import CorruptRecord, DeviceError
from kvdisk.stats import TIERS

STALE_S = 3.0
"""An engine that has told nothing for so long has nothing to tell: it writes its figures when they change."""
HISTORY = 60
LOCK_WAIT_S = 2.0
READS = ("nvme_to_cpu", "nvme_to_gpu")
WRITES = ("cpu_to_nvme", "gpu_to_nvme")
FAILURES = (
    "failed_loads",
    "failed_stores",
    "failed_promotions",
    "verification_failures.header",
    "verification_failures.checksum",
    "io_errors.read",
    "io_errors.write",
    "deadline_misses",
    "dropped_records",
    "segment_failures",
    "drive_quarantines",
    "foreign_failures",
    "switched_off",
)


class Rise(NamedTuple):
    """What rose between two figures of an engine, in how many seconds. ``sums``: of histograms."""

    seconds: float
    totals: Mapping[str, float]
    sums: Mapping[str, float]

    def rate(self, series: str) -> float:
        """Return a counter's rise a second."""
        return self.totals.get(series, 0) / self.seconds

    def bytes_per_s(self, routes: Iterable[str]) -> float:
        """Return what was moved on some routes a second."""
        return sum(self.sums.get(f"transfer_bytes.{route}", 0) for route in routes) / self.seconds


@dataclass(frozen=True)
class EngineNow:
    """A home that an engine owns. ``rise``: None while it is not known yet; all zeros where the engine is idle.

    ``figures``: None where it has told nothing, or ``problem`` says why it cannot be read. ``age_s``: of the figures.
    ``reads`` and ``writes``: bytes a second from and to the drives over the last readings, the newest last.
    """

    home_id: str
    record: HomeRecord | None
    figures: TelemetryRecord | None
    problem: str | None
    age_s: float
    rise: Rise | None
    reads: tuple[float, ...] = ()
    writes: tuple[float, ...] = ()

    @property
    def idle(self) -> bool:
        """Whether it has told nothing new for a while."""
        return self.figures is not None and self.age_s >= STALE_S

    @property
    def model(self) -> str | None:
        """The model's name, as the engine says."""
        if self.figures is not None and self.figures.model:
            return self.figures.model
        name = self.record.description.get("model") if self.record is not None else None
        return str(name) if name is not None else None

    @property
    def failures(self) -> dict[str, int]:
        """What has failed since the engine started, by series, without the zeros."""
        totals = self.figures.totals if self.figures is not None else {}
        return {series: totals[series] for series in FAILURES if totals.get(series)}

    def fill(self, tier: str) -> tuple[float, float] | None:
        """Return a tier's used bytes and its capacity; None where it does not exist, or is not known."""
        gauges = self.figures.gauges if self.figures is not None else {}
        capacity_bytes = gauges.get(f"capacity_bytes.{tier}", 0)
        return (gauges.get(f"used_bytes.{tier}", 0), capacity_bytes) if capacity_bytes else None


@dataclass(frozen=True)
class DriveNow:
    """A directory of the store, over all engines that tell of it. Rates: bytes a second, None while not known."""

    path: str
    read_bytes: int
    written_bytes: int
    read_per_s: float | None
    written_per_s: float | None
    engines: int
    quarantined: int


@dataclass(frozen=True)
class Orphan:
    """A home that nobody owns."""

    home_id: str
    record: HomeRecord | None


@dataclass(frozen=True)
class Frame:
    """A store at one moment (seconds since the Unix epoch). ``engines``: by the time of their start."""

    path: Path
    time_s: float
    engines: tuple[EngineNow, ...]
    drives: tuple[DriveNow, ...]
    orphans: tuple[Orphan, ...]

    @property
    def totals(self) -> dict[str, int]:
        """The counters of all engines, each since its start."""
        found: dict[str, int] = {}
        for engine in self.engines:
            for series, value in engine.figures.totals.items() if engine.figures is not None else ():
                found[series] = found.get(series, 0) + value
        return found

    @property
    def problems(self) -> list[str]:
        """What of the store cannot be shown, a sentence each."""
        found = [f"home {each.home_id}: {each.problem}" for each in self.engines if each.problem]
        return found + [f"home {each.home_id}: HOME cannot be read" for each in self.orphans if each.record is None]


def hit_rate(totals: Mapping[str, float], tier: str | None = None) -> float | None:
    """Return the share of the tokens asked of a tier, or of all, that were hits; None where nothing was asked."""
    if tier is None:
        asked = totals.get("lookup_tokens", 0)
        hit = sum(totals.get(f"hit_tokens.{each}", 0) for each in TIERS)
    else:
        hit = totals.get(f"hit_tokens.{tier}", 0)
        asked = hit + totals.get(f"missed_tokens.{tier}", 0)
    return min(1.0, hit / asked) if asked else None


@dataclass
class _Watched:
    """An engine over time. ``last``: the figures read last; ``rise``: against those before."""

    last: TelemetryRecord
    rise: Rise | None = None
    drive_rises: dict[str, tuple[float, float]] = field(default_factory=dict)
    reads: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    writes: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))


class TopReader:
    """Reads a store again and again. ``clock``: seconds since the Unix epoch."""

    def __init__(self, directories: Sequence[Path], clock: Callable[[], float] = time.time) -> None:
        self._directories = list_directories(list(directories))
        self._clock = clock
        self._watched: dict[str, _Watched] = {}

    def read(self) -> Frame:
        """Return the store as it is now. Raises as ``Store.open``, and StoreLocked."""
        owners = list_owners(self._directories, LOCK_WAIT_S)
        now = self._clock()
        engines = [self._engine(owner, now) for owner in owners if owner.alive]
        alive = {engine.home_id for engine in engines}
        self._watched = {home_id: each for home_id, each in self._watched.items() if home_id in alive}
        engines.sort(key=lambda engine: (engine.figures.started_s if engine.figures else 0.0, engine.home_id))
        orphans = [Orphan(owner.id, owner.record) for owner in owners if not owner.alive]
        orphans.sort(key=lambda orphan: -(orphan.record.last_use_s if orphan.record else 0))
        return Frame(self._directories[0], now, tuple(engines), self._drives(engines), tuple(orphans))

    def _engine(self, owner: HomeOwner, now: float) -> EngineNow:
        figures, problem = None, None
        try:
            with paths.device_errors(f"reading the figures of home {owner.id}"):
                figures = read_telemetry(owner.path)
        except (CorruptRecord, DeviceError) as error:
            problem = str(error).replace(f"{owner.path}/", "")
        if figures is None:
            self._watched.pop(owner.id, None)
            return EngineNow(owner.id, owner.record, None, problem, 0.0, None)
        age_s = max(0.0, now - figures.time_s)
        watched = self._watch(owner.id, figures, idle=age_s >= STALE_S)
        return EngineNow(
            owner.id,
            owner.record,
            figures,
            None,
            age_s,
            watched.rise,
            tuple(watched.reads),
            tuple(watched.writes),
        )

    def _watch(self, home_id: str, figures: TelemetryRecord, *, idle: bool) -> _Watched:
        """Compare an engine's figures with those before."""
        watched = self._watched.get(home_id)
        if watched is None or (watched.last.pid, watched.last.started_s) != (figures.pid, figures.started_s):
            watched = self._watched[home_id] = _Watched(figures)
        seconds = figures.time_s - watched.last.time_s
        if seconds > 0:
            before, watched.last = watched.last, figures
            watched.rise = _rise(before, figures, seconds)
            watched.drive_rises = _drive_rises(before, figures, seconds)
        elif idle:
            watched.rise, watched.drive_rises = Rise(1.0, {}, {}), {drive.path: (0.0, 0.0) for drive in figures.drives}
        if watched.rise is not None:
            watched.reads.append(watched.rise.bytes_per_s(READS))
            watched.writes.append(watched.rise.bytes_per_s(WRITES))
        return watched

    def _drives(self, engines: Iterable[EngineNow]) -> tuple[DriveNow, ...]:
        found: dict[str, DriveNow] = {}
        for engine in engines:
            for drive in engine.figures.drives if engine.figures is not None else ():
                rises = self._watched[engine.home_id].drive_rises.get(drive.path)
                mine = found.get(drive.path, DriveNow(drive.path, 0, 0, None, None, 0, 0))
                found[drive.path] = DriveNow(
                    drive.path,
                    mine.read_bytes + drive.read_bytes,
                    mine.written_bytes + drive.written_bytes,
                    mine.read_per_s if rises is None else (mine.read_per_s or 0.0) + rises[0],
                    mine.written_per_s if rises is None else (mine.written_per_s or 0.0) + rises[1],
                    mine.engines + 1,
                    mine.quarantined + drive.quarantined,
                )
        return tuple(found[path] for path in sorted(found))


def _rise(before: TelemetryRecord, after: TelemetryRecord, seconds: float) -> Rise:
    """Return the differences; what fell was damaged on its way, and counts as no rise."""
    totals = {series: max(0, value - before.totals.get(series, 0)) for series, value in after.totals.items()}
    sums = {series: max(0.0, total - before.sums.get(series, (0, 0.0))[1]) for series, (_, total) in after.sums.items()}
    return Rise(seconds, totals, sums)


def _drive_rises(before: TelemetryRecord, after: TelemetryRecord, seconds: float) -> dict[str, tuple[float, float]]:
    was = {drive.path: drive for drive in before.drives}
    return {
        drive.path: (
            max(0, drive.read_bytes - was[drive.path].read_bytes) / seconds,
            max(0, drive.written_bytes - was[drive.path].written_bytes) / seconds,
        )
        for drive in after.drives
        if drive.path in was
    }
