# SPDX-License-Identifier: Apache-2.0
"""The journal of copies: order, pieces, bound; and that the catalog tells of each copy once."""

from __future__ import annotations

from kvdisk.blocks import BlockKey, Slot, Tier, make_block_key
from kvdisk.manager.catalog import Catalog
from kvdisk.manager.events import BlockChange, Journal
from kvdisk.stats import Stats

KEYS = [make_block_key(bytes([number]) * 32, 0) for number in range(10)]


def told(journal: Journal) -> list[tuple[Tier, bool, list[BlockKey]]]:
    return [(tier, stored, list(keys)) for tier, stored, keys in journal.take().changes]


def test_when_too_much_waits_all_is_forgotten_and_that_is_said() -> None:
    stats = Stats()
    journal = Journal(stats, most_waiting=3)
    journal.note(Tier.NVME, True, KEYS[:1])
    journal.take()
    journal.note(Tier.NVME, True, KEYS[1:4])
    for key in KEYS[4:7]:
        journal.note(Tier.CPU, True, (key,))
    assert stats["lost_events"] == 3 + 2, "what was taken is not lost"
    taken = journal.take()
    assert taken.cleared
    assert taken.changes == [BlockChange(Tier.CPU, True, (KEYS[6],))]
    assert not journal.waits and not journal.take().cleared, "said once"


def test_the_catalog_tells_of_each_copy_that_can_be_read_and_of_its_end() -> None:
    catalog = Catalog()
    journal = catalog.journal = Journal(Stats())
    row = catalog.add(KEYS[0], 1, 0, None)
    catalog.begin((row,), Tier.CPU, (Slot(0, 0),))
    assert told(journal) == [], "it is being written"
    catalog.finish((row,), Tier.CPU)
    catalog.begin((row,), Tier.NVME, (Slot(0, 0),))
    catalog.doom(row, Tier.NVME)
    catalog.unpin((row,), Tier.NVME)
    catalog.drop((row,), Tier.NVME)
    assert told(journal) == [(Tier.CPU, True, [KEYS[0]])], "of the one that was never READY nothing"
    catalog.doom(row, Tier.CPU)
    assert told(journal) == [(Tier.CPU, False, [KEYS[0]])]
    catalog.drop((row,), Tier.CPU)
    assert told(journal) == [], "and not a second time"
