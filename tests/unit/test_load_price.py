# SPDX-License-Identifier: Apache-2.0
"""What is learnt of the price of a load."""

from __future__ import annotations

import pytest

from kvdisk.blocks import JobId, Tier, make_block_key
from kvdisk.manager.jobs import JobRecord, MoveDetail
from kvdisk.manager.loads import LEAST_STEP_TOKENS, MOST_BLOCKS, TRIED_ANYWAY, LoadThreshold
from kvdisk.messages import Job, JobKind, Move, Reason

BLOCK = 16
STEP_TOKENS = 2048


class Engine:
    """Steps and loads, as a ``LoadThreshold`` hears of them: 20480 tokens a second, so that 2 ms
    are 2.56 blocks."""

    def __init__(self, fixed_tokens: int | None = None, steps: int = 40) -> None:
        self.price = LoadThreshold(fixed_tokens, BLOCK)
        self.now = 100.0
        for _ in range(steps):
            self.step(0.1)

    def step(self, seconds: float, tokens: int = STEP_TOKENS) -> None:
        """Run a step that takes so long."""
        self.price.stepped(self.now, tokens)
        self.now += seconds

    def load(self, seconds: float, tier: Tier, failed: Reason | None = None) -> None:
        """Run a load that takes so long, beside no step."""
        job = Job(JobId(1), JobKind.LOAD, (Move(make_block_key(b"", 0), 1, 1),), request_id="one")
        fails = {} if failed is None else {0: failed}
        record = JobRecord(job, [MoveDetail(0, source=tier)], "one", failed=fails, sent_s=self.now)
        self.step(seconds, 0)
        self.price.settled(record, self.now)

    def least(self) -> tuple[int, int]:
        return self.price.least_tokens(Tier.CPU), self.price.least_tokens(Tier.NVME)


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_every_hit_is_loaded_until_both_are_known(engine):
    assert engine.least() == (0, 0)
    alone = Engine(steps=0)
    alone.load(0.002, Tier.CPU)
    assert alone.least() == (0, 0)


def test_a_hit_is_worth_its_load_if_computing_it_takes_longer(engine):
    engine.load(0.0, Tier.CPU, failed=Reason.CHECKSUM)
    engine.load(0.0021, Tier.CPU)
    assert engine.least() == (2 * BLOCK, 0), "tier by tier"
    assert not engine.price.is_worth(BLOCK, Tier.CPU, arrival=1)
    assert engine.price.is_worth(2 * BLOCK, Tier.CPU, arrival=1)
    assert engine.price.is_worth(BLOCK, Tier.NVME, arrival=1)


def test_more_than_a_few_blocks_are_never_refused_and_a_short_hit_is_tried_now_and_then(engine):
    engine.load(3600.0, Tier.NVME)
    assert engine.least() == (0, MOST_BLOCKS * BLOCK)
    assert not engine.price.may_refuse(MOST_BLOCKS * BLOCK)
    tried = [arrival for arrival in range(3 * TRIED_ANYWAY) if engine.price.is_worth(BLOCK, Tier.NVME, arrival)]
    assert len(tried) == 3


def test_one_quick_load_counts_at_once_and_slow_ones_little_by_little(engine):
    engine.load(3600.0, Tier.NVME)
    engine.load(0.0001, Tier.NVME)
    assert engine.least() == (0, 0)
    counts = []
    for _ in range(12):
        engine.load(0.004, Tier.NVME)
        counts.append(engine.least()[1] // BLOCK)
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] >= 2


@pytest.mark.parametrize(
    ("seconds", "tokens"), [(0.0001, LEAST_STEP_TOKENS - 1), (600.0, STEP_TOKENS), (0.0, STEP_TOKENS)]
)
def test_decoding_and_pauses_say_nothing_about_the_rate(engine, seconds, tokens):
    for _ in range(100):
        engine.step(seconds, tokens)
    engine.load(0.0021, Tier.CPU)
    assert engine.least() == (2 * BLOCK, 0)


def test_what_the_user_gave_is_what_counts():
    engine = Engine(fixed_tokens=100)
    engine.load(0.0021, Tier.CPU)
    assert engine.least() == (100, 100)
    assert not engine.price.is_worth(99, Tier.CPU, arrival=0)
    assert engine.price.is_worth(100, Tier.CPU, arrival=1)
    assert not Engine(fixed_tokens=0).price.may_refuse(1)
