# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import threading

import pytest
from support.waits import until

from kvdisk.errors import DeviceError
from kvdisk.index.base import IndexState, Progress
from kvdisk.index.commit_writer import LATE_S, CommitWriter, IndexGone, Operation
from kvdisk.index.packed import Table

ONLY_WHEN_TOLD_S = 3600.0
WAIT_S = 60.0


class FakeTables:
    """Transactions on a dictionary. ``fails`` says for each transaction whether it fails."""

    def __init__(self) -> None:
        self.content: dict[bytes, bytes] = {}
        self.recoveries = 0
        self.fails = lambda operations: False

    def commit(self, operations) -> None:
        if self.fails(operations):
            raise DeviceError(errno.ENOSPC, "full")
        for operation in operations:
            if operation.value is None:
                self.content.pop(operation.key, None)
            else:
                self.content[operation.key] = operation.value

    def recover(self) -> None:
        self.recoveries += 1


@pytest.fixture
def tables():
    return FakeTables()


@pytest.fixture
def writer(tables):
    made = CommitWriter(tables, ONLY_WHEN_TOLD_S)
    yield made
    assert made.stop(WAIT_S), "the thread ends, with what it could not commit"


def put(key: bytes, value: bytes = b"value") -> Operation:
    return Operation(Table.BLOCKS, key, value)


def deletion(key: bytes) -> Operation:
    return Operation(Table.BLOCKS, key, None)


def segment(key: bytes, value: bytes = b"value") -> Operation:
    return Operation(Table.SEGMENTS, key, value)


def has_puts(operations) -> bool:
    return any(operation.droppable for operation in operations)


def test_failed_puts_are_dropped_with_what_they_were_to_replace_and_the_rest_is_committed(writer, tables):
    tables.content = {b"old": b"old", b"new": b"names a slot that is reused when this call is dealt with"}
    tables.fails = has_puts
    writer.submit([put(b"new"), deletion(b"old"), segment(b"s"), put(b"new 2")])
    assert writer.flush(WAIT_S)
    assert tables.content == {b"s": b"value"}
    assert (writer.progress.committed, writer.progress.dropped_puts, tables.recoveries) == (4, 2, 1)


def test_deletions_and_segments_that_fail_again_are_held_in_order_until_they_succeed(writer, tables):
    tables.fails = lambda operations: True
    writer.submit([put(b"p"), segment(b"s", b"first"), deletion(b"d")])
    assert not writer.flush(0.0)
    until(lambda: not writer.takes_puts)
    writer.submit([segment(b"s", b"second")])
    until(lambda: tables.recoveries >= 2)  # a back-off has passed
    assert writer.progress == Progress(0, IndexState.REFUSING, 1)
    assert writer.waiting == 4
    tables.fails = lambda operations: False
    assert writer.flush(WAIT_S)
    assert tables.content == {b"s": b"second"}


def test_puts_are_taken_again_after_a_back_off_which_grows_until_they_succeed(tables):
    now_s = 100.0
    tables.fails = has_puts
    writer = CommitWriter(tables, 0.001, lambda: now_s)
    waits = []
    for _ in range(3):
        writer.submit([put(b"a")])
        assert writer.flush(WAIT_S)
        assert not writer.takes_puts
        waits.append(writer._retry_at_s - now_s)
        now_s = writer._retry_at_s
        writer.submit([deletion(b"wakes it")])
        until(lambda: writer.takes_puts)
    assert waits == pytest.approx([0.1, 0.2, 0.4])
    tables.fails = lambda operations: False
    writer.submit([put(b"c")])
    until(lambda: not writer.waiting)  # after its time, without being told
    assert writer.progress == Progress(7, IndexState.WRITABLE, 3)
    assert tables.content == {b"c": b"value"}
    assert writer.stop(WAIT_S)


def test_a_bug_that_ends_the_thread_stops_new_puts_and_is_said(writer, tables, caplog):
    tables.commit = lambda operations: 1 // 0
    writer.submit([put(b"a")])
    assert not writer.flush(0.0)
    until(lambda: not writer.takes_puts)
    assert "kvdisk stores nothing more on NVMe" in caplog.text and "ZeroDivisionError" in caplog.text
    assert writer.progress == Progress(0, IndexState.GONE, 0)


def test_an_index_that_is_gone_commits_nothing_more_and_says_so_once(writer, tables, caplog):
    tries = []

    def gone(operations) -> None:
        tries.append(operations)
        raise IndexGone("the file is damaged")

    tables.commit = gone
    writer.submit([put(b"a"), deletion(b"d")])
    assert not writer.flush(WAIT_S)
    until(lambda: writer.look().state is IndexState.GONE)
    writer.submit([deletion(b"e")])
    assert not writer.flush(WAIT_S)
    assert writer.look() == Progress(0, IndexState.GONE, 1), "what may have been committed counts as not committed"
    assert (len(tries), tables.recoveries, writer.waiting) == (1, 0, 3)
    (said,) = caplog.messages
    assert "takes no new blocks on NVMe until the next start" in said and said.endswith("the file is damaged")


def test_a_commit_that_does_not_end_stops_puts_until_it_does(tables, caplog):
    now_s, begun, ends = 100.0, threading.Event(), threading.Event()

    def slow(operations) -> bool:
        begun.set()
        assert ends.wait(WAIT_S)
        return False

    tables.fails = slow
    writer = CommitWriter(tables, 0.0, lambda: now_s)
    writer.submit([put(b"a")])
    assert begun.wait(WAIT_S)
    now_s += LATE_S
    assert writer.look().state is IndexState.WRITABLE
    now_s += 1
    assert [writer.look().state for _ in range(2)] == [IndexState.REFUSING] * 2
    assert caplog.text.count("a commit has not ended after 30 s") == 1
    ends.set()
    assert writer.flush(WAIT_S)
    assert writer.look() == Progress(1, IndexState.WRITABLE, 0)
    assert writer.stop(WAIT_S)


@pytest.mark.parametrize("failures", [2, 1000])
def test_a_flush_outlives_one_failure_and_gives_up_at_the_second(writer, tables, failures):
    tries = []
    tables.fails = lambda operations: tries.append(1) or len(tries) <= failures  # a batch, then in small transactions
    writer.submit([segment(b"one")])
    assert writer.flush(WAIT_S) == (failures == 2) == bool(writer.progress.committed)
