# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from kvdisk.errors import DeviceError
from kvdisk.index.base import IndexState, Progress
from kvdisk.index.commit_writer import CommitWriter, Operation
from kvdisk.index.records import Table

ONLY_WHEN_TOLD_S = 3600.0
WAIT_S = 60.0


class FakeTables:
    """Transactions on a dictionary. ``fails`` says for each transaction whether it fails."""

    def __init__(self) -> None:
        self.content: dict[tuple[Table, bytes], bytes] = {}
        self.sizes: list[int] = []
        self.recoveries = 0
        self.fails: Callable[[Sequence[Operation]], bool] = lambda operations: False

    def commit(self, operations: Sequence[Operation]) -> None:
        if self.fails(operations):
            raise DeviceError(errno.ENOSPC, "full")
        self.sizes.append(len(operations))
        for operation in operations:
            if operation.value is None:
                self.content.pop((operation.table, operation.key), None)
            else:
                self.content[operation.table, operation.key] = operation.value

    def recover(self) -> None:
        self.recoveries += 1


@contextmanager
def running(commit_s: float = ONLY_WHEN_TOLD_S) -> Iterator[tuple[CommitWriter, FakeTables]]:
    tables = FakeTables()
    writer = CommitWriter(tables, commit_s)
    try:
        yield writer, tables
    finally:
        assert writer.stop(0, WAIT_S)


def put(ticket: int, key: bytes, value: bytes = b"value") -> Operation:
    return Operation(ticket, Table.BLOCKS, key, value)


def deletion(ticket: int, key: bytes) -> Operation:
    return Operation(ticket, Table.BLOCKS, key, None)


def segment(ticket: int, key: bytes, value: bytes | None = b"value") -> Operation:
    return Operation(ticket, Table.SEGMENTS, key, value)


def has_puts(operations: Sequence[Operation]) -> bool:
    return any(operation.droppable for operation in operations)


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.001)


def test_a_batch_is_committed_after_its_time_without_being_told() -> None:
    with running(commit_s=0.01) as (writer, tables):
        for ticket in (1, 2):
            writer.submit([put(ticket, b"a")])
            until(lambda ticket=ticket: writer.progress.committed == ticket)
        assert tables.sizes == [1, 1]


def test_failed_puts_are_dropped_with_what_they_were_to_replace_and_the_rest_is_committed() -> None:
    with running() as (writer, tables):
        tables.content[Table.BLOCKS, b"old"] = b"old"
        tables.content[Table.BLOCKS, b"new"] = b"names a slot that is reused when this call is dealt with"
        tables.fails = has_puts
        writer.submit([put(1, b"new"), deletion(2, b"old"), segment(3, b"s"), put(4, b"new 2")])
        assert writer.flush(4, WAIT_S)
        assert tables.content == {(Table.SEGMENTS, b"s"): b"value"}
        assert (writer.progress.committed, writer.progress.dropped_puts) == (4, 2)
        assert tables.recoveries == 1


def test_deletions_and_segments_that_fail_again_are_held_in_order_until_they_succeed() -> None:
    with running() as (writer, tables):
        tables.fails = lambda operations: True
        writer.submit([put(1, b"p"), segment(2, b"s", b"first"), deletion(3, b"d")])
        assert not writer.flush(3, 0.0)
        until(lambda: not writer.takes_puts)
        writer.submit([segment(4, b"s", b"second")])
        until(lambda: tables.recoveries >= 2)  # a back-off has passed
        assert writer.progress == Progress(0, IndexState.REFUSING, 1)
        assert writer.waiting == 4
        tables.fails = lambda operations: False
        assert writer.flush(4, WAIT_S)
        assert tables.content == {(Table.SEGMENTS, b"s"): b"second"}


def test_puts_are_taken_again_after_a_back_off_which_grows_until_they_succeed() -> None:
    now_s = 100.0
    tables = FakeTables()
    tables.fails = has_puts
    writer = CommitWriter(tables, 0.001, lambda: now_s)
    waits = []
    for ticket in range(1, 4):
        writer.submit([put(ticket, b"a")])
        assert writer.flush(ticket, WAIT_S)
        assert not writer.takes_puts
        waits.append(writer._retry_at_s - now_s)
        now_s = writer._retry_at_s
        writer.submit([deletion(ticket, b"wakes it")])
        until(lambda: writer.takes_puts)
    assert waits == pytest.approx([0.1, 0.2, 0.4])
    tables.fails = lambda operations: False
    writer.submit([put(4, b"c")])
    until(lambda: writer.progress == Progress(4, IndexState.WRITABLE, 3))
    assert tables.content == {(Table.BLOCKS, b"c"): b"value"}
    assert writer.stop(4, WAIT_S)


def test_a_bug_that_ends_the_thread_stops_new_puts_and_is_said(caplog: pytest.LogCaptureFixture) -> None:
    tables = FakeTables()
    tables.commit = lambda operations: 1 // 0  # type: ignore[method-assign]
    writer = CommitWriter(tables, ONLY_WHEN_TOLD_S)
    writer.submit([put(1, b"a")])
    assert not writer.flush(1, 0.0)
    until(lambda: not writer.takes_puts)
    assert "kvdisk stores nothing more on NVMe" in caplog.text and "ZeroDivisionError" in caplog.text
    assert writer.progress == Progress(0, IndexState.REFUSING, 0)
    assert writer.stop(0, WAIT_S)


@pytest.mark.parametrize("failures", [2, 1000])
def test_a_flush_outlives_one_failure_and_gives_up_at_the_second(failures: int) -> None:
    tables = FakeTables()
    tries = []

    def fails(operations: Sequence[Operation]) -> bool:
        tries.append(operations)
        return len(tries) <= failures  # a try is a batch, and then its deletions in small transactions

    tables.fails = fails
    writer = CommitWriter(tables, ONLY_WHEN_TOLD_S)
    writer.submit([segment(1, b"one")])
    assert writer.flush(1, WAIT_S) == (failures == 2)
    assert writer.stop(1, WAIT_S), "the thread ends, with what it could not commit"
    assert writer.progress.committed == (failures == 2)
