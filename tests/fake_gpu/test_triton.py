# SPDX-License-Identifier: Apache-2.0
"""Kernels of Triton as operations of the fake GPU's streams."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from fake_gpu import control

pytestmark = pytest.mark.fake_gpu
GPU = "cuda"
COUNT = 1000


@triton.jit
def _add(one, other, out, count, size: tl.constexpr):
    at = tl.program_id(0) * size + tl.arange(0, size)
    there = at < count
    tl.store(out + at, tl.load(one + at, mask=there) + tl.load(other + at, mask=there), mask=there)


@triton.jit
def _gather(places, out, size: tl.constexpr):
    place = tl.load(places + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    at = tl.arange(0, size)
    tl.store(out + tl.program_id(0) * size + at, tl.load(place + at))


def add(one, other, out):
    _add[(triton.cdiv(COUNT, 128),)](one, other, out, COUNT, size=128)


@pytest.fixture
def numbers():
    found = torch.arange(float(COUNT), device=GPU), torch.ones(COUNT, device=GPU), torch.zeros(COUNT, device=GPU)
    torch.cuda.synchronize()
    return found


@pytest.mark.parametrize("order", ["late", "contrary", "random", "eager", "mixed"])
def test_a_kernel_runs_in_its_streams_order(order, numbers):
    control.reseed(order, 3)
    before = control.races(), control.violations()
    one, other, out = numbers
    add(one, other, out)
    doubled = out * 2
    add(doubled, other, out)
    one.zero_()
    assert torch.equal(out.cpu(), (torch.arange(float(COUNT)) + 1) * 2 + 1)
    assert (control.races(), control.violations()) == before


def test_a_kernel_waits_until_somebody_waits_for_it(numbers):
    control.reseed("late", 0)
    pending = control.pending()
    add(*numbers)
    assert control.pending() == pending + 1
    torch.cuda.synchronize()
    assert control.pending() == 0


def test_addresses_that_are_numbers_in_a_tensor(numbers):
    before = control.violations()
    places = torch.tensor([each.data_ptr() for each in numbers], device=GPU)
    out = torch.empty(3, 64, device=GPU)
    _gather[(3,)](places, out, size=64)
    assert torch.equal(out, torch.stack([each[:64] for each in numbers]))
    assert control.violations() == before


def test_what_a_kernel_touches_races_with_another_stream(numbers):
    """And by the bytes: of two halves each stream has its own."""
    one, other, out = numbers
    before = control.races()
    with torch.cuda.stream(torch.cuda.Stream()):
        one[:500].add_(1)
    _add[(4,)](one[500:], other, out, 500, size=128)
    torch.cuda.synchronize()
    assert control.races() == before
    with torch.cuda.stream(torch.cuda.Stream()):
        one.add_(1)
    add(one, other, out)
    torch.cuda.synchronize()
    assert control.races() > before


def test_a_kernel_reads_nothing_of_the_hosts(numbers):
    _, other, out = numbers
    before = control.violations()
    add(torch.zeros(COUNT).pin_memory(), other, out)
    torch.cuda.synchronize()
    assert control.violations() == before, "page-locked memory is the GPU's, too"
    host = torch.zeros(COUNT)
    add(host, other, out)
    torch.cuda.synchronize()
    assert control.violations() > before


def test_without_the_gpu_it_is_as_ever():
    one, out = torch.ones(COUNT), torch.zeros(COUNT)
    add(one, one, out)
    assert (out == 2).all()
