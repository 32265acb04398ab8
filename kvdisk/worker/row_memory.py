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
        self.arrays = arrays_of(memory)
        self._starts = [0, *accumulate(map(len, self.arrays))]

    def __len__(self) -> int:
        return self._starts[-1]

    def row_bytes(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many bytes rows have."""
        widths = np.array([array.shape[1] for array in self.arrays])
        return widths[np.searchsorted(self._starts, numbers, side="right") - 1]

    def gather(self, rows: Sequence[int], sizes: Sequence[int], payload: Rows) -> None:
        """Copy the first bytes of rows into a payload, one after the other. ``sizes``: how many, of
        each row. ``payload``: uint8, as long as all of them together."""
        whole = self._whole(rows, sizes)
        if whole is not None:  # one call: busy Python takes the interpreter between two
            array, first = whole
            np.take(array, np.subtract(rows, first), axis=0, out=payload.reshape(len(rows), -1), mode="clip")
            return
        end = 0
        for row, size in zip(rows, sizes, strict=True):
            payload[end : end + size] = self._row(row)[:size]
            end += size

    def scatter(self, payload: Rows, rows: Sequence[int], sizes: Sequence[int]) -> None:
        """Copy a payload into the first bytes of rows; what is behind them is left alone. See
        ``gather``."""
        whole = self._whole(rows, sizes)
        if whole is not None:
            array, first = whole
            array[np.subtract(rows, first)] = payload.reshape(len(rows), -1)
            return
        end = 0
        for row, size in zip(rows, sizes, strict=True):
            self._row(row)[:size] = payload[end : end + size]
            end += size

    def _row(self, number: int) -> Rows:
        at = self._at(number)
        row: Rows = self.arrays[at][number - self._starts[at]]
        return row

    def _at(self, number: int) -> int:
        """Return in which array a row is."""
        return bisect_right(self._starts, number) - 1

    def _whole(self, rows: Sequence[int], sizes: Sequence[int]) -> tuple[Rows, int] | None:
        """Return the array that has all of these rows, where they are whole and lie side by side in
        it, and the number of its first row."""
        if len(rows) == 1:
            return None  # a slice takes less time
        at = self._at(min(rows))
        array = self.arrays[at]
        is_one = max(rows) < self._starts[at + 1] and min(sizes) == max(sizes) == array.shape[1]
        return (array, self._starts[at]) if is_one and array.flags.c_contiguous else None
