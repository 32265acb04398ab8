# SPDX-License-Identifier: Apache-2.0
"""One rank of a live engine: small tensors for KV, the real worker's wing over them, and a check of
every byte served.

It hands plans to the mover as the connector's worker side does. A ``LocalRank`` works in the
caller's process; a ``RemoteRank`` is served by ``serve_rank`` in a process of its own, which can be
stopped, and which outlives a scheduler that is killed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
import torch

from kvdisk.assembly import WorkerHalf, assemble_worker
from kvdisk.blocks import JobId, group_of
from kvdisk.config import Config
from kvdisk.messages import NO_BLOCK, Job, JobKind, JobResult, Plan, Report
from kvdisk.worker.request_loads import RequestLoads
from support.fake_engine import StepWork
from support.live_model import LiveModel

MakeWorker = Callable[[Config, LiveModel, int, list[list[torch.Tensor]]], WorkerHalf]
IDLE_WAIT_S = 0.002
OUTLIVING_S = 120.0
"""Longest that a rank goes on with the jobs it has, after its scheduler is gone."""


class WrongBytesError(AssertionError):
    """A block holds something else than it must: what kvdisk is there to prevent."""


def make_worker(config: Config, model: LiveModel, rank: int, layers: list[list[torch.Tensor]]) -> WorkerHalf:
    return assemble_worker(config, model.geometry, rank, layers)


class LocalRank:
    """``Rank`` in the caller's process, its mover on a thread of its own, unless ``make`` builds
    another. Looks raise WrongBytesError.

    ``turned``: the mover has no thread, and is turned here until nothing happens any more.
    """

    def __init__(
        self,
        config: Config,
        model: LiveModel,
        rank: int,
        block_count: int,
        make: MakeWorker = make_worker,
        *,
        turned: bool = False,
    ) -> None:
        self.rank = rank
        self._model = model
        self._layers = [
            [torch.zeros((block_count, size), dtype=torch.uint8) for size in model.layer_bytes(group.group)]
            for group in model.geometry.groups
        ]
        self._views = [[layer.numpy() for layer in layers] for layers in self._layers]
        self._parts = make(config, model, rank, self._layers)
        self._turned = turned
        self._jobs: dict[JobId, Job] = {}
        """Those that have not been reported."""
        self._weights = 0
        self._idle = False
        self._report = Report()
        self._loads = RequestLoads()
        self._loaded: dict[str, list[int]] = {}

    def before_forward(self, work: StepWork) -> None:
        mover, plan = self._parts.mover, work.plan
        self._weights, self._idle = work.weights, plan.idle
        self._jobs |= {job.id: job for job in plan.jobs}
        self._loads.begin(plan.jobs)
        self._loads.void(plan.void)
        if plan.fence or plan.urgent:
            mover.protect(plan._replace(jobs=plan.jobs_before, void=()))
        if plan.jobs_beside or plan.void:
            mover.submit(Plan(plan.jobs_beside, void=plan.void))

    def forward(self, work: StepWork) -> None:
        for group, block, digest in work.writes:
            self._write(group, block, self._model.content(work.weights, digest, group, self.rank))

    def check_reads(self, work: StepWork) -> None:
        for group, block, digest in work.reads:
            self._check(group, block, digest, "reads")

    def after_forward(self, work: StepWork) -> None:
        stores = work.plan.jobs_after
        if stores:
            self._parts.mover.submit(Plan(stores))

    def take_report(self) -> tuple[Report, dict[str, list[int]]]:
        self._give_time()
        self._collect()
        taken = self._report, self._loaded
        self._report, self._loaded = Report(), {}
        return taken

    def _give_time(self) -> None:
        if self._turned:
            while self._parts.mover.turn():
                pass
        elif self._idle:
            self._parts.mover.wait_any(IDLE_WAIT_S)

    def outlive(self) -> int:
        """Go on with the jobs at hand, as a worker does whose scheduler died; return how many have
        ended since."""
        end_s = time.monotonic() + OUTLIVING_S
        out = len(self._jobs)
        while self._jobs and time.monotonic() < end_s:
            self._parts.mover.wait_any(0.1)
            self._collect()
        return out - len(self._jobs)

    def close(self) -> None:
        self._parts.close()

    def _collect(self) -> None:
        """Take the mover's results, and look at every block that a load has filled before anybody
        hears of it."""
        report = self._parts.mover.poll()
        for job_id, result in report.results.items():
            self._end(self._jobs.pop(job_id), result)
        self._report.merge(report)

    def _end(self, job: Job, result: JobResult) -> None:
        if job.kind is not JobKind.LOAD:
            return
        assert job.request_id is not None
        for position, move in enumerate(job.moves):
            if position not in result.failed:
                for block, digest in zip(move.gpu_blocks, self._model.digests_of(move.key), strict=True):
                    if block != NO_BLOCK:
                        self._check(group_of(move.key), block, digest, f"was told that {job.request_id} loaded")
        self._loaded |= self._loads.end({job.id: result.failed})

    def _write(self, group: int, block: int, content: bytes) -> None:
        start = 0
        for view in self._views[group]:
            view[block] = np.frombuffer(content, np.uint8, view.shape[1], start)
            start += view.shape[1]

    def _check(self, group: int, block: int, digest: bytes, what: str) -> None:
        content = self._model.content(self._weights, digest, group, self.rank)
        found = b"".join(view[block].tobytes() for view in self._views[group])
        if found != content:
            bad = [at for at in range(len(content)) if found[at] != content[at]]
            raise WrongBytesError(
                f"rank {self.rank} {what} block {block} of group {group}, hash {digest.hex()}: {len(bad)} of "
                f"{len(content)} bytes are wrong, the first at {bad[0]}"
            )


class RemoteRank:
    """``Rank``: a ``LocalRank`` at the other end of a pipe, which does all of a step at once.
    ``pid``: of its process."""

    def __init__(self, connection: Connection, pid: int) -> None:
        self.pid = pid
        self._connection = connection

    def before_forward(self, work: StepWork) -> None:
        """Nothing: the plan goes with the step's work."""

    def forward(self, work: StepWork) -> None:
        self._connection.send(work)

    def check_reads(self, work: StepWork) -> None:
        """Nothing: the rank looks."""

    def after_forward(self, work: StepWork) -> None:
        """Nothing, likewise."""

    def take_report(self) -> tuple[Report, dict[str, list[int]]]:
        """See ``Rank``. Raises WrongBytesError."""
        taken: tuple[Report, dict[str, list[int]]] | str = self._connection.recv()
        if isinstance(taken, str):
            raise WrongBytesError(taken)
        return taken

    def close(self) -> None:
        self._connection.send(None)
        self._connection.recv()  # the rank says when it has closed
        self._connection.close()


LiveRank = LocalRank | RemoteRank


def serve_rank(connection: Connection, config: Config, model: LiveModel, rank: int, block_count: int) -> None:
    """Be the process of a ``RemoteRank``. When the scheduler is gone, go on with its jobs to their
    end, and say so."""
    local = LocalRank(config, model, rank, block_count)
    try:
        while (work := connection.recv()) is not None:
            local.before_forward(work)
            local.forward(work)
            local.check_reads(work)
            local.after_forward(work)
            connection.send(local.take_report())
        local.close()
        connection.send(None)
    except WrongBytesError as error:
        print(f"WRONG BYTES: {error}", file=sys.stderr, flush=True)
        connection.send(str(error))
        raise
    except (EOFError, ConnectionError):
        ended = local.outlive()
        local.close()
        print(f"rank {rank} outlived its scheduler and ended {ended} jobs", file=sys.stderr, flush=True)
