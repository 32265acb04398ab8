# SPDX-License-Identifier: Apache-2.0
"""Looks at a store again and again, on a thread of its own, and keeps what charts need.

A look reads the owners and the FIGURES files of a store, and no index. One that fails, or that a
drive holds up, leaves the frame before it, and a sentence that says so.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from kvdisk.cli.frames import DEPARTURES, Frame, FrameReader, hit_rate
from kvdisk.cli.output import why_not
from kvdisk.errors import KvdiskError
from kvdisk.stats import ROUTES, SOURCES, TIERS

REST_S = 30.0
"""Seconds between two looks while nobody asks for what was seen."""
PATIENCE_S = 60.0
"""Seconds without a question after which nobody asks."""
MOST_SHARE = 0.006
"""The most of a processor core that looks take: with many engines there are fewer."""
SLOW_S = 10.0
"""Seconds after which a look that has not ended is told of."""
SPANS: Mapping[str, tuple[float, float]] = {"minutes": (0.1, 600.0), "day": (120.0, 86400.0)}
"""Of each time that a chart may cover: the least seconds between two moments, and all of it."""
_HITS = tuple(f"{kind}_tokens.{source}" for source in SOURCES for kind in ("hit", "missed"))
_EVICTED = tuple(f"evicted_blocks.{tier}" for tier in TIERS)
_CHARTED = (*_HITS, *ROUTES, *_EVICTED)


class Moment(NamedTuple):
    """A store at one moment. ``number``: rises with each moment of a span. ``counted``: what had
    risen until then, by series. ``fill``: the used share of each tier that there is."""

    number: int
    time_s: float
    counted: Mapping[str, int]
    fill: Mapping[str, float]


class History:
    """The moments of the last minutes, and of the last day. Any thread may read while one notes."""

    def __init__(self) -> None:
        self._moments: dict[str, tuple[Moment, ...]] = dict.fromkeys(SPANS, ())

    def note(self, frame: Frame, risen: Mapping[str, int]) -> None:
        """Keep what a look has found."""
        totals, counted = frame.totals, {series: risen.get(series, 0) for series in _CHARTED}
        fill = {tier: totals.used_bytes[tier] / most for tier, most in totals.capacity_bytes.items() if most}
        for span, (least_s, whole_s) in SPANS.items():
            moments = self._moments[span]
            last = moments[-1] if moments else Moment(-1, -least_s, {}, {})
            if 0 <= frame.time_s - last.time_s < least_s:
                continue
            if frame.time_s < last.time_s:  # the clock was put back
                moments = ()
            kept = [each for each in moments if each.time_s >= frame.time_s - whole_s]
            self._moments[span] = (*kept, Moment(last.number + 1, frame.time_s, counted, fill))

    def points(self, span: str, after: int = -1) -> list[dict[str, Any]]:
        """Return what happened between each two moments, of those whose number is above
        ``after``."""
        moments = self._moments[span]
        return [_point(before, then) for before, then in pairwise(moments) if then.number > after]


def _point(before: Moment, then: Moment) -> dict[str, Any]:
    seconds = max(1e-3, then.time_s - before.time_s)
    rose = {series: count - before.counted[series] for series, count in then.counted.items()}
    return {
        "number": then.number,
        "time_s": then.time_s,
        "seconds": round(seconds, 3),
        "hit_rate": {source: hit_rate(rose, source) for source in SOURCES},
        "bytes_per_s": {route: round(rose[route] / seconds) for route in ROUTES},
        "evicted_per_s": {tier: rose[f"evicted_blocks.{tier}"] / seconds for tier in TIERS},
        "fill": then.fill,
    }


class Seen(NamedTuple):
    """What the last look found. ``number``: of the look. ``frame``: the last that there was; None
    until a look succeeds. ``problem``: why the last look failed; "" where it did not.
    ``departed_per_s``: how fast blocks left, by series of DEPARTURES."""

    number: int
    frame: Frame | None
    problem: str
    departed_per_s: Mapping[str, float]


class Watcher:
    """Looks at the store in these directories. ``start`` begins it; it ends with the process.

    ``interval_s``: between two looks while somebody asks, or more where a look takes long.
    ``began_s``: tells this process from one before. Any thread may call the methods but ``look``.
    """

    def __init__(self, directories: Sequence[Path], interval_s: float, clock: Callable[[], float] = time.time) -> None:
        self._directories, self.interval_s, self._clock = list(directories), interval_s, clock
        self._reader: FrameReader | None = None
        self._wake = threading.Event()
        self._asked_s = self._looking_since_s = time.monotonic()
        self._is_looking = False
        self._departed: tuple[float, Mapping[str, int]] = (0.0, {})
        self._seen = Seen(0, None, "The store was not read yet.", {})
        self.history = History()
        self.began_s = clock()

    def start(self) -> None:
        """Begin to look. Raises RuntimeError where no thread can be started."""
        threading.Thread(target=self._run, name="kvdisk-web-watch", daemon=True).start()

    def seen(self) -> Seen:
        """Return what the last look found, and have the next ones come soon."""
        now_s = time.monotonic()
        if now_s - self._asked_s >= PATIENCE_S:
            self._wake.set()
        self._asked_s = now_s
        waited_s = now_s - self._looking_since_s
        if self._is_looking and waited_s >= SLOW_S:
            return self._seen._replace(problem=f"The store has not answered for {waited_s:.0f} s.")
        return self._seen

    def look(self) -> None:
        """Look once."""
        self._is_looking, self._looking_since_s = True, time.monotonic()
        frame, problem, per_s = self._seen.frame, "", self._seen.departed_per_s
        try:
            if self._reader is None:
                self._reader = FrameReader(self._directories, self._clock)
            frame = self._reader.read()
            self.history.note(frame, self._reader.risen)
            per_s = self._note_departures(frame.time_s, self._reader.risen)
        except KvdiskError as error:
            problem = why_not(error, self._directories)
        except OSError as error:
            problem = f"{error.strerror or error}."
        except Exception as error:  # one of ours: the page says it, and goes on
            problem = f"An error of kvdisk: {type(error).__name__}: {error}."
        self._seen = Seen(self._seen.number + 1, frame, problem, per_s)
        self._is_looking = False

    def _note_departures(self, time_s: float, risen: Mapping[str, int]) -> Mapping[str, float]:
        """Return how fast blocks left since the last call."""
        before_s, before = self._departed
        now = {series: risen.get(series, 0) for series in DEPARTURES}
        self._departed = time_s, now
        if time_s <= before_s or not before:
            return self._seen.departed_per_s
        return {series: (count - before[series]) / (time_s - before_s) for series, count in now.items()}

    def _run(self) -> None:
        least_s = self.interval_s
        while True:
            self._wake.clear()
            before_s = time.thread_time()
            self.look()
            self.interval_s = max(least_s, (time.thread_time() - before_s) / MOST_SHARE)
            is_asked = time.monotonic() - self._asked_s < PATIENCE_S
            self._wake.wait(self.interval_s if is_asked else max(REST_S, self.interval_s))
