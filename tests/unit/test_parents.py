# SPDX-License-Identifier: Apache-2.0
"""Parents that are found by arrays at a start are those that a dictionary finds one by one."""

from __future__ import annotations

from array import array
from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvdisk.blocks import BlockKey
from kvdisk.index.base import BlockColumns
from kvdisk.manager import bounds
from kvdisk.manager import parents as module
from kvdisk.manager.catalog import NONE, TierColumns
from kvdisk.manager.parents import bytes_of, parents_among, without_circles

ODD_ENDS = st.sampled_from([b"\0\0", b"\0a", b"a\0", b"ab"])


def columns_of(keys: list[bytes], parents: list[bytes]) -> BlockColumns:
    count = len(keys)
    zeros, small = np.zeros(count, np.uint64), np.zeros(count, np.uint32)
    lengths = np.array(list(map(len, parents)), np.int64)
    named = [BlockKey(key) for key in keys]
    return BlockColumns(zeros, named, small, small, zeros, b"".join(parents), lengths, small, zeros)


@st.composite
def blocks(draw: st.DrawFn, lengths: st.SearchStrategy[int]) -> tuple[list[bytes], list[bytes]]:
    """Keys that ascend, and for each a parent among them, another key, or none."""
    key = lengths.flatmap(lambda length: st.binary(min_size=length, max_size=length))
    keys = draw(st.lists(st.builds(bytes.__add__, key, ODD_ENDS), unique=True, max_size=40))
    keys.sort()
    parent = st.builds(bytes.__add__, key, ODD_ENDS) | st.just(b"")
    some = st.sampled_from(keys) | parent if keys else parent
    return keys, [draw(some) for _ in keys]


@given(
    blocks(st.just(3)) | blocks(st.just(14)) | blocks(st.integers(0, 4)),
    st.sampled_from([0, 1 << 63, 0xFF << 56, 2**64 - 1]),
)
def test_arrays_find_what_a_dictionary_does(found, mask):
    """Where many keys begin alike, and where keys differ in length, too."""
    keys, parents = found
    rows = {key: row for row, key in enumerate(keys)}
    begins = module._begins
    with (
        mock.patch.object(module, "_AT_ONCE", 7),
        mock.patch.object(bounds, "ALIKE", 5),
        mock.patch.object(module, "_begins", lambda keys: begins(keys) & np.uint64(mask)),
    ):
        got = parents_among(columns_of(keys, parents), bytes_of([BlockKey(key) for key in keys]), rows)
    assert got.tolist() == [rows.get(parent, NONE) for parent in parents]


@given(st.lists(st.integers(NONE, 30), max_size=31))
def test_copies_are_hung_on_their_parents_as_one_by_one(wanted):
    count = len(wanted)
    parent_rows = array("i", [row if row < count and row != at else NONE for at, row in enumerate(wanted)])
    rows = without_circles(np.array(parent_rows, np.int32))
    parent_rows = array("i", rows.tolist())
    at_once, in_turn = (TierColumns(parent_rows, array("I", bytes(4 * count))) for _ in range(2))
    for columns in (at_once, in_turn):
        columns.grow(count)
    at_once.fill(np.zeros(count, np.uint32), np.arange(count, dtype=np.uint32))
    in_turn.link(range(count))
    for name in ("first_child", "next_child", "_previous_child"):
        assert getattr(at_once, name) == getattr(in_turn, name)
