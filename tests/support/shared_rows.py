# SPDX-License-Identifier: Apache-2.0
"""Rows that a process of ours can map, too."""

from __future__ import annotations

import mmap
import os

import numpy as np

from kvdisk.store_face import Rows
from kvdisk.testing.store_conformance import ROW_BYTES


def make_shared_rows(count: int, row_bytes: int = ROW_BYTES, apart: int = 321) -> Rows:
    """Return rows of a file without a name, at a distance that is not aligned, full of ones."""
    pitch = row_bytes + apart
    file = os.memfd_create("rows")
    os.ftruncate(file, count * pitch)
    memory = mmap.mmap(file, count * pitch)  # shared; it keeps a descriptor of its own
    os.close(file)
    rows = np.frombuffer(memory, np.uint8).reshape(count, pitch)[:, :row_bytes]
    rows[:] = 1
    return rows
