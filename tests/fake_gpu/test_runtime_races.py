# SPDX-License-Identifier: Apache-2.0
"""Which operations touch the same bytes: none is told that does not, none is missed that does."""

from __future__ import annotations

import ctypes

import pytest
import torch

from fake_gpu import control
from fake_gpu.cuda_calls import ANY, call, copy_async, expect, on_gpu, output_of, pinned

pytestmark = pytest.mark.fake_gpu
GPU = torch.device("cuda")


def side_by_side(one, two, *, races: int) -> None:
    """Do both on streams of their own with nothing between them, in both orders."""
    for first, second in ((one, two), (two, one)):
        torch.cuda.synchronize()
        with expect(races=races):
            for act in (first, second):
                with torch.cuda.stream(torch.cuda.Stream()):
                    act()


def test_reads_do_not_meet():
    there = on_gpu(64)
    side_by_side(there.clone, there.clone, races=0)
    side_by_side(there.clone, lambda: there.add_(1), races=1)
    side_by_side(lambda: there.add_(1), lambda: there.add_(1), races=1)


@pytest.mark.parametrize(("first", "second", "races"), [(0, 0, 1), (0, 1, 0), (31, 32, 0), (8, 39, 0), (8, 8, 1)])
def test_bytes_beside_one_another_do_not_meet(first, second, races):
    there = on_gpu(64)
    side_by_side(lambda: there[first : first + 1].fill_(1), lambda: there[second].fill_(2), races=races)


def test_copies_in_rows_touch_their_rows():
    there, host = on_gpu(8 * 64), pinned(8 * 64)

    def column(first: int, width: int):
        def act() -> None:
            at, stream = there.data_ptr() + first, torch.cuda.current_stream().cuda_stream
            assert call("cudaMemcpy2DAsync", at, 64, host.data_ptr() + first, 64, width, 8, ANY, stream) == 0

        return act

    side_by_side(column(0, 32), column(32, 32), races=0)
    side_by_side(column(0, 32), column(31, 8), races=1)
    side_by_side(column(0, 16), lambda: there.view(8, 64)[:, 16:].fill_(1), races=0)
    side_by_side(column(0, 16), lambda: there.view(8, 64)[7, 15:].fill_(1), races=1)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_index_select_reads_its_rows(dim):
    there = torch.zeros(16, 16, dtype=torch.uint8, device=GPU)
    rows = torch.tensor([1, 7, 3], device=GPU)

    def fill(row: int):
        return lambda: there.select(dim, row).fill_(1)

    side_by_side(lambda: there.index_select(dim, rows), fill(2), races=0)
    side_by_side(lambda: there.index_select(dim, rows), fill(7), races=1)


@pytest.mark.parametrize("dim", [0, 1])
def test_index_copy_writes_its_rows(dim):
    there, values = (torch.zeros(16, 16, dtype=torch.uint8, device=GPU) for _ in range(2))
    values = values[:3] if dim == 0 else values[:, :3]
    ones, others = torch.tensor([1, 7, 3], device=GPU), torch.tensor([2, 6, 0], device=GPU)
    meeting = torch.tensor([2, 6, 3], device=GPU)
    side_by_side(lambda: there.index_copy_(dim, ones, values), lambda: there.index_copy_(dim, others, values), races=0)
    side_by_side(lambda: there.index_copy_(dim, ones, values), lambda: there.index_copy_(dim, meeting, values), races=1)


def test_numbers_that_are_written_while_a_kernel_reads_them():
    there, rows = on_gpu(64), torch.tensor([1, 7, 3], device=GPU)
    side_by_side(lambda: there.index_select(0, rows), lambda: rows.fill_(2), races=1)


def test_indexing_touches_its_rows():
    there, rows = torch.zeros(16, 16, device=GPU), torch.tensor([1, -1], device=GPU)
    side_by_side(lambda: there[rows], lambda: there[14].fill_(1), races=0)
    side_by_side(lambda: there[rows], lambda: there[15].fill_(1), races=1)

    def put() -> None:
        there[rows] = torch.ones(2, 16, device=GPU)

    side_by_side(put, lambda: there[14].fill_(1), races=0)
    side_by_side(put, there[1, :3].clone, races=1)


def test_views_touch_what_they_show():
    there = torch.zeros(8, 8, 8, dtype=torch.float32, device=GPU)
    side_by_side(lambda: there[::2].fill_(1), lambda: there[1::2].fill_(1), races=0)
    side_by_side(lambda: there[:, :, ::2].fill_(1), lambda: there[:, :, 1::2].fill_(1), races=0)
    side_by_side(lambda: there.transpose(0, 2)[3].fill_(1), lambda: there[:, :, 4].fill_(1), races=0)
    side_by_side(lambda: there.transpose(0, 2)[3].fill_(1), lambda: there[5, 5].fill_(1), races=1)
    side_by_side(lambda: there[0, :1].expand(4, 8).clone(), lambda: there[0, 1:].fill_(1), races=0)
    side_by_side(lambda: there[0].copy_(there[1].t()), lambda: there[2].copy_(there[3].t()), races=0)
    side_by_side(lambda: there[0].copy_(there[1].t()), lambda: there[1].copy_(there[3].t()), races=1)


def test_what_the_host_must_know_at_once_is_compared_too():
    """``nonzero`` and ``equal`` are waited for when they are called."""
    there, other = on_gpu(64), on_gpu(64)
    control.reseed("late")
    for ask in (there.nonzero, lambda: torch.equal(there, other)):
        torch.cuda.synchronize()
        with expect(races=1):
            with torch.cuda.stream(torch.cuda.Stream()):
                there.add_(1)
            with torch.cuda.stream(torch.cuda.Stream()):
                ask()


def test_fills_and_pinned_memory_are_compared():
    host, there = pinned(64), on_gpu(64)

    def to_device() -> None:
        assert copy_async(there, host, torch.cuda.current_stream().cuda_stream) == 0

    def fill_host() -> None:
        assert call("cudaMemsetAsync", host.data_ptr(), 1, 32, torch.cuda.current_stream().cuda_stream) == 0

    side_by_side(to_device, fill_host, races=1)
    side_by_side(fill_host, lambda: host[32:].copy_(there[32:], non_blocking=True), races=0)


def test_what_the_host_waited_for_is_before_what_it_gives_then():
    there, one, two = on_gpu(64), torch.cuda.Stream(), torch.cuda.Stream()

    def between(wait, *, races: int) -> None:
        with expect(races=races):
            with torch.cuda.stream(one):
                there.add_(1)
            wait()
            with torch.cuda.stream(two):
                there.add_(1)

    event = torch.cuda.Event()

    def ask() -> None:
        event.record(one)
        while not event.query():
            pass

    between(one.synchronize, races=0)
    between(torch.cuda.synchronize, races=0)
    between(ask, races=0)
    between(two.synchronize, races=1)
    between(lambda: event.record(two) or event.synchronize(), races=1)
    between(lambda: two.wait_stream(one), races=0)
    between(lambda: one.wait_stream(two), races=1)


def test_an_order_over_several_streams_is_one():
    there, streams = on_gpu(64), [torch.cuda.Stream() for _ in range(5)]
    with expect():
        for before, stream in zip([None, *streams], streams, strict=False):
            if before is not None:
                stream.wait_stream(before)
            if before is None or stream is streams[-1]:
                with torch.cuda.stream(stream):
                    there.add_(1)


def test_a_race_is_seen_long_after():
    """Work that has ended is not forgotten before something could not meet it any more."""
    there, one, two = on_gpu(64), torch.cuda.Stream(), torch.cuda.Stream()
    with expect(races=1):
        with torch.cuda.stream(one):
            there.add_(1)
        for _ in range(600):
            torch.zeros(1, device=GPU).add_(1)
        torch.cuda.current_stream().synchronize()
        with torch.cuda.stream(two):
            there.add_(1)


def test_a_race_can_end_the_process_and_can_be_left_unseen():
    program = """
import torch
from fake_gpu import control
from fake_gpu.cuda_calls import on_gpu
there = on_gpu(64)
for _ in range(2):
    with torch.cuda.stream(torch.cuda.Stream()):
        there.add_(1)
torch.cuda.synchronize()
print(control.races())
"""
    assert output_of(program, RACES="log") == "1" and output_of(program, RACES="off") == "0"
    with pytest.raises(AssertionError, match="RACE: #"):
        output_of(program, RACES="abort")


class Attributes(ctypes.Structure):
    _fields_ = (("order", ctypes.c_int), ("locations", ctypes.c_int * 4), ("flags", ctypes.c_uint))


STREAM_ORDER, DURING_CALL, ANY_ORDER = 1, 2, 3


def batch(pairs, stream: int, order: int = STREAM_ORDER, *, firsts=(0,)) -> int:
    """Copy (target, source) pairs as one batch; return the error."""
    numbers = ctypes.c_uint64 * len(pairs)
    targets = numbers(*(target.data_ptr() for target, _ in pairs))
    sources = numbers(*(source.data_ptr() for _, source in pairs))
    sizes = numbers(*(source.nbytes for _, source in pairs))
    attributes = (Attributes * len(firsts))(*(Attributes(order) for _ in firsts))
    first = (ctypes.c_uint64 * len(firsts))(*firsts)
    return call("cudaMemcpyBatchAsync", targets, sources, sizes, len(pairs), attributes, first, len(firsts), stream)


def test_a_batch_copies_as_a_whole_in_the_streams_order():
    there, host = on_gpu(64), pinned(64, 5)
    stream = torch.cuda.Stream().cuda_stream
    control.reseed("late")
    with expect():
        halves = [(there[:32], host[:32]), (there[32:], host[32:])]
        assert batch(halves, stream) == 0 and control.pending() == 1
        assert batch(halves, stream, firsts=(0, 1)) == 0
    assert (there.cpu() == 5).all()
    with expect():
        assert batch(halves, 0) == 1, "not on the legacy stream"
        assert batch(halves, stream, order=0) == 1 and batch(halves, stream, firsts=(1,)) == 1
        assert batch(halves, stream, firsts=(0, 2)) == 1 and batch(halves, stream, firsts=()) == 1
    with expect(violations=1):
        assert batch([(there[:32], host[:32]), (host[32:], there[:32])], stream) == 0
    with expect(violations=1):
        assert batch([(there[:32], host[:32]), (there[31:63], host[32:])], stream) == 0
    with expect(races=1):
        assert batch(halves, stream) == 0
        assert call("cudaMemsetAsync", there.data_ptr(), 1, 1, torch.cuda.Stream().cuda_stream) == 0


def test_a_batch_reads_its_sources_when_it_says_so():
    there, host, stream = on_gpu(64), pinned(64, 5), torch.cuda.Stream().cuda_stream
    seen = {}
    for order in (STREAM_ORDER, DURING_CALL, ANY_ORDER):
        seen[order] = set()
        for seed in range(20):
            control.reseed("late", seed)
            host.fill_(5)
            assert batch([(there, host)], stream, order) == 0
            host.fill_(6)
            torch.cuda.synchronize()
            seen[order].add(int(there.sum()) // 64)
    assert seen == {STREAM_ORDER: {6}, DURING_CALL: {5}, ANY_ORDER: {5, 6}}
    with expect(violations=1):  # what was given before still writes what is read out of order
        assert copy_async(host, there, stream) == 0
        assert batch([(there, host)], stream, DURING_CALL) == 0


def test_each_race_is_told_with_the_bytes_that_both_touch():
    program = """
import os
os.dup2(1, 2)  # where the fake GPU tells races
import torch
from fake_gpu.cuda_calls import on_gpu
there = on_gpu(4, 64)
torch.cuda.synchronize()
rows = torch.tensor([0, 2], device=there.device)
torch.cuda.synchronize()
for _ in range(2):
    with torch.cuda.stream(torch.cuda.Stream()):
        there.index_select(0, rows)
    with torch.cuda.stream(torch.cuda.Stream()):
        there[1:].add_(1)
    torch.cuda.synchronize()
print(there.data_ptr() + there[0].nbytes * 2, there[0].nbytes)
"""
    each, once = (output_of(program, RACES=way) for way in ("each", "log"))
    start, row_bytes = map(int, each.splitlines()[-1].split())
    assert each.count(f" {row_bytes} bytes at {start:#x},") == each.count("RACE") == 2
    assert once.count("RACE") == 1
