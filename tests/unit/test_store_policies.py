# SPDX-License-Identifier: Apache-2.0
"""What store policies offer, when it is offered again, and classes of a user's own."""

from __future__ import annotations

from typing import ClassVar

import pytest
from support.fake_pool import FakePool
from support.low_bounds import lower_shares
from tier_bench import TierBench

from kvdisk.blocks import BlockKey, JobId, Tier, make_block_key
from kvdisk.errors import ConfigError
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.manager.admission import AdmissionPolicy
from kvdisk.manager.copies import Offers
from kvdisk.manager.intake import Answer
from kvdisk.manager.jobs import JobRecord
from kvdisk.manager.requests import BackOff
from kvdisk.manager.step_work import Kind
from kvdisk.manager.store_policy import NoStores, Spillover, make_store_policy
from kvdisk.messages import Job, JobKind

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
    bench = TierBench((4,), gpu_blocks=400, store_decode=True)
    planner, asked = bench.manager._stores, []

    def answered(offers: Offers, *_: object) -> Answer:
        asked.append(1)
        record = JobRecord(Job(JobId(1), JobKind.STORE), []) if is_taken else None
        return Answer(record, offers.at([0] if is_taken else []), unserved=offers.at(range(1, len(offers.keys))))

    monkeypatch.setattr(planner, "store", answered)
    bench.engine.add("one", "aabbcc", 600)
    for _ in range(200):
        planner._state.released += 1
        bench.step()
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


def test_what_a_request_has_reached_takes_spillover_a_few_looks_however_much_it_is():
    class Counted(list[BlockKey]):
        looks = 0

        def __getitem__(self, at):
            Counted.looks += 1
            return super().__getitem__(at)

    pool, policy = FakePool(40, lambda _: None), Spillover()
    pool.step_blocks = 40
    for block in range(1, 40):
        pool.cache(KEYS[block], block)
    policy.reached("a", Counted(KEYS), 2, 40)
    assert Counted.looks <= 2
    offers = [(offer.block, offer.parent) for offer in policy.free_offers(pool)]
    assert offers == [(block, KEYS[block - 1]) for block in range(2, 40)]


def test_what_spillover_knows_is_bounded():
    pool, policy = FakePool(5, lambda _: None), Spillover()
    policy.reached("a", [BlockKey(bytes([7, number // 256, number % 256])) for number in range(1000)], 0, 1000)
    policy.free_offers(pool)
    assert len(policy._parents) == 2 * pool.block_count


@pytest.mark.parametrize("cpu_slots", [4, 16])
def test_an_idle_engine_comes_to_rest_though_the_tier_cannot_hold_what_is_free(cpu_slots):
    bench = TierBench((cpu_slots,), gpu_blocks=14, store_policy="spillover")
    for prompt in ("aabbccddt", "eeffgghht", "iijjkkllt", "mmnnooppt", "qqrrssttt"):
        bench.add(prompt)
        while bench.engine.requests:
            bench.step(seconds=1.0)
    assert bench.stats["stored_blocks"] > 4
    bench.idle(seconds=1.0)


def test_what_the_engine_took_before_its_copy_delays_no_other():
    """That says nothing of the tier's room. The clock stands still."""
    bench = TierBench((40,), gpu_blocks=9, store_policy="spillover")
    bench.rank.most_gathers = 0
    taken = []
    for prompt in ("aabbccddt", "eeffgghht", "iijjkkllt"):
        taken.append(bench.stats["overwritten_blocks"])
        bench.add(prompt)
        while bench.engine.requests:
            bench.step(work=False, seconds=0.0)
    assert taken == [0, 0, 4] and bench.stats["overwritten_blocks"] == 8


def test_what_is_given_up_with_a_block_that_the_engine_took_is_offered_again():
    bench = TierBench((), (200,), gpu_blocks=12, store_policy="spillover")
    bench.serve("zzx")  # opens a file
    bench.engine.pool.forget_all()
    bench.engine.pool.step_blocks = 4
    bench.add("aabbccddeeffgghhii")
    for _ in range(4):
        bench.step(work=False)
    bench.engine.add("b", "00112", 6)
    bench.rank.most_gathers = 0
    assert any(bench.step(work=False).fence for _ in range(9))
    bench.rank.most_gathers = 1000
    bench.step()
    bench.step()
    assert bench.stats["overwritten_blocks"] == 8
    assert bench.held("aabbccddeeffgghhii") == [True] * 7 + [False] * 2, "the engine took the tail"


def test_a_running_request_stores_again_what_was_given_up_with_a_block_that_it_lost():
    """Its job was one of both groups, and the engine took a block of the window."""
    geometry = Geometry((GroupGeometry(0, 2, 4096), GroupGeometry(1, 2, 4096, window_tokens=4)), 1, 2)
    bench = TierBench((), (200,), geometry=geometry, gpu_blocks=38)
    bench.serve("zzx")
    prompt = "aabbccddeeffgghhiijjkkllmmnnooppqqrrssttuuvvwwxxyy"
    bench.engine.add("a", prompt, 60)
    bench.rank.most_gathers = 0
    assert any(bench.step(work=False).fence for _ in range(9))
    bench.rank.most_gathers = 1000
    for _ in range(12):
        bench.step()
    assert bench.engine.running and bench.stats["overwritten_blocks"] > 4
    assert all(bench.held(prompt))


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
    lower_shares(monkeypatch, 2, Kind.LEFT)
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


class Telling(AdmissionPolicy):
    """Has a method of its own that is more than that of the class it is derived from."""

    told: ClassVar[list[int]] = []

    def note_room(self, free, total):
        self.told.append(free)


def test_what_lacks_a_method_is_refused():
    """``test_admission`` has what else may be wrong with a class of the user's own."""
    with pytest.raises(ConfigError, match=r"^store_policy names '.*:Lacking', which does not have 'reached'"):
        make_store_policy(f"{__name__}:Lacking")


def test_a_users_own_policies_decide_and_are_told_of_room():
    own = {"store_policy": f"{__name__}:EveryOther", "cpu_admission": f"{__name__}:Telling"}
    bench = TierBench((16,), gpu_blocks=14, **own)
    Telling.told.clear()
    bench.serve("aabbccddt")
    assert bench.stats["stored_blocks"] == 2
    bench.step()
    assert Telling.told[-1] == 14
