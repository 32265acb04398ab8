# SPDX-License-Identifier: Apache-2.0
"""Blocks that loads are just bringing to the GPU, so that one load serves all who want them. Scheduler thread only.

The engine has a loaded block in its prefix cache from the step after its load was settled on, before it looks up any
request that waits: whoever has waited for the load finds its blocks on the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvdisk.blocks import BlockKey, JobId
from kvdisk.manager.copies import READY
from kvdisk.messages import Job

_READY = bytes([READY])


class GpuLoads:
    """See the module. A block that two jobs load is the later one's.

    ``enabled``: whether the engine has a prefix cache. Without one nothing is noted, and so nobody waits.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._loaders: dict[BlockKey, JobId] = {}
        self._jobs: dict[JobId, Job] = {}

    def begin(self, job: Job) -> None:
        """A load was planned."""
        if self._enabled:
            self._jobs[job.id] = job
            self._loaders.update(dict.fromkeys([move.key for move in job.moves], job.id))

    def end(self, job_id: JobId) -> None:
        """A load was settled, or nobody will use what it brings. It may have ended before."""
        job = self._jobs.pop(job_id, None)
        if job is not None:
            for move in job.moves:
                if self._loaders.get(move.key) == job_id:
                    del self._loaders[move.key]

    def clear(self) -> None:
        """For a new epoch: no load on its way brings anything."""
        self._jobs.clear()
        self._loaders.clear()

    @property
    def any(self) -> bool:
        """Whether any load is on its way."""
        return bool(self._jobs)

    def is_out(self, job_id: JobId | None) -> bool:
        """Whether a load is on its way."""
        return job_id in self._jobs

    def loader_of(self, key: BlockKey) -> JobId | None:
        """Return the job that loads a block; None: none does."""
        return self._loaders.get(key)

    def presences(self, keys: Sequence[BlockKey]) -> bytes:
        """Return, as ``Catalog.presences``: READY for what is on its way to the GPU."""
        return bytes(map(self._loaders.__contains__, keys)).replace(b"\1", _READY)
