# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
import itertools
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.waits import WAIT_S

from kvdisk.errors import ConfigError
from kvdisk.worker import arena as arenas
from kvdisk.worker import cudart
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


def test_more_than_the_kernel_maps_is_one_sentence():
    with pytest.raises(ConfigError, match="cannot map 1152921504606846976 bytes"):  # as under ulimit -v
        Arena((1 << 40,), (1 << 20,), pin=False)


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


class Driver:
    """What an arena asks of CUDA. ``calls``: GPU and processors of the thread, and what was pinned.
    ``refused``: which piece it does not pin."""

    def __init__(self, monkeypatch, refused: int = -1) -> None:
        self.gpu, self.calls, self.refused, self.freed, self.kept = -1, [], refused, [], 0
        for name, found in (
            ("current_device", lambda: 3),
            ("set_device", lambda gpu: setattr(self, "gpu", gpu)),
            ("cudart", lambda: SimpleNamespace(cudaHostRegister=self.register, cudaHostUnregister=self.unregister)),
            ("get_device_properties", lambda gpu: GPU if gpu == 3 else None),
        ):
            monkeypatch.setattr(torch.cuda, name, found)

    def unregister(self, address):
        self.freed.append(address)
        return self.kept

    def register(self, address, byte_count, _flags):
        self.calls.append((self.gpu, os.sched_getaffinity(0), address, byte_count))
        return 2 if len(self.calls) - 1 == self.refused else 0


@pytest.mark.parametrize("near", [{min(os.sched_getaffinity(0)), 100_000}, {100_000}, set()])
def test_an_arena_is_pinned_by_processors_near_its_gpu(monkeypatch, near):
    before, driver = os.sched_getaffinity(0), Driver(monkeypatch)
    monkeypatch.setattr(arenas, "processors_near", lambda gpu: near if gpu is GPU else set())
    Arena([8192], [16], pin=True).close()
    ((gpu, processors, _, byte_count),) = driver.calls
    assert (gpu, processors, byte_count) == (3, near & before or before, 16 * 8192)
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("refused", [-1, 2])
def test_it_is_pinned_in_pieces_of_whole_slots_as_far_as_the_driver_does(monkeypatch, caplog, refused):
    driver = Driver(monkeypatch, refused)
    monkeypatch.setattr(arenas, "PIECE_BYTES", 2 * 8192 + 100)
    arena = Arena(SIZES, COUNTS, pin=True)
    arena.await_pinned()
    start = address(arena.memory)
    # Two slots, two, and one of the smaller size; then one slot each, as it is larger than a piece.
    lengths = [16384, 16384, 8192, 20480, 20480, 20480]
    offsets = [0, *itertools.accumulate(lengths)][:-1]
    tried = list(zip(offsets, lengths, strict=True))[: refused + 1 if refused >= 0 else None]
    assert [(place - start, length) for _, _, place, length in driver.calls] == tried
    assert [arena.piece_slots(size_class) for size_class in (0, 1)] == [2, 1]
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (refused >= 0)
    assert all("69632 of 102400 bytes" in line and "error 2" in line for line in warnings)
    assert arena.is_pageable == (refused >= 0)
    arena.view(1, 2)[:3] = b"xyz"  # it serves, pinned or not
    arena.close()
    assert driver.freed == [start + offset for offset in offsets[: refused if refused >= 0 else None]]


def test_an_arena_that_is_dropped_is_unregistered_before_its_pages_go(monkeypatch):
    driver = Driver(monkeypatch)
    mapped = []
    unregister = driver.unregister

    def noting(address):
        mapped.append(f"{address:x}-" in Path("/proc/self/maps").read_text())
        return unregister(address)

    driver.unregister = noting
    arena = Arena([8192], [16], pin=True)
    arena.await_pinned()
    start = address(arena.memory)
    del arena
    gc.collect()
    assert driver.freed == [start] and mapped == [True]
    arena = Arena([8192], [16], pin=True)
    arena.close()
    arena.close()
    del arena
    gc.collect()
    assert len(driver.freed) == 2, "once"


@pytest.mark.parametrize("what", ["register", "unregister"])
def test_what_cuda_refuses_does_not_become_somebody_elses_error(monkeypatch, caplog, what):
    """CUDA keeps the last error of a thread, and torch raises it at its next kernel."""
    driver, cleared = Driver(monkeypatch, 0 if what == "register" else -1), []
    monkeypatch.setattr(arenas, "_REFUSED", [])
    runtime = SimpleNamespace(
        cudaGetLastError=lambda: cleared.append(1), cudaThreadExchangeStreamCaptureMode=lambda _: 0
    )
    monkeypatch.setattr(cudart, "cuda_runtime", lambda: runtime)
    driver.kept = 713
    arena = Arena([8192], [16], pin=True)
    arena.await_pinned()
    memory = arena.memory
    arena.close()
    assert cleared == [1]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    kept = [memory] if what == "unregister" else []
    assert kept == arenas._REFUSED, "what CUDA still knows stays mapped"
    assert "713" in caplog.text or what == "register"


def test_a_driver_that_is_not_there_is_one_warning(monkeypatch, caplog):
    Driver(monkeypatch)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _gpu: 1 // 0)
    Arena(SIZES, COUNTS, pin=True).close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_serving_does_not_wait_for_the_pinning_and_the_end_does(monkeypatch):
    driver, held, pinning = Driver(monkeypatch), threading.Event(), threading.Event()
    monkeypatch.setattr(arenas, "cuda_runtime", object)
    monkeypatch.setattr(arenas, "relax_captures", lambda: driver.calls.append("relaxed"))

    def register(_address, _byte_count, _flags):
        pinning.set()
        assert held.wait(WAIT_S)
        return 0

    driver.register = register
    arena = Arena(SIZES, COUNTS, pin=True)
    arena.view(0, 0)[:3] = b"xyz"
    assert pinning.wait(WAIT_S) and arena.is_pageable
    assert driver.calls == ["relaxed"], "before anything that a capture of CUDA graphs forbids"
    threading.Timer(0.01, held.set).start()
    arena.close()
    assert len(driver.freed) == 1, "what was being pinned is freed, and no more was begun"


@pytest.mark.parametrize("pin", [False, True])
def test_children_that_fork_do_not_get_what_is_pinned(monkeypatch, pin):
    Driver(monkeypatch)
    arena = Arena(SIZES, COUNTS, pin=pin)
    arena.view(0, 0)[0] = 1
    place = f"{address(arena.memory):x}-"
    mappings = Path("/proc/self/smaps").read_text().split("\n")
    at = next(at for at, line in enumerate(mappings) if line.startswith(place))
    flags = next(line for line in mappings[at:] if line.startswith("VmFlags:")).split()
    assert ("dc" in flags) == pin
    arena.close()
