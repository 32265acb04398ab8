# SPDX-License-Identifier: Apache-2.0
"""What only a store on a drive has to do: keep blocks over a restart and a crash, find damage, and
bear a drive that is full, broken or hung. This file is also the program that is killed."""

from __future__ import annotations

import errno
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from support.drive_blocks import FACTS, NAMESPACE, bytes_for, gated_device, make_room, open_drive
from support.waits import until

from kvdisk.blocks import BlockKey, Tier
from kvdisk.cli.survey import survey_store
from kvdisk.config import Config
from kvdisk.device import store as device_store
from kvdisk.device.segment import segment_path
from kvdisk.errors import ConfigError
from kvdisk.geometry import HEADER_BYTES, slot_offset
from kvdisk.messages import Job, JobResult, Plan, Reason, Report
from kvdisk.store import ROOM_S, BlockStore, Ended, Get, JointCap, Presence, Put, Result, Rows, ThreadMover, geometry_of
from kvdisk.testing.store_conformance import (
    KINDS,
    KINDS_IN_PIECES,
    InPieces,
    content_of,
    finish,
    get_all,
    holds,
    key_of,
    make_rows,
    put_all,
    run_until,
)

PLENTY = bytes_for(KINDS, 1000)
KEYS = [key_of(number) for number in range(12)]
AFTER_ANY_PAUSE_S = 10_000.0


def settle(store: BlockStore) -> None:
    """Step until nothing is left to do, so that everything is committed."""
    run_until(store, lambda: not store.step(time.monotonic()), [])


def opened(path: Path, rows: Rows, **settings: object) -> BlockStore:
    store = open_drive(path, KINDS, rows, PLENTY, **settings)
    make_room(store)
    return store


def ready_of(store: BlockStore, keys: Sequence[BlockKey]) -> list[BlockKey]:
    return [key for key, each in zip(keys, store.presence(keys), strict=True) if each == Presence.READY]


def damage(store: BlockStore, key: BlockKey, offset: int) -> None:
    """Flip a bit of a block on the drive. ``offset``: in its slot."""
    catalog, home, nvme = store._manager._catalog, store._parts.home, store._parts.nvme
    assert home is not None
    assert nvme is not None
    slot = catalog.slot(catalog.find(key), Tier.NVME)
    spec = nvme.segments.specs[slot.segment]
    folder = home.folders[spec.drive]
    assert folder is not None
    with segment_path(folder, slot.segment, 0).open("r+b", buffering=0) as raw:
        raw.seek(slot_offset(spec.slot_bytes, slot.index) + offset)
        byte = raw.read(1)[0]
        raw.seek(-1, os.SEEK_CUR)
        raw.write(bytes([byte ^ 1]))


# -- restarts ------------------------------------------------------------------------------------


def test_a_restart_finds_what_was_there(tmp_path: Path) -> None:
    rows = make_rows()
    store = opened(tmp_path, rows)
    put_all(store, rows, KEYS)
    store.close()
    rows[:] = 0
    store = open_drive(tmp_path, KINDS, rows, PLENTY)
    assert ready_of(store, KEYS) == KEYS
    assert get_all(store, KEYS) == [Result.DONE] * len(KEYS)
    assert all(holds(rows, at, key, KINDS) for at, key in enumerate(KEYS))
    store.close()


def test_a_restart_finds_what_was_there_in_pieces(tmp_path: Path) -> None:
    """On the drive a block is one, whatever rows its bytes came from."""
    held = InPieces(make_rows(40), make_rows(50, 512, 0))
    store = open_drive(tmp_path, KINDS_IN_PIECES, held.memory, PLENTY)
    make_room(store)
    held.write()
    store.put(1, [Put(key, None, row) for key, row in zip(held.keys, held.rows, strict=True)])
    assert finish(store, 1)[1].results == [Result.DONE] * 12
    store.close()
    rows, whole = make_rows(), [kind._replace(piece_bytes=()) for kind in KINDS_IN_PIECES]
    store = open_drive(tmp_path, whole, rows, PLENTY)
    assert get_all(store, held.keys) == [Result.DONE] * 12
    assert all(holds(rows, at, key, whole) for at, key in enumerate(held.keys))
    store.close()


def test_a_restart_finds_what_was_there_before_a_new_epoch(tmp_path: Path) -> None:
    """What came after it was another's meaning of the same keys, and died with the process."""
    rows = make_rows()
    store = opened(tmp_path, rows)
    put_all(store, rows, KEYS)
    store.forget(77)
    put_all(store, rows, KEYS, version=1)
    store.close()
    store = open_drive(tmp_path, KINDS, rows, PLENTY)
    assert get_all(store, KEYS) == [Result.DONE] * len(KEYS)
    assert all(holds(rows, at, key, KINDS) for at, key in enumerate(KEYS))
    store.close()


def test_a_restart_knows_whose_blocks_they_are(tmp_path: Path) -> None:
    """By digests: a salt counts as such once it is named."""
    rows, size = make_rows(), KINDS[0].payload_bytes
    store = opened(tmp_path, rows)
    store.put(1, [Put(key, None, at, "ada" if at < 5 else "") for at, key in enumerate(KEYS)])
    finish(store, 1)
    store.close()
    store = open_drive(tmp_path, KINDS, rows, PLENTY)
    assert store.usage() == (12 * size, {"": 7 * size}, 5 * size)
    assert store.usage(["bob", "ada"]) == (12 * size, {"": 7 * size, "ada": 5 * size}, 0)
    store.close()


def test_usage_and_a_share_of_each_tenant_count_beside_each_other(tmp_path: Path) -> None:
    rows, size = make_rows(), KINDS[0].payload_bytes
    store = opened(tmp_path, rows, salt_share=0.5)
    store.put(1, [Put(key, None, at, "ada") for at, key in enumerate(KEYS)])
    finish(store, 1)
    assert store.usage().by_salt == {"ada": 12 * size}
    store.delete(2, KEYS[:4])
    finish(store, 2)
    assert store.usage().by_salt == {"ada": 8 * size}
    share, tenant = store._parts.nvme.share, store._parts.salts.of("ada")  # type: ignore[union-attr]
    assert share is not None
    assert share.count(store._manager._geometry.size_classes[0], tenant) == 8
    store.close()


def test_a_hold_counts_what_is_before_its_blocks_and_ends(tmp_path: Path) -> None:
    """A block stays only if all before it do. Held again, it counts once; after its time it counts
    no more."""
    rows = make_rows()
    store = opened(tmp_path, rows)
    put_all(store, rows, KEYS)
    nvme = store._parts.nvme
    assert nvme is not None
    size_class = geometry_of(KINDS).size_classes[0]
    free = nvme.left_to_stay(size_class)
    assert free > len(KEYS)
    store.hold(KEYS[5:8], 1.0)
    assert nvme.left_to_stay(size_class) == free - 8
    store.hold(KEYS[6:8], 2.0)
    assert nvme.left_to_stay(size_class) == free - 8
    run_until(store, lambda: nvme.left_to_stay(size_class) == free, [])
    store.close()


def test_facts_as_long_as_they_may_be_lose_nothing(tmp_path: Path) -> None:
    """However they are indented in a file."""
    rows = make_rows()
    for facts in ({"numbers": [1] * 29_000}, {"model": "m" * 262_000}):
        for keys, result in ((KEYS[:4], Result.DONE), (KEYS[:4], Result.PRESENT)):
            config = Config.from_mapping({"store_dirs": str(tmp_path / next(iter(facts))), "nvme_bytes": PLENTY})
            store = BlockStore.open(config, NAMESPACE, facts, KINDS, rows)
            assert put_all(store, rows, keys) == [result] * 4
            store.close()


def test_another_namespace_finds_nothing(tmp_path: Path) -> None:
    rows = make_rows()
    store = opened(tmp_path, rows)
    put_all(store, rows, KEYS)
    config = store._config
    store.close()
    other = BlockStore.open(config, bytes(32), {}, KINDS, rows)
    assert other.presence(KEYS) == bytes(len(KEYS))
    other.close()


def live(path: Path, seed: int) -> None:
    """Put and get until killed, from the first segment on; say so once, and each wrong byte."""
    dice, rows = random.Random(seed), make_rows()
    store, tag, said = open_drive(path, KINDS, rows, bytes_for(KINDS, 150)), 0, False
    while True:
        tag += 1
        numbers = dice.sample(range(400), 16)
        if dice.random() < 0.7:
            for at, number in enumerate(numbers):
                rows[at] = content_of(key_of(number))
            store.put(tag, [Put(key_of(number), None, at) for at, number in enumerate(numbers)])
        else:
            store.get(tag, [Get(key_of(number), at) for at, number in enumerate(numbers)])
        (ended,) = finish(store, tag).values()
        for at, result in enumerate(ended.results):
            if result is Result.DONE and not holds(rows, at, key_of(numbers[at]), KINDS):
                print("WRONG BYTES", flush=True)
        if Result.DONE in ended.results and not said:
            said = True
            print("serves", flush=True)


def test_killed_at_any_instant(tmp_path: Path) -> None:
    """What the index names after kill -9 is what was put, and nothing else is found."""
    dice, found = random.Random(11), 0
    keys = [key_of(number) for number in range(400)]
    for number in range(4):
        command = [sys.executable, __file__, str(tmp_path), str(number)]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "serves\n"
            time.sleep(dice.random() * 0.5)  # nothing depends on how much happens meanwhile
            child.send_signal(signal.SIGKILL)
            assert "WRONG" not in child.stdout.read()
        rows = make_rows(400)
        store = open_drive(tmp_path, KINDS, rows, bytes_for(KINDS, 150))
        ready = ready_of(store, keys)
        found += len(ready)
        assert get_all(store, ready) == [Result.DONE] * len(ready)
        assert all(holds(rows, at, key, KINDS) for at, key in enumerate(ready))
        store.close()
    assert found > 0


@pytest.mark.parametrize("nvme_bytes", [(1 << 63) - 1, 10**25])
def test_a_cap_without_sense_is_refused_and_nothing_is_lost(tmp_path: Path, nvme_bytes: int) -> None:
    rows = make_rows()
    store = opened(tmp_path, rows)
    put_all(store, rows, KEYS)
    store.close()
    with pytest.raises(ConfigError, match="more than drives have"):
        open_drive(tmp_path, KINDS, rows, nvme_bytes)
    store = opened(tmp_path, rows)
    assert ready_of(store, KEYS) == KEYS
    store.close()


# -- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "result"), [(HEADER_BYTES + 9_999, Result.CHECKSUM), (HEADER_BYTES, Result.CHECKSUM), (0, Result.HEADER)]
)
def test_a_flipped_bit_is_found_and_its_block_dropped(tmp_path: Path, offset: int, result: Result) -> None:
    rows = make_rows()
    store = opened(tmp_path, rows)
    put_all(store, rows, KEYS)
    damage(store, KEYS[5], offset)
    wanted = [*KEYS, KEYS[5]]  # twice in the job
    results = [result if key == KEYS[5] else Result.DONE for key in wanted]
    assert get_all(store, wanted) == results
    assert all(holds(rows, at, key, KINDS) for at, key in enumerate(KEYS) if key != KEYS[5])
    assert ready_of(store, KEYS) == [key for key in KEYS if key != KEYS[5]]
    assert get_all(store, [KEYS[5]]) == [Result.ABSENT]
    assert put_all(store, rows, [KEYS[5]]) == [Result.DONE]
    assert get_all(store, [KEYS[5]]) == [Result.DONE]
    store.close()


def test_a_read_error_is_a_result(tmp_path: Path) -> None:
    rows = make_rows()
    with gated_device() as device:
        store = opened(tmp_path, rows)
        put_all(store, rows, [KEYS[0]])
        device.plan.fail = dict.fromkeys(range(1000), errno.EIO)
        assert get_all(store, [KEYS[0]]) == [Result.IO_ERROR]
        device.plan.fail = {}
        assert get_all(store, [KEYS[0]]) == [Result.ABSENT]
        store.close()


def test_a_file_that_is_gone_at_the_start_stops_no_write_to_its_drive(tmp_path: Path) -> None:
    """What was to be written there fails, before anybody knows that it is gone; the rest goes
    elsewhere."""
    rows = make_rows()
    store = opened(tmp_path, rows)
    put_all(store, rows, KEYS[:4])
    store.close()
    for file in (tmp_path / "store").rglob("rank0.kv"):
        file.unlink()
    store = open_drive(tmp_path, KINDS, rows, PLENTY)
    put_all(store, rows, KEYS[4:8])
    assert put_all(store, rows, KEYS[8:]) == [Result.DONE] * 4
    assert store.stats().counts.get("write_pauses", 0) == 0
    store.close()


# -- drives that are full, or hang ---------------------------------------------------------------


def test_a_full_drive_is_a_result(tmp_path: Path) -> None:
    """What is there is served; after a pause it is tried again."""
    rows = make_rows()
    with gated_device() as device:
        store = opened(tmp_path, rows)
        put_all(store, rows, KEYS[:4])
        device.plan.full = True
        assert put_all(store, rows, KEYS[4:8]) == [Result.NO_SPACE] * 4
        assert put_all(store, rows, KEYS[8:]) == [Result.NO_ROOM] * 4  # nothing is written for a while
        assert get_all(store, KEYS[:4]) == [Result.DONE] * 4
        assert ready_of(store, KEYS) == KEYS[:4]
        device.plan.full = False
        store.step(time.monotonic() + AFTER_ANY_PAUSE_S)
        for at, key in enumerate(KEYS):
            rows[at] = content_of(key)
        store.put(9, [Put(key, None, at) for at, key in enumerate(KEYS)])
        store.step(time.monotonic() + AFTER_ANY_PAUSE_S)
        assert finish(store, 9)[9].results == [Result.PRESENT] * 4 + [Result.DONE] * 8
        store.close()


def test_a_cap_larger_than_the_drives_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What there is room for is used."""

    def free_bytes(path: Path) -> int:
        files = [file.stat().st_blocks * 512 for file in (tmp_path / "store").rglob("*") if file.is_file()]
        return max(0, PLENTY // 2 - sum(files))

    monkeypatch.setattr(device_store, "_free_bytes", free_bytes)
    rows = make_rows()
    store = opened(tmp_path, rows, segment_bytes="1MiB")
    keys = [key_of(number) for number in range(1200)]
    for start in range(0, len(keys), 20):
        results = put_all(store, rows, keys[start : start + 20])
        assert set(results) <= {Result.DONE, Result.NO_ROOM, Result.REFUSED}
    assert 100 < len(ready_of(store, keys)) < 600
    store.close()


def test_a_drive_without_any_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No put waits for what does not come."""
    rows = make_rows()
    store = open_drive(tmp_path, KINDS, rows, PLENTY)
    monkeypatch.setattr(device_store, "_free_bytes", lambda _: 0)
    assert set(put_all(store, rows, KEYS)) == {Result.NO_ROOM}
    assert get_all(store, KEYS) == [Result.ABSENT] * len(KEYS)
    store.close()


@pytest.mark.parametrize("forgets", [False, True])
def test_a_hung_drive_ends_jobs_and_never_touches_their_rows_again(tmp_path: Path, forgets: bool) -> None:
    rows = make_rows()
    with gated_device() as device:
        store = opened(tmp_path, rows, io_deadline_s=1.0)
        put_all(store, rows, KEYS[:4])
        device.plan.hold = True
        store.get(1, [Get(key, at) for at, key in enumerate(KEYS[:4])])
        for at, key in enumerate(KEYS[4:8]):
            rows[8 + at] = content_of(key)
        store.put(2, [Put(key, None, 8 + at) for at, key in enumerate(KEYS[4:8])])
        store.step(time.monotonic())
        if forgets:
            store.forget(3)
        ended = finish(store, 1, 2)
        result = Result.CANCELLED if forgets else Result.DEADLINE
        assert all(each.results == [result] * 4 for each in ended.values())
        rows[:] = 9  # they are another's
        device.opens.set()
        until(lambda: not device.held)
        settle(store)
        assert (rows == 9).all()
        store.step(time.monotonic() + AFTER_ANY_PAUSE_S)
        assert ready_of(store, KEYS) == ([] if forgets else KEYS[:4])
        if forgets:
            store.close()
            return
        tags = count(3)

        def all_are_read() -> bool:
            """On a busy machine a read may miss so short a deadline."""
            tag = next(tags)
            store.get(tag, [Get(key, at) for at, key in enumerate(KEYS[:4])])
            results = finish(store, tag)[tag].results
            store.step(time.monotonic() + tag * AFTER_ANY_PAUSE_S)
            return results == [Result.DONE] * 4

        until(all_are_read)
        assert all(holds(rows, at, key, KINDS) for at, key in enumerate(KEYS[:4]))
        store.close()


def test_an_error_of_ours_gives_no_row_back_while_a_drive_may_write_it(tmp_path: Path) -> None:
    """``poll`` raises it. What the drive has begun ends first, and so does what nobody moves."""
    rows = make_rows()
    with gated_device() as device:
        store = opened(tmp_path, rows)
        put_all(store, rows, KEYS[:4])
        device.plan.hold = True
        store.get(1, [Get(key, at) for at, key in enumerate(KEYS[:4])])
        store.step(time.monotonic())
        until(lambda: device.held)
        store.put(2, [Put(KEYS[5], None, 9)])
        device.fails = True
        with pytest.raises(RuntimeError, match="ours"):
            until(lambda: store.poll(0.01))
        for _ in range(3):
            assert [each.tag for each in store.poll(0.01)] in ([2], []), "the drive may still write to rows"
            assert store.step(time.monotonic())
        device.opens.set()
        ended: list[Ended] = []
        until(lambda: ended.extend(store.poll(0.01)) or ended)
        assert [(each.tag, each.results) for each in ended] == [(1, [Result.CANCELLED] * 4)]
        rows[:] = 9  # they are another's
        assert not store.step(time.monotonic())
        store.drain()
        store.close()
        assert (rows == 9).all()


# -- the wait for room ---------------------------------------------------------------------------


class Stalled(ThreadMover):
    """Does nothing until ``go``."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.plans: list[Plan] | None = []

    def submit(self, plan: Plan) -> None:
        if self.plans is None:
            super().submit(plan)
        else:
            self.plans.append(plan)

    def go(self) -> None:
        plans, self.plans = self.plans, None
        for plan in plans or ():
            super().submit(plan)


def stalled_store(path: Path, rows: Rows) -> tuple[BlockStore, Stalled]:
    movers: list[Stalled] = []

    def start(*arguments: object) -> Stalled:
        movers.append(Stalled(*arguments))
        return movers[0]

    config = Config.from_mapping({"store_dirs": str(path), "nvme_bytes": PLENTY})
    store = BlockStore.open(config, NAMESPACE, {}, KINDS, rows, start)
    return store, movers[0]


def test_the_first_put_waits_for_the_first_segment(tmp_path: Path) -> None:
    """Of each kind. It holds its tag, and calls do not wait. A quarter of the rows may wait, no
    more."""
    rows, keys = make_rows(16), [key_of(number, number % 2) for number in range(12)]
    store, mover = stalled_store(tmp_path, rows)
    for at, key in enumerate(keys):
        rows[at] = content_of(key)
    store.put(1, [Put(key, None, at) for at, key in enumerate(keys[:3])])
    store.put(2, [Put(key, None, 3 + at) for at, key in enumerate(keys[3:])])
    for _ in range(3):
        assert store.step(time.monotonic())
        assert store.poll() == []
    mover.go()
    ended = finish(store, 1, 2)
    assert ended[1].results == [Result.DONE] * 3
    assert ended[2].results == [Result.DONE] + [Result.NO_ROOM] * 8
    assert ready_of(store, keys) == keys[:4]
    assert get_all(store, keys[:4]) == [Result.DONE] * 4
    store.close()


def test_a_wait_for_room_is_bounded(tmp_path: Path) -> None:
    rows = make_rows(16)
    store, _ = stalled_store(tmp_path, rows)
    store.put(1, [Put(key, None, at) for at, key in enumerate(KEYS[:3])])
    store.step(time.monotonic())
    assert store.poll() == []
    store.step(time.monotonic() + ROOM_S)
    (ended,) = store.poll()
    assert (ended.tag, ended.results) == (1, [Result.NO_ROOM] * 3)
    store.close()


def test_a_put_that_says_how_long_waits_with_all_its_rows(tmp_path: Path) -> None:
    """Those that do not say so share a quarter of the rows, as without it."""
    rows = make_rows(16)
    store, mover = stalled_store(tmp_path, rows)
    for at, key in enumerate(KEYS):
        rows[at] = content_of(key)
    store.put(1, [Put(key, None, at) for at, key in enumerate(KEYS[:7])], wait_s=2 * ROOM_S)
    store.put(2, [Put(key, None, 7 + at) for at, key in enumerate(KEYS[7:])])
    store.step(time.monotonic())
    assert store.poll() == []
    store.step(time.monotonic() + ROOM_S)
    (ended,) = store.poll()
    assert (ended.tag, ended.results) == (2, [Result.NO_ROOM] * 5)
    mover.go()
    assert finish(store, 1)[1].results == [Result.DONE] * 7
    store.put(3, [Put(key, None, at) for at, key in enumerate(KEYS)], wait_s=0.0)
    assert finish(store, 3)[3].results == [Result.PRESENT] * 7 + [Result.DONE] * 5
    store.close()


# -- who is let in -------------------------------------------------------------------------------


def test_admission_refuses_what_too_few_requests_wanted(tmp_path: Path) -> None:
    rows = make_rows()
    store = opened(tmp_path, rows, nvme_admission="reuse(2)")
    assert put_all(store, rows, KEYS) == [Result.REFUSED] * len(KEYS)  # that counts as the first request
    store.reached("the first", KEYS)
    assert put_all(store, rows, KEYS) == [Result.REFUSED] * len(KEYS)
    store.reached("the second", KEYS)
    assert put_all(store, rows, KEYS) == [Result.DONE] * len(KEYS)
    store.close()


def test_a_full_store_lets_in_what_is_wanted(tmp_path: Path) -> None:
    """Also where nobody says what requests reach."""
    rows = make_rows()
    store = open_drive(tmp_path, KINDS, rows, bytes_for(KINDS, 60))
    make_room(store)
    for turn in range(10):
        results = put_all(store, rows, [key_of(1000 + 20 * turn + at) for at in range(20)])
        assert Result.REFUSED not in results, "who puts a block wants it"
    for turn in range(4):
        if turn:
            store.reached(f"request {turn}", KEYS)
        results = put_all(store, rows, KEYS)
    assert set(results) <= {Result.DONE, Result.PRESENT}
    store.close()


@pytest.mark.parametrize("count", [100, 5000, 20_000])
def test_a_request_counts_once(tmp_path: Path, count: int) -> None:
    """However long it is, and whether it is told of before its blocks are put, or after."""
    rows = make_rows()
    store = opened(tmp_path, rows, nvme_admission="reuse(2)")
    long = [key_of(number) for number in range(count)]
    store.reached("the first", long)
    assert put_all(store, rows, long[-20:]) == [Result.REFUSED] * 20
    store.reached("the second", long)
    assert put_all(store, rows, long[-20:]) == [Result.DONE] * 20
    nvme = store._parts.nvme
    assert nvme is not None
    store.reached("the third", long)
    get_all(store, long[-20:])
    while store._manager.has_pending_work(time.monotonic()):  # no step looks at all of a long prompt
        store.step(time.monotonic())
    assert set(nvme.uses.records()["uses"].tolist()) == {1}
    store.close()


def test_a_spent_write_budget_is_no_room(tmp_path: Path) -> None:
    rows = make_rows()
    store = open_drive(tmp_path, KINDS, rows, PLENTY, nvme_write_bytes_per_day="2MiB")
    assert put_all(store, rows, KEYS) == [Result.NO_ROOM] * len(KEYS)  # a bucket starts empty
    store.close()


# -- others of the store -------------------------------------------------------------------------


def test_other_engines_blocks_are_asked_for(tmp_path: Path) -> None:
    """ASKED until they have answered, and then READY; and they need not be kept twice."""
    rows, theirs = make_rows(), make_rows()
    other = opened(tmp_path, theirs)
    put_all(other, theirs, KEYS)
    settle(other)
    store = opened(tmp_path, rows)
    assert store.presence(KEYS) == bytes(len(KEYS))
    ended: list[Ended] = []
    give_up_s = time.monotonic() + 60.0
    while ready_of(store, KEYS) != KEYS:  # the list of other engines is itself read now and then
        assert time.monotonic() < give_up_s
        store.ask(KEYS)
        run_until(store, lambda: Presence.ASKED not in store.presence(KEYS), ended)
    assert get_all(store, KEYS) == [Result.DONE] * len(KEYS)
    assert all(holds(rows, at, key, KINDS) for at, key in enumerate(KEYS))
    assert put_all(store, rows, KEYS) == [Result.PRESENT] * len(KEYS)
    store.close()
    other.close()


# -- the mover -----------------------------------------------------------------------------------


class Dying(ThreadMover):
    """Is gone as soon as blocks are asked for; as a process that was killed, or a thread that has
    met an error of ours."""

    def __init__(self, *arguments: object, by_error: bool = False) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._by_error = by_error
        self._left: list[Job] = []

    def submit(self, plan: Plan) -> None:
        self._left += plan.jobs

    def poll(self, wait_s: float = 0.0) -> Report:
        if not any(job.moves for job in self._left):
            return Report()
        if self._by_error:
            self._by_error = False
            raise RuntimeError("ours")
        report = Report(off=True)
        for job in self._left:
            report.results[job.id] = JobResult(1, dict.fromkeys(range(len(job.moves)) or (-1,), Reason.CANCELLED))
        self._left = []
        return report


@pytest.mark.parametrize("by_error", [False, True])
def test_a_mover_that_is_gone_ends_every_job_and_loses_nothing(tmp_path: Path, by_error: bool) -> None:
    rows = make_rows()
    store = opened(tmp_path, rows)
    put_all(store, rows, KEYS[:2])
    config = store._config
    store.close()
    store = BlockStore.open(config, NAMESPACE, FACTS, KINDS, rows, partial(Dying, by_error=by_error))
    store.get(1, [Get(KEYS[0], 0)])
    store.put(2, [Put(KEYS[5], None, 1)])
    store.step(time.monotonic())
    if by_error:
        with pytest.raises(RuntimeError, match="ours"):
            store.poll()
    ended = {each.tag: each.results for each in store.poll()}
    assert ended == {1: [Result.CANCELLED], 2: [Result.CANCELLED]}
    assert store.presence(KEYS) == bytes(len(KEYS))
    store.put(3, [Put(KEYS[6], None, 1)])
    store.get(4, [Get(KEYS[0], 0)])
    store.step(time.monotonic())
    assert {each.tag: each.results for each in store.poll()} == {3: [Result.CANCELLED], 4: [Result.CANCELLED]}
    assert not store.step(time.monotonic())
    store.drain()
    store.close()
    again = open_drive(tmp_path, KINDS, rows, PLENTY)
    assert get_all(again, KEYS[:2]) == [Result.DONE] * 2
    again.close()


# -- the start -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"cpu_bytes": "1GiB"}, "store_dirs"),
        ({"device": "gds"}, "gds"),
        ({"nvme_bytes": "1MiB"}, "nvme_bytes"),
        ({"nvme_bytes": (1 << 63) - 1}, "more than drives have"),
        ({"nvme_bytes": 10**25}, "more than drives have"),
    ],
)
def test_a_wrong_configuration_is_one_sentence(tmp_path: Path, settings: dict[str, str], said: str) -> None:
    values = {} if "cpu_bytes" in settings else {"store_dirs": str(tmp_path), "nvme_bytes": "1GiB"}
    with pytest.raises(ConfigError, match=said):
        BlockStore.open(Config.from_mapping(values | settings), NAMESPACE, {}, KINDS, make_rows())


@pytest.mark.parametrize("namespace", [b"", bytes(31), "a" * 32])
def test_a_wrong_namespace_is_an_error(tmp_path: Path, namespace: Any) -> None:
    config = Config.from_mapping({"store_dirs": str(tmp_path / "store"), "nvme_bytes": PLENTY})
    with pytest.raises(ValueError, match="a namespace has 32 bytes"):
        BlockStore.open(config, namespace, FACTS, KINDS, make_rows())
    with pytest.raises(ValueError, match="facts are JSON values"):
        BlockStore.open(config, NAMESPACE, {"model": {1, 2}}, KINDS, make_rows())
    with pytest.raises(ValueError, match="facts take 256 KiB"):
        BlockStore.open(config, NAMESPACE, {"model": "m" * (1 << 18)}, KINDS, make_rows())
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    "wrong", [("", 1, ""), (7, 1, ""), ("all", 0, ""), ("all", 2.5, ""), ("all", 1 << 62, ""), ("all", 1 << 30, 7)]
)
def test_a_wrong_joint_cap_is_an_error(tmp_path: Path, wrong: Any) -> None:
    config = Config.from_mapping({"store_dirs": str(tmp_path / "store"), "nvme_bytes": PLENTY})
    with pytest.raises(ValueError, match="a joint cap"):
        BlockStore.open(config, NAMESPACE, FACTS, KINDS, make_rows(), joint_cap=JointCap(*wrong))
    assert not (tmp_path / "store").exists()


def test_a_joint_cap_without_room_for_first_segments_is_one_sentence(tmp_path: Path) -> None:
    """They could never be made, nor could the index grow, with all others of that cap gone."""
    config = Config.from_mapping({"store_dirs": str(tmp_path / "store"), "nvme_bytes": PLENTY})
    with pytest.raises(ConfigError, match=r"The joint cap 'all' of 1048576 bytes has no room .* make it \d+") as said:
        BlockStore.open(config, NAMESPACE, FACTS, KINDS, make_rows(), joint_cap=JointCap("all", 1 << 20))
    assert not list((tmp_path / "store" / "homes").iterdir())
    least = int(re.findall(r"make it (\d+)", str(said.value))[0])
    rows = make_rows()
    rows[0] = content_of(key_of(0))
    store = BlockStore.open(config, NAMESPACE, FACTS, KINDS, rows, joint_cap=JointCap("all", least))
    store.put(1, [Put(key_of(0), None, 0)], wait_s=10.0)
    assert finish(store, 1)[1].results == [Result.DONE]
    store.close()


def test_a_joint_cap_is_what_tools_show(tmp_path: Path) -> None:
    config, stores = Config.from_mapping({"store_dirs": str(tmp_path / "store"), "nvme_bytes": PLENTY}), []
    for rank in range(3):
        joint = JointCap("all", 2 * PLENTY, f"rank {rank}") if rank else None
        stores.append(BlockStore.open(config, bytes([rank]) * 32, FACTS, KINDS, make_rows(), joint_cap=joint))
    survey = survey_store([tmp_path / "store"])
    assert survey.totals.cap_bytes == 3 * PLENTY
    said = [home.joint_cap for home in survey.engine_stores]
    assert {"name": "all", "nvme_bytes": 2 * PLENTY, "member": "rank 2"} in said
    assert said.count(None) == 1
    for store in stores:
        store.close()


def test_relative_directories_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of a ``Config`` that was made without a mapping; nothing is written."""
    monkeypatch.chdir(tmp_path)
    for directory in (Path("store"), "store"):
        config = Config(store_dirs=(directory,), nvme_bytes=PLENTY)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="store_dirs must be an absolute path, not 'store'"):
            BlockStore.open(config, NAMESPACE, FACTS, KINDS, make_rows())
    assert list(tmp_path.iterdir()) == []


def test_misuse_is_an_error_under_optimisation_too(tmp_path: Path) -> None:
    """``python -O`` has no assertions."""
    code = f"""
from kvdisk.testing.store_conformance import *
from support.drive_blocks import open_drive, make_room
from pathlib import Path
assert False, "no assertions here"
rows = make_rows()
store = open_drive(Path({str(tmp_path)!r}), KINDS, rows, {PLENTY})
make_room(store)
calls = [lambda: store.put(1, [Put(key_of(1), None, ROWS)]), lambda: store.get(1, [Get(key_of(1), -1)]),
         lambda: store.put(1, [Put(key_of(1, 2), None, 0)]), lambda: store.forget(0),
         lambda: store.delete(1, [key_of(1, 2)])]
for call in calls:
    try:
        call()
    except ValueError as error:
        print("refused")
print(*[result.name for result in put_all(store, rows, [key_of(1)]) + get_all(store, [key_of(1)])])
store.close()
"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-O", "-c", code], check=True, env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["refused"] * 5 + ["DONE"] * 2


def test_a_failed_start_gives_the_store_back(tmp_path: Path) -> None:
    def fail(*_: object) -> ThreadMover:
        raise ConfigError("no memory")

    config = Config.from_mapping({"store_dirs": str(tmp_path), "nvme_bytes": PLENTY})
    for start in (fail, None):
        opens: Callable[[], BlockStore] = lambda start=start: BlockStore.open(  # noqa: E731
            config, NAMESPACE, {}, KINDS, make_rows(), start
        )
        if start is None:
            store = opens()
            assert store._parts.home is not None
            assert len(list((tmp_path / "homes").iterdir())) == 1, "the store of the failed start was taken over"
            store.close()
        else:
            with pytest.raises(ConfigError):
                opens()


def test_commands_reach_a_store_between_its_calls(tmp_path: Path) -> None:
    """What they ask for is done at once, though nobody steps it; then it goes on as before."""
    rows = make_rows()
    store = opened(tmp_path, rows)
    put_all(store, rows, KEYS)
    settle(store)
    done: list[int] = []
    store._parts.mailbox.post(lambda: done.append(1))
    assert done == [1]
    assert ready_of(store, KEYS) == KEYS
    store.get(1, [Get(KEYS[0], 0)])
    store._parts.mailbox.post(lambda: done.append(2))
    assert done == [1, 2]
    finish(store, 1)
    with pytest.raises(ZeroDivisionError):
        store._parts.mailbox.post(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        store.step(time.monotonic())
    store.close()
    store._parts.mailbox.post(lambda: done.append(3))
    assert done == [1, 2], "nobody works on a store that is closed"


# -- the documentation ---------------------------------------------------------------------------

LIBRARY = (Path(__file__).resolve().parents[2] / "docs" / "LIBRARY.md").read_text()


def test_the_examples_run(tmp_path: Path) -> None:
    """One after the other, and again, on what they have left."""
    examples = re.findall(r"^```python\n(.*?)^```", LIBRARY, re.MULTILINE | re.DOTALL)
    assert len(examples) == 2
    example = "".join(examples)
    assert "/nvme/blocks" in example
    (tmp_path / "example.py").write_text(example.replace("/nvme/blocks", str(tmp_path / "blocks")))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for _ in range(2):
        subprocess.run([sys.executable, tmp_path / "example.py"], check=True, env=env, timeout=300)


def test_every_result_and_presence_is_listed() -> None:
    listed = re.findall(r"^\| `([A-Z_]+)` \|", LIBRARY, re.MULTILINE)
    assert sorted(listed) == sorted([*Result.__members__, *Presence.__members__])


def test_the_library_needs_no_engine() -> None:
    code = "import sys, kvdisk.store, kvdisk.mover_process; print(*{'torch', 'vllm', 'rich'} & set(sys.modules))"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], check=True, env=env, capture_output=True, text=True)
    assert done.stdout.split() == []


if __name__ == "__main__":
    live(Path(sys.argv[1]), int(sys.argv[2]))
