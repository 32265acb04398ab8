# SPDX-License-Identifier: Apache-2.0
"""GPU staging on a real GPU: the sums are numpy's, headers go both ways, and what one way sealed
the other verifies."""

from __future__ import annotations

import random

import pytest
import torch

from kvdisk.device.checksum import multilinear_digest
from kvdisk.geometry import ALIGNMENT, HEADER_BYTES, round_up
from kvdisk.worker.copier import CudaCopier, CudaLanes, Lane, LayerBlocks, Slots
from kvdisk.worker.gpu_staging import GpuStaging, PayloadSums

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")


def make_lanes():
    return CudaLanes()


@pytest.mark.parametrize("payload_bytes", [1, 4095, 4096, 100_000, 1 << 20, (8 << 20) + 24])
@pytest.mark.parametrize("count", [1, 3, 17])
def test_the_sums_are_those_of_numpy(payload_bytes, count):
    slot_bytes = HEADER_BYTES + round_up(payload_bytes, ALIGNMENT)
    slots = torch.randint(0, 256, (count, slot_bytes), dtype=torch.uint8, device=GPU)
    before = slots.cpu().numpy()
    out = torch.zeros(count, 2, dtype=torch.int64, device=GPU)
    PayloadSums(GPU, payload_bytes).of(slots, payload_bytes, out)
    found = out.cpu().numpy()
    for at in range(count):
        payload = before[at, HEADER_BYTES : HEADER_BYTES + payload_bytes]
        assert found[at].tobytes() == multilinear_digest(memoryview(payload))


@pytest.fixture
def parts():
    """Staging for blocks of 8 layers of 16 KiB, the layers, and a copier over them."""
    lanes = make_lanes()
    layers = list(torch.randint(0, 256, (8, 96, 16384), dtype=torch.uint8, device=GPU).unbind(0))
    payload_bytes = 8 * 16384
    staging = GpuStaging([HEADER_BYTES + payload_bytes], [32], lanes)
    yield lanes, layers, CudaCopier([LayerBlocks(layers)], lanes, 4 << 20), staging, payload_bytes
    staging.close()


@pytest.mark.parametrize("slots", [list(range(7, 27)), random.Random(1).sample(range(32), 20)])
def test_gather_sum_seal_sum_and_scatter(parts, slots):
    _, layers, copier, staging, payload_bytes = parts
    blocks = random.Random(2).sample(range(96), len(slots))
    payloads = [b"".join(layer[block].cpu().numpy().tobytes() for layer in layers) for block in blocks]
    copier.gather(0, blocks, Slots(staging, 0, slots), after=copier.compute_done()).synchronize()
    staging.start_sums(0, slots, payload_bytes, Lane.STORE).synchronize()
    for slot, payload in zip(slots, payloads, strict=True):
        assert staging.digest(0, slot) == multilinear_digest(memoryview(payload))
        staging.header(0, slot)[:] = bytes([slot]) * HEADER_BYTES
    staging.start_headers(0, slots).synchronize()
    for slot in slots:
        staging.header(0, slot)[:] = bytes(HEADER_BYTES)
    staging.start_sums(0, slots, payload_bytes, Lane.LOAD).synchronize()
    for slot, payload in zip(slots, payloads, strict=True):
        assert staging.digest(0, slot) == multilinear_digest(memoryview(payload))
        assert staging.header(0, slot) == bytes([slot]) * HEADER_BYTES
    for layer in layers:
        layer.zero_()
    targets = random.Random(3).sample(range(96), len(slots))
    copier.scatter(0, Slots(staging, 0, slots), targets, after=copier.compute_done()).synchronize()
    for target, payload in zip(targets, payloads, strict=True):
        assert b"".join(layer[target].cpu().numpy().tobytes() for layer in layers) == payload


def test_both_lanes_at_once_do_not_mix(parts):
    *_, staging, payload_bytes = parts
    staging.tensor(0).copy_(torch.randint(0, 256, staging.tensor(0).shape, dtype=torch.uint8, device=GPU))
    if GPU.type == "cuda":
        torch.cuda.synchronize()
    before = staging.tensor(0).cpu().numpy()
    tickets = []
    for at in range(16):
        tickets += [
            staging.start_sums(0, [at], payload_bytes, Lane.STORE),
            staging.start_sums(0, [16 + at], payload_bytes, Lane.LOAD),
        ]
    for ticket in tickets:
        ticket.synchronize()
    for slot in range(32):
        payload = before[slot, HEADER_BYTES : HEADER_BYTES + payload_bytes]
        assert staging.digest(0, slot) == multilinear_digest(memoryview(payload))
