# SPDX-License-Identifier: Apache-2.0
"""One run: everything that was asked for, on one machine, round by round; and what it gave."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvdisk.cli.bench import machine, probes, report
from kvdisk.cli.bench.cases import Group, GroupResult
from kvdisk.cli.bench.figures import figure_groups, rows_of
from kvdisk.cli.bench.groups import groups_of, most_under_way_bytes
from kvdisk.cli.bench.rounds import run_group
from kvdisk.cli.bench.settings import DEVICES, Part, Settings
from kvdisk.cli.bench.stand import Peer, Stand, make_stand
from kvdisk.device.probe import ProbeReport
from kvdisk.errors import KvdiskError
from kvdisk.geometry import ALIGNMENT, round_up

JSON_VERSION = 1

Watch = Callable[[str, int, int], None]
"""Told what is measured now, how many groups are done, and how many there are."""


@dataclass(slots=True)
class Run:
    """What a run gave. Its figures may be compared with each other, and with those of no other run.

    ``direct``: what would go straight between drive and GPU, in a line.
    """

    settings: Settings
    machine: dict[str, Any]
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    started_s: int = field(default_factory=lambda: int(time.time()))
    results: list[GroupResult] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    probes: list[ProbeReport] = field(default_factory=list)
    direct: str = ""

    def plain(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        return {
            "json_version": JSON_VERSION,
            "what": "kvdisk bench",
            "run": self.id,
            "started": self.started_s,
            "machine": self.machine,
            "settings": self.settings.plain(),
            "skipped": self.skipped,
            "probes": [probes.plain(one) for one in self.probes],
            "straight_to_gpu": self.direct,
            "groups": report.plain(self.results),
            "figures": [row.plain() for row in rows_of(self.results)] if self.settings.figures else [],
        }


def measure(settings: Settings, peer: Peer | None, watch: Watch) -> Run:
    """Measure everything. Raises as ``make_stand``; what cannot be measured is left out, and ``skipped`` says why."""
    run = Run(settings, machine.describe(settings.directory))
    under_way = most_under_way_bytes(settings)
    file_bytes = round_up(settings.total_bytes, ALIGNMENT)
    with make_stand(settings.directory, file_bytes, settings.devices or tuple(DEVICES), peer, under_way) as stand:
        run.skipped = stand.skipped
        if Part.PROBE in settings.parts:
            watch("what a start would choose", 0, 1)
            run.probes = probes.probe_sizes(stand.files.path, settings.block_sizes)
            run.direct = probes.direct_line(stand.files.path, settings.block_sizes)
        groups = figure_groups(stand, settings) if settings.figures else groups_of(stand, settings)
        run.results = measure_groups(stand, groups, settings.rounds, watch)
    run.machine["load_at_the_end"] = list(os.getloadavg())
    return run


def measure_groups(stand: Stand, groups: list[Group], rounds: int, watch: Watch) -> list[GroupResult]:
    """Measure groups one after the other; one without a contender that could be measured is left out."""
    results = []
    for number, group in enumerate(groups):
        words = f"{group.case.route}: {report.case_words(group.case)}"

        def step(name: str, words: str = words, number: int = number) -> None:
            watch(f"{words}, {name}", number, len(groups))

        try:
            result = run_group(group, rounds, step)
        except (KvdiskError, OSError) as error:  # it could not be made
            stand.skipped.append(f"{words}: {error}")
            continue
        if result.series:
            results.append(result)
        else:
            stand.skipped += [f"{words}: {name}: {why}" for name, why in result.dropped.items()]
    return results
