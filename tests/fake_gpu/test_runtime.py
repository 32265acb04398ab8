# SPDX-License-Identifier: Apache-2.0
"""What the runtime of the fake GPU must do, told by torch alone."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import threading

import numpy as np
import pytest
import torch

from fake_gpu import control
from fake_gpu.cuda_calls import (
    ANY,
    ON_DEVICE,
    TO_DEVICE,
    TO_HOST,
    call,
    copy,
    copy_async,
    error_name,
    expect,
    made,
    on_gpu,
    output_of,
    pinned,
)

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
    with pytest.raises((RuntimeError, IndexError)):  # when it is called
        there.index_copy_(0, rows.to(GPU), there[:2])


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
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(total + 1, dtype=torch.uint8, device=GPU)


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
    with pytest.raises(RuntimeError, match="does not correspond to a registered"):  # nobody has cleared it
        torch.zeros(1, device=GPU)
    assert tensor.is_pinned()
    assert int(runtime.cudaHostRegister(at + (1 << 19), 1 << 19, 0)) == 0
    there = torch.zeros(1 << 20, dtype=torch.uint8, device=GPU)
    with pytest.raises(RuntimeError, match="invalid argument"):  # it crosses two registrations
        tensor.copy_(there, non_blocking=True)
    assert int(runtime.cudaHostUnregister(at)) == 0 and int(runtime.cudaHostUnregister(at + (1 << 19))) == 0


def test_failures_come_where_they_are_told_to():
    control.fail("cudaMemcpyAsync", 2)
    there = torch.zeros(10, device=GPU)
    before = control.failed()
    with pytest.raises(RuntimeError, match="out of memory"):
        there.cpu()
    assert control.failed() == before + 1
    assert there.cpu().sum() == 0


def test_failures_come_after_so_many_calls_and_so_often():
    there = on_gpu(10)
    control.fail("kernel", 2, after=2, times=2)
    there.add_(1)
    there.add_(1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            there.add_(1)
    there.add_(1)
    assert there.sum().item() == 30


def test_the_last_error_is_of_its_thread_and_is_cleared_once_it_is_read():
    control.runtime().cudaGetLastError()
    assert call("cudaSetDevice", 99) == 101
    seen = []
    thread = threading.Thread(target=lambda: seen.append(call("cudaPeekAtLastError")))
    thread.start()
    thread.join()
    assert seen == [0]
    assert call("cudaPeekAtLastError") == 101, "looking does not clear"
    assert call("cudaGetLastError") == 101 and call("cudaGetLastError") == 0


def test_an_error_that_stays_comes_from_every_call_and_thread():
    there = on_gpu(10)
    control.break_down(700)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(call("cudaDeviceSynchronize")))
    thread.start()
    thread.join()
    assert seen == [700]
    assert call("cudaGetLastError") == 700 and call("cudaGetLastError") == 700
    with pytest.raises(RuntimeError, match="illegal memory access"):
        there.add_(1)
    control.break_down(0)
    assert call("cudaDeviceSynchronize") == 0


def test_a_kernel_that_finds_its_values_wrong_fails_all_that_follows():
    there, rows = on_gpu(10), torch.tensor([99], device=GPU)
    there.index_select(0, rows)
    control.runtime().fake_gpu_drain(None)
    for act in (lambda: there.add_(1), torch.cuda.synchronize):
        with pytest.raises(RuntimeError, match="device-side assert"):
            act()


def test_errors_have_their_names():
    assert error_name(0) == "cudaSuccess" and error_name(2) == "cudaErrorMemoryAllocation"
    assert error_name(900) == "cudaErrorStreamCaptureUnsupported"
    assert error_name(712) == "cudaErrorHostMemoryAlreadyRegistered"
    assert error_name(12345) == "unrecognized error code"


def test_what_is_not_there_refuses_by_name():
    before = control.counts().get("cudaMallocAsync", 0)
    assert call("cudaMallocAsync", 0, 0, 0) == 801
    assert control.counts()["cudaMallocAsync"] == before + 1
    assert call("cudaLaunchKernel", 1, 1, 1, 1, 1, 1, 0, 0, 0) == 801, "a kernel that it does not know"


@pytest.mark.parametrize("registered", [True, False], ids=["registered", "allocated"])
def test_pinned_memory_that_goes_under_work_is_waited_for_and_told(registered):
    control.reseed("late")
    memory = mmap.mmap(-1, 8192)
    if registered:
        at = np.frombuffer(memory, np.uint8).ctypes.data
        assert call("cudaHostRegister", at, 8192, 0) == 0
        leave = "cudaHostUnregister"
    else:
        at, leave = made("cudaHostAlloc", 8192, 0), "cudaFreeHost"
    there = on_gpu(8192, 7)
    with expect(violations=1):
        assert call("cudaMemcpyAsync", at, there.data_ptr(), 8192, TO_HOST, 0) == 0
        assert control.pending() > 0
        assert call(leave, at) == 0
        assert control.pending() == 0
    if registered:
        assert memory[:] == bytes([7]) * 8192
        assert call("cudaHostRegister", at, 8192, 0) == 0
    else:
        at = made("cudaHostAlloc", 8192, 0)
    with expect():  # once the host knows that the work has ended
        assert call("cudaMemcpyAsync", at, there.data_ptr(), 8192, TO_HOST, 0) == 0
        torch.cuda.synchronize()
        assert call(leave, at) == 0


def test_pinned_memory_is_known_by_its_first_address():
    at = made("cudaHostAlloc", 8192, 0)
    assert call("cudaHostUnregister", at) == 713 and call("cudaFreeHost", at + 4096) == 1
    assert call("cudaHostRegister", at, 4096, 0) == 712
    assert call("cudaFreeHost", at) == 0 and call("cudaFreeHost", at) == 1 and call("cudaFreeHost", 0) == 0
    assert call("cudaHostRegister", at, 4096, 0) == 1, "it is mapped no more"


def test_freeing_device_memory_waits_and_is_no_order():
    """CUDA says that it may wait: a program may not count on that."""
    control.reseed("late")
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    at = made("cudaMalloc", 4096)
    there = on_gpu(64)
    with expect(races=1):
        assert call("cudaMemsetAsync", at, 1, 4096, one.cuda_stream) == 0
        assert call("cudaMemsetAsync", there.data_ptr(), 1, 64, one.cuda_stream) == 0
        assert call("cudaFree", at) == 0
        assert control.pending() == 0
        assert call("cudaMemsetAsync", there.data_ptr(), 2, 64, two.cuda_stream) == 0
        # The next owner of the same bytes has nothing to do with the last.
        assert made("cudaMalloc", 4096) == at
        assert call("cudaMemsetAsync", at, 1, 4096, two.cuda_stream) == 0
    assert call("cudaFree", at + 512) == 1 and call("cudaFree", at) == 0 and call("cudaFree", at) == 1


def test_what_the_host_touches_is_compared_with_the_work():
    control.reseed("late")
    there, host = on_gpu(4096, 3), pinned(8192)
    at, stream = host.data_ptr(), torch.cuda.Stream()
    touches = control.host_touches
    with expect(violations=4):
        host[:4096].copy_(there)
        torch.cuda.synchronize()
        assert not touches(at, 8192, writes=True)
        with torch.cuda.stream(stream):
            there.copy_(host[:4096], non_blocking=True)  # reads
        assert touches(at, 1, writes=True) and touches(at + 4095, 1, writes=True)
        assert not touches(at, 4096, writes=False) and not touches(at + 4096, 4096, writes=True)
        stream.synchronize()
        assert not touches(at, 4096, writes=True)
        with torch.cuda.stream(stream):
            host[:4096].copy_(there, non_blocking=True)  # writes
        assert touches(at, 4096, writes=False)
        event = torch.cuda.Event()
        event.record(stream)
        other = torch.cuda.Event()
        other.record()
        other.synchronize()
        assert touches(at, 4096, writes=False), "that of another stream tells nothing"
        event.synchronize()
        assert not touches(at, 4096, writes=True)


def test_copies_that_leave_their_memory_are_refused():
    at, host = made("cudaMalloc", 1024), pinned(4096)
    loose = torch.zeros(4096, dtype=torch.uint8)
    size = 8192  # a page-locked tensor has whole pages
    with expect(violations=5):
        assert call("cudaMemcpyAsync", at, loose.data_ptr(), 1025, TO_DEVICE, 0) == 1
        assert call("cudaMemcpyAsync", host.data_ptr(), at, size, TO_HOST, 0) == 1
        assert call("cudaMemcpy2DAsync", at, 512, host.data_ptr(), 512, 256, 3, TO_DEVICE, 0) == 1
        assert copy_async(host, loose, 0, kind=TO_DEVICE) == 1, "of another kind than it says"
        assert call("cudaMemcpyAsync", at, at + 64, 128, ON_DEVICE, 0) == 0, "its sides overlap"
    with expect():
        assert call("cudaMemcpyAsync", at, host.data_ptr(), 64, 5, 0) == 21
        assert call("cudaMemcpy2DAsync", at, 32, host.data_ptr(), 512, 64, 2, TO_DEVICE, 0) == 12
        assert call("cudaMemcpy2DAsync", at, 512, host.data_ptr(), 2048, 512, 2, TO_DEVICE, 0) == 0
        assert call("cudaMemsetAsync", loose.data_ptr(), 0, 64, 0) == 1, "of pageable memory"
    call("cudaFree", at)


def test_a_call_waits_where_cuda_says_so_and_nowhere_else():
    control.reseed("late")
    there, other, host = on_gpu(64), on_gpu(64), pinned(64)
    loose = torch.zeros(64, dtype=torch.uint8)

    def waits(do) -> bool:
        torch.cuda.synchronize()
        assert do() == 0
        return control.pending() == 0

    assert not waits(lambda: copy(there, other, ON_DEVICE)), "no host-side synchronization is performed"
    assert waits(lambda: copy(there, host, TO_DEVICE)) and waits(lambda: copy(host, there, TO_HOST))
    assert waits(lambda: copy(loose, there, TO_HOST))
    assert not waits(lambda: copy(there, loose, TO_DEVICE)), "it is staged only"
    assert waits(lambda: copy(loose, host, ANY)) and waits(lambda: copy_async(loose, host, 0))
    assert not waits(lambda: copy_async(there, host, 0)) and not waits(lambda: copy_async(host, there, 0))
    assert waits(lambda: copy_async(loose, there, 0)) and not waits(lambda: copy_async(there, loose, 0))
    assert not waits(lambda: call("cudaMemset", there.data_ptr(), 0, 64))
    assert waits(lambda: call("cudaMemset", host.data_ptr(), 0, 64)), "of pinned memory"
    assert not waits(lambda: call("cudaMemsetAsync", host.data_ptr(), 0, 64, 0))


def test_staging_a_synchronous_copy_waits_for_the_stream_first():
    control.reseed("late")
    there, other = on_gpu(64, 1), on_gpu(64)
    loose = torch.full((64,), 2, dtype=torch.uint8)
    assert copy(other, there) == 0 and control.pending() == 1
    assert copy(there, loose) == 0 and control.pending() == 1
    loose.fill_(3)
    assert (there.cpu() == 2).all() and (other.cpu() == 1).all()


def test_copies_of_pageable_memory_may_be_late_too():
    program = """
import torch
from fake_gpu import control
from fake_gpu.cuda_calls import copy_async
there, loose = torch.full((64,), 7, dtype=torch.uint8, device="cuda"), torch.zeros(64, dtype=torch.uint8)
assert copy_async(loose, there, 0) == 0
print(int(loose.sum()), control.pending() > 0)
torch.cuda.synchronize()
print(int(loose.sum()))
"""
    assert output_of(program, PAGEABLE="late", SCHED="late") == "0 True\n448"
    assert output_of(program, PAGEABLE="staged", SCHED="late") == "448 False\n448"


def test_variables_say_how_it_is(tmp_path):
    program = """
import torch
from fake_gpu import control
there = torch.empty(64, dtype=torch.uint8, device="cuda")
print(torch.cuda.get_device_properties(0).total_memory >> 20, int(there[0]), control.pending() > 0)
"""
    assert output_of(program, MEM=str(64 << 20), SCHED="late") == "64 165 False"
    told = tmp_path / "log"
    assert output_of(program, MEM=str(32 << 20), POISON="0", LOG=str(told)) == "32 0 False"
    assert "put copy to host on 0" in told.read_text()


def test_a_crash_says_which_operation_was_at_work():
    program = """
import ctypes
import torch
from fake_gpu.cuda_calls import call
crash = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda at: ctypes.string_at(0))
call("cudaLaunchHostFunc", 0, crash, 0)
call("cudaDeviceSynchronize")
"""
    with pytest.raises(AssertionError, match="while running host function"):
        output_of(program, SEGV="1")


def test_the_host_reaches_device_memory_that_is_not_protected():
    program = """
import ctypes
import torch
there = torch.full((4,), 7, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print(ctypes.string_at(there.data_ptr(), 4))
"""
    assert output_of(program, PROTECT="0") == str(bytes([7] * 4))


def test_kernels_that_are_not_known_can_be_left_out():
    program = """
from fake_gpu.cuda_calls import call
print(call("cudaLaunchKernel", 1, 1, 1, 1, 1, 1, 0, 0, 0))
"""
    assert output_of(program) == "801" and output_of(program, KERNELS="skip") == "0"
