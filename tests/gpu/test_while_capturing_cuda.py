# SPDX-License-Identifier: Apache-2.0
"""Memory is pinned, and stores and loads go on, while vLLM captures CUDA graphs: each capture is in
the mode that forbids other threads what they need for that."""

from __future__ import annotations

import gc
import threading
from contextlib import closing
from unittest.mock import patch

import gpu_measures
import pytest
import torch
from place import PIN, REHEARSED, make_lanes, needs_cuda

from kvdisk.worker.arena import Arena
from kvdisk.worker.cudart import relax_captures

pytestmark = pytest.mark.gpu


def test_an_arena_that_was_dropped_leaves_its_addresses_to_the_next():
    """CUDA refuses to register what it still knows."""
    for _ in range(3):
        arena = Arena([8192], [4096], pin=PIN)
        arena.await_pinned()
        assert not arena.is_pageable
        del arena
        gc.collect()


def capture_graphs(count: int = 50) -> None:
    numbers = torch.zeros(1000, device="cuda")
    for _ in range(count):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(500):
                numbers.add_(1)


def store_and_load() -> None:
    """As a rank does, with memory that is pinned for it."""
    torch.cuda.set_device(0)
    relax_captures()  # this thread records events and allocates, as the mover's does
    shape = gpu_measures.BLOCKS_FIRST
    with (
        closing(gpu_measures.Memory(make_lanes(), shape, 1 << 20, 64 << 20)) as memory,
        closing(memory.route(1)) as way,
    ):
        for _ in range(3):
            way.store()
            way.load()


@needs_cuda
@pytest.mark.parametrize("relaxed", [True, False], ids=["as it is", "without what it is for"])
def test_graphs_are_captured_beside_pinning_stores_and_loads(relaxed):
    failed, ended = [], threading.Event()

    def beside():
        try:
            while not ended.is_set():
                store_and_load()
        except Exception as error:
            failed.append(error)

    store_and_load()  # what is made at first use is there
    with patch("kvdisk.worker.copier.relax_captures", relax_captures if relaxed else lambda: False):
        thread = threading.Thread(target=beside)
        thread.start()
        try:
            capture_graphs()
        except Exception as error:
            failed.append(error)
        finally:
            ended.set()
            thread.join()
    torch.cuda.synchronize()
    assert bool(failed) != relaxed, failed


@pytest.mark.skipif(not REHEARSED, reason="shown above")
def test_what_goes_on_beside_can_be_rehearsed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    store_and_load()
