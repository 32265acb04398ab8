# SPDX-License-Identifier: Apache-2.0
"""Copies between blocks and slots, and the scratch of the CUDA copier on a stand-in that works at
once, on the CPU."""

from __future__ import annotations

import contextlib
import random
from types import SimpleNamespace

import pytest
import torch
from ranks import CpuLanes

from kvdisk.geometry import ALIGNMENT, HEADER_BYTES, round_up
from kvdisk.worker.arena import Arena
from kvdisk.worker.copier import CudaCopier, HostCopier, Lane, LayerBlocks, Slots

BLOCKS = 20
SLOTS = 24


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def separate_layers():
    return [random_bytes(BLOCKS, 512) for _ in range(3)]


def layers_within_blocks():
    """Each block holds all layers, behind 32 bytes of something else: stride 0 is not the layer's
    length."""
    whole = random_bytes(BLOCKS, 32 + 3 * 96)
    return [whole[:, 32 + at * 96 : 32 + (at + 1) * 96] for at in range(3)]


def odd_layers():
    return [random_bytes(BLOCKS, 7), *random_bytes(2, BLOCKS, 129).unbind(0), random_bytes(BLOCKS, 33)[:, :21]]


def layers_with_a_gap():
    first, second, _, fourth = random_bytes(4, BLOCKS, 64).unbind(0)
    return [first, second, fourth]


LAYOUTS = [separate_layers, layers_within_blocks, odd_layers, layers_with_a_gap]


def payload(layers, block: int) -> bytes:
    return b"".join(bytes(layer[block].numpy()) for layer in layers)


def arena_for(*groups: LayerBlocks) -> Arena:
    sizes = [HEADER_BYTES + round_up(group.payload_bytes, ALIGNMENT) for group in groups]
    return Arena(sizes, [SLOTS] * len(sizes), pin=False)


def make_copiers(groups):
    one_slot = CudaCopier(groups, CpuLanes(), 0)
    assert one_slot.scratch_bytes == HEADER_BYTES + round_up(max(g.payload_bytes for g in groups), ALIGNMENT)
    return [HostCopier(groups), one_slot, CudaCopier(groups, CpuLanes(), 10 * one_slot.scratch_bytes)]


SLOT_ORDERS = {"a run": list(range(6, 15)), "scattered": [20, 3, 4, 5, 0, 11, 10, 9, 23], "one": [7]}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", [0, 1, 2], ids=["host", "scratch of one slot", "scratch of five"])
@pytest.mark.parametrize("slots", SLOT_ORDERS.values(), ids=SLOT_ORDERS)
def test_there_and_back(layout, which, slots):
    torch.manual_seed(1)
    layers, others = layout(), separate_layers()
    groups = [LayerBlocks(others), LayerBlocks(layers)]
    arena = arena_for(*groups)
    copier = make_copiers(groups)[which]
    chance = random.Random(2)
    sources = chance.sample(range(BLOCKS), len(slots))
    before = [payload(layers, block) for block in range(BLOCKS)]
    ticket = copier.gather(1, sources, Slots(arena, 1, slots), after=copier.compute_done())
    ticket.synchronize()
    assert ticket.query()
    size = groups[1].payload_bytes
    for slot, block in zip(slots, sources, strict=True):
        assert bytes(arena.view(1, slot)[HEADER_BYTES : HEADER_BYTES + size]) == before[block]
    assert not arena.tensor(0).any()
    untouched = [slot for slot in range(SLOTS) if slot not in slots]
    assert not arena.tensor(1)[untouched].any()

    for layer in layers:
        layer.zero_()
    targets = chance.sample(range(BLOCKS), len(slots))
    ticket = copier.scatter(1, Slots(arena, 1, slots), targets, after=copier.compute_done())
    ticket.synchronize()
    assert ticket.query()
    for target, source in zip(targets, sources, strict=True):
        assert payload(layers, target) == before[source]
    assert not any(any(payload(layers, block)) for block in range(BLOCKS) if block not in targets)
    arena.close()


def test_the_model_is_waited_for_before_its_blocks_are_read_or_written():
    groups = [LayerBlocks(separate_layers())]
    arena, lanes = arena_for(*groups), CpuLanes()
    copier = CudaCopier(groups, lanes, 0)
    lanes.log.clear()
    mark = copier.compute_done()
    copier.gather(0, [1, 2], Slots(arena, 0, [1, 2]), after=mark)
    assert lanes.log == [("record", None), ("wait", Lane.STORE), ("record", Lane.STORE)]
    lanes.log.clear()
    for slots in ([1, 2], [1]):
        copier.scatter(0, Slots(arena, 0, slots), slots, after=mark)
    assert lanes.log == [("wait", Lane.LOAD), ("record", Lane.LOAD)] * 2
    lanes.log.clear()
    copier.scatter(0, Slots(arena, 0, [1]), [1])
    assert lanes.log == [("record", Lane.LOAD)]
    lanes.log.clear()
    copier.hold_model()
    assert lanes.log == [("record", Lane.STORE), ("wait", None)], "the model waits for gathers, and nothing else"
    arena.close()


def test_a_gather_carries_no_stale_bytes_out():
    """Header and padding of a slot come from the scratch: never anything but zeros."""
    groups = [LayerBlocks(separate_layers())]
    arena = arena_for(*groups)
    copier = CudaCopier(groups, CpuLanes(), 0)
    arena.tensor(0).fill_(0x77)
    copier.scatter(0, Slots(arena, 0, [0, 1]), [0, 1])
    copier.gather(0, [0, 1], Slots(arena, 0, [4, 5]))
    for slot in (4, 5):
        assert not any(arena.view(0, slot)[:HEADER_BYTES])
        assert not any(arena.view(0, slot)[HEADER_BYTES + groups[0].payload_bytes :])
    arena.close()


@pytest.mark.parametrize("size", [63, 64])
def test_the_movers_thread_has_the_models_gpu_and_may_write_what_was_made_in_inference_mode(size, monkeypatch):
    with torch.inference_mode():
        groups = [LayerBlocks([torch.zeros(BLOCKS, size, dtype=torch.uint8) for _ in range(2)])]
    arena, lanes = arena_for(*groups), CpuLanes()
    arena.tensor(0).fill_(9)
    for copier in (HostCopier(groups), CudaCopier(groups, lanes, 0)):
        with copier.thread():
            assert torch.is_inference_mode_enabled()
            copier.scatter(0, Slots(arena, 0, [1]), [2])
            copier.gather(0, [2, 3], Slots(arena, 0, [4, 5]))
        assert bytes(arena.view(0, 4)[HEADER_BYTES : HEADER_BYTES + 2 * size]) == b"\x09" * 2 * size
        assert bytes(arena.view(0, 5)[HEADER_BYTES : HEADER_BYTES + 2 * size]) == bytes(2 * size)
    arena.close()
    entered = []
    lanes.device = SimpleNamespace(type="cuda", index=3)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext(entered.append(device)))
    with copier.thread():
        assert entered == [lanes.device]
