# SPDX-License-Identifier: Apache-2.0
"""Copies between blocks and slots, and the scratch of the CUDA copier on a stand-in that works at
once, on the CPU."""

from __future__ import annotations

import contextlib
import itertools
import random
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from ranks import CpuLanes

from kvdisk.geometry import ALIGNMENT, HEADER_BYTES, round_up
from kvdisk.messages import NO_BLOCK
from kvdisk.worker import arena as arenas
from kvdisk.worker import copier as copiers
from kvdisk.worker import cudart
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


def as_vllm_lays_out(kinds, layers: int, *, block_outer: bool):
    """Layers whose kinds (bytes each) take turns, as in a group of MLA with an indexer: vLLM puts
    each kind together, blocks outermost or not."""
    each = sum(kinds)
    whole = random_bytes(BLOCKS * layers * each)
    found, start = {}, 0
    for kind, size in enumerate(kinds):
        for layer in range(layers):
            strides = (layers * each, 1) if block_outer else (size, 1)
            offset = start + layer * size * (1 if block_outer else BLOCKS)
            found[layer, kind] = whole.as_strided((BLOCKS, size), strides, offset)
        start += layers * size * (1 if block_outer else BLOCKS)
    return [found[place] for place in sorted(found)]


def eighty_layers():
    return as_vllm_lays_out([64], 80, block_outer=False)


def eighty_layers_in_a_block():
    return as_vllm_lays_out([64], 80, block_outer=True)


def mla_with_indexer():
    return as_vllm_lays_out([1152, 132], 61, block_outer=False)


def mla_with_indexer_in_a_block():
    return as_vllm_lays_out([1152, 132], 61, block_outer=True)


STACKS = {
    separate_layers: (3, False),
    layers_within_blocks: (1, True),
    odd_layers: (3, False),
    layers_with_a_gap: (2, False),
    eighty_layers: (1, False),
    eighty_layers_in_a_block: (1, True),
    mla_with_indexer: (2, False),
    mla_with_indexer_in_a_block: (2, False),
}
"""How many operations a gather takes, and whether a block is one range of bytes, as a payload."""


def payload(layers, block: int) -> bytes:
    return b"".join(bytes(layer[block].numpy()) for layer in layers)


def arena_for(*groups: LayerBlocks) -> Arena:
    sizes = [HEADER_BYTES + round_up(group.payload_bytes, ALIGNMENT) for group in groups]
    return Arena(sizes, [SLOTS] * len(sizes), pin=False)


def make_copiers(groups):
    one_slot = CudaCopier(groups, CpuLanes(), 0)
    assert one_slot.scratch_bytes == HEADER_BYTES + round_up(max(g.payload_bytes for g in groups), ALIGNMENT)
    return [HostCopier(groups), one_slot, CudaCopier(groups, CpuLanes(), 20 * one_slot.scratch_bytes)]


SLOT_ORDERS = {"a run": list(range(6, 15)), "scattered": [20, 3, 4, 5, 0, 11, 10, 9, 23], "one": [7]}


@pytest.mark.parametrize(("layout", "expected"), STACKS.items())
def test_kinds_of_layers_are_copied_at_once_wherever_they_lie(layout, expected):
    blocks = LayerBlocks(layout())
    assert (len(blocks.stacks), blocks.rows is not None) == expected


def test_a_cache_of_any_size_is_one_operation():
    """Of 80 layers that lie apart, over 40 GiB of addresses: torch cuts its kernels by itself."""
    whole = torch.empty(80, 8 << 20, 64, dtype=torch.uint8, device="meta")
    stacks = LayerBlocks(list(whole.unbind(0))).stacks
    assert [tuple(stack.blocks.shape) for stack in stacks] == [(8 << 20, 80, 64)]


@pytest.mark.parametrize("layout", STACKS)
@pytest.mark.parametrize("which", [0, 1, 2, 3], ids=["host", "scratch of one slot", "scratch of five", "straight"])
@pytest.mark.parametrize("slots", SLOT_ORDERS.values(), ids=SLOT_ORDERS)
def test_there_and_back(layout, which, slots, monkeypatch):
    torch.manual_seed(1)
    if which == 3:
        which = 2
        monkeypatch.setattr(copiers, "STRAIGHT_BYTES", 0)
        monkeypatch.setattr(copiers, "STRAIGHT_ROW_BYTES", 0)
        monkeypatch.setattr(arenas, "PIECE_BYTES", 5 * 8192)
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


@pytest.mark.parametrize("layout", STACKS)
@pytest.mark.parametrize("which", [0, 1, 2, 3], ids=["host", "scratch of one slot", "scratch of five", "straight"])
@pytest.mark.parametrize("blocks", [range(12), [9, 4, 5, 6, 0, 19, 18, 17, 2, 3, 14, 13]], ids=["a run", "scattered"])
def test_slots_of_several_blocks_there_and_back(layout, which, blocks, monkeypatch):
    """A scatter may leave some of a slot's blocks as they are."""
    torch.manual_seed(3)
    if which == 3:
        which = 2
        monkeypatch.setattr(copiers, "STRAIGHT_BYTES", 0)
        monkeypatch.setattr(copiers, "STRAIGHT_ROW_BYTES", 0)
        monkeypatch.setattr(arenas, "PIECE_BYTES", 5 * 8192)
    layers, slots = layout(), [3, 4, 9, 1]
    groups = [LayerBlocks(layers, per_slot=3)]
    arena = arena_for(*groups)
    copier = make_copiers(groups)[which]
    before = [payload(layers, block) for block in range(BLOCKS)]
    copier.gather(0, blocks, Slots(arena, 0, slots)).synchronize()
    size = groups[0].payload_bytes
    for at, slot in enumerate(slots):
        expected = b"".join(before[block] for block in blocks[3 * at : 3 * at + 3])
        assert bytes(arena.view(0, slot)[HEADER_BYTES : HEADER_BYTES + size]) == expected
        assert not any(arena.view(0, slot)[HEADER_BYTES + size :])

    for layer in layers:
        layer.zero_()
    targets = [NO_BLOCK, NO_BLOCK, 10, 11, 12, 13, 14, NO_BLOCK, 8, 7, 6, NO_BLOCK]
    copier.scatter(0, Slots(arena, 0, slots), targets).synchronize()
    right = {target: before[block] for target, block in zip(targets, blocks, strict=True) if target != NO_BLOCK}
    for block in range(BLOCKS):
        assert payload(layers, block) == right.get(block, bytes(groups[0].block_bytes))
    arena.close()


def test_the_model_is_waited_for_before_its_blocks_are_read_or_written():
    groups = [LayerBlocks(separate_layers())]
    arena, lanes = arena_for(*groups), CpuLanes()
    copier = CudaCopier(groups, lanes, 0)
    lanes.log.clear()
    mark = copier.compute_done()
    copier.gather(0, [1], Slots(arena, 0, [1]), after=mark)
    assert lanes.log == [("record", None), ("wait", Lane.STORE), ("record", Lane.STORE)]
    lanes.log.clear()
    for lane in (Lane.LOAD, Lane.LOAD_BESIDE):
        copier.scatter(0, Slots(arena, 0, [1]), [1], after=mark)
        assert lanes.log == [("wait", lane), ("record", lane)]
        lanes.log.clear()
    copier.scatter(0, Slots(arena, 0, [1]), [1])
    assert lanes.log == [("record", Lane.LOAD)]
    lanes.log.clear()
    copier.hold_model()
    both = [[("record", lane), ("wait", None)] for lane in (Lane.STORE, Lane.STORE_BESIDE)]
    assert lanes.log == [*both[0], *both[1]], "the model waits for gathers, and nothing else"
    arena.close()


@pytest.mark.parametrize("loads", [False, True])
def test_parts_take_two_streams_and_two_scratches_in_turn_and_end_together(loads):
    """So that one part's kernel can run while another part is on the link."""
    groups = [LayerBlocks(separate_layers())]
    arena, lanes = arena_for(*groups), CpuLanes()
    copier = CudaCopier(groups, lanes, 0)  # of one slot
    slots, mark, first, second = [4, 1, 7, 2], copier.compute_done(), *lanes_of(loads)
    entered = []
    lanes.on = lambda lane: contextlib.nullcontext(entered.append(lane))
    lanes.log.clear()
    if loads:
        copier.scatter(0, Slots(arena, 0, slots), slots, after=mark)
    else:
        copier.gather(0, slots, Slots(arena, 0, slots), after=mark)
    assert entered == [first, second] * 2
    waits = [("wait", first), ("wait", second)]
    assert lanes.log == [*waits, ("record", first), ("wait", second), ("record", second)]
    places = [copier._scratch[lane].data_ptr() for lane in Lane]
    assert all(abs(one - other) >= copier.scratch_bytes for one, other in itertools.combinations(places, 2))
    arena.close()


def lanes_of(loads: bool) -> tuple[Lane, Lane]:
    return (Lane.LOAD, Lane.LOAD_BESIDE) if loads else (Lane.STORE, Lane.STORE_BESIDE)


def test_layers_of_large_blocks_go_in_rows_also_where_they_lie_apart(monkeypatch):
    monkeypatch.setattr(copiers, "STRAIGHT_BYTES", 61 * 600)
    monkeypatch.setattr(copiers, "STRAIGHT_ROW_BYTES", 132)  # the smaller kind's; eighty_layers have 64
    groups = [LayerBlocks(mla_with_indexer()), LayerBlocks(eighty_layers())]
    arena, lanes = arena_for(*groups), CpuLanes()
    copier = CudaCopier(groups, lanes, 0)
    copier.gather(0, [2, 9], Slots(arena, 0, [4, 5]))
    assert lanes.rows == [61] * 4, "of each block the layers of a kind"
    lanes.rows.clear()
    monkeypatch.setattr(copiers, "STRAIGHT_ROW_BYTES", 600)
    copier.gather(0, [2, 9], Slots(arena, 0, [4, 5]))
    assert lanes.rows == [], "half of the rows are smaller, though their mean is 642"
    monkeypatch.setattr(copiers, "STRAIGHT_ROW_BYTES", 132)
    copier.gather(1, [2, 9], Slots(arena, 1, [4, 5]))
    monkeypatch.setattr(copiers, "_MOST_PITCH", 100)
    copier.gather(0, [2, 9], Slots(arena, 0, [4, 5]))
    assert lanes.rows == [], "of too short ones, or of layers too far apart for CUDA"
    arena.close()


def test_blocks_that_lie_as_in_a_payload_go_in_rows_where_these_are_large(monkeypatch):
    monkeypatch.setattr(copiers, "STRAIGHT_BYTES", 3 * 80 * 64)
    monkeypatch.setattr(copiers, "STRAIGHT_ROW_BYTES", 5000)
    monkeypatch.setattr(arenas, "PIECE_BYTES", 4 * 12288)
    groups = [LayerBlocks(eighty_layers_in_a_block())]
    arena, lanes = arena_for(*groups), CpuLanes()
    copier = CudaCopier(groups, lanes, 0)
    lanes.log.clear()
    copier.gather(0, range(2, 8), Slots(arena, 0, range(2, 8)), after=copier.compute_done())
    assert lanes.rows == [2, 4], "a run of blocks at once, and none across two pieces of pinned memory"
    assert lanes.log == [("record", None), ("wait", Lane.STORE), ("record", Lane.STORE)]
    lanes.rows.clear()
    copier.gather(0, [2, 3, 9], Slots(arena, 0, [4, 5, 6]))
    copier.scatter(0, Slots(arena, 0, [1, 4, 2]), [3, 4, 5])
    assert lanes.rows == [], "so small ones are gathered"
    lanes.copies_rows = False
    copier.gather(0, range(2, 8), Slots(arena, 0, range(2, 8)))
    assert lanes.rows == []
    arena.close()


@pytest.mark.parametrize("is_pageable", [False, True])
def test_copies_of_rows_keep_the_interpreters_lock_where_memory_is_pinned(monkeypatch, is_pageable):
    """One call a block: the model's thread would take the lock at each."""
    monkeypatch.setattr(copiers, "STRAIGHT_BYTES", 0)
    monkeypatch.setattr(copiers, "STRAIGHT_ROW_BYTES", 0)
    groups = [LayerBlocks(eighty_layers_in_a_block())]
    arena, lanes = arena_for(*groups), CpuLanes()
    arena.is_pageable = is_pageable
    copier = CudaCopier(groups, lanes, 0)
    copier.gather(0, [3, 7], Slots(arena, 0, [0, 1]))
    copier.scatter(0, Slots(arena, 0, [0, 1]), [3, 7])
    assert lanes.pinned == [not is_pageable] * 4
    arena.close()


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("status", [0, 1])
def test_cuda_is_called_with_or_without_the_lock(monkeypatch, pinned, status):
    libraries = {kind: Mock() for kind in ("CDLL", "PyDLL")}
    for kind, library in libraries.items():
        library.cudaMemcpy2DAsync.return_value = status
        monkeypatch.setattr(cudart.ctypes, kind, lambda _, library=library: library)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: SimpleNamespace(cuda_stream=7))
    cudart.cuda_runtime.cache_clear()
    try:
        lanes = copiers.CudaLanes(0)
        rows = copiers.Rows(1000, 64)
        assert lanes.copy_rows(Lane.LOAD, rows, rows, 16, 3, pinned=pinned) == (status == 0)
        called = {kind: library.cudaMemcpy2DAsync.call_count for kind, library in libraries.items()}
        assert called == {"CDLL": not pinned, "PyDLL": pinned}
        assert libraries["CDLL"].cudaGetLastError.call_count == status
    finally:
        cudart.cuda_runtime.cache_clear()


def test_where_cuda_refuses_rows_all_is_gathered_from_then_on(monkeypatch, caplog):
    monkeypatch.setattr(copiers, "STRAIGHT_BYTES", 0)
    monkeypatch.setattr(copiers, "STRAIGHT_ROW_BYTES", 0)
    layers = eighty_layers_in_a_block()
    groups = [LayerBlocks(layers)]
    arena, lanes = arena_for(*groups), CpuLanes()
    copier, asked = CudaCopier(groups, lanes, 0), []
    lanes.copy_rows = lambda *_, **__: asked.append(1)
    before = [payload(layers, block) for block in range(BLOCKS)]
    copier.gather(0, [3, 7], Slots(arena, 0, [0, 1]))
    copier.scatter(0, Slots(arena, 0, [0, 1]), [5, 6])
    assert [payload(layers, block) for block in (5, 6)] == [before[3], before[7]]
    assert len(asked) == len(caplog.records) == 1
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
    relaxed = Mock()
    monkeypatch.setattr(copiers, "relax_captures", relaxed)
    with copier.thread():
        assert entered == [lanes.device]
        relaxed.assert_called_once_with()
