# SPDX-License-Identifier: Apache-2.0
"""SGLang's host pool, as the rows of a block store: pages are moved between drive and pool, or as
tensors through rows of kvdisk's own."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from kvdisk.errors import ConfigError
from kvdisk.store import Rows

STAGING_PAGES = 64
"""Pages of tensors that are on their way at once, in each direction."""


class PoolRows:
    """A pool's own memory as rows: a page is a block of as many pieces as it has places there.

    ``memory``: the rows of each of the pool's tensors, which this object keeps alive: one tensor's
    are as long as its pieces. ``piece_bytes``: of each piece of a page. ``element_bytes``: of one
    element, where all tensors have as many; else 1. ``first_row``: the number of the first row,
    where others' rows are before it. Raises ConfigError where the pool is laid out otherwise.
    """

    def __init__(self, pool: Any, first_row: int = 0) -> None:
        self._pool = pool
        self._tensors = _tensors_of(pool)
        self.page_size = int(pool.page_size)
        sizes_of = {tensor.element_size() for tensor in self._tensors}
        self.element_bytes: int = sizes_of.pop() if len(sizes_of) == 1 else 1
        try:
            pointers, sizes = pool.get_page_buffer_meta(torch.arange(self.page_size))
        except (NotImplementedError, ValueError) as error:
            raise ConfigError(f"kvdisk needs pages that SGLang says the places of, and it does not: {error}") from error
        self.piece_bytes = tuple(map(int, sizes))
        # SGLang: some pools keep scales and the like in tensors beside it, at addresses that a page
        # does not tell.
        if self.payload_bytes != self.page_size * int(pool.size_per_token):
            raise ConfigError("kvdisk needs a host pool whose pages are whole: with no scales kept beside them.")
        places = [_place_of(int(pointer), self._tensors) for pointer in pointers]
        sizes_in = dict(zip(places, self.piece_bytes, strict=True))
        if any(sizes_in[place] != size for place, size in zip(places, self.piece_bytes, strict=True)):
            raise ConfigError("kvdisk needs a host pool each of whose tensors has pieces of one size.")
        arrays = {place: _rows_in(self._tensors[place], sizes_in[place]) for place in sorted(sizes_in)}
        self.memory = list(arrays.values())
        starts = dict(zip(arrays, accumulate(map(len, self.memory), initial=first_row), strict=False))
        self._bases = np.array([self._tensors[place].data_ptr() for place in places], np.int64)
        self._counts = np.array([len(arrays[place]) for place in places], np.int64)
        self._starts = np.array([starts[place] for place in places], np.int64)
        """Of each piece: its tensor's address, that one's rows, and the number of the first."""
        self.rows_of(torch.arange(self.page_size))  # raises where a page begins within a row

    @property
    def payload_bytes(self) -> int:
        """Bytes of a page."""
        return sum(self.piece_bytes)

    def rows_of(self, host_indices: torch.Tensor) -> list[list[int]]:
        """Return the rows of each page, one for each piece. ``host_indices``: of every token of
        whole pages. Raises ConfigError where a piece is no row."""
        pointers, _ = self._pool.get_page_buffer_meta(host_indices)
        offsets = np.array(list(map(int, pointers)), np.int64).reshape(-1, len(self.piece_bytes)) - self._bases
        rows, rests = np.divmod(offsets, self.piece_bytes)
        if rests.any() or (rows < 0).any() or (rows >= self._counts).any():
            raise ConfigError("kvdisk needs a host pool whose pages begin where rows begin.")
        found: list[list[int]] = (rows + self._starts).tolist()
        return found


def _tensors_of(pool: Any) -> list[torch.Tensor]:
    """Return the tensors that a pool's pages lie in. Raises ConfigError where they are not in this
    host's memory."""
    if pool.layout not in PAGE_LAYOUTS:
        raise ConfigError(f"kvdisk does not know SGLang's layout of host memory {pool.layout}.")
    # SGLang: pools that are no plain tensor say so by this method; MLA has none.
    tensors = pool.get_hybrid_pool_buffer() if hasattr(pool, "get_hybrid_pool_buffer") else [pool.kv_buffer]
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ConfigError("kvdisk needs a host pool that is contiguous tensors in host memory.")
    return tensors


def _place_of(pointer: int, tensors: Sequence[torch.Tensor]) -> int:
    """Return which of some tensors an address is in. Raises ConfigError where it is in none."""
    for place, tensor in enumerate(tensors):
        if 0 <= pointer - tensor.data_ptr() < tensor.numel() * tensor.element_size():
            return place
    raise ConfigError("kvdisk needs a host pool whose pages lie in its own memory.")


def _rows_in(tensor: torch.Tensor, row_bytes: int) -> Rows:
    """Return a tensor's memory as rows of so many bytes each."""
    count = tensor.numel() * tensor.element_size() // row_bytes
    flat = np.ctypeslib.as_array((ctypes.c_uint8 * (count * row_bytes)).from_address(tensor.data_ptr()))
    return flat.reshape(count, row_bytes)


PAGE_LAYOUTS = ("page_first", "page_first_direct", "page_head", "layer_first")
"""SGLang's layouts of host memory. In the last one each layer of a page is a piece of its own."""


class StagingRows:
    """Rows of kvdisk's own, for pages that SGLang gives and takes as tensors, in any layout: one
    row a page. One thread at a time may put, and one may get: each has half of the rows, and holds
    ``putting`` or ``getting`` until its job has ended."""

    def __init__(self, pool: Any) -> None:
        page = pool.get_dummy_flat_data_page()
        self.page_size = int(pool.page_size)
        self.element_bytes: int = page.element_size()
        self.payload_bytes = page.numel() * self.element_bytes
        self.piece_bytes = (self.payload_bytes,)
        self._rows: Rows = np.zeros((2 * STAGING_PAGES, self.payload_bytes), np.uint8)
        self.memory = [self._rows]
        self.putting, self.getting = threading.Lock(), threading.Lock()

    def fill(self, values: Sequence[torch.Tensor]) -> list[int]:
        """Copy pages into rows to put, and return these. Raises ValueError where one has another
        size."""
        rows = list(range(len(values)))
        for row, value in zip(rows, values, strict=True):
            self._rows[row] = self._bytes(value.contiguous())
        return rows

    def rows_to_get(self, count: int) -> list[int]:
        """Return rows to get so many pages into."""
        return list(range(STAGING_PAGES, STAGING_PAGES + count))

    def take(self, row: int, target: torch.Tensor) -> None:
        """Copy a page out of a row. Raises ValueError where the target is no page."""
        if not target.is_contiguous():
            raise ValueError("a page is read into a contiguous tensor")
        self._bytes(target)[:] = self._rows[row]

    def _bytes(self, tensor: torch.Tensor) -> Any:
        flat = tensor.view(torch.uint8).flatten().numpy()
        if len(flat) != self.payload_bytes:
            raise ValueError(f"a page has {self.payload_bytes} bytes, and not {len(flat)}")
        return flat
