# SPDX-License-Identifier: Apache-2.0
"""Errors of ours, and of a user's policy, in each hook: the engine goes on without kvdisk, on
vLLM's real scheduler.

The bench fails where a request uses a block that does not hold its tokens' bytes.
"""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
from schedulers import BLOCK_TOKENS, OTHER, PROMPT, SLOT_BYTES, Bench, Engines, prompt_of
from support.low_bounds import lower_shares
from vllm.distributed.kv_events import AllBlocksCleared
from vllm.lora.request import LoRARequest

from kvdisk.connector.connector import KVDiskConnector
from kvdisk.connector.metadata import KVDiskWorkerMetadata
from kvdisk.connector.off import SchedulerOff, WorkerOff, guarded
from kvdisk.connector.scheduler_side import SchedulerSide
from kvdisk.connector.worker_side import WorkerSide
from kvdisk.device.header import MAGIC
from kvdisk.device.listing import list_homes
from kvdisk.manager.admission import AdmissionPolicy
from kvdisk.manager.step_work import Kind
from kvdisk.manager.store_policy import OnCompute
from kvdisk.messages import JobKind, Report

WAIT_S = 600.0
TWO_GROUPS = {"window_tokens": 2 * BLOCK_TOKENS}
"""With one group a load that fails is told by its blocks, with two by its request."""


LENIENT = {"start_load_kv", "save_kv_layer"}
"""Guarded hooks that take any keyword, as vLLM declares them."""
UNUSED = LENIENT | {
    *("get_external_cache_hit_sources", "handle_preemptions", "request_finished", "shutdown"),
    *("take_events", "wait_for_layer_load"),
}
"""Guarded hooks that the bench calls at its end, in a way of its own, or never."""


class Planted(Exception):
    """What the tests plant."""


class Plant(NamedTuple):
    """An error in a method of ``owner``, before or ``after`` its work, the first time that ``when``
    (the bench, the method's arguments) is so."""

    owner: str
    name: str
    after: bool = False
    when: Callable[..., bool] = lambda *_: True

    def __repr__(self) -> str:
        return f"{'after' if self.after else 'before'} {self.owner}.{self.name}"

    def put(self, bench: Bench, patch: pytest.MonkeyPatch) -> list[int]:
        """Plant it; return a list that is empty until it was raised."""
        owner, raised = self._owner(bench), []
        original = getattr(owner, self.name)

        def planted(*arguments: Any, **more: Any) -> Any:
            due = not raised and self.when(bench, *arguments)
            result = None if due and not self.after else original(*arguments, **more)
            if due:
                raised.append(1)
                raise Planted(self.name)
            return result

        patch.setattr(owner, self.name, planted)
        return raised

    def _owner(self, bench: Bench) -> Any:
        if self.owner in {"scheduler", "manager"}:
            return bench.connector.scheduler if self.owner == "scheduler" else bench.manager
        worker: Any = bench.ranks[0].ours.worker
        return {"worker": worker, "mover": worker.mover, "runner": worker.mover._runner, "report": Report}[self.owner]


NO_HOOKS = {"bind_pool", "take_worker_groups", "register", "handshake", "mover", "wake"} | {
    *("counters", "switched_off", "shutdown"),
}
"""What a half has besides what the hooks of a running engine call."""


def before_and_after(owner: str, half: type, only_before: str) -> list[Plant]:
    """An error in each method of a half that hooks call; ``only_before`` ends with the note of what
    was told."""
    names = [name for name in vars(half) if name[0] != "_" and name not in NO_HOOKS]
    found = [Plant(owner, name, after) for name in names for after in (False, True)]
    found.remove(Plant(owner, only_before, after=True))
    return found


def is_of(kind: JobKind) -> dict[str, Callable[..., bool]]:
    return {
        "add": lambda _, job, *more: job.kind is kind,
        "turn": lambda bench, *_: any(work.job.kind is kind for work in bench.ranks[0].mover._runner._works.values()),
    }


IN_THE_SCHEDULER = [*before_and_after("scheduler", SchedulerSide, only_before="plan"), Plant("manager", "preempt")]
IN_A_WORKER = [
    *before_and_after("worker", WorkerSide, only_before="collect"),
    Plant("mover", "submit", after=True),
    Plant("mover", "poll", after=True),
    Plant("report", "merge", when=lambda _, mine, other: bool(other.results)),
    *(
        Plant("runner", name, name == "add", is_of(kind)[name])
        for name in ("add", "turn")
        for kind in (JobKind.LOAD, JobKind.STORE)
    ),
]


def make(engines: Engines, **more: Any) -> Bench:
    """``told``: the events of kvdisk's own."""
    bench: Any = engines.make(threaded=True, events=True, **more)
    take, bench.told = bench.connector.take_events, []

    def take_events() -> list[Any]:
        events = list(take())
        bench.told += events
        return events

    bench.connector.take_events = take_events
    return bench


def warm(bench: Bench) -> None:
    """Store a prompt, and let the GPU forget it."""
    bench.serve("first", PROMPT, 2)
    assert bench.counters()["stored_blocks"] >= 4
    assert bench.scheduler.reset_prefix_cache()


def serve_mixed(bench: Bench) -> None:
    """Two hits, one of them aborted, and a miss; then a victim, calls to the workers, a reset, and
    what a sleep tells."""
    for name, prompt in (("hit", PROMPT), ("gone", PROMPT), ("miss", OTHER)):
        bench.add(name, prompt, max_tokens=4)
    bench.step()
    bench.abort("gone")
    bench.run()
    bench.add("victim", prompt_of(3), max_tokens=4)
    bench.step()
    assert bench.scheduler.reset_prefix_cache(reset_running_requests=True)
    bench.step()
    bench.connector.note_adapter(LoRARequest("tuned", 1, "somewhere"))
    bench.connector.note_weights("update_weights")
    assert bench.scheduler.reset_connector_cache()
    for rank in bench.ranks:
        rank.connector.unregister_kv_caches()
        rank.connector.restore_kv_caches()
    bench.finish("hit", "miss", "victim", count=4)


def assert_off(bench: Bench, caplog: pytest.LogCaptureFixture, error: type[Exception] = Planted) -> None:
    """Nothing is held, nothing is served, everything else works, and somebody has said why,
    once."""
    assert not bench.references()
    jobs = len(bench.jobs)
    assert AllBlocksCleared() in bench.told, "a router believes nothing of it any more"
    assert bench.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    bench.serve("after", PROMPT, 4)
    assert len(bench.sampled("after")) == 4
    assert len(bench.jobs) == jobs
    assert type(bench.connector.scheduler) is SchedulerOff and type(bench.ranks[0].ours.worker) is WorkerOff
    assert not bench.connector.has_pending_push_work() and not bench.connector.has_pending_block_frees()
    assert bench.connector.reset_cache()
    assert bench.counters()["switched_off"] == 1
    said = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [record.exc_info[0] for record in said if record.exc_info] == [error]
    assert "kvdisk is off until the engine starts again" in said[0].getMessage()


@pytest.mark.parametrize(
    ("plant", "groups"),
    [*((plant, TWO_GROUPS) for plant in IN_THE_SCHEDULER + IN_A_WORKER), *((plant, {}) for plant in IN_A_WORKER)],
    ids=lambda value: str(value) if isinstance(value, Plant) else f"{1 + bool(value)} groups",
)
def test_an_error_in_a_hook(engines, plant, groups, monkeypatch, caplog):
    if groups:
        lower_shares(monkeypatch, 2, Kind.LOADS)  # so that a load has several jobs
    bench = make(engines, **groups)
    warm(bench)
    raised = plant.put(bench, monkeypatch)
    serve_mixed(bench)
    assert raised
    assert_off(bench, caplog)


GUARDED = {
    name for name, each in vars(KVDiskConnector).items() if inspect.isfunction(each) and hasattr(each, "__wrapped__")
}


def with_more(arguments: tuple[Any, ...], more: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return arguments, more | {"novel": True}


def renamed(arguments: tuple[Any, ...], more: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    given = [*arguments, *more.values()]
    return (), {f"novel_{at}": each for at, each in enumerate(given)}


def without(arguments: tuple[Any, ...], more: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (), {}


TAKEN = {name: list(inspect.signature(getattr(KVDiskConnector, name)).parameters)[1:] for name in GUARDED}
PROMISED = {"bind_connector_metadata", "update_state_after_alloc"}
"""Without their arguments nobody knows the loads that vLLM waits for."""


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (name, change)
        for name in sorted(GUARDED - UNUSED)
        for change in (with_more, renamed, without)
        if change is with_more or (TAKEN[name] and not (change is without and name in PROMISED))
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_arguments_that_a_hook_does_not_know(engines, name, change, monkeypatch, caplog):
    """They may mean that less is right than before: so kvdisk is off, and the engine goes on."""
    bench = make(engines)
    warm(bench)
    hook, calls = getattr(KVDiskConnector, name), []

    def newer(self: Any, *arguments: Any, **more: Any) -> Any:
        calls.append(1)
        changed, named = change(arguments, more)
        return hook(self, *changed, **named)

    monkeypatch.setattr(KVDiskConnector, name, newer)
    serve_mixed(bench)
    assert calls
    assert_off(bench, caplog, TypeError)


class Door:
    """A hook that does half of its work before it fails."""

    def __init__(self) -> None:
        self.stand_in: Any = None
        self.given: list[tuple[Any, Any]] = []
        self.answered: list[tuple[Any, Any]] = []

    def switch_off(self, error: Exception, hook: str) -> None:
        assert isinstance(error, Planted) and hook == "look"
        self.stand_in = Door.Off(self.answered)

    @guarded
    def look(self, key: str, tokens: int) -> str:
        self.given.append((key, tokens))
        raise Planted

    class Off:
        def __init__(self, answered: list[tuple[Any, Any]]) -> None:
            self._answered = answered

        def look(self, key: str | None, tokens: int | None) -> str:
            self._answered.append((key, tokens))
            return "off"


def test_a_hook_that_raises_is_answered_by_the_stand_in_and_never_called_again():
    door = Door()
    assert door.look("a", 3) == "off"
    assert door.look("b", tokens=4) == "off"
    assert door.given == [("a", 3)]
    assert door.look("c") == door.look() == door.look("d", 5, 6, novel=7) == door.look("e", number=8) == "off"
    assert door.answered == [("a", 3), ("b", 4), ("c", None), (None, None), ("d", 5), ("e", 8)]


# -- what was promised, and what is on its way -----------------------------------------------------


@pytest.mark.parametrize("groups", [{}, TWO_GROUPS], ids=["one group", "two groups"])
def test_a_load_that_was_promised_and_never_sent_ends_as_failed(engines, groups, monkeypatch, caplog):
    """The first of two is planned, and the error is in the second's plan: no worker has heard of
    either."""
    bench = make(engines, **groups)
    bench.warm(1, 2)
    Plant("manager", "plan_load", when=lambda _, name, *more: name == "c").put(bench, monkeypatch)
    for name, prompt in (("b", PROMPT), ("c", OTHER)):
        bench.add(name, prompt)
    output = bench.step()
    assert not output.num_scheduled_tokens
    plan = output.kv_connector_metadata.plan
    assert plan.off and [job.request_id for job in plan.jobs] == ["b", "c"]
    assert all(job.kind is JobKind.LOAD and job.moves for job in plan.jobs)
    assert bench.step().num_scheduled_tokens["b"] == len(PROMPT)
    bench.finish("b", "c")
    assert_off(bench, caplog)


def hold_copies(
    bench: Bench, patch: pytest.MonkeyPatch, request: pytest.FixtureRequest, name: str
) -> tuple[threading.Event, threading.Event]:
    """Stop the mover's thread in its next copies until the second event is set; the first says that
    it is there."""
    copier = bench.ranks[0].mover._copier
    original, entered, gate = getattr(copier, name), threading.Event(), threading.Event()

    def held(*arguments: Any, **more: Any) -> Any:
        entered.set()
        assert gate.wait(WAIT_S)
        return original(*arguments, **more)

    patch.setattr(copier, name, held)
    request.addfinalizer(gate.set)
    return entered, gate


@pytest.mark.parametrize("groups", [{}, TWO_GROUPS], ids=["one group", "two groups"])
def test_blocks_of_a_load_in_flight_are_kept_until_it_has_ended(engines, groups, monkeypatch, caplog, request):
    bench = make(engines, **groups)
    warm(bench)
    entered, gate = hold_copies(bench, monkeypatch, request, "scatter")
    bench.add("b", PROMPT)
    bench.add("gone", PROMPT)
    bench.step()
    assert entered.wait(WAIT_S)
    held = {block for job in bench.jobs_of(JobKind.LOAD) for move in job.moves for block in move.gpu_blocks}
    raised = Plant("manager", "take_plan").put(bench, monkeypatch)
    bench.step()
    assert raised
    bench.abort("gone")
    for _ in range(5):
        assert not bench.step().num_scheduled_tokens
    assert set(bench.references()) >= held
    gate.set()
    bench.finish("b")
    assert_off(bench, caplog)


def test_a_store_whose_source_may_be_overwritten_is_not_written(engines, tmp_path, monkeypatch, caplog, request):
    """After an error no copy from the GPU begins, and the step waits for the one under way, which
    is not written."""
    store: dict[str, Any] = {"nvme": True, "extra": {"cpu_bytes": 0}}
    bench = make(engines, **store)
    bench.serve("sound", PROMPT, 100)  # a segment is made first
    assert bench.counters()["stored_blocks"] == 4
    entered, gate = hold_copies(bench, monkeypatch, request, "gather")
    bench.add("torn", OTHER, max_tokens=100)
    bench.step()
    assert entered.wait(WAIT_S)
    Plant("scheduler", "plan").put(bench, monkeypatch)
    mover = bench.ranks[0].mover
    letting_go = threading.Thread(target=lambda: (_wait_until(lambda: mover._runner.copies.given_up), gate.set()))
    letting_go.start()
    bench.step()
    assert gate.is_set(), "the step has waited for the copy"
    letting_go.join()
    bench.abort("torn")
    assert bench.scheduler.reset_prefix_cache()
    for _, view in bench.ranks[0].views:
        view.fill(0xEE)  # as a request that was given the blocks would
    bench.run()
    assert bench.counters().get("drive_written_bytes.0", 0) == 4 * SLOT_BYTES
    assert_off(bench, caplog)
    engines.close()
    (home,) = list_homes(tmp_path / "store")
    assert home.record is not None and home.record.clean, "it was closed in order"
    sealed = sum(file.read_bytes().count(MAGIC) for file in home.segments_path.glob("*/rank0.kv"))
    assert sealed == 4, "what was committed is there, and nothing torn beside it"

    again = make(engines, **store)
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

    def reached(self, request_id: str, *arguments: Any) -> Sequence[int]:
        if request_id == "second":
            raise Planted("policy")
        return super().reached(request_id, *arguments)


class BrokenAdmission(AdmissionPolicy):
    """Raises when the second request wants a block."""

    def want(self, keys: Any, request_id: str) -> None:
        if request_id == "second":
            raise Planted("admission")


@pytest.mark.parametrize(("setting", "name"), [("store_policy", "BrokenPolicy"), ("cpu_admission", "BrokenAdmission")])
def test_a_wrong_policy_of_the_users_is_named(engines, setting, name, caplog):
    bench = make(engines, extra={setting: f"{__name__}:{name}"})
    warm(bench)
    bench.serve("second", PROMPT, 4)
    assert_off(bench, caplog)
    assert f"An error in the policy {__name__}:{name}, in " in caplog.text


# -- one half tells the other ----------------------------------------------------------------------


def test_a_report_that_is_off_or_cannot_be_added_up_puts_all_ranks_off():
    wrong = Report()
    wrong.stats.counts["no such metric"] = 1
    for reports in ([Report(), Report(off=True)], [Report(off=True), Report()], [Report(), wrong]):
        merged = KVDiskWorkerMetadata(Report())
        for report in reports:
            merged = merged.aggregate(KVDiskWorkerMetadata(report))
        assert merged.report.off


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_is_to_end_the_engine_does(engines, error, monkeypatch):
    bench = engines.make()

    def interrupt(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(bench.connector.scheduler, "plan", interrupt)
    bench.add("a", PROMPT)
    with pytest.raises(error):
        bench.step()
