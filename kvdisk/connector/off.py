# SPDX-License-Identifier: Apache-2.0
"""The stand-ins for the halves of the connector after an error of ours: nothing is stored or loaded
until the engine ends.

Each class answers vLLM's hooks, by methods of their names with the parameters that they need, and
uses nothing of the failed half but what its docstring names. An argument is None where vLLM has not
given it. vLLM waits for two things: that every load which it was promised is reported, failed if
need be, and that the engine store is closed at the end.
"""

from __future__ import annotations

import functools
import inspect
import logging
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from types import FunctionType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from vllm.distributed.kv_events import AllBlocksCleared
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvdisk.blocks import BlockKey, JobId
from kvdisk.config import Config
from kvdisk.connector.metadata import KVDiskMetadata, KVDiskWorkerMetadata
from kvdisk.connector.metrics import KVDiskStats
from kvdisk.connector.tables import unfilled_blocks
from kvdisk.errors import ConfigError
from kvdisk.messages import Job, JobKind, Move, Plan, Report
from kvdisk.worker.request_loads import RequestLoads

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.request import Request

    from kvdisk.assembly import SchedulerHalf, WorkerHalf

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Self = TypeVar("_Self", bound="Switched")

logger = logging.getLogger("kvdisk.connector")

_POLICIES = ("_policy", "_admission", "eviction")
OWN_POLICIES = tuple(each.name for each in fields(Config) if each.name.endswith(_POLICIES))
"""The settings that may name a class of the user's."""


def say_off(error: Exception, hook: str, own: Iterable[str]) -> None:
    """Log once, as an error, why kvdisk is off. ``own``: policies of the user's, as
    ``module:Class``."""
    whose = "kvdisk"
    for frame, _ in traceback.walk_tb(error.__traceback__):
        kind = type(frame.f_locals.get("self"))
        if f"{kind.__module__}:{kind.__qualname__}" in own:
            whose = f"the policy {kind.__module__}:{kind.__qualname__}"
    logger.error(
        "kvdisk is off until the engine starts again, and the engine goes on without it: no stores, no hits. "
        "An error in %s, in %s:",
        whose,
        hook,
        exc_info=error,
    )


class ToldOff(Exception):
    """Another process is off, and has said why."""


class Switched(Protocol):
    """What has hooks, and a stand-in for them once it is off."""

    @property
    def stand_in(self) -> object | None:
        """What answers each hook, by a method of its name; None while it is on."""

    def switch_off(self, error: Exception, hook: str) -> None:
        """Have a stand-in from now on."""


@functools.cache
def _parameters_of(method: FunctionType) -> tuple[str, ...]:
    """Return the names of a method's parameters."""
    return tuple(inspect.signature(method).parameters)[1:]


def guarded(hook: Callable[Concatenate[_Self, _P], _R]) -> Callable[Concatenate[_Self, _P], _R]:
    """Return the hook wrapped so that no error of it reaches the engine, but for a ConfigError. The
    first error switches its object off, and no hook of it is called again: the stand-in answers.

    The stand-in is given what it takes of the hook's parameters. One that vLLM has renamed is taken
    from what the hook does not know, in the order of the call; one that is missing is None.
    """
    name = hook.__name__
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = list(inspect.signature(hook).parameters.values())[1:]
    names = [each.name for each in parameters if each.kind not in kinds]

    def guarded_hook(self: _Self, /, *arguments: _P.args, **more: _P.kwargs) -> _R:
        if self.stand_in is None:
            try:
                return hook(self, *arguments, **more)
            except ConfigError:
                raise
            except Exception as error:
                self.switch_off(error, name)
        given = dict(zip(names, arguments, strict=False)) | more
        unknown = (given[each] for each in more if each not in names)
        known = {each: given[each] if each in given else next(unknown, None) for each in names}
        answer: Any = getattr(self.stand_in, name)
        answered: _R = answer(**{each: known[each] for each in _parameters_of(answer.__func__)})
        return answered

    functools.update_wrapper(guarded_hook, hook)
    return guarded_hook


class SchedulerOff:
    """The stand-in for the scheduler's half: it answers the hooks of vLLM's scheduler.

    ``parts``: closed at the end. ``unsent``: by request, the GPU blocks of the loads that vLLM was
    promised and that no plan has carried: the workers report them as failed. ``publishes``: whether
    events were published of what the tiers hold.
    """

    def __init__(
        self,
        parts: SchedulerHalf | None,
        unsent: Mapping[str, Sequence[Sequence[int]]],
        *,
        publishes: bool,
    ) -> None:
        self._parts = parts
        self._unsent = dict(unsent)
        self._stepped = False
        self._publishes = publishes
        self._jobs = 0
        self._told = False
        if parts is not None:
            parts.manager.stats.add("switched_off")

    def on_new_request(self) -> None:
        """Follow no request."""

    def get_num_new_matched_tokens(self) -> tuple[int, bool]:
        """Return that there is no hit."""
        return 0, False

    def update_state_after_alloc(
        self, request: Request | None, blocks: KVCacheBlocks | None, num_external_tokens: int | None
    ) -> None:
        """Note the load of a hit that was promised before: it will fail."""
        if num_external_tokens and request is not None and blocks is not None:
            self._unsent[request.request_id] = unfilled_blocks(blocks)

    def get_external_cache_hit_sources(self) -> dict[CacheHitSource, int]:
        """Return no source: no tier serves anything."""
        return {}

    def request_finished(self) -> tuple[bool, None]:
        """Return that the engine may free the blocks: there is no tier to offer them to."""
        return False, None

    request_finished_all_groups = request_finished

    def build_connector_meta(self) -> KVDiskMetadata:
        """Tell the workers to switch off, and which loads that they never got are to fail."""
        jobs = []
        for request_id, groups in self._unsent.items():
            self._jobs -= 1  # the manager's numbers are above 0
            moves = tuple(Move(BlockKey(b""), 0, (block,)) for group in groups for block in group if block)
            jobs.append(Job(JobId(self._jobs), JobKind.LOAD, moves, request_id=request_id))
        self._unsent.clear()
        self._stepped = True
        return KVDiskMetadata(Plan(tuple(jobs), off=True))

    def update_connector_output(self) -> None:
        """Do nothing: what the workers finish is of no use any more."""

    def reset_cache(self) -> bool:
        """Return True: nothing is served again."""
        return True

    def note_weights(self) -> None:
        """Do nothing: nothing is stored or served."""

    note_adapter = note_weights

    def has_pending_push_work(self) -> bool:
        """Ask for one step more, for workers and metrics. Requests that wait for loads keep the
        engine going themselves."""
        return not self._stepped

    def take_events(self) -> list[KVCacheEvent]:
        """Say once that the tiers have nothing any more."""
        if not self._publishes:
            return []
        self._publishes = False
        return [AllBlocksCleared()]

    def get_kv_connector_stats(self) -> KVDiskStats | None:
        """Return what was counted and not taken yet, once."""
        if self._told or self._parts is None:
            return None
        self._told = True
        try:
            return KVDiskStats.of(self._parts.telemetry.take_rest())
        except Exception:
            logger.exception("kvdisk is off, and cannot report its metrics")
            return None

    def counters(self) -> dict[str, int]:
        """Return the totals since the start."""
        return {} if self._parts is None else dict(self._parts.manager.stats.counts)

    def shutdown(self) -> None:
        """Commit what is queued, and release the engine store. Idempotent."""
        if self._parts is not None:
            self._parts.close()


class WorkerOff:
    """The stand-in for a worker's half: it answers the hooks of vLLM's model runner.

    ``loads``: those whose end was not reported yet. What has begun of them goes on in the mover to
    its end; only then it is reported to the scheduler as failed. ``failed_blocks``: those of the
    loads that were just reported. ``by_block``: whether these say which loads failed; otherwise the
    requests do.
    """

    def __init__(
        self, parts: WorkerHalf | None, loads: RequestLoads, failed_blocks: set[int], *, by_block: bool
    ) -> None:
        self._parts = parts
        self._loads = loads
        self._by_block = by_block
        self._scheduler_knows = False
        self._failed_blocks = failed_blocks
        if parts is not None:
            parts.mover.halt()

    def unregister_kv_caches(self) -> None:
        """Wait for what has begun."""
        if self._parts is not None:
            self._parts.mover.leave_gpu()

    def restore_kv_caches(self) -> None:
        """Begin nothing."""

    def handle_preemptions(self) -> None:
        """Wait for what has begun. What has not begun never will: see ``Mover.halt``."""

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata | None) -> None:
        """Begin nothing: the loads of the plan will fail."""
        if isinstance(connector_metadata, KVDiskMetadata):
            self._loads.begin(connector_metadata.plan.jobs)
            self._scheduler_knows = connector_metadata.plan.off

    def start_load_kv(self) -> None:
        """Begin nothing."""

    def wait_for_layer_load(self) -> None:
        """Wait for nothing."""

    def save_kv_layer(self) -> None:
        """Begin nothing."""

    def wait_for_save(self) -> None:
        """Begin nothing."""

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """Return the requests whose loads have ended, all of them failed."""
        out = self._still_out()
        self._loads.void(self._loads.jobs)  # also what was brought before: no later reset would be told
        jobs = {job_id: job for job_id, job in self._loads.jobs.items() if job_id not in out}
        ended = self._loads.end({job_id: range(len(job.moves)) for job_id, job in jobs.items()})
        self._failed_blocks = {block for failed in ended.values() for block in failed} if self._by_block else set()
        return KVConnectorTransferResults(
            finished_recving=set(ended), failed_recving=set() if self._by_block else set(ended)
        )

    def _still_out(self) -> set[JobId]:
        if self._parts is None:
            return set()
        try:
            self._parts.mover.poll()
        except Exception:
            logger.exception("another error in kvdisk, which is off already")
        return self._parts.mover.out

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks of the loads that were just reported."""
        return self._failed_blocks

    def build_connector_worker_meta(self) -> KVDiskWorkerMetadata | None:
        """Tell the scheduler, until it knows."""
        return None if self._scheduler_knows else KVDiskWorkerMetadata(Report(off=True))

    def get_kv_connector_stats(self) -> None:
        """Return None: a worker's statistics are in its report."""

    def shutdown(self) -> None:
        """Stop the mover. Idempotent."""
        if self._parts is not None:
            self._parts.close()
            self._parts = None
