# SPDX-License-Identifier: Apache-2.0
"""A full file system: the tier stops growing and serves on; an engine starts, and what frees room
works, for it needs none.

This file is also the program that does these things, each on a small file system of its own,
mounted in a namespace of its own: what LMDB makes of a full drive could end the process.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.live_audit import audit
from support.live_engine import LiveEngine
from support.live_load import LiveLoad, LoadShape
from support.live_model import LiveModel
from support.small_drive import fill, run_in_mounts_of_its_own, run_on_a_drive, tmpfs

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "unit"))

import rebuild_stores as stores
from cli_stores import HYBRID, PLAIN, leave_home, run_here

from kvdisk.assembly import assemble_scheduler
from kvdisk.config import Config
from kvdisk.device.control import home_ids
from kvdisk.device.store import Store
from kvdisk.errors import DeviceError
from kvdisk.identity import Identity

MIB = 1 << 20
DRIVE_BYTES = 48 * MIB
LONGER_THAN_ANY_BACK_OFF_S = 100.0
LIMIT_S = 600.0


def free_bytes(drive: Path) -> int:
    status = os.statvfs(drive)
    return status.f_bavail * status.f_frsize


def cli(command: str, *arguments: object) -> dict:
    done = run_here(command, *arguments, "--json", *([] if command == "repair" else ["--yes"]))
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def start_over(drive: Path) -> None:
    expected = stores.make_store(drive / "store")
    fill(drive)
    for _ in range(3):
        assert stores.served(drive / "store") == expected


def start_of_another_model(drive: Path) -> None:
    other = leave_home(drive / "store", HYBRID, 2, last_use_s=5000)
    mine = leave_home(drive / "store", PLAIN, 2, last_use_s=4000)  # of my namespace, and of another geometry
    fill(drive)
    parts = stores.start(drive / "store")
    assert parts.home is not None and parts.home.fresh
    assert set(home_ids(drive / "store")) == {mine, parts.home.id} and other != mine, "one goes, and no more"
    parts.close()


def start_without_anything_to_delete(drive: Path) -> None:
    """With a CPU tier the engine goes on without the other."""
    Store.open(drive / "store")
    ballast = fill(drive)
    with pytest.raises(DeviceError) as caught:
        stores.start(drive / "store")
    assert caught.value.errno == errno.ENOSPC
    assert home_ids(drive / "store") == []
    config = Config.from_mapping({"store_dirs": [drive / "store"], "nvme_bytes": stores.CAP, "cpu_bytes": MIB})
    parts = assemble_scheduler(
        config, stores.GEOMETRY, stores.NoPool(), Identity.certain(stores.MINE, stores.DESCRIPTION)
    )
    assert (parts.home, parts.index, parts.nvme, parts.neighbours) == (None, None, None, None)
    parts.close()
    ballast.unlink()
    stores.start(drive / "store").close()


def a_further_drive_is_full(drive: Path) -> None:
    """Of what is not ours: what lies on the first drive makes no room there, and stays."""
    further = drive / "further"
    further.mkdir()
    with tmpfs(further, "nr_inodes=100"):
        dirs, kept = [drive / "store", further / "store"], set()
        for name, some in ((b"a", dirs[:1]), (b"b", dirs), (b"c", dirs[:1])):
            home = Store.open(some).acquire_home(name * 32, {"geometry": 1}, MIB)
            home.close(clean=True)
            kept |= {home.id} if len(some) == 1 else set()
        for number in range(os.statvfs(further).f_ffree):
            (further / str(number)).mkdir()
        home = Store.open(dirs).acquire_home(b"m" * 32, {"geometry": 1}, MIB)
        assert set(home_ids(dirs[0])) == {*kept, home.id}, "what had something there has gone for it"
        with pytest.raises(DeviceError, match=f"errno {errno.ENOSPC}"):
            Store.open(dirs).acquire_home(b"n" * 32, {"geometry": 1}, MIB)
        assert set(home_ids(dirs[0])) == {*kept, home.id}
        home.close(clean=True)


def smaller_cap(drive: Path) -> None:
    """The records of what goes need room in the index, so the files go first."""
    stores.make_large_store(drive / "store")
    fill(drive)
    free = free_bytes(drive)
    parts = stores.start(drive / "store", cap_bytes=24 * MIB)
    assert 0 < len(stores.rows(parts)) < 10
    assert free_bytes(drive) > free
    parts.close()


def prune_a_part(drive: Path) -> None:
    expected = stores.make_store(drive / "store")
    fill(drive)
    free = free_bytes(drive)
    held = sum(home["bytes"] for home in cli("prune", drive / "store", "--to", 0, "--dry-run")["engine_stores"])
    found = cli("prune", drive / "store", "--to", held - 1)
    assert (found["engine_stores"][0]["whole"], found["engine_stores"][0]["result"]) == (False, "deleted")
    assert free_bytes(drive) > free
    assert 0 < len(stores.served(drive / "store") & expected) < len(expected)


def end_in_order(drive: Path) -> None:
    parts = stores.start(drive / "store")
    assert parts.home is not None and parts.index is not None
    stores.fill(parts.home, parts.index)
    fill(drive)
    parts.close()
    assert json.loads((stores.home_path(drive / "store") / "HOME").read_text())["clean"]
    assert len(stores.served(drive / "store")) == 20


def repair(drive: Path) -> None:
    expected = stores.make_store(drive / "store", clean=False)
    (stores.home_path(drive / "store") / "index" / "data.mdb").write_bytes(bytes(512 << 10))
    fill(drive)
    assert cli("repair", drive / "store")["engine_stores"][0]["blocks"] == len(expected)
    assert stores.served(drive / "store") == expected


def growth(drive: Path) -> None:
    """An engine whose cap is several times what the drive has free: one warning; it uses what there
    is, and beside it leaves what the index needs; and when space returns it grows again."""
    warned: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    handler.addFilter(lambda record: "has room for" in record.getMessage())
    logging.getLogger("kvdisk").addHandler(handler)
    ballast = drive / "ballast"
    ballast.write_bytes(bytes(DRIVE_BYTES - 8 * MIB))
    free = free_bytes(drive)
    model = LiveModel()
    now_s = [time.time()]  # back-offs end when the test says so, however many steps it takes until then
    config = model.config(str(drive / "store"), blocks=1200, store_decode=True)
    engine = LiveEngine(config, model, clock=lambda: now_s[0])
    load, stats = LiveLoad(engine, 1, LoadShape(width=20, aborts=0.0)), engine.manager.stats

    def run_until(what: str, condition: Callable[[], object]) -> None:
        end_s = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < end_s, f"not: {what}; {engine.describe()}; {warned}"
            load.step()

    def slots() -> int:
        assert engine.parts.nvme is not None
        return sum(engine.parts.nvme.pool.total)

    assert config.nvme_bytes is not None and config.nvme_bytes > 3 * free
    run_until("a full drive", lambda: stats["segment_failures"])
    load.run_requests(20)
    held, loaded, evicted = slots(), stats["hit_tokens.nvme"], stats["evicted_blocks.nvme"]
    run_until("reads go on", lambda: stats["hit_tokens.nvme"] > loaded + 100)
    run_until("new blocks take the slots of old ones", lambda: stats["evicted_blocks.nvme"] > evicted + 20)
    assert slots() == held, "the tier grew in the back-off"
    assert len(warned) == 1 == stats["segment_failures"], warned
    assert slots() * model.geometry.slot_sizes[0] * model.ranks > free // 3, "what the index may need is left"
    assert engine.parts.index is not None and engine.parts.index.flush(LIMIT_S), "the index has room"
    assert stats["dropped_records"] == 0
    ballast.unlink()
    now_s[0] += LONGER_THAN_ANY_BACK_OFF_S
    run_until("the tier grows again", lambda: slots() > held)
    load.end()
    assert audit(engine) > 0
    engine.close()


def clear_a_live_store(drive: Path) -> None:
    """A request needs no room, nor does its answer."""
    model = LiveModel()
    engine = LiveEngine(model.config(str(drive / "store"), blocks=64, segment_blocks=8, store_decode=True), model)
    engine.serve(["a" * 24])
    while engine.parts.mailbox.rest() or not list(drive.glob("store/homes/*/ANSWER")):
        time.sleep(0.01)
    for _ in range(2):
        ballast = fill(drive)
        (one,) = cli("clear", drive / "store", "--live", "--wait", LIMIT_S)["engine_stores"]
        assert (one["result"], one["blocks"] > 0) == ("deleted", True)
        ballast.unlink()
        engine.parts.mailbox.wake()
        engine.serve(["b" * 24])
        assert not engine.parts.mailbox.rest()
    engine.close()


SCENARIOS: tuple[Callable[[Path], None], ...] = (
    growth,
    start_over,
    start_of_another_model,
    start_without_anything_to_delete,
    a_further_drive_is_full,
    smaller_cap,
    prune_a_part,
    clear_a_live_store,
    end_in_order,
    repair,
)


def test_on_a_full_drive() -> None:
    run_in_mounts_of_its_own(__file__)


if __name__ == "__main__":
    for scenario in SCENARIOS:
        run_on_a_drive(scenario, DRIVE_BYTES)
