# SPDX-License-Identifier: Apache-2.0
"""Checksums computed on a real GPU are those of numpy."""

from __future__ import annotations

import pytest
import torch
from place import GPU

from kvdisk.device.checksum import multilinear_digest
from kvdisk.geometry import ALIGNMENT, HEADER_BYTES, round_up
from kvdisk.worker.gpu_staging import PayloadSums

pytestmark = pytest.mark.gpu


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
