# SPDX-License-Identifier: Apache-2.0
"""What each store policy offers, and classes of a user's own."""

from __future__ import annotations

import sys
import types
from typing import ClassVar

import pytest
from support.fake_engine import FakeEngine
from support.fake_pool import FakePool
from support.fake_ranks import FakeRank
from support.manager_parts import ManagerParts, Sizes
from support.manager_watch import ManagerWatch

from kvdisk.blocks import BlockKey, make_block_key
from kvdisk.config import Config
from kvdisk.errors import ConfigError
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.index.memory_index import MemoryIndex
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


def test_on_compute_keeps_watermarks_by_request_and_group():
    policy = OnCompute()
    assert list(policy.offers("a", 0, 2, 0, 0.0)) == [0, 1]
    assert list(policy.offers("a", 1, 1, 0, 0.0)) == [0]
    assert list(policy.offers("b", 0, 2, 0, 0.0)) == [0, 1]
    policy.accept("a", 0, [0])
    policy.refuse("a", 0, (1,), KEYS[1:2], Refusal.NO_ROOM, 0, 0.0)
    assert policy.waits("a")
    assert not policy.waits("b")
    assert list(policy.offers("a", 0, 2, 1, 1.0)) == [1]
    policy.request_finished("a")
    assert not policy.waits("a")
    policy.refuse("a", 0, (1,), KEYS[1:2], Refusal.NO_ROOM, 0, 0.0)
    assert not policy.waits("a"), "a store that fails after its request has ended"


def test_on_compute_offers_what_was_not_reused_to_each_request_that_waits_for_it():
    policy = OnCompute()
    for request_id in "abc":
        policy.offers(request_id, 0, 3, 0, 0.0)
        policy.refuse(request_id, 0, (0, 2), (KEYS[0], KEYS[2]), Refusal.NOT_REUSED, 0, 0.0)
        policy.accept(request_id, 0, (1,))
        assert not policy.waits(request_id), "a step asks nothing for it"
    policy.request_finished("b")
    policy.wanted_again(KEYS[1:3])
    assert [policy.waits(request_id) for request_id in "abc"] == [True, False, True]
    assert [list(policy.offers(request_id, 0, 3, 0, 0.0)) for request_id in "ac"] == [[2], [2]]
    policy.refuse("a", 0, (2,), KEYS[2:3], Refusal.NOT_REUSED, 0, 0.0)
    policy.accept("c", 0, (2,))
    policy.wanted_again(KEYS[2:3])
    assert [policy.waits(request_id) for request_id in "ac"] == [True, False]
    for request_id in "ac":
        policy.request_finished(request_id)
    assert not policy._unused, "nothing is kept of requests that are gone"


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


def test_spillover_offers_the_front_of_the_queue_and_each_block_once():
    queue = Queue()
    assert queue.offers() == [1, 2, 3, 4], "what two steps can take"
    queue.accept(1, 2, 3, 4)
    assert queue.offers() == [], "all before the cursor were offered"
    assert queue.ahead == 4
    queue.pool.take(2)
    assert queue.offers() == [5, 6], "the engine has taken two, and two came before the cursor"


def test_the_cursor_costs_what_has_changed(monkeypatch):
    """However long the front of the queue is, a step looks at what has left it and what has come."""
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


def test_the_front_is_found_again_whatever_happened_to_the_queue():
    queue = Queue(blocks=30)
    assert queue.offers() == [1, 2, 3, 4]
    queue.accept(1, 2, 3, 4)
    queue.pool.touch([3, 4])  # the cursor's block has left the queue
    assert queue.offers() == [5, 6]
    queue.accept(5, 6)
    queue.pool.free_blocks([3, 4])
    assert queue.offers() == [], "they are at the end of the queue now"
    queue.pool.take(10)  # more than the front
    assert queue.offers() == [13, 14, 15, 16]


def test_a_block_comes_again_when_it_was_reached_and_has_come_to_the_front_again():
    queue = Queue(blocks=6)
    assert queue.offers() == [1, 2, 3, 4]
    queue.accept(1, 2, 3, 4)
    queue.pool.touch([1, 2])
    queue.policy.reached("b", KEYS, 1, 2)
    queue.pool.free_blocks([1, 2])  # behind the others
    queue.pool.take(2)
    assert queue.offers() == [5, 6, 2], "its copy may have been evicted since it was offered; nobody has reached 1"


def test_a_refused_free_block_is_offered_again_when_things_have_changed():
    queue = Queue(blocks=4)
    assert queue.offers() == [1, 2, 3, 4]
    queue.policy.refuse_free(KEYS[0], Refusal.NOT_REUSED, 0, 0.0)
    queue.policy.refuse_free(KEYS[1], Refusal.NO_ROOM, 5, 0.0)
    queue.accept(3, 4)
    assert queue.offers(room=5, now=9.0) == []
    assert queue.offers(room=6, now=0.01) == []
    assert queue.offers(room=6, now=9.0) == [2]
    queue.accept(2)
    queue.policy.wanted_again(KEYS[2:])
    assert queue.offers(room=6, now=9.0) == []
    queue.policy.wanted_again(KEYS[:1])
    assert queue.offers(room=6, now=9.0) == [1]
    queue.accept(1)
    assert queue.offers(room=7, now=99.0) == []


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


def test_nothing_of_before_a_reset_is_offered():
    queue = Queue()
    assert queue.offers() == [1, 2, 3, 4]
    queue.policy.reset()
    queue.pool.take(4)
    assert queue.offers() == [], "the engine may not have forgotten them"
    queue.policy.reached("b", KEYS, 8, 12)
    queue.pool.take(4)
    assert queue.offers() == [9, 10, 11, 12]


def test_two_blocks_of_one_key_are_one_offer():
    queue = Queue(blocks=4, known=1)
    queue.pool.forget(2)
    queue.pool.cache(KEYS[0], 2)
    assert queue.offers() == [1]
    queue.accept(1)
    assert queue.offers() == []


def test_what_is_known_is_bounded():
    queue = Queue(blocks=4)
    more = [BlockKey(bytes([7, 7, number // 256, number % 256])) for number in range(1000)]
    queue.policy.reached("a", more, 0, 1000)
    queue.offers()
    assert len(queue.policy._parents) == 2 * queue.pool.block_count


@pytest.mark.parametrize("cpu_slots", [2, 4, 6, 16])
def test_an_idle_engine_comes_to_rest_though_the_tier_cannot_hold_what_is_free(cpu_slots):
    geometry = Geometry((GroupGeometry(0, 2, 4096),), 1, 2)
    sizes = Sizes(geometry, Config(cpu_bytes=1, store_policy="spillover"), 14, (cpu_slots,), (), 0, ())
    rank, index = FakeRank(0), MemoryIndex()
    engine = FakeEngine(geometry, sizes.block_count, [rank])
    parts = ManagerParts.make(sizes, engine, index, 1)
    ManagerWatch(sizes, parts, engine, [rank], index)
    for number, prompt in enumerate(("aabbccddt", "eeffgghht", "iijjkkllt", "mmnnooppt", "qqrrssttt")):
        engine.add(str(number), prompt, 0).finishing = True
        while engine.requests:
            step(engine, rank)
    step(engine, rank)
    for _ in range(40):
        if not parts.manager.has_pending_work(engine.now):
            return
        step(engine, rank)
    raise AssertionError("it goes on storing what has been stored")


def step(engine: FakeEngine, rank: FakeRank) -> None:
    """Run a step, whose transfers end in the course of the next."""
    engine.now += 1.0
    rank.work_off()
    engine.schedule(16)
    engine.forward()
    engine.update()


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
    """Returns its own list of what is due, takes out of it what was accepted, and offers each block once."""

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
    geometry = Geometry((GroupGeometry(0, 2, 4096),), 1, 2)
    config = Config(cpu_bytes=1, store_policy="my_policies:Pruning", cpu_admission="my_policies:Telling")
    sizes = Sizes(geometry, config, 14, (16,), (), 0, ())
    rank, index = FakeRank(0), MemoryIndex()
    engine = FakeEngine(geometry, sizes.block_count, [rank])
    parts = ManagerParts.make(sizes, engine, index, 1)
    ManagerWatch(sizes, parts, engine, [rank], index)
    Telling.told.clear()
    engine.add("a", "aabbccddt", 0).finishing = True
    while engine.requests:
        step(engine, rank)
    step(engine, rank)
    assert parts.manager.stats["stored_blocks"] == 4
    assert Telling.told[-1] == 12
