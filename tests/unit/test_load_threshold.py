# SPDX-License-Identifier: Apache-2.0
"""What is learnt of the price of a load: the shortest hit that is loaded from each tier."""

from __future__ import annotations

import pytest

from kvdisk.blocks import Tier
from kvdisk.manager.load_threshold import CAP_BLOCKS, LEAST_STEP_TOKENS, TRIED_ANYWAY, LoadThreshold

BLOCK = 16
CPU, NVME = Tier.CPU, Tier.NVME


def compute(price: LoadThreshold, seconds: float = 0.1, tokens: int = 2048) -> LoadThreshold:
    """Run steps that take so long each: by default 20480 tokens a second, so that 2 ms are 2.56
    blocks."""
    now = 100.0
    for _ in range(40):
        price.stepped(now, tokens)
        now += seconds
    return price


def blocks(price: LoadThreshold) -> tuple[float, float]:
    return price.least_tokens(CPU) / BLOCK, price.least_tokens(NVME) / BLOCK


def test_the_least_hit_is_what_is_computed_while_the_quickest_recent_load_takes_its_time():
    price = LoadThreshold(None, BLOCK)
    price.loaded(CPU, 0.0021)
    assert blocks(price) == (0, 0), "the engine's rate is not known"
    assert price.enough_tokens == 0
    compute(price)
    assert blocks(price) == (2, 0)
    price.loaded(NVME, 3600.0)
    assert blocks(price) == (2, CAP_BLOCKS)
    assert price.enough_tokens == CAP_BLOCKS * BLOCK, "as of the slowest tier"
    assert [price.is_worth(size * BLOCK, CPU, arrival=1) for size in (1, 2)] == [False, True]
    tried = [arrival for arrival in range(3 * TRIED_ANYWAY) if price.is_worth(BLOCK, NVME, arrival)]
    assert len(tried) == 3, "a short hit is loaded now and then"
    price.loaded(NVME, 0.0001)
    assert blocks(price) == (2, 0), "a quick load counts at once"
    assert price.enough_tokens == 2 * BLOCK
    found = []
    for _ in range(12):
        price.loaded(NVME, 0.004)
        found.append(blocks(price)[1])
    assert found == sorted(found) and found[0] == 0 and found[-1] >= 2, "and slow ones little by little"


@pytest.mark.parametrize(("seconds", "tokens"), [(0.0001, LEAST_STEP_TOKENS - 1), (600.0, 2048), (0.0, 2048)])
def test_decoding_and_pauses_say_nothing_about_the_rate(seconds, tokens):
    price = compute(compute(LoadThreshold(None, BLOCK)), seconds, tokens)
    price.loaded(CPU, 0.0021)
    assert blocks(price) == (2, 0)


def test_what_the_user_gave_is_what_counts():
    price = compute(LoadThreshold(100, BLOCK))
    price.loaded(CPU, 0.0021)
    assert [price.is_worth(tokens, CPU, arrival=0) for tokens in (99, 100)] == [False, True]
    assert LoadThreshold(0, BLOCK).enough_tokens == 0
