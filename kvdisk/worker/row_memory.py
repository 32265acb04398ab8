# SPDX-License-Identifier: Apache-2.0
"""An engine's blocks as rows of host memory: in one array or several, and a block in one row or in
pieces."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.uint8]
"""uint8 (row count, row bytes): a row's bytes lie beside each other, rows at any distance."""


def arrays_of(memory: Rows | Sequence[Rows]) -> tuple[Rows, ...]:
    """Return the arrays of a memory, which may be one."""
    return (memory,) if isinstance(memory, np.ndarray) else tuple(memory)


class RowMemory:
    """Rows of all arrays, numbered through: those of the second go on behind the first's. The
    arrays stay the engine's. Any thread."""

    def __init__(self, memory: Rows | Sequence[Rows]) -> None:
        self._arrays = arrays_of(memory)
        self._starts = [0, *accumulate(map(len, self._arrays))]

    def __len__(self) -> int:
        return self._starts[-1]

    def row_bytes(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many bytes rows have."""
        widths = np.array([array.shape[1] for array in self._arrays])
        return widths[np.searchsorted(self._starts, numbers, side="right") - 1]

    def gather(self, rows: Sequence[int], sizes: Sequence[int], payload: Rows) -> None:
        """Copy the first bytes of rows into a payload, one after the other. ``sizes``: how many, of
        each row. ``payload``: uint8, as long as all of them together."""
        end = 0
        for row, size in zip(rows, sizes, strict=True):
            payload[end : end + size] = self._row(row)[:size]
            end += size

    def scatter(self, payload: Rows, rows: Sequence[int], sizes: Sequence[int]) -> None:
        """Copy a payload into the first bytes of rows; what is behind them is left alone. See
        ``gather``."""
        end = 0
        for row, size in zip(rows, sizes, strict=True):
            self._row(row)[:size] = payload[end : end + size]
            end += size

    def _row(self, number: int) -> Rows:
        at = bisect_right(self._starts, number) - 1
        row: Rows = self._arrays[at][number - self._starts[at]]
        return row
