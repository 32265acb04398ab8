# SPDX-License-Identifier: Apache-2.0
"""A replay without bytes: workers that end every job at once, and an index in memory."""

from __future__ import annotations

from collections.abc import Sequence

from kvdisk.index.base import Progress
from kvdisk.index.memory_index import MemoryIndex
from kvdisk.messages import JobResult, Plan, Report

STEP_S = 0.05


class InstantBackend:
    """``Backend`` on the trace's time: a step takes ``STEP_S``, the first request comes at 0."""

    def __init__(self) -> None:
        self.now = 0.0
        self._origin_s: float | None = None
        self._done = JobResult()
        self._nothing = Report()

    def arrive(self, time_s: float) -> None:
        """See ``Backend``."""
        if self._origin_s is None:
            self._origin_s = time_s
        self.now = max(self.now, time_s - self._origin_s)

    def run(self, plan: Plan, *, idle: bool) -> Report:  # noqa: ARG002 - the protocol's signature
        """Answer every job."""
        self.now += STEP_S
        if not plan.jobs:
            return self._nothing
        return Report(dict.fromkeys([job.id for job in plan.jobs], self._done), stats=self._nothing.stats)

    def computed(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """See ``Backend``. There are no bytes."""

    def loaded(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """See ``Backend``. There are no bytes."""


class InstantIndex(MemoryIndex):
    """``Index`` that has committed everything when it is asked."""

    def poll(self) -> Progress:
        """See ``Index.poll``."""
        self.commit()
        return super().poll()
