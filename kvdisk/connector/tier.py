# SPDX-License-Identifier: Apache-2.0
"""``KVDiskTier``: kvdisk's store behind the host memory of vLLM's own ``OffloadingConnector``.

It lives in the scheduler's process. vLLM: one thread at a time calls its hooks, and only its start,
its end and ``drain_jobs`` may wait. A hit takes a row of memory at once, for each key of each
waiting request, and a store is offered once. See docs/OFFLOADING.md.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import numpy as np
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadKey,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvdisk.assembly import goes_on_without_nvme
from kvdisk.blocks import GROUP_BYTES, BlockKey
from kvdisk.config import Config
from kvdisk.connector.backpressure import WriteBackpressure, WriteLoad
from kvdisk.connector.callers import offloading_being_built, request_being_added
from kvdisk.connector.controls import MOST_LOAD, STORE_LIMIT
from kvdisk.connector.hooks import refuse_other_hooks
from kvdisk.connector.identity import fingerprint_of_rows
from kvdisk.connector.kv_groups import element_bytes
from kvdisk.connector.log import join_log
from kvdisk.connector.metrics import tier_metrics, tier_stats
from kvdisk.connector.model_weights import identity_of
from kvdisk.connector.off import ToldOff, guarded, say_off
from kvdisk.connector.refusals import hides_media
from kvdisk.connector.tier_hints import HintedPrompt, TierHints
from kvdisk.connector.tier_off import TierOff
from kvdisk.connector.tier_store import TierStore
from kvdisk.connector.versions import refuse_version
from kvdisk.connector.worker_calls import watch_workers
from kvdisk.errors import DeviceError, printable
from kvdisk.geometry import Geometry
from kvdisk.identity import Identity
from kvdisk.mover_process import MoverProcess
from kvdisk.stats import Stats
from kvdisk.store import BlockKind, Ended, Get, Memory, Presence, Put, Result, Rows
from kvdisk.tier_settings import TierSettings

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.v1.kv_offload.base import OffloadingMetricMetadata, OffloadingSpec, ReqContext, ScheduleEndContext
    from vllm.v1.kv_offload.config import OffloadingConfig
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
    from vllm.v1.kv_offload.tiering.base import TransferJob

logger = logging.getLogger("kvdisk.connector")

STATS_S = 1.0
"""How often counters and gauges are taken."""
MOST_ASKED = 8192
"""Keys of a request that others are asked for in one step."""
MOST_TOLD = 4096
"""Keys of ended requests that the store is told of in a step, where one request has no more."""
_VLLM_GROUP_BYTES = 4
_FINE = frozenset({Result.DONE, Result.PRESENT, Result.REFUSED})
"""Results of a store as it should be: what admission refuses is not wanted."""


class KeyNames:
    """vLLM's keys, which end with its number of a KV-cache group, and kvdisk's, which end with the
    group's position. ``group_ids``: vLLM's numbers, by position."""

    def __init__(self, group_ids: Iterable[int]) -> None:
        self._ours = {
            group_id.to_bytes(_VLLM_GROUP_BYTES, "big"): position.to_bytes(GROUP_BYTES, "big")
            for position, group_id in enumerate(group_ids)
        }
        self._theirs = {ours: theirs for theirs, ours in self._ours.items()}

    def block(self, key: OffloadKey) -> BlockKey:
        """Return kvdisk's key."""
        return BlockKey(key[:-_VLLM_GROUP_BYTES] + self._ours[key[-_VLLM_GROUP_BYTES:]])

    def blocks(self, keys: Iterable[OffloadKey]) -> list[BlockKey]:
        """Return kvdisk's keys: there may be those of a long prompt."""
        ours, cut = self._ours, -_VLLM_GROUP_BYTES
        return [key[:cut] + ours[key[cut:]] for key in keys]

    def offload(self, key: BlockKey) -> OffloadKey:
        """Return vLLM's key."""
        return OffloadKey(key[:-GROUP_BYTES] + self._theirs[key[-GROUP_BYTES:]])


@dataclass(slots=True)
class _Request:
    """What is known of a request that has not ended.

    ``denied``: keys that failed to load for it; vLLM would ask for them in every step. ``held``:
    those that were answered HIT, and of which it has not been scheduled since. ``brought``: those
    of them that were loaded. ``lost_blocks``: how often vLLM has given away the row of one of these
    before the request was scheduled. ``waits_since``: when it was first told to wait. ``is_stale``:
    it has KV from before a reset. ``asked``: stretches of it that others were asked for.
    ``offered``: its chunks that were offered, by vLLM's group, then by their last token.
    """

    arrival: int
    denied: set[BlockKey] = field(default_factory=set)
    held: set[BlockKey] = field(default_factory=set)
    brought: set[BlockKey] = field(default_factory=set)
    lost_blocks: int = 0
    waits_since: float | None = None
    is_scheduled: bool = False
    is_stale: bool = False
    asked: set[int] = field(default_factory=set)
    offered: dict[bytes, dict[int, BlockKey]] = field(default_factory=dict)
    missed: str = ""
    found_blocks: int = 0
    loaded_blocks: int = 0


class _EndedRequest(NamedTuple):
    """A request that has ended. ``keys``: of its chunks, in the order of its tokens. ``hinted``:
    its prompt, where its sender said something of it."""

    name: str
    keys: list[BlockKey]
    hinted: HintedPrompt | None


def refuse_vllm() -> None:
    """Raise ConfigError, in one sentence, where this vLLM is not supported, or calls a hook
    otherwise than the tier takes it."""
    refuse_version()
    refuse_other_hooks(KVDiskTier, OWN_NAMES)


class KVDiskTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM is untyped here
    """See the module. ``settings``: an entry of ``secondary_tiers``, as docs/OFFLOADING.md has
    them. Raises ConfigError."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        **settings: Any,
    ) -> None:
        refuse_vllm()
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        join_log()
        self._settings = TierSettings.of(settings)
        self.locality = None if self._settings.locality is None else Locality(self._settings.locality)
        self._stand_in: TierOff | None = None
        self._config = self._settings.config
        self._chunk_tokens = [
            group.tokens_per_block * offloading_spec.blocks_per_chunk for group in offloading_spec.config.groups
        ]
        self._names = KeyNames(group.group_id for group in offloading_spec.config.groups)
        self._chunk_tokens_of = {
            group.group_id.to_bytes(_VLLM_GROUP_BYTES, "big"): tokens
            for group, tokens in zip(offloading_spec.config.groups, self._chunk_tokens, strict=True)
        }
        self._rows = len(primary_kv_view)
        self._held = 0
        self._requests: dict[str, _Request] = {}
        self._arrivals = 0
        self._jobs: dict[int, TransferJob] = {}
        """Those that vLLM waits for."""
        self._stored_rows = 0
        """Rows of memory that the stores among them hold."""
        self._is_budget_spent = False
        """As of the last step."""
        if isinstance(backpressure_detector, WriteBackpressure):
            backpressure_detector.follow(self._write_load)
        self._hints = TierHints(self._chunk_tokens, self._names.blocks)
        self._done: list[JobResult] = []
        self._ended_requests: deque[_EndedRequest] = deque()
        """Those that the store is to be told of."""
        self._goes_on = False
        self._stats = Stats()
        self._taken_s = 0.0
        self._has_moved = False
        """A job has ended since statistics were taken."""
        self._published: set[BlockKey] | None = set() if self._publishes(offloading_spec) else None
        self._expects_removal = offloading_spec.blocks_per_chunk > 1
        self._mover: MoverProcess | None = None
        self._store: TierStore | None = self._open(offloading_spec.config, primary_kv_view)
        watch_workers(self.note_weights)

    def _publishes(self, offloading_spec: OffloadingSpec) -> bool:
        if not self._settings.enable_kv_events:
            return False
        if not offloading_spec.kv_events_config.enable_kv_cache_events:
            logger.warning("kvdisk publishes no events: enable_kv_events needs vLLM's kv_events_config.")
            return False
        return True

    def _open(self, config: OffloadingConfig, view: memoryview) -> TierStore | None:
        """Open the store. Where the drive does not let us have one, memory serves alone."""
        row_bytes, whose = self.block_size_bytes, offloading_being_built()
        name = self._settings.namespace
        if name is not None or whose is None:
            identity = Identity.certain(*fingerprint_of_rows(config, row_bytes, whose, name))
        else:
            identity = identity_of(lambda digest: fingerprint_of_rows(config, row_bytes, whose, name, digest))
        size = 1 if whose is None else element_bytes(whose[1].kv_cache_groups)
        kinds = [BlockKind(row_bytes, tokens, element_bytes=size) for tokens in self._chunk_tokens]
        rows: Rows = np.asarray(view).view(np.uint8)
        try:
            return cast("TierStore", TierStore.open_for(self._config, identity, kinds, rows, self._start_mover))
        except DeviceError as error:
            if not goes_on_without_nvme(error, has_memory=True):
                raise
            logger.warning("kvdisk is off until the next start, and vLLM goes on with its memory alone: %s", error)
            self._rest()
            return None

    def _start_mover(self, config: Config, geometry: Geometry, rows: Memory) -> MoverProcess:
        self._mover = MoverProcess(config, geometry, rows)
        return self._mover

    @property
    def store(self) -> TierStore:
        """The open store."""
        assert self._store is not None
        return self._store

    @property
    def stand_in(self) -> TierOff | None:
        """What answers the hooks after an error; None before."""
        return self._stand_in

    @property
    def is_off(self) -> bool:
        """Whether nothing is stored or loaded until the engine starts again."""
        return self._stand_in is not None

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """Return the metrics. Asked in the server's process, too: what is wrong in the settings is
        refused there. Raises ConfigError."""
        refuse_vllm()
        TierSettings.of(extra_config)
        return tier_metrics()

    # -- requests ------------------------------------------------------------------------------

    @guarded
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Follow a request. Its chunks are offered as they are computed; those of a streaming
        session, or of overlapping media, are neither stored nor loaded, in memory either.

        vLLM: with each new input it appends all the session's blocks to those that it knows, and
        so takes blocks for chunks that they are not; and it keeps keys of tokens that have gone.
        """
        request = self._request_of(req_context)
        added = request_being_added()
        if added is not None and (added.resumable or hides_media(added)):
            request.is_stale = True
            # vLLM reads them when this hook has ended.
            none = {MOST_LOAD: 0, STORE_LIMIT: 0}
            added.kv_transfer_params = dict(added.kv_transfer_params or {}) | none
        self._hints.begin(req_context)
        return RequestOffloadingContext()

    def _request_of(self, req_context: ReqContext) -> _Request:
        request = self._requests.get(req_context.req_id)
        if request is None:
            self._arrivals += 1
            request = self._requests[req_context.req_id] = _Request(self._arrivals)
        return request

    @guarded
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Say whether a chunk is there. vLLM asks for what memory has not got, in prompt order, and
        of a window from its end."""
        request, block = self._request_of(req_context), self._names.block(key)
        if block in request.denied:
            return LookupResult.MISS
        (presence,) = self.store.presence((block,))
        if presence == Presence.ABSENT and self._ask_around(key, request, req_context):
            (presence,) = self.store.presence((block,))
        if presence == Presence.READY:
            return self._hit(request, block)
        if presence == Presence.ABSENT or not self._may_wait(request):
            request.missed = request.missed or Presence(presence).name.lower()
            return LookupResult.MISS
        return LookupResult.RETRY

    def _hit(self, request: _Request, block: BlockKey) -> LookupResult:
        """Give a chunk, as long as memory has rows for all that was given and is not used yet.

        vLLM takes the row of what was loaded longest ago, also where its request still waits for
        the rest, and then asks for that again, for ever. Where half of the rows were given, who has
        none waits; of who has some the hit ends here where all were.
        """
        if block in request.held:
            if block in request.brought:
                request.brought.discard(block)
                request.lost_blocks += 1
            if request.lost_blocks <= self._rows:
                return LookupResult.HIT
            request.denied.add(block)
            self._let_go(request, (block,))
            return LookupResult.MISS
        if not request.held and 2 * self._held >= self._rows and self._may_wait(request):
            return LookupResult.RETRY
        if self._held >= self._rows:
            request.missed = request.missed or "for want of rows"
            return LookupResult.MISS
        request.held.add(block)
        request.found_blocks += 1
        self._held += 1
        return LookupResult.HIT

    def _may_wait(self, request: _Request) -> bool:
        now_s = time.monotonic()
        if request.waits_since is None:
            request.waits_since = now_s
            self._stats.add("lookup_waits")
        return now_s - request.waits_since < self._config.lookup_wait_s

    def _let_go(self, request: _Request, blocks: Collection[BlockKey]) -> None:
        before = len(request.held)
        request.held.difference_update(blocks)
        request.brought &= request.held
        self._held -= before - len(request.held)

    @guarded
    def on_request_finished(self, req_context: ReqContext) -> None:
        """Tell the store what the request wanted: vLLM's lookups end at memory, so that what is hot
        there would look cold."""
        request = self._requests.pop(req_context.req_id, None)
        if request is None:
            return
        self._let_go(request, list(request.held))
        keys = self._keys_of(req_context)
        hinted = self._hints.end(req_context)
        if keys:
            self._ended_requests.append(_EndedRequest(req_context.req_id, keys, hinted))
        logger.log(
            logging.INFO if self._config.log_requests else logging.DEBUG,
            "kvdisk: request %s: %d chunks, %d found, %d loaded%s.",
            printable(req_context.req_id),
            len(keys),
            request.found_blocks,
            request.loaded_blocks,
            f", the first missing one {request.missed}" if request.missed else "",
        )

    def _keys_of(self, req_context: ReqContext) -> list[BlockKey]:
        """Return the keys of all chunks of a request, in the order of its tokens."""
        positions = req_context._offload_key_positions
        return self._names.blocks(sorted(positions, key=positions.__getitem__))

    def _ask_around(self, key: OffloadKey, request: _Request, req_context: ReqContext) -> bool:
        """Ask others for a chunk and those of its stretch of the prompt, alike in all groups; once
        for each stretch. Return whether it was asked now."""
        positions = req_context._offload_key_positions
        stretch_tokens = max(1, MOST_ASKED // len(self._chunk_tokens)) * max(self._chunk_tokens)
        stretch = max(0, positions.get(key, 0) - 1) // stretch_tokens
        if stretch in request.asked:
            return False
        request.asked.add(stretch)
        start = stretch * stretch_tokens
        alike = [(end, each) for each, end in positions.items() if start < end <= start + stretch_tokens]
        alike.sort(key=itemgetter(0))
        self.store.ask(self._names.blocks(each for _, each in alike) or [self._names.block(key)])
        return True

    def _parents_of(
        self, request: _Request, keys: Sequence[OffloadKey], blocks: Sequence[BlockKey], positions: Mapping[bytes, int]
    ) -> list[BlockKey | None]:
        """Return the parent of each offered chunk: the one before it in its group, which mostly was
        offered before. A recurrent state may end within a chunk. ``blocks``: the block keys of
        ``keys``. ``positions``: the last token of each key of the request."""
        parents, group, tokens = list[BlockKey | None](), b"", 0
        offered: dict[int, BlockKey] = {}
        for key, block, end in zip(keys, blocks, map(positions.get, keys), strict=True):
            if key[-_VLLM_GROUP_BYTES:] != group:
                group = key[-_VLLM_GROUP_BYTES:]
                tokens, offered = self._chunk_tokens_of[group], request.offered.setdefault(group, {})
            if end is None:
                parents.append(None)
                continue
            start = (end - 1) // tokens * tokens
            parent = offered.get(start)
            if parent is None and start:
                parent = self._ending_at(start, group, positions)
            offered[end] = block
            parents.append(parent)
        return parents

    def _ending_at(self, end: int, group: bytes, positions: Mapping[bytes, int]) -> BlockKey | None:
        """Return the chunk of a group that ends at a token, if there is one."""
        found = (each for each, at in positions.items() if at == end and each[-_VLLM_GROUP_BYTES:] == group)
        return next((self._names.block(OffloadKey(each)) for each in found), None)

    # -- jobs ----------------------------------------------------------------------------------

    @guarded
    def submit_store(self, job_metadata: TransferJob) -> None:
        """Store chunks that lie in memory: what is there already, or is not wanted, is left out."""
        self._jobs[job_metadata.job_id] = job_metadata
        self._stored_rows += len(job_metadata.chunk_ids)
        self._put(job_metadata)

    def _put(self, job: TransferJob) -> None:
        request = self._request_of(job.req_context)
        if request.is_stale:
            self._finish(job, JobResult(job.job_id, True))
            return
        keys = list(job.keys)
        blocks = self._names.blocks(keys)
        parents = self._parents_of(request, keys, blocks, job.req_context._offload_key_positions)
        self.store.put(job.job_id, list(map(Put, blocks, parents, job.chunk_ids.tolist())))

    def _write_load(self) -> WriteLoad:
        return WriteLoad(self._stored_rows, self._rows, self._is_budget_spent)

    @guarded
    def submit_load(self, job_metadata: TransferJob) -> None:
        """Load chunks that were answered HIT into rows of memory."""
        self._jobs[job_metadata.job_id] = job_metadata
        self._get(job_metadata)

    def _get(self, job: TransferJob) -> None:
        request = self._requests.get(job.req_context.req_id)  # None: it has ended since its lookup
        blocks = map(Get, self._names.blocks(job.keys), job.chunk_ids.tolist())
        self.store.get(job.job_id, list(blocks), self._arrivals if request is None else request.arrival)

    def _finish(self, job: TransferJob, result: JobResult) -> None:
        del self._jobs[job.job_id]
        self._stored_rows -= 0 if job.is_promotion else len(job.chunk_ids)
        self._done.append(result)
        self._has_moved = True

    @guarded
    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the jobs that have ended, each once."""
        self._settle()
        done, self._done = self._done, []
        return done

    def _settle(self) -> None:
        for ended in self.store.poll():
            job = self._jobs[ended.tag]
            self._finish(job, self._loaded(job, ended) if job.is_promotion else self._stored(job, ended))

    def _stored(self, job: TransferJob, ended: Ended) -> JobResult:
        return JobResult(
            job.job_id,
            success=_FINE.issuperset(ended.results),
            transfer_time=ended.seconds,
            transfer_bytes=ended.moved_bytes,
        )

    def _loaded(self, job: TransferJob, ended: Ended) -> JobResult:
        """Deny the request what has failed to load: it would be asked for again in every step."""
        loaded = [key for key, result in zip(job.keys, ended.results, strict=True) if result is Result.DONE]
        request = self._requests.get(job.req_context.req_id)
        if request is not None:
            blocks = self._names.blocks(job.keys)
            failed = {block for block, result in zip(blocks, ended.results, strict=True) if result is not Result.DONE}
            request.denied |= failed
            request.loaded_blocks += len(loaded)
            request.brought.update(set(blocks) - failed)
            self._let_go(request, blocks if request.is_scheduled else failed)
        return JobResult(
            job.job_id,
            success=len(loaded) == len(job.keys),
            successful_keys=tuple(loaded) or None,
            transfer_time=ended.seconds,
            transfer_bytes=ended.moved_bytes,
        )

    # -- steps ---------------------------------------------------------------------------------

    @guarded
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Send what the step has asked for."""
        for name in context.new_req_ids:
            request = self._requests.get(name)
            if request is not None:  # its chunks are on the GPU by now
                request.is_scheduled = True
                self._let_go(request, list(request.held))
        if self._mover is not None and self._mover.has_ended:
            logger.error("kvdisk is off until the engine starts again, and vLLM goes on with its memory alone.")
            raise ToldOff
        left, hinted = MOST_TOLD, list[HintedPrompt]()
        while self._ended_requests and (left == MOST_TOLD or len(self._ended_requests[0].keys) <= left):
            ended = self._ended_requests.popleft()
            self.store.reached(ended.name, ended.keys)
            left -= len(ended.keys)
            hinted += [] if ended.hinted is None else [ended.hinted]
        self._hints.tell_new(self.store)
        self._goes_on = self.store.step(time.monotonic())
        for prompt in hinted:  # behind its use, and behind its last stores, which this step has begun
            self.store.hint(prompt, ended=True)
            self._goes_on = True
        self._is_budget_spent = self.store.is_budget_spent
        self._has_moved |= self._goes_on  # what is sent to a remote store is no job of vLLM's

    @guarded
    def has_pending_work(self) -> bool:
        """Whether to step on without requests."""
        return bool(self._done or self._jobs or self._goes_on or self._ended_requests)

    @guarded
    def drain_jobs(self) -> None:
        """Wait until every job has ended; then serve nothing from before.

        vLLM: only a reset of its caches calls it, which follows new weights, and for less. What
        runs on has KV from before, and offers it: it is not stored.
        """
        self.store.drain()
        self._settle()
        is_epoch = self._config.on_reset == "epoch"
        for request in self._requests.values():
            request.is_stale |= is_epoch
            request.denied.clear()
            self._let_go(request, list(request.held))
        if is_epoch:
            self._hints.forget()
            self._ended_requests = deque(each._replace(hinted=None) for each in self._ended_requests)
            self.store.forget(1 + secrets.randbits(62))
        else:
            logger.info(
                "kvdisk goes on serving what was stored before this reset: on_reset is %r.", self._config.on_reset
            )

    @guarded
    def note_weights(self, name: str) -> None:
        """Serve nothing from before a call to the workers, which may change the weights in memory.
        No hook of vLLM's, whose memory keeps what it has: see ``watch_workers``."""
        if self._config.on_reset == "epoch" and self._store is not None:
            logger.info("kvdisk takes %s for an update of the weights.", name)
            self.drain_jobs()

    # -- events and metrics --------------------------------------------------------------------

    @guarded
    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return what became loadable and what left, where the engine publishes that."""
        if self._published is None:
            return []
        taken = self.store.changes()
        events = self._take_back() if taken.cleared else []
        for stored, alike in groupby(taken.changes, key=attrgetter("stored")):
            keys = [key for change in alike for key in change.keys]
            if stored:
                self._published.update(keys)
            else:
                self._published.difference_update(keys)
            events.append(self._event(keys, stored=stored))
        return events

    def _take_back(self) -> list[OffloadingEvent]:
        """Return that all has left which was published."""
        if not self._published:
            return []
        keys, self._published = self._published, set()
        return [self._event(keys, stored=False)]

    def _event(self, keys: Collection[BlockKey], *, stored: bool) -> OffloadingEvent:
        return OffloadingEvent(
            keys=[self._names.offload(key) for key in keys],
            medium=self.medium,
            removed=not stored,
            locality=self.locality,
            ownership=self.tier_type,
            removal_expected=stored and self._expects_removal,
        )

    @guarded
    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return what was counted and measured since the last call, or the last but a few: an idle
        engine has told all."""
        now_s = time.monotonic()
        if now_s - self._taken_s < STATS_S and (self._jobs or self._goes_on or not self._has_moved):
            return None
        self._taken_s, self._has_moved = now_s, False
        taken = self._stats.take()
        taken.merge(self.store.stats())
        return tier_stats(taken)

    # -- its end -------------------------------------------------------------------------------

    def switch_off(self, error: Exception, hook: str) -> None:
        """Serve and store nothing until the engine starts again.

        No row is touched when this returns, so that all jobs can be given up.
        """
        self._stats.add("switched_off")
        if not isinstance(error, ToldOff):
            say_off(error, hook, {self._config.nvme_admission, self._config.eviction})
        if self._mover is not None:
            self._mover.kill()
        self._rest()

    def _rest(self) -> None:
        self._stand_in = TierOff(self._done, self._jobs, self._take_back(), self._stats, self._close)
        self._requests.clear()
        self._hints.forget()
        self._jobs, self._done, self._stored_rows, self._is_budget_spent = {}, [], 0, False

    @guarded
    def shutdown(self) -> None:
        """Commit, and release the store. Idempotent."""
        self._close()
        self._rest()

    def _close(self) -> None:
        """Release the store, and with it all arrays over vLLM's memory, which could not be released
        otherwise."""
        store, self._store = self._store, None
        try:
            if store is not None:
                store.close()
        except Exception:
            logger.exception("kvdisk could not close its store cleanly; the next start checks it.")
        finally:
            if self._mover is not None:
                self._mover.kill()
            self._mover = None


OWN_NAMES = frozenset({"is_off", "note_weights", "stand_in", "store", "switch_off"})
"""Public names of the tier that are no hooks."""
