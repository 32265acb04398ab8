# SPDX-License-Identifier: Apache-2.0
"""FIGURES: what a running engine tells of itself, in its home, for ``kvdisk top`` and other tools.

One JSON object, replaced in one step, not synced: it is worth nothing after its engine, and nothing
else depends on it. What does not decode is damaged, or of another kvdisk, and is shown as unknown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kvdisk.device import paths
from kvdisk.errors import CorruptRecord

FIGURES_FILE = "FIGURES"
JSON_VERSION = 1
_NUMBER_LIMIT = float(1 << 62)
_MOST_DRIVES = 1024
T = TypeVar("T")


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
            time_s=_number(fields["time_s"]),
            started_s=_number(fields["started_s"]),
            pid=_whole(fields["pid"]),
            host=_of(str, fields["host"]),
            model=_of(str, fields["model"]),
            ranks=_whole(fields["ranks"]),
            totals={series: _whole(value) for series, value in _flat(fields["totals"])},
            sums={
                series: (_whole(value["count"]), _number(value["sum"]))
                for series, value in _flat(fields["histograms"], ("count", "sum"))
            },
            gauges={series: _number(value) for series, value in _flat(fields["gauges"])},
            drives=tuple(
                DriveTelemetry(
                    _of(str, drive["path"]),
                    _whole(drive["read_bytes"]),
                    _whole(drive["written_bytes"]),
                    _of(bool, drive["quarantined"]),
                )
                for drive in fields["drives"][:_MOST_DRIVES]
            ),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptRecord(f"{home_path / FIGURES_FILE} does not have the fields of an engine's figures") from error


def _flat(found: Any, leaf: tuple[str, ...] = ()) -> list[tuple[str, Any]]:
    """Return (series, value) of an object by metric. ``leaf``: the fields of a value that is an
    object itself."""
    flat: list[tuple[str, Any]] = []
    for name, value in found.items():
        if isinstance(value, dict) and not (leaf and all(key in value for key in leaf)):
            flat += [(f"{name}.{label}", inner) for label, inner in value.items()]
        else:
            flat.append((name, value))
    return flat


def _number(value: Any, kinds: Any = int | float) -> Any:
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise TypeError
    if not (math.isfinite(value) and 0 <= value < _NUMBER_LIMIT):
        raise ValueError
    return value


def _whole(value: Any) -> int:
    return int(_number(value, int))


def _of(kind: type[T], value: Any) -> T:
    if not isinstance(value, kind):
        raise TypeError
    return value
