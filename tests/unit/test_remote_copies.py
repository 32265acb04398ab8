# SPDX-License-Identifier: Apache-2.0
"""What is sent to the remote store and when, and what waits for its answers, over a fake engine."""

from __future__ import annotations

import pytest
from support.fake_ranks import FakeRank
from support.fake_remote import FakeRemote
from support.fake_slots import TORN, Content
from tier_bench import GEOMETRY, TierBench, keys_of

from kvdisk.blocks import Tier
from kvdisk.errors import ConfigError
from kvdisk.geometry import FILE_EPOCH
from kvdisk.manager.prefetch import MAX_PROMOTE_JOBS
from kvdisk.manager.remote import ASK_AGAIN_S
from kvdisk.messages import JobKind

PROMPT, FOUR = "aabbccx", "jjkkllmmx"
OTHERS = ("ddx", "eex", "ffx", "ggx", "hhx", "iix")
(BLOCK_BYTES,) = GEOMETRY.slot_sizes


class Sharing(TierBench):
    """An engine with a remote store, which answers when it is told to."""

    def __init__(self, nvme_slots: tuple[int, ...] = (), cpu_slots: tuple[int, ...] = (32,), **how: object) -> None:
        how = {"remote": "s3://bucket/kv", "remote_admission": "all", "min_load_tokens": 0} | how
        super().__init__(cpu_slots, nvme_slots, **how)

    def start_ranks(self) -> list[FakeRank]:
        self.rank = self.ranks[0].survivor() if self.ranks else FakeRank(0, self.neighbours, self.remote)
        return [self.rank]

    def make_remote(self) -> FakeRemote:
        return FakeRemote(most_questions=20)

    @property
    def sent(self) -> int:
        return len(self.remote.objects)

    def queue(self, prompt: str) -> None:
        """Let a request wait behind one that runs on."""
        self.add("z", finishing=False)
        self.step()
        self.add(prompt)
        self.step()
        self.remote.answer()
        self.step()


# -- a rate ------------------------------------------------------------------------------------


def test_without_a_rate_all_is_sent_at_once():
    engine = Sharing()
    engine.serve(PROMPT)
    assert engine.sent == 3
    assert engine.manager.gauges.read()["remote_paused"] == 0
    engine.remote.any = False
    assert engine.manager.gauges.read()["remote_paused"] == 1
    assert "remote_paused" not in TierBench((32,)).manager.gauges.read()


def test_a_rate_bounds_what_is_sent_and_keeps_no_engine_awake():
    engine = Sharing(remote_write_bytes_per_s=BLOCK_BYTES)
    engine.serve(PROMPT)
    assert engine.sent == 0, "it starts empty"
    engine.advance(60.0)
    assert engine.manager.has_pending_work(engine.now)
    engine.idle()
    assert engine.sent == 2, "a minute that nothing was sent in is not made up for"
    engine.advance(5.0)
    engine.idle()
    assert engine.sent == 3
    engine.serve("".join(f"{letter}{letter}" for letter in "defghijklmno") + "x")
    began_s, before = engine.now, engine.sent
    while engine.now < began_s + 10.0:
        engine.idle(seconds=0.1)
    assert 8 <= engine.sent - before <= 12


def test_a_rate_that_never_sends_a_block_is_refused():
    with pytest.raises(ConfigError, match="remote_write_bytes_per_s 200 sends no two blocks of 8192 bytes"):
        Sharing(remote_write_bytes_per_s=200)


# -- answers that are too old ------------------------------------------------------------------


@pytest.mark.parametrize("life_s", [5.0, 60.0])
def test_who_waited_longer_than_hints_live_is_asked_for_again_and_hits(life_s):
    engine = Sharing(prefetch=False, lookup_wait_s=5.0)
    engine.remote.hint_life_s = life_s
    engine.serve(PROMPT)
    engine.succeed()
    engine.engine.most_running = 1
    engine.queue(PROMPT)
    engine.advance(life_s + 1)
    engine.step()
    assert not engine.manager._remote.hints and engine.stats["remote_questions"] == 1
    next(iter(engine.engine.requests.values())).finishing = True
    engine.step()
    engine.step()
    assert engine.stats["remote_questions"] == 2
    engine.remote.answer()
    engine.finish()
    assert engine.stats["hit_tokens.remote"] == 6


def test_while_it_waits_for_room_to_be_read_ahead_it_is_asked_for_again():
    engine = Sharing(cpu_slots=(8,))
    for prompt in (FOUR, OTHERS[0]):
        engine.serve(prompt)
    engine.succeed()
    engine.engine.most_running = 1
    engine.queue(FOUR)
    assert all(engine.held(FOUR, Tier.CPU)), "half of memory is read ahead into"
    engine.add(OTHERS[0])
    for _ in range(4):
        engine.step()
        engine.remote.answer()
        engine.advance(ASK_AGAIN_S + 1)
    assert set(keys_of(OTHERS[0])) <= set(engine.manager._remote.hints)
    next(iter(engine.engine.requests.values())).finishing = True
    engine.finish()
    assert engine.stats["hit_tokens.remote"] + engine.stats["hit_tokens.cpu"] == 10


# -- reading ahead -----------------------------------------------------------------------------


def test_a_slow_remote_store_does_not_hold_up_what_a_drive_has():
    engine = Sharing((32,), remote_admission="reuse(16)")
    engine.serve(PROMPT)
    engine.restart()
    engine.engine.most_running = 1
    content = Content(FILE_EPOCH, keys_of("dd")[0], 0, TORN)
    for prompt in OTHERS:
        engine.remote.objects[FILE_EPOCH, keys_of(prompt)[0], 0] = content
    engine.add("z", finishing=False)
    engine.step()
    for prompt in (*OTHERS, PROMPT):
        engine.add(prompt)
    engine.step(work=False)
    for _ in range(len(OTHERS) + 1):
        engine.remote.answer()
        engine.step(work=False)
    jobs = engine.parts.transfers.count(JobKind.PROMOTE)
    assert jobs == MAX_PROMOTE_JOBS + 1, "as many as may be of the one, and one of the other"
