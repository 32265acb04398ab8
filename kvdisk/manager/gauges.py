# SPDX-License-Identifier: Apache-2.0
"""How full the tiers are, and what waits: read now and then, see ``kvdisk.stats``. Scheduler thread only."""

from __future__ import annotations

from collections.abc import Sequence

from kvdisk.geometry import Geometry
from kvdisk.manager.cpu_space import CpuSpace
from kvdisk.manager.nvme_space import NvmeSpace
from kvdisk.manager.pool import SlotPool
from kvdisk.manager.transfers import Transfers
from kvdisk.messages import JobKind

SHORT_RUN_SLOTS = 8
"""Free slots in shorter runs than this count as fragmented: a write of a block or few at a time."""
_JOBS = {
    "queued_jobs.store": (JobKind.STORE,),
    "queued_jobs.load": (JobKind.LOAD,),
    "queued_jobs.demote": (JobKind.DEMOTE,),
    "queued_jobs.promote": (JobKind.PROMOTE,),
    "queued_jobs.files": (JobKind.OPEN_HOME, JobKind.OPEN_SEGMENT, JobKind.DROP_SEGMENT),
}


class Gauges:
    """See the module. ``cpu`` or ``nvme`` is None where the tier does not exist."""

    def __init__(self, geometry: Geometry, transfers: Transfers, cpu: CpuSpace | None, nvme: NvmeSpace | None) -> None:
        self._geometry = geometry
        self._transfers = transfers
        self._cpu = cpu
        self._nvme = nvme

    @property
    def busy(self) -> bool:
        """Whether a job is planned or under way, or a change of the index waits for its commit."""
        return len(self._transfers) > 0 or (self._nvme is not None and self._nvme.uncommitted)

    @property
    def planned_jobs(self) -> int:
        """Jobs that were ever planned. While that stays the same, and the engine is not busy, so does what is read."""
        return self._transfers.planned

    def read(self) -> dict[str, float]:
        """Return every gauge that there is, by series, but for those of the engine's own blocks."""
        count = self._transfers.count
        found: dict[str, float] = {series: sum(map(count, kinds)) for series, kinds in _JOBS.items()}
        sizes = self._geometry.slot_sizes
        if self._cpu is not None:
            pool, ranks = self._cpu.pool, self._geometry.rank_count
            found["used_bytes.cpu"], found["held_blocks.cpu"] = _used(pool, sizes, ranks)
            found["capacity_bytes.cpu"] = sum(map(int.__mul__, pool.total, sizes)) * ranks
            found["backlog_blocks"] = sum(self._cpu.backlog_count(size_class) for size_class in range(len(sizes)))
        if self._nvme is not None:
            pool = self._nvme.pool
            found["used_bytes.nvme"], found["held_blocks.nvme"] = _used(pool, sizes, self._geometry.part_count)
            found["capacity_bytes.nvme"] = self._nvme.capacity_bytes
            found["limbo_blocks"] = sum(pool.limbo)
            found["uncommitted_changes"] = self._nvme.uncommitted_changes
            free = sum(pool.free)
            found["fragmentation_ratio"] = pool.free_in_short_runs(SHORT_RUN_SLOTS) / free if free else 0.0
            budget_bytes = self._nvme.budget_left_bytes
            if budget_bytes is not None:
                found["write_budget_bytes"] = budget_bytes
            drives = self._nvme.segments.drives
            for drive in range(len(drives)):
                found[f"drive_quarantined.{drive}"] = int(drive in drives.quarantined)
        return found


def _used(pool: SlotPool, sizes: Sequence[int], parts: int) -> tuple[int, int]:
    """Return the bytes and the number of the slots that copies hold."""
    used = [total - free - limbo for total, free, limbo in zip(pool.total, pool.free, pool.limbo, strict=True)]
    return sum(map(int.__mul__, used, sizes)) * parts, sum(used)
