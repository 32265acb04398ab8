# SPDX-License-Identifier: Apache-2.0
"""The scheduler's half of the connector: hooks of vLLM's scheduler in, plans out. Scheduler's
thread only."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvdisk.assembly import SchedulerHalf, assemble_scheduler
from kvdisk.config import Config
from kvdisk.connector.callers import recompute_failed_loads
from kvdisk.connector.controls import Controls
from kvdisk.connector.deployment import data_parallel_rank_of, sleeps
from kvdisk.connector.events import EventWriter, event_groups, publishes_events
from kvdisk.connector.identity import fingerprint_of
from kvdisk.connector.kv_groups import GroupIds, sizes_are_certain
from kvdisk.connector.lora import Adapters
from kvdisk.connector.model_weights import identity_of
from kvdisk.connector.off import SchedulerOff
from kvdisk.connector.pool import BlockPoolContext
from kvdisk.connector.refusals import hides_media, refuse_store_policy
from kvdisk.connector.sizes import geometry_of, keeps_parts_of_states, step_blocks_of, units_of
from kvdisk.connector.step import StepInput
from kvdisk.connector.tables import unfilled_blocks
from kvdisk.connector.tier_names import VLLM_TIERS
from kvdisk.errors import ConfigError
from kvdisk.identity import Identity
from kvdisk.mailbox import Mailbox
from kvdisk.messages import Plan, Report
from kvdisk.stats import Stats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.request import Request

    from kvdisk.manager.events import Journal
    from kvdisk.manager.manager import TierManager

logger = logging.getLogger("kvdisk.connector")


class SchedulerSide:
    """Translates between vLLM's requests and blocks and the ``TierManager``.

    The manager exists once the block pool is bound; where layers of one group differ, or stages of
    a pipeline, only once the workers have sent their sizes.
    """

    def __init__(self, config: Config, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self._config = config
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._units = units_of(config, vllm_config)
        self._geometry = geometry_of(vllm_config, kv_cache_config, units=self._units)
        self._groups = GroupIds(kv_cache_config)
        refuse_store_policy(config.store_policy, vllm_config, self._geometry)
        if keeps_parts_of_states(kv_cache_config, self._geometry):
            logger.warning(
                "kvdisk stores few or none of this model's recurrent states, and so loads little, while vLLM keeps "
                "them after parts of a block of %d tokens: leave out prefix_match_unit.",
                max(group.block_tokens for group in self._geometry.groups),
            )
        states = [group.block_tokens for group in self._geometry.groups if group.state_tokens is not None]
        wanted = self._units.unit_tokens
        if isinstance(wanted, int) and any(tokens % wanted for tokens in states):
            logger.warning(
                "unit_tokens %d is left out: a hit ends with a recurrent state, which this model has after blocks of "
                "%d tokens, and so would hardly ever end with a unit, too. kvdisk keeps vLLM's blocks.",
                wanted,
                min(states),
            )
        self._has_sizes = sizes_are_certain(vllm_config, kv_cache_config)
        self._identity = self._find_identity() if self._has_sizes else None
        self._context: BlockPoolContext | None = None
        self._parts: SchedulerHalf | None = None
        self._mailbox = Mailbox()
        self._requests: dict[str, Request] = {}
        self._local_tokens: dict[str, int] = {}
        self._unsent: dict[str, list[Sequence[int]]] = {}
        """The GPU blocks of loads whose last job no plan has carried yet, by request."""
        self._controls = Controls()
        self._adapters = Adapters(vllm_config.lora_config)
        self._writer: EventWriter | None = None
        self._journal: Journal | None = None
        self._described: dict[str, int] = {}
        if recompute_failed_loads(vllm_config):
            logger.info("kvdisk sets kv_load_failure_policy to recompute: a block that fails to load is computed.")

    @property
    def _manager(self) -> TierManager:
        if self._parts is None:
            raise ConfigError(
                "kvdisk needs the engine's block pool, and this engine has not given it."
                if self._context is None
                else "kvdisk needs to hear from the workers how large the KV cache's layers are, which differ within a "
                "KV-cache group or between the stages of a pipeline, and no handshake came."
            )
        return self._parts.manager

    def bind_pool(self, pool: BlockPool) -> None:
        """Take the engine's block pool, and build the manager over it, unless the workers must send
        sizes first."""
        assert self._context is None, "the block pool was bound twice"
        self._context = BlockPoolContext(
            pool,
            self._geometry,
            self._groups,
            step_blocks_of(self._vllm_config, self._geometry),
            self._adapters.void,
        )
        if self._has_sizes:
            self._assemble(self._identity)

    def take_worker_groups(self, by_worker: Sequence[list[list[KVCacheGroupSpec]]], others: Sequence[str] = ()) -> None:
        """Take the KV-cache groups of all stages, as workers sent them: these have every layer's
        size, where the scheduler's may have one layer's. ``others``: connectors that take a
        handshake too.

        It is called after the pool is bound and before the first request, and again, with the same,
        after a sleep. Raises ConfigError where sizes do not agree.
        """
        if not self._has_sizes and others:
            raise ConfigError(
                f"kvdisk does not support {' and '.join(others)} beside it in MultiConnector where layers of a "
                "KV-cache group differ in size, nor under pipeline parallelism: both need a handshake, and vLLM passes "
                "on one."
            )
        for stages in by_worker:
            geometry = geometry_of(self._vllm_config, self._kv_cache_config, stages, self._units)
            if self._parts is None and self._context is not None:
                self._geometry = geometry
                self._assemble(self._find_identity(stages))
            elif geometry != self._geometry:
                ours, theirs = ([group.payload_bytes for group in each.groups] for each in (self._geometry, geometry))
                raise ConfigError(
                    f"kvdisk expects blocks of {ours} bytes, by KV-cache group, and a worker has {theirs}."
                )
        assert self._manager  # or it says what is missing

    def _find_identity(self, stages: Sequence[list[KVCacheGroupSpec]] = ()) -> Identity | None:
        if not self._config.store_dirs and self._config.remote is None:
            return None
        units = [group.gpu_blocks for group in self._geometry.groups]
        return identity_of(
            lambda digest: fingerprint_of(self._vllm_config, self._kv_cache_config, stages, units, digest=digest)
        )

    def _assemble(self, identity: Identity | None) -> None:
        assert self._context is not None
        rank = data_parallel_rank_of(self._vllm_config)
        units = [group.block_tokens for group in self._geometry.groups]
        if any(group.gpu_blocks > 1 for group in self._geometry.groups):
            logger.info(
                "kvdisk stores and loads several of vLLM's blocks as one, of %s tokens by KV-cache group: unit_tokens "
                "sets how many.",
                ", ".join(map(str, units)),
            )
        self._parts = assemble_scheduler(self._config, self._geometry, self._context, identity, rank)
        self._mailbox = self._parts.mailbox
        if publishes_events(self._vllm_config):
            self._writer = EventWriter(self._geometry, event_groups(self._kv_cache_config))
            self._journal = self._parts.manager.publish()

    # -- requests ------------------------------------------------------------------------------

    def new_request(self, request: Request) -> None:
        """Follow a request. One with a LoRA adapter is followed once the adapter's files are
        hashed."""
        if request.lora_request is not None:
            self._adapters.arrived(request, time.monotonic())
        else:
            self._follow(request)

    def _follow(self, request: Request) -> None:
        self._requests[request.request_id] = request
        limits = self._controls.limits(request.kv_transfer_params)
        if request.skip_reading_prefix_cache:
            limits = limits._replace(most_load_tokens=0)  # so that nothing is asked for or read ahead, either
        if hides_media(request):
            limits = limits._replace(most_load_tokens=0, store_limit_tokens=0)
        manager, parts = self._manager, self._parts
        assert parts is not None
        if tenant := parts.salts.of(request.cache_salt):
            limits = limits._replace(tenant=tenant)
        now = time.monotonic()
        manager.new_request(request.request_id, request.block_hashes, request.num_prompt_tokens, now, limits)
        kv_hints = self._controls.hints(request.kv_hints, request.kv_transfer_params)
        if kv_hints:
            self._manager.hint(request.request_id, kv_hints, now)
        self._describe(request)

    def _follow_known(self, now: float) -> None:
        for request in self._adapters.take_known(now):
            self._follow(request)

    def _check_adapters(self, now: float) -> None:
        """Stop following requests whose adapters have changed, and settle the results that were
        held back meanwhile."""
        if not self._adapters.any:
            return
        stale, reports = self._adapters.check(now)
        if stale:
            self._manager.fail_stores()
        for request in stale:
            if self._requests.pop(request.request_id, None) is not None:
                self._described.pop(request.request_id, None)
                self._manager.request_finished(request.request_id)
        for report in reports:
            self._manager.settle(report, now, int(time.time()))
        self._follow_known(now)

    def _follow_session(self, request: Request) -> None:
        """Check what no hook reports: whether the prompt of a streaming session, a request with a
        queue, has grown."""
        if request.streaming_queue is not None:
            self._manager.prompt_changed(request.request_id, request.num_prompt_tokens)

    def matched_tokens(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """Answer ``get_num_new_matched_tokens``."""
        if self._adapters.waits(request.request_id):
            self._follow_known(time.monotonic())
            return None, False  # by other hashes vLLM finds other blocks: it asks again
        if request.request_id not in self._requests:
            return 0, False
        self._follow_session(request)
        self._local_tokens[request.request_id] = local_tokens = int(local_tokens)
        manager = self._manager
        manager.note_time(int(time.time()))
        tokens = manager.lookup(request.request_id, local_tokens, request.num_tokens, time.monotonic())
        return tokens, bool(tokens)

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """Answer ``update_state_after_alloc``: plan the load of a hit that the engine took."""
        if external_tokens == 0 or request.request_id not in self._requests:
            return
        block_ids = self._unsent[request.request_id] = self._groups.tables(unfilled_blocks(blocks))
        local_tokens = self._local_tokens[request.request_id]
        self._manager.plan_load(request.request_id, local_tokens, int(external_tokens), block_ids)

    def hit_sources(self, request: Request, external_tokens: int) -> dict[CacheHitSource, int]:
        """Answer ``get_external_cache_hit_sources``."""
        served = self._manager.served_tokens(request.request_id)
        sources = {VLLM_TIERS[tier].hit_source: tokens for tier, tokens in served.items() if tokens}
        return sources if sum(sources.values()) == external_tokens else {}

    def finished(self, request: Request, block_ids: Sequence[Sequence[int]], aborted: bool) -> None:
        """Offer the last blocks of a finished request."""
        self._local_tokens.pop(request.request_id, None)
        self._adapters.ended(request.request_id, time.monotonic())
        if self._requests.pop(request.request_id, None) is None:
            return
        if self._parts is not None and self._parts.trace is not None:
            hashes = request.block_hashes[: request.num_prompt_tokens // self._geometry.hash_tokens]
            self._parts.trace.add(request.arrival_time, request.num_output_tokens, hashes)
        if not aborted:
            # The last sampled token has no KV.
            computed_tokens = int(min(request.num_computed_tokens, request.num_tokens - 1))
            self._follow_session(request)
            if self._manager.note_scheduled(request.request_id, computed_tokens):
                self._manager.note_time(int(time.time()))
                self._describe(request)
                tables = self._groups.tables(block_ids)
                self._manager.plan_store(request.request_id, computed_tokens, tables, time.monotonic())
        self._described.pop(request.request_id, None)
        self._manager.request_finished(request.request_id)

    # -- steps ---------------------------------------------------------------------------------

    def plan(self, output: SchedulerOutput) -> Plan:
        """Offer what this step computes, and return the step's plan."""
        now = time.monotonic()
        manager = self._manager
        self._mailbox.work()
        manager.note_time(int(time.time()))
        self._check_adapters(now)
        step = StepInput.of(output, self._groups)
        if step.preempted:
            manager.preempt(step.preempted, now, step.overwritten)
        computed: list[tuple[str, int, list[Sequence[int]]]] = []
        for request_id, scheduled_tokens in step.scheduled.items():
            request = self._requests.get(request_id)
            if request is None:
                continue
            # Among the tokens that are computed when this step is over, only those whose ids are
            # known are final.
            computed_tokens = int(min(request.num_computed_tokens + scheduled_tokens, request.num_tokens))
            if request.streaming_queue is not None:  # here, too: a step has many requests
                self._follow_session(request)
            if manager.note_scheduled(request_id, computed_tokens):
                self._describe(request)
                tables = step.tables(request_id)
                if tables is not None:
                    computed.append((request_id, computed_tokens, tables))
        if computed:
            manager.plan_stores(computed, now)
        for request_id, states in step.states.items():
            if request_id in self._requests:
                self._describe(self._requests[request_id])
                manager.plan_states(request_id, states, now)
        tokens = step.scheduled_tokens
        plan = manager.take_plan(now, idle=tokens == 0, scheduled_tokens=tokens, overwritten=step.overwritten)
        self._adapters.note(plan)
        unplanned = manager.unplanned_loads
        self._unsent = {name: blocks for name, blocks in self._unsent.items() if name in unplanned} if unplanned else {}
        return plan

    def settle(self, report: Report | None, invalid_blocks: set[int]) -> None:
        """Take note of what the workers finished, and of the blocks of the step that no load has
        filled, kvdisk's or another connector's."""
        if invalid_blocks:
            self._manager.note_invalid_blocks(invalid_blocks, report or Report())
        if report is not None:
            self._adapters.hold(report, time.monotonic())
            self._manager.settle(report, time.monotonic(), int(time.time()))

    def reset(self) -> bool:
        """Answer ``reset_cache``: nothing stored so far is served again, unless the user has set
        ``on_reset`` to keep it.

        vLLM: a sleep begins with a reset, and unmaps the KV cache.
        """
        if self._config.on_reset == "epoch":
            assert self._parts is not None
            epoch, dropped = 1 + secrets.randbits(62), self._manager.held()
            self._parts.manager.reset(epoch)
            self._parts.telemetry.note_reset(epoch, dropped)
            return True
        logger.info("kvdisk goes on serving what was stored before this reset: on_reset is %r.", self._config.on_reset)
        if sleeps(self._vllm_config):
            self._manager.lose_gpu()
        return True

    def note_adapter(self, adapter: LoRARequest) -> None:
        """Take note of an adapter that the workers are about to load."""
        self._adapters.named(adapter)

    def note_weights(self, name: str) -> None:
        """Reset before a call to the workers, which may change the weights in memory."""
        if self._config.on_reset == "epoch" and self._parts is not None:
            logger.info("kvdisk takes %s for an update of the weights.", name)
            self.reset()

    def has_pending_work(self) -> bool:
        """Answer ``has_pending_push_work``."""
        manager = self._manager
        manager.commit()
        if manager.has_pending_work(time.monotonic()) or self._has_events:
            return True
        if self._parts is not None and self._parts.telemetry.is_due:
            return True
        return self._mailbox.rest()

    def wake(self) -> None:
        """Take note that the engine goes on after a rest. Called before anything else is."""
        self._mailbox.wake()

    # -- events --------------------------------------------------------------------------------

    def take_events(self) -> list[KVCacheEvent]:
        """Answer ``take_events``: nothing unless the engine publishes events."""
        if self._writer is None or self._journal is None or not self._has_events:
            return []
        return self._writer.write(self._journal.take())

    @property
    def _has_events(self) -> bool:
        return (self._journal is not None and self._journal.waits) or (self._writer is not None and self._writer.waits)

    def _describe(self, request: Request) -> None:
        if self._writer is not None:
            known = self._described.get(request.request_id, 0)
            self._described[request.request_id] = self._writer.remember(request, known)

    # -- metrics and end -----------------------------------------------------------------------

    def take_stats(self) -> Stats | None:
        """Return what was counted and measured since the last call; None where it is too early."""
        return None if self._parts is None else self._parts.telemetry.take(time.monotonic())

    def counters(self) -> dict[str, int]:
        """Return the totals since the start."""
        return dict(self._manager.stats.counts)

    def switched_off(self) -> SchedulerOff:
        """Return the stand-in for this half after an error."""
        return SchedulerOff(self._parts, self._unsent, publishes=self._journal is not None)

    def shutdown(self) -> None:
        """Commit, and release the engine store. Idempotent."""
        self._mailbox.wake()
        self._adapters.close()
        if self._parts is not None:
            self._parts.close()
