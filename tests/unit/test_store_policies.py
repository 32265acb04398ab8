# SPDX-License-Identifier: Apache-2.0
"""What each store policy offers, and classes of a user's own."""

from __future__ import annotations

import sys
import types
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_pool import FakePool
from support.manager_parts import Sizes
from support.small_engine import SmallEngine

from kvdisk.blocks import BlockKey, make_block_key
from kvdisk.config import Config
from kvdisk.errors import ConfigError
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.manager.admission import AdmitAll
from kvdisk.manager.store_policy import (
    AHEAD_STEPS,
    BackOff,
    NoStores,
    OnCompute,
    Spillover,
    make_store_policy,
)

GEOMETRY = Geometry((GroupGeometry(0, 2, 4096),), 1, 2)
KEYS = [make_block_key(bytes([position]), 0) for position in range(40)]


class Queue:
    """A spillover policy over a pool whose blocks 1, 2 … are free, and hold ``KEYS`` 0, 1 …"""

    def __init__(self, blocks: int = 12, known: int | None = None) -> None:
        self.pool = FakePool(blocks + 1, lambda _: None)
        self.policy = Spillover()
        for block in range(1, blocks + 1):
            self.pool.cache(KEYS[block - 1], block)
        self.policy.reached("a", KEYS, 0, blocks if known is None else known)

    def offers(self, room: int = 0, now: float = 0.0) -> list[int]:
        return [offer.block for offer in self.policy.free_offers(self.pool, room, now)]

    def accept(self, *blocks: int) -> None:
        self.policy.accept_free([KEYS[block - 1] for block in blocks])

    @property
    def ahead(self) -> int:
        return AHEAD_STEPS * self.pool.step_blocks


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 16), st.booleans()), max_size=30))
def test_on_compute_skips_nothing_for_good_and_offers_from_the_head(steps):
    """In each step some blocks are computed, and of those offered so many find room; or all were
    taken, and the first fails."""
    policy, limits, taken = OnCompute(), [0, 0], set()
    for number, (growth, room, fails) in enumerate(steps):
        released, now = 2 * number, 10.0 * number
        limits = [limits[0] + growth, limits[1] + growth // 2]
        offered = [(group, at) for group in (0, 1) for at in policy.offers("a", group, limits[group], released, now)]
        done, refused = offered[:room], offered[room:]
        policy.accept("a", done)
        taken.update(done)
        if refused:
            policy.refuse("a", refused, released, now)
            assert policy.waits("a")
            assert not policy.offers("a", 0, limits[0], released, now + 60.0), "no room came free"
            assert not policy.offers("a", 1, limits[1], released + 1, now + 0.04), "too soon"
        elif fails and taken:
            taken.remove(lost := min(taken))
            policy.refuse("a", [lost], -1, 0.0)
    for group in (0, 1):
        taken.update((group, at) for at in policy.offers("a", group, limits[group], 99, 999.0))
    assert taken == {(group, at) for group in (0, 1) for at in range(limits[group])}
    assert not policy.waits("a")


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


def test_the_cursor_costs_what_has_changed(monkeypatch):
    """However long the front of the queue is, a step looks at what has left it and what has
    come."""
    queue = Queue(blocks=30)
    queue.pool.step_blocks = 10
    seen: list[int] = []
    original = FakePool.iter_free_blocks

    def counted(self, after=None):
        for block in original(self, after):
            seen.append(block.block_id)
            yield block

    monkeypatch.setattr(FakePool, "iter_free_blocks", counted)
    assert queue.offers() == list(range(1, 21))
    queue.accept(*range(1, 21))
    for taken in (0, 1, 3):
        queue.pool.take(taken)
        seen.clear()
        assert len(queue.offers()) == taken
        assert len(seen) <= taken + 2, "the head, and what came before the cursor"


def test_what_is_refused_is_offered_again_if_it_is_still_there():
    queue = Queue(blocks=4)
    assert queue.offers() == [1, 2, 3, 4]
    queue.accept(1)
    queue.policy.refuse_free(KEYS[1:4], 1, 10.0)
    assert queue.offers(room=2, now=10.04) == []
    assert queue.offers(room=1, now=10.06) == []
    queue.pool.forget(2)
    queue.pool.cache(KEYS[30], 2)
    assert queue.offers(room=2, now=10.06) == [3, 4]
    queue.accept(3, 4)
    assert queue.offers(room=9, now=99.0) == []


def test_only_blocks_that_requests_have_reached_are_offered_with_their_parents():
    queue = Queue(known=2)
    first, second = queue.policy.free_offers(queue.pool, 0, 0.0)
    assert (first.key, first.parent) == (KEYS[0], None)
    assert (second.key, second.parent) == (KEYS[1], KEYS[0])


def test_what_is_known_is_bounded():
    queue = Queue(blocks=4)
    more = [BlockKey(bytes([7, 7, number // 256, number % 256])) for number in range(1000)]
    queue.policy.reached("a", more, 0, 1000)
    queue.offers()
    assert len(queue.policy._parents) == 2 * queue.pool.block_count


@pytest.mark.parametrize("cpu_slots", [4, 16])
def test_an_idle_engine_comes_to_rest_though_the_tier_cannot_hold_what_is_free(cpu_slots):
    small = SmallEngine(Sizes(GEOMETRY, Config(cpu_bytes=1, store_policy="spillover"), 14, (cpu_slots,), (), 0, ()))
    for prompt in ("aabbccddt", "eeffgghht", "iijjkkllt", "mmnnooppt", "qqrrssttt"):
        small.add(prompt).finishing = True
        while small.engine.requests:
            small.step(seconds=1.0)
    for _ in range(40):
        small.step(seconds=1.0)
        if not small.manager.has_pending_work(small.now):
            return
    raise AssertionError("it goes on storing what has been stored")


class EveryOther(NoStores):
    """Offers every other block once."""

    def offers(self, request_id, group, storable, room, now):
        return range(0, storable, 2)


class Lacking:
    """Has no ``offers``."""

    saves_victims = False


class Failing(EveryOther):
    """Cannot be built."""

    def __init__(self, size):
        self.size = size


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
def test_what_is_wrong_with_a_class_of_the_users_own_is_said_in_one_sentence(name, said, monkeypatch):
    module = types.ModuleType("my_policies")
    vars(module).update(EveryOther=EveryOther, Lacking=Lacking, Failing=Failing, number=1)
    monkeypatch.setitem(sys.modules, "my_policies", module)
    assert isinstance(make_store_policy("my_policies:EveryOther"), EveryOther)
    with pytest.raises(ConfigError, match=said) as error:
        make_store_policy(name)
    assert "\n" not in str(error.value)


class Pruning(NoStores):
    """Returns its own list of what is due, takes out of it what was accepted, and offers each block
    once."""

    def __init__(self):
        self.due, self.done = [], {}

    def offers(self, request_id, group, storable, room, now):
        self.due = list(range(self.done.get(request_id, 0), storable))
        self.done[request_id] = storable
        return self.due

    def accept(self, request_id, places):
        for _, position in places:
            self.due.remove(position)


class Telling(AdmitAll):
    """Has a method of its own that is more than that of the class it is derived from."""

    told: ClassVar[list[int]] = []

    def note_room(self, free, total):
        self.told.append(free)


def test_a_users_own_policies_may_change_what_they_have_offered_and_are_told_of_room(monkeypatch):
    module = types.ModuleType("my_policies")
    vars(module).update(Pruning=Pruning, Telling=Telling)
    monkeypatch.setitem(sys.modules, "my_policies", module)
    config = Config(cpu_bytes=1, store_policy="my_policies:Pruning", cpu_admission="my_policies:Telling")
    small = SmallEngine(Sizes(GEOMETRY, config, 14, (16,), (), 0, ()))
    Telling.told.clear()
    small.serve("aabbccddt")
    assert small.manager.stats["stored_blocks"] == 4
    small.step()
    assert Telling.told[-1] == 12
