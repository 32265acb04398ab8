# SPDX-License-Identifier: Apache-2.0
"""Nodes as sysfs names them, in a made-up tree; and memory that the kernel is really asked to take from one."""

from __future__ import annotations

import logging
import mmap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvdisk.worker import arena as arenas
from kvdisk.worker.arena import Arena

GPU = "0000:c1:00.0"


def make_tree(root: Path, memory: str | None, node: str | None) -> Path:
    for place, text in (("devices/system/node/has_memory", memory), (f"bus/pci/devices/{GPU}/numa_node", node)):
        if text is not None:
            (root / place).parent.mkdir(parents=True)
            (root / place).write_text(text)
    return root


@pytest.mark.parametrize(
    ("memory", "node", "expected"),
    [
        ("0-1\n", "1\n", 1),
        ("0,2-3\n", "2\n", 2),
        ("0-1\n", "-1\n", None),  # the firmware does not say
        ("0-1\n", "5\n", None),  # a node without memory
        ("0\n", "0\n", None),  # there is no other
        ("\n", "0\n", None),
        ("0-1\n", None, None),
        (None, "1\n", None),
        ("0-1\n", "near\n", None),
        ("0:1\n", "1\n", None),
    ],
)
def test_the_node_of_a_gpu(tmp_path, memory, node, expected):
    assert arenas.node_of(GPU, make_tree(tmp_path, memory, node)) == expected


def test_an_address_as_sysfs_writes_it():
    assert arenas.pci_address(0, 0xC1, 0) == GPU
    assert arenas.pci_address(0x10000, 1, 31) == "10000:01:1f.0"


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


@pytest.mark.parametrize("node", [63, 64, 1000])
def test_a_node_that_is_not_there_is_an_error(node):
    mapping = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with pytest.raises(OSError, match="Invalid"):
        arenas.prefer_node(np.frombuffer(mapping, np.uint8).ctypes.data, 1 << 20, node)


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
    monkeypatch.setattr(arenas, "node_of", lambda address: asked.append(address) or node)
    arena = Arena([8192], [16], pin=True)
    arena.close()
    assert asked == [GPU]
    ((found, byte_count),) = cuda
    assert found.startswith(policy)
    assert byte_count == 16 * 8192


def test_an_arena_that_cannot_be_near_serves_where_it_is(cuda, monkeypatch, caplog):
    monkeypatch.setattr(arenas, "node_of", lambda _address: 63)
    with caplog.at_level(logging.WARNING, "kvdisk.worker"):
        Arena([8192], [16], pin=True).close()
    assert "NUMA node 63" in caplog.text
    assert [policy for policy, _ in cuda] == ["default"]


def test_a_gpu_whose_address_torch_does_not_tell(cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _gpu: SimpleNamespace())
    Arena([8192], [16], pin=True).close()
    assert len(cuda) == 1
