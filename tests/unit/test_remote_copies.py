# SPDX-License-Identifier: Apache-2.0
"""What is sent to the remote store and when, and what waits for its answers, over a fake engine."""

from __future__ import annotations

import pytest
from support.fake_ranks import FakeRank
from support.fake_remote import FakeRemote
from support.fake_slots import TORN, Content
from tier_bench import GEOMETRY, TierBench, keys_of

from kvdisk.blocks import Tier, group_of
from kvdisk.errors import ConfigError
from kvdisk.geometry import FILE_EPOCH, Geometry, GroupGeometry
from kvdisk.manager import bounds
from kvdisk.manager.remote import ASK_AGAIN_S
from kvdisk.messages import Job, JobKind, Report

PROMPT, FOUR = "aabbccx", "jjkkllmmx"
OTHERS = ("ddx", "eex", "ffx", "ggx", "hhx", "iix")
(BLOCK_BYTES,) = GEOMETRY.slot_sizes
TWO_GROUPS = Geometry((GroupGeometry(0, 2, 4096), GroupGeometry(1, 2, 4096)), 1, 2)


class Sharing(TierBench):
    """An engine with a remote store, which answers when it is told to."""

    def __init__(self, nvme_slots: tuple[int, ...] = (), cpu_slots: tuple[int, ...] = (32,), **how: object) -> None:
        how = {"remote": "s3://bucket/kv", "remote_admission": "all", "min_load_tokens": 0} | how
        super().__init__(cpu_slots, nvme_slots, **how)

    def start_ranks(self) -> list[FakeRank]:
        self.rank = (
            self.ranks[0].survivor() if self.ranks else FakeRank(0, self.sizes.geometry, self.neighbours, self.remote)
        )
        return [self.rank]

    def make_remote(self) -> FakeRemote:
        return FakeRemote(most_questions=20)

    @property
    def sent(self) -> int:
        return len(self.remote.objects)

    def ask(self, prompt: str) -> None:
        """Let a request come that the store is asked for, and end. The GPU has forgotten all."""
        self.engine.pool.forget_all()
        self.add(prompt)
        self.step()
        self.remote.answer()
        self.finish()

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


def test_a_rate_bounds_what_is_sent_and_an_idle_engine_goes_on_with_it():
    engine = Sharing(remote_write_bytes_per_s=BLOCK_BYTES)
    engine.add(PROMPT)
    while engine.engine.requests:
        engine.step()
    assert engine.sent == 0, "it starts empty"
    began_s, sent = engine.now, []
    while engine.manager.has_pending_work(engine.now):
        engine.step(seconds=0.25)
        sent.append(engine.sent)
        assert engine.now < began_s + 10.0
    assert sent[-1] == 3 and sent[4] <= 1 and sent[8] <= 2, "a block a second"
    engine.advance(60.0)
    engine.add("".join(f"{letter}{letter}" for letter in "defghijklmno") + "x")
    while engine.engine.requests:
        engine.step()
    began_s, before = engine.now, engine.sent
    while engine.now < began_s + 10.0:
        engine.step(seconds=0.1)
    assert 8 <= engine.sent - before <= 12, "a minute that nothing was sent in is not made up for"


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


# -- a store that does not answer --------------------------------------------------------------


def waiting(*prompts: str, **how: object) -> Sharing:
    """An engine that knows that the store has these prompts, which wait for another request."""
    engine = Sharing(prefetch=False, **how)
    for prompt in prompts:
        engine.serve(prompt)
    engine.succeed()
    engine.engine.most_running = 1
    engine.add("z", finishing=False)
    engine.step()
    for prompt in prompts:
        engine.add(prompt)
    engine.step()
    engine.remote.answer()
    engine.step()
    assert set().union(*map(keys_of, prompts)) <= set(engine.manager._remote.hints)
    next(iter(engine.engine.requests.values())).finishing = True
    return engine


def paused(engine: Sharing) -> float:
    return engine.manager.gauges.read()["remote_paused"]


def test_what_is_known_of_a_store_whose_questions_are_not_answered_is_not_promised():
    engine = waiting(PROMPT)
    engine.remote.any = False
    engine.finish()
    assert engine.stats["hit_tokens.remote"] == 0 and paused(engine) == 1


def test_what_a_store_has_whose_reads_a_rank_leaves_alone_is_not_promised():
    engine = waiting(PROMPT, OTHERS[0])
    engine.rank._report.remote_pause_s = 5.0
    engine.step()
    assert paused(engine) == 1
    while len(engine.engine.requests) > 1:
        engine.step()
    assert engine.stats["hit_tokens.remote"] == 0
    engine.advance(5.0)
    engine.finish()
    assert engine.stats["hit_tokens.remote"] == 2, "the pause is over"
    assert paused(engine) == 0, "a read was answered"


def test_after_a_pause_of_reads_one_request_tries_it():
    engine = waiting(PROMPT, FOUR, OTHERS[0])
    engine.rank._report.remote_pause_s = 5.0
    engine.step()
    engine.advance(5.0)
    engine.engine.most_running = 8
    engine.step(32, work=False)
    assert engine.parts.transfers.count(JobKind.LOAD) == 1
    engine.finish()
    assert 0 < engine.stats["hit_tokens.remote"] <= 8
    assert paused(engine) == 0


def test_the_longest_pause_of_all_ranks_counts():
    report = Report(remote_pause_s=2.0).merge(Report(remote_pause_s=7.0)).merge(Report())
    assert report.remote_pause_s == 7.0 and not report.empty


# -- objects that are bad ----------------------------------------------------------------------


def with_bad(engine: Sharing, prompt: str) -> dict[object, Content]:
    """Let the store have a prompt whose bytes are wrong; return what is right."""
    other = Sharing()
    other.serve(prompt)
    engine.remote.objects.update({name: one._replace(payload=TORN) for name, one in other.remote.objects.items()})
    return dict(other.remote.objects)


def is_right(engine: Sharing, right: dict[object, Content]) -> list[bool]:
    return [engine.remote.objects[name].payload == one.payload for name, one in right.items()]


def test_a_bad_object_is_written_over_once_by_who_computes_it():
    """Whatever else is admitted."""
    engine = Sharing(remote_admission="reuse(16)", cpu_slots=(8,), prefetch=False)
    right = with_bad(engine, PROMPT)
    engine.ask(PROMPT)
    assert engine.stats["remote_rejects"] > 0
    assert all(is_right(engine, right))
    sent = engine.stats["sent_blocks"]
    with_bad(engine, PROMPT)
    for prompt in (FOUR, *OTHERS):
        engine.serve(prompt, cold=True)
    engine.ask(PROMPT)
    assert not any(is_right(engine, right)), "it is not written over again"
    assert engine.stats["sent_blocks"] == sent


def test_who_may_not_write_uses_what_somebody_has_repaired():
    engine = Sharing(remote_read_only=True, cpu_slots=(8,), prefetch=False)
    right = with_bad(engine, PROMPT)
    engine.ask(PROMPT)
    assert engine.stats["remote_rejects"] > 0 and not any(is_right(engine, right))
    engine.remote.objects.update(right)
    for prompt in (FOUR, *OTHERS):
        engine.serve(prompt, cold=True)
    engine.advance(bounds.READ_AGAIN.first_s)
    before = engine.stats["hit_tokens.remote"]
    engine.ask(PROMPT)
    assert engine.stats["hit_tokens.remote"] == before + 6


# -- several groups ----------------------------------------------------------------------------


def test_where_little_can_be_queued_it_is_of_all_groups(monkeypatch):
    monkeypatch.setattr(bounds, "QUEUED", 8)
    engine = Sharing(geometry=TWO_GROUPS)
    engine.remote.any = False
    engine.serve("aabbccddeeffgghhx")
    rows = sorted(engine.catalog.rows(), key=lambda row: group_of(engine.catalog.keys[row]))
    far = engine.manager._remote
    far.hints.clear()
    far.offer(rows)
    queued = [group_of(key) for key in far._queue]
    assert queued.count(0) == queued.count(1) == 4


def test_where_memory_is_short_what_is_read_is_kept_of_all_groups():
    one = Sharing(geometry=TWO_GROUPS)
    one.serve("aabbccddeeffgghhx")
    engine = Sharing(geometry=TWO_GROUPS, cpu_slots=(8,), prefetch=False)
    engine.remote.objects.update(one.remote.objects)
    engine.add("aabbccddeeffgghhx")
    loads: list[Job] = []
    for _ in range(20):
        engine.remote.answer()
        loads += [job for job in engine.step(32).jobs if job.kind is JobKind.LOAD]
    kept = [group_of(move.key) for move in loads[0].moves if Tier.CPU in move.slots]
    assert len(loads[0].moves) == 16 and kept.count(0) == kept.count(1) == 4
    engine.finish()


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
    assert jobs == bounds.JOBS + 1, "as many as may be of the one, and one of the other"
