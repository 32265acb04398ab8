# SPDX-License-Identifier: Apache-2.0
"""A process that lacks what others have: more threads, more processes, ``/proc``."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_stores import HYBRID, HYBRID_GEOMETRY, leave_home, refused
from support.fake_pool import FakePool
from support.index_conformance import put_all, record_of
from support.small_drive import run_in_mounts_of_its_own

from kvdisk.assembly import SchedulerHalf, assemble_scheduler
from kvdisk.config import Config
from kvdisk.device.control import home_ids
from kvdisk.device.posix import PosixDevice
from kvdisk.device.store import Store
from kvdisk.device.watch import HomeWatch
from kvdisk.errors import DeviceError, KvdiskError, NoThread
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.identity import Identity
from kvdisk.index.lmdb_index import LmdbIndex
from kvdisk.messages import SegmentSpec
from kvdisk.mover_process import MoverProcess
from kvdisk.worker.arena import Arena
from kvdisk.worker.host_memory import free_memory_bytes, host_memory
from kvdisk.worker.populate import Populating


def start(path: Path, cpu_bytes: int = 1 << 25) -> SchedulerHalf:
    config = Config(cpu_bytes=cpu_bytes, store_dirs=(path,), nvme_bytes=1 << 26)
    identity = Identity.certain(HYBRID.fingerprint, dict(HYBRID.description))
    return assemble_scheduler(config, HYBRID_GEOMETRY, FakePool(4, print), identity)


# -- processes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cpu_bytes", [1 << 25, 0])
@pytest.mark.parametrize("before", [0, 1], ids=["first", "beside one"])
def test_starts_whose_index_process_cannot_start_leave_no_engine_store(
    tmp_path, monkeypatch, caplog, cpu_bytes, before
):
    """Nor do they touch the index of one that is there."""
    path = tmp_path / "kv"
    if before:
        start(path).close()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")
        for _ in range(3):
            if cpu_bytes:
                half = start(path)
                assert half.engine_store is None, "memory serves alone"
                half.close()
            else:
                with pytest.raises(DeviceError, match="the index process cannot start"):
                    start(path, 0)
            assert len(home_ids(path)) == before
    half = start(path)
    assert half.engine_store is not None and len(home_ids(path)) == 1
    half.close()
    assert "rebuilds the index" not in caplog.text


# -- threads ---------------------------------------------------------------------------------------


@pytest.fixture
def no_thread(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has no thread of this name start, as Python says it where the system gives none."""
    original = threading.Thread.start

    def forbid(*names: str) -> None:
        def refuse(thread: threading.Thread) -> None:
            if thread.name.startswith(names):
                raise RuntimeError("can't start new thread")
            original(thread)

        monkeypatch.setattr(threading.Thread, "start", refuse)

    return forbid


@pytest.mark.parametrize("name", ["kvdisk-index", "kvdisk-neighbours", "kvdisk-background"])
def test_a_start_without_a_thread_is_one_sentence(tmp_path, no_thread, name):
    no_thread(name)
    with pytest.raises(NoThread, match="no thread can be started: ulimit -u"):
        start(tmp_path / "kv")


def test_a_device_without_a_thread_is_one_sentence(tmp_path, no_thread):
    no_thread("kvdisk-posix")
    fd = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR)
    for kernel_queue in (True, False):
        with pytest.raises(NoThread):
            PosixDevice(kernel_queue=kernel_queue).attach_file(fd)
    os.close(fd)


def test_what_can_do_without_a_thread_does(tmp_path, no_thread):
    no_thread("kvdisk-populate", "Thread-")  # those of timers have no name
    arena = Arena([8192], [4], pin=False)
    Populating([arena]).close()
    arena.close()
    index = LmdbIndex(tmp_path / "index", map_bytes=8 << 20, commit_s=0.01)
    put_all(index, [record_of(1)])
    assert index.flush(60.0)
    index.close()


def test_a_command_without_a_thread_is_one_sentence(tmp_path, no_thread):
    leave_home(tmp_path / "kv", HYBRID, 1, last_use_s=1000)
    no_thread("kvdisk-")
    assert "no thread can be started" in refused("verify", tmp_path / "kv")


# -- /proc -----------------------------------------------------------------------------------------


def test_without_proc():
    run_in_mounts_of_its_own(__file__)


def _without_proc(place: Path) -> None:
    """Nothing takes a file for lost, and what cannot be is said."""
    subprocess.run(["mount", "-t", "tmpfs", "x", "/proc"], check=True)  # noqa: S607
    assert not os.listdir("/proc")
    assert free_memory_bytes() == 0 and host_memory().limit_bytes
    leave_home(place / "kv", HYBRID, 1, last_use_s=1000)
    half = start(place / "kv")
    assert half.home is not None and not half.home.fresh
    spec = SegmentSpec(0, HYBRID_GEOMETRY.slot_sizes[0], 1, 0)
    watch = HomeWatch(half.home, HYBRID_GEOMETRY.rank_count)
    assert half.home.open_path.is_dir()
    assert watch.lost_segments({}) == frozenset()
    assert watch.lost_segments({0: spec}) == frozenset(), "its files are there"
    half.close()
    with Store.open(place / "kv").locked():
        pass
    rows = np.zeros((2, 8192), np.uint8)
    geometry = Geometry((GroupGeometry(0, 16, 8000),), 1, 16)
    with pytest.raises(KvdiskError, match="/proc"):
        MoverProcess(Config(cpu_bytes=0, store_dirs=(place / "kv",), nvme_bytes=1 << 26), geometry, rows)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        _without_proc(Path(folder))
