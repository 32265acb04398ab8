# SPDX-License-Identifier: Apache-2.0
"""On vLLM's real scheduler: calls to the workers beside the steps, which change weights or load
adapters while the engine runs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from adapter_files import write_adapter
from schedulers import BLOCK_TOKENS, BLOCKS, PROMPT, Bench
from test_scheduler_adapters import add, serve, start
from vllm.lora.request import LoRARequest

from kvdisk.blocks import Tier
from kvdisk.connector.off import ToldOff
from kvdisk.connector.worker_calls import name_of


class Workers:
    """What vLLM's executor is here: it notes the calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def collective_rpc(
        self, method: Any, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> str:
        self.calls.append((method, timeout, args, kwargs))
        return "done"


class Engine:
    """What vLLM's engine core is here: it has an executor, then makes the scheduler."""

    def __init__(self, make: Callable[..., Bench], **more: Any) -> None:
        self.model_executor = Workers()
        self.bench = make(**more)

    def collective_rpc(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> str:
        return self.model_executor.collective_rpc(method, timeout, args, kwargs)

    def call(self, method: Any, *args: Any, by_user: bool = True) -> None:
        caller = self if by_user else self.model_executor
        assert caller.collective_rpc(method, 3.0, args, {"x": 1}) == "done"
        assert self.model_executor.calls.pop() == (method, 3.0, args, {"x": 1})


def update_weights_by_ipc(worker: Any) -> None:
    """Stands for what a framework for training gives."""


def look_at(worker: Any) -> None:
    """Stands for what reads something."""


CHANGES = [
    *("start_weight_update", "update_weights", "finish_weight_update", "start_draft_weight_update"),
    *("reload_weights", "reset_weights", "load_model", "apply_model"),
    *("update_weight", "update_named_param", update_weights_by_ipc, partial(update_weights_by_ipc, 1)),
]
DOUBTFUL = ["sync_with_trainer", "sleep", look_at, partial(partial(look_at)), lambda _: None]
OTHERS = [
    *("compute_weight_checksums", "init_weight_transfer_engine", "shutdown_weight_transfer_engine"),
    *("supports_draft_weight_updates", "profile", "reset_mm_cache", "get_weight_norms"),
]


@pytest.mark.parametrize(
    ("on_reset", "method", "hits"),
    [
        *(("epoch", method, (0, 0)) for method in CHANGES),
        *(("epoch", method, (0, BLOCKS)) for method in DOUBTFUL),
        *(("epoch", method, (BLOCKS, BLOCKS)) for method in OTHERS),
        ("keep", "update_weights", (BLOCKS, BLOCKS)),
    ],
    ids=lambda each: name_of(each) if callable(each) else None,
)
@pytest.mark.parametrize("by_user", [True, False], ids=["a user's", "the engine's"])
def test_a_call_that_may_change_weights_is_a_reset(engines, on_reset, method, hits, by_user):
    """What nobody knows the meaning of costs hits where a user calls it; the engine's own calls are
    known."""
    engine = Engine(engines.make, extra={"on_reset": on_reset})
    engine.bench.warm(1)
    engine.call(method, by_user=by_user)
    engine.bench.serve("again", PROMPT)
    assert sum(blocks for _, blocks in engine.bench.loads()) == hits[not by_user]


def test_what_was_computed_with_other_weights_is_not_found_at_the_next_start(engines):
    """Though nobody has cleared anything, and a request went on."""
    engine = Engine(engines.make, nvme=True, extra={"store_decode": True})
    engine.bench.add("goes on", PROMPT, 3 * BLOCK_TOKENS)
    engine.bench.step(2)
    engine.call("reload_weights")
    engine.bench.run(1000)
    engine.bench.serve("new", PROMPT[::-1])
    assert engine.bench.in_tier(Tier.NVME)
    engines.end()
    bench = engines.make(nvme=True)
    for name, prompt in (("a", PROMPT), ("b", PROMPT[::-1])):
        bench.serve(name, prompt)
    assert not bench.loads()


def test_calls_after_an_error_of_ours_reach_the_workers(engines):
    engine = Engine(engines.make)
    engine.bench.connector.switch_off(ToldOff(), "")
    engine.call("update_weights")
    engine.call("add_lora", LoRARequest("tuned", 1, "somewhere"))


def test_the_executor_ends_when_nobody_has_it(engines):
    """It holds large memory."""
    workers = weakref.ref(Engine(engines.make).model_executor)
    gc.disable()
    try:
        assert workers() is None
    finally:
        gc.enable()


# -- adapters --------------------------------------------------------------------------------------


@pytest.fixture
def tuned(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "tuned", 1)


def test_one_that_another_replaces_in_place_leaves_nothing(engines, tuned, tmp_path):
    """vLLM: the requests that run go on with the new one's weights, and keep the old one's path."""
    other = write_adapter(tmp_path / "other", 2)
    engine = Engine(partial(start, engines), nvme=True, extra={"store_decode": True})
    bench = engine.bench
    add(bench, tuned, 3 * BLOCK_TOKENS)
    engine.call("add_lora", LoRARequest("tuned", 1, str(other), load_inplace=True))
    bench.run(steps=1000)
    assert bench.stored(), "offered they were"
    assert not bench.in_tier(Tier.CPU) and not bench.in_tier(Tier.NVME)
    engines.end()
    bench = start(engines, nvme=True)
    serve(bench, "a", tuned)
    assert not bench.loads()


@pytest.mark.parametrize("other", [True, False], ids=["of another path", "of its path"])
def test_one_that_was_loaded_before_its_first_request(engines, tuned, tmp_path, other):
    """vLLM: its workers have the first path that a number was given for."""
    loaded = write_adapter(tmp_path / "other", 2) if other else tuned
    engine = Engine(partial(start, engines))
    engine.call("add_lora", LoRARequest("tuned", 1, str(loaded)))
    serve(engine.bench, "a", tuned)
    assert bool(engine.bench.stored()) != other
