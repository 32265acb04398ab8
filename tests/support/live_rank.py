# SPDX-License-Identifier: Apache-2.0
"""One rank of a live engine: small tensors for KV, the real worker's wing over them, and a check of
every byte served.

It stands for vLLM's model runner: it takes a step's work, writes what the model would compute, and
hands plans to the mover as the connector's worker side does. A ``LocalRank`` works in the caller's
process; a ``RemoteRank`` is served by ``serve_rank`` in a process of its own, which can be stopped,
and which outlives a scheduler that is killed.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import numpy as np
import torch

from kvdisk.assembly import WorkerParts, assemble_worker
from kvdisk.blocks import JobId, group_of
from kvdisk.config import Config
from kvdisk.geometry import GroupGeometry
from kvdisk.messages import Job, JobKind, Plan, Report
from support.fake_requests import FakeRequest
from support.live_model import LiveModel

MakeWorker = Callable[[Config, LiveModel, int, list[list[torch.Tensor]]], WorkerParts]
IDLE_WAIT_S = 0.002
OUTLIVING_S = 120.0
"""Longest that a rank goes on with the jobs it has, after its scheduler is gone."""


class WrongBytesError(AssertionError):
    """A block holds something else than it must: what kvdisk is there to prevent."""


@dataclass(slots=True)
class StepWork:
    """A step's work for a rank. ``writes`` and ``reads``: (group, block id, hash) of what the model
    computes and reads.

    ``weights``: number of the weights in memory.
    """

    plan: Plan
    weights: int
    writes: list[tuple[int, int, bytes]] = field(default_factory=list)
    reads: list[tuple[int, int, bytes]] = field(default_factory=list)

    def add(self, request: FakeRequest, start: int, groups: Sequence[GroupGeometry]) -> None:
        """Add the blocks that a request writes from token ``start`` on, and all that it reads,
        those included."""
        for group, table in zip(groups, request.table, strict=True):
            for position in range(math.ceil(request.computed / group.block_tokens)):
                if not table[position]:
                    assert position < start // group.block_tokens, "a token is computed into the null block"
                    continue
                end = min((position + 1) * group.block_tokens, request.computed)
                block = (group.group, table[position], request.hash_of(end))
                if end > start:
                    self.writes.append(block)
                self.reads.append(block)


@dataclass(slots=True)
class StepReply:
    """What a rank finished: a report, and by request whose load ended its failed blocks. ``wrong``:
    wrong bytes."""

    report: Report = field(default_factory=Report)
    loads: dict[str, list[int]] = field(default_factory=dict)
    wrong: str = ""


def make_worker(config: Config, model: LiveModel, rank: int, layers: list[list[torch.Tensor]]) -> WorkerParts:
    """Build a rank's wing as the connector does."""
    return assemble_worker(config, model.geometry, rank, layers)


class LocalRank:
    """A rank in the caller's process, its mover on a thread of its own, unless ``make`` builds
    another. ``start`` and ``finish`` come in turn, once each in a step.

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
        self._loads: dict[JobId, Job] = {}
        self._out: set[JobId] = set()
        self._weights = 0
        self._reply = StepReply()

    def start(self, work: StepWork) -> None:
        """Do all of the step."""
        self.before_forward(work)
        self.forward(work)
        self.after_forward(work)
        if self._turned:
            while self._parts.mover.turn():
                pass
        elif work.plan.idle:
            self._parts.mover.wait_any(IDLE_WAIT_S)
        self._collect()

    def before_forward(self, work: StepWork) -> None:
        """Hand the mover what does not wait for the model's work."""
        mover, plan = self._parts.mover, work.plan
        self._weights = work.weights
        if plan.fence or plan.urgent:
            mover.protect(plan._replace(jobs=plan.jobs_before, void=()))
        early = plan.jobs_beside
        self._loads |= {job.id: job for job in early if job.kind is JobKind.LOAD}
        self._out |= {job.id for job in plan.jobs}
        if early or plan.void:
            mover.submit(Plan(early, void=plan.void))

    def forward(self, work: StepWork) -> None:
        """Run the model: write what it computes, and look at all that it reads."""
        for group, block, digest in work.writes:
            self._write(group, block, self._model.content(work.weights, digest, group, self.rank))
        self.check_reads(work)

    def check_reads(self, work: StepWork) -> None:
        """Look at all that the model reads. Raises WrongBytesError."""
        for group, block, digest in work.reads:
            self._check(group, block, digest, "reads")

    def after_forward(self, work: StepWork) -> None:
        """Hand the mover the stores, which read what the model has computed."""
        stores = work.plan.jobs_after
        if stores:
            self._parts.mover.submit(Plan(stores))

    def finish(self) -> StepReply:
        """Return what the rank finished. Raises WrongBytesError."""
        reply, self._reply = self._reply, StepReply()
        return reply

    def outlive(self) -> int:
        """Go on with the jobs at hand, as a worker does whose scheduler died; return how many have
        ended since."""
        end_s = time.monotonic() + OUTLIVING_S
        out = len(self._out)
        while self._out and time.monotonic() < end_s:
            self._parts.mover.wait_any(0.1)
            self._collect()
        return out - len(self._out)

    def close(self) -> None:
        self._parts.close()

    def _collect(self) -> None:
        """Take the mover's results, and look at every block that a load has filled before anybody
        hears of it."""
        report = self._parts.mover.poll()
        self._out.difference_update(report.results)
        for job_id, result in report.results.items():
            job = self._loads.pop(job_id, None)
            if job is None:
                continue
            assert job.request_id is not None
            for position, move in enumerate(job.moves):
                if position not in result.failed:
                    self._check(group_of(move.key), move.block, move.key[:-2], f"was told that {job.request_id} loaded")
            self._reply.loads[job.request_id] = [job.moves[position].block for position in result.failed]
        self._reply.report.merge(report)

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
    """A ``LocalRank`` at the other end of a pipe. ``pid``: of its process."""

    def __init__(self, connection: Connection, pid: int) -> None:
        self.pid = pid
        self._connection = connection

    def start(self, work: StepWork) -> None:
        self._connection.send(work)

    def finish(self) -> StepReply:
        reply: StepReply = self._connection.recv()
        if reply.wrong:
            raise WrongBytesError(reply.wrong)
        return reply

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
            local.start(work)
            connection.send(local.finish())
        local.close()
        connection.send(None)
    except WrongBytesError as error:
        print(f"WRONG BYTES: {error}", file=sys.stderr, flush=True)
        connection.send(StepReply(wrong=str(error)))
        raise
    except (EOFError, ConnectionError):
        ended = local.outlive()
        local.close()
        print(f"rank {rank} outlived its scheduler and ended {ended} jobs", file=sys.stderr, flush=True)
