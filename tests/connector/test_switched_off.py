# SPDX-License-Identifier: Apache-2.0
"""Errors of ours, and of a user's policy, in each hook: the engine goes on without kvdisk, on vLLM's real scheduler.

The bench fails where a request uses a block that does not hold its tokens' bytes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from schedulers import BLOCK_TOKENS, Bench
from vllm.distributed.kv_events import AllBlocksCleared
from worked_scheduler import WorkedBench

from kvdisk.connector.connector import KVDiskWorkerMetadata
from kvdisk.connector.off import SchedulerOff, WorkerOff
from kvdisk.device.header import MAGIC
from kvdisk.device.listing import list_homes
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
    """Let a method raise, the first time that ``when`` of its arguments is so; before or after it has done its work."""
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


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., WorkedBench]]:
    made: list[WorkedBench] = []

    def make_one(**more: Any) -> WorkedBench:
        folder = tmp_path / f"model{len(made)}"
        folder.mkdir()
        (folder / "weights.bin").write_bytes(b"a store needs weights that have an identity")
        made.append(WorkedBench(folder, **more))
        return made[-1]

    yield make_one
    for bench in made:
        bench.close()


@pytest.fixture(params=[None, 2 * BLOCK_TOKENS], ids=["one group", "two groups"])
def bench(make: Callable[..., WorkedBench], request: pytest.FixtureRequest) -> WorkedBench:
    return make(window_tokens=request.param, events=True)


def serve(bench: WorkedBench) -> None:
    """Step until nothing is left to do."""
    end_s = time.monotonic() + WAIT_S
    while bench.scheduler.has_requests():
        assert time.monotonic() < end_s, "it never ends"
        bench.step()


def warm(bench: WorkedBench) -> None:
    """Store a prompt, and let the GPU forget it."""
    bench.add("first", PROMPT)
    serve(bench)
    assert bench.counters()["stored_blocks"] >= 4
    assert bench.scheduler.reset_prefix_cache()
    bench.published.clear()


def serve_mixed(bench: WorkedBench) -> None:
    """Two hits, one of them aborted, and a miss."""
    bench.add("hit", PROMPT, max_tokens=4)
    bench.add("gone", PROMPT, max_tokens=40)
    bench.add("miss", OTHER, max_tokens=4)
    bench.step()
    bench.abort("gone")
    serve(bench)
    assert len(bench.tokens["hit"]) == len(bench.tokens["miss"]) == 4


def assert_off(bench: WorkedBench, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is held, nothing is served, everything else works, and somebody has said why, once."""
    assert not any(block.ref_cnt for block in bench.pool.blocks[1:])
    jobs = len(bench.jobs)
    assert bench.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    bench.add("after", PROMPT, max_tokens=4)
    serve(bench)
    assert len(bench.tokens["after"]) == 4
    assert len(bench.jobs) == jobs
    assert type(bench.connector.scheduler) is SchedulerOff and type(bench.worker.worker) is WorkerOff
    assert not bench.connector.has_pending_push_work() and not bench.connector.has_pending_block_frees()
    assert bench.connector.reset_cache()
    assert bench.counters()["switched_off"] == 1
    said = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [record.exc_info[0] for record in said if record.exc_info] == [Planted]
    assert "kvdisk is off until the engine starts again" in said[0].getMessage()
    assert AllBlocksCleared() in bench.published


# -- the scheduler's half --------------------------------------------------------------------------


@pytest.mark.parametrize(("hook", "after"), moments(*SCHEDULER_HOOKS, last=("plan",)))
def test_an_error_in_a_hook_of_the_scheduler(
    bench: WorkedBench, hook: str, after: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warm(bench)
    raised = plant(monkeypatch, bench.connector.scheduler, hook, after=after)
    serve_mixed(bench)
    assert raised
    assert_off(bench, caplog)


@pytest.mark.parametrize(
    "name",
    ["lookup", "plan_load", "may_offer", "plan_store", "take_plan", "settle", "commit", "request_finished"],
)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_an_error_in_the_manager(
    bench: WorkedBench, name: str, after: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warm(bench)
    raised = plant(monkeypatch, bench.connector.scheduler._manager, name, after=after)
    serve_mixed(bench)
    assert raised
    assert_off(bench, caplog)


def test_an_error_of_a_reset_and_of_a_victim(
    make: Callable[..., WorkedBench], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make(events=True)
    warm(bench)
    raised = plant(monkeypatch, bench.connector.scheduler._manager, "reset", after=True)
    bench.add("hit", PROMPT, max_tokens=4)
    bench.step()
    assert bench.scheduler.reset_connector_cache(), "nothing is served from before"
    assert raised
    serve(bench)
    assert_off(bench, caplog)

    caplog.clear()
    bench = make(num_blocks=12, events=True)
    raised = plant(monkeypatch, bench.connector.scheduler._manager, "preempt")
    for name, prompt in (("a", PROMPT), ("b", OTHER)):
        bench.add(name, prompt, max_tokens=100)
    serve(bench)
    assert raised
    assert [len(bench.tokens[name]) for name in "ab"] == [100, 100]
    assert_off(bench, caplog)


def test_a_load_that_was_promised_and_never_sent_ends_as_failed(
    bench: WorkedBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first of two is planned, and the error is in the second's plan: no worker has heard of either."""
    warm(bench)
    bench.add("other", OTHER)
    serve(bench)
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
    serve(bench)
    assert_off(bench, caplog)


def test_blocks_of_a_load_in_flight_are_kept_until_it_has_ended(
    bench: WorkedBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warm(bench)
    entered, gate = hold_copies(bench, monkeypatch, "scatter")
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
    serve(bench)
    assert len(bench.tokens["b"]) == 2
    assert_off(bench, caplog)


def hold_copies(bench: WorkedBench, patch: pytest.MonkeyPatch, name: str) -> tuple[threading.Event, threading.Event]:
    """Stop the mover's thread in its next copies until the second event is set; the first says that it is there."""
    copier = bench.worker.worker.mover._copier
    original, entered, gate = getattr(copier, name), threading.Event(), threading.Event()

    def held(*arguments: Any, **more: Any) -> Any:
        entered.set()
        assert gate.wait(WAIT_S)
        return original(*arguments, **more)

    patch.setattr(copier, name, held)
    return entered, gate


def test_a_store_whose_source_may_be_overwritten_never_reaches_the_drive(
    make: Callable[..., WorkedBench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After an error no copy from the GPU begins, and the step waits for the one under way, which is not written."""
    store = tmp_path / "store"
    extra = {"cpu_bytes": 0, "store_dirs": str(store), "nvme_bytes": "64MiB", "device": "posix"}
    bench = make(extra=extra, events=True)
    bench.add("sound", PROMPT, max_tokens=100)  # a segment is made first
    serve(bench)
    assert bench.counters()["stored_blocks"] == 4
    entered, gate = hold_copies(bench, monkeypatch, "gather")
    bench.add("torn", OTHER, max_tokens=100)
    bench.step()
    assert entered.wait(WAIT_S)
    plant(monkeypatch, bench.connector.scheduler, "plan")
    mover = bench.worker.worker.mover
    letting_go = threading.Thread(target=lambda: (_wait_until(lambda: mover._given_up), gate.set()))
    letting_go.start()
    bench.step()
    assert gate.is_set(), "the step has waited for the copy"
    letting_go.join()
    for cache in bench.caches.values():
        cache.fill_(0xEE)  # as a request that was given the blocks would
    bench.abort("torn")
    bench.step()
    serve(bench)
    assert bench.counters().get("drive_written_bytes.0", 0) == 4 * _slot_bytes(store)
    assert_off(bench, caplog)
    bench.close()
    (home,) = list_homes(store)
    assert home.record is not None and home.record.clean, "it was closed in order"
    assert _sealed_slots(home) == 4, "what was committed is there, and nothing torn beside it"

    again = make(extra=extra)
    again.add("warm", PROMPT)
    serve(again)
    assert again.counters()["hit_tokens.nvme"] == 4 * BLOCK_TOKENS, "the next start serves what was committed"


def _wait_until(condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.001)


def _slot_bytes(store: Path) -> int:
    (home,) = list_homes(store)
    assert home.record is not None
    return home.record.description["geometry"]["groups"][0]["slot_bytes"]


def _sealed_slots(home: Any) -> int:
    """Return the slots of a home that have a header, whatever the index says."""
    return sum(file.read_bytes().count(MAGIC) for file in home.segments_path.glob("*/rank0.kv"))


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
    make: Callable[..., WorkedBench], setting: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make(extra={setting: f"{__name__}:{name}"}, events=True)
    warm(bench)
    bench.add("second", PROMPT, max_tokens=4)
    serve(bench)
    assert_off(bench, caplog)
    assert f"An error in the policy {__name__}:{name}, in " in caplog.text


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_is_to_end_the_engine_does(
    make: Callable[..., WorkedBench], error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()

    def interrupt(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(bench.connector.scheduler, "plan", interrupt)
    bench.add("a", PROMPT)
    with pytest.raises(error):
        bench.step()


# -- a worker's half -------------------------------------------------------------------------------


@pytest.mark.parametrize(("hook", "after"), moments(*WORKER_HOOKS, last=("collect",)))
def test_an_error_in_a_hook_of_a_worker(
    bench: WorkedBench, hook: str, after: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warm(bench)
    raised = plant(monkeypatch, bench.worker.worker, hook, after=after)
    serve_mixed(bench)
    assert raised
    assert_off(bench, caplog)


@pytest.mark.parametrize("name", ["submit", "poll"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_an_error_in_a_call_of_the_mover(
    bench: WorkedBench, name: str, after: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warm(bench)
    raised = plant(monkeypatch, bench.worker.worker.mover, name, after=after)
    serve_mixed(bench)
    assert raised
    assert_off(bench, caplog)


def test_what_has_ended_is_told_though_the_report_cannot_be_made(
    bench: WorkedBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warm(bench)
    raised = plant(monkeypatch, Report, "merge", when=lambda mine, other: other.results)
    serve_mixed(bench)
    assert raised
    assert_off(bench, caplog)


@pytest.mark.parametrize("name", ["add", "turn"])
@pytest.mark.parametrize("kind", [JobKind.LOAD, JobKind.STORE])
def test_the_movers_thread_dies(
    bench: WorkedBench,
    name: str,
    kind: JobKind,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    warm(bench)
    runner = bench.worker.worker.mover._runner
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


def test_a_worker_is_told_by_the_plan(make: Callable[..., WorkedBench], caplog: pytest.LogCaptureFixture) -> None:
    bench = make()
    warm(bench)
    assert Plan(off=True).off and not Plan().off
    metadata = bench.step().kv_connector_metadata
    metadata.plan = Plan(off=True)
    bench.worker.handle_preemptions(metadata)
    assert type(bench.worker.worker) is WorkerOff
    bench.worker.bind_connector_metadata(metadata)
    bench.worker.wait_for_save()
    assert bench.worker.build_connector_worker_meta() is None, "the scheduler knows"
    bench.worker.clear_connector_metadata()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_wrong_configuration_still_ends_the_start(tmp_path: Path) -> None:
    from kvdisk.errors import ConfigError

    with pytest.raises(ConfigError, match="cpu_bytes"):
        Bench(tmp_path / "model", extra={"cpu_bytes": 1})
