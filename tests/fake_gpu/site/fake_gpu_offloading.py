# SPDX-License-Identifier: Apache-2.0
"""The operation of vLLM's compiled library by which its offloading worker copies, upon the fake
GPU's runtime. It is a plugin of vLLM's, so that each of its processes has it."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

SCHEMA = "(Tensor src_ptrs, Tensor dst_ptrs, Tensor sizes, bool is_src_access_order_any=False) -> ()"
DEFAULT_STREAMS = (0, 1)
"""The legacy stream, by its two names."""
DEFAULT_KIND = 4
IN_STREAM_ORDER, IN_ANY_ORDER = 1, 3
"""When the sources of a batch may be read."""
STAND_INS = {
    "swap_blocks_batch": "A copy of the runtime's for each item, on the current stream, as vLLM's C++ gives them; the"
    " kernel that vLLM takes for many small pages is its own, in Triton.",
}
"""What stands in for parts of vLLM here, each with what it does."""


@cache
def _runtime() -> Any:
    """Return the runtime that torch has loaded. Other operations may run in its calls."""
    library = ctypes.CDLL("libcudart.so.13")
    place, count = ctypes.c_void_p, ctypes.c_size_t
    library.cudaMemcpyBatchAsync.argtypes = [place, place, place, count, place, place, count, place]
    library.cudaMemcpyAsync.argtypes = [place, place, count, ctypes.c_int, place]
    return library


def swap_blocks_batch(sources: Any, targets: Any, sizes: Any, any_order: bool = False) -> None:
    """Give the current stream a copy for each item of three lists, as vLLM's own does: one call of
    ``cudaMemcpyBatchAsync``, or, on the default stream, one ``cudaMemcpyAsync`` for each. The lists
    are read in the call.

    ``any_order``: the GPU may read the sources before the stream has come so far.
    """
    import torch

    stream, count = torch.cuda.current_stream().cuda_stream, len(sizes)
    if stream in DEFAULT_STREAMS:
        for each in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            _runtime().cudaMemcpyAsync(*each, DEFAULT_KIND, stream)
        return
    lists = (each.data_ptr() for each in (targets, sources, sizes))
    attributes = (ctypes.c_int * 6)(IN_ANY_ORDER if any_order else IN_STREAM_ORDER)  # no hints, no flags
    first = ctypes.c_size_t(0)
    if code := _runtime().cudaMemcpyBatchAsync(*lists, count, attributes, ctypes.byref(first), 1, stream):
        raise RuntimeError(f"cuMemcpyBatchAsync failed with error {code}")


@cache
def plugin() -> None:
    """Is called by vLLM in each of its processes as it starts."""
    import torch

    library = torch.library.Library("_C_cache_ops", "FRAGMENT")
    library.define(f"swap_blocks_batch{SCHEMA}")
    library.impl("swap_blocks_batch", swap_blocks_batch, "CPU")
    _kept.append(library)


_kept: list[Any] = []
"""What torch forgets with its last reference."""
