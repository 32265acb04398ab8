# SPDX-License-Identifier: Apache-2.0
"""Rows of the catalog. ``test_lookup`` shows what can be loaded of its copies, ``test_tail_first``
and ``test_nvme_restore`` their chains."""

from __future__ import annotations

from kvdisk.blocks import BlockKey, Slot, Tier
from kvdisk.manager.catalog import Catalog


def test_rows_of_an_earlier_epoch_are_given_back_once() -> None:
    catalog, pair = Catalog(), [BlockKey(b"a"), BlockKey(b"ab")]
    old = [catalog.add(pair[0], 1, 0, None), catalog.add(pair[1], 2, 0, pair[0])]
    catalog.begin(old, Tier.CPU, [Slot(0, 0), Slot(0, 1)])
    catalog.finish(old, Tier.CPU)
    catalog.hide_all()
    catalog.drop(old[::-1], Tier.CPU)
    assert len(catalog) == 0
    rows = [catalog.add(BlockKey(b"%d" % number), 9, 1, None) for number in range(8)]
    assert len({*rows}) == len(rows)
