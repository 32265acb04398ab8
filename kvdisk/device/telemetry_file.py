# SPDX-License-Identifier: Apache-2.0
"""FIGURES: what a running engine reports, in its engine store, for ``kvdisk top`` and other tools.

One JSON object, replaced in one step, not synced: nothing depends on it. A file that does not
decode is damaged, or of another kvdisk, and is shown as unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvdisk.device import paths
from kvdisk.errors import CorruptRecord
from kvdisk.geometry import FILE_EPOCH

FIGURES_FILE = "FIGURES"
JSON_VERSION = 1
_NUMBER_LIMIT = 1 << 63


class DriveTelemetry(NamedTuple):
    """A drive of the engine store, and the bytes moved since the engine started."""

    path: str
    read_bytes: int
    written_bytes: int
    quarantined: bool


class TelemetryRecord(NamedTuple):
    """What a FIGURES file says. Times: seconds since the Unix epoch. ``pid``: the engine's process
    on ``host``.

    ``totals``: counters since the start, by series as ``kvdisk.stats`` names them. ``sums``: number
    and sum of the samples of each histogram, by series too. ``gauges``: values at ``time_s``.
    ``drives``: in the engine store's order. ``epoch``: the epoch that is served, since ``reset_s``;
    None where there was no reset. ``data_parallel_rank``: None where the engine is alone.
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
    epoch: int = FILE_EPOCH
    reset_s: float | None = None
    data_parallel_rank: int | None = None


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
            time_s=_seconds(fields["time_s"]),
            started_s=_seconds(fields["started_s"]),
            pid=_whole(fields["pid"]),
            host=_text(fields["host"]),
            model=_text(fields["model"]),
            ranks=_whole(fields["ranks"]),
            totals={series: _whole(count) for series, count in _by_series(fields["totals"])},
            sums={
                series: (_whole(samples["count"]), float(_number(samples["sum"])))
                for series, samples in _by_series(fields["histograms"])
            },
            gauges={series: float(_number(value)) for series, value in _by_series(fields["gauges"])},
            drives=tuple(
                DriveTelemetry(
                    _text(drive["path"]),
                    _whole(drive["read_bytes"]),
                    _whole(drive["written_bytes"]),
                    bool(drive["quarantined"]),
                )
                for drive in fields["drives"]
            ),
            epoch=_whole(fields.get("epoch", FILE_EPOCH)),  # an older kvdisk has none
            reset_s=None if fields.get("reset_s") is None else _seconds(fields["reset_s"]),
            data_parallel_rank=None
            if fields.get("data_parallel_rank") is None
            else _whole(fields["data_parallel_rank"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptRecord(f"{home_path / FIGURES_FILE} does not have the fields of an engine's figures") from error


def _by_series(by_metric: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each series with its value, from an object by metric as ``stats.by_metric`` makes it.
    The samples of a histogram are one value."""
    for name, value in by_metric.items():
        if isinstance(value, dict) and "count" not in value:
            yield from ((f"{name}.{label}", inner) for label, inner in value.items())
        else:
            yield name, value


def _number(value: Any) -> Any:
    """Return the value if an engine can have written it. Otherwise raise TypeError or ValueError:
    such a number gives no rate and no bar."""
    if not 0 <= value < _NUMBER_LIMIT:  # nor is NaN
        raise ValueError
    return value


def _whole(value: Any) -> int:
    return int(_number(value))


def _seconds(value: Any) -> float:
    return round(float(_number(value)), 3)  # as written; so a rate is never over next to no time


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value
