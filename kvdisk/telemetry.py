# SPDX-License-Identifier: Apache-2.0
"""What an engine reports: values for vLLM's endpoint, a file in its engine store, and lines in the
log (one a minute, one at the end, and one for each request).

The scheduler's thread calls ``take`` in each step, which leaves a snapshot once a second. ``write``
and ``log`` use the snapshot on another thread (``kvdisk.background``).
"""

from __future__ import annotations

import fnmatch
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kvdisk import __version__
from kvdisk.blocks import HIT_TIERS, KEPT_TIERS
from kvdisk.device.telemetry_file import JSON_VERSION
from kvdisk.errors import printable
from kvdisk.geometry import FILE_EPOCH
from kvdisk.manager.manager import Gauges
from kvdisk.manager.requests import RequestOutcome
from kvdisk.stats import FAILURES, HARMLESS, ROUTES, Samples, Stats, by_metric

logger = logging.getLogger("kvdisk")

TAKE_S = 1.0
"""Seconds between two snapshots of counters and gauges while jobs are under way. When the last job
has ended one is taken at once."""
WRITE_S = 1.0
LOG_S = 60.0
_MOVED = {"GPU to memory": "gpu_to_*"}
for _tier in HIT_TIERS[1:]:  # behind memory
    _MOVED |= {f"to {_tier.word}": f"*_to_{_tier.label}", f"from {_tier.word}": f"{_tier.label}_to_*"}
_MOVED["memory to GPU"] = "*_to_gpu"
"""The routes whose bytes count as moved in each of these ways, as a pattern."""


class _Snapshot(NamedTuple):
    """Totals since the start. ``sums``: number and sum of the samples of each histogram."""

    time_s: float
    counts: Mapping[str, int]
    sums: Mapping[str, tuple[int, float]]
    gauges: Mapping[str, float]

    def rise_since(self, before: _Snapshot) -> Stats:
        """Return what counters and histograms rose by, where they rose, and the gauges."""
        rose = Stats(gauges=dict(self.gauges))
        for series, count in self.counts.items():
            rose.add(series, count - before.counts.get(series, 0))
        for series, (count, total) in self.sums.items():
            old_count, old_total = before.sums.get(series, (0, 0.0))
            if count != old_count:
                rose.samples[series] = Samples(count - old_count, total - old_total)
        return rose


class Telemetry:
    """See the module. ``stats``: the engine's totals; only this class takes their samples.
    ``write_file``: writes the JSON object; None where there is no engine store. ``drives``: the
    directories of the engine store."""

    def __init__(
        self,
        stats: Stats,
        gauges: Gauges,
        *,
        model: str,
        ranks: int,
        data_parallel_rank: int | None = None,
        drives: Sequence[str] = (),
        write_file: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self._stats = stats
        self._gauges = gauges
        self._write_file = write_file
        self._drives = tuple(drives)
        self._about = {
            "json_version": JSON_VERSION,
            "kvdisk_version": __version__,
            "started_s": round(time.time(), 3),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "model": model,
            "ranks": ranks,
            "data_parallel_rank": data_parallel_rank,
        }
        self._was_busy = self._ended = False
        self._take_at_s = 0.0
        self._taken_at = 0, gauges.planned_jobs
        self._first = self._latest = self._logged = _Snapshot(time.time(), {}, {}, gauges.read())
        self._written: tuple[_Snapshot, dict[str, Any]] | None = None
        self._reset: dict[str, Any] = {"epoch": FILE_EPOCH, "reset_s": None}

    # -- the scheduler's thread ----------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether ``take`` was not called since the last job ended: an idle engine should take one
        step more."""
        return self._was_busy and not self._gauges.busy

    def take(self, now: float) -> Stats | None:
        """Return what was counted and measured since the last time, if it is time: what counters
        and samples rose by, and gauges as they are. ``now``: seconds, monotonic."""
        busy = self._gauges.busy
        ended, self._was_busy = self._was_busy and not busy, busy
        # A quiet engine may not take another step: so nothing is left for later.
        due = now >= self._take_at_s if busy else ended or self._taken_at != self._changes()
        if not due:
            return None
        self._take_at_s = now + TAKE_S
        return self.take_all()

    def take_all(self) -> Stats:
        """Return the same as ``take``, whether it is time or not."""
        return self._advance(self._gauges.read())

    def take_rest(self) -> Stats:
        """Return what counters and samples rose by, at the very end: gauges are not read any
        more."""
        fresh = self._advance(self._latest.gauges)
        fresh.gauges = {}
        return fresh

    def _changes(self) -> tuple[int, int]:
        return self._stats.changes, self._gauges.planned_jobs

    def _advance(self, gauges: Mapping[str, float]) -> Stats:
        """Leave a snapshot, and return what changed since the one before."""
        stats, before = self._stats, self._latest
        sums = {series: (samples.count, samples.total) for series, samples in stats.samples.items()}
        self._taken_at, self._latest = self._changes(), _Snapshot(time.time(), dict(stats.counts), sums, gauges)
        fresh = self._latest.rise_since(before)
        for series, samples in fresh.samples.items():
            mine = stats.samples[series]
            samples.values, mine.values = mine.values, []
        return fresh

    def note_reset(self, epoch: int, what: str) -> None:
        """Note, and log, that nothing is served any more that was stored before. ``what``: why."""
        self._reset = {"epoch": epoch, "reset_s": round(time.time(), 3)}
        logger.info("kvdisk was reset, and no longer serves what was stored before: %s.", what)

    # -- another thread ------------------------------------------------------------------------

    def write(self) -> None:
        """Write the last snapshot into the engine store, if it is a new one. Raises OSError."""
        latest, reset = self._latest, self._reset
        is_written = self._written is not None and self._written[0] is latest and self._written[1] is reset
        if self._write_file is not None and not is_written:
            self._write_file(self._as_json(latest) | reset)
            self._written = latest, reset

    def log(self) -> None:
        """Log what has happened since the last call, if anything has."""
        before, latest = self._logged, self._latest
        if latest.counts == before.counts:
            return
        self._logged = latest
        seconds = max(1.0, latest.time_s - before.time_s)
        rose = latest.rise_since(before)
        logger.info("kvdisk, last %.0f s: %s.", seconds, _as_line(rose, seconds))

    def log_end(self) -> None:
        """Log what has happened since the start, if anything has, once. Call it at the end, when
        nothing else calls."""
        if self._ended:
            return
        self._ended = True
        self.take_rest()
        rose = self._latest.rise_since(self._first)
        if rose.counts:
            logger.info("kvdisk ends after %s: %s.", _duration(time.time() - self._first.time_s), _as_line(rose, None))

    def _as_json(self, snapshot: _Snapshot) -> dict[str, Any]:
        counts, gauges = dict(snapshot.counts), dict(snapshot.gauges)
        drives = [
            {
                "path": path,
                "read_bytes": counts.pop(f"drive_read_bytes.{drive}", 0),
                "written_bytes": counts.pop(f"drive_written_bytes.{drive}", 0),
                "quarantined": bool(gauges.pop(f"drive_quarantined.{drive}", 0)),
            }
            for drive, path in enumerate(self._drives)
        ]
        sums = {series: {"count": count, "sum": total} for series, (count, total) in snapshot.sums.items()}
        return {
            **self._about,
            "time_s": round(snapshot.time_s, 3),
            "totals": by_metric(counts),
            "histograms": by_metric(sums),
            "gauges": by_metric(gauges),
            "drives": drives,
        }


def _as_line(rose: Stats, seconds: float | None) -> str:
    return ", ".join(f"{name} {value}" for name, value in summarize(rose, seconds).items()) or "nothing moved"


def log_request(level: int, outcome: RequestOutcome) -> None:
    """Log what a request found. ``level``: a level of ``logging``."""
    if not logger.isEnabledFor(level):
        return
    found = " + ".join(f"{count:,} {tier.word}" for tier, count in outcome.tokens.items())
    computed = outcome.total_tokens - outcome.gpu_tokens - sum(outcome.tokens.values())
    what = "prompt tokens" if outcome.total_tokens == outcome.prompt_tokens else "tokens of prompt and answer"
    more = []
    if outcome.load_s is not None:
        more.append(f"load {_duration(outcome.load_s)}")
    if outcome.saved_s is not None:
        more.append(f"saved ~{_duration(outcome.saved_s)}")
    if outcome.miss is not None:
        ago = "" if outcome.asked_ago_s is None else f" (asked for ~{_duration(outcome.asked_ago_s)} ago)"
        more.append(f"missing: {outcome.miss.words}{ago}")
    logger.log(
        level,
        "req %s: %s %s = %s GPU + %s + %s computed%s",
        printable(outcome.request_id),
        f"{outcome.total_tokens:,}",
        what,
        f"{outcome.gpu_tokens:,}",
        found,
        f"{computed:,}",
        f"; {', '.join(more)}" if more else "",
    )


def _duration(seconds: float) -> str:
    """Return a time in two or three digits: ``41 ms``, ``3.9 s``, ``12 min``, ``5.2 h``."""
    for unit, name in ((3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if seconds >= 2 * unit or (seconds >= unit == 1.0):
            count = seconds / unit
            return f"{count:,.{int(count < 10)}f} {name}"
    return f"{1000 * seconds:.0f} ms"


def summarize(rose: Stats, seconds: float | None = None) -> dict[str, str]:
    """Return the few figures that matter, for one line: hits, what they saved, bytes moved, fill,
    evictions, and failures if there are any.

    ``rose``: what counters and histograms rose by. ``seconds``: the time in which they did, for
    rates; None: amounts.
    """
    found: dict[str, str] = {}
    for tier in HIT_TIERS:
        hit, missed = rose[f"hit_tokens.{tier.label}"], rose[f"missed_tokens.{tier.label}"]
        if hit or missed:
            found[f"{tier.word} hits"] = f"{100 * hit / (hit + missed):.1f} % ({hit:,} tokens)"
    if rose["saved_seconds"]:
        found["saved"] = f"~{rose['saved_seconds']:,} s"
    for name, routes in _MOVED.items():
        moved_bytes = sum(rose.sum_of(f"transfer_bytes.{route}") for route in fnmatch.filter(ROUTES, routes))
        if moved_bytes:
            found[name] = (
                f"{moved_bytes / 1e6:,.1f} MB" if seconds is None else f"{moved_bytes / seconds / 1e6:,.1f} MB/s"
            )
    for tier in KEPT_TIERS:
        capacity_bytes = rose.gauges.get(f"capacity_bytes.{tier.label}", 0)
        if capacity_bytes:
            found[f"{tier.word} fill"] = f"{100 * rose.gauges[f'used_bytes.{tier.label}'] / capacity_bytes:.0f} %"
    evicted = {tier.word: rose[f"evicted_blocks.{tier.label}"] for tier in KEPT_TIERS}
    if any(evicted.values()):
        found["evicted blocks"] = " ".join(f"{count:,} {word}" for word, count in evicted.items())
    for series, name in (FAILURES | HARMLESS).items():
        if rose[series]:
            found[name] = f"{rose[series]:,}"
    return found
