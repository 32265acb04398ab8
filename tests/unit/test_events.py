# SPDX-License-Identifier: Apache-2.0
"""The journal of copies is bounded."""

from __future__ import annotations

from kvdisk.blocks import Tier, make_block_key
from kvdisk.manager.events import BlockChange, Journal
from kvdisk.stats import Stats

KEYS = [make_block_key(bytes([number]) * 32, 0) for number in range(10)]


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
