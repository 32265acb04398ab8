# SPDX-License-Identifier: Apache-2.0
"""Pinned memory is touched by processors near its GPU, as sysfs names them in a made-up tree."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from kvdisk.worker import arena as arenas
from kvdisk.worker.arena import Arena

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
