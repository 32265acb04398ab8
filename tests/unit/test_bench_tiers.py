# SPDX-License-Identifier: Apache-2.0
"""What ``tools/bench_tiers.py`` makes of the rounds' seconds; it runs by hand, beside fio."""

from __future__ import annotations

from unittest.mock import Mock

import bench_tiers
import pytest
from bench_tiers import GOALS, MIB, OF_FIO, QUEUE, Case, Goal, device_contenders, judge

from kvdisk.device import aio, posix
from kvdisk.device.base import Op

WRITE = Case(Op.WRITE, 2 * MIB, 8)
READ = Case(Op.READ, 2 * MIB, 8)
GOAL = Goal("the queue, of fio", (2 * MIB,), (Op.WRITE,), QUEUE, OF_FIO, 0.9)


@pytest.mark.parametrize(
    ("seconds", "ratio", "verdict"),
    [([2.0, 4.0, 8.0], "0.50", "missed"), ([1.0, 2.0, 4.0], "1.00", "met"), ([0.5, 2.0, 40.0], "1.00", "met")],
)
def test_a_goal_is_judged_by_the_rounds_ratios_to_the_fastest_peer(seconds, ratio, verdict):
    found = {QUEUE: seconds, "fio io_uring": [1.0, 2.0, 4.0], "fio libaio": [10.0, 20.0, 40.0]}
    assert judge(GOAL, {WRITE: found}) == [("write 2 MiB x 8", ratio, verdict)]


def test_other_sizes_and_directions_and_what_has_no_peer_are_not_judged():
    found = {QUEUE: [1.0], "fio libaio": [1.0]}
    assert judge(GOAL, {READ: found}) == []
    assert judge(GOAL, {Case(Op.WRITE, MIB, 8): found}) == []
    assert judge(GOAL, {WRITE: {QUEUE: [1.0], "vLLM fs_io_C x 4": [1.0]}}) == []


def test_goals_name_contenders_that_are_measured():
    devices = [Mock(), Mock()]
    for device, way in zip(devices, (aio.KernelQueue.way, posix._ThreadQueue.way), strict=True):
        device.name = f"posix-{way}"
    assert {goal.contender for goal in GOALS} <= device_contenders(WRITE, devices, 0, memoryview(b"")).keys()


def test_the_movers_way_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_tiers, "MOVER_BYTES", 8 * MIB)
    rows = list(bench_tiers.mover_rows(tmp_path, 1))
    assert [case for case, *_ in rows] == ["store 2 MiB", "load 2 MiB"]
    assert all(float(ratio) > 0 and verdict in {"met", "missed"} for _, ratio, verdict in rows)
