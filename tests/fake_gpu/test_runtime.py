# SPDX-License-Identifier: Apache-2.0
"""What the runtime of the fake GPU must do, told by torch alone."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import random

import numpy as np
import pytest
import torch

from fake_gpu import control

pytestmark = pytest.mark.fake_gpu
GPU = torch.device("cuda")


def test_it_is_there():
    assert torch.cuda.is_available() and torch.cuda.device_count() >= 1
    assert torch.cuda.get_device_properties(0).major == 9
    assert torch.zeros(3, device=GPU).sum().item() == 0


def test_kernels_do_what_the_cpu_does():
    chance = torch.Generator().manual_seed(1)
    host = torch.randint(0, 256, (7, 33, 64), dtype=torch.uint8, generator=chance)
    there = host.to(GPU)
    rows = torch.tensor([6, 1, 3])
    assert torch.equal(there.cpu(), host)
    assert torch.equal(there.index_select(0, rows.to(GPU)).cpu(), host.index_select(0, rows))
    assert torch.equal(there[:, 3:9].cpu(), host[:, 3:9])
    assert torch.equal(there.transpose(0, 1).contiguous().cpu(), host.transpose(0, 1))
    assert torch.equal(
        (there.float() @ there.float().transpose(1, 2)).cpu(), host.float() @ host.float().transpose(1, 2)
    )
    target = torch.zeros_like(there)
    target.index_copy_(0, rows.to(GPU), there[:3])
    expected = torch.zeros_like(host)
    expected.index_copy_(0, rows, host[:3])
    assert torch.equal(target.cpu(), expected) and torch.equal(target, expected.to(GPU))
    assert there.nonzero().shape == host.nonzero().shape
    out = torch.empty(2, 33, 64, dtype=torch.uint8, device=GPU)
    torch.index_select(there, 0, torch.tensor([0, 5], device=GPU), out=out)
    assert torch.equal(out.cpu(), host[[0, 5]])
    try:
        there.index_copy_(0, rows.to(GPU), there[:2])
    except (RuntimeError, IndexError):
        pass
    else:
        raise AssertionError("a wrong call must be refused when it is made")


def test_nothing_is_done_before_it_must_be():
    control.reseed("late")
    there = torch.zeros(1000, device=GPU)
    torch.cuda.synchronize()
    pinned = torch.zeros(1000, pin_memory=True)
    there.add_(1)
    pinned.copy_(there, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    assert pinned.sum() == 0 and not event.query() and control.pending() >= 2
    event.synchronize()
    assert pinned.sum() == 1000 and event.query()
    control.reseed("mixed")


def test_a_source_that_changes_too_soon_shows():
    control.reseed("late")
    pinned, there = torch.ones(1000, pin_memory=True), torch.zeros(1000, device=GPU)
    torch.cuda.synchronize()
    there.copy_(pinned, non_blocking=True)
    pinned.fill_(2)
    assert there.sum().item() == 2000, "page-locked memory is read when the copy is done"
    loose, there = torch.ones(100_000), torch.zeros(100_000, device=GPU)
    there.copy_(loose, non_blocking=True)
    loose.fill_(2)
    assert there.sum().item() == 100_000, "pageable memory is read before the call returns"
    control.reseed("mixed")


def test_streams_are_tied_by_events_only():
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    wrong = races = 0
    for seed in range(40):
        control.reseed("mixed", seed)
        for tied in (True, False):
            there = torch.zeros(1000, device=GPU)
            torch.cuda.synchronize()
            before = control.races()
            with torch.cuda.stream(one):
                there.fill_(5)
            if tied:
                two.wait_stream(one)
            with torch.cuda.stream(two):
                found = there.clone().to("cpu", non_blocking=False)
            torch.cuda.synchronize()
            if tied:
                assert (found == 5).all() and control.races() == before
            else:
                wrong += int((found != 5).any())
                races += control.races() > before
    assert 5 < wrong < 40, wrong
    assert races == 40, races


def test_the_host_cannot_touch_the_gpu():
    there = torch.zeros(10, device=GPU)
    torch.cuda.synchronize()
    faulthandler.disable()  # what follows would be told
    child = os.fork()
    if not child:
        ctypes.string_at(there.data_ptr(), 1)
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_memory_ends():
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total
    try:
        torch.empty(total + 1, dtype=torch.uint8, device=GPU)
    except torch.OutOfMemoryError:
        pass
    else:
        raise AssertionError("there is no end")


def test_registrations_are_as_cuda_has_them():
    runtime = torch.cuda.cudart()
    memory = mmap.mmap(-1, 1 << 20)
    array = np.frombuffer(memory, np.uint8)
    at = array.ctypes.data
    tensor = torch.from_numpy(array)
    assert not tensor.is_pinned()
    assert int(runtime.cudaHostRegister(at, 1 << 19, 0)) == 0
    assert int(runtime.cudaHostRegister(at, 4096, 0)) == 712
    assert int(runtime.cudaHostUnregister(at + 4096)) == 713
    try:
        torch.zeros(1, device=GPU)
    except RuntimeError:
        pass
    else:
        raise AssertionError("torch's next kernel must find the error that nobody has cleared")
    assert tensor.is_pinned()
    assert int(runtime.cudaHostRegister(at + (1 << 19), 1 << 19, 0)) == 0
    there = torch.zeros(1 << 20, dtype=torch.uint8, device=GPU)
    try:
        tensor.copy_(there, non_blocking=True)
    except RuntimeError:
        pass
    else:
        raise AssertionError("a copy across two registrations")
    assert int(runtime.cudaHostUnregister(at)) == 0 and int(runtime.cudaHostUnregister(at + (1 << 19))) == 0


def test_captures_are_strict():
    numbers = torch.zeros(1000, device=GPU)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            numbers.add_(1)
    assert numbers.sum().item() == 0
    graph.replay()
    graph.replay()
    assert numbers.sum().item() == 10_000


def test_failures_come_where_they_are_told_to():
    control.fail("cudaMemcpyAsync", 2)
    there = torch.zeros(10, device=GPU)
    with pytest.raises(RuntimeError, match="out of memory"):
        there.cpu()
    assert there.cpu().sum() == 0


def test_any_order_gives_what_order_gives():
    """A random program on several streams, all tied: as one after the other."""
    for seed in range(60):
        chance = random.Random(seed)
        control.reseed("mixed", seed)
        streams = [torch.cuda.Stream() for _ in range(3)]
        there = [torch.zeros(256, dtype=torch.int64, device=GPU) for _ in range(3)]
        pinned = torch.zeros(3, 256, dtype=torch.int64, pin_memory=True)
        host = [torch.zeros(256, dtype=torch.int64) for _ in range(3)]
        torch.cuda.synchronize()
        last = None
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
                    pinned[a].copy_(there[a], non_blocking=True)
                    there[b].copy_(pinned[a], non_blocking=True)
                    host[b].copy_(host[a])
                last = torch.cuda.Event()
                last.record(stream)
        before = control.races()
        torch.cuda.synchronize()
        assert all(torch.equal(one.cpu(), two) for one, two in zip(there, host, strict=True)), seed
        assert control.races() == before
