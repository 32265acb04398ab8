# SPDX-License-Identifier: Apache-2.0
"""Sandboxes and file systems that forbid one system call: another way serves, or the line names the
call. The kernel itself refuses it, to all threads and processes of the store."""

from __future__ import annotations

import errno
import logging
import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.drive_blocks import make_room, open_drive
from support.refusing import run_refusing

from kvdisk import assembly
from kvdisk.blocks import make_block_key
from kvdisk.cli.bench import measure
from kvdisk.device import aio, paths, posix, probe
from kvdisk.device.drives import check_directories
from kvdisk.device.posix import PosixDevice
from kvdisk.errors import ConfigError, DeviceError
from kvdisk.mover_process import MoverProcess
from kvdisk.remote.mooncake import MooncakeBucket
from kvdisk.store import BlockKind, Get, Put, Result
from kvdisk.worker.arena import Arena, run_near

ROWS, ROW_BYTES = 32, 8192


@pytest.fixture(autouse=True)
def said_anew():
    """What is said once in a process is said once in each test."""
    posix._say_lost.cache_clear()
    paths._say_refused.cache_clear()


def shared_rows() -> np.ndarray:
    """Return rows in memory that processes share, as vLLM has them: not by ``memfd_create``."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(ROWS * ROW_BYTES)
        return np.memmap(file, np.uint8, "r+", shape=(ROWS, ROW_BYTES))


def serve(path: Path, start_mover=None) -> None:
    """Keep blocks, and load them after a restart."""
    keys = [make_block_key(f"block {number}".encode().ljust(32), 0) for number in range(ROWS // 4)]
    kinds, rows = [BlockKind(ROW_BYTES)], shared_rows()
    for is_later in (False, True):
        store = open_drive(path, kinds, rows, 64 << 20, start_mover, segment_bytes="1MiB")
        make_room(store)
        if is_later:
            rows[:] = 0
            store.get(1, [Get(key, row) for row, key in enumerate(keys)])
        else:
            rows[:] = 7
            store.reached("a request", keys)
            store.put(1, [Put(key, None, row) for row, key in enumerate(keys)])
        while not (ended := store.poll(0.01)):
            store.step(time.monotonic())
        assert set(ended[0].results) == {Result.DONE}
        store.close()
    assert (rows[: len(keys)] == 7).all() and not rows[len(keys) :].any()


THREADS = "threads move blocks instead of the kernel's queue"


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        ({"io_getevents": errno.EPERM}, (THREADS, "refuses io_getevents (Operation not permitted)", "seccomp")),
        ({"io_getevents": errno.ENOSYS}, (THREADS, "refuses io_getevents (Function not implemented)")),
        ({"io_submit": errno.EPERM}, (THREADS, "refuses io_submit")),
        ({"io_setup": errno.ENOSYS}, (THREADS, "refuses io_setup")),
        ({"eventfd2": errno.EPERM}, (THREADS, "refuses eventfd")),
        ({"fallocate": errno.ENOSYS}, ("refuses fallocate (Function not implemented)", "zeros", "seccomp")),
        ({"fallocate": errno.EPERM}, ("refuses fallocate (Operation not permitted)",)),
        ({"io_destroy": errno.EPERM}, ()),
        ({"memfd_create": errno.EPERM}, ()),
        ({"renameat2": errno.EPERM}, ()),
        ({"faccessat2": errno.EPERM}, ()),
        ({"madvise": errno.EPERM}, ()),
        ({"fchmod": errno.EPERM, "fchmodat": errno.EPERM}, ()),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_another_way_serves_and_the_line_names_the_call(tmp_path, monkeypatch, caplog, needs_queue, refused, said):
    monkeypatch.setattr(aio, "serves", lambda _fd: True)
    with caplog.at_level(logging.INFO, "kvdisk"):
        run_refusing(refused, lambda: (check_directories(tmp_path / "store"), serve(tmp_path)))
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert all(any(words in line for line in warned) for words in said), warned
    assert len(warned) == bool(said), "and once"


def test_a_mover_in_a_process_of_its_own_serves_where_all_of_them_are_refused(tmp_path, caplog):
    calls = ("io_getevents", "fallocate", "memfd_create", "renameat2", "faccessat2", "madvise")
    with caplog.at_level(logging.INFO, "kvdisk"):
        run_refusing(dict.fromkeys(calls, errno.EPERM), lambda: serve(tmp_path, MoverProcess))
    assert "refuses fallocate" in caplog.text and "cannot start" not in caplog.text


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
@pytest.mark.parametrize("call", ["fsync", "flock"])
def test_what_has_no_other_way_is_named_and_nothing_is_stored(tmp_path, call, number):
    with pytest.raises(DeviceError, match=rf"refuses {call} \({os.strerror(number)}\).*seccomp"):
        run_refusing({call: number}, lambda: serve(tmp_path))


def test_a_mode_that_cannot_be_set_is_named(tmp_path):
    before = os.umask(0o200)
    try:
        with pytest.raises(DeviceError, match=r"refuses chmod \(Operation not permitted\)"):
            run_refusing(dict.fromkeys(("fchmod", "fchmodat"), errno.EPERM), lambda: serve(tmp_path))
    finally:
        os.umask(before)


def test_another_failure_of_such_a_call_is_not_said_to_be_refused(tmp_path):
    with pytest.raises(DeviceError, match="Input/output error") as raised:
        run_refusing({"fsync": errno.EIO}, lambda: serve(tmp_path))
    assert "refuses" not in str(raised.value)
    with pytest.raises(OSError, match="No space left"):
        run_refusing({"fallocate": errno.ENOSPC}, lambda: allocate_a_file(tmp_path))


def allocate_a_file(path: Path) -> None:
    with (path / "file").open("wb") as file:
        paths.allocate(file.fileno(), 5000)


def test_what_is_not_allocated_is_written(tmp_path):
    run_refusing({"fallocate": errno.EPERM}, lambda: allocate_a_file(tmp_path))
    assert (tmp_path / "file").read_bytes() == bytes(5000)
    assert (tmp_path / "file").stat().st_blocks * 512 >= 5000


@pytest.mark.parametrize("call", ["fsync", "flock"])
def test_a_check_of_the_drive_names_it_too(tmp_path, call):
    with pytest.raises(ConfigError, match=f"refuses {call}"):
        run_refusing({call: errno.EPERM}, lambda: measure(tmp_path, None, None))


def test_pinned_memory_that_cannot_be_kept_from_children_is_refused():
    with pytest.raises(ConfigError, match="refuses madvise"):
        run_refusing({"madvise": errno.EPERM}, lambda: Arena([8192], [1], pin=True))


def test_the_number_of_processors_may_be_refused():
    def count() -> None:
        assert assembly._checksum_threads(1) >= 1
        run_near(SimpleNamespace(pci_domain_id=0, pci_bus_id=0, pci_device_id=0))

    run_refusing({"sched_getaffinity": errno.EPERM}, count)


def test_a_client_that_lacks_shared_memory_is_refused_in_a_sentence():
    def start() -> None:
        MooncakeBucket("mooncake://127.0.0.1:9", {}, deadline_s=1.0)

    with pytest.raises(ConfigError, match=r"memfd_create\): Operation not permitted"):
        run_refusing({"memfd_create": errno.EPERM}, start)


class SilentQueue(PosixDevice):
    """A device whose kernel's queue takes everything and says nothing."""

    def poll(self, timeout_s=0.0):
        if self.kernel_queue:
            raise probe.DeviceTimeout
        return super().poll(timeout_s)

    def close(self):
        assert not self.kernel_queue, "closing it would wait for ever"
        super().close()


def test_a_queue_that_says_nothing_is_left_for_threads(tmp_path, monkeypatch, needs_queue):
    monkeypatch.setattr(probe, "_given_up", [])
    monkeypatch.setattr(aio, "serves", lambda _fd: True)
    report = probe.probe(tmp_path, lambda queue: SilentQueue(kernel_queue=queue))
    assert (report.name, report.kernel_queue) == ("posix-threads", False)
    assert "posix-aio: it gave no answer" in report.line
    (kept,) = probe._given_up
    PosixDevice.close(kept[0])
