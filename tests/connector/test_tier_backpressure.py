# SPDX-License-Identifier: Apache-2.0
"""kvdisk's own detector of backpressure, in vLLM's real manager of tiers."""

from __future__ import annotations

from typing import Any

import pytest
from test_tier import Bench
from test_tier import make as make  # noqa: PLC0414 - a fixture
from test_tier_drive import DriveBench
from vllm.v1.kv_offload.tiering.backpressure import ThrottledDropPolicy
from vllm.v1.kv_offload.tiering.base import TieringOffloadingMetrics

from kvdisk.connector.backpressure import WriteBackpressure, WriteLoad
from kvdisk.errors import ConfigError
from kvdisk.tier_settings import DETECTOR, TierSettings

ASKED = {"backpressure_cls": DETECTOR}
ROWS = 64


class OnePolicy:
    """A policy of the user's, by its path: it asks the detector."""

    def should_store(self, detector: Any) -> bool:
        return not detector.is_under_pressure()

    def on_store_skipped(self, num_blocks: int) -> None: ...

    def pop_stores_dropped(self) -> tuple[int, int]:
        return 7, 70

    def reset(self) -> None: ...


def dropped(bench: Bench) -> int:
    """Return how many blocks vLLM says that it did not offer."""
    found = bench.manager.get_stats()
    values = found.data["data"].get(TieringOffloadingMetrics.BACKPRESSURE_BLOCKS_DROPPED, {}) if found else {}
    return int(sum(values.values()))


def fill(bench: Bench, documents: range) -> int:
    """Compute documents of four chunks; return how many chunks got a row."""
    return sum(bench.compute(f"{each}", bench.begin(f"{each}", each, 4)) for each in documents)


def test_stores_that_do_not_end_leave_half_of_memory_to_others(make):
    bench: Bench = make(rows=ROWS, backpressure=ASKED)
    bench.store.holds = True
    assert fill(bench, range(32)) == 128, "memory goes on, and evicts"
    assert bench.tier._stored_rows == ROWS // 2 and dropped(bench) == 128 - ROWS // 2
    bench.store.holds = False
    bench.rest()
    assert bench.tier._stored_rows == 0 and fill(bench, range(32, 34)) == 8
    bench.rest()
    assert len(bench.store._blocks) == ROWS // 2 + 8 and not dropped(bench)


def test_without_it_stores_take_all_of_memory(make):
    bench: Bench = make(rows=ROWS)
    bench.store.holds = True
    assert fill(bench, range(32)) == ROWS


def test_pressure_ends_when_half_of_the_bound_is_held():
    load = WriteLoad(0, 100, False)
    detector = WriteBackpressure(most_rows=0.4)
    assert not detector.is_under_pressure() and not detector.stats, "nobody is followed"
    detector.follow(lambda: load)
    found = []
    for held in (39, 40, 39, 20, 19, 39, 40):
        load = load._replace(held_rows=held)
        found.append(detector.is_under_pressure())
    assert found == [False, True, True, True, False, False, True]
    detector.reset()
    load = load._replace(held_rows=30)
    assert not detector.is_under_pressure()
    load = load._replace(is_budget_spent=True)
    assert detector.is_under_pressure() and not detector.should_store(5)
    assert detector.policy.pop_stores_dropped() == (1, 5)
    assert detector.stats == {"held_rows": 30.0, "rows": 100.0, "is_budget_spent": 1.0}


def test_nothing_is_offered_while_the_write_budget_is_spent(tmp_path):
    """Of some 3 KiB a second, of which a 24th of a day may be saved up: it begins with nothing."""
    settings = {"device": "posix", "io_deadline_s": 600, "nvme_write_bytes_per_day": "256MiB"}
    bench = DriveBench(tmp_path, backpressure=ASKED, **settings)
    bench.step()
    assert fill(bench, range(4)) == 16 and not bench.tier._jobs and dropped(bench) == 16
    budget = bench.store._parts.nvme._budget
    budget._bytes = budget.burst_bytes
    bench.step()
    assert fill(bench, range(4, 8)) == 16
    bench.rest()
    assert dropped(bench) == 0
    bench.forget_memory()
    assert bench.load("again", bench.begin("again", 5, 4)) == 4
    bench.close()


def test_a_policy_of_the_users_by_its_path(make):
    bench: Bench = make(backpressure=ASKED | {"policy_cls": f"{__name__}.OnePolicy"})
    assert type(bench.tier.bp_detector.policy).__name__ == "OnePolicy" and dropped(bench) == 70


def test_a_tier_that_is_off_is_not_under_pressure(make):
    bench: Bench = make(rows=ROWS, backpressure=ASKED)
    bench.store.holds = True
    fill(bench, range(16))
    bench.tier.switch_off(RuntimeError("a bug"), "a test")
    bench.rest()
    assert not bench.tier.bp_detector.is_under_pressure() and fill(bench, range(16, 18)) == 8
    bench.rest()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"most_rows": 0}, "most_rows is a share"),
        ({"most_rows": 1.5}, "most_rows is a share"),
        ({"most_rows": True}, "most_rows is a share"),
        ({"most_rows": "half"}, "most_rows is a share"),
        ({"most_row": 0.5}, "no 'most_row'"),
        ({"high_water_s": 0.5}, "no 'high_water_s'"),
        ({"policy_cls": "ThrottledDropPolicy"}, "leave policy_cls out"),
        ({"policy_cls": "vllm.v1.kv_offload.tiering.backpressure.ThrottledDropPolicy"}, "leave policy_cls out"),
    ],
)
def test_a_wrong_setting_is_one_sentence_before_weights_are_loaded(tmp_path, make, changed, said):
    tier = {"store_dirs": str(tmp_path), "nvme_bytes": "1GiB", "backpressure": ASKED | changed}
    with pytest.raises(ConfigError, match=said) as caught:
        TierSettings.of(tier)
    assert str(caught.value).count(". ") == 0 and str(caught.value).endswith(".")
    with pytest.raises(ConfigError, match=said):
        make(backpressure=ASKED | changed)


def test_vllms_own_settings_are_left_to_vllm(tmp_path):
    tier = {"store_dirs": str(tmp_path), "nvme_bytes": "1GiB"}
    for backpressure in ({}, None, {"backpressure_cls": "EMABackpressureDetector", "alpha": 0.3}):
        TierSettings.of(tier | {"backpressure": backpressure})
    with pytest.raises(ConfigError, match="leave policy_cls out"):
        WriteBackpressure(ThrottledDropPolicy())
