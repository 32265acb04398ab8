# SPDX-License-Identifier: Apache-2.0
"""The hashes by which ``kvdisk why`` looks for a prompt are those of the installed vLLM."""

from __future__ import annotations

import random

import pytest
from vllm import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from kvdisk.cli.why import ENCODINGS, chain_hashes

CHANCE = random.Random(1)
TOKENS = [CHANCE.choice((0, 23, 24, 255, 256, 65535, 65536, CHANCE.randrange(1 << 31))) for _ in range(200)]


@pytest.mark.parametrize("algorithm", sorted(ENCODINGS))
@pytest.mark.parametrize("seed", [None, "0", "1234"])
@pytest.mark.parametrize("salt", [None, "tenant é 7"])
def test_hashes_are_those_of_vllm(monkeypatch, algorithm, seed, salt):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"", raising=False)
    monkeypatch.setattr(kv_cache_utils, "_NONE_HASH_SEED", None)
    hash_function = get_hash_fn_by_name(algorithm)
    kv_cache_utils.init_none_hash(hash_function)
    for size in (16, 32):
        request = Request(
            "r",
            TOKENS,
            SamplingParams(max_tokens=1),
            None,
            cache_salt=salt,
            block_hasher=kv_cache_utils.get_request_block_hasher(size, hash_function),
        )
        assert chain_hashes(TOKENS, size, algorithm, seed, salt) == request.block_hashes
        assert len(request.block_hashes) == len(TOKENS) // size
