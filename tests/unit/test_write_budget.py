# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from kvdisk.config import Config
from kvdisk.engine_store import make_budget
from kvdisk.errors import ConfigError
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.manager.write_budget import WriteBudget

DAY_S = 86_400.0
BLOCK = 1000


@pytest.mark.parametrize("blocks_a_day", [2, 10, 100, 10_000])
def test_no_24_hours_see_more_than_the_budget_and_all_of_it_can_be_used(blocks_a_day):
    source = random.Random(blocks_a_day)
    budget, now, written = WriteBudget.within(blocks_a_day * BLOCK, DAY_S, BLOCK), 0.0, []
    while now < 6 * DAY_S:
        now += source.choice((0.1, 10.0, 600.0, 4000.0))
        if budget.refresh(now):
            count = source.randint(0, budget.affords(BLOCK))
            budget.spend(count, BLOCK)
            written.append((now, count))
    for start_s, _ in written:
        in_a_day = sum(count for at_s, count in written if start_s <= at_s < start_s + DAY_S)
        assert in_a_day <= blocks_a_day
    assert sum(count for _, count in written) >= 0.4 * 6 * (blocks_a_day - max(1, blocks_a_day / 24)) - 1


def test_a_clock_that_goes_back_takes_nothing_out_and_gives_nothing_twice():
    budget, block_s = WriteBudget.within(2400 * BLOCK, DAY_S, BLOCK), DAY_S / 2300
    budget.refresh(10 * DAY_S)
    assert budget.refresh(11 * DAY_S)
    before = budget.left_bytes
    assert budget.refresh(0.0) and budget.left_bytes == before
    budget.spend(budget.affords(BLOCK), BLOCK)
    assert not budget.refresh(block_s) and budget.left_bytes <= BLOCK


def test_it_starts_empty_and_a_spent_one_pauses_until_a_run_of_blocks_is_back():
    budget, block_s = WriteBudget.within(2400 * BLOCK, DAY_S, BLOCK), DAY_S / 2300
    for start_s in (5.0, 5.0 + DAY_S):
        assert not budget.refresh(start_s) and budget.affords(BLOCK) == 0
        assert not budget.refresh(start_s + 63 * block_s) and not budget.take_resumed()
        assert budget.refresh(start_s + 65 * block_s)
        assert budget.take_resumed() and not budget.take_resumed(), "told once"
        assert not budget.spend(60, BLOCK)
        assert budget.refresh(start_s + 66 * block_s) and 5 <= budget.affords(BLOCK) <= 6
        budget.refresh(5.0 + DAY_S)
        assert budget.spend(budget.affords(BLOCK), BLOCK), "it is used up"


def test_a_budget_below_two_blocks_is_refused():
    geometry = Geometry((GroupGeometry(0, 2, 4096),), 2, 2)
    assert make_budget(SimpleNamespace(nvme_write_bytes_per_day=32768), geometry) is not None
    assert make_budget(Config(), geometry) is None
    with pytest.raises(ConfigError, match="two blocks of 16384 bytes"):
        make_budget(SimpleNamespace(nvme_write_bytes_per_day=32767), geometry)
