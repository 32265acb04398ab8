# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
import itertools
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvdisk.errors import ConfigError
from kvdisk.worker import arena as arenas
from kvdisk.worker.arena import Arena

SIZES = (8192, 20480)
COUNTS = (5, 3)


def address(view) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data


def test_slots_are_aligned_neighbours_and_views_runs_and_tensors_share_their_bytes():
    arena = Arena(SIZES, COUNTS, pin=False)
    places = []
    for size_class, (size, count) in enumerate(zip(SIZES, COUNTS, strict=True)):
        addresses = [address(arena.view(size_class, index)) for index in range(count)]
        assert all(place % 4096 == 0 for place in addresses)
        assert addresses == list(range(addresses[0], addresses[0] + size * count, size))
        places += [(place, place + size) for place in addresses]
    places.sort()
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(places))
    whole = address(arena.memory)
    assert whole <= places[0][0] and places[-1][1] <= whole + arena.memory.nbytes

    arena.view(1, 1, 2)[:] = b"a" * (2 * SIZES[1])
    arena.view(1, 2)[:3] = b"xyz"
    tensor = arena.tensor(1)
    assert (tensor.shape, tensor.dtype) == ((3, SIZES[1]), torch.uint8)
    assert bytes(tensor[2, :4].numpy()) == b"xyza"
    tensor[1, 7] = ord("q")
    assert arena.view(1, 1, 2)[7] == ord("q")
    assert not tensor[0].any() and not arena.tensor(0).any()
    arena.close()


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


def test_what_cannot_be_had_is_one_sentence(monkeypatch):
    with pytest.raises(ConfigError, match="bytes of host memory"):
        Arena((1 << 40,), (1 << 20,), pin=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="CUDA"):
        Arena(SIZES, COUNTS, pin=True)


# -- pinned memory is touched by processors near its GPU, as sysfs names them ---------------------

GPU = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=31)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2\n", {2}), ("0-2,8-9\n", {0, 1, 2, 8, 9}), ("\n", set()), (None, set()), ("near\n", set())],
)
def test_the_processors_near_a_gpu(tmp_path, text, expected):
    if text is not None:
        place = tmp_path / "bus/pci/devices/0000:c1:1f.0"
        place.mkdir(parents=True)
        (place / "local_cpulist").write_text(text)
    assert arenas.processors_near(GPU, tmp_path) == expected
    assert arenas.processors_near(SimpleNamespace(), tmp_path) == set()


@pytest.mark.parametrize("near", [{min(os.sched_getaffinity(0)), 100_000}, {100_000}, set()])
def test_an_arena_is_pinned_by_processors_near_its_gpu(monkeypatch, near):
    before, found = os.sched_getaffinity(0), []

    def register(_address, byte_count, _flags):
        found.append((os.sched_getaffinity(0), byte_count))
        return 0

    driver = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda _address: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: GPU if gpu == 3 else None)
    monkeypatch.setattr(arenas, "processors_near", lambda gpu: near if gpu is GPU else set())
    Arena([8192], [16], pin=True).close()
    assert found == [(near & before or before, 16 * 8192)]
    assert os.sched_getaffinity(0) == before
