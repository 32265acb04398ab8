# SPDX-License-Identifier: Apache-2.0
"""The stand-in for a tier after an error of ours: nothing is stored or loaded until the engine
ends, which goes on with memory alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import LookupResult, OffloadingEvent, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult

from kvdisk.connector.metrics import tier_stats
from kvdisk.stats import Stats

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.v1.kv_offload.tiering.base import TransferJob


class TierOff:
    """Answers the hooks of a tier, by methods of their names: see ``off``.

    No row of memory is touched any more. ``results``: those of jobs that vLLM has not been told.
    ``jobs``: those that it waits for, which have failed. ``taken_back``: events of what was
    published. ``stats``: what was counted and not told. ``close``: releases the store; idempotent.
    """

    def __init__(
        self,
        results: Iterable[JobResult],
        jobs: Iterable[int],
        taken_back: list[OffloadingEvent],
        stats: Stats,
        close: Callable[[], None],
    ) -> None:
        self._results = {result.job_id: result for result in results}
        self._taken_back = taken_back
        self._stats = stats
        self._close = close
        for job_id in jobs:
            self._fail(job_id)

    def _fail(self, job_id: int) -> None:
        self._results.setdefault(job_id, JobResult(job_id, False))

    def on_new_request(self) -> RequestOffloadingContext:
        """Follow no request."""
        return RequestOffloadingContext()

    def lookup(self) -> LookupResult:
        """Return that nothing is there."""
        return LookupResult.MISS

    def on_request_finished(self) -> None:
        """Tell nobody."""

    def submit_store(self, job_metadata: TransferJob | None) -> None:
        """Fail the job."""
        if job_metadata is not None:
            self._fail(job_metadata.job_id)

    submit_load = submit_store

    def get_finished_jobs(self) -> list[JobResult]:
        """Return the jobs that have ended, each once."""
        results, self._results = self._results, {}
        return list(results.values())

    def on_schedule_end(self) -> None:
        """Send nothing."""

    def has_pending_work(self) -> bool:
        """Whether a job's end is still to be told."""
        return bool(self._results)

    def drain_jobs(self) -> None:
        """Wait for nothing."""

    def note_weights(self) -> None:
        """Do nothing: nothing is stored or loaded."""

    def take_events(self) -> list[OffloadingEvent]:
        """Return once that all has left which was published."""
        events, self._taken_back = self._taken_back, []
        return events

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return what was counted and not told, once."""
        taken = self._stats.take()
        return None if taken.empty else tier_stats(taken)

    def shutdown(self) -> None:
        """Release the store. Idempotent."""
        self._close()
