# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from kvdisk import assembly
from kvdisk.config import Config
from kvdisk.errors import ConfigError
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.manager.write_budget import WriteBudget

DAY_S = 86_400.0
BLOCK = 1000


def test_it_starts_empty():
    budget = WriteBudget.of_day(2400 * BLOCK, BLOCK)
    assert not budget.refresh(5.0) and budget.affords(BLOCK) == 0
    assert not budget.refresh(5.0 + DAY_S / 2400), "one block is no run of blocks"
    assert budget.refresh(5.0 + 70 * DAY_S / 2400)
    assert 64 <= budget.affords(BLOCK) <= 70


@pytest.mark.parametrize("blocks_a_day", [2, 10, 100, 10_000])
def test_no_24_hours_see_more_than_the_budget_and_all_of_it_can_be_used(blocks_a_day):
    source = random.Random(blocks_a_day)
    budget, now, written = WriteBudget.of_day(blocks_a_day * BLOCK, BLOCK), 0.0, []
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


def test_a_spent_budget_pauses_until_a_run_of_blocks_is_back():
    budget = WriteBudget.of_day(2400 * BLOCK, BLOCK)
    budget.refresh(0.0)
    budget.refresh(DAY_S)
    assert budget.take_resumed() and not budget.take_resumed()
    assert budget.spend(100, BLOCK), "it is used up"
    one_block_s = DAY_S / 2300
    assert not budget.refresh(DAY_S + 63 * one_block_s)
    assert not budget.take_resumed()
    assert budget.refresh(DAY_S + 65 * one_block_s) and budget.take_resumed()
    assert not budget.spend(10, BLOCK)


def test_a_budget_below_two_blocks_is_refused():
    geometry = Geometry((GroupGeometry(0, 2, 4096),), 2, 2)
    for size, allowed in ((0, False), (32767, False), (32768, True)):
        config = SimpleNamespace(nvme_write_bytes_per_day=size)
        if allowed:
            assert assembly._make_budget(config, geometry) is not None
        else:
            with pytest.raises(ConfigError, match="two blocks of 16384 bytes"):
                assembly._make_budget(config, geometry)
    assert assembly._make_budget(Config(), geometry) is None
