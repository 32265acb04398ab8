# SPDX-License-Identifier: Apache-2.0
"""The worker's memory, as CUDA, GPUDirect and the kernel want it."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path

import pytest
import torch
from support.waits import WAIT_S

from fake_gpu import control
from kvdisk.device.base import GpuRange
from kvdisk.worker import arena as arena_module
from kvdisk.worker.arena import Arena
from kvdisk.worker.copier import CudaLanes
from kvdisk.worker.gpu_staging import GpuStaging

pytestmark = pytest.mark.fake_gpu
SLOT_BYTES, SLOTS = 8192, 8


def flags_of(address: int) -> list[str]:
    """Return what the kernel has noted of the mapping that an address is in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if "-" in name and not name.endswith(":"):
            first, end = (int(part, 16) for part in name.split("-"))
            inside = first <= address < end
        elif inside and name == "VmFlags:":
            return rest.split()
    raise AssertionError("the address is in no mapping")


def test_pinned_memory_is_kept_from_children() -> None:
    """A child's first write would move pages from under the GPU. ``dc``: not copied when the
    process forks."""
    with (
        closing(Arena([SLOT_BYTES], [SLOTS], pin=True)) as pinned,
        closing(Arena([SLOT_BYTES], [SLOTS], False)) as other,
    ):
        pinned.await_pinned()
        assert "dc" in flags_of(pinned.address_of(0))
        assert "dc" not in flags_of(other.address_of(0)), "else the test shows nothing"


def test_gpu_staging_shares_its_allocation_with_no_tensor() -> None:
    """cuFile registers all of an allocation."""
    with closing(GpuStaging([SLOT_BYTES], [SLOTS], CudaLanes())) as staging:
        others = [torch.zeros(size, dtype=torch.uint8, device="cuda") for size in (512, 4096, 100_000, 900_000) * 4]
        place = staging.memory
        assert isinstance(place, GpuRange)
        (segment,) = [
            one
            for one in torch.cuda.memory_snapshot()
            if one["address"] <= place.address < one["address"] + one["total_size"]
        ]
        end = segment["address"] + segment["total_size"]
        assert not [one for one in others if segment["address"] <= one.data_ptr() < end]


def test_nothing_is_pinned_any_more_when_memory_is_unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is pinned behind that would go while CUDA has it."""
    pinning, made = list[bool](), list[Arena]()
    unregister = arena_module._unregister

    def watched(pinned: list[int], memory: memoryview) -> None:
        pinning.extend(thread.is_alive() for arena in made if (thread := arena._pinning))
        unregister(pinned, memory)

    begun = threading.Event()

    def pin_late(_: object) -> None:
        assert begun.wait(WAIT_S) and made[0]._closing.wait(WAIT_S)

    monkeypatch.setattr(arena_module, "_unregister", watched)
    monkeypatch.setattr(arena_module, "run_near", pin_late)
    made.append(Arena([SLOT_BYTES], [SLOTS], pin=True))
    begun.set()
    made[0].close()
    assert pinning == [False]


@pytest.mark.parametrize("refused", [0, 1, 2])
def test_only_what_was_pinned_is_unpinned(refused: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """2: out of memory. Memory that CUDA does not unpin would stay with the process."""
    monkeypatch.setattr(arena_module, "PIECE_BYTES", 2 * SLOT_BYTES)
    monkeypatch.setattr(arena_module, "_REFUSED", [])
    before, count = control.counts(), SLOTS // 2
    control.fail("cudaHostRegister", 2, after=refused)
    with closing(Arena([SLOT_BYTES], [SLOTS], pin=True)) as arena:
        arena.await_pinned()
        assert arena.is_pageable, "copies of it wait for the model, which the mover must know"
        assert len(arena._pinned) == refused < count
    assert control.counts().get("cudaHostUnregister", 0) - before.get("cudaHostUnregister", 0) == refused
    assert not arena_module._REFUSED
