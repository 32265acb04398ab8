# SPDX-License-Identifier: Apache-2.0
"""One rank of a ``Bench``: the worker's connector over CPU tensors, and a model whose KV says what
every byte must be."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from other_connectors import Load, OtherConnector
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, resolve_dcp_kv_block_size
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import MambaSpec, RSWASpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from kvdisk.blocks import Tier, group_of
from kvdisk.connector.connector import KVDiskConnector
from kvdisk.geometry import HEADER_BYTES, slot_offset
from kvdisk.messages import Job, JobKind, Plan, Report
from kvdisk.worker.mover import Mover

if TYPE_CHECKING:
    from schedulers import Bench

_MASK = (1 << 64) - 1
_FACTOR = 6364136223846793005


def children_of(connector: Any) -> list[Any]:
    """Return the children of a ``MultiConnector``, or the connector alone."""
    return list(getattr(connector, "_connectors", [connector]))


def kvdisk_of(connector: Any) -> Any:
    """Return kvdisk's connector of what vLLM has made."""
    return next(one for one in children_of(connector) if isinstance(one, KVDiskConnector))


class GatedMover(Mover):
    """A mover without a thread: what has begun by the end of a step has ended when the step's
    results are asked for. Jobs whose kind is in ``hold`` do not begin, unless a plan wants them
    first.

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

    def poll(self) -> Report:
        while self.turn(0.001) or not self._runner.idle:
            pass
        return super().poll()


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


class Rank:
    """``connector`` is what vLLM makes in a worker; ``ours`` is kvdisk's, alone or a child of it.

    The KV of a token is a function of all tokens up to it, the layer, the rank and the bench's
    ``weights``. Each step compares all that it reads. ``unsound``: GPU blocks that another
    connector has left unfilled, and what was computed on them; nothing else may be wrong.
    ``threaded``: the product's mover, not a ``GatedMover``.
    """

    def __init__(self, bench: Bench, number: int, *, threaded: bool) -> None:
        self.unsound: set[int] = set()
        self._settled: dict[str, tuple[int, int]] = {}
        """Of each request where its last step ended, and before where a drafter's KV is final."""
        self._bench = bench
        self._number = number
        self._part = bench.connector.scheduler._geometry.shard_of(number)
        self._threaded = threaded
        self._known: dict[tuple[Any, int, int], np.ndarray] = {}
        """See ``_right``: by a block's hash, layer and weights."""
        self._tables: dict[str, list[list[int]]] = {}
        self._states: dict[tuple[str, int], tuple[int, int, int]] = {}
        """Of a request and a layer: tokens that it has, the place of its running state in its
        table, and how many tokens the last step was right about."""
        config = copy.copy(bench.config)
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.rank = number
        stages = bench.worker_groups
        cache = replace(bench.cache, kv_cache_groups=stages[number // config.parallel_config.tensor_parallel_size])
        tensors = {}
        self.views: list[tuple[int, np.ndarray]] = []
        """Of each layer, its group and its KV as words: (blocks, tokens, words). A recurrent state
        has one row, which is the KV of the last token that it has seen."""
        for at, group in enumerate(cache.kv_cache_groups):
            for name in group.layer_names:
                spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
                rows = 1 if isinstance(spec, MambaSpec) else spec.block_size
                words = spec.real_page_size_bytes // rows // 8
                tensors[name] = torch.zeros((cache.num_blocks, rows, words), dtype=torch.int64)
                self.views.append((at, tensors[name].numpy().view(np.uint64)))
        self.connector = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache)
        # All stages are of one process.
        by_stage = [replace(bench.cache, kv_cache_groups=stage).prefix_cacheable_groups for stage in stages]
        told = mock.patch("kvdisk.connector.worker_side.groups_by_stage", return_value=by_stage)
        with told, nullcontext() if threaded else mock.patch("kvdisk.worker.mover.Mover", GatedMover):
            self.connector.register_kv_caches(tensors)
        self.ours = kvdisk_of(self.connector)
        self.mover = self.ours.worker.mover
        self.mover.begin = self._begin
        for child in children_of(self.connector):
            if isinstance(child, OtherConnector):
                child.fill = self._fill

    # -- steps ---------------------------------------------------------------------------------

    def run(self, output: SchedulerOutput) -> KVConnectorOutput:
        """Run a step by vLLM's order of hooks."""
        if not self._threaded:
            self.mover.hold = self._bench.hold if self._bench.hold_rank in {-1, self._number} else set()
        for _, view in self.views:  # vLLM's second-generation runner zeroes before it calls the hook
            view[list(output.new_block_ids_to_zero or ())] = 0
            for copied in output.kv_cache_block_copies or ():
                view[copied.dst_block_id] = view[copied.src_block_id]
        self._note_tables(output)
        for request_id in output.num_scheduled_tokens:  # and moves states
            self._move_states(request_id, *self._bench.span(request_id)[:2])
        self.connector.handle_preemptions(output.kv_connector_metadata)
        with (
            mock.patch.object(kv_transfer_state, "_KV_CONNECTOR_AGENT", self.connector),
            set_forward_context(None, self._bench.config),
            KVConnectorModelRunnerMixin._get_kv_connector_output(output) as transfer,
        ):
            for request_id in output.num_scheduled_tokens:
                self._forward(request_id, *self._bench.span(request_id), self._drafts(output, request_id))
        for request_id in output.num_scheduled_tokens:
            self._accept(request_id, *self._bench.span(request_id), self._drafts(output, request_id))
        self.mover.skew_s = 0.0
        return transfer

    def _drafts(self, output: SchedulerOutput, request_id: str) -> int:
        return len(output.scheduled_spec_decode_tokens.get(request_id, []))

    def _forward(self, request_id: str, start: int, end: int, right: int, drafts: int) -> None:
        """Compute some tokens: compare what is read, and write. From ``right`` on they are drafts
        that were wrong. A drafter's layers compute those again that lacked a token."""
        read_blocks: set[int] = set()
        written_blocks: set[int] = set()
        known = max(right + 1, self._bench.scheduler.requests[request_id].num_tokens)
        before, settled = self._settled.get(request_id, (-1, 0))
        settled = min(start, settled) if before == start else start
        self._settled[request_id] = right, min(right, known - self._bench.config.num_prefill_lookahead_tokens)
        for layer, (group, view) in enumerate(self.views):
            spec = self._bench.cache.kv_cache_groups[group].kv_cache_spec
            if not spec.prefix_cacheable:  # what it needs of a prefix vLLM computes again, its own way
                continue
            if isinstance(spec, MambaSpec):
                self._advance(layer, request_id, start, end, right, drafts)
                continue
            window, chunk = getattr(spec, "sliding_window", None), getattr(spec, "attention_chunk_size", None)
            first = max(0, start - window + 1) if window else start // chunk * chunk if chunk else 0
            ahead = self._ahead(group)
            content = self._content(layer, self._bench.texts[request_id], first + ahead, end + ahead)
            content[min(right, known - ahead) - first :] ^= np.uint64(_MASK)
            blocks, places = self._places(request_id, group, first, end)
            read = (settled if ahead else start) - first
            # R-SWA reads nothing between prompt and window.
            there = np.flatnonzero(blocks) if isinstance(spec, RSWASpec) else self._held(group, first, end)
            content, blocks, places = content[there], blocks[there], places[there]
            read = int(np.searchsorted(there, read))
            assert blocks.all(), f"{request_id} reads or writes the null block of group {group}"
            read_blocks.update(blocks[:read].tolist())
            written_blocks.update(blocks[read:].tolist())
            if read_blocks & self.unsound:
                content = ~content
            else:
                assert (view[blocks[:read], places[:read]] == content[:read]).all(), f"{request_id} reads wrong bytes"
            view[blocks[read:], places[read:]] = content[read:]
        self.unsound = self.unsound | written_blocks if read_blocks & self.unsound else self.unsound - written_blocks

    def _ahead(self, group: int) -> int:
        """Return how many tokens ahead the KV of a group looks."""
        drafts = self._bench.cache.kv_cache_groups[group].is_eagle_group
        return int(drafts) * self._bench.config.num_prefill_lookahead_tokens  # type: ignore[no-any-return]

    # -- recurrent states ----------------------------------------------------------------------

    def _note_tables(self, output: SchedulerOutput) -> None:
        """Keep block tables as a runner does, who appends to them: vLLM moves blocks of states
        within its own."""
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = [list(ids) for ids in new.block_ids]
        cached = output.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                self._tables[request_id] = [list(ids) for ids in block_ids]
            elif block_ids is not None:
                for table, ids in zip(self._tables[request_id], block_ids, strict=True):
                    table.extend(ids)

    def _state_layers(self) -> list[tuple[int, int, int]]:
        """Return the layers with states: their number, group, and tokens of a block."""
        specs = [self._bench.cache.kv_cache_groups[group].kv_cache_spec for group, _ in self.views]
        return [
            (at, self.views[at][0], spec.block_size) for at, spec in enumerate(specs) if isinstance(spec, MambaSpec)
        ]

    def _move_states(self, request_id: str, start: int, end: int) -> None:
        """Bring a request's recurrent states to where the step goes on, as both runners do."""
        for layer, group, size in self._state_layers():
            expected, column, accepted = self._states.get((request_id, layer), (-1, 0, 1))
            if expected != start:
                column, accepted = (start - 1) // size, 1
            now = (end - 1) // size
            if start and column != now:
                view, table = self.views[layer][1], self._tables[request_id][group]
                view[table[now]] = view[table[column + accepted - 1]]
                accepted = 1
            self._states[request_id, layer] = start, now, accepted

    def _advance(self, layer: int, request_id: str, start: int, end: int, right: int, drafts: int) -> None:
        """Go on from the state after ``start`` tokens to the one after ``end``. Behind drafts there
        is one after each token, in a block of its own; from ``right`` on they are wrong."""
        group, view = self.views[layer]
        _, column, accepted = self._states[request_id, layer]
        text, table = self._bench.texts[request_id], self._tables[request_id][group]
        if start:
            before = self._content(layer, text, start - 1, start)
            assert (view[table[column + accepted - 1]] == before).all(), f"{request_id} goes on from a wrong state"
        ends = range(start + 1, end + 1) if drafts else [end]
        for at, last in enumerate(ends):
            assert table[column + at], f"{request_id} writes the null block of group {group}"
            view[table[column + at]] = self._content(layer, text, last - 1, last) ^ np.uint64(_MASK * (last > right))

    def _accept(self, request_id: str, start: int, end: int, right: int, drafts: int) -> None:
        """Note how many tokens were accepted, and move a state at a block's end there, as runners
        do once they have sampled."""
        for layer, group, size in self._state_layers():
            view, table = self.views[layer][1], self._tables[request_id][group]
            _, column, _ = self._states[request_id, layer]
            computed, first = (right, end - drafts) if drafts else (end, end)
            accepted, whole = computed - first + 1, computed // size * size
            if whole >= first:
                view[table[whole // size - 1]] = view[table[column + whole - first]]
                accepted = 1 if column == whole // size - 1 else accepted
            self._states[request_id, layer] = computed, column, accepted

    def _fill(self, load: Load) -> None:
        """Load for another connector."""
        self.unsound |= set(load.holes)
        for layer, (group, view) in enumerate(self.views):
            blocks, places = self._places(load.request_id, group, load.start, load.end)
            filled = ~np.isin(blocks, list(load.holes))
            content = self._content(layer, self._bench.texts[load.request_id], load.start, load.end)
            view[blocks[filled], places[filled]] = content[filled]

    def _places(self, request_id: str, group: int, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the GPU block of each of a request's tokens, and its place there."""
        spec = self._bench.cache.kv_cache_groups[group].kv_cache_spec
        shards = self._bench.shards if spec.dcp_sharded else 1
        at, places = np.divmod(np.arange(start, end), spec.block_size * shards)
        return np.array(self._bench.table(request_id, group))[at], places // shards

    def _held(self, group: int, start: int, end: int) -> np.ndarray:
        """Return which of some tokens, counted from the first, this rank has. With DCP they take
        turns."""
        shards = self._bench.shards if self._bench.cache.kv_cache_groups[group].kv_cache_spec.dcp_sharded else 1
        return np.flatnonzero(np.arange(start, end) % shards == self._number % shards)

    def _content(self, layer: int, text: Text, start: int, end: int) -> np.ndarray:
        """Return the right KV of some tokens: (tokens, words)."""
        text.grow(end)
        salt = np.uint64((self._bench.weights * 4 + self._part * 2 + 1) * 0x9E3779B97F4A7C15 + layer & _MASK)
        words = np.arange(self.views[layer][1].shape[2], dtype=np.uint64)
        return (np.array(text.words[start:end], np.uint64) ^ salt)[:, None] + words

    def check_cache(self) -> None:
        """Compare every block that the engine's prefix cache would serve."""
        for block in self._bench.pool.blocks[1:]:
            if block.block_hash is None or block.block_id in self.unsound:
                continue
            of_group = get_group_id(block.block_hash)
            for layer, (group, view) in enumerate(self.views):
                if group == of_group:
                    right = self._right(block.block_hash, layer)
                    found = view[block.block_id][: len(right)]
                    assert (found == right).all(), f"block {block.block_id} is cached, and its bytes are wrong"

    def _right(self, block_hash: Any, layer: int) -> np.ndarray:
        """Return what a cached block is to hold of a layer on this rank, worked out once."""
        name = block_hash, layer, self._bench.weights
        if name not in self._known:
            group, view = self.views[layer]
            text, end = self._bench.named(get_block_hash(block_hash))
            size = resolve_dcp_kv_block_size(self._bench.cache.kv_cache_groups[group].kv_cache_spec, self._bench.shards)
            start = (end - 1) // size * size if view.shape[1] > 1 else end - 1
            ahead = self._ahead(group)
            self._known[name] = self._content(layer, text, start + ahead, end)[self._held(group, start, end - ahead)]
        return self._known[name]

    # -- failures ------------------------------------------------------------------------------

    def _begin(self, job: Job) -> None:
        """Spoil what a job is about to read, if the bench wants it."""
        bench = self._bench
        if job.kind is JobKind.LOAD:
            self.unsound.difference_update(block for move in job.moves for block in move.gpu_blocks)
        if bench.fail_rank in {-1, self._number} and bench.fail_of in {"", job.request_id}:
            spoilt: Sequence[int] = bench.fail.get(job.kind, ())
            for at in spoilt[: 1 if bench.damage == "cut" else None]:
                if at < len(job.moves):
                    self._spoil(job, at)

    def _spoil(self, job: Job, at: int) -> None:
        slots, damage = job.moves[at].slots, self._bench.damage
        place = 8 if damage == "header" else HEADER_BYTES + 8
        if damage == "late":
            self.mover.skew_s = 1e6
        elif Tier.NVME not in slots:
            self.ours.worker._parts.memory[0].view(*slots[Tier.CPU])[place] ^= 1
        else:
            (path,) = self._bench.store.glob(f"homes/*/segments/{slots[Tier.NVME].segment}/rank{self._number}.kv")
            group = group_of(job.moves[at].key)
            slot_bytes = self._bench.connector.scheduler._geometry.groups[group].slot_bytes
            offset = slot_offset(slot_bytes, slots[Tier.NVME].index) + place
            with path.open("r+b") as file:
                if damage == "cut":
                    os.truncate(file.fileno(), offset)
                    return
                byte = os.pread(file.fileno(), 1, offset)
                os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), offset)
                os.fsync(file.fileno())
