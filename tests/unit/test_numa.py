# SPDX-License-Identifier: Apache-2.0
"""Nodes as sysfs names them, in a made-up tree; and memory that the kernel is really asked to take
from one."""

from __future__ import annotations

import mmap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvdisk.worker import arena as arenas
from kvdisk.worker.arena import Arena


@pytest.mark.parametrize(("text", "expected"), [("1\n", 1), ("-1\n", None), (None, None), ("near\n", None)])
def test_the_node_of_a_gpu(tmp_path, text, expected):
    if text is not None:
        place = tmp_path / "bus/pci/devices/0000:c1:1f.0"
        place.mkdir(parents=True)
        (place / "numa_node").write_text(text)
    for node in range(2):
        assert arenas.node_of(0, 0xC1, 31, tmp_path) is None, "there is one node at most"
        (tmp_path / f"devices/system/node/node{node}").mkdir(parents=True)
    assert arenas.node_of(0, 0xC1, 31, tmp_path) == expected


def policy_of(start: int) -> str:
    lines = [line.split() for line in Path("/proc/self/numa_maps").read_text().splitlines()]
    return max((int(address, 16), policy) for address, policy, *_ in lines if int(address, 16) <= start)[1]


def test_memory_prefers_a_node():
    mapping = mmap.mmap(-1, 4 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = np.frombuffer(mapping, np.uint8)
    start = memory.ctypes.data
    arenas.prefer_node(start, len(memory), 0)
    assert policy_of(start).startswith("prefer")
    assert policy_of(start).endswith("0")
    memory.fill(1)
    assert memory.all()


@pytest.fixture
def cuda(monkeypatch):
    """A GPU of which torch knows just so much; what is registered, and with which policy."""
    found = []

    def register(address, byte_count, _flags):
        found.append((policy_of(address), byte_count))
        return 0

    driver = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda _address: 0)
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: properties if gpu == 3 else None)
    return found


@pytest.mark.parametrize(("node", "policy"), [(0, "prefer"), (None, "default")])
def test_an_arena_is_near_its_gpu_before_it_is_pinned(cuda, monkeypatch, node, policy):
    asked = []
    monkeypatch.setattr(arenas, "node_of", lambda *address: asked.append(address) or node)
    arena = Arena([8192], [16], pin=True)
    arena.close()
    assert asked == [(0, 0xC1, 0)]
    ((found, byte_count),) = cuda
    assert found.startswith(policy)
    assert byte_count == 16 * 8192
