# SPDX-License-Identifier: Apache-2.0
"""The mover's routes to and from the remote store."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from ranks import FINGERPRINT, GEOMETRY, GROUPS, Rank, keeping, move
from support.memory_objects import MemoryBucket, MemoryObjects
from support.waits import WAIT_S, until

from kvdisk.blocks import BY_KEY_OVER, Tier
from kvdisk.device.header import read_header
from kvdisk.geometry import HEADER_BYTES, Namespace, slot_offset
from kvdisk.messages import JobKind, Move, Plan, Reason
from kvdisk.remote.base import ObjectsOutcome, Result, object_name
from kvdisk.remote.client import BucketObjects
from kvdisk.remote.planes import SUFFIX, PlanesCodec

BLOCKS = [5, 1, 2, 40, 17]
GROUP_OF = [0, 1, 0, 0, 1]


class Store(MemoryObjects):
    """The reference, which can hang, and answer every object with ``instead``."""

    hangs = False
    instead: Result | None = None
    closed = False

    def poll(self, timeout_s: float = 0.0) -> list[ObjectsOutcome]:
        if self.hangs:
            return []
        outcomes = super().poll(timeout_s)
        if self.instead is None:
            return outcomes
        return [outcome._replace(results=(self.instead,) * len(outcome.results)) for outcome in outcomes]

    def close(self) -> None:
        super().close()
        self.closed = True


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def rank(store) -> Iterator[Rank]:
    made = Rank(remote=store)
    made.run()
    yield made
    made.close()


def name_of(number: int, group: int, epoch: int = 0) -> str:
    return object_name(Namespace(FINGERPRINT, epoch), move(number, group).key, 0, 1)


@pytest.fixture
def before(rank) -> list[bytes]:
    """What the blocks hold, which the remote store has, and the GPU no more."""
    pairs = list(zip(BLOCKS, GROUP_OF, strict=True))
    before = [rank.payload(group, block) for block, group in pairs]
    rank.do(JobKind.STORE, [move(b, g, b, rank.cpu(g, at)) for at, (b, g) in enumerate(pairs)])
    sent = [move(b, g, cpu=rank.cpu(g, at), remote=True) for at, (b, g) in enumerate(pairs)]
    assert rank.do(JobKind.DEMOTE, sent) == {}
    rank.erase()
    return before


def payloads(rank) -> list[bytes]:
    return [rank.payload(group, block) for block, group in zip(BLOCKS, GROUP_OF, strict=True)]


def loads(**fields):
    return [move(b, g, b, remote=True, **fields) for b, g in zip(BLOCKS, GROUP_OF, strict=True)]


def test_a_sealed_slot_goes_out_as_it_is(rank, store, before):
    assert set(store.contents) == {name_of(b, g) for b, g in zip(BLOCKS, GROUP_OF, strict=True)}
    body = store.contents[name_of(BLOCKS[0], GROUP_OF[0])]
    assert body == bytes(rank.arena.view(rank.classes[0], 0))
    sent = sum(GROUPS[group].slot_bytes for group in GROUP_OF)
    assert rank.stats.sum_of("transfer_bytes.cpu_to_remote") == sent
    assert rank.stats["drive_written_bytes.0"] == 0


def test_what_another_engine_sent_is_loaded_through_staging_whatever_its_generation(rank, before):
    assert rank.do(JobKind.LOAD, loads(generation=99)) == {}
    assert payloads(rank) == before


@pytest.mark.parametrize("kind", [JobKind.LOAD, JobKind.PROMOTE])
def test_what_lands_in_memory_is_sealed_for_the_generation_that_the_manager_gave_it(rank, before, kind):
    slots = [rank.cpu(group, 20 + at) for at, group in enumerate(GROUP_OF)]
    assert rank.do(kind, [keeping(load, slot) for load, slot in zip(loads(generation=99), slots, strict=True)]) == {}
    assert (payloads(rank) == before) == (kind is JobKind.LOAD)
    for slot, load, group in zip(slots, loads(), GROUP_OF, strict=True):
        identity = read_header(rank.arena.view(rank.classes[group], slot.index)).identity
        assert (identity.key, identity.generation) == (load.key, 99)
    rank.erase()
    in_memory = zip(BLOCKS, GROUP_OF, slots, strict=True)
    assert rank.do(JobKind.LOAD, [move(b, g, b, slot, generation=99) for b, g, slot in in_memory]) == {}
    assert payloads(rank) == before


def test_each_bad_object_fails_alone_with_its_reason(rank, store, before):
    names = [name_of(b, g) for b, g in zip(BLOCKS, GROUP_OF, strict=True)]
    bodies = [bytearray(store.contents[name]) for name in names]
    store.contents[names[0]] = bytes(bodies[2])  # of another block
    bodies[1][-GROUPS[1].slot_bytes + 4096 + 5] ^= 1
    store.contents[names[1]] = bytes(bodies[1])
    store.contents[names[2]] = bytes(bodies[2][:-1])
    del store.contents[names[3]]
    reasons = {0: Reason.HEADER, 1: Reason.CHECKSUM, 2: Reason.HEADER, 3: Reason.ABSENT}
    assert rank.do(JobKind.LOAD, loads()) == reasons
    assert payloads(rank)[4] == before[4]


def test_of_another_epoch_nothing_is_found(rank, before):
    assert set(rank.do(JobKind.LOAD, loads(), epoch=3).values()) == {Reason.ABSENT}


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (Result.LATE, Reason.DEADLINE),
        (Result.REFUSED, Reason.CANCELLED),
        (Result.FAILED, Reason.REMOTE_ERROR),
    ],
)
def test_failures_are_reasons_and_nothing_is_late(rank, store, before, result, reason):
    store.instead = result
    for moves in (
        loads(),
        [keeping(load, rank.cpu(g, 30 + at)) for at, (load, g) in enumerate(zip(loads(), GROUP_OF, strict=True))],
    ):
        job = rank.submit(JobKind.LOAD, moves)
        found = rank.run()[job]
        assert {reason} <= set(found.failed.values()) <= {reason, Reason.CANCELLED}
        assert len(found.failed) == len(moves)
        assert not found.late
    assert payloads(rank) != before


def test_a_store_that_hangs_holds_up_neither_the_drive_nor_the_end(rank, store, before):
    store.hangs = True
    remote = [rank.submit(JobKind.LOAD, loads()) for _ in range(8)]
    assert rank.do(JobKind.STORE, [move(3, 0, 3, nvme=3)]) == {}
    assert rank.do(JobKind.LOAD, [move(3, 0, 3, nvme=3)]) == {}
    assert rank.do(JobKind.LOAD, [move(BLOCKS[0], 0, 9, rank.cpu(0, 0))]) == {}
    assert not set(remote) & set(rank.results)
    rank.mover.close()
    assert store.closed
    ended = rank.poll()
    assert all(set(ended[job].failed.values()) == {Reason.CANCELLED} for job in remote)


@pytest.mark.parametrize("instead", [Result.LATE, Result.FAILED])
def test_of_a_job_that_has_failed_nothing_more_is_asked_for(rank, store, before, monkeypatch, instead):
    asked = []
    submit = store.submit
    monkeypatch.setattr(store, "submit", lambda op, batch: asked.append(len(batch)) or submit(op, batch))
    store.instead = instead
    first, second = rank.submit(JobKind.LOAD, loads()), rank.submit(JobKind.LOAD, loads())
    found = rank.run()
    assert len(found[first].failed) == len(found[second].failed) == len(BLOCKS)
    assert sum(asked) < 2 * len(BLOCKS)
    for job in (first, second):
        reasons = list(found[job].failed.values())
        assert Reason.CANCELLED in reasons and set(reasons) > {Reason.CANCELLED}
    store.instead = None
    assert rank.do(JobKind.LOAD, loads()) == {} and payloads(rank) == before


def test_a_pause_is_told_once_and_so_is_the_next(rank, store, before):
    def told() -> list[float]:
        """Have a load fail; return the pauses that are reported, and what the next turn says."""
        store.instead, store.pause_s = Result.FAILED, 2.0
        moves = loads()
        rank.mover.submit(Plan((rank.job(JobKind.LOAD, moves),)))
        reports = []
        while sum(len(result.failed) for report in reports for result in report.results.values()) < len(moves):
            rank.mover.turn()
            reports.append(rank.mover.poll())
        rank.mover.turn()
        return [report.remote_pause_s for report in [*reports, rank.mover.poll()] if report.remote_pause_s]

    assert told() == [2.0]
    assert told() == [2.0], "another pause, though nobody saw the first one end"


def test_an_object_that_is_bad_is_named_in_the_log_and_the_reason_comes_first(rank, store, before, caplog):
    names = [name_of(b, g) for b, g in zip(BLOCKS, GROUP_OF, strict=True)]
    body = bytearray(store.contents[names[1]])
    body[4096 + 5] ^= 1
    store.contents |= {names[0]: store.contents[names[2]], names[1]: bytes(body), names[3]: b"short"}
    rank.do(JobKind.LOAD, loads())
    said = {record.getMessage() for record in caplog.records}
    for what, at in (("header", 0), ("checksum", 1), ("length or seal", 3)):
        assert f"kvdisk: wrong {what}: object {names[at]} of the remote store is not used" in said


def test_a_write_over_replaces_what_is_there(rank, store, before):
    names = [name_of(b, g) for b, g in zip(BLOCKS, GROUP_OF, strict=True)]
    right = dict(store.contents)
    store.contents |= {name: bytes(len(right[name])) for name in names}
    places = [(b, g, rank.cpu(g, at)) for at, (b, g) in enumerate(zip(BLOCKS, GROUP_OF, strict=True))]
    moves = [move(b, g, cpu=slot, remote=True) for b, g, slot in places]
    assert rank.do(JobKind.DEMOTE, moves) == {}
    assert store.contents != right, "the first write wins"
    over = [one._replace(slots={**one.slots, Tier.REMOTE: BY_KEY_OVER}) for one in moves]
    assert rank.do(JobKind.DEMOTE, over) == {}
    assert store.contents == right


# -- from a drive ----------------------------------------------------------------------------------


@pytest.fixture
def stored(rank) -> list[bytes]:
    """What the blocks hold, which the drive has, and the GPU no more."""
    pairs = list(zip(BLOCKS, GROUP_OF, strict=True))
    before = [rank.payload(group, block) for block, group in pairs]
    assert rank.do(JobKind.STORE, [move(b, g, b, nvme=b) for b, g in pairs]) == {}
    rank.erase()
    return before


def relays() -> list[Move]:
    return [move(b, g, nvme=b, remote=True) for b, g in zip(BLOCKS, GROUP_OF, strict=True)]


@pytest.mark.parametrize("made", [{}, {"checksum_threads": 2}, {"direct": True}])
def test_what_a_drive_has_goes_out_through_staging(store, made):
    rank = Rank(remote=store, cpu_slots=0, **made)
    rank.run()
    pairs = list(zip(BLOCKS, GROUP_OF, strict=True))
    before = [rank.payload(group, block) for block, group in pairs]
    stores = [rank.submit(JobKind.STORE, [move(b, g, b, nvme=b) for b, g in pairs])]
    run_all(rank, stores)
    rank.erase()
    sends = [rank.submit(JobKind.DEMOTE, relays())]
    assert run_all(rank, sends)[sends[0]].failed == {}
    sent = sum(GROUPS[group].slot_bytes for group in GROUP_OF)
    for route in ("nvme_to_cpu", "cpu_to_remote"):
        assert rank.stats.sum_of(f"transfer_bytes.{route}") == sent
    assert rank.stats["drive_read_bytes.0"] == sent == rank.stats["drive_written_bytes.0"]
    got = [rank.submit(JobKind.LOAD, loads(generation=99))]
    assert run_all(rank, got)[got[0]].failed == {} and payloads(rank) == before
    rank.close()


def run_all(rank, jobs):
    """Turn until these jobs have ended, also where threads do a part of them."""
    for _ in range(100_000):
        if set(jobs) <= set(rank.run()):
            break
        time.sleep(0.001)
    return rank.results


def test_what_a_drive_has_lost_is_not_sent(rank, store, stored):
    rank.memory._files[100][slot_offset(GROUPS[0].slot_bytes, BLOCKS[0]) + HEADER_BYTES + 9] ^= 1
    assert rank.do(JobKind.DEMOTE, relays()) == {0: Reason.CHECKSUM}
    assert set(store.contents) == {name_of(b, g) for b, g in list(zip(BLOCKS, GROUP_OF, strict=True))[1:]}


@pytest.mark.parametrize(
    ("result", "reason"),
    [(Result.LATE, Reason.DEADLINE), (Result.REFUSED, Reason.CANCELLED), (Result.FAILED, Reason.REMOTE_ERROR)],
)
def test_a_store_that_takes_nothing_is_no_failure_of_the_drive(rank, store, stored, result, reason):
    store.instead = result
    job = rank.submit(JobKind.DEMOTE, relays())
    found = rank.run()[job]
    assert {reason} <= set(found.failed.values()) <= {reason, Reason.CANCELLED}
    assert len(found.failed) == len(BLOCKS) and not found.late
    store.instead = None
    assert rank.do(JobKind.DEMOTE, relays()) == {}


def test_a_drive_that_hangs_makes_what_is_sent_late(rank, store, stored):
    rank.device.plan.hold = True
    job = rank.submit(JobKind.DEMOTE, relays())
    rank.run()
    rank.now_s += 11.0
    rank.run()
    assert set(rank.results[job].failed.values()) == {Reason.DEADLINE}
    assert rank.results[job].late and not store.contents
    rank.let_go()
    rank.run()
    assert job in rank.released and not store.contents


def test_sends_that_hang_leave_staging_to_stores_and_loads(rank, store, stored):
    store.hangs = True
    sends = [rank.submit(JobKind.DEMOTE, relays()) for _ in range(8)]
    rank.run()
    for block in range(8):
        assert rank.do(JobKind.STORE, [move(block, 1, block, nvme=40)]) == {}
    assert rank.do(JobKind.LOAD, [move(b, g, b, nvme=b) for b, g in zip(BLOCKS, GROUP_OF, strict=True)]) == {}
    assert not set(sends) & set(rank.results)
    store.hangs = False
    rank.run()
    assert all(not rank.results[job].failed for job in sends)


def test_what_the_remote_store_has_goes_to_a_drive_without_vllms_blocks(rank, store, before):
    """Sealed there for the generation that the manager gave it."""
    fetched = [move(b, g, nvme=b, remote=True, generation=99) for b, g in zip(BLOCKS, GROUP_OF, strict=True)]
    assert rank.do(JobKind.PROMOTE, fetched) == {} and payloads(rank) != before
    store.contents.clear()
    stored = [move(b, g, b, nvme=b, generation=99) for b, g in zip(BLOCKS, GROUP_OF, strict=True)]
    assert rank.do(JobKind.LOAD, stored) == {} and payloads(rank) == before
    assert set(rank.do(JobKind.PROMOTE, fetched).values()) == {Reason.ABSENT}


# -- coded -------------------------------------------------------------------------------------


@pytest.fixture
def coded() -> Iterator[tuple[Rank, MemoryBucket]]:
    """A rank whose blocks shrink, and the bucket that its client codes for."""
    bucket = MemoryBucket()
    made = Rank(remote=BucketObjects(bucket, deadline_s=WAIT_S, codec=PlanesCodec()))
    for layers in made.layers:
        for layer in layers:
            layer.bitwise_and_(7)
    made.run()
    yield made, bucket
    made.close()


def settled(rank: Rank, kind: JobKind, moves: list[Move]) -> dict[int, Reason]:
    job = rank.submit(kind, moves)
    until(lambda: job in rank.run(), "the job to end")
    return {at: Reason(reason) for at, reason in rank.results[job].failed.items()}


def sent(rank: Rank) -> list[bytes]:
    """Send the blocks; return what they hold, and the GPU no more."""
    pairs = list(zip(BLOCKS, GROUP_OF, strict=True))
    before = [rank.payload(group, block) for block, group in pairs]
    stored = [move(b, g, b, rank.cpu(g, at)) for at, (b, g) in enumerate(pairs)]
    assert settled(rank, JobKind.STORE, stored) == {}
    moves = [move(b, g, cpu=rank.cpu(g, at), remote=True) for at, (b, g) in enumerate(pairs)]
    assert settled(rank, JobKind.DEMOTE, moves) == {}
    rank.erase()
    return before


def test_a_coded_slot_comes_back_as_it_was_and_both_sizes_are_counted(coded):
    rank, bucket = coded
    before = sent(rank)
    there = {name_of(b, g) + SUFFIX for b, g in zip(BLOCKS, GROUP_OF, strict=True)}
    assert set(bucket.contents) == there
    assert settled(rank, JobKind.LOAD, loads(generation=99)) == {}
    assert payloads(rank) == before
    stored = sum(map(len, bucket.contents.values()))
    assert rank.stats["remote_written_bytes"] == rank.stats["remote_read_bytes"] == stored
    whole = sum(GROUPS[group].slot_bytes for group in GROUP_OF)
    for route in ("cpu_to_remote", "remote_to_cpu"):
        assert rank.stats.sum_of(f"transfer_bytes.{route}") == whole > 1.5 * stored


def test_no_bit_that_flips_in_a_coded_object_reaches_the_gpu(coded):
    rank, bucket = coded
    before = sent(rank)
    good = dict(bucket.contents)
    seen = set()
    for seed in range(40):
        for number, (name, body) in enumerate(good.items()):
            bit = random.Random(100 * seed + number).randrange(8 * len(body))
            bucket.contents[name] = body[: bit // 8] + bytes([body[bit // 8] ^ 1 << bit % 8]) + body[bit // 8 + 1 :]
        rank.erase()
        failed = settled(rank, JobKind.LOAD, loads())
        seen |= {*failed.values(), *([None] if len(failed) < len(BLOCKS) else [])}
        for at, (found, wanted) in enumerate(zip(payloads(rank), before, strict=True)):
            assert at in failed or found == wanted
    assert {Reason.HEADER, Reason.CHECKSUM} <= seen <= {Reason.HEADER, Reason.CHECKSUM, None}


def test_what_has_changed_in_memory_is_not_sent(coded):
    rank, bucket = coded
    pairs = list(zip(BLOCKS, GROUP_OF, strict=True))
    settled(rank, JobKind.STORE, [move(b, g, b, rank.cpu(g, at)) for at, (b, g) in enumerate(pairs)])
    rank.arena.view(rank.classes[GROUP_OF[1]], 1)[HEADER_BYTES + 3] ^= 1
    moves = [move(b, g, cpu=rank.cpu(g, at), remote=True) for at, (b, g) in enumerate(pairs)]
    assert settled(rank, JobKind.DEMOTE, moves) == {1: Reason.CHECKSUM}
    assert len(bucket.contents) == len(BLOCKS) - 1


def test_elements_of_a_group_are_split_by_its_layout():
    wide = replace(GEOMETRY, groups=tuple(replace(group, element_bytes=2) for group in GROUPS))
    bucket = MemoryBucket()
    rank = Rank(remote=BucketObjects(bucket, deadline_s=WAIT_S, codec=PlanesCodec()), geometry=wide)
    for layers in rank.layers:
        for layer in layers:
            layer.bitwise_and_(7)
    rank.run()
    sent(rank)
    assert {body[8] for body in bucket.contents.values()} == {2}
    rank.close()
