# SPDX-License-Identifier: Apache-2.0
"""A ``Bench`` with kvdisk's real workers over CPU tensors, and a model whose KV says what every
byte must be."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from schedulers import BLOCK_TOKENS, BLOCKS, Bench, prompt_of
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from kvdisk.blocks import Tier
from kvdisk.connector.connector import KVDiskConnector
from kvdisk.connector.off import WorkerOff
from kvdisk.geometry import HEADER_BYTES, slot_offset
from kvdisk.messages import Job, JobKind, Plan
from kvdisk.worker.mover import Mover

SLOT_BYTES = 20480
"""Of a block of the bench's model, header included."""
SETTINGS = {"cpu_bytes": "4MiB", "staging_bytes": "1MiB", "device": "posix", "index_commit_s": 0.01}
_WORDS = 64
"""Words of KV of one token, in each group."""
_MASK = (1 << 64) - 1
_FACTOR = 6364136223846793005


class GatedMover(Mover):
    """A mover without a thread. Jobs whose kind is in ``hold`` do not begin, unless a plan wants
    them first.

    ``begin`` is called with each job that begins. ``skew_s``: how far its clock is ahead.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self.hold: set[JobKind] = set()
        self.begin: Any = lambda job: None
        self.skew_s = 0.0
        self._due: set[int] = set()
        super().__init__(*arguments, **more, threaded=False, clock=lambda: time.monotonic() + self.skew_s)

    def turn(self, wait_s: float = 0.0, now_s: float | None = None) -> bool:
        waiting, self._inbox = self._inbox, []
        for plan, _, _ in waiting:
            self._due.update((*plan.urgent, *plan.fence))
        kept = []
        for plan, mark, deadline_s in waiting:
            held = tuple(job for job in plan.jobs if job.kind in self.hold and job.id not in self._due)
            jobs = tuple(job for job in plan.jobs if job not in held)
            for job in jobs:
                self.begin(job)
            if jobs or plan.fence or plan.void:
                self._inbox.append((plan._replace(jobs=jobs), mark, deadline_s))
            if held:
                kept.append((Plan(held), mark, deadline_s))
        happened = super().turn(wait_s, now_s)
        self._inbox = kept
        return happened

    def finish_begun(self) -> None:
        """Turn until all that has begun has ended."""
        while self.turn(0.001) or not self._runner.idle:
            pass


class Worker(KVDiskConnector):
    """kvdisk's worker; what has begun by the end of a step has ended when the step's results are
    asked for."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        self.worker.mover.finish_begun()
        return super().get_transfer_results(finished_req_ids)


class Text(NamedTuple):
    """The tokens of a request, those included that it will sample, and for each the word that its
    KV is made of."""

    tokens: list[int]
    words: list[int]

    def grow(self, length: int) -> None:
        for at in range(len(self.words), length):
            if at == len(self.tokens):
                self.tokens.append((self.words[-1] >> 33) % 500)
            before = self.words[-1] if at else 0
            self.words.append(((before ^ (self.tokens[at] + 1)) * _FACTOR + 1442695040888963407) & _MASK)


class ByteBench(Bench):
    """``Bench`` whose jobs are done, by vLLM's order of hooks, on real tensors, memory and files.

    The KV of a token is a function of all tokens up to it, the group, the rank and ``weights``.
    Each step compares all that it reads, and after it all that the engine's prefix cache has, byte
    by byte. So are the sampled tokens.

    ``hold`` as in ``Bench``: not a byte of these jobs moves. ``fail`` spoils the sources of a job's
    moves as it begins, in the way that ``damage`` names: "payload", "header", "cut" (the file ends
    before it), "late" (past the deadline: all moves fail). ``fail_of``: the only request meant;
    ``hold_rank``, ``fail_rank``: the rank meant, -1: each. ``pipelined``: a step's results arrive
    after the next one was scheduled. ``threaded``: the product's worker, whose mover has its
    thread; then these last six are without effect.
    """

    def __init__(self, folder: Path, *, extra: Any = None, threaded: bool = False, **more: Any) -> None:
        super().__init__(folder, extra=SETTINGS | dict(extra or {}), **more)
        self.weights = 0
        self._threaded = threaded
        self._end_s = time.monotonic() + 600.0
        self.plans: list[Plan] = []
        self.damage = "payload"
        self.fail_of = ""
        self.hold_rank = self.fail_rank = -1
        self._store = Path(dict(extra or {}).get("store_dirs", ""))
        self.outputs: dict[str, list[Any]] = {}
        self._texts: dict[str, Text] = {}
        self._named: dict[bytes, tuple[Text, int]] = {}
        self._named_of: dict[str, int] = {}
        self.behind: list[tuple[SchedulerOutput, ModelRunnerOutput]] = []
        self._lag = int(more.get("pipelined", False))
        self._aggregator = KVOutputAggregator(self.ranks)
        self._views: list[list[np.ndarray]] = []
        self.workers = [self._make_worker(rank) for rank in range(self.ranks)]

    def _make_worker(self, rank: int) -> KVDiskConnector:
        config = copy.copy(self.config)
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.rank = rank
        tensors, views = {}, []
        for group in self.cache.kv_cache_groups:
            shape = (self.cache.num_blocks, group.kv_cache_spec.block_size, _WORDS)
            tensors[group.layer_names[0]] = tensor = torch.zeros(shape, dtype=torch.int64)
            views.append(tensor.numpy().view(np.uint64))
        self._views.append(views)
        if self._threaded:
            plain = KVDiskConnector(config, KVConnectorRole.WORKER, self.cache)
            plain.register_kv_caches(tensors)
            return plain
        worker = Worker(config, KVConnectorRole.WORKER, self.cache)
        with mock.patch("kvdisk.worker.mover.Mover", GatedMover):
            worker.register_kv_caches(tensors)
        worker.worker.mover.begin = lambda job: self._begin(rank, job)
        return worker

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        super().close()

    # -- requests ------------------------------------------------------------------------------

    def make_request(self, request_id: str, *arguments: Any, **more: Any) -> Request:
        request = super().make_request(request_id, *arguments, **more)
        self._texts[request_id] = Text(list(request.prompt_token_ids), [])
        self._named_of[request_id] = 0
        return request

    # -- steps ---------------------------------------------------------------------------------

    def step(self) -> SchedulerOutput:
        output = self.schedule()
        if len(self.behind) > self._lag:
            self.update()
        return output

    def schedule(self) -> SchedulerOutput:
        """Schedule a step and run it; its results wait for ``update``."""
        output = self.scheduler.schedule()
        plan = output.kv_connector_metadata.plan
        self.plans.append(plan)
        self.jobs.extend(plan.jobs)
        self.void |= set(plan.void)
        results: list[Any] = [self._run_rank(rank, output) for rank in range(self.ranks)]
        self.behind.append((output, self._aggregator.aggregate(results) if self.ranks > 1 else results[0]))
        return output

    def update(self) -> None:
        """Let the scheduler hear of the oldest step."""
        output, results = self.behind.pop(0)
        for outputs in self.scheduler.update_from_output(output, results).values():
            for one in outputs.outputs:
                self.outputs.setdefault(one.request_id, []).append(one)
                text, told = self._texts[one.request_id], self.known[one.request_id].output_token_ids
                start = len(self.known[one.request_id].prompt_token_ids)
                text.grow(start + len(told))
                assert list(told) == text.tokens[start : start + len(told)], "a wrong token"
        self._check_cache()

    def run(self, steps: int = 200) -> None:
        super().run(1 << 62 if self._threaded else steps)

    def loading(self, *numbers: int, blocks: int = BLOCKS) -> list[Any]:
        """Begin loads of these prompts, for requests "r1" and so on; not a byte has moved."""
        self.hold = {JobKind.LOAD}
        requests = [self.add(f"r{number}", prompt_of(number), max_tokens=3) for number in numbers]
        assert not self.step().num_scheduled_tokens
        for request in requests:
            self.assert_waits(request, blocks * BLOCK_TOKENS)
            assert not any(self.hashed(self.table(request.request_id))), "nothing is cached that is not there"
        return requests

    def _is_idle(self) -> bool:
        assert time.monotonic() < self._end_s, "it never ends"
        if self.behind and not self.scheduler.requests:
            self.update()
        return not self.behind and super()._is_idle()

    def _run_rank(self, rank: int, output: SchedulerOutput) -> ModelRunnerOutput:
        worker = self.workers[rank]
        if not self._threaded:
            worker.worker.mover.hold = self.hold if self.hold_rank in {-1, rank} else set()
        for view in self._views[rank]:  # vLLM's second-generation runner zeroes before it calls the hook
            view[list(output.new_block_ids_to_zero or ())] = 0
        worker.handle_preemptions(output.kv_connector_metadata)
        with (
            mock.patch.object(kv_transfer_state, "_KV_CONNECTOR_AGENT", worker),
            set_forward_context(None, self.config),
            KVConnectorModelRunnerMixin._get_kv_connector_output(output) as transfer,
        ):
            self._forward(rank, output)
        if not self._threaded:
            worker.worker.mover.skew_s = 0.0
        return self._model_output(output, transfer)

    def _forward(self, rank: int, output: SchedulerOutput) -> None:
        """Compute what was scheduled: compare what is read, and write."""
        for request_id, count in output.num_scheduled_tokens.items():
            end = self.scheduler.requests[request_id].num_computed_tokens
            text = self._texts[request_id]
            text.grow(end)
            for at, group in enumerate(self.cache.kv_cache_groups):
                table, view = np.array(self.table(request_id, at)), self._views[rank][at]
                window = getattr(group.kv_cache_spec, "sliding_window", None)
                start = end - count
                first = max(0, start - window + 1) if window else 0
                content = self._content(rank, at, text, first, end)
                blocks, places = np.divmod(np.arange(first, end), group.kv_cache_spec.block_size)
                blocks = table[blocks]
                assert blocks.all(), f"{request_id} reads or writes the null block of group {at}"
                read = start - first
                assert (view[blocks[:read], places[:read]] == content[:read]).all(), f"{request_id} reads wrong bytes"
                view[blocks[read:], places[read:]] = content[read:]

    def _content(self, rank: int, group: int, text: Text, start: int, end: int) -> np.ndarray:
        text.grow(end)
        salt = np.uint64((self.weights * 4 + rank * 2 + 1) * 0x9E3779B97F4A7C15 + group & _MASK)
        return (np.array(text.words[start:end], np.uint64) ^ salt)[:, None] + np.arange(_WORDS, dtype=np.uint64)

    def _check_cache(self) -> None:
        """Compare every block that the engine's prefix cache would serve."""
        for request in self.known.values():
            for at in range(self._named_of[request.request_id], len(request.block_hashes)):
                self._named[request.block_hashes[at]] = (self._texts[request.request_id], (at + 1) * BLOCK_TOKENS)
            self._named_of[request.request_id] = len(request.block_hashes)
        for block in self.pool.blocks[1:]:
            if block.block_hash is None:
                continue
            group, (text, end) = get_group_id(block.block_hash), self._named[get_block_hash(block.block_hash)]
            for rank, views in enumerate(self._views):
                found = views[group][block.block_id]
                right = self._content(rank, group, text, end - len(found), end)
                assert (found == right).all(), f"block {block.block_id} is cached, and its bytes are wrong"

    def _next_token(self, request: Request) -> int:
        text, done = self._texts[request.request_id], request.num_computed_tokens
        text.grow(done + 1)
        return text.tokens[done]

    # -- failures ------------------------------------------------------------------------------

    def _begin(self, rank: int, job: Job) -> None:
        if self.fail_rank not in {-1, rank} or self.fail_of not in {"", job.request_id}:
            return
        for at in self.fail.get(job.kind, ())[: 1 if self.damage == "cut" else None]:
            if at < len(job.moves):
                self._spoil(rank, job, at)

    def _spoil(self, rank: int, job: Job, at: int) -> None:
        """Spoil what a job is about to read."""
        move, mover = job.moves[at], self.workers[rank].worker.mover
        place = 8 if self.damage == "header" else HEADER_BYTES + 8
        if self.damage == "late":
            mover.skew_s = 1e6
        elif Tier.NVME not in move.slots:
            view = self.workers[rank].worker._parts.memory[0].view(*move.slots[Tier.CPU])
            view[place] ^= 1
        else:
            (path,) = self._store.glob(f"homes/*/segments/{move.slots[Tier.NVME].segment}/rank{rank}.kv")
            (slot_bytes,) = self.connector.scheduler._geometry.slot_sizes
            offset = slot_offset(slot_bytes, move.slots[Tier.NVME].index) + place
            with path.open("r+b") as file:
                if self.damage == "cut":
                    os.truncate(file.fileno(), offset)
                    return
                byte = os.pread(file.fileno(), 1, offset)
                os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), offset)
                os.fsync(file.fileno())

    # -- the end -------------------------------------------------------------------------------

    def assert_waits(self, request: Request, computed_tokens: int) -> None:
        """A load of the request is out: it is not scheduled, holds blocks, and none of what comes
        is in the cache."""
        scheduler = self.scheduler
        assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        assert request.num_computed_tokens == computed_tokens
        assert request in scheduler.kv_holding_waiting and request not in scheduler.running
        assert request not in scheduler.waiting

    def hashed(self, block_ids: Sequence[int]) -> list[bool]:
        """Return which of these GPU blocks the prefix cache knows."""
        return [self.pool.blocks[block_id].block_hash is not None for block_id in block_ids]

    def assert_quiet(self) -> None:
        """Nothing is held, pinned or remembered of any request."""
        super().assert_quiet()
        for half in (worker.worker for worker in self.workers):
            assert not half._loads
            assert isinstance(half, WorkerOff) or half.mover._runner.idle
