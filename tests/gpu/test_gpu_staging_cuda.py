# SPDX-License-Identifier: Apache-2.0
"""Checksums computed on a real GPU are those of numpy."""

from __future__ import annotations

import pytest
import torch
from place import GPU, REHEARSED

from kvdisk.device.checksum import multilinear_digest
from kvdisk.geometry import ALIGNMENT, HEADER_BYTES, round_up
from kvdisk.worker import gpu_staging
from kvdisk.worker.gpu_staging import PayloadSums

pytestmark = pytest.mark.gpu


@pytest.fixture(params=[True, False], ids=["by Triton's kernel", "by torch"])
def kernel(request, monkeypatch):
    """Whether there is one."""
    if not request.param:
        monkeypatch.setattr(gpu_staging, "_kernel_for", lambda _: None)
    return request.param and not REHEARSED


@pytest.mark.parametrize("payload_bytes", [1, 4095, 4096, 100_000, 1 << 20, (8 << 20) + 24])
@pytest.mark.parametrize("count", [1, 3, 17])
def test_the_sums_are_those_of_numpy(kernel, payload_bytes, count):
    slot_bytes = HEADER_BYTES + round_up(payload_bytes, ALIGNMENT)
    slots = torch.randint(0, 256, (count, slot_bytes), dtype=torch.uint8, device=GPU)
    before = slots.cpu().numpy()
    out = torch.zeros(count, 2, dtype=torch.int64, device=GPU)
    sums = PayloadSums(GPU, payload_bytes)
    assert (sums._kernel is not None) == kernel
    sums.of(slots, payload_bytes, out)
    found = out.cpu().numpy()
    for at in range(count):
        payload = before[at, HEADER_BYTES : HEADER_BYTES + payload_bytes]
        assert found[at].tobytes() == multilinear_digest(memoryview(payload))
