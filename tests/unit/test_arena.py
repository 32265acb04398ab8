# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
import itertools

import numpy as np
import pytest
import torch

from kvdisk.errors import ConfigError
from kvdisk.worker.arena import Arena

SIZES = (8192, 20480)
COUNTS = (5, 3)


@pytest.fixture
def arena():
    made = Arena(SIZES, COUNTS, pin=False)
    yield made
    made.close()


def address(view) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data


def test_slots_are_aligned_neighbours_and_disjoint(arena):
    places = []
    for size_class, (size, count) in enumerate(zip(SIZES, COUNTS, strict=True)):
        addresses = [address(arena.view(size_class, index)) for index in range(count)]
        assert all(place % 4096 == 0 for place in addresses)
        assert addresses == list(range(addresses[0], addresses[0] + size * count, size))
        places += [(place, place + size) for place in addresses]
    places.sort()
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(places))
    whole = address(arena.memory)
    assert places[0][0] >= whole
    assert places[-1][1] <= whole + arena.memory.nbytes


def test_views_runs_and_tensors_share_the_bytes(arena):
    arena.run_view(1, 1, 2)[:] = b"a" * (2 * SIZES[1])
    arena.view(1, 2)[:3] = b"xyz"
    tensor = arena.tensor(1)
    assert tensor.shape == (3, SIZES[1])
    assert tensor.dtype == torch.uint8
    assert bytes(tensor[2, :4].numpy()) == b"xyza"
    assert not tensor[0].any()
    tensor[1, 7] = ord("q")
    assert arena.run_view(1, 1, 2)[7] == ord("q")
    assert not arena.tensor(0).any()


def test_what_outlives_the_arena_never_dangles():
    arena = Arena(SIZES, COUNTS, pin=False)
    view, tensor = arena.view(0, 0), arena.tensor(0)
    view[:] = b"k" * SIZES[0]
    arena.close()
    arena.close()
    del arena
    gc.collect()
    assert bytes(view[:3]) == b"kkk"
    assert int(tensor[0, 0]) == ord("k")


def test_what_cannot_be_mapped_is_one_sentence():
    with pytest.raises(ConfigError, match="bytes of host memory"):
        Arena((1 << 40,), (1 << 20,), pin=False)


def test_pinning_needs_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="CUDA"):
        Arena(SIZES, COUNTS, pin=True)
