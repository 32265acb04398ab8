# SPDX-License-Identifier: Apache-2.0
"""What ``kvdisk top --json`` prints: one object, whose shape changes only with ``json_version``.

Bytes are those of all ranks. ``null``: not known, or nothing was asked. Rates (``*_per_s``) are those of the last
``seconds``; 0 where the engine is idle. Shares lie between 0 and 1. Times (``*_s``): seconds, those of moments since
the Unix epoch::

    json_version       1
    kvdisk_version     of the command
    time_s             when
    store              path
    problems           sentences: what of the store cannot be shown
    totals             engines, orphans, used_bytes and capacity_bytes (by tier, of all engines), hit_rate (since the
                       engines' starts), read_bytes_per_s, written_bytes_per_s (from and to NVMe)
    engines[]          home, model, pid, host, ranks, started_s, figures_s (when its figures were true), idle,
                       seconds, problem (a sentence where its figures cannot be read)
      tiers            by tier that it has, "cpu" or "nvme": used_bytes, capacity_bytes, hit_rate (since its start),
                       hit_rate_now, evicted_blocks_per_s
      bytes_per_s      by route, such as "gpu_to_cpu"
      waiting          jobs by kind, backlog_blocks, uncommitted_changes
      failures         by kind, since its start, without those that are 0
    drives[]           path, engines, read_bytes, written_bytes (since the engines' starts), read_bytes_per_s,
                       written_bytes_per_s, quarantined (by how many engines)
    orphans[]          home, model, last_use_s
"""

from __future__ import annotations

from typing import Any

from kvdisk import __version__
from kvdisk.cli.top_reader import READS, WRITES, EngineNow, Frame, hit_rate
from kvdisk.stats import JOBS, ROUTES, TIERS

JSON_VERSION = 1


def frame_as_json(frame: Frame) -> dict[str, Any]:
    """Return the object that the module describes, of plain JSON values."""
    return {
        "json_version": JSON_VERSION,
        "kvdisk_version": __version__,
        "time_s": round(frame.time_s, 3),
        "store": {"path": str(frame.path)},
        "problems": frame.problems,
        "totals": _totals(frame),
        "engines": [_engine(engine) for engine in frame.engines],
        "drives": [
            {
                "path": drive.path,
                "engines": drive.engines,
                "read_bytes": drive.read_bytes,
                "written_bytes": drive.written_bytes,
                "read_bytes_per_s": drive.read_per_s,
                "written_bytes_per_s": drive.written_per_s,
                "quarantined": drive.quarantined,
            }
            for drive in frame.drives
        ],
        "orphans": [
            {
                "home": orphan.home_id,
                "model": orphan.record.description.get("model") if orphan.record else None,
                "last_use_s": orphan.record.last_use_s if orphan.record else None,
            }
            for orphan in frame.orphans
        ],
    }


def _totals(frame: Frame) -> dict[str, Any]:
    fills = {tier: [fill for engine in frame.engines if (fill := engine.fill(tier))] for tier in TIERS}
    rises = [engine.rise for engine in frame.engines if engine.rise is not None]
    return {
        "engines": len(frame.engines),
        "orphans": len(frame.orphans),
        "used_bytes": {tier: int(sum(used for used, _ in found)) for tier, found in fills.items()},
        "capacity_bytes": {tier: int(sum(capacity for _, capacity in found)) for tier, found in fills.items()},
        "hit_rate": hit_rate(frame.totals),
        "read_bytes_per_s": sum(rise.bytes_per_s(READS) for rise in rises) if rises else None,
        "written_bytes_per_s": sum(rise.bytes_per_s(WRITES) for rise in rises) if rises else None,
    }


def _engine(engine: EngineNow) -> dict[str, Any]:
    figures, rise = engine.figures, engine.rise
    gauges = figures.gauges if figures else {}
    return {
        "home": engine.home_id,
        "model": engine.model,
        "pid": figures.pid if figures else None,
        "host": figures.host if figures else None,
        "ranks": figures.ranks if figures else None,
        "started_s": figures.started_s if figures else None,
        "figures_s": figures.time_s if figures else None,
        "idle": engine.idle,
        "seconds": rise.seconds if rise else None,
        "problem": engine.problem,
        "tiers": {tier: _tier(engine, tier, fill) for tier in TIERS if (fill := engine.fill(tier)) is not None},
        "bytes_per_s": {route: rise.bytes_per_s([route]) for route in ROUTES} if rise else None,
        "waiting": {
            "jobs": {job: gauges.get(f"queued_jobs.{job}", 0) for job in (*JOBS, "files")},
            "backlog_blocks": gauges.get("backlog_blocks", 0),
            "uncommitted_changes": gauges.get("uncommitted_changes", 0),
        }
        if figures
        else None,
        "failures": engine.failures,
    }


def _tier(engine: EngineNow, tier: str, fill: tuple[float, float]) -> dict[str, Any]:
    assert engine.figures is not None
    rise = engine.rise
    return {
        "used_bytes": fill[0],
        "capacity_bytes": fill[1],
        "hit_rate": hit_rate(engine.figures.totals, tier),
        "hit_rate_now": hit_rate(rise.totals, tier) if rise else None,
        "evicted_blocks_per_s": rise.rate(f"evicted_blocks.{tier}") if rise else None,
    }
