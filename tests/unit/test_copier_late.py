# SPDX-License-Identifier: Apache-2.0
"""The CUDA copier on lanes that work late, in any order that streams and events allow: blocks and
slots have the right bytes, no part takes memory, and a full GPU is a copy that is not made."""

from __future__ import annotations

import random
from contextlib import closing

import pytest
import torch
from ranks import CpuLanes
from support.late_lanes import LateLanes
from test_copier import (
    BLOCKS,
    SLOTS,
    STACKS,
    arena_for,
    eighty_layers_in_a_block,
    mla_with_indexer,
    payload,
    separate_layers,
)

from kvdisk.geometry import HEADER_BYTES
from kvdisk.worker import copier as copiers
from kvdisk.worker.copier import CudaCopier, Lane, LayerBlocks, Slots


@pytest.fixture(params=[0, 1 << 60], ids=["straight", "through scratch"])
def straight_bytes(request, monkeypatch):
    monkeypatch.setattr(copiers, "STRAIGHT_BYTES", request.param)
    monkeypatch.setattr(copiers, "STRAIGHT_ROW_BYTES", request.param)
    monkeypatch.setattr(copiers, "MOST_NUMBERS", 1)


@pytest.mark.usefixtures("straight_bytes")
@pytest.mark.parametrize("layout", STACKS)
@pytest.mark.parametrize("scratch_slots", [1, 4])
@pytest.mark.parametrize("seed", range(6))
def test_what_the_model_writes_before_is_stored_and_what_it_writes_later_is_not(layout, scratch_slots, seed):
    """And what is loaded stands where the blocks' last owner has written before."""
    chance, layers = random.Random(seed), layout()
    groups, lanes = [LayerBlocks(layers)], LateLanes(seed)
    with closing(arena_for(*groups)) as arena:
        copier = CudaCopier(groups, lanes, 4 * scratch_slots * arena.slot_sizes[0])
        arena.tensor(0)  # made once
        written = [layer.clone() for layer in layers]
        expected = [payload(layers, block) for block in range(BLOCKS)]
        for layer in layers:
            layer.zero_()
        with lanes.on(None):  # the model
            for layer, numbers in zip(layers, written, strict=True):
                layer.copy_(numbers)
        mark, stored = copier.compute_done(), chance.sample(range(BLOCKS), 12)
        slots = chance.sample(range(SLOTS), 12)
        ends = []
        for at in range(0, 12, 3):
            lanes.go_on(chance.randrange(6))
            ends.append(copier.gather(0, stored[at : at + 3], Slots(arena, 0, slots[at : at + 3]), after=mark))
        copier.hold_model()
        with lanes.on(None):
            for layer in layers:
                layer.fill_(0xFF)
        for end in ends:
            end.synchronize()
        found = [bytes(arena.view(0, slot)[HEADER_BYTES : HEADER_BYTES + len(expected[0])]) for slot in slots]
        assert found == [expected[block] for block in stored]

        mark, targets = copier.compute_done(), chance.sample(range(BLOCKS), 12)
        for at in range(0, 12, 3):
            lanes.go_on(chance.randrange(6))
            copier.scatter(0, Slots(arena, 0, slots[at : at + 3]), targets[at : at + 3], after=mark)
        lanes.finish()
        whole = dict(zip(targets, (expected[block] for block in stored), strict=True))
        others = b"\xff" * len(expected[0])
        assert [payload(layers, block) for block in range(BLOCKS)] == [
            whole.get(block, others) for block in range(BLOCKS)
        ]


@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize("what", ["nothing", "half"])
def test_a_full_gpu_is_a_copy_that_is_not_made_and_of_which_nothing_goes_on(monkeypatch, loads, what):
    """The next one is made, if there is memory then."""
    groups, lanes = [LayerBlocks(separate_layers())], LateLanes(1)
    with closing(arena_for(*groups)) as arena:
        copier, name = CudaCopier(groups, lanes, 0), "index_copy_" if loads else "index_select"
        lanes.finish()
        arena.tensor(0)
        owner = torch.Tensor if loads else torch
        kernel, calls = getattr(owner, name), []

        def full(*args, **fields):
            calls.append(name)
            if len(calls) > (0 if what == "nothing" else 2):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
            return kernel(*args, **fields)

        def copy():
            given = Slots(arena, 0, [3, 4, 5])
            return copier.scatter(0, given, [3, 4, 5]) if loads else copier.gather(0, [3, 4, 5], given)

        with monkeypatch.context() as patched:
            patched.setattr(owner, name, full)
            assert copy() is None
        lane = Lane.LOAD if loads else Lane.STORE
        assert not any(lanes._queues[each] for each in copiers._BOTH[lane]), "something goes on"
        end = copy()
        assert end is not None
        end.synchronize()


def test_another_error_of_cuda_is_not_taken_for_a_full_gpu(monkeypatch):
    groups = [LayerBlocks(separate_layers())]
    with closing(arena_for(*groups)) as arena:
        copier = CudaCopier(groups, CpuLanes(), 0)

        def broken(*_, **__):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        monkeypatch.setattr(torch, "index_select", broken)
        with pytest.raises(RuntimeError, match="illegal memory"):
            copier.gather(0, [3], Slots(arena, 0, [3]))


@pytest.mark.parametrize("copy_bytes", [700, 4096, 3 * 8192, 1 << 20])
@pytest.mark.parametrize("layout", [separate_layers, eighty_layers_in_a_block, mla_with_indexer])
@pytest.mark.usefixtures("straight_bytes")
def test_copies_over_the_link_are_short_and_bring_all(layout, copy_bytes, monkeypatch):
    """vLLM's own copies wait behind one of them. No slot is left out, however its size divides."""
    monkeypatch.setattr(copiers, "COPY_BYTES", copy_bytes)
    layers = layout()
    groups, lanes = [LayerBlocks(layers)], LateLanes(7)
    with closing(arena_for(*groups)) as arena:
        place = arena.tensor(0).data_ptr(), arena.tensor(0).data_ptr() + arena.total_bytes
        copier = CudaCopier(groups, lanes, 4 * 6 * arena.slot_sizes[0])
        expected = [payload(layers, block) for block in range(BLOCKS)]
        slots = [3, 4, 5, 6, 7, 8, 20]
        assert copier.gather(0, range(7), Slots(arena, 0, slots)) is not None
        lanes.finish()
        for layer in layers:
            layer.zero_()
        assert copier.scatter(0, Slots(arena, 0, slots), range(7, 14)) is not None
        lanes.finish()
        assert [payload(layers, block) for block in range(7, 14)] == expected[:7]
        assert lanes.moved_bytes(*place) and max(lanes.moved_bytes(*place)) <= copy_bytes
        if copy_bytes == 1 << 20:
            assert len(lanes.moved_bytes(*place)) <= 2 * 7 * len(groups[0].stacks), "those of neighbours go at once"
