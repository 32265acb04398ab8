# SPDX-License-Identifier: Apache-2.0
"""What all modules of the manager work on, and the state of a step that they share."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvdisk.blocks import BlockKey
from kvdisk.config import Config
from kvdisk.context import SchedulerContext
from kvdisk.geometry import FILE_EPOCH, Geometry
from kvdisk.manager.catalog import Catalog
from kvdisk.manager.jobs import Transfers
from kvdisk.manager.reuse import ReuseHistory
from kvdisk.manager.standings import Standings
from kvdisk.manager.step_work import StepWork
from kvdisk.stats import Stats


@dataclass(slots=True)
class StepState:
    """``epoch``: of what is stored now. ``released``: rises when room may have come free.

    ``taken_blocks``: how many GPU blocks the engine may have taken since free ones were last
    offered. ``read_awaited``: whether a scheduled request waits in this step for a prefetch.
    ``arriving``: keys of the epoch that are just being read into memory. ``generation``: the last
    that was given to a copy. ``now``, ``now_s``: the one time of a step, in seconds, monotonic, and
    since the Unix epoch as a record can hold it; ``TierManager`` and ``BlockJobs`` set them.
    ``fingerprint``: of the engine's namespace, or the one that is assumed until ``is_identified``:
    before that nothing that outlives the process is read or written.
    """

    epoch: int = FILE_EPOCH
    released: int = 0
    taken_blocks: int = 0
    read_awaited: bool = False
    arriving: set[BlockKey] = field(default_factory=set)
    generation: int = 0
    now: float = 0.0
    now_s: int = 0
    fingerprint: bytes = b""
    is_identified: bool = True


@dataclass(frozen=True, slots=True)
class Parts:
    """One of each for a manager, its tiers included."""

    config: Config
    geometry: Geometry
    context: SchedulerContext
    catalog: Catalog
    transfers: Transfers
    history: ReuseHistory
    standings: Standings = field(default_factory=Standings)
    stats: Stats = field(default_factory=Stats)
    state: StepState = field(default_factory=StepState)
    work: StepWork = field(default_factory=StepWork)

    @classmethod
    def make(cls, config: Config, geometry: Geometry, context: SchedulerContext) -> Parts:
        """Return the parts of a new manager."""
        states = frozenset(group.group for group in geometry.groups if group.state_tokens is not None)
        return cls(config, geometry, context, Catalog(()), Transfers(geometry.rank_count), ReuseHistory(states))
