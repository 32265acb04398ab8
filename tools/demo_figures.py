# SPDX-License-Identifier: Apache-2.0
"""Engines to show: they hold engine stores of a store, and write the figures of engines at work,
all made up. They move nothing."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from demo_store import Model

from kvdisk.device.home import Home
from kvdisk.device.store import Store
from kvdisk.device.telemetry_file import JSON_VERSION, write_telemetry
from kvdisk.stats import by_metric

CPU_BYTES, NVME_BYTES, CAP_BYTES = 32 << 30, 500 << 30, 1 << 30
TOKENS_PER_S, TOKEN_BYTES = 9000, 24_000
REASONS = {"never_seen": 4.0, "short": 2.0, "evicted_nvme": 1.0, "writing": 0.2}
"""How often requests miss in a second, by reason."""


class DemoEngine:
    """One of them. ``home``: its engine store."""

    def __init__(self, home: Home, model: Model, number: int, began_s: float) -> None:
        self._home, self._model, self._number = home, model, number
        self._began_s = self._until_s = began_s
        self._chance = random.Random(number)  # noqa: S311 - the same each time
        self._counts: Counter[str] = Counter()
        self._moved_bytes: Counter[str] = Counter()

    def work(self, until_s: float) -> None:
        """Be at work from the last call until a time, and write what has come of it."""
        seconds, at = until_s - self._until_s, until_s / 46 + self._number
        self._until_s = until_s
        load = max(0.0, 1 + 0.5 * math.sin(at) + 0.2 * self._chance.random())
        asked = round(TOKENS_PER_S * load * seconds)
        from_cpu = round(asked * (0.42 + 0.08 * math.sin(at / 2) + 0.06 * self._chance.random()))
        from_nvme = round((asked - from_cpu) * (0.5 + 0.12 * math.sin(at / 1.4) + 0.1 * self._chance.random()))
        missed = asked - from_cpu - from_nvme
        self._counts.update(
            {
                "lookup_tokens": asked,
                "hit_tokens.cpu": from_cpu,
                "hit_tokens.nvme": from_nvme,
                "missed_tokens.cpu": asked - from_cpu,
                "missed_tokens.nvme": missed,
                "saved_seconds": (from_cpu + from_nvme) // 4000,
                "evicted_blocks.cpu": missed // 16,
                "evicted_unwritten.reuse": missed // 160,
                "evicted_unwritten.room": missed // 700,
                "foreign_failures": self._chance.random() < 0.01,
            }
        )
        for reason, per_s in REASONS.items():
            self._counts[f"misses.{reason}"] += round(per_s * load * seconds * 2 * self._chance.random())
        self._moved_bytes.update(
            {
                "gpu_to_cpu": missed * TOKEN_BYTES,
                "cpu_to_gpu": (from_cpu + from_nvme) * TOKEN_BYTES,
                "cpu_to_nvme": missed * TOKEN_BYTES * 9 // 10,
                "nvme_to_cpu": from_nvme * TOKEN_BYTES,
            }
        )
        write_telemetry(self._home.path, self._figures())

    def _figures(self) -> dict[str, Any]:
        moved = self._moved_bytes
        used_bytes = min(NVME_BYTES, (60 << 30) * (1 + self._number % 3) + moved["cpu_to_nvme"])
        gauges = {
            "used_bytes.cpu": CPU_BYTES,
            "capacity_bytes.cpu": CPU_BYTES,
            "used_bytes.nvme": used_bytes,
            "capacity_bytes.nvme": NVME_BYTES,
            "queued_jobs.store": 1,
            "queued_jobs.load": 2,
            "backlog_blocks": 17,
        }
        parts = {
            f"transfer_bytes.{route}": {"count": count >> 20, "sum": float(count)} for route, count in moved.items()
        }
        drive = {"path": str(self._home.path.parents[1]), "quarantined": False}
        return {
            "json_version": JSON_VERSION,
            "started_s": round(self._began_s - 3000 * (self._number + 1), 3),
            "time_s": round(self._until_s, 3),
            "pid": 25092 + self._number,
            "host": "gpu-1",
            "model": self._model.name,
            "ranks": self._model.ranks,
            "totals": by_metric(self._counts),
            "histograms": by_metric(parts),
            "gauges": by_metric(gauges),
            "drives": [drive | {"read_bytes": moved["nvme_to_cpu"], "written_bytes": moved["cpu_to_nvme"]}],
        }


@contextmanager
def demo_engines(path: Path, models: Sequence[Model], began_s: float) -> Iterator[list[DemoEngine]]:
    """Yield an engine of each model, in the store at ``path``. ``began_s``: when they begin to
    work."""
    with ExitStack() as held:
        engines = []
        for number, model in enumerate(models):
            home = Store.open(path).acquire_home(model.fingerprint, model.description, CAP_BYTES)
            held.callback(home.close, clean=True)
            engines.append(DemoEngine(home, model, number, began_s))
        yield engines
