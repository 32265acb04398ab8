# SPDX-License-Identifier: Apache-2.0
"""What tests run inside a real engine's process (``EngineChild.call``): load, resets, new weights,
and an audit."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from functools import partial
from typing import Any

from support.live_audit import audit_manager

from kvdisk.blocks import Tier

STUCK_S = 600.0
_KEPT: dict[str, Any] = {}
_REALLY_WRITE = os.pwritev
_LET_GO = threading.Event()


def core_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core


def connectors_of(llm: Any) -> list[Any]:
    from kvdisk.connector import KVDiskConnector

    connector = core_of(llm).scheduler.connector
    found = [connector, *getattr(connector, "_connectors", ())]
    return [one for one in found if isinstance(one, KVDiskConnector)]


# -- load ------------------------------------------------------------------------------------------


def run_requests(llm: Any, requests: list[dict[str, Any]]) -> dict[str, list[list[int]]]:
    """Run requests with staggered starts and aborts; return the tokens of each that ended, per
    sample.

    A request: prompt, max_tokens, at (engine step of its arrival), abort (steps after arrival, or
    None), salt, logprobs (asks for prompt log-probabilities), n.
    """
    engine = llm.llm_engine
    waiting = sorted(range(len(requests)), key=lambda at: requests[at]["at"])
    aborts: dict[str, int] = {}
    ended: dict[str, list[list[int]]] = {}
    step, end_s, run_id = 0, time.monotonic() + 2 * STUCK_S, time.monotonic_ns()
    while waiting or engine.has_unfinished_requests():
        while waiting and (requests[waiting[0]]["at"] <= step or not engine.has_unfinished_requests()):
            at = waiting.pop(0)
            _add(engine, f"{run_id}-{at}", requests[at])
            if requests[at]["abort"] is not None:
                aborts[f"{run_id}-{at}"] = step + requests[at]["abort"]
        late = [name for name, when in aborts.items() if when <= step]
        engine.abort_request(late)
        for name in late:
            del aborts[name]
        outputs = engine.step()
        step += 1
        assert time.monotonic() < end_s, f"stuck at step {step}: {describe(llm)}"
        for output in outputs:
            reasons = {sample.finish_reason for sample in output.outputs}
            if output.finished and "abort" not in reasons:
                assert reasons == {"length"}, f"request {output.request_id} ended with {reasons}"
                ended[output.request_id.rsplit("-", 1)[1]] = [list(sample.token_ids) for sample in output.outputs]
    return ended


def _add(engine: Any, name: str, request: dict[str, Any]) -> None:
    from vllm import SamplingParams

    # Of several samples each takes the most likely token too, which greedy sampling refuses to do
    # twice.
    several = {"temperature": 1.0, "top_k": 1, "n": request["n"]} if request["n"] > 1 else {"temperature": 0.0}
    sampling = SamplingParams(
        **several,
        max_tokens=request["max_tokens"],
        ignore_eos=True,
        detokenize=False,
        prompt_logprobs=1 if request["logprobs"] else None,
    )
    salted = {"cache_salt": request["salt"]} if request["salt"] else {}
    engine.add_request(name, {"prompt_token_ids": request["prompt"]} | salted, sampling)


# -- what must hold when nothing is under way ------------------------------------------------------


def describe(llm: Any) -> str:
    scheduler = core_of(llm).scheduler
    parts = [f"running {len(scheduler.running)}, waiting {len(scheduler.waiting)}"]
    for connector in connectors_of(llm):
        manager = connector.scheduler._manager
        parts.append(f"jobs {len(manager._transfers)}, sources {len(manager._sources)}, {manager.stats.counts}")
    return "; ".join(parts)


def audit(llm: Any) -> dict[str, Any]:
    """Drain, and assert all that must hold when nothing is under way; return counts for the
    parent's checks."""
    scheduler, end_s = core_of(llm).scheduler, time.monotonic() + STUCK_S
    while scheduler.has_requests():
        assert time.monotonic() < end_s, f"no end of the drain: {describe(llm)}"
        llm.llm_engine.step()
    assert not scheduler.requests
    held = [block.block_id for block in scheduler.kv_cache_manager.block_pool.blocks[1:] if block.ref_cnt]
    assert not held, f"GPU blocks still held: {held}"
    facts = [_audit_connector(connector) for connector in connectors_of(llm)]
    assert llm.reset_prefix_cache(), "blocks are still held after a drain"
    return {"connectors": facts}


def _audit_connector(connector: Any) -> dict[str, Any]:
    side = connector.scheduler
    manager = side._manager
    assert not side._requests and not side._local_tokens, (side._requests, side._local_tokens)
    audit_manager(manager)
    catalog, nvme = manager._catalog, manager._tiers.get(Tier.NVME)
    assert nvme is None or not (nvme._drops or nvme.segments.opening or any(nvme.pool.limbo))
    on_nvme = [] if nvme is None else list(catalog.ready_keys(Tier.NVME))
    return {
        "counters": dict(manager.stats.counts),
        "nvme_blocks": len(on_nvme),
        "dropped_puts": 0 if nvme is None else nvme._index.poll().dropped_puts,
    }


# -- weights, pauses and resets --------------------------------------------------------------------


def reset_all(llm: Any) -> bool:
    """Reset the prefix cache with whatever runs, and the connector's."""
    return bool(llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True))


def pause(llm: Any, mode: str) -> None:
    """Pause the engine and have it clear its caches, the connector's among them, as before a weight
    update."""
    llm.llm_engine.engine_core.call_utility("pause_scheduler", mode, True)


def resume(llm: Any) -> None:
    """Go on after a pause."""
    llm.llm_engine.engine_core.call_utility("resume_scheduler")


def sleep_and_wake(llm: Any) -> None:
    """Put the engine to sleep as far as it goes without vLLM's sleep mode, and wake it."""
    llm.sleep(level=0)
    llm.wake_up(tags=["scheduling"])


def use_weights(llm: Any, number: int) -> None:
    """Give the model in memory one of many sets of weights, on every rank; 0 are those that it was
    loaded with."""
    assert all(llm.apply_model(partial(_use_weights, number)))


def _use_weights(number: int, model: Any) -> bool:
    import torch

    for at, (name, parameter) in enumerate(model.named_parameters()):
        parameter.data.copy_(_KEPT.setdefault(name, parameter.data.clone()))
        if number and "layernorm" in name:  # the matrices may have been packed for the CPU's kernels
            noise = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(at))
            parameter.data.mul_(1 + 0.8 * number * noise.to(parameter.dtype))
    return True


# -- writes that are slow, and load ----------------------------------------------------------------


def delay_writes(llm: Any, delay_s: float) -> None:
    """Let each write to the drive take so much longer (device ``posix``); 0: as it was."""

    def write(*arguments: Any) -> int:
        time.sleep(delay_s)
        return _REALLY_WRITE(*arguments)

    os.pwritev = write if delay_s else _REALLY_WRITE


def hang_next_write(llm: Any) -> None:
    """Let the next write hang until ``let_go``."""
    first = threading.Lock()

    def write(*arguments: Any) -> int:
        if first.acquire(blocking=False):
            _LET_GO.wait()
        return _REALLY_WRITE(*arguments)

    os.pwritev = write


def let_go(llm: Any) -> None:
    """End what hangs."""
    _LET_GO.set()
    os.pwritev = _REALLY_WRITE


class _Load:
    """Keeps so many requests in the engine, which take the prompts in turn."""

    def __init__(self, llm: Any, prompts: list[list[int]], max_tokens: int, at_once: int) -> None:
        from vllm import SamplingParams

        self._engine = llm.llm_engine
        self._prompts = prompts
        self._sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self._at_once = at_once
        self._name = f"load-{time.monotonic_ns()}"
        self.added = 0
        self.open: set[int] = set()

    def add(self, most: int) -> None:
        while len(self.open) < self._at_once and self.added < most:
            prompt = self._prompts[self.added % len(self._prompts)]
            self._engine.add_request(f"{self._name}-{self.added}", {"prompt_token_ids": prompt}, self._sampling)
            self.open.add(self.added)
            self.added += 1

    def step(self) -> dict[int, list[int]]:
        """Step; return the tokens of the requests that ended, by number."""
        ended = {}
        for output in self._engine.step():
            if output.finished:
                assert {sample.finish_reason for sample in output.outputs} == {"length"}
                number = int(output.request_id.rsplit("-", 1)[1])
                ended[number] = list(output.outputs[0].token_ids)
                self.open.discard(number)
        return ended


def run_load(llm: Any, prompts: list[list[int]], max_tokens: int, at_once: int) -> tuple[int, bool]:
    """Serve each prompt once; return the steps that the engine took, and whether stores are out at
    the end."""
    load = _Load(llm, prompts, max_tokens, at_once)
    steps = 0
    while load.open or load.added < len(prompts):
        load.add(len(prompts))
        load.step()
        steps += 1
    return steps, bool(core_of(llm).scheduler.connector.has_pending_push_work())


def _reset(llm: Any) -> bool:
    """Reset everything; False where vLLM refuses, which it may do for a load on its way and for
    nothing else."""
    from vllm.v1.request import RequestStatus

    try:
        assert llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    except RuntimeError:
        scheduler = core_of(llm).scheduler
        caches = scheduler.kv_cache_manager
        loading = {
            block
            for request in scheduler.requests.values()
            if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
            for group in caches.get_block_ids(request.request_id)
            for block in group
        }
        held = {block.block_id for block in caches.block_pool.blocks[1:] if block.ref_cnt}
        assert held and held <= loading, "blocks are held that nobody loads to"
        return False
    return True


def reset_under_load(
    llm: Any, prompts: list[list[int]], expected: list[list[list[int]]], resets: int, steps_between: int
) -> dict[str, int]:
    """Change the weights and reset everything, again and again, while requests run.

    Where vLLM refuses because a request loads, the load ends first, as docs/RESETS.md says.
    ``expected``: by set of weights, what each prompt is answered. Compared is what came and went
    between two resets; what ran at one has tokens of both.
    """
    load = _Load(llm, prompts, len(expected[0][0]), 8)
    counts: Counter[str] = Counter()
    first_of_this = 0
    for turn in range(resets):
        for _ in range(steps_between):
            load.add(1 << 30)
            for number, tokens in load.step().items():
                if number >= first_of_this:
                    counts["compared"] += 1
                    wanted = expected[turn % len(expected)][number % len(prompts)]
                    assert tokens == wanted, f"after reset {turn}: request {number} got {tokens} instead of {wanted}"
        load.add(1 << 30)
        counts["open"] += len(load.open)
        counts["stores out"] += bool(core_of(llm).scheduler.connector.has_pending_push_work())
        while not (done := _reset(llm)):
            counts["refused"] += 1
            load.step()
        counts["reset"] += done
        use_weights(llm, (turn + 1) % len(expected))
        first_of_this = load.added
    while load.open:
        load.step()
    return dict(counts)
