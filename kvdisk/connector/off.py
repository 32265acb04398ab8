# SPDX-License-Identifier: Apache-2.0
"""The stand-ins for the halves of the connector after an error of ours: nothing is stored or loaded
until the engine ends.

Each class answers the hooks of its half, and uses nothing of the failed half but what its docstring
names. vLLM waits for two things: that every load which it was promised is reported, failed if need
be, and that the engine store is closed at the end.
"""

from __future__ import annotations

import functools
import inspect
import logging
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar

from vllm.distributed.kv_events import AllBlocksCleared

from kvdisk.blocks import BlockKey, JobId
from kvdisk.config import Config
from kvdisk.connector.tables import unfilled_blocks
from kvdisk.errors import ConfigError
from kvdisk.messages import Job, JobKind, Move, Plan, Report
from kvdisk.stats import Stats
from kvdisk.worker.request_loads import RequestLoads

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
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


class Switched(Protocol):
    """What has hooks, and can be switched off."""

    def _switch_off(self, error: Exception, hook: str) -> bool:
        """Have a stand-in answer the hooks from now on; return whether it did not before."""


def guarded(hook: Callable[Concatenate[_Self, _P], _R]) -> Callable[Concatenate[_Self, _P], _R]:
    """Return the hook wrapped so that no error of it reaches the engine, but for a ConfigError. The
    first error switches its object off. The stand-in then answers the hook, without the arguments
    that the hook does not know."""
    names = list(inspect.signature(hook).parameters)[1:]

    def guarded_hook(self: _Self, /, *arguments: _P.args, **more: _P.kwargs) -> _R:
        try:
            return hook(self, *arguments, **more)
        except ConfigError:
            raise
        except Exception as error:
            taken = arguments[: len(names)]
            known = {name: more[name] for name in names[len(taken) :] if name in more}
            is_known = len(taken) + len(known) == len(arguments) + len(more)
            if not self._switch_off(error, hook.__name__) and is_known:
                raise
            again: Callable[..., _R] = hook
            return again(self, *taken, **known)

    functools.update_wrapper(guarded_hook, hook)
    return guarded_hook


class SchedulerOff:
    """The stand-in for the scheduler's half.

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

    def new_request(self, request: Request) -> None:
        """Follow no request."""

    def matched_tokens(self, request: Request, local_tokens: int) -> tuple[int, bool]:  # noqa: ARG002 - as the half's
        """Return that there is no hit."""
        return 0, False

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """Note the load of a hit that was promised before: it will fail."""
        if external_tokens:
            self._unsent[request.request_id] = unfilled_blocks(blocks)

    def hit_sources(self, request: Request, external_tokens: int) -> dict[CacheHitSource, int]:  # noqa: ARG002
        """Return no source: no tier serves anything."""
        return {}

    def finished(self, request: Request, block_ids: Sequence[Sequence[int]], aborted: bool) -> None:
        """Do nothing: there is no tier to offer blocks to."""

    def plan(self, output: SchedulerOutput) -> Plan:  # noqa: ARG002
        """Tell the workers to switch off, and which loads that they never got are to fail."""
        jobs = []
        for request_id, groups in self._unsent.items():
            self._jobs -= 1  # the manager's numbers are above 0
            moves = tuple(Move(BlockKey(b""), 0, (block,)) for group in groups for block in group if block)
            jobs.append(Job(JobId(self._jobs), JobKind.LOAD, moves, request_id=request_id))
        self._unsent.clear()
        self._stepped = True
        return Plan(tuple(jobs), off=True)

    def settle(self, report: Report | None, invalid_blocks: set[int]) -> None:
        """Do nothing: what the workers finish is of no use any more."""

    def reset(self) -> bool:
        """Return True: nothing is served again."""
        return True

    def has_pending_work(self) -> bool:
        """Ask for one step more, for workers and metrics. Requests that wait for loads keep the
        engine going themselves."""
        return not self._stepped

    def take_events(self) -> list[KVCacheEvent]:
        """Say once that the tiers have nothing any more."""
        if not self._publishes:
            return []
        self._publishes = False
        return [AllBlocksCleared()]

    def take_stats(self) -> Stats | None:
        """Return what was counted and not taken yet, once."""
        if self._told or self._parts is None:
            return None
        self._told = True
        try:
            return self._parts.telemetry.take_rest()
        except Exception:
            logger.exception("kvdisk, which is off, cannot report its metrics")
            return None

    def counters(self) -> dict[str, int]:
        """Return the totals since the start."""
        return {} if self._parts is None else dict(self._parts.manager.stats.counts)

    def switched_off(self) -> None:
        """Return None: it is off already."""

    def shutdown(self) -> None:
        """Commit what is queued, and release the engine store. Idempotent."""
        if self._parts is not None:
            self._parts.close()


class WorkerOff:
    """The stand-in for a worker's half.

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
        self.failed_blocks = failed_blocks
        if parts is not None:
            parts.mover.halt()

    def leave_gpu(self) -> None:
        """Wait for what has begun."""
        if self._parts is not None:
            self._parts.mover.leave_gpu()

    def return_to_gpu(self) -> None:
        """Begin nothing."""

    def before_step(self, plan: Plan) -> None:
        """Wait for what has begun. What has not begun never will: see ``Mover.halt``."""

    def before_forward(self, plan: Plan) -> None:
        """Begin nothing: the loads of the plan will fail."""
        self._loads.begin(plan.jobs)
        self._scheduler_knows = plan.off

    def after_forward(self, plan: Plan) -> None:
        """Begin nothing."""

    def collect(self, plan: Plan | None) -> tuple[set[str], set[str]]:  # noqa: ARG002 - as the half's
        """Return the requests whose loads have ended, all of them failed."""
        out = self._still_out()
        self._loads.void(self._loads.jobs)  # also what was brought before: no later reset would be told
        jobs = {job_id: job for job_id, job in self._loads.jobs.items() if job_id not in out}
        ended = self._loads.end({job_id: range(len(job.moves)) for job_id, job in jobs.items()})
        self.failed_blocks = {block for failed in ended.values() for block in failed} if self._by_block else set()
        return set(ended), set() if self._by_block else set(ended)

    def _still_out(self) -> set[JobId]:
        if self._parts is None:
            return set()
        try:
            self._parts.mover.poll()
        except Exception:
            logger.exception("kvdisk, which is off, meets another error")
        return self._parts.mover.out

    def take_report(self) -> Report | None:
        """Tell the scheduler, until it knows."""
        return None if self._scheduler_knows else Report(off=True)

    def switched_off(self) -> None:
        """Return None: it is off already."""

    def shutdown(self) -> None:
        """Stop the mover. Idempotent."""
        if self._parts is not None:
            self._parts.close()
            self._parts = None
