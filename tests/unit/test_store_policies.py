# SPDX-License-Identifier: Apache-2.0
"""What store policies offer, when it is offered again, and classes of a user's own."""

from __future__ import annotations

import sys
import types
from typing import ClassVar

import pytest
from support.fake_pool import FakePool
from support.manager_parts import Sizes
from support.small_engine import SmallEngine
from tier_bench import TierBench

from kvdisk.blocks import BlockKey, Tier, make_block_key
from kvdisk.config import Config
from kvdisk.errors import ConfigError
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.manager import stores
from kvdisk.manager.admission import AdmissionPolicy
from kvdisk.manager.requests import BackOff
from kvdisk.manager.store_policy import NoStores, Spillover, make_store_policy

GEOMETRY = Geometry((GroupGeometry(0, 2, 4096),), 1, 2)
KEYS = [make_block_key(bytes([position]), 0) for position in range(40)]


def test_the_back_off_doubles_while_nothing_is_taken():
    back_off, now = BackOff(), 100.0
    for seconds in (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0):
        back_off.refuse(7, now)
        back_off.refuse(7, now)
        assert back_off.holds(8, now + seconds - 0.001)
        assert back_off.holds(7, now + 60.0)
        now += seconds + 0.001
        assert not back_off.holds(8, now)
    back_off.accept()
    back_off.refuse(7, now)
    assert not back_off.holds(8, now + 0.051)


@pytest.mark.parametrize(("is_taken", "most"), [(False, 7), (True, 60)])
def test_a_full_tier_is_asked_ever_less_often_until_something_is_taken(is_taken, most, monkeypatch):
    """In each step of 10 ms some room came free; of what is offered one block needs none, or is
    taken, and the rest is refused."""
    config = Config(cpu_bytes=1, store_decode=True)
    small = SmallEngine(Sizes(GEOMETRY, config, 400, (4,), (), 0, (), most_outputs=600))
    planner, asked = small.manager._stores, []
    monkeypatch.setattr(
        planner, "_store", lambda offers, *_: (asked.append(1) or (1 if is_taken else None), offers[1:])
    )
    small.engine.add("one", "aabbcc", 600)
    for _ in range(200):
        planner._state.released += 1
        small.step()
    assert most // 2 < len(asked) <= most


# -- spillover -------------------------------------------------------------------------------------


def test_spillover_offers_what_requests_have_reached_at_the_front_once_and_what_is_refused_again():
    pool, policy = FakePool(9, lambda _: None), Spillover()
    pool.step_blocks = 3
    for block in range(1, 9):
        pool.cache(KEYS[block], block)

    def offers():
        return [(offer.block, offer.parent) for offer in policy.free_offers(pool)]

    policy.reached("a", KEYS, 0, 5)
    assert offers() == [(block, KEYS[block - 1]) for block in (1, 2, 3, 4)], "of six blocks, those that are known"
    policy.refuse_free(KEYS[1:4])
    pool.forget(2)
    pool.take(1)
    policy.reached("b", KEYS, 5, 8)
    assert offers() == [(3, KEYS[2]), (5, KEYS[4]), (6, KEYS[5]), (7, KEYS[6])]
    policy.reached("b", KEYS, 6, 7)
    assert offers() == [(6, KEYS[5])], "a request has reached it again"
    policy.reset()
    assert offers() == []


def test_what_spillover_knows_is_bounded():
    pool, policy = FakePool(5, lambda _: None), Spillover()
    policy.reached("a", [BlockKey(bytes([7, number // 256, number % 256])) for number in range(1000)], 0, 1000)
    policy.free_offers(pool)
    assert len(policy._parents) == 2 * pool.block_count


@pytest.mark.parametrize("cpu_slots", [4, 16])
def test_an_idle_engine_comes_to_rest_though_the_tier_cannot_hold_what_is_free(cpu_slots):
    small = SmallEngine(Sizes(GEOMETRY, Config(cpu_bytes=1, store_policy="spillover"), 14, (cpu_slots,), (), 0, ()))
    for prompt in ("aabbccddt", "eeffgghht", "iijjkkllt", "mmnnooppt", "qqrrssttt"):
        small.add(prompt).finishing = True
        while small.engine.requests:
            small.step(seconds=1.0)
    assert small.manager.stats["stored_blocks"] > 4
    for _ in range(40):
        small.step(seconds=1.0)
        if not small.manager.has_pending_work(small.now):
            return
    raise AssertionError("it goes on storing what has been stored")


def test_the_queue_is_looked_at_when_a_load_has_taken_a_steps_blocks_and_in_each_step_while_it_is_short(monkeypatch):
    bench, asked = TierBench((16,), gpu_blocks=60), []
    bench.serve("aabbccddeeffx")
    monkeypatch.setattr(bench.manager._stores._store_policy, "free_offers", lambda _: asked.append(bench.now) or ())
    monkeypatch.setattr(bench.engine.pool, "step_blocks", 6)
    bench.serve("aabbccddeeffx", cold=True)
    assert bench.stats["loaded_blocks"] == 6 and len(asked) == 1
    for step_blocks, times in ((29, 0), (30, 3)):  # 59 are free
        asked.clear()
        monkeypatch.setattr(bench.engine.pool, "step_blocks", step_blocks)
        for _ in range(3):
            bench.step()
        assert len(asked) == times


# -- a fresh store ---------------------------------------------------------------------------------


def test_without_memory_a_fresh_store_takes_what_the_first_request_has_left():
    bench = TierBench((), (4,))
    bench.serve("aabbx")
    assert bench.stats["stored_blocks"] == 2


def test_of_what_requests_have_left_the_newest_is_kept_and_the_head_of_a_long_one(monkeypatch):
    monkeypatch.setattr(stores, "MOST_LEFT", 2)
    bench = TierBench((), (4,))
    for prompt in ("aabbccx", "ddeeffx"):
        bench.add(prompt)
        bench.step(work=False)
        bench.step(work=False)
    bench.idle()
    assert set(bench.catalog.ready_keys(Tier.NVME)) == {make_block_key(text, 0) for text in (b"dd", b"ddee")}


# -- classes of a user's own -----------------------------------------------------------------------


class EveryOther(NoStores):
    """Offers every other block."""

    def reached(self, request_id, keys, start, stop):
        return range(start + start % 2, stop, 2)


class Lacking:
    """Has no ``reached``."""

    saves_victims = offers_all = False


class Failing(EveryOther):
    """Cannot be built."""

    def __init__(self, size):
        self.size = size


class Telling(AdmissionPolicy):
    """Has a method of its own that is more than that of the class it is derived from."""

    told: ClassVar[list[int]] = []

    def note_room(self, free, total):
        self.told.append(free)


@pytest.fixture
def my_policies(monkeypatch):
    module = types.ModuleType("my_policies")
    vars(module).update(EveryOther=EveryOther, Lacking=Lacking, Failing=Failing, Telling=Telling, number=1)
    monkeypatch.setitem(sys.modules, "my_policies", module)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere_at_all:Policy", "whose module cannot be imported"),
        ("my_policies:Missing", "no class of that name"),
        ("my_policies:number", "no class of that name"),
        ("my_policies:Lacking", "does not have 'reached'"),
        ("my_policies:Failing", "cannot be built without arguments"),
    ],
)
def test_what_is_wrong_with_a_class_of_the_users_own_is_said_in_one_sentence(name, said, my_policies):
    with pytest.raises(ConfigError, match=said) as error:
        make_store_policy(name)
    assert "\n" not in str(error.value)


def test_a_users_own_policies_decide_and_are_told_of_room(my_policies):
    config = Config(cpu_bytes=1, store_policy="my_policies:EveryOther", cpu_admission="my_policies:Telling")
    small = SmallEngine(Sizes(GEOMETRY, config, 14, (16,), (), 0, ()))
    Telling.told.clear()
    small.serve("aabbccddt")
    assert small.manager.stats["stored_blocks"] == 2
    small.step()
    assert Telling.told[-1] == 14
