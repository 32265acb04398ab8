# SPDX-License-Identifier: Apache-2.0
"""A week of requests in an hour, against a manager with its real index: looks for what grows.

    python tools/run_week.py --dir DIR --requests 1000000

Requests of all families of ``make_traces``, and a few of a million tokens, come to a manager with a
CPU tier and an NVMe tier as they would in seven days; the clock is theirs. ``week_engine`` says
what is real. On the way transfers fail and are late, the drive goes off and comes back, requests
are aborted and preempted, weights change, the index's process is killed, and on the first day, or
on all of them (``--lives``), the manager ends well or is killed, and another opens the store.

Each virtual hour the memory of the process and of the index's, the index's file, every container of
the manager and the processor time of its calls become a line of JSON in ``--out``. At the end the
last day must be like the second one, but for the times, which are only printed. Ends with 1, and
names it, where something has grown, or the store is not sound.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from heapq import merge
from pathlib import Path
from typing import Any

import numpy as np
from figures import Record, add_json_option
from machine import Machine
from make_traces import FAMILIES, Writer, make_events
from rich.console import Console
from rich.table import Table
from week_engine import ROTTEN, Asked, Drive, Engine, EngineSettings, Faults
from week_sizes import Series, lmdb_sizes, module_sizes, open_files, resident_bytes, series_of, sizes_of

from kvdisk.cli.verify import verify_store
from kvdisk.config import Config
from kvdisk.geometry import Geometry, GroupGeometry, segment_file_bytes
from kvdisk.index.lmdb_index import map_bytes_for
from kvdisk.index.map_size import planned_bytes
from kvdisk.manager import bounds, step_work
from kvdisk.manager.kv_hints import ACTIONS
from kvdisk.manager.requests import NO_LIMITS, KVHint, RequestLimits
from kvdisk.request_trace import RequestTrace

DAYS, HOURS, HOUR_S = 7, 24, 3600.0
LONGEST_TOKENS = 1_000_000
PAGE_BYTES = 4096
"""Of an index's file."""
LONGEST_STEP_S = 1.0
LEAST_CHUNK = 200
"""Requests that are made at once, at least."""
STEP_BOUNDS = (
    (step_work, "SPARE_BLOCKS"),
    (bounds, "MOVES"),
    (bounds, "TAILS_SKIPPED"),
)
"""Bounds of a step, in blocks: with larger blocks they are lower, so that a prompt of as many
tokens crosses them as it would with blocks of 16."""
_LONG = "long"


@dataclass(frozen=True)
class WeekSettings:
    """``requests``: in all. ``block_tokens``: of a block. ``nvme_blocks``, ``cpu_blocks``: room of
    the tiers. ``lives``: whether the manager is started anew on every day, or on the first and at
    the end. ``sample_hours``: hours from one sample to the next. ``traces``: whether
    the requests are written to a ``trace_file``."""

    requests: int
    block_tokens: int = 512
    nvme_blocks: int = 200_000
    cpu_blocks: int = 20_000
    lives: bool = False
    seed: int = 1
    days: int = DAYS
    sample_hours: int = 1
    traces: bool = True

    @property
    def geometry(self) -> Geometry:
        """One rank, one group; a block's payload is as small as it may be."""
        return Geometry((GroupGeometry(0, self.block_tokens, 64),), 1, self.block_tokens)

    def config(self, directory: Path) -> Config:
        """Return the configuration, with the defaults for all that decides what is kept."""
        slot_bytes = self.geometry.slot_sizes[0]
        room = cap = slot_bytes * self.nvme_blocks * 17 // 16
        for _ in range(8):  # the index is planned for as many blocks as the whole cap would hold
            cap = room + map_bytes_for(cap // slot_bytes)
        values: dict[str, Any] = {
            "store_dirs": str(directory / "store"),
            "nvme_bytes": cap,
            "segment_bytes": segment_file_bytes(slot_bytes, max(64, self.nvme_blocks // 40)),
            "cpu_bytes": slot_bytes * self.cpu_blocks,
            "index_commit_s": 0.01,
            "min_load_tokens": 0,
            "device": "posix",
        }
        if self.traces:
            values["trace_file"] = str(directory / "trace.jsonl")
        return Config.from_mapping(values)


# -- what is asked -----------------------------------------------------------------------------


class _Hashes(dict[int, bytes]):
    """The hash of each block of a chunk by its number. In the traces of ``make_traces`` a number is
    always behind the same ones."""

    def __init__(self, name: str) -> None:
        self._name = name.encode()

    def __missing__(self, number: int) -> bytes:
        found = self[number] = blake2b(number.to_bytes(8, "little"), key=self._name, digest_size=32).digest()
        return found


def _write_long(writer: Writer, requests: int) -> None:
    """Books: each is asked about twice, the second time with more behind it."""
    for number in range(requests):
        text = [block for _ in range(10) for block in writer.text(LONGEST_TOKENS / 10)]
        writer.ask(number, text)
        writer.ask(number + 0.5, text + writer.text(2000))


def asked_in(settings: WeekSettings, chunk: int, hours: float, requests: int) -> Iterator[Asked]:
    """Yield the requests of a chunk of the week in order of time. One chunk of a family in four
    repeats an earlier one, of a day or two ago; one in eight is of a tenant with a salt."""
    families = []
    for family in (*FAMILIES, _LONG):
        rng = random.Random(f"{settings.seed} {family} {chunk}")  # noqa: S311 - nothing is secret
        seed = chunk
        if rng.random() < 0.25:
            seed = max(0, chunk - rng.choice((1, round(HOURS / hours), round(2 * HOURS / hours))))
        name = f"{settings.seed} {family} {seed}"
        if rng.random() < 0.125:
            name += " salted"
        families.append(_of_family(settings, family, seed, requests // len(FAMILIES), _Hashes(name), rng))
    start_s, length_s = chunk * hours * HOUR_S, hours * HOUR_S
    for at, asked in merge(*families):
        yield asked._replace(time_s=start_s + at * length_s)


def _of_family(
    settings: WeekSettings, family: str, seed: int, count: int, hashes: _Hashes, rng: random.Random
) -> Iterator[tuple[float, Asked]]:
    """Yield a family's requests, each with its place in the chunk, from 0 to 1."""
    if family == _LONG:
        writer = Writer(seed, settings.block_tokens)
        _write_long(writer, max(1, count // 3000))
        events: Sequence[Any] = writer.events
    else:
        events = make_events(family, seed, settings.block_tokens, count)
    first_s, last_s = events[0].time_s, events[-1].time_s
    for time_s, text in events:
        at = (time_s - first_s) / max(1.0, last_s - first_s) + rng.random() * 1e-6
        limits, hints = NO_LIMITS, tuple[KVHint, ...]()
        luck = rng.random()
        if luck < 0.02:
            limits = RequestLimits(most_load_tokens=rng.choice((0, 4096)), store_limit_tokens=rng.choice((None, 8192)))
        elif luck < 0.06:
            hints = (KVHint(rng.choice(ACTIONS), rng.choice((None, 16_384)), rng.choice((60.0, 3600.0, 40_000.0))),)
        outputs = 1 if rng.random() < 0.75 else rng.randrange(2, 8)
        yield at, Asked(0.0, family, [hashes[number] for number in text[:-1]], outputs, limits, hints)


# -- the week ----------------------------------------------------------------------------------


class Week:
    """Drives the engine through the days. ``note``: takes each sample as it is made."""

    def __init__(
        self,
        settings: WeekSettings,
        directory: Path,
        note: Callable[[dict[str, Any]], object] = lambda _: None,
        on_request: Callable[[Engine], object] = lambda _: None,
    ) -> None:
        self.settings = settings
        self._samples: list[bytes] = []
        """Packed: as objects they would be most of what grows."""
        self.counts: Counter[str] = Counter()
        self.stats: Counter[str] = Counter()
        self.lives = 0
        self.wrong: list[str] = []
        """In the store, at its end."""
        self._config = settings.config(directory)
        self._directory = directory
        self._note = note
        self._on_request = on_request
        self._rng = random.Random(settings.seed)  # noqa: S311 - nothing is secret
        self._faults = Faults(self._rng)
        self._drive: Drive = {}
        self._epoch_s = time.time() - settings.days * HOURS * HOUR_S
        self._engine_settings = EngineSettings(
            gpu_blocks=9 * LONGEST_TOKENS // settings.block_tokens // 8 + 16,
            step_tokens=max(16_384, 4 * settings.block_tokens),
            step_s=min(LONGEST_STEP_S, max(0.02, 4 * settings.days * HOURS * HOUR_S / settings.requests)),
        )
        self._began_s = time.monotonic()
        self.engine = self._start(1000.0)

    def run(self) -> None:
        """Run it all, and end well; then open the store twice more, and kill the first of these.
        Raises AssertionError where something is not as it must be."""
        hours = self.settings.days * HOURS
        per_hour = self.settings.requests / hours
        chunk_hours = max(1, round(LEAST_CHUNK / per_hour))
        hour, start_s = 0, self.engine.now
        for chunk in range(-(-hours // chunk_hours)):
            for asked in asked_in(self.settings, chunk, chunk_hours, round(per_hour * chunk_hours)):
                while hour < hours - 1 and asked.time_s >= (hour + 1) * HOUR_S:
                    self._end_hour(hour)
                    hour += 1
                self._serve(asked, start_s + asked.time_s)
        self._end_hour(hour)
        self._calm()
        self._end_engine(killed=False)
        self.wrong += self._verify()
        for killed in (True, False):
            self.engine = self._start(self.engine.now)
            self.engine.run_until_quiet()
            self.check_quiet()
            self._end_engine(killed=killed)
        self.wrong += self._verify()

    def _serve(self, asked: Asked, at_s: float) -> None:
        """Let a request come at its time, and the engine run until then."""
        engine = self.engine
        while engine.any and (engine.now < at_s or engine.is_full):
            engine.step()
            self._disturb(engine)
        engine.now = max(engine.now, at_s)
        engine.add(asked)

    def _disturb(self, engine: Engine) -> None:
        if self._rng.random() < 0.002:
            queued = [*engine.running, *engine.waiting, *(one for one in engine.loading.values() if not one.is_gone)]
            if queued:
                engine.abort(self._rng.choice(queued))

    # -- hours ---------------------------------------------------------------------------------

    def _end_hour(self, hour: int) -> None:
        """Let the engine come to rest, look at it, and decide what the next hour brings."""
        self._calm()
        self.engine.run_until_quiet()
        self.check_quiet()
        if hour % self.settings.sample_hours == self.settings.sample_hours - 1:
            self._sample(hour)
        if (self.settings.lives or hour < HOURS) and hour % 4 == 3 and hour < self.settings.days * HOURS - 1:
            self._succeed(killed=hour % 8 == 7)
        faults, mode = self._faults, self._rng.random()
        faults.fails = 0.05 if mode < 0.2 else 0.001
        faults.late = 0.05 if 0.2 <= mode < 0.4 else 0.001
        faults.rots = 0.001 if 0.4 <= mode < 0.6 else 0.0
        if 0.6 <= mode < 0.75:
            self._faults.is_off = True
            self.counts["hours with a drive off"] += 1
        if hour % 31 == 17:
            self.engine.reset(1 + self._rng.getrandbits(62))
        if hour == 30 or (self.settings.lives and hour % 24 == 7):
            self.engine.kill_index()

    def _calm(self) -> None:
        """Let everything work."""
        self._faults.is_off = False
        self._faults.fails = self._faults.late = self._faults.rots = 0.0

    def _sample(self, hour: int) -> None:
        engine, parts = self.engine, self.engine.parts
        assert parts.index is not None and parts.home is not None and parts.index.pid is not None
        if parts.trace is not None:
            await_writer(parts.trace)
        roots = (parts, parts.manager, engine.journal)
        times = {}
        for kind, taken in engine.times.take().items():
            middle, high = np.percentile(taken, (50, 99))
            times[kind] = {"count": len(taken), "median": middle * 1e6, "p99": high * 1e6, "most": max(taken) * 1e6}
        pages = lmdb_sizes(parts.home.index_path)
        # Within its plan the last page depends on how much came while a commit was under way.
        planned = planned_bytes(self.settings.nvme_blocks * 17 // 16) // PAGE_BYTES
        pages["pages beyond the plan"] = max(0, pages.pop("last page") + 1 - planned)
        trace = sum(file.stat().st_size for file in self._directory.glob("trace*"))
        sample = {
            "hour": hour,
            "day": hour // HOURS,
            "seconds": round(time.monotonic() - self._began_s, 1),
            "memory": {
                "process": resident_bytes(),
                "index process": resident_bytes(parts.index.pid),
                "index file": pages.pop("file bytes"),
            },
            "counts": sizes_of(*roots)
            | module_sizes()
            | {f"index {name}": count for name, count in pages.items()}
            | {"open files": open_files(), "segments": len(self._drive)},
            "times": times,
            "happened": dict(engine.counts) | dict(self._faults.counts),
            "trace bytes": trace,
            "gauges": engine.manager.gauges.read(),
        }
        self._samples.append(zlib.compress(json.dumps(sample).encode()))
        self._note(sample)

    @property
    def samples(self) -> list[dict[str, Any]]:
        """One of each virtual hour."""
        return [json.loads(zlib.decompress(packed)) for packed in self._samples]

    def check_quiet(self) -> None:
        """Assert what must hold of a manager without requests."""
        manager: Any = self.engine.manager
        assert not manager._requests and not len(manager._transfers) and not manager._loads.unplanned
        assert not len(manager._stores.sources), "GPU blocks are watched that nobody copies from"
        for tier in manager._catalog.tiers:
            columns = manager._catalog.columns(tier)
            assert not np.frombuffer(columns.pins, np.uint32).any(), f"copies stay pinned in {tier.name}"
        pool = self.engine.pool
        assert pool.free_count == pool.block_count - 1, "GPU blocks are held that nobody uses"
        ended = self.engine.counts["ended"] + self.engine.counts["aborted"]
        assert ended == self.engine.counts["requests"], "a request has not ended"

    # -- lives ---------------------------------------------------------------------------------

    def _start(self, now: float) -> Engine:
        self.lives += 1
        engine = Engine(
            self._config,
            self.settings.geometry,
            self._drive,
            self._faults,
            self._engine_settings,
            (self._epoch_s, now),
        )
        engine.on_request = lambda: self._on_request(engine)
        return engine

    def _succeed(self, *, killed: bool) -> None:
        """End the manager, and have another one open the store, in one case of four while its drive
        is off: it cannot be opened then, and begins anew."""
        now = self.engine.now
        self._end_engine(killed=killed)
        self.engine = self._start(now)
        self._faults.is_off = self._rng.random() < 0.25
        self.engine.run_until_quiet()
        self._faults.is_off = False

    def _end_engine(self, *, killed: bool) -> None:
        engine = self.engine
        self.counts.update(engine.counts)
        self.stats.update(engine.manager.stats.counts)
        self.counts["killed" if killed else "ended well"] += 1
        if killed:
            engine.kill()
        else:
            engine.run_until_quiet()
            engine.close()

    # -- at the end ----------------------------------------------------------------------------

    def _verify(self) -> list[str]:
        """Return what ``kvdisk verify`` finds wrong in the store and is none of the losses that
        were made."""
        verdict = verify_store(self._config.store_dirs)
        found = [problem for home in verdict.engine_stores for problem in home.problems]
        for one in verdict.wrong:
            slots = self._drive.get(one.segment, [])
            if one.slot is None or one.slot >= len(slots) or slots[one.slot] is not ROTTEN:
                found.append(f"{one.path} slot {one.slot}: {one.what}")
        self.counts["blocks verified"] += verdict.totals["slots"]
        return found

    @property
    def faults(self) -> Counter[str]:
        """What has gone wrong, by name."""
        return Counter(self._faults.counts)

    def series(self) -> list[Series]:
        """Return all that is looked at for growth."""
        samples = self.samples
        return series_of(samples, "memory", is_bytes=True) + series_of(samples, "counts")


def await_writer(trace: RequestTrace) -> None:
    """Let what waits for a trace's thread be written, which goes by the time of the day."""
    end_s = time.monotonic() + 10.0
    while trace._waiting and time.monotonic() < end_s:
        time.sleep(0.01)


@contextmanager
def lower_bounds(block_tokens: int) -> Iterator[None]:
    """Lower the bounds of a step as blocks are larger."""
    before = [(owner, name, getattr(owner, name)) for owner, name in STEP_BOUNDS]
    shares = dict(step_work.SHARES)
    try:
        for kind, share in shares.items():
            step_work.SHARES[kind] = share._replace(blocks=max(4, share.blocks * 16 // block_tokens))
        for owner, name, value in before:
            setattr(owner, name, max(4, value * 16 // block_tokens))
        yield
    finally:
        step_work.SHARES.update(shares)
        for owner, name, value in before:
            setattr(owner, name, value)


def run_week(
    settings: WeekSettings,
    directory: Path,
    note: Callable[[dict[str, Any]], object] = lambda _: None,
    on_request: Callable[[Engine], object] = lambda _: None,
) -> tuple[Week, list[str]]:
    """Run a week in an empty directory. Return it, and in words what has grown or is not sound.

    ``on_request``: called with the engine for each request that has ended. Raises AssertionError
    where the manager did something wrong on the way.
    """
    with lower_bounds(settings.block_tokens):
        week = Week(settings, directory, note, on_request)
        week.run()
    grown = [
        f"{one.name} has grown: at most {one.second:,.0f} on the second day, {one.last:,.0f} on the last."
        for one in week.series()
        if one.has_grown
    ]
    return week, grown + week.wrong


# -- what is printed ---------------------------------------------------------------------------


def show(week: Week, console: Console, record: Record) -> None:
    """Note and print what happened, the figures, and the times."""
    told = ", ".join(f"{count:,} {name}" for name, count in sorted((week.counts + week.faults).items()))
    console.print(f"{week.lives} lives: {told}.")
    table = Table("at the end of an hour", "most of day 2", "median of the last", "most")
    for one in week.series():
        unit = 1 << 20 if one.is_bytes else 1
        if one.is_bytes or one.most >= 1000 or one.has_grown:
            figures = [
                f"{each / unit:,.1f} MiB" if one.is_bytes else f"{each:,.0f}"
                for each in (one.second, one.last, one.most)
            ]
            table.add_row(("[red]" if one.has_grown else "") + one.name.replace("[]", "\\[]"), *figures)
        shown = {"most of day 2": one.second, "median of the last": one.last, "most": one.most}
        for column, value in shown.items() if one.is_bytes else ():
            record.add("sizes", one.name, column, [value / unit], "MiB")
    record.add("compared", "figures", "count", [len(week.series())])
    record.add("compared", "grown", "count", [sum(one.has_grown for one in week.series())])
    console.print(table)
    table = Table("us of processor time", "calls", "median: day 2", "last day", "p99: day 2", "last day", "most")
    samples = week.samples
    last = max(sample["day"] for sample in samples)
    for kind in sorted({kind for sample in samples for kind in sample["times"]}):
        days = [[s["times"][kind] for s in samples if s["day"] == day and kind in s["times"]] for day in (1, last)]
        of_all = [s["times"][kind] for s in samples if kind in s["times"]]
        cells = [f"{sum(each['count'] for each in of_all):,}"]
        cells += [
            f"{np.median([each[figure] for each in day]):,.0f}" if day else ""
            for figure in ("median", "p99")
            for day in days
        ]
        table.add_row(kind, *cells, f"{max(each['most'] for each in of_all):,.0f}")
        for figure in ("median", "p99"):
            for day, hours in zip(("day 2", "last day"), days, strict=True):
                if hours:
                    record.add("us", kind, f"{figure}, {day}", [each[figure] for each in hours])
    console.print(table)


def main() -> int:
    """Run a week and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="where the store may lie")
    parser.add_argument("--out", type=Path, help="a file for the samples, a line of JSON each")
    parser.add_argument("--requests", type=int, default=1_000_000)
    for name in ("block_tokens", "nvme_blocks", "cpu_blocks", "days", "seed"):
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=getattr(WeekSettings, name))
    parser.add_argument("--lives", action="store_true", help="start the manager anew every 4 hours of all days")
    add_json_option(parser)
    options = parser.parse_args()
    names = ("requests", "block_tokens", "nvme_blocks", "cpu_blocks", "lives", "seed", "days")
    settings = WeekSettings(**{name: getattr(options, name) for name in names})
    logging.getLogger("kvdisk").setLevel(logging.ERROR)
    console = Console(highlight=False, soft_wrap=True, width=120)
    out = options.out.open("w") if options.out else None

    def note(sample: dict[str, Any]) -> None:
        if out is not None:
            out.write(json.dumps(sample) + "\n")
            out.flush()
        happened, memory = sample["happened"], sample["memory"]["process"] / (1 << 20)
        said = (
            f"hour {sample['hour']}: {sample['seconds']:,.0f} s, {happened.get('requests', 0):,} requests in this life"
        )
        console.print(f"{said}, {memory:,.0f} MiB")

    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        began_s, record = time.monotonic(), Record(Path(directory))
        week, wrong = run_week(settings, Path(directory), note)
        show(week, console, record)
        record.write(options.json)
        console.print(f"{time.monotonic() - began_s:,.0f} s. {Machine.here(Path(directory)).sentence}")
    for one in wrong:
        console.print(f"[red]{one}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
