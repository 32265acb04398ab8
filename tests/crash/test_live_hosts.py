# SPDX-License-Identifier: Apache-2.0
"""Live engines whose ranks lie on two hosts: two store directories, the first with the index.

Every block that a load brings is compared byte by byte, as in all tests of a live engine.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from support.live_audit import audit
from support.live_engine import LiveEngine
from support.live_model import LiveModel
from support.live_rank import LocalRank
from support.open_files import open_below
from support.waits import until
from test_store_goes_away import PROMPTS, hits, serve_until_all_hits, upkeep_of

from kvdisk.config import Config
from kvdisk.device import store as stores
from kvdisk.device.control import read_record, write_record
from kvdisk.device.home import INDEX_FILE
from kvdisk.device.listing import list_homes
from kvdisk.device.store import Store
from kvdisk.errors import DeviceError
from kvdisk.worker import files

MODEL = LiveModel(ranks=4, hosts=2)
ALL = 20 * len(PROMPTS)


class Hosts(NamedTuple):
    one: Path
    two: Path


@pytest.fixture
def hosts(quick_path: Path) -> Hosts:
    (quick_path / "nvme").mkdir()
    return Hosts(quick_path / "one", quick_path / "nvme" / "two")


Start = Callable[..., LiveEngine]


@pytest.fixture
def start(hosts: Hosts) -> Iterator[Start]:
    """Start engines, which end with the test."""
    engines = []

    def start_one(model: LiveModel = MODEL, **values: object) -> LiveEngine:
        config = model.config(
            str(hosts.one), blocks=64, segment_blocks=8, **{"cpu_bytes": 0, "store_decode": True} | values
        )

        def make(config: Config, model: LiveModel, rank: int, block_count: int) -> LocalRank:
            where = hosts[rank * model.hosts // model.ranks]
            return LocalRank(replace(config, store_dirs=(where,)), model, rank, block_count)

        engines.append(LiveEngine(config, model, make))
        return engines[-1]

    yield start_one
    for engine in engines:
        engine.close()


def audit_hosts(engine: LiveEngine, hosts: Hosts, **options: bool) -> int:
    model, home = engine.model, engine.parts.home
    assert home is not None
    parts = model.geometry.shard_count
    paths = [hosts[part * model.hosts // parts] / "homes" / home.id / "segments" for part in range(parts)]
    return audit(engine, segments_paths=paths, **options)


def failures(engine: LiveEngine) -> int:
    return engine.manager.stats["failed_loads"]


@pytest.mark.parametrize("model", [MODEL, replace(MODEL, replicated=True)], ids=["divided", "same on every rank"])
def test_a_restart_finds_what_lies_on_both(hosts, start, model):
    engine = start(model)
    engine.serve(PROMPTS)
    blocks = audit_hosts(engine, hosts)
    engine.close()
    for _ in range(2):
        again = start(model)
        again.serve(PROMPTS)
        assert hits(again) == ALL and failures(again) == 0
        assert audit_hosts(again, hosts) == blocks
        again.close()
    assert len(list_homes(hosts.one)) == len(list_homes(hosts.two)) == 1


@pytest.mark.parametrize("loss", ["the host", "a file", "the first host's file"])
def test_a_host_that_is_replaced_costs_recomputes(hosts, start, loss):
    engine = start()
    engine.serve(PROMPTS)
    engine.close()
    if loss == "the host":
        shutil.rmtree(hosts.two)
    else:
        path, rank = (hosts.two, 3) if loss == "a file" else (hosts.one, 0)
        next(path.glob(f"homes/*/segments/0/rank{rank}.kv")).unlink()
    again = start()
    again.run_until_quiet()  # a request that comes before the segments are open may wait for them in vain
    again.serve(PROMPTS)
    if loss == "the host":
        assert hits(again) == 0
    serve_until_all_hits(again)
    assert failures(again) == 0, "what is not there on every rank is not promised"
    assert audit_hosts(again, hosts) > 0


def not_mounted(hosts, _):
    """Where the directory would be is not there."""
    hosts.two.parent.rename(hosts.two.parent.with_name("later"))
    yield
    hosts.two.parent.with_name("later").rename(hosts.two.parent)


def store_locked(hosts, monkeypatch):
    monkeypatch.setattr(stores, "STORE_LOCK_TIMEOUT_S", 0.2)
    with Store.open(hosts.two).locked():
        yield


def held_by_a_late_worker(hosts, _):
    (guest,) = hosts.two.glob("homes/*")
    with (guest / "lock").open("r+") as late:
        fcntl.flock(late, fcntl.LOCK_SH)
        yield


def used_by_another_boot(hosts, _):
    """Or so it seems, where a clock is set late."""
    (guest,) = hosts.two.glob("homes/*")
    record = read_record(guest)
    before = replace(record, clean=False, boot_id="another", last_use_s=int(time.time()) + 60)
    write_record(guest, before)
    yield
    write_record(guest, record)


def unreadable(hosts, monkeypatch):
    """Reads fail, of one rank's files."""
    real = os.open

    def opening(path, *more, **how):
        if str(path).endswith(("rank3.kv", "rank1.kv")):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path, *more, **how)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", opening)
        yield


def few_descriptors(_, monkeypatch):
    """For no more than a part of the segments, on each rank."""
    with monkeypatch.context() as patch:
        patch.setattr(files, "_allow_files", lambda: len(os.listdir("/proc/self/fd")) + 4)
        yield


def files_of(hosts: Hosts) -> set[tuple[str, int]]:
    return {(path.name, path.stat().st_ino) for host in hosts for path in host.glob("homes/*/segments/*/*")}


FAULTS = (not_mounted, store_locked, held_by_a_late_worker, used_by_another_boot, unreadable, few_descriptors)


@pytest.mark.parametrize(
    ("model", "fault"),
    [*((MODEL, fault) for fault in FAULTS), (replace(MODEL, replicated=True), few_descriptors)],
    ids=[*(fault.__name__ for fault in FAULTS), "same on every rank"],
)
def test_what_a_rank_cannot_open_at_a_start_is_there_when_it_can(hosts, start, monkeypatch, fault, model):
    engine = start(model)
    serve_until_all_hits(engine)
    blocks = audit_hosts(engine, hosts)
    engine.close()
    written = files_of(hosts)
    trouble = fault(hosts, monkeypatch)
    next(trouble)
    troubled = start(model)
    troubled.run_until_quiet()
    troubled.serve(PROMPTS)
    assert hits(troubled) < ALL and failures(troubled) == 0
    troubled.close()
    assert next(trouble, None) is None
    assert files_of(hosts) == written
    after = start(model)
    after.serve(PROMPTS)
    assert hits(after) == ALL and failures(after) == 0
    assert audit_hosts(after, hosts) == blocks
    assert len(list_homes(hosts.one)) == len(list_homes(hosts.two)) == 1


def test_a_host_whose_drive_is_mounted_late_joins_then(hosts, start, monkeypatch):
    engine = start()
    engine.serve(PROMPTS)
    blocks = audit_hosts(engine, hosts)
    engine.close()
    trouble = not_mounted(hosts, monkeypatch)
    next(trouble)
    again = start()
    again.run_until_quiet()
    again.serve(PROMPTS)
    assert hits(again) == 0
    assert next(trouble, None) is None
    until(lambda: (again.serve(["z" * 24]), not again.parts.nvme.segments.away)[1])
    before = hits(again)
    again.serve(PROMPTS)
    assert hits(again) - before == ALL and failures(again) == 0
    assert audit_hosts(again, hosts) >= blocks


def test_an_old_copy_of_a_host_serves_no_wrong_byte(hosts, start):
    """Segments have the numbers that they had, with other blocks in them."""
    engine = start()
    engine.serve(PROMPTS[:3])
    engine.close()
    shutil.copytree(hosts.two, hosts.two.with_name("old"))
    engine = start()
    for segment in list(engine.parts.nvme.segments.in_place):
        engine.parts.nvme.let_go(segment)
    engine.run_until_quiet()
    engine.serve(PROMPTS[3:])
    engine.close()
    shutil.rmtree(hosts.two)
    hosts.two.with_name("old").rename(hosts.two)
    again = start()
    again.serve(PROMPTS)
    serve_until_all_hits(again)
    assert audit_hosts(again, hosts, records_hold=False) > 0


def test_slots_that_a_host_has_lost_since_are_found_by_their_headers(hosts, start):
    """As after a loss of power there: the files are those of before."""
    engine = start()
    engine.serve(PROMPTS[:3])
    files = sorted(hosts.two.glob("homes/*/segments/*/rank*.kv"))
    before = {path.relative_to(hosts.two): path.read_bytes() for path in files}
    engine.serve(PROMPTS)
    engine.close()
    for name, content in before.items():
        (hosts.two / name).write_bytes(content)
    again = start()
    again.serve(PROMPTS)
    assert failures(again) > 0 and hits(again) > 0
    serve_until_all_hits(again)
    assert audit_hosts(again, hosts, records_hold=False) > 0


def test_an_index_that_is_lost_is_made_from_the_ranks_beside_it(hosts, start):
    engine = start()
    engine.serve(PROMPTS)
    blocks = audit_hosts(engine, hosts)
    engine.close()
    (home,) = list_homes(hosts.one)
    (home.index_path / INDEX_FILE).unlink()
    again = start()
    again.serve(PROMPTS)
    assert hits(again) == ALL and failures(again) == 0
    assert audit_hosts(again, hosts) == blocks


def test_a_host_whose_drive_is_full_keeps_segments_from_being_made(hosts, start, monkeypatch):
    make = Store.make_segment

    def full(self, home, spec, rank, rank_count):
        if rank == 3:
            raise DeviceError(errno.ENOSPC, "the other host's drive is full")
        return make(self, home, spec, rank, rank_count)

    monkeypatch.setattr(Store, "make_segment", full)
    engine = start(cpu_bytes="1MiB")
    engine.serve(PROMPTS)
    assert engine.parts.nvme.segments.held_bytes == 0
    assert not list(hosts.one.glob("homes/*/segments/*/*")), "no part of it is left anywhere"
    monkeypatch.undo()
    engine.parts.nvme.segments.room_came(0)
    serve_until_on_drive(engine)
    assert audit_hosts(engine, hosts) > 0


def serve_until_on_drive(engine):
    until(lambda: (engine.serve(PROMPTS), engine.parts.nvme.segments.held_bytes > 0)[1])


def test_upkeep_takes_what_is_elsewhere_for_no_loss_and_sees_what_is_one_here(hosts, start, caplog):
    engine = start()
    upkeep = upkeep_of(engine, hosts.one, MODEL)
    engine.serve(PROMPTS)
    upkeep.look()
    upkeep.look()
    assert "something else changed" not in caplog.text
    next(hosts.one.glob("homes/*/segments/0/rank1.kv")).unlink()
    upkeep.look()
    assert "a file of 1 segment is gone" in caplog.text


def test_a_file_that_others_remove_from_another_host_while_it_is_used(hosts, start, monkeypatch):
    """The rank tells the scheduler, which has the segment given up everywhere."""
    monkeypatch.setattr(files, "GIVE_BACK_S", 0.05)
    engine = start()
    engine.serve(PROMPTS)
    gone = next(hosts.two.glob("homes/*/segments/*/rank2.kv"))
    segment = int(gone.parent.name)
    gone.unlink()

    def settled() -> bool:
        engine.serve(["z" * 24])
        return segment not in engine.parts.nvme.segments.specs

    until(settled)
    assert not [one for one in open_below(hosts.two) if one.endswith(".kv (deleted)")], "the bytes are free"
    assert not list(hosts.one.glob(f"homes/*/segments/{segment}"))
    serve_until_all_hits(engine)
    assert audit_hosts(engine, hosts) > 0


def test_a_store_that_goes_away_on_another_host(hosts, start, monkeypatch):
    monkeypatch.setattr(files, "GIVE_BACK_S", 0.05)
    engine = start()
    engine.serve(PROMPTS)
    # A rank makes anew what it misses, until all is gone.
    until(lambda: (shutil.rmtree(hosts.two, ignore_errors=True), not hosts.two.exists())[1])
    until(lambda: (engine.serve(["z" * 24]), not engine.parts.nvme.segments.in_place)[1])
    engine.serve(PROMPTS)
    engine.close()
    again = start()
    serve_until_all_hits(again)
    assert audit_hosts(again, hosts) > 0


@pytest.mark.parametrize("order", [(2, 1, 2), (1, 2, 1)])
def test_an_engine_that_moves_onto_more_hosts_or_fewer(hosts, start, order):
    """What it finds on the first is of no use without the rest, and goes."""
    for count in order:
        engine = start(replace(MODEL, hosts=count))
        serve_until_all_hits(engine)
        audited = audit_hosts if count == 2 else lambda engine, _: audit(engine)
        assert audited(engine, hosts) > 0
        engine.close()


def test_hosts_that_change_places(hosts, start):
    """Each finds files of the other's ranks. Those go: nothing is left that nobody counts."""
    engine = start()
    engine.serve(PROMPTS)
    engine.close()
    hosts.one.rename(hosts.one.with_name("was one"))
    hosts.two.rename(hosts.one)
    hosts.one.with_name("was one").rename(hosts.two)
    again = start()
    serve_until_all_hits(again)
    assert audit_hosts(again, hosts) > 0
    assert len(list_homes(hosts.one)) == len(list_homes(hosts.two)) == 2


def test_many_lives_in_which_hosts_come_and_go(hosts, start, quick_path):
    """Kept, lost, as it was some lives ago, or short of some files."""
    rng = random.Random(5)
    copies: list[tuple[Path, int]] = []
    for life in range(12):
        engine = start()
        engine.serve(rng.sample(PROMPTS, 4))
        engine.close()
        for at, path in enumerate(hosts):
            copies.append((Path(shutil.copytree(path, quick_path / f"copy {life} {at}")), at))
        at = rng.randrange(2)
        fate = rng.choice(("kept", "lost", "old", "files"))
        if fate == "lost":
            shutil.rmtree(hosts[at])
        elif fate == "old":
            shutil.rmtree(hosts[at])
            shutil.copytree(rng.choice([copy for copy, of in copies if of == at]), hosts[at])
        elif fate == "files":
            for file in hosts[at].glob("homes/*/segments/*/*"):
                if rng.random() < 0.3:
                    file.unlink()
    last = start()
    serve_until_all_hits(last)
    assert audit_hosts(last, hosts, records_hold=False) > 0
