# SPDX-License-Identifier: Apache-2.0
"""Errors of ours, and of a user's policy, in each hook: the engine goes on without kvdisk, on
vLLM's real scheduler.

The bench fails where a request uses a block that does not hold its tokens' bytes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
from byte_bench import SLOT_BYTES, ByteBench
from schedulers import BLOCK_TOKENS, Engines
from vllm.distributed.kv_events import AllBlocksCleared

from kvdisk.connector.connector import KVDiskWorkerMetadata
from kvdisk.connector.off import SchedulerOff, WorkerOff
from kvdisk.device.header import MAGIC
from kvdisk.device.listing import list_homes
from kvdisk.errors import ConfigError
from kvdisk.manager.admission import AdmitAll
from kvdisk.manager.store_policy import OnCompute
from kvdisk.messages import JobKind, Plan, Report

pytestmark = pytest.mark.vllm

WAIT_S = 600.0
PROMPT = list(range(100, 100 + 4 * BLOCK_TOKENS + 5))
OTHER = [token + 1 for token in PROMPT]
SCHEDULER_HOOKS = (
    "new_request",
    "matched_tokens",
    "allocated",
    "hit_sources",
    "finished",
    "plan",
    "settle",
    "has_pending_work",
    "take_events",
    "take_stats",
)
WORKER_HOOKS = ("before_step", "before_forward", "after_forward", "collect", "take_report")


def moments(*hooks: str, last: Collection[str] = ()) -> list[tuple[str, bool]]:
    """Before and after each; only before ``last``, which end with the note of what was told."""
    return [(hook, after) for hook in hooks for after in (False, True) if not (after and hook in last)]


class Planted(Exception):
    """What the tests plant."""


def plant(patch: pytest.MonkeyPatch, owner: Any, name: str, *, after: bool = False, when: Any = None) -> list[int]:
    """Let a method raise, the first time that ``when`` of its arguments is so; before or after it
    has done its work."""
    original, raised = getattr(owner, name), []

    def planted(*arguments: Any, **more: Any) -> Any:
        due = not raised and (when is None or when(*arguments))
        if due and not after:
            raised.append(1)
            raise Planted(name)
        result = original(*arguments, **more)
        if due:
            raised.append(1)
            raise Planted(name)
        return result

    patch.setattr(owner, name, planted)
    return raised


@pytest.fixture(params=[None, 2 * BLOCK_TOKENS], ids=["one group", "two groups"])
def bench(engines: Engines, request: pytest.FixtureRequest) -> ByteBench:
    return engines.make(threaded=True, window_tokens=request.param, events=True)


two_groups = pytest.mark.parametrize("bench", [2 * BLOCK_TOKENS], indirect=True, ids=["two groups"])
"""A load that fails is told by its blocks, or by its request."""


def warm(bench: ByteBench) -> None:
    """Store a prompt, and let the GPU forget it."""
    bench.serve("first", PROMPT, 2)
    assert bench.counters()["stored_blocks"] >= 4
    assert bench.scheduler.reset_prefix_cache()
    bench.published.clear()


def serve_mixed(bench: ByteBench) -> None:
    """Two hits, one of them aborted, and a miss."""
    bench.add("hit", PROMPT, max_tokens=4)
    bench.add("gone", PROMPT, max_tokens=40)
    bench.add("miss", OTHER, max_tokens=4)
    bench.step()
    bench.abort("gone")
    bench.run()
    assert len(bench.sampled("hit")) == len(bench.sampled("miss")) == 4


def assert_off(bench: ByteBench, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is held, nothing is served, everything else works, and somebody has said why,
    once."""
    assert not bench.references()
    jobs = len(bench.jobs)
    assert AllBlocksCleared() in bench.published, "a router believes nothing of it any more"
    assert bench.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    bench.serve("after", PROMPT, 4)
    assert len(bench.sampled("after")) == 4
    assert len(bench.jobs) == jobs
    assert type(bench.connector.scheduler) is SchedulerOff and type(bench.workers[0].worker) is WorkerOff
    assert not bench.connector.has_pending_push_work() and not bench.connector.has_pending_block_frees()
    assert bench.connector.reset_cache()
    assert bench.counters()["switched_off"] == 1
    said = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [record.exc_info[0] for record in said if record.exc_info] == [Planted]
    assert "kvdisk is off until the engine starts again" in said[0].getMessage()


# -- the scheduler's half --------------------------------------------------------------------------


@two_groups
@pytest.mark.parametrize(("hook", "after"), moments(*SCHEDULER_HOOKS, last=("plan",)))
def test_an_error_in_a_hook_of_the_scheduler(
    bench: ByteBench, hook: str, after: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warm(bench)
    raised = plant(monkeypatch, bench.connector.scheduler, hook, after=after)
    serve_mixed(bench)
    assert raised
    assert_off(bench, caplog)


def test_an_error_of_a_reset_and_of_a_victim(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = engines.make(threaded=True, events=True)
    warm(bench)
    raised = plant(monkeypatch, bench.connector.scheduler._manager, "reset", after=True)
    bench.add("hit", PROMPT, max_tokens=4)
    bench.step()
    assert bench.scheduler.reset_connector_cache(), "nothing is served from before"
    assert raised
    bench.run()
    assert_off(bench, caplog)

    caplog.clear()
    bench = engines.make(threaded=True, num_blocks=12, events=True)
    raised = plant(monkeypatch, bench.connector.scheduler._manager, "preempt")
    for name, prompt in (("a", PROMPT), ("b", OTHER)):
        bench.add(name, prompt, max_tokens=100)
    bench.run()
    assert raised
    assert [len(bench.sampled(name)) for name in "ab"] == [100, 100]
    assert_off(bench, caplog)


def test_a_load_that_was_promised_and_never_sent_ends_as_failed(
    bench: ByteBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first of two is planned, and the error is in the second's plan: no worker has heard of
    either."""
    warm(bench)
    bench.serve("other", OTHER, 2)
    assert bench.scheduler.reset_prefix_cache()
    plant(monkeypatch, bench.connector.scheduler._manager, "plan_load", when=lambda name, *_: name == "c")
    for name, prompt in (("b", PROMPT), ("c", OTHER)):
        bench.add(name, prompt)
    output = bench.step()
    assert not output.num_scheduled_tokens
    plan = bench.plans[-1]
    assert plan.off and [job.request_id for job in plan.jobs] == ["b", "c"]
    assert all(job.kind is JobKind.LOAD and job.moves for job in plan.jobs)
    assert bench.step().num_scheduled_tokens["b"] == len(PROMPT)
    bench.run()
    assert_off(bench, caplog)


def test_blocks_of_a_load_in_flight_are_kept_until_it_has_ended(
    bench: ByteBench,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
) -> None:
    warm(bench)
    entered, gate = hold_copies(bench, monkeypatch, request, "scatter")
    bench.add("b", PROMPT)
    bench.add("gone", PROMPT)
    bench.step()
    assert entered.wait(WAIT_S)
    held = {block for job in bench.jobs if job.kind is JobKind.LOAD for block in (move.block for move in job.moves)}
    raised = plant(monkeypatch, bench.connector.scheduler._manager, "take_plan")
    bench.step()
    assert raised
    bench.abort("gone")
    for _ in range(5):
        assert not bench.step().num_scheduled_tokens
    assert {block.block_id for block in bench.pool.blocks[1:] if block.ref_cnt} >= held
    gate.set()
    bench.run()
    assert len(bench.sampled("b")) == 2
    assert_off(bench, caplog)


def hold_copies(
    bench: ByteBench, patch: pytest.MonkeyPatch, request: pytest.FixtureRequest, name: str
) -> tuple[threading.Event, threading.Event]:
    """Stop the mover's thread in its next copies until the second event is set; the first says that
    it is there."""
    copier = bench.workers[0].worker.mover._copier
    original, entered, gate = getattr(copier, name), threading.Event(), threading.Event()

    def held(*arguments: Any, **more: Any) -> Any:
        entered.set()
        assert gate.wait(WAIT_S)
        return original(*arguments, **more)

    patch.setattr(copier, name, held)
    request.addfinalizer(gate.set)
    return entered, gate


def test_a_store_whose_source_may_be_overwritten_never_reaches_the_drive(
    engines: Engines,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
) -> None:
    """After an error no copy from the GPU begins, and the step waits for the one under way, which
    is not written."""
    store: dict[str, Any] = {"threaded": True, "nvme": True, "extra": {"cpu_bytes": 0}}
    bench = engines.make(**store, events=True)
    bench.serve("sound", PROMPT, 100)  # a segment is made first
    assert bench.counters()["stored_blocks"] == 4
    entered, gate = hold_copies(bench, monkeypatch, request, "gather")
    bench.add("torn", OTHER, max_tokens=100)
    bench.step()
    assert entered.wait(WAIT_S)
    plant(monkeypatch, bench.connector.scheduler, "plan")
    mover = bench.workers[0].worker.mover
    letting_go = threading.Thread(target=lambda: (_wait_until(lambda: mover._runner.given_up), gate.set()))
    letting_go.start()
    bench.step()
    assert gate.is_set(), "the step has waited for the copy"
    letting_go.join()
    bench.abort("torn")
    assert bench.scheduler.reset_prefix_cache()
    for view in bench._views[0]:
        view.fill(0xEE)  # as a request that was given the blocks would
    bench.run()
    assert bench.counters().get("drive_written_bytes.0", 0) == 4 * SLOT_BYTES
    assert_off(bench, caplog)
    engines.close()
    (home,) = list_homes(tmp_path / "store")
    assert home.record is not None and home.record.clean, "it was closed in order"
    sealed = sum(file.read_bytes().count(MAGIC) for file in home.segments_path.glob("*/rank0.kv"))
    assert sealed == 4, "what was committed is there, and nothing torn beside it"

    again = engines.make(**store)
    again.serve("warm", PROMPT)
    assert again.counters()["hit_tokens.nvme"] == 4 * BLOCK_TOKENS, "the next start serves what was committed"


def _wait_until(condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.001)


# -- policies of the user's ------------------------------------------------------------------------


class BrokenPolicy(OnCompute):
    """Raises when the second request is served."""

    def reached(self, request_id: str, *arguments: Any) -> None:
        if request_id == "second":
            raise Planted("policy")
        super().reached(request_id, *arguments)


class BrokenAdmission(AdmitAll):
    """Raises when the second request wants a block."""

    def want(self, keys: Any, request_id: str) -> tuple[()]:
        if request_id == "second":
            raise Planted("admission")
        return ()


@pytest.mark.parametrize(("setting", "name"), [("store_policy", "BrokenPolicy"), ("cpu_admission", "BrokenAdmission")])
def test_a_wrong_policy_of_the_users_is_named(
    engines: Engines, setting: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench = engines.make(threaded=True, extra={setting: f"{__name__}:{name}"}, events=True)
    warm(bench)
    bench.serve("second", PROMPT, 4)
    assert_off(bench, caplog)
    assert f"An error in the policy {__name__}:{name}, in " in caplog.text


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_is_to_end_the_engine_does(
    plain: Engines, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = plain.make()

    def interrupt(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(bench.connector.scheduler, "plan", interrupt)
    bench.add("a", PROMPT)
    with pytest.raises(error):
        bench.step()


# -- a worker's half -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hook", "after"), [*moments(*WORKER_HOOKS, last=("collect",)), ("mover.submit", True), ("mover.poll", True)]
)
def test_an_error_in_a_hook_of_a_worker(
    bench: ByteBench, hook: str, after: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warm(bench)
    half: Any = bench.workers[0].worker
    owner = half.mover if hook.startswith("mover.") else half
    raised = plant(monkeypatch, owner, hook.removeprefix("mover."), after=after)
    serve_mixed(bench)
    assert raised
    assert_off(bench, caplog)


def test_what_has_ended_is_told_though_the_report_cannot_be_made(
    bench: ByteBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warm(bench)
    raised = plant(monkeypatch, Report, "merge", when=lambda mine, other: other.results)
    serve_mixed(bench)
    assert raised
    assert_off(bench, caplog)


@pytest.mark.parametrize("name", ["add", "turn"])
@pytest.mark.parametrize("kind", [JobKind.LOAD, JobKind.STORE])
def test_the_movers_thread_dies(
    bench: ByteBench,
    name: str,
    kind: JobKind,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    warm(bench)
    runner = bench.workers[0].worker.mover._runner
    if name == "add":
        raised = plant(monkeypatch, runner, name, after=True, when=lambda job, *_: job.kind is kind)
    else:
        raised = plant(
            monkeypatch, runner, name, when=lambda *_: any(work.job.kind is kind for work in runner._works.values())
        )
    serve_mixed(bench)
    assert raised
    assert_off(bench, caplog)


def test_two_ranks_of_which_one_fails() -> None:
    reports = [Report(), Report(off=True)]
    for first, second in (reports, reports[::-1]):
        merged = KVDiskWorkerMetadata(Report()).aggregate(KVDiskWorkerMetadata(first))
        assert merged.aggregate(KVDiskWorkerMetadata(second)).report.off


def test_reports_that_cannot_be_added_up_end_it_too() -> None:
    wrong = Report()
    wrong.stats.counts["no such metric"] = 1
    assert KVDiskWorkerMetadata(Report()).aggregate(KVDiskWorkerMetadata(wrong)).report.off


def test_a_worker_is_told_by_the_plan(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    bench = engines.make(threaded=True)
    warm(bench)
    assert Plan(off=True).off and not Plan().off
    metadata = bench.step().kv_connector_metadata
    metadata.plan = Plan(off=True)
    bench.workers[0].handle_preemptions(metadata)
    assert type(bench.workers[0].worker) is WorkerOff
    bench.workers[0].bind_connector_metadata(metadata)
    bench.workers[0].wait_for_save()
    assert bench.workers[0].build_connector_worker_meta() is None, "the scheduler knows"
    bench.workers[0].clear_connector_metadata()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_wrong_configuration_still_ends_the_start(plain: Engines) -> None:
    with pytest.raises(ConfigError, match="cpu_bytes"):
        plain.make(extra={"cpu_bytes": 1})
