# SPDX-License-Identifier: Apache-2.0
"""A steady load and what falls into it, run inside an engine's process (``EngineChild.call``, layout inproc)."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from typing import Any

from torture_acts import core_of

_KEPT: dict[str, Any] = {}
_REALLY_WRITE = os.pwritev
_LET_GO = threading.Event()


def use_weights(llm: Any, number: int) -> None:
    """Give the model in memory one of many sets of weights; 0 are those that it was loaded with."""
    from weight_acts import scale_weights

    def restore(model: Any) -> bool:
        for name, parameter in model.named_parameters():
            parameter.data.copy_(_KEPT.setdefault(name, parameter.data.clone()))
        return True

    assert all(llm.apply_model(restore))
    if number:
        scale_weights(llm, 0.8 * number)


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
    """Serve each prompt once; return the steps that the engine took, and whether stores are out at the end."""
    load = _Load(llm, prompts, max_tokens, at_once)
    steps = 0
    while load.open or load.added < len(prompts):
        load.add(len(prompts))
        load.step()
        steps += 1
    return steps, bool(core_of(llm).scheduler.connector.has_pending_push_work())


def _reset(llm: Any) -> bool:
    """Reset everything; False where vLLM refuses, which it may do for a load on its way and for nothing else."""
    from vllm.v1.request import RequestStatus

    try:
        assert llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    except RuntimeError:
        requests = core_of(llm).scheduler.requests.values()
        assert RequestStatus.WAITING_FOR_REMOTE_KVS in {request.status for request in requests}
        return False
    return True


def reset_under_load(
    llm: Any, prompts: list[list[int]], expected: list[list[list[int]]], resets: int, steps_between: int
) -> dict[str, int]:
    """Change the weights and reset everything, again and again, while requests run.

    Where vLLM refuses because a request loads, the load ends first, as docs/OPERATING.md says.
    ``expected``: by set of weights, what each prompt is answered. Compared is what came and went between two resets;
    what ran at one has tokens of both.
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
