# SPDX-License-Identifier: Apache-2.0
"""A mover in a process of its own: it moves rows, is killed, stands still, and loses its parent."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import signal
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest
from support.orphans import await_orphans_end
from support.small_drive import tmpfs
from support.waits import lives, until

from kvdisk.blocks import JobId, Slot, Tier, make_block_key
from kvdisk.config import Config
from kvdisk.device.store import Store
from kvdisk.errors import ConfigError, DeviceError
from kvdisk.geometry import HEADER_BYTES, Geometry, GroupGeometry, slot_offset
from kvdisk.messages import HomeSpec, Job, JobKind, JobResult, Move, Plan, Reason, SegmentSpec
from kvdisk.mover_process import MoverProcess, SharedRows

ROWS, ROW_BYTES = 64, 5 * 4096
PAYLOADS = (ROW_BYTES, 4096 + 123)
"""By group: the second one has less than a row."""
GEOMETRY = Geometry(tuple(GroupGeometry(group, 16, size) for group, size in enumerate(PAYLOADS)), 1, 16)
FINGERPRINT = bytes(range(32))
FILE_BYTES = 4096 + ROWS * ROW_BYTES
NEVER_S = 100_000.0


def config_of(path: Path, **settings: object) -> Config:
    return Config.from_mapping({"store_dirs": str(path), "nvme_bytes": "1GiB", "cpu_bytes": 0, **settings})


class Rank:
    """A mover's process over rows in a file without a name, and a home with a segment for each
    group."""

    def __init__(self, path: Path, fd: int | None = None) -> None:
        self.path = path
        fd = os.memfd_create("rows") if fd is None else fd
        os.ftruncate(fd, FILE_BYTES)
        memory = mmap.mmap(fd, 0)
        self.rows = np.frombuffer(memory, np.uint8, offset=4096).reshape(ROWS, ROW_BYTES)
        self.rows[:] = np.random.default_rng(1).integers(0, 256, self.rows.shape, np.uint8)
        self.home = Store.open(path).acquire_home(FINGERPRINT, {}, 1 << 30)
        self.mover = MoverProcess(config_of(path), GEOMETRY, self.rows)
        os.close(fd)  # the mover's process has it
        self.jobs = 0
        self.results: dict[JobId, JobResult] = {}
        self.off = False
        self.submit(JobKind.OPEN_HOME, home=HomeSpec(self.home.id, FINGERPRINT))
        for group, size in enumerate(each.slot_bytes for each in GEOMETRY.groups):
            self.submit(JobKind.OPEN_SEGMENT, segment=SegmentSpec(group, size, ROWS))

    def submit(self, kind: JobKind, moves: tuple[Move, ...] = (), **fields: object) -> JobId:
        self.jobs += 1
        job = JobId(self.jobs)
        self.mover.submit(Plan((Job(job, kind, moves, **fields),)))
        return job

    def look(self) -> None:
        report = self.mover.poll(0.01)
        assert not set(report.results) & set(self.results), "each job is reported once"
        self.results.update(report.results)
        self.off |= report.off

    def do(self, kind: JobKind, moves: tuple[Move, ...]) -> dict[int, Reason]:
        job = self.submit(kind, moves)
        until(lambda: self.look() or job in self.results, "the job's end")
        return self.results[job].failed

    def close(self) -> None:
        self.mover.close()
        self.home.close(clean=True)


def move(row: int, group: int = 0, into: int | None = None) -> Move:
    key = make_block_key(f"block {row}".encode().ljust(32), group)
    return Move(key, 1, (row if into is None else into,), {Tier.NVME: Slot(group, row)})


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path / "store")
    yield made
    made.close()
    assert not lives(made.mover.pid)


def test_rows_go_to_the_drive_and_back(rank):
    before = rank.rows.copy()
    moves = tuple(move(row, row % 2) for row in range(ROWS))
    assert rank.do(JobKind.STORE, moves) == {}
    rank.rows[:] = 7
    assert rank.do(JobKind.LOAD, moves) == {}
    for row in range(ROWS):
        count = PAYLOADS[row % 2]
        assert np.array_equal(rank.rows[row, :count], before[row, :count]), row
        assert (rank.rows[row, count:] == 7).all(), "what is behind a block is left alone"
    assert set(rank.results) == set(range(1, rank.jobs + 1))


def test_it_imports_no_torch(rank):
    """Whose import would take seconds of each start, and hundreds of megabytes."""
    assert rank.do(JobKind.STORE, (move(0),)) == {}
    assert rank.do(JobKind.LOAD, (move(0),)) == {}
    # vLLM preloads the libgomp that torch brings.
    assert "libtorch" not in Path(f"/proc/{rank.mover.pid}/maps").read_text()


def test_a_plan_does_not_take_the_core_of_the_step_that_sends_it(rank):
    policies = [os.sched_getscheduler(int(each)) for each in os.listdir(f"/proc/{rank.mover.pid}/task")]
    assert os.sched_getscheduler(rank.mover.pid) == os.SCHED_BATCH, "the thread that reads plans"
    assert policies.count(os.SCHED_OTHER) == len(policies) - 1, "those that move blocks do not wait"


@pytest.fixture
def records_of_another_kind() -> Iterator[None]:
    """As vLLM has them: its formatter asks for more than a record of the other process has."""
    plain = logging.getLogRecordFactory()

    def make(*arguments: object, **more: object) -> logging.LogRecord:
        made = plain(*arguments, **more)
        made.of_this_process = True
        return made

    logging.setLogRecordFactory(make)
    yield
    logging.setLogRecordFactory(plain)


def test_a_flipped_bit_is_found_and_said_in_this_process(rank, caplog, records_of_another_kind):
    caplog.set_level(logging.INFO)
    rank.do(JobKind.STORE, (move(3), move(4)))
    (file,) = rank.home.segments_path.glob("0/rank0.kv")
    size = GEOMETRY.groups[0].slot_bytes
    with file.open("r+b") as opened:
        opened.seek(slot_offset(size, 3) + HEADER_BYTES + 1000)
        byte = opened.read(1)[0]
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte ^ 1]))
    before = rank.rows.copy()
    rank.rows[:] = 0
    assert rank.do(JobKind.LOAD, (move(3), move(4))) == {0: Reason.CHECKSUM}
    assert not rank.rows[3].any() and np.array_equal(rank.rows[4], before[4])
    until(lambda: rank.look() or any("CHECKSUM" in text for text in caplog.messages), "the line of the log")
    (said,) = [record for record in caplog.records if "CHECKSUM" in record.getMessage()]
    assert said.name == "kvdisk.worker" and said.levelname == "WARNING" and said.of_this_process


def test_killed_with_jobs_out_all_of_them_fail_once(rank, caplog):
    os.kill(rank.mover.pid, signal.SIGSTOP)
    jobs = [rank.submit(JobKind.STORE, tuple(move(row) for row in range(ROWS))) for _ in range(16)]
    rank.look()
    os.kill(rank.mover.pid, signal.SIGKILL)
    until(lambda: rank.look() or rank.off, "its end")
    assert all(set(rank.results[job].failed.values()) == {Reason.CANCELLED} for job in jobs)
    assert all(len(rank.results[job].failed) == ROWS for job in jobs)
    assert [text for text in caplog.messages if "SIGKILL" in text]
    later = rank.submit(JobKind.LOAD, (move(0),))
    rank.look()
    assert rank.results[later].failed == {0: Reason.CANCELLED}, "and so do those that come later"


def test_one_that_stands_still_is_killed_before_its_jobs_are_given_up(rank, caplog):
    assert rank.do(JobKind.STORE, (move(0), move(1))) == {}
    os.kill(rank.mover.pid, signal.SIGSTOP)
    rank.mover._answer_s = 0.1
    job = rank.submit(JobKind.LOAD, (move(0), move(1)))
    while job not in rank.results:
        assert lives(rank.mover.pid) or rank.mover._killed, "no job is given up before it is dead"
        rank.look()
    assert rank.off and not lives(rank.mover.pid)
    assert rank.results[job].failed == dict.fromkeys(range(2), Reason.CANCELLED)
    assert [text for text in caplog.messages if "not answered" in text]


def test_more_plans_than_the_socket_holds_wait_here_while_it_stands_still(rank):
    """No call waits, and nothing is lost where it goes on."""
    rank.do(JobKind.STORE, tuple(move(row) for row in range(ROWS)))
    os.kill(rank.mover.pid, signal.SIGSTOP)
    jobs = [rank.submit(JobKind.LOAD, tuple(move(row) for row in range(ROWS))) for _ in range(400)]
    rank.look()
    assert rank.mover._child.pipe.is_full and not set(jobs) & set(rank.results)
    os.kill(rank.mover.pid, signal.SIGCONT)
    until(lambda: rank.look() or set(jobs) <= set(rank.results), "all loads")
    assert not any(rank.results[job].failed for job in jobs)


def test_one_without_jobs_may_stand_still_for_ever(rank):
    rank.do(JobKind.STORE, (move(0),))
    until(lambda: rank.look() or len(rank.results) == rank.jobs, "the answers to all jobs")
    os.kill(rank.mover.pid, signal.SIGSTOP)
    rank.mover._answer_s = 0.0
    for _ in range(10):
        rank.look()
    assert not rank.off and lives(rank.mover.pid)
    os.kill(rank.mover.pid, signal.SIGCONT)
    rank.mover._answer_s = NEVER_S
    assert rank.do(JobKind.LOAD, (move(0),)) == {}


def test_one_that_waits_for_a_file_is_not_ended(rank):
    """As where a drive takes long to allocate a segment: here for the lock of the store."""
    until(lambda: rank.look() or len(rank.results) == rank.jobs, "the answers to all jobs")
    with Store.open(rank.path).locked():
        job = rank.submit(JobKind.OPEN_SEGMENT, segment=SegmentSpec(7, GEOMETRY.slot_sizes[0], ROWS))
        rank.mover._answer_s = 0.0
        for _ in range(20):
            rank.look()
        rank.mover._answer_s = NEVER_S
        assert not rank.mover._killed and job not in rank.results
    until(lambda: rank.look() or job in rank.results, "its answer")
    assert not rank.off and lives(rank.mover.pid)
    assert rank.do(JobKind.STORE, (move(0),)) == {}


def test_a_long_step_of_this_process_is_no_silence_of_the_other(rank):
    """It may have stood still itself: in a debugger, or with its whole container."""
    rank.do(JobKind.STORE, (move(0),))
    os.kill(rank.mover.pid, signal.SIGSTOP)
    job = rank.submit(JobKind.LOAD, (move(0),))
    for _ in range(20):
        rank.mover._looked_s -= NEVER_S
        rank.look()
    assert not rank.mover._killed
    os.kill(rank.mover.pid, signal.SIGCONT)
    until(lambda: rank.look() or job in rank.results, "its answer")
    assert not rank.results[job].failed


def test_closed_with_jobs_out_every_job_has_an_answer(rank):
    jobs = [rank.submit(JobKind.STORE, tuple(move(row) for row in range(ROWS))) for _ in range(16)]
    rank.close()
    assert not lives(rank.mover.pid)
    rank.look()
    assert set(jobs) <= set(rank.results)
    rank.close()


def test_what_it_cannot_start_for_is_raised(tmp_path, rank):
    with pytest.raises(ConfigError, match="memory"):
        MoverProcess(config_of(tmp_path, staging_bytes=1 << 50), GEOMETRY, rank.rows)


def test_one_that_dies_at_its_start_says_why(tmp_path, rank, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(DeviceError, match="cannot start: status 1"):
        MoverProcess(config_of(tmp_path), GEOMETRY, rank.rows)


def test_rows_that_no_other_process_can_map_are_an_error_of_the_caller():
    with pytest.raises(AssertionError, match="shared mapping"):
        SharedRows.of(np.zeros((4, 4096), np.uint8))


@pytest.fixture
def twins(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """Files on two file systems, whose inodes are alike; the first one was opened first."""
    with ExitStack() as undo:
        found = []
        for name in ("one", "other"):
            place = tmp_path / name
            place.mkdir()
            undo.enter_context(tmpfs(place))
            found.append(os.open(place / "rows", os.O_RDWR | os.O_CREAT, 0o600))
            undo.callback(_close, found[-1])
            os.write(found[-1], bytes([len(found)]) * FILE_BYTES)
        first, second = map(os.fstat, found)
        assert first.st_ino == second.st_ino and first.st_dev != second.st_dev
        yield found[0], found[1]


def _close(fd: int) -> None:
    with suppress(OSError):  # of the rows: ``Rank`` has closed it
        os.close(fd)


def test_rows_are_found_among_files_of_the_same_inode_on_other_file_systems(tmp_path, twins):
    other, mine = twins
    rank = Rank(tmp_path / "store", mine)
    try:
        before = rank.rows.copy()
        moves = tuple(move(row, row % 2) for row in range(ROWS))
        assert rank.do(JobKind.STORE, moves) == {}
        rank.rows[:] = 0
        assert rank.do(JobKind.LOAD, moves) == {}
        assert all((rank.rows[row] == before[row])[: PAYLOADS[row % 2]].all() for row in range(ROWS))
        assert os.pread(other, FILE_BYTES + 1, 0) == b"\x01" * FILE_BYTES, "nothing else was written to"
    finally:
        rank.close()


def test_the_search_for_rows_leaves_no_file_open_that_can_only_be_written(tmp_path):
    """A server's log is such a file, once it is as long as its rows."""
    mine = os.memfd_create("rows")
    os.ftruncate(mine, FILE_BYTES)
    rows = np.frombuffer(mmap.mmap(mine, 0), np.uint8, offset=4096).reshape(ROWS, ROW_BYTES)
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    os.ftruncate(log, FILE_BYTES)
    os.close(SharedRows.of(rows).fd)
    path = str(tmp_path / "log")
    assert [fd for fd in os.listdir("/proc/self/fd") if _target(fd) == path] == [str(log)]
    os.close(log)
    os.close(mine)


def _target(fd: str) -> str:
    with suppress(OSError):  # the listing's own is closed by now
        return os.readlink(f"/proc/self/fd/{fd}")
    return ""


def test_rows_are_found_by_what_is_mapped_and_not_by_a_number_alone(monkeypatch):
    """As above, where no file system can be mounted: all files seem to have one inode."""
    other, mine = os.memfd_create("other"), os.memfd_create("rows")
    for fd in (other, mine):
        os.ftruncate(fd, FILE_BYTES)
    rows = np.frombuffer(mmap.mmap(mine, 0), np.uint8, offset=4096).reshape(ROWS, ROW_BYTES)
    inode = os.fstat(mine).st_ino
    for name, real in (("stat", os.stat), ("fstat", os.fstat)):
        monkeypatch.setattr(os, name, lambda of, real=real, **more: _with_inode(real(of, **more), inode))
    shared = SharedRows.of(rows)
    monkeypatch.undo()
    assert os.path.samestat(os.fstat(shared.fd), os.fstat(mine))
    rows[3, 5] = 77
    assert shared.mapped()[3, 5] == 77
    for fd in (other, mine, shared.fd):
        os.close(fd)


def _with_inode(status: os.stat_result, inode: int) -> os.stat_result:
    return os.stat_result((status[0], inode, *status[2:]))


def test_rows_whose_file_was_closed_are_found_nowhere_else():
    other, mine = os.memfd_create("other"), os.memfd_create("rows")
    for fd in (other, mine):
        os.ftruncate(fd, FILE_BYTES)
    call = ctypes.CDLL(None).mmap  # Python's own keeps a descriptor
    call.restype, call.argtypes = (
        ctypes.c_void_p,
        (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long),
    )
    address = call(None, FILE_BYTES, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, mine, 0)
    memory = (ctypes.c_uint8 * FILE_BYTES).from_address(address)  # until this process ends
    rows = np.frombuffer(memory, np.uint8, offset=4096).reshape(ROWS, ROW_BYTES)
    os.close(mine)
    count = len(os.listdir("/proc/self/fd"))
    with pytest.raises(AssertionError, match="is open"):
        SharedRows.of(rows)
    assert len(os.listdir("/proc/self/fd")) == count
    os.close(other)


def test_it_ends_with_its_parent(tmp_path):
    """Which is killed, with loads out, and has a forked child that holds its end of the socket."""
    script = textwrap.dedent(
        f"""
        import os, signal, sys, time
        from pathlib import Path
        from test_mover_process import JobKind, ROWS, Rank, move
        rank = Rank(Path({str(tmp_path / "store")!r}))
        rank.do(JobKind.STORE, tuple(move(row) for row in range(ROWS)))
        if os.fork() == 0:
            time.sleep(600)
        for _ in range(50):
            rank.submit(JobKind.LOAD, tuple(move(row) for row in range(ROWS)))
        print(rank.mover.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    await_orphans_end(script, str(Path(__file__).parent))
