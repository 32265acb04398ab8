# SPDX-License-Identifier: Apache-2.0
"""KV hints over a fake engine: what is kept, what leaves first, what is read into memory, and how
long."""

from __future__ import annotations

from typing import Any

import pytest
from tier_bench import TierBench, keys_of

from kvdisk.blocks import Tier
from kvdisk.manager import bounds
from kvdisk.manager.requests import KVHint
from kvdisk.manager.standings import PINNED

KEPT, OTHERS = "aabbx", ("ccddx", "eeffx", "gghhx", "iijjx", "kkllx")


def make(cpu_slots: int = 8, nvme_slots: int = 0, **how: Any) -> TierBench:
    bench = TierBench((cpu_slots,) * bool(cpu_slots), (nvme_slots,) * bool(nvme_slots), min_load_tokens=0, **how)
    bench.idle()
    return bench


def tell(bench: TierBench, prompt: str, *hints: KVHint) -> None:
    """Serve a prompt with hints, and forget what the GPU has."""
    request = bench.add(prompt)
    bench.manager.hint(request.id, hints, bench.engine.now)
    bench.finish()
    bench.engine.pool.forget_all()


def flood(bench: TierBench) -> None:
    """Serve more than a tier of 8 blocks has room for."""
    for prompt in OTHERS:
        bench.serve(prompt, cold=True)


@pytest.mark.parametrize("tier", [Tier.CPU, Tier.NVME])
@pytest.mark.parametrize("action", ["retain", "pin"])
def test_what_is_kept_outlasts_what_is_not_until_its_time_is_over(action, tier):
    bench = make(*((8, 0) if tier is Tier.CPU else (0, 8)), nvme_admission="all")
    tell(bench, KEPT, KVHint(action, None, 60.0))
    flood(bench)
    assert bench.held(KEPT, tier) == [True, True]
    bench.advance(70.0)
    bench.step()
    flood(bench)
    flood(bench)
    assert bench.held(KEPT, tier) == [False, False]
    assert not bench.parts.manager._kv_hints._standings.held


def test_the_time_counts_again_from_the_requests_end():
    bench = make()
    request = bench.add(KEPT, finishing=False)
    bench.manager.hint(request.id, (KVHint("retain", None, 60.0),), bench.engine.now)
    for _ in range(10):
        bench.step(seconds=5.0)
    request.finishing = True
    bench.finish()
    bench.advance(40.0)
    flood(bench)
    assert bench.held(KEPT, Tier.CPU) == [True, True]


def test_what_is_retained_leaves_where_nothing_else_can():
    bench = make()
    for prompt in (KEPT, *OTHERS):
        tell(bench, prompt, KVHint("retain", None, 60.0))
    assert bench.held(OTHERS[-1], Tier.CPU) == [True, True] and bench.held(KEPT, Tier.CPU) == [False, False]


def test_pins_fill_their_share_from_the_head_and_what_is_over_is_retained(caplog):
    bench = make(pin_share=0.25)
    tell(bench, "aabbccddx", KVHint("pin", None, 600.0))
    assert bench.parts.cpu._evictors[0]._policy.count(PINNED) == 2
    tell(bench, OTHERS[0], KVHint("pin", 2, 600.0))
    for prompt in OTHERS[1:]:
        tell(bench, prompt, KVHint("retain", None, 60.0))
    assert bench.held("aabbccddx", Tier.CPU) == [True, True, False, False], "tokens are of the prompt's start"
    assert len([each for each in caplog.records if "pin_share (0.25)" in each.getMessage()]) == 1


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_less_room_than_there_was_lets_pins_go(share):
    bench = make(pin_share=0.5)
    tell(bench, "aabbccddx", KVHint("pin", None, 600.0))
    bench.parts.cpu._pin_share = share
    bench.parts.cpu._victims(0, 1, keep_dirty=False)
    flood(bench)
    assert bench.held("aabbccddx", Tier.CPU) == [True] * 4, "they are retained at least"
    bench.serve("mmnnooppqqrrssttx")
    assert all(bench.held("mmnnooppqqrrssttx", Tier.CPU)) == (share == 0), "retained blocks keep nothing out"


def test_what_is_pinned_is_admitted_to_nvme():
    for action, held in (("retain", False), ("pin", True)):
        bench = make(8, 8, nvme_admission="reuse(2)")
        tell(bench, KEPT, KVHint(action, None, 600.0))
        assert bench.held(KEPT) == [held, held]


def test_what_is_demoted_leaves_first_but_not_what_others_share():
    bench = make()
    bench.serve(OTHERS[0])
    tell(bench, "aabbccx", KVHint("pin", None, 600.0))
    bench.serve("aaddx", cold=True)
    tell(bench, "aabbccx", KVHint("demote"))
    bench.serve("mmnnooppx", cold=True)
    assert bench.held("aabbccx", Tier.CPU) == [True, False, False], "its pin has ended as well"
    assert bench.held(OTHERS[0], Tier.CPU) == [True, True], "used longer ago"


def test_what_was_demoted_and_is_used_again_leaves_as_others():
    bench = make()
    tell(bench, KEPT, KVHint("demote"))
    bench.serve(OTHERS[0], cold=True)
    bench.serve(KEPT, cold=True)
    for prompt in OTHERS[1:4]:
        bench.serve(prompt, cold=True)
    assert bench.held(KEPT, Tier.CPU) == [True, True] and bench.held(OTHERS[0], Tier.CPU) == [False, False]


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_prefetch_reads_into_memory_though_its_request_is_gone(prefetch):
    bench = make(8, 16, nvme_admission="all", prefetch=prefetch)
    tell(bench, "aabbccx")
    bench.restart()
    bench.idle()
    request = bench.add("aabbccx")
    bench.manager.hint(request.id, (KVHint("prefetch", 4),), bench.engine.now)
    bench.engine.abort(request)
    assert bench.manager.has_pending_work(bench.engine.now), "an idle engine steps for it"
    bench.idle()
    assert bench.held("aabbccx", Tier.CPU) == [True, True, False]
    assert bench.parts.manager._history.known(keys_of("aabbccx")[0])[0] == 1, "it is no use"
    assert not bench.manager._promotions._ahead and not +bench.manager._promotions._taken


def test_a_prefetch_takes_half_of_memory_at_most_and_holds_up_nobody():
    bench = make(8, 32, nvme_admission="all")
    long = "aabbccddeeffgghhx"
    for prompt in (long, "mmnnx"):
        bench.serve(prompt)
    bench.restart()
    bench.idle()
    request = bench.add(long)
    bench.manager.hint(request.id, (KVHint("prefetch"),), bench.engine.now)
    bench.engine.abort(request)
    bench.step()
    bench.serve("mmnnx")
    bench.idle()
    assert bench.held(long, Tier.CPU) == [True] * 4 + [False] * 4
    assert bench.held("mmnnx", Tier.CPU) == [True, True]


def test_a_prefetch_goes_on_when_nobody_waits_for_room_any_more():
    bench = make(8, 32, nvme_admission="all")
    long = "aabbccddeeffgghhx"
    for prompt in (long, "mmnnx"):
        bench.serve(prompt)
    bench.restart()
    bench.idle()
    bench.engine.most_running = 1
    bench.add("z", finishing=False)
    bench.step()
    waits = bench.add(long)
    for _ in range(10):
        bench.step()
    assert bench.manager._promotions._lacks_room
    hinted = bench.add("mmnnx")
    bench.manager.hint(hinted.id, (KVHint("prefetch"),), bench.engine.now)
    for request in (waits, hinted):
        bench.engine.abort(request)
    next(iter(bench.engine.requests.values())).finishing = True
    bench.finish()  # or it would keep an idle engine stepping
    assert not bench.manager._promotions._asked


def test_no_more_prefetches_wait_than_the_queue_has_place_for(caplog):
    bench = make(8, 32)
    request = bench.add(KEPT)
    bench.manager.hint(request.id, (KVHint("prefetch"),) * (bounds.PREFETCHES + 1), bench.engine.now)
    assert len(bench.manager._promotions._asked) == bounds.PREFETCHES
    assert ["prefetches" in record.getMessage() for record in caplog.records] == [True]
    bench.finish()
    assert not bench.manager._promotions._asked


def test_a_reset_forgets_what_was_said():
    bench = make(8, 8, nvme_admission="all")
    tell(bench, KEPT, KVHint("pin", None, 600.0))
    bench.change_weights()
    bench.idle()
    for space in (bench.parts.cpu, bench.parts.nvme):
        assert space._evictors[0]._policy.count(PINNED) == 0
    bench.serve(KEPT, cold=True)
    flood(bench)
    assert bench.held(KEPT, Tier.CPU) == [False, False]
