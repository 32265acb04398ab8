# SPDX-License-Identifier: Apache-2.0
"""A GPU's checksums over CPU tensors: the same as numpy's, whatever is asked for at once."""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdisk.device.checksum import multilinear_digest
from kvdisk.geometry import HEADER_BYTES, round_up
from kvdisk.worker import gpu_staging
from kvdisk.worker.gpu_staging import PayloadSums


@settings(max_examples=60)
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


@pytest.mark.parametrize("byte", [0, 0x7F, 0x80, 0xFF])
@pytest.mark.parametrize("payload_bytes", [1, 4095, 4097, 33 * 4096 + 7, 300_000])
def test_extreme_bytes_overflow_nothing(byte, payload_bytes):
    slot_bytes = HEADER_BYTES + round_up(payload_bytes, 4096)
    slots = torch.full((17, slot_bytes), byte, dtype=torch.uint8)
    out = torch.zeros(17, 2, dtype=torch.int64)
    PayloadSums(torch.device("cpu"), payload_bytes).of(slots, payload_bytes, out)
    expected = multilinear_digest(memoryview(bytes([byte]) * payload_bytes))
    assert {each.numpy().tobytes() for each in out} == {expected}


def test_where_triton_cannot_run_its_kernel_torch_computes_the_sums(monkeypatch, caplog):
    """Triton is not here at all."""
    monkeypatch.setitem(sys.modules, "triton", None)
    assert gpu_staging._kernel_for(SimpleNamespace(type="cuda")) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "torch computes them" in record.message
    assert gpu_staging._kernel_for(torch.device("cpu")) is None and len(caplog.records) == 1
