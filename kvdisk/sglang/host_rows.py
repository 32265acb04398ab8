# SPDX-License-Identifier: Apache-2.0
"""SGLang's host pool, as the rows of a block store: pages are moved between drive and pool without
a copy, or as tensors through rows of kvdisk's own."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvdisk.errors import ConfigError
from kvdisk.store import Rows

STAGING_PAGES = 64
"""Pages of tensors that are on their way at once, in each direction."""


class PoolRows:
    """The pool's own memory as rows: a page is one row for each contiguous part of it, keys and
    values with MHA, one with MLA.

    ``memory``: all rows, over the pool's tensor, which this object keeps alive. ``parts``: rows of
    a page. ``payload_bytes``, ``element_bytes``: of a row, and of an element of it. Raises
    ConfigError where the pool is laid out otherwise.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._tensor = pool.kv_buffer
        self.page_size = int(pool.page_size)
        self._check(pool)
        pointers, sizes = pool.get_page_buffer_meta(torch.arange(self.page_size))
        self.parts, self.payload_bytes = len(pointers), int(sizes[0])
        self.element_bytes: int = self._tensor.element_size()
        self._base = self._tensor.data_ptr()
        pool_bytes = self._tensor.numel() * self._tensor.element_size()
        page_bytes = self.page_size * int(pool.size_per_token)
        # SGLang: some pools keep scales and the like in tensors beside it, at addresses that a page
        # does not tell.
        if len(set(map(int, sizes))) != 1 or self.parts * self.payload_bytes != page_bytes:
            raise ConfigError("kvdisk needs a host pool whose pages are whole: with no scales kept beside them.")
        if pool_bytes != int(pool.page_num) * page_bytes:
            raise ConfigError("kvdisk needs a host pool whose pages lie one behind the other.")
        flat = np.ctypeslib.as_array((ctypes.c_uint8 * pool_bytes).from_address(self._base))
        self.memory: Rows = flat.reshape(-1, self.payload_bytes)
        self.rows_of(torch.arange(self.page_size))  # raises where a page begins within a row

    @staticmethod
    def _check(pool: Any) -> None:
        if pool.layout not in PAGE_LAYOUTS:
            raise ConfigError(
                f"kvdisk needs pages that lie together: --hicache-mem-layout {pool.layout} has a page in pieces;"
                " use page_first, or page_first_direct with --hicache-io-backend direct."
            )
        whole = pool.kv_buffer
        if not isinstance(whole, torch.Tensor) or whole.device.type != "cpu" or not whole.is_contiguous():
            raise ConfigError("kvdisk needs a host pool that is one tensor in host memory.")

    def rows_of(self, host_indices: torch.Tensor) -> list[int]:
        """Return the rows of each page, its parts beside each other. ``host_indices``: of every
        token of whole pages. Raises ConfigError where a page is no row."""
        pointers, _ = self._pool.get_page_buffer_meta(host_indices)
        rows = [divmod(int(pointer) - self._base, self.payload_bytes) for pointer in pointers]
        if any(rest or not 0 <= row < len(self.memory) for row, rest in rows):
            raise ConfigError("kvdisk needs a host pool whose pages begin where rows begin.")
        return [row for row, _ in rows]


PAGE_LAYOUTS = ("page_first", "page_first_direct", "page_head")
"""SGLang's layouts of host memory in which each part of a page is contiguous."""


class StagingRows:
    """Rows of kvdisk's own, for pages that SGLang gives and takes as tensors, in any layout: one
    row a page. One thread at a time may put, and one may get: each has half of the rows, and holds
    ``putting`` or ``getting`` until its job has ended."""

    parts = 1

    def __init__(self, pool: Any) -> None:
        page = pool.get_dummy_flat_data_page()
        self.page_size = int(pool.page_size)
        self.element_bytes: int = page.element_size()
        self.payload_bytes = page.numel() * self.element_bytes
        self.memory: Rows = np.zeros((2 * STAGING_PAGES, self.payload_bytes), np.uint8)
        self.putting, self.getting = threading.Lock(), threading.Lock()

    def fill(self, values: Sequence[torch.Tensor]) -> list[int]:
        """Copy pages into rows to put, and return these. Raises ValueError where one has another
        size."""
        rows = list(range(len(values)))
        for row, value in zip(rows, values, strict=True):
            self.memory[row] = self._bytes(value.contiguous())
        return rows

    def rows_to_get(self, count: int) -> list[int]:
        """Return rows to get so many pages into."""
        return list(range(STAGING_PAGES, STAGING_PAGES + count))

    def take(self, row: int, target: torch.Tensor) -> None:
        """Copy a page out of a row. Raises ValueError where the target is no page."""
        if not target.is_contiguous():
            raise ValueError("a page is read into a contiguous tensor")
        self._bytes(target)[:] = self.memory[row]

    def _bytes(self, tensor: torch.Tensor) -> Any:
        flat = tensor.view(torch.uint8).flatten().numpy()
        if len(flat) != self.payload_bytes:
            raise ValueError(f"a page has {self.payload_bytes} bytes, and not {len(flat)}")
        return flat
