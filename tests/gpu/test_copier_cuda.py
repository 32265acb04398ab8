# SPDX-License-Identifier: Apache-2.0
"""The CUDA copier against the host's, on a real device. Run with ``-m gpu``.

All of it on torch's default stream, and as vLLM has it: on another one, over tensors that were made
in inference mode.
"""

from __future__ import annotations

import random
from contextlib import closing

import gpu_measures
import pytest
import torch
from place import (
    GPU,
    PIN,
    REHEARSED,
    another_stream,
    copied,
    keep_busy,
    make_lanes,
    needs_cuda,
    random_bytes,
    synchronize,
)

from kvdisk.geometry import ALIGNMENT, HEADER_BYTES, round_up
from kvdisk.messages import NO_BLOCK
from kvdisk.worker import arena as arenas
from kvdisk.worker import copier as copiers
from kvdisk.worker.arena import Arena
from kvdisk.worker.copier import CudaCopier, HostCopier, LayerBlocks, Slots

pytestmark = pytest.mark.gpu

BLOCKS, SLOTS = 96, 80


def one_allocation(layers: int, layer_bytes: int) -> list[torch.Tensor]:
    """As vLLM lays it out: all layers in one allocation."""
    return list(random_bytes(layers, BLOCKS, layer_bytes).unbind(0))


def separate(layers: int, layer_bytes: int) -> list[torch.Tensor]:
    return [random_bytes(BLOCKS, layer_bytes) for _ in range(layers)]


def within_blocks(layers: int, layer_bytes: int) -> list[torch.Tensor]:
    return list(random_bytes(BLOCKS, layers * layer_bytes).split(layer_bytes, dim=1))


def interleaved(layers: int, layer_bytes: int) -> list[torch.Tensor]:
    """Two kinds that take turns, as MLA and its indexer do."""
    kinds = [one_allocation(layers // 2, size) for size in (layer_bytes, layer_bytes // 8)]
    return [layer for pair in zip(*kinds, strict=True) for layer in pair]


@pytest.fixture(params=[False, True], ids=["default stream", "as vLLM has it"], autouse=True)
def model(request):
    """The stream and the mode that all of a test runs in."""
    if not request.param:
        yield
        return
    with another_stream(), torch.inference_mode():
        yield


@pytest.fixture(params=[one_allocation, separate, within_blocks, interleaved])
def layers(request, model):
    return request.param(8, 16384)


@pytest.fixture
def arena(layers, monkeypatch):
    payload = sum(layer.shape[1] for layer in layers)
    slot_bytes = HEADER_BYTES + round_up(payload, ALIGNMENT)
    monkeypatch.setattr(arenas, "PIECE_BYTES", 7 * slot_bytes)  # copies may not go across two of them
    with closing(Arena([slot_bytes], [SLOTS], pin=PIN)) as made:
        made.await_pinned()
        assert len(made._pinned) == (-(-SLOTS // 7) if PIN else 0)
        yield made


@pytest.fixture(params=[0, 1 << 60], ids=["straight", "through scratch"])
def straight_bytes(request, monkeypatch):
    monkeypatch.setattr(copiers, "STRAIGHT_BYTES", request.param)
    monkeypatch.setattr(copiers, "STRAIGHT_ROW_BYTES", request.param)


@pytest.mark.usefixtures("straight_bytes")
@pytest.mark.parametrize("scratch_slots", [1, 7, 200])
@pytest.mark.parametrize("neighbours", [True, False])
def test_as_the_host_copier(layers, arena, scratch_slots, neighbours):
    assert make_lanes().copies_rows, "torch's CUDA runtime was not found"
    chance = random.Random(scratch_slots)
    count = 50
    slots = list(range(9, 9 + count)) if neighbours else chance.sample(range(SLOTS), count)
    sources = chance.sample(range(BLOCKS), count)
    copier = CudaCopier([LayerBlocks(layers)], make_lanes(), 4 * scratch_slots * arena.slot_sizes[0])

    on_host = [copied(layer) for layer in layers]
    reference = Arena(arena.slot_sizes, arena.slot_counts, pin=False)
    HostCopier([LayerBlocks(on_host)]).gather(0, sources, Slots(reference, 0, slots))
    copier.gather(0, sources, Slots(arena, 0, slots), after=copier.compute_done()).synchronize()
    assert torch.equal(arena.tensor(0)[slots, HEADER_BYTES:], reference.tensor(0)[slots, HEADER_BYTES:])

    targets = chance.sample(range(BLOCKS), count)
    HostCopier([LayerBlocks(on_host)]).scatter(0, Slots(reference, 0, slots), targets)
    copier.scatter(0, Slots(arena, 0, slots), targets, after=copier.compute_done()).synchronize()
    for layer, expected in zip(layers, on_host, strict=True):
        assert torch.equal(layer.cpu(), expected)
    reference.close()


@pytest.mark.usefixtures("straight_bytes")
def test_copies_in_small_pieces_bring_all(layers, arena, monkeypatch):
    """As those of large slots are cut, the last piece of some of them smaller."""
    monkeypatch.setattr(copiers, "COPY_BYTES", 50_000)
    copier, blocks = CudaCopier([LayerBlocks(layers)], make_lanes(), 64 << 20), list(range(20, 40))
    slots, before = list(range(3, 23)), [copied(layer) for layer in layers]
    copier.gather(0, blocks, Slots(arena, 0, slots), after=copier.compute_done()).synchronize()
    payload = torch.cat([old[blocks] for old in before], 1)
    assert torch.equal(arena.tensor(0)[slots, HEADER_BYTES : HEADER_BYTES + payload.shape[1]], payload)
    for layer in layers:
        layer.zero_()
    copier.scatter(0, Slots(arena, 0, slots), blocks, after=copier.compute_done()).synchronize()
    for layer, old in zip(layers, before, strict=True):
        assert torch.equal(layer[blocks].cpu(), old[blocks])
        assert not layer[:20].any() and not layer[40:].any()


@pytest.mark.usefixtures("straight_bytes")
def test_a_scatter_leaves_out_what_is_not_wanted_of_slots_of_two_blocks(layers):
    """As where the engine has computed the first block of a slot itself."""
    payload_bytes, count, left_out = 2 * sum(layer.shape[1] for layer in layers), 20, {0, 3, 4, 5, 6, 11, 19}
    blocks, slots = list(range(10, 10 + count)), list(range(1, 1 + count // 2))
    copier = CudaCopier([LayerBlocks(layers, 2)], make_lanes(), 64 << 20)
    before = [copied(layer) for layer in layers]
    with closing(Arena([HEADER_BYTES + round_up(payload_bytes, ALIGNMENT)], [SLOTS // 2], pin=PIN)) as arena:
        arena.await_pinned()
        copier.gather(0, blocks, Slots(arena, 0, slots), after=copier.compute_done()).synchronize()
        targets = [NO_BLOCK if at in left_out else 50 + at for at in range(count)]
        copier.scatter(0, Slots(arena, 0, slots), targets, after=copier.compute_done()).synchronize()
    for layer, old in zip(layers, before, strict=True):
        for at, block in enumerate(blocks):
            old[50 + at] = old[50 + at] if at in left_out else old[block]
        assert torch.equal(layer.cpu(), old)


def test_what_is_not_pinned_is_copied_as_well(layers, arena):
    """As while the pinning goes on, or where the driver refused it."""
    loose = Arena(arena.slot_sizes, arena.slot_counts, pin=False)
    copier, slots = CudaCopier([LayerBlocks(layers)], make_lanes(), 64 << 20), list(range(20))
    before = [layer.clone() for layer in layers]
    copier.gather(0, slots, Slots(loose, 0, slots), after=copier.compute_done()).synchronize()
    for layer in layers:
        layer[:20] = 0
    copier.scatter(0, Slots(loose, 0, slots), slots, after=copier.compute_done()).synchronize()
    assert all(torch.equal(layer, old) for layer, old in zip(layers, before, strict=True))
    loose.close()


@needs_cuda
def test_a_gpu_without_any_memory_left_copies_as_before():
    layers, some = separate(8, 16384), list(range(20))
    before, slot_bytes = [copied(layer) for layer in layers], HEADER_BYTES + 8 * 16384
    copier, taken, size = CudaCopier([LayerBlocks(layers)], make_lanes(), 64 << 20), [], 1 << 30
    with closing(Arena([slot_bytes], [SLOTS], pin=PIN)) as arena:
        arena.await_pinned()

        def there_and_back():
            copier.gather(0, some, Slots(arena, 0, some), after=copier.compute_done()).synchronize()
            copier.scatter(0, Slots(arena, 0, some), some, after=copier.compute_done()).synchronize()

        there_and_back()  # what CUDA loads at first use needs memory
        arena.tensor(0).zero_()
        try:
            while size >= 512:
                try:
                    taken.append(torch.empty(size, dtype=torch.uint8, device=GPU))
                except torch.OutOfMemoryError:
                    size //= 2
            there_and_back()
        finally:
            taken.clear()
            torch.cuda.empty_cache()
        stored = arena.tensor(0)[:20, HEADER_BYTES:]
        assert torch.equal(stored, torch.cat([old[:20] for old in before], 1))
    assert all(torch.equal(layer.cpu(), old) for layer, old in zip(layers, before, strict=True))


def test_a_gather_waits_for_the_model_and_sees_what_it_wrote(layers, arena):
    copier = CudaCopier([LayerBlocks(layers)], make_lanes(), 64 << 20)
    # What CUDA makes at first use, such as memory, could wait for the model.
    copier.gather(0, list(range(10)), Slots(arena, 0, list(range(10)))).synchronize()
    synchronize()
    keep_busy()
    for layer in layers:
        layer.fill_(0x5A)
    mark = copier.compute_done()
    ticket = copier.gather(0, list(range(10)), Slots(arena, 0, list(range(10))), after=mark)
    assert REHEARSED or not ticket.query()
    ticket.synchronize()
    assert ticket.query()
    payload = sum(layer.shape[1] for layer in layers)
    assert (arena.tensor(0)[:10, HEADER_BYTES : HEADER_BYTES + payload] == 0x5A).all()


def test_a_scatter_waits_for_earlier_work_on_the_blocks(layers, arena):
    """The blocks' last owner may still write them; what was scattered must win."""
    arena.tensor(0).fill_(0x11)
    copier = CudaCopier([LayerBlocks(layers)], make_lanes(), 64 << 20)
    synchronize()
    keep_busy()
    for layer in layers:
        layer.fill_(0xFF)
    ticket = copier.scatter(0, Slots(arena, 0, [1, 2, 3]), [30, 10, 20], after=copier.compute_done())
    ticket.synchronize()
    synchronize()
    for layer in layers:
        assert (layer[[30, 10, 20]] == 0x11).all()
        assert (layer[[29, 31, 0]] == 0xFF).all()


def test_stores_and_loads_at_once_do_not_mix(layers, arena):
    """Both lanes at work, each with its scratch: many parts of both kinds, nothing waited for in
    between."""
    copier = CudaCopier([LayerBlocks(layers)], make_lanes(), 4 * arena.slot_sizes[0])
    before = [copied(layer) for layer in layers]
    arena.tensor(0)[40:].fill_(0x33)
    tickets = []
    for at in range(40):
        tickets += [
            copier.gather(0, [at], Slots(arena, 0, [at])),
            copier.scatter(0, Slots(arena, 0, [40 + at]), [50 + at]),
        ]
    for ticket in tickets:
        ticket.synchronize()
    offset = HEADER_BYTES
    for layer, old in zip(layers, before, strict=True):
        assert torch.equal(arena.tensor(0)[:40, offset : offset + layer.shape[1]], old[:40])
        assert (layer[50:90] == 0x33).all()
        assert torch.equal(layer[:50].cpu(), old[:50])
        offset += layer.shape[1]


@pytest.mark.usefixtures("straight_bytes")
def test_the_model_does_not_write_what_is_still_gathered(layers, arena):
    lanes = make_lanes()
    copier, some = CudaCopier([LayerBlocks(layers)], lanes, 64 << 20), list(range(10))
    before = [copied(layer) for layer in layers]
    copier.gather(0, some, Slots(arena, 0, some)).synchronize()
    arena.tensor(0).zero_()
    synchronize()
    keep_busy(lanes)
    ticket = copier.gather(0, some, Slots(arena, 0, some))
    copier.hold_model()
    for layer in layers:
        layer.fill_(0xFF)
    assert REHEARSED or not ticket.query()
    ticket.synchronize()
    synchronize()
    offset = HEADER_BYTES
    for layer, old in zip(layers, before, strict=True):
        assert torch.equal(arena.tensor(0)[:10, offset : offset + layer.shape[1]], old[:10])
        assert (layer == 0xFF).all()
        offset += layer.shape[1]


def two_in_one_buffer() -> list[list[torch.Tensor]]:
    """Groups of other sizes in one buffer, one behind the other, as vLLM's hybrids have them."""
    sizes = (1000, 8450)
    raw, start, found = random_bytes(sum(4 * BLOCKS * size + 64 for size in sizes)), 0, []
    for size in sizes:
        start += 32
        layers = [raw.as_strided((BLOCKS, size), (size, 1), start + at * BLOCKS * size) for at in range(4)]
        start += 4 * BLOCKS * size + 32
        found.append(layers)
    return found


@pytest.mark.usefixtures("straight_bytes")
@pytest.mark.parametrize("group", [0, 1])
def test_every_part_of_every_group_waits_for_the_model(group):
    """Each part of a copy has one slot, and none begins before what the model was given first."""
    groups = two_in_one_buffer()
    sizes = [HEADER_BYTES + round_up(sum(layer.shape[1] for layer in layers), ALIGNMENT) for layers in groups]
    copier = CudaCopier([LayerBlocks(layers) for layers in groups], make_lanes(), 0)
    layers, some = groups[group], list(range(6))
    payload = slice(HEADER_BYTES, HEADER_BYTES + sum(layer.shape[1] for layer in layers))
    with closing(Arena(sizes, [SLOTS] * len(sizes), pin=PIN)) as arena:
        arena.await_pinned()
        slots = Slots(arena, group, some)
        copier.gather(group, some, slots, copier.compute_done()).synchronize()  # what is made at first use is there
        for number in (0x5A, 0x6B):
            synchronize()
            keep_busy()
            for layer in layers:
                layer.fill_(number)
            copier.gather(group, some, slots, copier.compute_done()).synchronize()
            assert (arena.tensor(group)[some, payload] == number).all()
        arena.tensor(group).fill_(0x11)
        keep_busy()
        for layer in layers:
            layer.fill_(0xFF)
        copier.scatter(group, slots, some, copier.compute_done()).synchronize()
        synchronize()
        for layer in layers:
            assert (layer[some] == 0x11).all() and (layer[6:] == 0xFF).all()


SIZES = {f"layers of {size}": (lambda size=size: [one_allocation(4, size)]) for size in (1000, 8450, 41984, 656 * 64)}


@pytest.mark.usefixtures("straight_bytes")
@pytest.mark.parametrize("make", [*SIZES.values(), two_in_one_buffer], ids=[*SIZES, "two groups in one buffer"])
def test_layers_of_any_size_and_several_groups(make):
    groups = make()
    sizes = [HEADER_BYTES + round_up(sum(layer.shape[1] for layer in group), ALIGNMENT) for group in groups]
    copier = CudaCopier([LayerBlocks(group) for group in groups], make_lanes(), 1 << 20)
    with closing(Arena(sizes, [SLOTS] * len(sizes), pin=PIN)) as arena:
        arena.await_pinned()
        for at, layers in enumerate(groups):
            chance = random.Random(at)
            blocks, slots = chance.sample(range(BLOCKS), 40), chance.sample(range(SLOTS), 40)
            before = [copied(layer) for layer in layers]
            copier.gather(at, blocks, Slots(arena, at, slots), after=copier.compute_done()).synchronize()
            payload = arena.tensor(at)[slots, HEADER_BYTES : HEADER_BYTES + sum(layer.shape[1] for layer in layers)]
            assert torch.equal(payload, torch.cat([old[blocks] for old in before], 1))
            for layer in layers:
                layer.zero_()
            targets = chance.sample(range(BLOCKS), 40)
            copier.scatter(at, Slots(arena, at, slots), targets, after=copier.compute_done()).synchronize()
            for layer, old in zip(layers, before, strict=True):
                assert torch.equal(layer[targets].cpu(), old[blocks])
                assert not layer[[block for block in range(BLOCKS) if block not in targets]].any()


@pytest.mark.parametrize("shape", gpu_measures.SHAPES, ids=lambda shape: shape.name)
def test_kernels_reach_both_ends_of_a_cache_of_40_gib(shape):
    cache_bytes = (8 << 20) if REHEARSED else gpu_measures.LARGE_CACHE_BYTES
    if not REHEARSED and torch.cuda.mem_get_info()[0] < cache_bytes + (2 << 30):
        pytest.skip("the GPU has no 42 GiB free")
    pace = gpu_measures.Pace(1, 60.0)
    given = make_lanes(), shape, gpu_measures.LARGE_CACHE_BLOCK_BYTES, 32 * (192 << 10), pace, cache_bytes
    assert len(gpu_measures.measure_copies(*given)) == 2, "it compares all blocks"
    if not REHEARSED:
        torch.cuda.empty_cache()
