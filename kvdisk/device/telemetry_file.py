# SPDX-License-Identifier: Apache-2.0
"""FIGURES: what a running engine tells of itself, in its home, for ``kvdisk top`` and other tools.

One JSON object, replaced in one step, not synced: nothing depends on it. What does not decode is
damaged, or of another kvdisk, and is shown as unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvdisk.device import paths
from kvdisk.errors import CorruptRecord

FIGURES_FILE = "FIGURES"
JSON_VERSION = 1


class DriveTelemetry(NamedTuple):
    """A drive of the home, and what it moved since the engine started."""

    path: str
    read_bytes: int
    written_bytes: int
    quarantined: bool


class TelemetryRecord(NamedTuple):
    """What a FIGURES file says. Times: seconds since the Unix epoch. ``pid``: of the engine, on
    ``host``.

    ``totals``: counters since the start, by series as ``kvdisk.stats`` names them; ``sums``: number
    and sum of the samples of histograms, likewise; ``gauges``: as they were at ``time_s``.
    ``drives``: in the home's order.
    """

    time_s: float
    started_s: float
    pid: int
    host: str
    model: str
    ranks: int
    totals: Mapping[str, int]
    sums: Mapping[str, tuple[int, float]]
    gauges: Mapping[str, float]
    drives: tuple[DriveTelemetry, ...]


def write_telemetry(home_path: Path, figures: dict[str, Any]) -> None:
    """Replace FIGURES in one step. Raises OSError."""
    paths.replace_file(home_path / FIGURES_FILE, [paths.encode_json(figures)])


def read_telemetry(home_path: Path) -> TelemetryRecord | None:
    """Return what FIGURES says, None where there is none. Raises CorruptRecord where it does not
    decode, OSError."""
    try:
        fields = paths.read_control(home_path / FIGURES_FILE)
    except FileNotFoundError:
        return None
    if fields.get("json_version") != JSON_VERSION:
        raise CorruptRecord(f"{home_path / FIGURES_FILE} is of another format")
    try:
        return TelemetryRecord(
            time_s=float(fields["time_s"]),
            started_s=float(fields["started_s"]),
            pid=int(fields["pid"]),
            host=str(fields["host"]),
            model=str(fields["model"]),
            ranks=int(fields["ranks"]),
            totals={series: int(count) for series, count in _by_series(fields["totals"])},
            sums={
                series: (int(samples["count"]), float(samples["sum"]))
                for series, samples in _by_series(fields["histograms"])
            },
            gauges={series: float(value) for series, value in _by_series(fields["gauges"])},
            drives=tuple(
                DriveTelemetry(*(drive[name] for name in DriveTelemetry._fields)) for drive in fields["drives"]
            ),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptRecord(f"{home_path / FIGURES_FILE} does not have the fields of an engine's figures") from error


def _by_series(by_metric: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield series and values of an object by metric, as ``stats.by_metric`` makes it; the samples
    of a histogram are one value."""
    for name, value in by_metric.items():
        if isinstance(value, dict) and "count" not in value:
            yield from ((f"{name}.{label}", inner) for label, inner in value.items())
        else:
            yield name, value
