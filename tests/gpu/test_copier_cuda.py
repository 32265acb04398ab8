# SPDX-License-Identifier: Apache-2.0
"""The CUDA copier against the host's, on a real device. Run with ``-m gpu``."""

from __future__ import annotations

import random

import pytest
import torch

from kvdisk.geometry import ALIGNMENT, HEADER_BYTES, round_up
from kvdisk.worker import arena as arenas
from kvdisk.worker import copier as copiers
from kvdisk.worker.arena import Arena
from kvdisk.worker.copier import CudaCopier, CudaLanes, HostCopier, LayerBlocks, Slots

pytestmark = pytest.mark.gpu

BLOCKS, SLOTS = 96, 80


def one_allocation(layers: int, layer_bytes: int) -> list[torch.Tensor]:
    """As vLLM lays it out: all layers in one allocation."""
    return list(torch.randint(0, 256, (layers, BLOCKS, layer_bytes), dtype=torch.uint8, device="cuda").unbind(0))


def separate(layers: int, layer_bytes: int) -> list[torch.Tensor]:
    return [torch.randint(0, 256, (BLOCKS, layer_bytes), dtype=torch.uint8, device="cuda") for _ in range(layers)]


def within_blocks(layers: int, layer_bytes: int) -> list[torch.Tensor]:
    whole = torch.randint(0, 256, (BLOCKS, layers * layer_bytes), dtype=torch.uint8, device="cuda")
    return list(whole.split(layer_bytes, dim=1))


def interleaved(layers: int, layer_bytes: int) -> list[torch.Tensor]:
    """Two kinds that take turns, as MLA and its indexer do."""
    kinds = [one_allocation(layers // 2, size) for size in (layer_bytes, layer_bytes // 8)]
    return [layer for pair in zip(*kinds, strict=True) for layer in pair]


@pytest.fixture(params=[one_allocation, separate, within_blocks, interleaved])
def layers(request):
    return request.param(8, 16384)


@pytest.fixture
def arena(layers, monkeypatch):
    payload = sum(layer.shape[1] for layer in layers)
    slot_bytes = HEADER_BYTES + round_up(payload, ALIGNMENT)
    monkeypatch.setattr(arenas, "PIECE_BYTES", 7 * slot_bytes)  # copies may not go across two of them
    made = Arena([slot_bytes], [SLOTS], pin=True)
    made.await_pinned()
    assert len(made._pinned) == -(-SLOTS // 7)
    yield made
    made.close()


@pytest.fixture(params=[0, 1 << 60], ids=["straight", "through scratch"])
def straight_bytes(request, monkeypatch):
    monkeypatch.setattr(copiers, "STRAIGHT_BYTES", request.param)
    monkeypatch.setattr(copiers, "STRAIGHT_ROW_BYTES", request.param)


@pytest.mark.usefixtures("straight_bytes")
@pytest.mark.parametrize("scratch_slots", [1, 7, 200])
@pytest.mark.parametrize("neighbours", [True, False])
def test_as_the_host_copier(layers, arena, scratch_slots, neighbours):
    assert CudaLanes().copies_rows, "torch's CUDA runtime was not found"
    chance = random.Random(scratch_slots)
    count = 50
    slots = list(range(9, 9 + count)) if neighbours else chance.sample(range(SLOTS), count)
    sources = chance.sample(range(BLOCKS), count)
    copier = CudaCopier([LayerBlocks(layers)], CudaLanes(), 4 * scratch_slots * arena.slot_sizes[0])

    on_host = [layer.cpu() for layer in layers]
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


def test_what_is_not_pinned_is_copied_as_well(layers, arena):
    """As while the pinning goes on, or where the driver refused it."""
    loose = Arena(arena.slot_sizes, arena.slot_counts, pin=False)
    copier, slots = CudaCopier([LayerBlocks(layers)], CudaLanes(), 64 << 20), list(range(20))
    before = [layer.clone() for layer in layers]
    copier.gather(0, slots, Slots(loose, 0, slots), after=copier.compute_done()).synchronize()
    for layer in layers:
        layer[:20] = 0
    copier.scatter(0, Slots(loose, 0, slots), slots, after=copier.compute_done()).synchronize()
    assert all(torch.equal(layer, old) for layer, old in zip(layers, before, strict=True))
    loose.close()


def test_a_gather_waits_for_the_model_and_sees_what_it_wrote(layers, arena):
    copier = CudaCopier([LayerBlocks(layers)], CudaLanes(), 64 << 20)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # the model is still computing
    for layer in layers:
        layer.fill_(0x5A)
    mark = copier.compute_done()
    ticket = copier.gather(0, list(range(10)), Slots(arena, 0, list(range(10))), after=mark)
    assert not ticket.query()
    ticket.synchronize()
    assert ticket.query()
    payload = sum(layer.shape[1] for layer in layers)
    assert (arena.tensor(0)[:10, HEADER_BYTES : HEADER_BYTES + payload] == 0x5A).all()


def test_a_scatter_waits_for_earlier_work_on_the_blocks(layers, arena):
    """The blocks' last owner may still write them; what was scattered must win."""
    arena.tensor(0).fill_(0x11)
    copier = CudaCopier([LayerBlocks(layers)], CudaLanes(), 64 << 20)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    for layer in layers:
        layer.fill_(0xFF)
    ticket = copier.scatter(0, Slots(arena, 0, [1, 2, 3]), [30, 10, 20], after=copier.compute_done())
    ticket.synchronize()
    torch.cuda.synchronize()
    for layer in layers:
        assert (layer[[30, 10, 20]] == 0x11).all()
        assert (layer[[29, 31, 0]] == 0xFF).all()


def test_stores_and_loads_at_once_do_not_mix(layers, arena):
    """Both lanes at work, each with its scratch: many parts of both kinds, nothing waited for in
    between."""
    copier = CudaCopier([LayerBlocks(layers)], CudaLanes(), 4 * arena.slot_sizes[0])
    before = [layer.cpu() for layer in layers]
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
