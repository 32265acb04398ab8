# SPDX-License-Identifier: Apache-2.0
"""Streams, events and host functions on the fake GPU, in each order in which work may be done."""

from __future__ import annotations

import ctypes
import random
import threading

import pytest
import torch

from fake_gpu import control
from fake_gpu.cuda_calls import (
    LEGACY,
    PER_THREAD,
    call,
    copy_async,
    expect,
    made,
    on_gpu,
    output_of,
    pinned,
)

pytestmark = pytest.mark.fake_gpu
GPU = torch.device("cuda")
ORDERS = ("eager", "late", "contrary", "random", "mixed")
BLOCKING, NON_BLOCKING = 0, 1
HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

UNTIED = """
import torch
from fake_gpu import control
from fake_gpu.cuda_calls import on_gpu
there, one, two = on_gpu(1000), torch.cuda.Stream(), torch.cuda.Stream()
for tied in (True, False):
    before = control.races()
    with torch.cuda.stream(one):
        there.fill_(5)
    if tied:
        two.wait_stream(one)
    with torch.cuda.stream(two):
        found = there.clone()
    torch.cuda.synchronize()
    print(control.races() - before, end=" ")
    assert not tied or (found == 5).all()
"""
"""Prints how many races are seen of work that is tied, and that is not."""


def set_bytes(tensor: torch.Tensor, value: int, stream: int) -> None:
    assert call("cudaMemsetAsync", tensor.data_ptr(), value, tensor.nbytes, stream) == 0


@pytest.mark.parametrize("order", [*ORDERS, "threads"])
def test_a_missing_wait_is_a_race_in_every_order(order):
    if order == "threads":
        assert output_of(UNTIED, SCHED="threads") == "0 1"
        return
    for seed in range(5):
        control.reseed(order, seed)
        there, one, two = on_gpu(1000), torch.cuda.Stream(), torch.cuda.Stream()
        for tied in (True, False):
            with expect(races=0 if tied else 1):
                set_bytes(there, 5, one.cuda_stream)
                if tied:
                    two.wait_stream(one)
                set_bytes(there, 6, two.cuda_stream)


def test_each_order_does_first_what_it_says():
    """What has ended of two operations on two streams, once the first's stream was waited for."""
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    pending = {order: set() for order in ORDERS}
    for order in ORDERS:
        for seed in range(100):
            there, other = on_gpu(64), on_gpu(64)
            control.reseed(order, seed)
            set_bytes(there, 1, one.cuda_stream)
            set_bytes(other, 1, two.cuda_stream)
            given = control.pending()
            one.synchronize()
            pending[order].add((given, control.pending()))
            torch.cuda.synchronize()
    assert pending["eager"] == {(0, 0)}
    assert pending["late"] == {(2, 1)}, "only what is waited for"
    assert pending["contrary"] == {(2, 0)}, "first what is not waited for"
    assert {(2, 0), (2, 1)} < pending["random"] and {(2, 0), (2, 1)} < pending["mixed"]
    assert len(pending["random"]) > 2 and len(pending["mixed"]) > 2, "some is done before anybody waits"


def test_a_seed_tells_the_order():
    def pending_of(seed: int) -> list[int]:
        control.reseed("random", seed)
        found = []
        for _ in range(20):
            set_bytes(there, 1, 0)
            found.append(control.pending())
        torch.cuda.synchronize()
        return found

    there = on_gpu(64)
    assert pending_of(1) == pending_of(1) and pending_of(1) != pending_of(2)


def test_an_event_that_is_asked_for_ends_at_last():
    control.reseed("late")
    there, event = on_gpu(64), torch.cuda.Event()
    set_bytes(there, 1, 0)
    event.record()
    asked = 1
    while not event.query():
        asked += 1
    assert asked == 21
    set_bytes(there, 1, 0)
    while not torch.cuda.current_stream().query():
        asked += 1
    assert asked == 41 and not control.pending()


@pytest.mark.parametrize("tied", [True, False])
def test_streams_are_tied_by_events_only(tied):
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    wrong = races = 0
    for seed in range(40):
        control.reseed("mixed", seed)
        there = on_gpu(1000)
        before = control.races()
        with torch.cuda.stream(one):
            there.fill_(5)
        if tied:
            two.wait_stream(one)
        with torch.cuda.stream(two):
            found = there.clone().to("cpu", non_blocking=False)
        torch.cuda.synchronize()
        wrong += int((found != 5).any())
        races += control.races() > before
    assert (wrong, races) == (0, 0) if tied else (5 < wrong < 40 and races == 40), (wrong, races)


def test_the_legacy_stream_and_blocking_ones_wait_for_one_another():
    there = on_gpu(64)
    blocking, other = made("cudaStreamCreateWithFlags", BLOCKING), made("cudaStreamCreateWithFlags", BLOCKING)
    with expect():
        for stream in (blocking, LEGACY, other, LEGACY, PER_THREAD, LEGACY):
            set_bytes(there, 1, stream)
    with expect(races=1):
        set_bytes(there, 1, blocking)
        set_bytes(there, 1, other)
    with expect(races=1):
        set_bytes(there, 1, made("cudaStreamCreateWithFlags", NON_BLOCKING))
        set_bytes(there, 1, LEGACY)


def test_each_thread_has_a_default_stream_of_its_own():
    there = on_gpu(64)
    with expect(races=1):
        set_bytes(there, 1, PER_THREAD)
        thread = threading.Thread(target=set_bytes, args=(there, 1, PER_THREAD))
        thread.start()
        thread.join()


def test_waiting_for_the_legacy_stream_waits_for_blocking_ones():
    control.reseed("late")
    there, blocking = on_gpu(64), made("cudaStreamCreateWithFlags", BLOCKING)
    set_bytes(there, 1, blocking)
    assert call("cudaStreamQuery", LEGACY) == 600
    assert call("cudaStreamSynchronize", LEGACY) == 0 and not control.pending()
    set_bytes(there, 1, made("cudaStreamCreateWithFlags", NON_BLOCKING))
    assert call("cudaStreamSynchronize", LEGACY) == 0 and control.pending()


def test_a_stream_that_is_destroyed_ends_its_work_and_is_no_more():
    control.reseed("late")
    there, stream = on_gpu(64), made("cudaStreamCreateWithFlags", NON_BLOCKING)
    set_bytes(there, 9, stream)
    with expect(violations=2):
        assert call("cudaStreamDestroy", stream) == 0 and control.pending() == 1
        assert call("cudaStreamSynchronize", stream) == 400 and call("cudaStreamDestroy", stream) == 400
    assert not control.pending() and (there.cpu() == 9).all()
    with expect():
        assert call("cudaStreamDestroy", LEGACY) == 400


def test_an_event_stands_for_what_was_recorded_last():
    control.reseed("late")
    one, two, three = (torch.cuda.Stream().cuda_stream for _ in range(3))
    there, other = on_gpu(64), on_gpu(64)
    event = made("cudaEventCreateWithFlags", 0)
    assert call("cudaEventQuery", event) == 0 and call("cudaStreamWaitEvent", two, event, 0) == 0
    with expect(races=1):  # the wait is for the first record, the second comes too late for it
        set_bytes(there, 1, one)
        assert call("cudaEventRecord", event, one) == 0
        assert call("cudaStreamWaitEvent", two, event, 0) == 0
        set_bytes(other, 1, three)
        assert call("cudaEventRecord", event, three) == 0
        set_bytes(there, 2, two)
        set_bytes(other, 2, two)
    with expect(violations=1):
        set_bytes(there, 1, one)
        assert call("cudaEventRecord", event, one) == 0
        assert call("cudaEventDestroy", event) == 0 and control.pending() == 2, "it does not wait"
        assert call("cudaEventQuery", event) == 400


def test_times_are_between_events_that_have_ended():
    control.reseed("late")
    elapsed = ctypes.c_float()

    def between(start: int, end: int) -> int:
        return call("cudaEventElapsedTime", ctypes.byref(elapsed), start, end)

    one, two = made("cudaEventCreateWithFlags", 0), made("cudaEventCreateWithFlags", 0)
    untimed = made("cudaEventCreateWithFlags", 2)
    assert call("cudaEventRecord", one, 0) == 0 and between(one, two) == 400
    assert call("cudaEventRecord", two, 0) == 0 and call("cudaEventRecord", untimed, 0) == 0
    assert between(one, two) == 600
    torch.cuda.synchronize()
    assert between(one, two) == 0 and elapsed.value >= 0 and between(one, untimed) == 400


def test_a_host_function_is_called_in_its_turn():
    for order in ORDERS:
        control.reseed(order)
        there, host, other, seen = on_gpu(64, 1), pinned(64), on_gpu(64), []
        stream, beside = torch.cuda.Stream(), torch.cuda.Stream()
        look = HostFunction(lambda _: seen.append(int(host[0])))  # noqa: B023
        assert copy_async(host, there, stream.cuda_stream) == 0
        assert call("cudaLaunchHostFunc", stream.cuda_stream, look, 0) == 0
        set_bytes(other, 1, stream.cuda_stream)
        beside.wait_stream(stream)
        with expect():
            set_bytes(other, 2, beside.cuda_stream)
        assert seen == [1]


def test_a_host_function_may_not_call_cuda_and_is_not_called_once_the_gpu_has_failed():
    control.reseed("late")
    codes = []
    ask = HostFunction(lambda _: codes.append(call("cudaDeviceSynchronize")))
    with expect(violations=1):
        assert call("cudaLaunchHostFunc", 0, ask, 0) == 0
    assert codes == [800]
    assert call("cudaLaunchHostFunc", 0, ask, 0) == 0
    control.break_down(700)
    assert call("cudaDeviceSynchronize") == 700 and control.pending() == 1
    control.runtime().fake_gpu_drain(None)  # what was given before goes its way
    assert codes == [800] and not control.pending()


def test_any_order_gives_what_order_gives():
    """A random program on several streams, all tied: as one after the other."""
    for seed in range(60):
        chance = random.Random(seed)
        control.reseed(ORDERS[seed % len(ORDERS)], seed)
        streams = [torch.cuda.Stream() for _ in range(3)]
        there = [torch.zeros(256, dtype=torch.int64, device=GPU) for _ in range(3)]
        page_locked = torch.zeros(3, 256, dtype=torch.int64, pin_memory=True)
        host = [torch.zeros(256, dtype=torch.int64) for _ in range(3)]
        torch.cuda.synchronize()
        last = None
        with expect():
            for _ in range(40):
                stream = chance.choice(streams)
                if last is not None:
                    stream.wait_event(last)
                a, b, number = chance.randrange(3), chance.randrange(3), chance.randrange(9)
                with torch.cuda.stream(stream):
                    if chance.random() < 0.5:
                        there[a].add_(there[b]).add_(number)
                        host[a].add_(host[b]).add_(number)
                    else:
                        page_locked[a].copy_(there[a], non_blocking=True)
                        there[b].copy_(page_locked[a], non_blocking=True)
                        host[b].copy_(host[a])
                    last = torch.cuda.Event()
                    last.record(stream)
        assert all(torch.equal(one.cpu(), two) for one, two in zip(there, host, strict=True)), seed


def test_two_devices_are_two():
    program = """
import torch
from fake_gpu import control
from fake_gpu.cuda_calls import call, expect, made
assert torch.cuda.device_count() == 2 and not torch.cuda.can_device_access_peer(0, 1)
control.reseed("late")
free = torch.cuda.mem_get_info(1)[0]
there = torch.full((1000,), 3.0, device="cuda:1")
assert torch.cuda.mem_get_info(1)[0] < free and there.device.index == 1
assert (there.cpu() == 3).all() and (there.to("cuda:0").cpu() == 3).all()
torch.cuda.synchronize(0), torch.cuda.synchronize(1)

event = made("cudaEventCreateWithFlags", 0)  # of device 0
with torch.cuda.device(1):
    stream = torch.cuda.Stream()
    assert call("cudaEventRecord", event, stream.cuda_stream) == 400
    call("cudaGetLastError")
    there.add_(1)
assert control.pending() == 1
torch.cuda.synchronize(0)
assert control.pending() == 1, "it is of the other device"
torch.cuda.synchronize(1)
assert control.pending() == 0

other = torch.zeros(1000, device="cuda:0")
with expect():  # a stream may wait for the event of another device
    other.add_(1)
    assert call("cudaEventRecord", event, 0) == 0
    assert call("cudaStreamWaitEvent", stream.cuda_stream, event, 0) == 0
    assert call("cudaMemcpyAsync", there.data_ptr(), other.data_ptr(), 4000, 4, stream.cuda_stream) == 0
    torch.cuda.synchronize(1)
assert (there.cpu() == 1).all()
other.add_(1)
with torch.cuda.device(1), expect(races=1):  # each has a legacy stream of its own
    assert call("cudaMemcpyAsync", there.data_ptr(), other.data_ptr(), 4000, 4, 0) == 0
    torch.cuda.synchronize(0)
"""
    output_of(program, DEVICES="2")


def test_a_device_that_nobody_used_has_no_context():
    program = """
import torch
torch.zeros(1, device="cuda:1")
state = torch._C._cuda_hasPrimaryContext
print(state(0), state(1))
"""
    assert output_of(program, DEVICES="2") == "False True"


@pytest.mark.parametrize("order", ORDERS)
def test_a_kernel_that_passes_time_ends_when_it_is_waited_for(order):
    control.reseed(order)
    torch.cuda._sleep(1000)
    event = torch.cuda.Event()
    event.record()
    assert not event.query() and control.pending() == 2
    event.synchronize()
    assert not control.pending()
