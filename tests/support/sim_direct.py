# SPDX-License-Identifier: Apache-2.0
"""The way between drive and GPU in a simulation: staging over CPU tensors, whose work takes its
time as on a GPU."""

from __future__ import annotations

import random

from kvdisk.geometry import Geometry
from kvdisk.worker.copier import Event, Lane
from kvdisk.worker.direct import Direct
from kvdisk.worker.gpu_staging import GpuStaging
from support.addressed_device import CpuLanes
from support.sim_drive import Weather


class _SlowEvent:
    """An event that has come when it is asked often enough."""

    def __init__(self, rng: random.Random, weather: Weather) -> None:
        self._rng = rng
        self._weather = weather
        self._ended = False

    def query(self) -> bool:
        """See ``Event``."""
        self._ended = self._ended or self._rng.random() >= self._weather.slow_copies
        return self._ended

    def synchronize(self) -> None:
        """See ``Event``."""
        self._ended = True


class SimLanes(CpuLanes):
    """What they are given is done at once, and known to be done later."""

    def __init__(self, rng: random.Random, weather: Weather) -> None:
        super().__init__()
        self._rng = rng
        self._weather = weather

    def record(self, lane: Lane | None) -> Event:
        """See ``CudaLanes``."""
        return _SlowEvent(self._rng, self._weather)


def draw_direct(geometry: Geometry, slots: int, rng: random.Random, weather: Weather) -> Direct | None:
    """Return what a start may have chosen: for one process all sizes, for another some or none, for
    each direction.

    ``slots``: of staging, for each size class. ``rng``: of nothing else, so that a run without is
    what it was.
    """
    every = range(len(geometry.slot_sizes))
    loads, stores = (frozenset(at for at in every if rng.random() < rng.choice((0.0, 0.5, 1.0))) for _ in range(2))
    if not loads | stores:
        return None
    staging = GpuStaging(geometry.slot_sizes, [slots] * len(every), SimLanes(rng, weather))
    return Direct(staging, loads, stores)
