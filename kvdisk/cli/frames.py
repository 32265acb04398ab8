# SPDX-License-Identifier: Apache-2.0
"""A store in use, its engines and drives now, and how fast things are: ``Frame``, which is also
what ``kvdisk top --json`` prints. Reads only.

An engine's rates are the difference of two readings of its FIGURES. The shape of the JSON changes
only with ``json_version``. Bytes are those of all ranks. ``null`` is what is not known, or where
nothing was asked. Rates (``*_per_s``) are those of the last ``seconds``; 0 where the engine is
idle. Shares are between 0 and 1. Times (``*_s``) are seconds, those of moments since the Unix
epoch.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvdisk.blocks import Tier
from kvdisk.cli.output import engine_store, miss_counts
from kvdisk.device import paths
from kvdisk.device.drives import list_directories
from kvdisk.device.listing import HomeOwner, list_owners
from kvdisk.device.telemetry_file import DriveTelemetry, TelemetryRecord, read_telemetry
from kvdisk.errors import CorruptRecord, DeviceError
from kvdisk.stats import FAILURES, HARMLESS, JOBS, ROUTES, SOURCES, TIER_WORDS, TIERS, Miss

JSON_VERSION = 3
STALE_S = 3.0
"""Seconds without new figures after which an engine is idle: it writes them when they change."""
HISTORY = 12
LOCK_WAIT_S = 2.0
NVME = Tier.NVME.name.lower()
READS = tuple(route for route in ROUTES if route.startswith(f"{NVME}_to_"))
WRITES = tuple(route for route in ROUTES if route.endswith(f"_to_{NVME}"))
WAITING = {
    "backlog_blocks": "blocks to write",
    "uncommitted_changes": "changes to commit",
    "awaiting_commit_blocks": "slots to free",
}
"""Gauges of what waits, and their names in words."""
_WHY_NOT = {
    "reuse": "not used often enough",
    "room": "no room, or the drive was behind",
    "budget": "the day's bytes were spent",
    "share": "the tenant had its share",
}
DEPARTURES: Mapping[str, str] = {
    **{f"evicted_blocks.{tier}": f"evicted from {TIER_WORDS[tier]}" for tier in TIERS},
    **{f"share_evicted_blocks.{tier}": f"of {TIER_WORDS[tier]}'s: {_WHY_NOT['share']}" for tier in TIERS},
    **{f"evicted_unwritten.{why}": f"of CPU's, and not on NVMe: {said}" for why, said in _WHY_NOT.items()},
    **{f"expired_blocks.{tier}": f"dropped from {TIER_WORDS[tier]}: older than max_age_s" for tier in TIERS},
    **{f"refused_blocks.{why}": f"not taken: {said}" for why, said in _WHY_NOT.items()},
}
"""Series that count blocks that left a tier or were not taken, and why, in words. What begins with
"of" is a part of what was evicted."""


@dataclass(frozen=True)
class TierFigures:
    """A tier. ``hit_rate``: since the start. ``hit_rate_now``: in the last ``seconds``."""

    used_bytes: int
    capacity_bytes: int
    hit_rate: float | None
    hit_rate_now: float | None
    evicted_blocks_per_s: float | None


@dataclass(frozen=True)
class RemoteFigures:
    """The remote store, as one engine uses it. ``sent_blocks``, ``rejects``: since the start.
    ``paused``: it did not answer, and is left alone for now."""

    hit_rate: float | None
    hit_rate_now: float | None
    sent_blocks: int
    rejects: int
    paused: bool


@dataclass(frozen=True)
class Engine:
    """An engine store in use. ``figures_s``: when its figures were true; null where there are none
    yet.

    ``reset_s``: when it last began to serve nothing that was stored before. ``problem``: why its
    figures cannot be read. ``seconds``: the time over which its rates are. ``tiers``: by name, such
    as "cpu". ``remote``: null where there is none. ``bytes_per_s``: by route, such as "gpu_to_cpu".
    ``waiting``: ``jobs`` by kind, the gauges of ``WAITING``, and ``write_budget_bytes`` (null:
    writes have no such bound). ``failures``: by kind, since its start, without those that are 0.
    ``harmless``: failures that a healthy machine has too. ``reads``, ``writes``: bytes per second
    from and to NVMe at the last looks, the newest last.
    """

    engine_store: str
    model: str | None
    problem: str | None = None
    pid: int | None = None
    host: str | None = None
    ranks: int | None = None
    data_parallel_rank: int | None = None
    started_s: float | None = None
    reset_s: float | None = None
    figures_s: float | None = None
    idle: bool = False
    seconds: float | None = None
    tiers: Mapping[str, TierFigures] = field(default_factory=dict)
    remote: RemoteFigures | None = None
    bytes_per_s: Mapping[str, float] | None = None
    waiting: Mapping[str, Any] | None = None
    failures: Mapping[str, int] = field(default_factory=dict)
    harmless: Mapping[str, int] = field(default_factory=dict)
    reads: tuple[float, ...] = ()
    writes: tuple[float, ...] = ()

    def flow(self, routes: Iterable[str]) -> float | None:
        """Return the bytes per second on these routes; None where they are not known."""
        return None if self.bytes_per_s is None else sum(self.bytes_per_s[route] for route in routes)


@dataclass(frozen=True)
class Drive:
    """A directory of the store. ``quarantined``: the number of engines that have it in
    quarantine."""

    path: str
    engines: int
    read_bytes: int
    written_bytes: int
    read_bytes_per_s: float | None
    written_bytes_per_s: float | None
    quarantined: int


@dataclass(frozen=True)
class StoppedEngine:
    """An engine store that a stopped engine has left."""

    engine_store: str
    model: str | None
    last_use_s: int | None


@dataclass(frozen=True)
class Totals:
    """Sums over all engines. ``lookup_tokens`` (asked of the tiers), ``hit_rate`` (of these),
    ``saved_seconds``, ``misses`` (requests, by reason, see docs/METRICS.md): since the engines'
    starts. Rates: from and to NVMe. ``departures``: blocks that left a tier or were not taken since
    the engines' starts, by series of ``DEPARTURES``, without those that are 0."""

    engines: int
    stopped: int
    used_bytes: Mapping[str, int]
    capacity_bytes: Mapping[str, int]
    lookup_tokens: int
    hit_rate: float | None
    saved_seconds: int
    misses: Mapping[Miss, int]
    read_bytes_per_s: float | None
    written_bytes_per_s: float | None
    departures: Mapping[str, int]


@dataclass(frozen=True)
class Frame:
    """A store at one moment. ``engines``: by their start. ``problems``: what cannot be shown, in
    sentences."""

    time_s: float
    store: Mapping[str, Path]
    problems: tuple[str, ...]
    totals: Totals
    engines: tuple[Engine, ...]
    drives: tuple[Drive, ...]
    stopped: tuple[StoppedEngine, ...]


# -- reading -----------------------------------------------------------------------------------


def _counted(figures: TelemetryRecord) -> Counter[str]:
    """Return all that only rises: counters by series, bytes by route, and bytes by drive."""
    counted = Counter(figures.totals)
    for route in ROUTES:
        counted[route] = int(figures.sums.get(f"transfer_bytes.{route}", (0, 0.0))[1])
    for drive in figures.drives:
        counted[f"read {drive.path}"], counted[f"written {drive.path}"] = drive.read_bytes, drive.written_bytes
    return counted


def hit_rate(counts: Mapping[str, float], tier: str) -> float | None:
    """Return the share of the tokens asked of a tier that were hits; None where none were asked."""
    hit = counts.get(f"hit_tokens.{tier}", 0)
    asked = hit + counts.get(f"missed_tokens.{tier}", 0)
    return min(1.0, hit / asked) if asked else None


class _Watched:
    """An engine over time. ``last``: the figures read last.

    ``per_s``: how fast each of ``_counted`` rose in the ``seconds`` before them; None where that is
    not known yet. A value that fell was damaged, and counts as no rise.
    """

    def __init__(self, first: TelemetryRecord) -> None:
        self.last = first
        self.seconds: float | None = None
        self.per_s: dict[str, float] | None = None
        self.reads, self.writes = deque[float](maxlen=HISTORY), deque[float](maxlen=HISTORY)

    def look(self, figures: TelemetryRecord, *, idle: bool) -> Counter[str]:
        """Compare the engine's figures with those before; return what rose."""
        seconds, rose = figures.time_s - self.last.time_s, Counter[str]()
        if seconds > 0:
            rose = _counted(figures) - _counted(self.last)
            self.per_s = {series: count / seconds for series, count in rose.items()}
            self.last, self.seconds = figures, seconds
        elif idle:
            self.per_s, self.seconds = {}, 1.0
        for history, routes in ((self.reads, READS), (self.writes, WRITES)):
            if (rate := self.rate(*routes)) is not None:
                history.append(rate)
        return rose

    def rate(self, *series: str) -> float | None:
        """Return what these series rose by in a second, together; None where that is not known
        yet."""
        return None if self.per_s is None else sum(self.per_s.get(one, 0.0) for one in series)

    def tier(self, name: str) -> TierFigures | None:
        """Return a tier's figures; None where the engine does not have the tier."""
        gauges, capacity_bytes = self.last.gauges, self.last.gauges.get(f"capacity_bytes.{name}")
        if not capacity_bytes:
            return None
        return TierFigures(
            int(gauges.get(f"used_bytes.{name}", 0)),
            int(capacity_bytes),
            hit_rate=hit_rate(self.last.totals, name),
            hit_rate_now=hit_rate(self.per_s or {}, name),
            evicted_blocks_per_s=self.rate(f"evicted_blocks.{name}"),
        )

    def remote(self) -> RemoteFigures | None:
        """Return the remote store's figures; None where the engine has none."""
        totals, paused = self.last.totals, self.last.gauges.get("remote_paused")
        if paused is None:
            return None
        rates = hit_rate(totals, Tier.REMOTE.label), hit_rate(self.per_s or {}, Tier.REMOTE.label)
        return RemoteFigures(*rates, totals.get("sent_blocks", 0), totals.get("remote_rejects", 0), bool(paused))


class FrameReader:
    """Reads a store again and again. ``clock``: returns seconds since the Unix epoch. One thread at
    a time makes all calls. ``risen``: by how much counters, bytes of routes (``gpu_to_cpu``) and of
    drives rose in all engines together since the first look at each."""

    def __init__(self, directories: Sequence[Path], clock: Callable[[], float] = time.time) -> None:
        self._directories = list_directories(list(directories))
        self._clock = clock
        self._watched: dict[str, _Watched] = {}
        self.risen: Counter[str] = Counter()

    def read(self) -> Frame:
        """Return the store as it is now. Raises as ``Store.open``, and StoreLocked."""
        listed = list_owners(self._directories, LOCK_WAIT_S)
        owners = [owner for owner in listed if owner.record is None or not owner.record.guest]  # those have no figures
        now_s = self._clock()
        engines = [self._engine(owner, now_s) for owner in owners if owner.alive]
        engines.sort(key=lambda engine: (engine.started_s or 0.0, engine.engine_store))
        known = {engine.engine_store for engine in engines if engine.figures_s is not None}
        self._watched = {home_id: each for home_id, each in self._watched.items() if home_id in known}
        stopped = [
            StoppedEngine(owner.id, _model_of(owner), owner.record.last_use_s if owner.record else None)
            for owner in owners
            if not owner.alive
        ]
        stopped.sort(key=lambda one: -(one.last_use_s or 0))
        problems = [f"{engine_store(each.engine_store)}: {each.problem}" for each in engines if each.problem]
        problems += [
            f"{engine_store(each.engine_store)}: HOME cannot be read" for each in stopped if each.last_use_s is None
        ]
        drives: dict[str, list[tuple[_Watched, DriveTelemetry]]] = {}
        for watched in self._watched.values():
            for drive in watched.last.drives:
                drives.setdefault(drive.path, []).append((watched, drive))
        return Frame(
            round(now_s, 3),
            {"path": self._directories[0]},
            tuple(problems),
            self._totals(engines, len(stopped)),
            tuple(engines),
            tuple(_drive(path, users) for path, users in sorted(drives.items())),
            tuple(stopped),
        )

    def _engine(self, owner: HomeOwner, now_s: float) -> Engine:
        figures, problem = None, None
        try:
            with paths.device_errors(f"reading the figures of engine store {owner.id}"):
                figures = read_telemetry(owner.path)
        except (CorruptRecord, DeviceError) as error:
            problem = str(error).replace(f"{owner.path}/", "")
        if figures is None:
            return Engine(owner.id, _model_of(owner), problem)
        idle = abs(now_s - figures.time_s) >= STALE_S  # of a clock that was ahead: nobody goes on writing
        watched = self._watched.get(owner.id)
        if watched is None or (watched.last.pid, watched.last.started_s) != (figures.pid, figures.started_s):
            watched = self._watched[owner.id] = _Watched(figures)
        self.risen.update(watched.look(figures, idle=idle))
        gauges = figures.gauges
        return Engine(
            engine_store=owner.id,
            model=figures.model or _model_of(owner),
            pid=figures.pid,
            host=figures.host,
            ranks=figures.ranks,
            data_parallel_rank=figures.data_parallel_rank,
            started_s=figures.started_s,
            reset_s=figures.reset_s,
            figures_s=figures.time_s,
            idle=idle,
            seconds=watched.seconds,
            tiers={name: tier for name in TIERS if (tier := watched.tier(name))},
            remote=watched.remote(),
            bytes_per_s=None if watched.per_s is None else {route: watched.per_s.get(route, 0.0) for route in ROUTES},
            waiting={"jobs": {job: int(gauges.get(f"queued_jobs.{job}", 0)) for job in (*JOBS, "files")}}
            | {name: int(gauges.get(name, 0)) for name in WAITING}
            | {"write_budget_bytes": None if (left := gauges.get("write_budget_bytes")) is None else int(left)},
            failures={series: figures.totals[series] for series in FAILURES if figures.totals.get(series)},
            harmless={series: figures.totals[series] for series in HARMLESS if figures.totals.get(series)},
            reads=tuple(watched.reads),
            writes=tuple(watched.writes),
        )

    def _totals(self, engines: Sequence[Engine], stopped: int) -> Totals:
        counted = Counter[str]()
        for watched in self._watched.values():
            counted.update(watched.last.totals)
        asked, hit = counted["lookup_tokens"], sum(counted[f"hit_tokens.{tier}"] for tier in SOURCES)
        tiers = {name: [engine.tiers[name] for engine in engines if name in engine.tiers] for name in TIERS}
        return Totals(
            engines=len(engines),
            stopped=stopped,
            used_bytes={name: sum(tier.used_bytes for tier in found) for name, found in tiers.items()},
            capacity_bytes={name: sum(tier.capacity_bytes for tier in found) for name, found in tiers.items()},
            lookup_tokens=asked,
            hit_rate=min(1.0, hit / asked) if asked else None,
            saved_seconds=counted["saved_seconds"],
            misses=miss_counts(counted),
            read_bytes_per_s=_sum_known(engine.flow(READS) for engine in engines),
            written_bytes_per_s=_sum_known(engine.flow(WRITES) for engine in engines),
            departures={series: counted[series] for series in DEPARTURES if counted[series]},
        )


def _drive(path: str, users: Sequence[tuple[_Watched, DriveTelemetry]]) -> Drive:
    """Return a drive with the sums over the engines that use it. Its rates are those of the engines
    whose rates are known."""
    return Drive(
        path,
        engines=len(users),
        read_bytes=sum(drive.read_bytes for _, drive in users),
        written_bytes=sum(drive.written_bytes for _, drive in users),
        read_bytes_per_s=_sum_known(watched.rate(f"read {path}") for watched, _ in users),
        written_bytes_per_s=_sum_known(watched.rate(f"written {path}") for watched, _ in users),
        quarantined=sum(drive.quarantined for _, drive in users),
    )


def _sum_known(rates: Iterable[float | None]) -> float | None:
    """Return the sum of the rates that are known; None where none is."""
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known else None


def _model_of(owner: HomeOwner) -> str | None:
    name = owner.record and owner.record.description.get("model")
    return None if name is None else str(name)
