# SPDX-License-Identifier: Apache-2.0
"""What docs/RESETS.md says of pauses, resets and weight updates, with vLLM's real scheduler and
engine core."""

from __future__ import annotations

import logging
import re
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from schedulers import BLOCK_TOKENS, BLOCKS, PROMPT, Bench, Engines, prompt_of
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.entrypoints.rl.factories import register_rl_api_routers
from vllm.entrypoints.serve import register_vllm_dev_api_routers
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.request import RequestStatus

from kvdisk.connector.off import ToldOff
from kvdisk.device.telemetry_file import read_telemetry
from kvdisk.messages import JobKind

UNMAPPED = 0x5A5A5A5A5A5A5A5A


class Executor(SimpleNamespace):
    """The bench's ranks as vLLM's executor has them. They sleep as vLLM's GPU workers do: what was
    in the KV cache is gone, and nobody else writes to it."""

    def __init__(self, bench: Bench) -> None:
        nothing = {name: lambda *_: None for name in ("collective_rpc", "reset_mm_cache", "reset_encoder_cache")}
        super().__init__(is_sleeping=False, **nothing)
        self._bench = bench

    def sleep(self, level: int) -> None:
        self.is_sleeping = True
        for rank in self._bench.ranks:
            rank.connector.unregister_kv_caches()
            for _, view in rank.views:
                view[:] = UNMAPPED

    def wake_up(self, tags: Any = None) -> None:
        for rank in self._bench.ranks:
            assert all((view == UNMAPPED).all() for _, view in rank.views), "memory of the GPU was touched"
            rank.connector.restore_kv_caches()
        self.is_sleeping = False

    def get_kv_connector_handshake_metadata(self) -> list[dict[tuple[int, int], Any]]:
        found = [{(0, at): rank.connector.get_handshake_metadata()} for at, rank in enumerate(self._bench.ranks)]
        return [one for one in found if None not in one.values()]


class Core(EngineCoreProc):
    """vLLM's engine core with the bench's scheduler: no model, no processes."""

    def __init__(self, bench: Bench) -> None:
        self.scheduler = bench.scheduler
        self.model_executor = Executor(bench)
        self.mm_receiver_cache = None
        self.batch_queue = None
        self.engines_running = False
        self._idle_state_callbacks: list[Any] = []
        self._bench = bench

    def _send_abort_outputs(self, aborted: Any) -> None:
        pass

    def pause(self, mode: Any) -> None:
        """Pause and clear, and wait for it as a client does."""
        done = self.pause_scheduler(mode, True)
        if isinstance(done, Future):
            self.step_until_idle()
            done.result(0)

    def step_until_idle(self) -> None:
        """As the core's loop does before it sleeps."""
        for _ in range(50):
            if not self.has_work():
                return self._notify_idle_state_callbacks()
            self._bench.step()
        raise AssertionError("it never rests")


@pytest.fixture
def bench(engines: Engines) -> Bench:
    """An engine that has drained, and whose prompt lies in kvdisk's memory alone."""
    made: Bench = engines.make().warm(1)
    return made


@pytest.fixture
def loading(bench: Bench) -> Bench:
    """A load is out."""
    bench.hold = {JobKind.LOAD}
    bench.add("b", PROMPT)
    bench.step()
    assert [job.kind for job in bench.jobs] == [JobKind.LOAD]
    return bench


def hits(bench: Bench) -> int:
    """Serve the prompt once more; return how many blocks kvdisk gives."""

    def served() -> int:
        return sum(bench.counters().get(f"hit_tokens.{tier}", 0) for tier in ("cpu", "nvme"))

    before = served()
    bench.serve("again", PROMPT)
    return (served() - before) // BLOCK_TOKENS


@pytest.mark.parametrize(
    ("on_reset", "reset", "kept"),
    [
        ("epoch", {"reset_running_requests": True}, BLOCKS),
        ("epoch", {"reset_running_requests": True, "reset_connector": True}, 0),
        ("keep", {"reset_connector": True}, BLOCKS),
    ],
    ids=["of the GPU alone", "of the connector too", "with weights that stay"],
)
def test_what_is_served_after_a_reset(on_reset, reset, kept, engines):
    bench = engines.make(extra={"on_reset": on_reset}).warm(1)
    bench.serve("other", prompt_of(2))
    assert bench.scheduler.reset_prefix_cache(**reset)
    assert hits(bench) == kept


def test_the_calls_through_http_are_vllms():
    """Every request that the page names, with its parameters."""
    page = (Path(__file__).parents[2] / "docs" / "RESETS.md").read_text()
    named = set(re.findall(r"POST /(\w+)(?:\?([\w=&]+))?`", page))
    assert {path for path, _ in named} >= {"reset_prefix_cache", "pause", "resume", "sleep", "wake_up"}
    app = FastAPI()
    register_vllm_dev_api_routers(app)
    register_rl_api_routers(app)
    routes = {route.path: route for route in app.routes if "POST" in getattr(route, "methods", ())}
    for path, query in named:
        known = {parameter.name for parameter in routes[f"/{path}"].dependant.query_params}
        assert {one.partition("=")[0] for one in query.split("&") if one} <= known, path


def test_a_reset_is_in_the_log_and_in_the_figures(engines, caplog):
    bench = engines.make(nvme=True).warm(1)
    path = bench.connector.scheduler._parts.home.path
    with caplog.at_level(logging.INFO, "kvdisk"):
        assert bench.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    (said,) = [line for line in caplog.messages if "was reset" in line]
    assert f", {BLOCKS} blocks in NVMe stay for the next start, 0 loads on their way are computed" in said
    bench.connector.scheduler._parts.telemetry.write()
    found = read_telemetry(path)
    assert found.epoch != 0 and found.reset_s >= found.started_s


def test_who_asks_something_of_an_engine_at_rest_does_it_and_its_next_hook_waits_for_that(engines):
    """An idle vLLM engine takes no step, and nobody can wake it."""
    bench = engines.make(nvme=True).warm(1)
    mailbox, done = bench.connector.scheduler._parts.mailbox, []
    while bench.connector.has_pending_push_work():
        bench.step()
    assert mailbox.rests
    mailbox.post(lambda: done.append("at rest"))
    assert done == ["at rest"]
    assert bench.connector.take_events() == [] and not mailbox.rests
    mailbox.post(lambda: done.append("with the next step"))
    assert done == ["at rest"]
    assert hits(bench) == BLOCKS and done[1:] == ["with the next step"]


def test_with_a_load_out_a_plain_reset_says_no_and_resets_the_connector(loading):
    assert not loading.scheduler.reset_prefix_cache(reset_connector=True)
    loading.finish()
    assert loading.counters()["failed_loads"] == BLOCKS, "what was on its way is not served either"
    assert loading.scheduler.reset_prefix_cache()
    assert hits(loading) == BLOCKS, "what was computed since"


def test_with_a_load_out_a_reset_that_preempts_raises_and_resets_nothing(loading):
    with pytest.raises(RuntimeError, match="waiting for remote KV transfer"):
        loading.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    loading.finish()
    assert not loading.counters().get("failed_loads"), "kvdisk was not asked to forget anything"


@pytest.mark.parametrize("ended", [False, True], ids=["load on its way", "load ended, request not resumed"])
def test_pause_keep_with_a_clear_raises_while_a_request_waits_for_its_load(loading, ended):
    loading.hold -= {JobKind.LOAD} if ended else set()
    loading.step()
    core = Core(loading)
    loading.release()
    with pytest.raises(RuntimeError, match="waiting for remote KV transfer"):
        core.pause("keep")
    assert core.is_scheduler_paused(), "resume it"
    core.resume_scheduler()
    loading.run()
    assert core.pause_scheduler("keep", True) is None, "drained: it clears"
    core.resume_scheduler()
    assert hits(loading) == 0


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_pauses_that_drain_clear_though_a_load_was_out(loading, mode):
    core = Core(loading)
    done = core.pause_scheduler(mode, True)
    assert isinstance(done, Future) and not done.done(), "the load is waited for"
    loading.release()
    core.step_until_idle()
    assert done.result(0) is None
    core.resume_scheduler()
    assert hits(loading) == 0


def test_pause_abort_in_the_callers_process_raises_with_a_load_out(loading):
    core = Core(loading)
    with pytest.raises(RuntimeError, match="waiting for remote KV transfer"):
        EngineCore.pause_scheduler(core, "abort", True)
    with pytest.raises(ValueError, match="inproc"):
        EngineCore.pause_scheduler(core, "wait", True)
    core.resume_scheduler()


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_session_that_waits_for_its_next_input_holds_its_blocks(mode, bench):
    """Only a pause that aborts it clears; the others leave the engine paused."""
    session = bench.add("s", prompt_of(2), max_tokens=2, resumable=True)
    while session.status is not RequestStatus.WAITING_FOR_STREAMING_REQ:
        bench.step()
    core = Core(bench)
    core.step_until_idle()
    assert not bench.scheduler.reset_prefix_cache()
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        bench.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    if mode == "abort":
        core.pause(mode)
    else:
        with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
            core.pause(mode)
        assert core.is_scheduler_paused(), "resume it"
        bench.abort("s")
    core.resume_scheduler()
    assert hits(bench) == (0 if mode == "abort" else BLOCKS)


def test_a_pause_without_a_clear_and_sleep_of_level_0_keep_everything(loading):
    core = Core(loading)
    loading.release()
    done = core.pause_scheduler("keep", False)
    core.step_until_idle()
    assert done is None or done.result(0) is None
    assert core.scheduler.pause_state is PauseState.PAUSED_ALL
    core.resume_scheduler()
    loading.finish("b")
    assert not loading.counters().get("failed_loads")
    assert loading.scheduler.reset_prefix_cache()
    assert hits(loading) == BLOCKS


def asleep(core: Core, mode: Any = "wait") -> None:
    """Let the engine sleep, and wait for it as a client does."""
    done = core.sleep(1, mode)
    if isinstance(done, Future):
        core.step_until_idle()
        done.result(0)
    assert core.model_executor.is_sleeping


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers are told of sleeps, whatever vLLM this is: ``Executor`` tells them."""
    monkeypatch.setattr(KVConnectorBase_V1, "unregister_kv_caches", lambda self: None, raising=False)


@pytest.fixture(params=["epoch", "keep"])
def sleeper(request: pytest.FixtureRequest, engines: Engines, told: None) -> Bench:
    """An engine in sleep mode, with a store; by what a reset means."""
    made: Bench = engines.make(nvme=True, extra={"on_reset": request.param}, sleeps=True)
    return made


def test_the_tiers_outlive_a_sleep(sleeper):
    """By default in another epoch: nothing tells whether the weights are the same after it."""
    sleeper.warm(1)
    core, keeps = Core(sleeper), sleeper.connector.scheduler._config.on_reset == "keep"
    asleep(core)
    core.wake_up()
    assert hits(sleeper) == (BLOCKS if keeps else 0)
    sleeper.scheduler.reset_prefix_cache()
    assert hits(sleeper) == BLOCKS, "what was computed since"
    asleep(core, "abort")
    core.wake_up(["weights"])
    core.wake_up(["kv_cache"])
    assert hits(sleeper) == (BLOCKS if keeps else 0)


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize("policy", ["on_compute", "on_preemption"])
def test_nothing_that_a_sleep_took_away_is_stored(policy, engines):
    """Of requests that were running, and go on after it; the bench compares what is loaded then."""
    extra = {"on_reset": "keep", "store_policy": policy}
    bench = engines.make(extra=extra, sleeps=True)
    bench.hold = {JobKind.STORE}
    bench.add("running", PROMPT, max_tokens=8)
    bench.step()
    core = Core(bench)
    # In the caller's process a pause waits for nothing.
    EngineCore.pause_scheduler(core, "keep", True)
    core.model_executor.sleep(1)
    bench.release()
    core.wake_up()
    bench.finish("running", count=8)
    assert bench.scheduler.reset_prefix_cache()
    bench.serve("again", PROMPT)


def test_jobs_that_come_during_a_sleep_touch_no_gpu(sleeper):
    """A step without requests, for what memory and drive have to do, is nothing to wait for."""
    sleeper.warm(1)
    core = Core(sleeper)
    asleep(core)
    for _ in range(5):
        sleeper.step()
        sleeper.commit()
    core.wake_up()
    hits(sleeper)


def test_a_sleep_after_an_error_of_ours(sleeper):
    """Whichever half is off already: vLLM goes on asking both."""
    sleeper.warm(1)
    for at, half in enumerate((sleeper.ranks[0].ours, sleeper.connector)):
        half.switch_off(ToldOff(), "")
        core = Core(sleeper)
        asleep(core)
        core.wake_up()
        told = core.model_executor.get_kv_connector_handshake_metadata()
        sleeper.scheduler.connector.set_xfer_handshake_metadata_pp_aware(dict.fromkeys(range(len(told))))
        sleeper.serve(f"after {at}", PROMPT)
