# SPDX-License-Identifier: Apache-2.0
"""The compiled operations that vLLM calls for a latent KV cache (MLA), on the fake GPU. It is a
plugin of vLLM's, so that each of its processes has it."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

STAND_INS = {
    "concat_and_cache_mla": "One Triton program for all tokens.",
    "gather_and_maybe_dequant_cache": "Torch's indexing, by the same numbers on the GPU.",
    "merge_attn_states": "What vLLM does on CPUs.",
}
"""What stands in for parts of vLLM here, each with what it does."""
CONCAT = "(Tensor kv_c, Tensor k_pe, Tensor! kv_cache, Tensor slot_mapping, str kv_cache_dtype, Tensor scale) -> ()"
GATHER = (
    "(Tensor src_cache, Tensor! dst, Tensor block_table, Tensor cu_seq_lens, Tensor token_to_seq, int num_tokens,"
    " str kv_cache_dtype, Tensor scale, Tensor? seq_starts) -> ()"
)
MERGE = (
    "(Tensor! output, Tensor!? output_lse, Tensor prefix_output, Tensor prefix_lse, Tensor suffix_output,"
    " Tensor suffix_lse, int? prefill_tokens_with_context, Tensor? output_scale) -> ()"
)
UNCHANGED = "auto"


@triton.jit
def _concat_and_cache(
    latent,
    rope,
    cache,
    slots,
    latent_stride,
    rope_stride,
    page_stride,
    token_stride,
    page,
    count,
    LATENT: tl.constexpr,  # noqa: N803
    ROPE: tl.constexpr,  # noqa: N803
    COUNT: tl.constexpr,  # noqa: N803
):
    at = tl.arange(0, COUNT)
    slot = tl.load(slots + at, mask=at < count, other=-1)
    where = cache + slot // page * page_stride + slot % page * token_stride
    kept = (slot >= 0)[:, None]
    left, right = tl.arange(0, LATENT)[None, :], tl.arange(0, ROPE)[None, :]
    tl.store(where[:, None] + left, tl.load(latent + at[:, None] * latent_stride + left, mask=kept), mask=kept)
    tl.store(where[:, None] + LATENT + right, tl.load(rope + at[:, None] * rope_stride + right, mask=kept), mask=kept)


def concat_and_cache_mla(
    latent: torch.Tensor, rope: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, kind: str, scale: torch.Tensor
) -> None:
    """Write each token's two vectors to its slot; a token without one has a negative number."""
    assert kind == UNCHANGED
    strides = latent.stride(0), rope.stride(0), cache.stride(0), cache.stride(1)
    sizes = latent.shape[-1], rope.shape[-1], triton.next_power_of_2(len(slots))
    _concat_and_cache[(1,)](latent, rope, cache, slots, *strides, cache.shape[1], len(slots), *sizes)


def gather_and_maybe_dequant_cache(
    cache: torch.Tensor,
    target: torch.Tensor,
    block_table: torch.Tensor,
    begins: torch.Tensor,
    request_of: torch.Tensor,
    count: int,
    kind: str,
    scale: torch.Tensor,
    starts: torch.Tensor | None = None,
) -> None:
    """Gather ``count`` tokens of requests, one behind the other: of each those from ``starts``
    on."""
    assert kind == UNCHANGED
    request = request_of[:count].long()
    at = torch.arange(count, device=target.device) - begins[request]
    if starts is not None:
        at += starts[request]
    page = cache.shape[1]
    target[:count] = cache[block_table[request, at // page].long(), at % page]


def merge_attn_states(
    output: torch.Tensor,
    lse: torch.Tensor | None,
    prefix: Any,
    prefix_lse: Any,
    suffix: Any,
    suffix_lse: Any,
    *more: Any,
) -> None:
    """Merge attention to what came before a step, and to the step's own tokens, as vLLM does on
    CPUs."""
    from vllm.v1.attention.ops.merge_attn_states import _merge_attn_states_torch

    _merge_attn_states_torch(output, prefix, prefix_lse, suffix, suffix_lse, lse, *more)


@cache
def plugin() -> None:
    """Is called by vLLM in each of its processes as it starts."""
    for name, function, schema in (
        ("_C_cache_ops", concat_and_cache_mla, CONCAT),
        ("_C_cache_ops", gather_and_maybe_dequant_cache, GATHER),
        ("_C", merge_attn_states, MERGE),
    ):
        library = torch.library.Library(name, "FRAGMENT")
        library.define(f"{function.__name__}{schema}")
        library.impl(function.__name__, function, "CUDA")
        _kept.append(library)


_kept: list[Any] = []
"""What torch forgets with its last reference."""
