# SPDX-License-Identifier: Apache-2.0
"""A rank of a live engine whose blocks are on the fake GPU.

The model is a stream, as vLLM's is: it writes and reads blocks there, and nothing waits for it but
the engine, one step late where it runs ahead. Each block that a request reads, and each that a load
has filled, is copied on that stream at that time, and compared with what it must hold once the
engine has waited for the step.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from support.fake_engine import StepWork
from support.live_engine import LiveEngine
from support.live_model import LiveModel
from support.live_rank import LocalRank, WrongBytesError

from kvdisk.assembly import WorkerHalf, assemble_worker
from kvdisk.blocks import GROUP_BYTES, JobId, Tier, group_of
from kvdisk.config import Config
from kvdisk.messages import Job, JobKind, JobResult, Reason, Report
from kvdisk.worker.arena import Arena
from kvdisk.worker.copier import CudaLanes, Lane

ASKS_IN_VAIN = (0, 0, 0, 30, 300)
_CAPTURE_S = 0.002
Look = tuple[torch.Tensor, int, int, int, bytes, str]


class GpuRank(LocalRank):
    """``LocalRank`` whose blocks are on a GPU.

    ``late``: steps that the host runs ahead of the model. ``apart``: layers are tensors of their
    own; otherwise a block's layers lie behind each other. ``device``: the GPU's number.
    ``captures``: likelihood that the model captures CUDA graphs in a step. ``looked``: blocks that
    were compared. ``may_end``: the mover may meet an error that ends it; what it was
    given then fails, and all goes on without kvdisk. ``has_ended``: it has.
    """

    may_end = has_ended = False

    def __init__(
        self,
        config: Config,
        model: LiveModel,
        rank: int,
        block_count: int,
        *,
        late: int,
        apart: bool,
        device: int,
        captures: float = 0.0,
    ) -> None:
        self.looked = 0
        self._slept = set[JobId]()
        """Jobs that were under way when a sleep began."""
        self._captures, self._chance = captures, random.Random(rank)
        self._late = late
        self._steps: list[tuple[torch.cuda.Event, list[Look]]] = []
        self._looks: list[Look] = []
        self._stream = torch.cuda.Stream(device)

        def make(config: Config, model: LiveModel, rank: int, layers: list[list[torch.Tensor]]) -> WorkerHalf:
            self._layers = [self._on_gpu(group, apart=apart) for group in layers]
            self._views = []
            return assemble_worker(config, model.geometry, rank, self._layers)

        with self._on_stream():
            super().__init__(config, model, rank, block_count, make)
            if captures:
                self._capture()  # as vLLM does, while memory is still being pinned

    def _on_stream(self) -> AbstractContextManager[Any]:
        """Return a context in which this thread's device and stream are the model's."""
        context: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return context

    @staticmethod
    def _on_gpu(group: Sequence[torch.Tensor], *, apart: bool) -> list[torch.Tensor]:
        sizes = [layer.shape[1] for layer in group]
        if apart:
            return [torch.zeros(layer.shape, dtype=torch.uint8, device="cuda") for layer in group]
        whole = torch.zeros(group[0].shape[0], sum(sizes), dtype=torch.uint8, device="cuda")
        return list(whole.split(sizes, 1))

    def before_forward(self, work: StepWork) -> None:
        with self._on_stream():
            if work.zeroes:
                for layer in (layer for group in self._layers for layer in group):
                    for block in work.new_blocks:
                        layer[block].fill_(0xDD)
            super().before_forward(work)

    def forward(self, work: StepWork) -> None:
        with self._on_stream():
            super().forward(work)
            if self._chance.random() < self._captures:
                self._capture()

    def _capture(self) -> None:
        """Capture a CUDA graph as vLLM does: meanwhile most calls of other threads end it."""
        number = torch.zeros(1, device=self._stream.device)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="global")
        number.add_(1)
        time.sleep(_CAPTURE_S)
        graph.capture_end()
        graph.replay()
        assert number.item() == 1

    def check_reads(self, work: StepWork) -> None:
        with self._on_stream():
            super().check_reads(work)

    def after_forward(self, work: StepWork) -> None:
        with self._on_stream():
            super().after_forward(work)

    def take_report(self) -> tuple[Report, dict[str, list[int]]]:
        with self._on_stream():
            event = torch.cuda.Event()
            event.record()
            self._steps.append((event, self._looks))
            self._looks = []
            while len(self._steps) > self._late:
                self._settle(*self._steps.pop(0))
            return super().take_report()

    def close(self) -> None:
        with self._on_stream():
            super().close()
        assert self._parts.mover._ended, "the mover's thread has not come to its end: what it had is never answered"

    @property
    def arenas(self) -> Mapping[Tier, Arena]:
        """The tiers in memory."""
        return self._parts.mover._runner._resources.arenas

    def await_launch(self, most_s: float) -> None:
        """Wait until a copy is at work, or for so long where none comes."""
        end_s = time.monotonic() + most_s
        while not self._parts.mover._runner.copying and time.monotonic() < end_s:
            time.sleep(0.0002)

    def halt_and_overwrite(self) -> None:
        """Do as a worker that is switched off; then let the model write all blocks that no load
        does."""
        jobs = [job for job in self._jobs.values() if job.kind is JobKind.LOAD]
        loaded = {(group_of(move.key), block) for job in jobs for move in job.moves for block in move.gpu_blocks}
        with self._on_stream():
            self._parts.mover.halt()
            for group, layers in enumerate(self._layers):
                for block in range(layers[0].shape[0]):
                    if (group, block) not in loaded:
                        for layer in layers:
                            layer[block].fill_(0xEE)

    def sleep(self) -> None:
        """Leave the GPU. Its blocks are lost then, whatever is still at work there."""
        self._slept.update(self._jobs)
        with self._on_stream():
            self._parts.mover.leave_gpu()
        self._stream.synchronize()
        self._lose_blocks()

    def wake(self) -> None:
        """Have the memory back, with nothing in it."""
        self._lose_blocks()
        with self._on_stream():
            self._parts.mover.return_to_gpu()

    def _end(self, job: Job, result: JobResult) -> None:
        if job.id in self._slept:  # nobody waits for it any more, and what it had brought is lost
            result = JobResult(
                1, dict.fromkeys(range(len(job.moves)), Reason.CANCELLED), result.late, result.late_ranks
            )
        super()._end(job, result)

    def _lose_blocks(self) -> None:
        unmaps = torch.cuda.Stream(self._stream.device)
        with torch.cuda.stream(unmaps):
            for layer in (layer for layers in self._layers for layer in layers):
                layer.fill_(0xEE)
        unmaps.synchronize()

    def audit(self, engine: LiveEngine) -> None:
        """Compare all blocks that the GPU has cached, and what has not been compared yet. Raises
        WrongBytesError."""
        self._weights = engine.weights
        unpinned = [memory for memory in self._parts.memory if isinstance(memory, Arena) and memory._pinning is None]
        assert not unpinned, "host memory was not pinned: copies of it hold the mover up"
        with self._on_stream():
            for block in map(engine.pool.get_block, range(1, engine.pool.block_count)):
                if block.key is not None:
                    self._check(group_of(block.key), block.block_id, block.key[:-GROUP_BYTES], "has cached")
            event = torch.cuda.Event()
            event.record()
            steps, self._steps, looks, self._looks = self._steps, [], self._looks, []
            for each in [*steps, (event, looks)]:
                self._settle(*each)

    def _collect(self) -> None:
        try:
            super()._collect()
        except WrongBytesError:
            raise
        except RuntimeError:
            if not self.may_end:
                raise
            self.has_ended = True
            super()._collect()

    def _write(self, group: int, block: int, content: bytes) -> None:
        host = torch.empty(len(content), dtype=torch.uint8, pin_memory=True)
        host.numpy()[:] = np.frombuffer(content, np.uint8)
        start = 0
        for layer in self._layers[group]:
            _copy(layer[block], host[start : start + layer.shape[1]])
            start += layer.shape[1]

    def _check(self, group: int, block: int, digest: bytes, what: str) -> None:
        layers = self._layers[group]
        host = torch.empty(sum(layer.shape[1] for layer in layers), dtype=torch.uint8, pin_memory=True)
        start = 0
        for layer in layers:
            _copy(host[start : start + layer.shape[1]], layer[block])
            start += layer.shape[1]
        self._looks.append((host, self._weights, group, block, digest, what))

    def _settle(self, event: torch.cuda.Event, looks: Sequence[Look]) -> None:
        event.synchronize()
        for host, weights, group, block, digest, what in looks:
            self.looked += 1
            content = self._model.content(weights, digest, group, self.rank)
            found = host.numpy().tobytes()
            if found != content:
                bad = [at for at in range(len(content)) if found[at] != content[at]]
                raise WrongBytesError(
                    f"rank {self.rank} {what} block {block} of group {group}, hash {digest.hex()}: {len(bad)} of "
                    f"{len(content)} bytes are wrong, the first at {bad[0]}: {found[bad[0] : bad[0] + 8].hex()}"
                )


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy on the current stream. What a test lets fail once is meant for kvdisk: the model does it
    again."""
    try:
        target.copy_(source, non_blocking=True)
    except RuntimeError:
        target.copy_(source, non_blocking=True)


class SlowEvent(torch.cuda.Event):
    """An event of a slow copy: it has not passed for as often as it is asked in vain, whatever the
    GPU has done."""

    asks_in_vain = 0

    def query(self) -> bool:
        self.asks_in_vain -= 1
        return self.asks_in_vain < 0 and super().query()


def slow_record(chance: random.Random) -> Callable[[CudaLanes, Lane | None], SlowEvent]:
    """Return what stands for ``CudaLanes.record`` where copies are slow, some more than others."""

    def record(self: CudaLanes, lane: Lane | None) -> SlowEvent:
        event = SlowEvent(blocking=True)
        event.asks_in_vain = chance.choice(ASKS_IN_VAIN) if lane else 0
        event.record(self._streams[lane] if lane else torch.cuda.current_stream(self.device))
        return event

    return record
