# SPDX-License-Identifier: Apache-2.0
"""What requests found in the tiers, how long they waited, and how full the tiers are. Scheduler thread only."""

from __future__ import annotations

from collections.abc import Sequence

from kvdisk.blocks import CPU, NVME, Slot
from kvdisk.geometry import Geometry
from kvdisk.manager.jobs import MoveDetail, Transfers
from kvdisk.manager.lookup import first_needed
from kvdisk.manager.nvme import NvmeSpace
from kvdisk.manager.pool import SlotPool
from kvdisk.manager.requests import RequestState
from kvdisk.manager.tiers import CpuSpace
from kvdisk.messages import JobKind
from kvdisk.stats import Stats

_Asked = tuple[int, int, int]
"""A lookup: what the GPU had of its own, where the longest hit would have ended, and what was promised beyond the GPU's
own, in tokens."""
_Found = tuple[int, int]
"""Of one hit, what came from the CPU tier, and from NVMe."""


class Served:
    """See the module."""

    def __init__(self, geometry: Geometry, stats: Stats, *, has_cpu: bool, has_nvme: bool) -> None:
        self._geometry = geometry
        self._stats = stats
        self._has_cpu = has_cpu
        self._has_nvme = has_nvme

    def waits(self, request: RequestState, now: float) -> None:
        """A lookup was answered 'not yet'."""
        self._stats.add("lookup_waits")
        if request.waited_since_s is None:
            request.waited_since_s = now

    def gave_up_waiting(self) -> None:
        """A wait has run out."""
        self._stats.add("wait_timeouts")

    def found_too_little(self, tokens: int) -> None:
        """A hit of so many tokens, perhaps none, is not worth a load."""
        if tokens > 0:
            self._stats.add("short_hits")

    def waited(self, request: RequestState, now: float) -> None:
        """A request that waited has got its answer."""
        assert request.waited_since_s is not None
        self._stats.observe("wait_seconds", max(0.0, now - request.waited_since_s))
        request.waited_since_s = None

    def _asked(self, request: RequestState) -> _Asked | None:
        """Return the last lookup, which is dealt with from here on."""
        asked, request.asked = request.asked, None
        if asked is None:
            return None
        local_tokens, limit_tokens, promised_tokens = asked
        step = self._geometry.step_tokens
        return local_tokens, max(local_tokens, limit_tokens // step * step), promised_tokens

    def passed_over(self, request: RequestState) -> None:
        """A request runs that was promised nothing, or whose promise the engine did not take: then nobody missed it."""
        asked = self._asked(request)
        if asked is not None and asked[2] == 0:
            self._count(asked, asked[0], (0, 0), (0, 0))

    def loaded(
        self,
        request: RequestState,
        local_tokens: int,
        external_tokens: int,
        cpu: Sequence[Slot | None],
        nvme: Sequence[Slot | None],
        details: Sequence[MoveDetail],
    ) -> None:
        """A load of ``external_tokens`` was planned: note how it divides between the tiers in ``request.served``.

        ``cpu``, ``nvme``: each block's slots, as in its move. A token is NVMe's where any of its groups' blocks comes
        from there.
        """
        end_tokens = local_tokens + external_tokens
        asked = self._asked(request) or (local_tokens, end_tokens, external_tokens)
        nvme_blocks, cpu_blocks = len(nvme) - nvme.count(None), len(cpu) - cpu.count(None)
        if nvme_blocks:  # some of which land in CPU slots
            cpu_blocks = sum([slot is not None and other is None for slot, other in zip(cpu, nvme, strict=True)])
        if not self._has_cpu:
            nvme_tokens = external_tokens
        else:
            nvme_tokens = self._tokens_on_nvme(local_tokens, nvme, details) if nvme_blocks else 0
            nvme_tokens = min(nvme_tokens, external_tokens)
        cpu_tokens = external_tokens - nvme_tokens
        request.served = {CPU: cpu_tokens, NVME: nvme_tokens}
        self._count(asked, end_tokens, (cpu_tokens, nvme_tokens), (cpu_blocks, nvme_blocks))

    def _tokens_on_nvme(self, local_tokens: int, nvme: Sequence[Slot | None], details: Sequence[MoveDetail]) -> int:
        groups = self._geometry.groups
        step = min(group.block_tokens for group in groups)
        if len(groups) == 1:
            return (len(nvme) - nvme.count(None)) * step
        found: set[int] = set()
        for slot, detail in zip(nvme, details, strict=True):
            if slot is not None:
                start = detail.position * groups[detail.group].block_tokens
                found.update(range(max(start, local_tokens), start + groups[detail.group].block_tokens, step))
        return len(found) * step

    def _count(self, asked: _Asked, hit_end_tokens: int, tokens: _Found, blocks: _Found) -> None:
        """Count hits and misses. ``hit_end_tokens``: up to where the request has its KV now."""
        start_tokens, end_tokens, _ = asked
        (cpu_tokens, nvme_tokens), (cpu_blocks, nvme_blocks) = tokens, blocks
        asked_tokens = end_tokens - start_tokens
        missed_tokens = max(0, asked_tokens - cpu_tokens - nvme_tokens)
        missed_blocks = 0
        if end_tokens > hit_end_tokens:
            for group in self._geometry.groups:
                first = max(first_needed(group, start_tokens, end_tokens), hit_end_tokens // group.block_tokens)
                missed_blocks += max(0, end_tokens // group.block_tokens - first)
        stats = self._stats
        stats.add("lookup_tokens", max(asked_tokens, cpu_tokens + nvme_tokens))
        if self._has_cpu:
            if cpu_tokens or cpu_blocks:
                stats.add("hit_tokens.cpu", cpu_tokens)
                stats.add("hit_blocks.cpu", cpu_blocks)
            if missed_tokens or missed_blocks or nvme_tokens or nvme_blocks:
                stats.add("missed_tokens.cpu", missed_tokens + nvme_tokens)
                stats.add("missed_blocks.cpu", missed_blocks + nvme_blocks)
        if self._has_nvme:
            if nvme_tokens or nvme_blocks:
                stats.add("hit_tokens.nvme", nvme_tokens)
                stats.add("hit_blocks.nvme", nvme_blocks)
            if missed_tokens or missed_blocks:
                stats.add("missed_tokens.nvme", missed_tokens)
                stats.add("missed_blocks.nvme", missed_blocks)


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
