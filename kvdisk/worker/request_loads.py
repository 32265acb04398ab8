# SPDX-License-Identifier: Apache-2.0
"""The loads that a worker was given, by request.

A long load comes in several jobs, each in a plan of its own (``Job.more``). vLLM is told once that
the load has ended, with all blocks that failed: when its last job has come and none is left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from kvdisk.blocks import JobId
from kvdisk.messages import Job, JobKind


@dataclass(slots=True)
class _Load:
    """The load of one request. ``jobs``: those that have not ended. ``more``: others will come.
    ``blocks``: the GPU blocks of all jobs so far. ``failed``: those of them that failed.
    ``is_void``: all have failed."""

    jobs: set[JobId] = field(default_factory=set)
    more: bool = True
    blocks: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    is_void: bool = False


class RequestLoads:
    """The loads whose end was not reported yet. The thread that owns it makes all calls."""

    def __init__(self) -> None:
        self._jobs: dict[JobId, Job] = {}
        self._loads: dict[str, _Load] = {}
        self._load_of: dict[JobId, _Load] = {}
        """The load of each job that has come, though the job may have ended."""

    def __contains__(self, job_id: JobId) -> bool:
        return job_id in self._jobs

    def __len__(self) -> int:
        return len(self._loads)

    @property
    def jobs(self) -> Mapping[JobId, Job]:
        """The jobs of loads that have not ended."""
        return self._jobs

    def begin(self, jobs: Iterable[Job]) -> None:
        """Take note of the loads among a plan's jobs."""
        for job in jobs:
            if job.kind is JobKind.LOAD:
                assert job.request_id is not None
                load = self._load_of[job.id] = self._loads.setdefault(job.request_id, _Load())
                load.jobs.add(job.id)
                load.more = job.more
                load.blocks += [block for move in job.moves for block in move.filled_blocks]
                self._jobs[job.id] = job

    def void(self, job_ids: Iterable[JobId]) -> None:
        """Fail all blocks of every load that has one of these jobs, those that its other jobs
        brought before included: the weights have changed."""
        for job_id in job_ids:
            if job_id in self._load_of:
                self._load_of[job_id].is_void = True

    def end(self, ended: Mapping[JobId, Collection[int]]) -> dict[str, list[int]]:
        """End jobs, each with the positions of its moves that failed. Jobs that are no loads are
        ignored. Return the requests whose load ends by this, each with the GPU blocks that
        failed."""
        names: dict[str, _Load] = {}
        for job_id, positions in ended.items():
            job = self._jobs.pop(job_id, None)
            if job is not None:
                assert job.request_id is not None
                load = names[job.request_id] = self._load_of[job_id]
                load.jobs.remove(job_id)
                load.failed += [block for position in positions for block in job.moves[position].filled_blocks]
        found: dict[str, list[int]] = {}
        for name, load in names.items():
            if not load.jobs and not load.more:
                found[name] = load.blocks if load.is_void else load.failed
                del self._loads[name]
        if found:
            self._load_of = {job_id: load for job_id, load in self._load_of.items() if load.jobs or load.more}
        return found
