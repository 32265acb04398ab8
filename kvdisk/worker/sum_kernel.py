# SPDX-License-Identifier: Apache-2.0
"""A Triton kernel for the sums of ``gpu_staging``, which reads each payload once. Triton comes with
torch for CUDA, and vLLM needs it there; elsewhere nobody imports this."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROW_WORDS = tl.constexpr(512)
ROWS_AT_ONCE = 16
"""Rows of a payload that one program sums up: 64 KiB."""


@triton.jit(do_not_specialize=["most_rows", "slot_words", "rows"])  # type: ignore[untyped-decorator]
def _sum_rows(slots, words, of_rows, sums, most_rows, slot_words, rows, at_once: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum up ``at_once`` rows of one slot, in both lanes. Products and sums of signed words wrap
    like those of unsigned words."""
    slot, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, ROW_WORDS)
    in_order = tl.zeros((ROW_WORDS,), tl.int64)
    turned = tl.zeros((ROW_WORDS,), tl.int64)
    for row in range(part * at_once, tl.minimum(rows, (part + 1) * at_once)):
        word = tl.load(slots + slot * slot_words + row * ROW_WORDS + at)
        in_order += word * tl.load(of_rows + row)
        bits = word.to(tl.uint64, bitcast=True)
        bits = ((bits >> 8) & 0x00FF00FF00FF00FF) | ((bits & 0x00FF00FF00FF00FF) << 8)
        bits = ((bits >> 16) & 0x0000FFFF0000FFFF) | ((bits & 0x0000FFFF0000FFFF) << 16)
        bits = (bits >> 32) | (bits << 32)
        turned += bits.to(tl.int64, bitcast=True) * tl.load(of_rows + most_rows + row)
    out = sums + (slot * tl.num_programs(1) + part) * 2
    tl.store(out, tl.sum(in_order * tl.load(words + at)))
    tl.store(out + 1, tl.sum(turned * tl.load(words + ROW_WORDS + at)))


def parts_of(rows: int) -> int:
    """Return the number of programs that sum up a payload of so many rows."""
    return -(-rows // ROWS_AT_ONCE)


def sum_rows(payloads: torch.Tensor, words: torch.Tensor, of_rows: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Return the partial sums of payloads, int64 (n, words in whole rows), as int64 (n, parts, 2).

    ``words``, ``of_rows``: multipliers, int64 (lanes, words of a row) and (lanes, rows). ``sums``:
    memory for the result.
    """
    rows = payloads.shape[1] // ROW_WORDS.value
    found = sums[: payloads.shape[0] * parts_of(rows) * 2].view(payloads.shape[0], parts_of(rows), 2)
    given = payloads, words, of_rows, found, of_rows.shape[1], payloads.stride(0), rows
    _sum_rows[payloads.shape[0], parts_of(rows)](*given, at_once=ROWS_AT_ONCE)
    return found
