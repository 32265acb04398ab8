# SPDX-License-Identifier: Apache-2.0
"""Requests of one prefix that arrive together, on vLLM's real scheduler and kvdisk's real workers: one of them loads.

The scenario is that of concurrent lookups in vLLM's own tests of its offloading connector.
"""

from __future__ import annotations

from typing import Any

import pytest
from byte_bench import ByteBench
from schedulers import BLOCK_TOKENS, Engines, prompt_of
from vllm.v1.request import RequestStatus

from kvdisk.messages import JobKind

pytestmark = pytest.mark.vllm

BLOCKS = 4
PROMPT = prompt_of(1, BLOCKS * BLOCK_TOKENS + 5)
NAMES = ("b", "c", "d")


def arrived_together(engines: Engines, **place: Any) -> tuple[ByteBench, list[Any]]:
    """Return a bench in which one of three requests loads, of which not a byte has moved, and the others wait."""
    bench = engines.make(**place)
    bench.serve("a", PROMPT)
    bench.forget()
    bench.hold = {JobKind.LOAD}
    requests = [bench.add(name, PROMPT, max_tokens=4) for name in NAMES]
    for _ in range(3):
        assert not bench.step().num_scheduled_tokens
    assert [job.request_id for job in bench.jobs_of(JobKind.LOAD)] == ["b"]
    assert requests[0].status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert [request.status for request in requests[1:]] == [RequestStatus.WAITING] * 2
    assert sorted(bench.references()) == sorted(bench.table("b")), "who waits holds nothing"
    return bench, requests


@pytest.mark.parametrize("place", [{}, {"pipelined": True}, {"nvme": True}, {"ranks": 2}], ids=str)
def test_the_others_take_what_the_first_has_loaded(engines: Engines, place: dict[str, Any]) -> None:
    bench, _ = arrived_together(engines, **place)
    bench.release()
    bench.run()
    assert len(bench.jobs_of(JobKind.LOAD)) == 1, "the others hit the GPU's cache"
    assert [len(bench.sampled(name)) for name in NAMES] == [4] * 3
    bench.assert_quiet()


@pytest.mark.parametrize("bad", [0, 2])
@pytest.mark.parametrize("aborted", [False, True])
def test_the_others_go_on_where_the_first_fails_or_is_aborted(engines: Engines, aborted: bool, bad: int) -> None:
    bench, _ = arrived_together(engines)
    if aborted:
        bench.abort("b")
    else:
        bench.fail, bench.fail_of = {JobKind.LOAD: (bad,)}, "b"
    bench.release()
    bench.run()
    assert [len(bench.sampled(name)) for name in NAMES] == [0 if aborted else 4, 4, 4]
    bench.assert_quiet()


def test_who_shares_only_the_beginning_waits_too_and_loads_the_rest(engines: Engines) -> None:
    bench = engines.make()
    longer = PROMPT[: 2 * BLOCK_TOKENS] + prompt_of(2, 2 * BLOCK_TOKENS + 5)
    for name, prompt in (("a", PROMPT), ("other a", longer)):
        bench.serve(name, prompt)
    bench.forget()
    bench.jobs.clear()
    for name, prompt in (("b", PROMPT), ("c", longer)):
        bench.add(name, prompt, max_tokens=4)
    bench.run()
    loaded = [move.key for job in bench.jobs_of(JobKind.LOAD) for move in job.moves]
    assert len(loaded) == len(set(loaded)) == BLOCKS + 2, "no block is loaded twice"
    assert [len(bench.sampled(name)) for name in ("b", "c")] == [4, 4]
    bench.assert_quiet()
