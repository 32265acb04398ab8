# SPDX-License-Identifier: Apache-2.0
"""``BlockStore`` on two hosts that share a bucket of a real S3 server. A host is a directory."""

from __future__ import annotations

import mmap
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from obstore.store import S3Store, from_url
from support.drive_blocks import bytes_for, gated_device, make_room, open_drive
from support.s3_server import S3Server

from kvdisk import mover_process
from kvdisk.blocks import BlockKey, Tier
from kvdisk.geometry import HEADER_BYTES
from kvdisk.manager.step_work import SHARES, SPARE_BLOCKS, Kind
from kvdisk.mover_process import MoverProcess
from kvdisk.store import BlockStore, Presence, Put, Result, Rows, StartMover
from kvdisk.testing.store_conformance import (
    KINDS,
    ROW_BYTES,
    content_of,
    get_all,
    holds,
    key_of,
    make_rows,
    put_all,
    run_until,
)

PLENTY = bytes_for(KINDS, 1000)
KEYS = [key_of(number, number % 2) for number in range(12)]


class Host:
    """A store on a host of its own, and its rows. ``bucket``: settings that all hosts share."""

    def __init__(self, path: Path, bucket: dict[str, Any], start: StartMover | None = None, **settings: Any) -> None:
        self._open: Callable[[], BlockStore] = lambda: open_drive(
            path, KINDS, self.rows, PLENTY, start, **{"remote_admission": "all", **bucket, **settings}
        )
        self.rows = make_rows() if start is None else shared_rows()
        self.store = self._open()
        make_room(self.store)

    def restart(self) -> None:
        self.store.close()
        self.rows[:] = 0
        self.store = self._open()

    def settle(self) -> None:
        """Step until nothing is left to do: what was admitted is sent."""
        run_until(self.store, lambda: not self.store.step(time.monotonic()), [])

    def ask(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Ask for keys, and return those that are READY when the answer has come."""
        self.store.ask(keys)
        run_until(self.store, lambda: Presence.ASKED not in self.store.presence(keys), [])
        return [key for key, each in zip(keys, self.store.presence(keys), strict=True) if each == Presence.READY]

    def counted(self, name: str) -> float:
        return self.store.stats()[name]


def shared_rows() -> Rows:
    """Return rows that another process can map."""
    pitch = ROW_BYTES + 321
    fd = os.memfd_create("rows")
    os.ftruncate(fd, 64 * pitch)
    return np.frombuffer(mmap.mmap(fd, 0), np.uint8).reshape(64, pitch)[:, :ROW_BYTES]


@pytest.fixture
def prefix() -> str:
    return f"s3://kvdisk-tests/{uuid.uuid4().hex}"


@pytest.fixture
def bucket(s3_server: S3Server, prefix: str) -> dict[str, Any]:
    options = s3_server.options | {"allow_http": "true"}
    return {"remote": prefix, "remote_options": options, "remote_deadline_s": 60.0, "lookup_wait_s": 60.0}


@pytest.fixture
def objects(s3_server: S3Server, prefix: str) -> S3Store:
    return from_url(prefix, config=s3_server.options, client_options={"allow_http": True})


def names_in(objects: S3Store) -> list[str]:
    return [each["path"] for page in objects.list() for each in page]


@pytest.fixture
def hosts(tmp_path: Path, bucket: dict[str, Any]) -> Iterator[Callable[..., Host]]:
    made: list[Host] = []

    def make(**how: Any) -> Host:
        path = tmp_path / f"host{len(made)}"
        path.mkdir()
        made.append(Host(path, bucket, **how))
        return made[-1]

    yield make
    for each in made:
        each.store.close()


@pytest.mark.parametrize("start", [None, MoverProcess], ids=["thread", "process"])
def test_what_one_host_puts_another_gets(hosts: Callable[..., Host], start: StartMover | None) -> None:
    here, there = hosts(start=start), hosts(start=start)
    assert put_all(here.store, here.rows, KEYS) == [Result.DONE] * len(KEYS)
    here.settle()
    assert here.counted("sent_blocks") == len(KEYS)
    assert there.store.presence(KEYS) == bytes(len(KEYS))
    assert there.ask([*KEYS, key_of(99)]) == KEYS
    assert get_all(there.store, [*KEYS, key_of(99)]) == [Result.DONE] * len(KEYS) + [Result.ABSENT]
    assert all(holds(there.rows, at, key, KINDS) for at, key in enumerate(KEYS))


def test_what_was_got_from_another_is_kept_here_once_it_is_wanted(
    hosts: Callable[..., Host], s3_server: S3Server
) -> None:
    """In chains, each block behind the one before it, so that its head leaves last; and on the
    drive: without the bucket it is there after a restart."""
    here, there = hosts(), hosts()
    put_all(here.store, here.rows, KEYS)
    here.settle()
    there.ask(KEYS)
    get_all(there.store, KEYS[:9])
    there.settle()
    catalog = there.store._manager._catalog
    assert not catalog.rows_in(Tier.NVME)
    there.store.reached("a request", KEYS)
    there.settle()
    rows = catalog.find_all(KEYS[:9])
    assert sorted(rows) == sorted(catalog.rows_in(Tier.NVME))
    assert not there.counted("failed_promotions")
    assert [catalog.parent(row) for row in rows] == [None, None, *KEYS[:7]]
    there.restart()
    s3_server.kill()
    try:
        assert get_all(there.store, KEYS[:9]) == [Result.DONE] * 9
        assert all(holds(there.rows, at, key, KINDS) for at, key in enumerate(KEYS[:9]))
    finally:
        s3_server.start()


def test_a_drive_that_hangs_while_it_gets_blocks_of_another(hosts: Callable[..., Host]) -> None:
    """What was fetched is given up, its slots come back once the drive has ended them, and all is
    loaded from the bucket meanwhile."""
    here = hosts()
    put_all(here.store, here.rows, KEYS)
    here.settle()
    with gated_device() as device:
        there = hosts(io_deadline_s=0.5)
        there.ask(KEYS)
        assert get_all(there.store, KEYS) == [Result.DONE] * len(KEYS)
        device.plan.hold = True
        there.store.reached("a request", KEYS)
        transfers, nvme = there.store._manager._transfers, there.store._parts.nvme
        assert nvme is not None
        run_until(there.store, lambda: bool(transfers._zombies), [])
        assert get_all(there.store, KEYS, tag=3) == [Result.DONE] * len(KEYS)
        assert all(holds(there.rows, at, key, KINDS) for at, key in enumerate(KEYS))
        run_until(there.store, lambda: nvme.update_writable(time.monotonic()), [])
        there.store.reached("another", KEYS)
        there.settle()
        device.opens.set()
        run_until(there.store, lambda: not transfers._zombies, [])
    there.settle()
    assert not there.store._manager._catalog.rows_in(Tier.NVME)


def test_what_a_drive_that_hangs_has_or_gets_is_loaded_from_the_bucket(hosts: Callable[..., Host]) -> None:
    here = hosts()
    put_all(here.store, here.rows, KEYS)
    here.settle()
    with gated_device() as device:
        there = hosts()
        there.ask(KEYS)
        get_all(there.store, KEYS)
        device.plan.hold = True
        there.store.reached("a request", KEYS)
        run_until(there.store, lambda: device.held > 0, [])
        assert there.ask(KEYS) == KEYS, "they are on their way to it"
        assert get_all(there.store, KEYS, tag=3) == [Result.DONE] * len(KEYS)
        device.opens.set()
        there.settle()
    assert len(there.store._manager._catalog.rows_in(Tier.NVME)) == len(KEYS)


def test_what_lies_on_a_drive_that_is_not_read_for_a_while_stays_there(
    hosts: Callable[..., Host], tmp_path: Path
) -> None:
    """It is loaded from the bucket, and not fetched into another slot: it has one."""
    host = hosts(store_dirs=[str(tmp_path / "one"), str(tmp_path / "other")])
    put_all(host.store, host.rows, KEYS)
    host.settle()
    nvme, catalog = host.store._parts.nvme, host.store._manager._catalog
    assert nvme is not None
    rows = catalog.rows_in(Tier.NVME)
    drives = {nvme.segments.specs[catalog.slot(row, Tier.NVME).segment].drive for row in rows}
    for drive in drives:
        nvme.segments.drives.note_read_result(drive, time.monotonic(), hangs=True)
    run_until(host.store, lambda: Presence.READY not in host.store.presence(KEYS) or not host.store.step(0), [])
    assert host.ask(KEYS) == KEYS
    assert get_all(host.store, KEYS) == [Result.DONE] * len(KEYS)
    host.store.reached("a request", KEYS)
    host.settle()
    assert sorted(catalog.rows_in(Tier.NVME)) == sorted(rows)


def test_what_was_there_before_a_restart_is_sent_when_it_is_wanted(hosts: Callable[..., Host]) -> None:
    """From the drive alone: no row has it any more."""
    here, there = hosts(remote_admission="reuse(2)"), hosts()
    put_all(here.store, here.rows, KEYS)
    here.store.reached("first", KEYS)
    here.settle()
    assert here.counted("sent_blocks") == 0
    here.restart()
    for request in ("first since", "second since"):
        here.store.reached(request, KEYS)
    here.settle()
    assert here.counted("sent_blocks") == len(KEYS)
    assert there.ask(KEYS) == KEYS and get_all(there.store, KEYS) == [Result.DONE] * len(KEYS)
    assert all(holds(there.rows, at, key, KINDS) for at, key in enumerate(KEYS))


def test_who_only_reads_sends_nothing(hosts: Callable[..., Host], objects: S3Store) -> None:
    here = hosts(remote_read_only=True)
    put_all(here.store, here.rows, KEYS)
    here.settle()
    assert names_in(objects) == []


def test_objects_that_are_bad_or_gone_are_results(hosts: Callable[..., Host], objects: S3Store) -> None:
    here, there = hosts(), hosts()
    keys = [key_of(number) for number in range(4)]
    for key in keys:
        put_all(here.store, here.rows, [key])
        here.settle()
        if len(names_in(objects)) == 1:
            bad = names_in(objects)[0]
    assert there.ask(keys) == keys
    body = bytearray(bytes(objects.get(bad).bytes()))
    body[HEADER_BYTES + 100] ^= 1
    objects.put(bad, bytes(body))
    gone = next(name for name in names_in(objects) if name != bad)
    objects.delete(gone)
    results = get_all(there.store, keys)
    assert results[0] is Result.CHECKSUM
    assert sorted(results[1:]) == [Result.DONE, Result.DONE, Result.ABSENT]
    assert there.store.presence(keys[:1])[0] != Presence.READY
    assert all(holds(there.rows, at, keys[at], KINDS) for at in range(4) if results[at] is Result.DONE)
    rejects = there.counted("remote_rejects")
    there.store.reached("a request", keys)
    there.settle()
    assert len(there.store._manager._catalog.rows_in(Tier.NVME)) == 2
    assert there.counted("remote_rejects") == 0 and rejects, "what is bad is not read again"


def test_what_is_fetched_is_admitted_by_what_all_requests_so_far_have_reached(hosts: Callable[..., Host]) -> None:
    """Which takes some steps to count; and no step looks at all of a long prompt."""
    new, known = ([key_of(first + at) for at in range(count)] for first, count in ((1000, 2000), (5000, 40)))
    here, store = hosts(), hosts(nvme_admission="reuse(2)").store
    put_all(here.store, here.rows, known)
    here.settle()
    blocks, manager = store._manager.blocks, store._manager
    store.reached("before", known)
    while not blocks._demand.has_counted_all:
        store.step(time.monotonic())
    blocks.fetches.note_loads([*new, *known])
    store.reached("long", new)
    store.reached("again", known)
    left = [len(blocks.fetches._queue)]
    while store.step(time.monotonic()):
        left.append(len(blocks.fetches._queue))
        store.poll(0.01)
    assert max(before - after for before, after in pairwise(left)) <= SHARES[Kind.FETCHES].blocks + SPARE_BLOCKS
    catalog = manager._catalog
    assert sorted(catalog.rows_in(Tier.NVME)) == sorted(catalog.find_all(known))


def test_a_bucket_that_does_not_answer_is_no_mover_that_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its deadline may be longer than that of drives."""
    monkeypatch.setattr(mover_process, "GRACE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        options = {"endpoint": f"http://127.0.0.1:{silent.getsockname()[1]}", "region": "us-east-1"}
        options |= {"access_key_id": "a", "secret_access_key": "b", "allow_http": "true"}
        deadlines = {"remote_deadline_s": 4.0, "io_deadline_s": 0.5, "lookup_wait_s": 0.1}
        bucket = {"remote": "s3://bucket/prefix", "remote_options": options, **deadlines}
        host = Host(tmp_path, bucket, MoverProcess)
        assert put_all(host.store, host.rows, KEYS[:2]) == [Result.DONE] * 2
        host.settle()
        assert not host.store._is_off and host.store.presence(KEYS[:2]) == bytes([Presence.READY] * 2)
        host.store.close()


def test_a_block_that_the_drive_has_lost_is_not_sent_and_is_dropped(hosts: Callable[..., Host]) -> None:
    here = hosts(remote_admission="reuse(2)")
    put_all(here.store, here.rows, KEYS[:1])
    catalog, nvme, home = here.store._manager._catalog, here.store._parts.nvme, here.store._parts.home
    assert nvme is not None and home is not None and home.folders[0] is not None
    flip(home.folders[0].path, KINDS[0].payload_bytes)
    for request in ("one", "two"):
        here.store.reached(request, KEYS[:1])
    here.settle()
    assert here.counted("sent_blocks") == 0
    assert here.store.presence(KEYS[:1]) == bytes([Presence.ABSENT])
    assert not catalog.rows_in(here.store._manager._tiers.first.tier)


def flip(folder: Path, payload_bytes: int) -> None:
    """Flip a bit of the only block in a directory of segments."""
    content = bytes(content_of(KEYS[0])[:payload_bytes])
    for path in folder.rglob("*"):
        with suppress(IsADirectoryError), path.open("r+b", buffering=0) as file:
            at = file.read().find(content[:256])
            if at >= 0:
                file.seek(at)
                file.write(bytes([content[0] ^ 1]))
                return
    raise AssertionError("the block is nowhere")


def test_a_remote_store_that_is_down_costs_nothing_but_its_hits(
    hosts: Callable[..., Host], tmp_path: Path, s3_server: S3Server
) -> None:
    here = hosts(remote_deadline_s=1.0, lookup_wait_s=0.5)
    s3_server.kill()
    try:
        assert put_all(here.store, here.rows, KEYS) == [Result.DONE] * len(KEYS)
        assert here.ask([key_of(77)]) == []
        here.rows[:] = 0
        assert get_all(here.store, KEYS) == [Result.DONE] * len(KEYS)
        assert all(holds(here.rows, at, key, KINDS) for at, key in enumerate(KEYS))
        here.restart()
        assert get_all(here.store, KEYS) == [Result.DONE] * len(KEYS)
        assert not here.store._parts.nvme.segments.drives.quarantined
    finally:
        s3_server.start()


def test_after_new_weights_nothing_is_sent_or_found(hosts: Callable[..., Host], objects: S3Store) -> None:
    here, there = hosts(), hosts()
    put_all(here.store, here.rows, KEYS)
    here.settle()
    before = names_in(objects)
    there.store.forget(77)
    assert there.ask(KEYS) == []
    there.store.put(9, [Put(key_of(50), None, 0)])
    run_until(there.store, lambda: not there.store.step(time.monotonic()), [])
    assert names_in(objects) == before
