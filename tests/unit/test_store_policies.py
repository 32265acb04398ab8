# SPDX-License-Identifier: Apache-2.0
"""What each store policy offers, and classes of a user's own."""

from __future__ import annotations

import sys
import types
from typing import ClassVar

import pytest
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
    NoStores,
    OnCompute,
    OnPreemption,
    Refusal,
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
        for block in blocks:
            self.policy.accept_free(KEYS[block - 1])

    @property
    def ahead(self) -> int:
        return AHEAD_STEPS * self.pool.step_blocks


def test_on_preemption_offers_a_victims_blocks_and_nothing_else():
    policy = OnPreemption()
    assert not policy.offers("a", 0, 5, 9, 9.0)
    assert list(policy.preempted("a", 0, 3)) == [0, 1, 2]
    policy.refuse("a", 0, (1,), KEYS[1:2], Refusal.NO_ROOM, 0, 0.0)
    assert not policy.waits("a")
    assert list(policy.preempted("a", 0, 3)) == [0, 1, 2], "and at the next preemption all of them"
    assert OnPreemption.saves_victims
    assert not OnCompute.saves_victims
    assert not OnCompute().preempted("a", 0, 3)


def test_a_failed_load_ends_the_wait_for_a_count():
    """Another request has stored the block since it was refused, and it could not be read back."""
    policy = OnCompute()
    policy.offers("a", 0, 1, 0, 0.0)
    policy.refuse("a", 0, (0,), KEYS[:1], Refusal.NOT_REUSED, 0, 0.0)
    policy.refuse("a", 0, (0,), KEYS[:1], Refusal.NO_ROOM, -1, 0.0)
    assert list(policy.offers("a", 0, 1, 0, 1.0)) == [0]
    policy.accept("a", 0, (0,))
    policy.wanted_again(KEYS[:1])
    assert not policy.waits("a")
    assert not policy.offers("a", 0, 1, 0, 1.0)


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


def test_what_is_refused_together_comes_again_together_and_the_back_off_grows_only_where_that_fails():
    queue = Queue(blocks=4)
    assert queue.offers() == [1, 2, 3, 4]
    for key in KEYS[:4]:
        queue.policy.refuse_free(key, Refusal.NO_ROOM, 1, 10.0)
    assert queue.offers(room=2, now=10.04) == []
    assert queue.offers(room=2, now=10.06) == [1, 2, 3, 4]
    for key in KEYS[:4]:
        queue.policy.refuse_free(key, Refusal.NO_ROOM, 2, 10.06)
    assert queue.offers(room=3, now=10.12) == []
    assert queue.offers(room=3, now=10.17) == [1, 2, 3, 4]
    queue.accept(1, 2, 3)
    queue.policy.refuse_free(KEYS[3], Refusal.NO_ROOM, 3, 10.17)
    assert queue.offers(room=4, now=10.23) == [4]


def test_a_refused_block_whose_place_another_has_taken_is_not_offered_by_its_number():
    queue = Queue(blocks=4)
    assert queue.offers() == [1, 2, 3, 4]
    queue.policy.refuse_free(KEYS[1], Refusal.NO_ROOM, 1, 0.0)
    queue.accept(1, 3, 4)
    queue.pool.forget(2)
    queue.pool.cache(KEYS[30], 2)
    queue.policy.reached("b", KEYS, 30, 31)
    assert queue.offers(room=2, now=1.0) == []


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

    def accept(self, request_id, group, positions):
        pass


class Failing(EveryOther):
    """Cannot be built."""

    def __init__(self, size):
        self.size = size


@pytest.fixture
def own(monkeypatch):
    module = types.ModuleType("my_policies")
    vars(module).update(EveryOther=EveryOther, Lacking=Lacking, Failing=Failing, number=1)
    monkeypatch.setitem(sys.modules, "my_policies", module)
    return "my_policies"


def test_a_class_of_the_users_own(own):
    assert isinstance(make_store_policy(f"{own}:EveryOther"), EveryOther)


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
def test_what_is_wrong_with_it_is_said_in_one_sentence(own, name, said):
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

    def accept(self, request_id, group, positions):
        for position in list(positions):
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
