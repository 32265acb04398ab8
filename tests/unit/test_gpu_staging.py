# SPDX-License-Identifier: Apache-2.0
"""GPU staging over CPU tensors: the same sums as numpy's, whatever is asked for at once, and
headers both ways."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import CpuLanes

from kvdisk.device.checksum import multilinear_digest
from kvdisk.geometry import HEADER_BYTES, round_up
from kvdisk.worker.copier import Lane
from kvdisk.worker.gpu_staging import GpuStaging, PayloadSums

SIZES = (HEADER_BYTES + 8192, HEADER_BYTES + 4096)


@pytest.fixture
def staging():
    made = GpuStaging(SIZES, (6, 3), CpuLanes())
    yield made
    made.close()


@settings(max_examples=60, deadline=None)
@given(
    payload_bytes=st.one_of(st.integers(0, 3 * 4096), st.sampled_from([4096, 8192])),
    count=st.integers(1, 5),
    scratch_slots=st.integers(0, 3),
    seed=st.integers(0, 2**32),
)
def test_the_sums_are_those_of_numpy(payload_bytes, count, scratch_slots, seed):
    data = random.Random(seed).randbytes(count * (HEADER_BYTES + 3 * 4096))
    slots = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(count, -1)
    out = torch.zeros(count, 2, dtype=torch.int64)
    rows = round_up(payload_bytes, 4096)
    PayloadSums(torch.device("cpu"), 3 * 4096, scratch_slots * rows).of(slots, payload_bytes, out)
    for at in range(count):
        payload = data[at * slots.shape[1] + HEADER_BYTES :][:payload_bytes]
        assert out[at].numpy().tobytes() == multilinear_digest(memoryview(payload))
        assert bytes(slots[at, HEADER_BYTES : HEADER_BYTES + payload_bytes].numpy()) == payload
        assert not slots[at, HEADER_BYTES + payload_bytes : HEADER_BYTES + rows].any()


def test_headers_come_from_the_host_and_leave_payloads_alone(staging):
    staging.tensor(0).fill_(7)
    for slot in (0, 2, 3):
        staging.header(0, slot)[:] = bytes([slot + 1]) * HEADER_BYTES
    staging.start_sums(0, [0, 2, 3], 8192, Lane.STORE)
    staging.start_headers(0, [0, 2, 3])
    for slot in range(6):
        expected = slot + 1 if slot in {0, 2, 3} else 7
        assert (staging.tensor(0)[slot, :HEADER_BYTES] == expected).all()
    assert (staging.tensor(0)[:, HEADER_BYTES:] == 7).all()
