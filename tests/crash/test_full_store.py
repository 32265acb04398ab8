# SPDX-License-Identifier: Apache-2.0
"""A file system without a single free block: an engine starts, and what frees room works, for it
needs none.

This file is also the program that does one of these things on a small file system of its own,
mounted in a namespace of its own: what LMDB makes of a full drive could end the process.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from test_full_drive import mounts_here

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "unit"))

import rebuild_stores as stores
from cli_stores import HYBRID, PLAIN, leave_home, run_here

from kvdisk.assembly import assemble_scheduler
from kvdisk.blocks import Slot
from kvdisk.config import Config
from kvdisk.device.control import home_ids
from kvdisk.device.store import Store
from kvdisk.errors import DeviceError
from kvdisk.index.base import BlockRecord

MIB = 1 << 20
DRIVE_BYTES = 48 * MIB


def fill(drive: Path) -> Path:
    """Take all that is free; return the file that has it."""
    ballast = drive / "ballast"
    with ballast.open("ab", buffering=0) as file:
        for step in (64 << 10, 4096, 1):
            with suppress(OSError):
                while file.write(bytes(step)):
                    pass
    with pytest.raises(OSError, match="No space"):
        (drive / "one more").write_bytes(b"x")
    (drive / "one more").unlink(missing_ok=True)
    return ballast


def free_bytes(drive: Path) -> int:
    status = os.statvfs(drive)
    return status.f_bavail * status.f_frsize


def cli(command: str, *arguments: object, code: int = 0) -> dict:
    done = run_here(command, *arguments, "--json", *([] if command == "repair" else ["--yes"]))
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def start_over(drive: Path) -> None:
    expected = stores.make_store(drive / "store")
    fill(drive)
    for _ in range(3):
        assert stores.served(drive / "store") == expected


def start_after_kill(drive: Path) -> None:
    expected = stores.make_store(drive / "store", clean=False)
    fill(drive)
    assert stores.served(drive / "store") == expected


def start_without_room_for_home(drive: Path) -> None:
    """What HOME is written over is gone, as in a copy, so another model's orphan goes."""
    expected = stores.make_store(drive / "store")
    (stores.home_path(drive / "store") / "HOME.tmp").unlink()
    leave_home(drive / "store", HYBRID, 2, last_use_s=5000)
    fill(drive)
    assert stores.served(drive / "store") == expected
    assert len(home_ids(drive / "store")) == 1


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
    parts = assemble_scheduler(config, stores.GEOMETRY, stores.NoPool(), stores.MINE, stores.DESCRIPTION)  # type: ignore[arg-type]
    assert (parts.home, parts.index, parts.nvme, parts.neighbours) == (None, None, None, None)
    parts.close()
    ballast.unlink()
    stores.start(drive / "store").close()


def smaller_cap(drive: Path) -> None:
    """The records of what goes need room in the index, so the files go first."""
    parts = stores.start(drive / "store")
    assert parts.home is not None and parts.index is not None
    for segment in range(10):
        parts.index.put_segment(stores.make_segment(parts.home, segment, slots=200))
        key = stores.key_of(segment)
        stores.write_block(parts.home, Slot(segment, 0), key, 5 + segment)
        parts.index.put([BlockRecord(0, key, Slot(segment, 0), 5 + segment)])
    stores.end(parts)
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
    held = sum(home["bytes"] for home in cli("prune", drive / "store", "--to", 0, "--dry-run")["homes"])
    found = cli("prune", drive / "store", "--to", held - 1)
    assert (found["homes"][0]["whole"], found["homes"][0]["result"]) == (False, "deleted")
    assert free_bytes(drive) > free
    assert 0 < len(stores.served(drive / "store") & expected) < len(expected)


def prune_a_home(drive: Path) -> None:
    expected = stores.make_store(drive / "store")
    leave_home(drive / "store", HYBRID, 2, last_use_s=5000)
    fill(drive)
    free = free_bytes(drive)
    cli("prune", drive / "store", "--namespace", HYBRID.fingerprint.hex())
    assert free_bytes(drive) > free
    assert stores.served(drive / "store") == expected


def clear(drive: Path) -> None:
    stores.make_store(drive / "store")
    leave_home(drive / "store", HYBRID, 2, last_use_s=5000)
    fill(drive)
    free = free_bytes(drive)
    assert cli("clear", drive / "store")["after"]["homes"] == 0
    assert free_bytes(drive) > free


def trim(drive: Path) -> None:
    leave_home(drive / "store", HYBRID, 2, last_use_s=5000)
    parts = stores.start(drive / "store")
    assert parts.home is not None
    record = replace(parts.home.record, cap_bytes=1)
    parts.home._write(record, durable=True)
    fill(drive)
    free = free_bytes(drive)
    parts.home.mark_used()
    Store.open(drive / "store", create=False).trim(parts.home.fingerprint)
    assert home_ids(drive / "store") == [parts.home.id] and free_bytes(drive) > free
    parts.close()


def end_in_order(drive: Path) -> None:
    parts = stores.start(drive / "store")
    assert parts.home is not None and parts.index is not None
    stores.fill(parts.home, parts.index)
    fill(drive)
    parts.close()
    assert json.loads((stores.home_path(drive / "store") / "HOME").read_text())["clean"]
    assert len(stores.served(drive / "store")) == 20


def rebuild(drive: Path) -> None:
    """There is room for the new index where the old one was; else the home is left for a better
    day."""
    expected = stores.make_store(drive / "store", clean=False)
    shutil.rmtree(stores.home_path(drive / "store") / "index")
    ballast = fill(drive)
    with pytest.raises(DeviceError) as caught:
        stores.start(drive / "store")
    assert caught.value.errno == errno.ENOSPC
    assert cli("repair", drive / "store", code=1)["homes"][0]["result"] == "failed"
    ballast.unlink()
    assert stores.served(drive / "store") == expected


def repair(drive: Path) -> None:
    expected = stores.make_store(drive / "store", clean=False)
    (stores.home_path(drive / "store") / "index" / "data.mdb").write_bytes(bytes(512 << 10))
    fill(drive)
    assert cli("repair", drive / "store")["homes"][0]["blocks"] == len(expected)
    assert stores.served(drive / "store") == expected


SCENARIOS: tuple[Callable[[Path], None], ...] = (
    start_over,
    start_after_kill,
    start_without_room_for_home,
    start_of_another_model,
    start_without_anything_to_delete,
    smaller_cap,
    prune_a_part,
    prune_a_home,
    clear,
    trim,
    end_in_order,
    rebuild,
    repair,
)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_on_a_full_drive(scenario: Callable[[Path], None]) -> None:
    command = mounts_here()
    if not command:
        pytest.skip("this system lets nobody mount a file system")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [*command, sys.executable, __file__, scenario.__name__],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    place = tempfile.mkdtemp()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DRIVE_BYTES},mode=700", "x", place], check=True)  # noqa: S607
        tempfile._candidate_tempdir_list = lambda: [place]  # type: ignore[attr-defined]
        tempfile.tempdir = None
        {one.__name__: one for one in SCENARIOS}[sys.argv[1]](Path(place))
    finally:
        subprocess.run(["umount", "-l", place], check=False)  # noqa: S607
        os.rmdir(place)
