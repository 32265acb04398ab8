# SPDX-License-Identifier: Apache-2.0
"""Captures and graphs on the fake GPU: what they hold, what they forbid, and how they end."""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch

from fake_gpu import control
from fake_gpu.cuda_calls import (
    GLOBAL,
    LEGACY,
    PER_THREAD,
    RELAXED,
    THREAD_LOCAL,
    call,
    copy_async,
    expect,
    made,
    on_gpu,
    pinned,
)

pytestmark = pytest.mark.fake_gpu
NONE, ACTIVE, INVALID = 0, 1, 2
NON_BLOCKING = 1


def new_stream(flags: int = NON_BLOCKING) -> int:
    return made("cudaStreamCreateWithFlags", flags)


def new_event() -> int:
    return made("cudaEventCreateWithFlags", 0)


def set_bytes(tensor: torch.Tensor, value: int, stream: int) -> int:
    return call("cudaMemsetAsync", tensor.data_ptr(), value, tensor.nbytes, stream)


def wait(stream: int, other: int) -> int:
    """Have a stream wait for what another was given, by an event; return the error."""
    event = new_event()
    assert call("cudaEventRecord", event, other) == 0
    return call("cudaStreamWaitEvent", stream, event, 0)


def status_of(stream: int) -> int:
    status = ctypes.c_int()
    assert call("cudaStreamIsCapturing", stream, ctypes.byref(status)) == 0
    return status.value


def begin(stream: int, mode: int = RELAXED) -> None:
    assert call("cudaStreamBeginCapture", stream, mode) == 0


def end(stream: int) -> tuple[int, int]:
    """End a capture; return the error, and the graph."""
    graph = ctypes.c_void_p()
    code = call("cudaStreamEndCapture", stream, ctypes.byref(graph))
    assert (code == 0) == bool(graph.value)
    return code, graph.value or 0


def instance_of(stream: int) -> int:
    """End a capture; return a graph that can be launched."""
    code, graph = end(stream)
    assert code == 0
    instance = made("cudaGraphInstantiateWithFlags", graph, 0)
    assert call("cudaGraphDestroy", graph) == 0
    return instance


def exchange_mode(mode: int) -> int:
    """Set this thread's mode; return what it was."""
    value = ctypes.c_int(mode)
    assert call("cudaThreadExchangeStreamCaptureMode", ctypes.byref(value)) == 0
    return value.value


def on_another_thread(act) -> object:
    found = []
    thread = threading.Thread(target=lambda: found.append(act()))
    thread.start()
    thread.join()
    return found[0]


def test_nothing_is_done_while_it_is_captured():
    numbers = torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            numbers.add_(1)
    torch.cuda.synchronize()
    assert numbers.sum().item() == 0
    graph.replay()
    graph.replay()
    assert numbers.sum().item() == 10_000


def test_a_graph_of_several_streams_keeps_what_ties_them_and_no_more():
    there, others = on_gpu(64), [on_gpu(64) for _ in range(2)]
    one, two = new_stream(), new_stream()
    begin(one)
    assert set_bytes(there, 1, one) == 0 and wait(two, one) == 0
    assert status_of(two) == ACTIVE
    assert copy_async(others[0], there, one) == 0 and copy_async(others[1], there, two) == 0
    assert wait(one, two) == 0 and set_bytes(there, 2, one) == 0
    graph = instance_of(one)
    assert status_of(two) == NONE
    pending = set()
    for seed in range(20):
        control.reseed("random", seed)
        others[0].zero_(), others[1].zero_()
        torch.cuda.synchronize()
        with expect():
            assert call("cudaGraphLaunch", graph, one) == 0
            pending.add(control.pending())
        assert [int(each[0]) for each in (there, *others)] == [2, 1, 1]
    assert len(pending) > 1
    count = ctypes.c_uint64()
    begin(one)
    assert call("cudaGraphLaunch", graph, one) == 0, "it becomes part of what is captured"
    code, outer = end(one)
    assert code == 0 and call("cudaGraphGetNodes", outer, 0, ctypes.byref(count)) == 0 and count.value == 4
    torch.cuda.synchronize()
    with expect():
        assert call("cudaGraphLaunch", made("cudaGraphInstantiateWithFlags", outer, 0), two) == 0
    assert call("cudaGraphExecDestroy", graph) == 0


def test_branches_of_a_graph_that_nothing_ties_are_a_race():
    there, one, two = on_gpu(64), new_stream(), new_stream()
    begin(one)
    assert wait(two, one) == 0
    assert set_bytes(there, 1, one) == 0 and set_bytes(there, 2, two) == 0
    assert wait(one, two) == 0
    graph = instance_of(one)
    with expect(races=1):
        assert call("cudaGraphLaunch", graph, one) == 0


def test_launches_of_a_graph_follow_one_another_and_their_stream():
    there, one, two = on_gpu(64), new_stream(), new_stream()
    begin(one)
    assert set_bytes(there, 1, one) == 0
    graph = instance_of(one)
    with expect():  # the second launch waits for the first, on another stream too
        assert set_bytes(there, 2, one) == 0
        assert call("cudaGraphLaunch", graph, one) == 0 and call("cudaGraphLaunch", graph, two) == 0
        assert set_bytes(there, 3, two) == 0
    with expect(races=1):
        assert call("cudaGraphLaunch", graph, one) == 0 and set_bytes(there, 2, two) == 0
    with expect():
        assert call("cudaGraphLaunch", graph, one) == 0 and call("cudaGraphExecDestroy", graph) == 0


def test_a_host_function_in_a_graph_is_called_at_each_launch():
    stream, calls = new_stream(), []
    count = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: calls.append(1))
    begin(stream)
    assert call("cudaLaunchHostFunc", stream, count, 0) == 0
    graph = instance_of(stream)
    assert not calls
    for _ in range(3):
        assert call("cudaGraphLaunch", graph, stream) == 0
    torch.cuda.synchronize()
    assert len(calls) == 3


def test_a_capture_ends_where_it_began_and_with_all_that_joined():
    there, one, two = on_gpu(64), new_stream(), new_stream()
    assert end(one)[0] == 401, "there is none"
    assert call("cudaStreamBeginCapture", LEGACY, RELAXED) == 900
    begin(one)
    assert call("cudaStreamBeginCapture", one, RELAXED) == 401
    assert wait(two, one) == 0 and set_bytes(there, 1, two) == 0
    assert end(one)[0] == 904, "not joined"
    begin(one)
    assert wait(two, one) == 0
    assert end(two)[0] == 903 and end(one)[0] == 901
    begin(one, GLOBAL)
    assert on_another_thread(lambda: end(one)[0]) == 908
    assert end(one)[0] == 0
    begin(one, RELAXED)
    assert on_another_thread(lambda: end(one)[0]) == 0
    begin(PER_THREAD)
    assert end(PER_THREAD)[0] == 0


def test_captures_do_not_meet_one_another_or_what_is_not_captured():
    there, one, two, three = on_gpu(64), new_stream(), new_stream(), new_stream()
    begin(one), begin(two)
    assert wait(two, one) == 902
    assert end(one)[0] == 901 and end(two)[0] == 901
    assert set_bytes(there, 1, three) == 0
    begin(one)
    assert wait(one, three) == 905 and status_of(one) == INVALID
    assert set_bytes(there, 1, one) == 901 and end(one)[0] == 901
    begin(one)
    assert call("cudaStreamWaitEvent", one, new_event(), 0) == 0, "an event that was never recorded"
    assert end(one)[0] == 0


def test_a_captured_event_is_no_work_that_could_be_waited_for():
    one, event = new_stream(), new_event()
    begin(one)
    assert call("cudaEventRecord", event, one) == 0
    before = exchange_mode(RELAXED)  # also on a thread that may do all else
    elapsed = ctypes.c_float()
    assert call("cudaEventQuery", event) == 907 and call("cudaEventSynchronize", event) == 907
    assert call("cudaEventElapsedTime", ctypes.byref(elapsed), event, event) == 907
    exchange_mode(before)
    assert end(one)[0] == 0
    assert call("cudaEventQuery", event) == 907 and call("cudaStreamWaitEvent", new_stream(), event, 0) == 907
    assert call("cudaEventRecord", event, one) == 0 and call("cudaEventSynchronize", event) == 0


@pytest.mark.parametrize("ask", ["cudaStreamSynchronize", "cudaStreamQuery", "cudaDeviceSynchronize"])
def test_a_stream_that_captures_cannot_be_waited_for(ask):
    one = new_stream()
    begin(one)
    before = exchange_mode(RELAXED)
    assert call(ask, one) == 900
    exchange_mode(before)
    assert status_of(one) == INVALID and end(one)[0] == 901


def test_the_legacy_stream_cannot_be_used_while_a_blocking_one_captures():
    there, status = on_gpu(64), ctypes.c_int()
    blocking, other = new_stream(0), new_stream()
    begin(blocking)
    assert call("cudaStreamIsCapturing", LEGACY, ctypes.byref(status)) == 906
    assert status_of(blocking) == ACTIVE, "asking does not invalidate"
    assert set_bytes(there, 1, LEGACY) == 906
    assert status_of(blocking) == INVALID and end(blocking)[0] == 901
    begin(other)
    assert set_bytes(there, 1, LEGACY) == 0 and end(other)[0] == 0
    begin(other)
    assert wait(LEGACY, other) == 906 and end(other)[0] == 901


def test_pageable_memory_and_batches_are_not_captured():
    there, loose, one = on_gpu(64), torch.zeros(64, dtype=torch.uint8), new_stream()
    for target, source in ((there, loose), (loose, there)):
        begin(one)
        assert copy_async(target, source, one) == 900 and end(one)[0] == 901
    begin(one)
    assert copy_async(there, pinned(64), one) == 0 and end(one)[0] == 0


def test_what_the_host_must_know_is_not_captured():
    there = on_gpu(64)
    graph = torch.cuda.CUDAGraph()
    here = torch.cuda.stream(torch.cuda.current_stream())  # torch does not go back to it where a capture fails
    with here, pytest.raises(RuntimeError, match="capture"), torch.cuda.graph(graph):
        there.nonzero()


UNSAFE = ("cudaMalloc", "cudaHostAlloc", "cudaEventQuery", "cudaStreamSynchronize")


@pytest.mark.parametrize("unsafe", UNSAFE)
@pytest.mark.parametrize(
    ("captured", "thread", "own", "forbidden"),
    [
        (GLOBAL, GLOBAL, False, True),
        (GLOBAL, THREAD_LOCAL, False, False),
        (GLOBAL, RELAXED, False, False),
        (THREAD_LOCAL, GLOBAL, False, False),
        (RELAXED, GLOBAL, False, False),
        (GLOBAL, THREAD_LOCAL, True, True),
        (THREAD_LOCAL, GLOBAL, True, True),
        (THREAD_LOCAL, RELAXED, True, False),
        (RELAXED, GLOBAL, True, False),
    ],
)
def test_modes_forbid_threads_what_no_graph_could_hold(unsafe, captured, thread, own, forbidden):
    """``captured``: the capture's mode; ``thread``: that of the calling thread; ``own``: whether
    that one began the capture."""
    one, event, other = new_stream(), new_event(), new_stream()

    def ask() -> int:
        before = exchange_mode(thread)
        handle = ctypes.c_void_p()
        if unsafe == "cudaMalloc":
            code = call(unsafe, ctypes.byref(handle), 512)
        elif unsafe == "cudaHostAlloc":
            code = call(unsafe, ctypes.byref(handle), 512, 0)
        else:
            code = call(unsafe, event if unsafe == "cudaEventQuery" else other)
        exchange_mode(before)
        return code

    begin(one, captured)
    code = ask() if own else on_another_thread(ask)
    ended, _ = end(one)
    assert (code, ended) == ((900, 901) if forbidden else (0, 0))
