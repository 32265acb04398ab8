# SPDX-License-Identifier: Apache-2.0
"""The suite of what every ``Index`` must do. Subclass ``IndexConformance`` in a test module, and
pytest runs it.

The suite needs nothing but the protocol, two ways to open, and pytest's ``tmp_path``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

from kvdisk.blocks import BlockKey, Slot, make_block_key
from kvdisk.index.base import BlockRecord, IndexState, SegmentRecord
from kvdisk.index.record_index import Index

FLUSH_S = 600.0


def key_of(number: int, group: int = 0) -> BlockKey:
    """Return a key with a 32-byte hash that is unique to ``number``."""
    return make_block_key(number.to_bytes(32, "little"), group)


def record_of(number: int, *, index: int = 0, epoch: int = 0) -> BlockRecord:
    """Return a record for ``key_of(number)``; records that differ in ``index`` differ in their
    other values too."""
    parent = key_of(number - 1) if number else None
    return BlockRecord(epoch, key_of(number), Slot(3, index), 2**40 + index, parent, 1_700_000_000 + index)


def by_name(record: BlockRecord) -> tuple[int, BlockKey]:
    """Return a name that no two records share."""
    return record.epoch, record.key


def found_blocks(index: Index) -> dict[tuple[int, BlockKey], BlockRecord]:
    """Return what is committed, by epoch and key; a record that is yielded twice fails."""
    records = list(index.blocks())
    found = {(record.epoch, record.key): record for record in records}
    assert len(found) == len(records)
    assert sorted(found_columns(index), key=by_name) == sorted(records, key=by_name)
    return found


def found_columns(index: Index) -> list[BlockRecord]:
    """Return what is committed, read as columns; records that do not ascend by epoch and key
    fail."""
    columns = index.block_columns()
    names = list(zip(columns.epochs.tolist(), columns.keys, strict=True))
    assert names == sorted(set(names))
    return list(columns.records())


def put_all(index: Index, records: list[BlockRecord]) -> int:
    """Put records, and fail where they are refused."""
    ticket = index.put(records)
    assert ticket is not None
    return ticket


class IndexConformance(ABC):
    """The suite. A subclass opens an index that commits a handful of operations only when it is
    asked to."""

    @abstractmethod
    def open_index(self, path: Path, max_queued: int) -> Index:
        """Return an empty index, whose files (if it has any) go into the directory ``path``."""

    @abstractmethod
    def reopen_index(self, index: Index, path: Path) -> Index:
        """Close ``index``; return one opened anew on what it has left."""

    @contextmanager
    def opened(self, path: Path, max_queued: int = 100_000) -> Iterator[Index]:
        """Open an index and close it after the test."""
        index = self.open_index(path, max_queued)
        try:
            yield index
        finally:
            index.close()

    def test_starts_empty_and_writable(self, tmp_path: Path) -> None:
        """A new index has no records, nothing to flush, and takes puts."""
        with self.opened(tmp_path) as index:
            assert list(index.blocks()) == []
            assert found_columns(index) == []
            assert list(index.segments()) == []
            assert index.poll() == (0, IndexState.WRITABLE, 0)
            assert index.flush(0.0)

    def test_keeps_every_field(self, tmp_path: Path) -> None:
        """What is read is what was put: extremes, no parent, long and short keys."""
        records = [
            BlockRecord(0, make_block_key(b"", 0), Slot(0, 0), 0),
            BlockRecord(2**63 - 1, make_block_key(b"\xff" * 126, 65535), Slot(2**32 - 1, 2**32 - 1), 2**64 - 1),
            BlockRecord(1, key_of(1), Slot(1, 2), 3, parent=make_block_key(b"p" * 126, 1), stored_s=2**32 - 1),
            BlockRecord(1, key_of(2), Slot(1, 2), 3, parent=None, stored_s=5),
            BlockRecord(1, key_of(3), Slot(1, 3), 4, parent=None, stored_s=5, tenant=1),
            BlockRecord(1, key_of(4), Slot(1, 4), 5, make_block_key(b"p" * 126, 1), 6, tenant=2**64 - 1),
            BlockRecord(1, key_of(5), Slot(1, 5), 6, key_of(4), 6),
        ]
        with self.opened(tmp_path) as index:
            put_all(index, records)
            assert index.flush(FLUSH_S)
            assert found_blocks(index) == {(record.epoch, record.key): record for record in records}

    def test_a_tenant_comes_and_goes_with_its_record(self, tmp_path: Path) -> None:
        """A record that replaces another has its own tenant, or none if it has none; the tenant
        outlives a close."""
        index = self.open_index(tmp_path, 100_000)
        try:
            put_all(index, [record_of(number)._replace(tenant=7) for number in range(3)])
            assert index.flush(FLUSH_S)
            put_all(index, [record_of(0), record_of(1)._replace(tenant=8)])
            index = self.reopen_index(index, tmp_path)
            assert [found_blocks(index)[0, key_of(number)].tenant for number in range(3)] == [0, 8, 7]
        finally:
            index.close()

    def test_nothing_is_visible_before_its_commit(self, tmp_path: Path) -> None:
        """Neither puts nor deletions show until they are committed, and ``committed`` says so."""
        with self.opened(tmp_path) as index:
            first = put_all(index, [record_of(1)])
            assert list(index.blocks()) == []
            assert index.poll().committed < first
            assert index.flush(FLUSH_S)
            second = index.delete([(0, key_of(1))])
            assert list(index.blocks()) == [record_of(1)]
            assert first <= index.poll().committed < second
            assert index.flush(FLUSH_S)
            assert list(index.blocks()) == []

    def test_tickets_rise_and_commits_reach_them(self, tmp_path: Path) -> None:
        """Tickets of all four kinds of call rise; after a flush the last one has been dealt with,
        and no more. Empty calls have tickets that commits reach."""
        with self.opened(tmp_path) as index:
            for round_number in range(3):
                tickets = [
                    put_all(index, [record_of(round_number), record_of(100 + round_number)]),
                    index.delete([(0, key_of(round_number))]),
                    index.put_segment(SegmentRecord(round_number, 8192, 4)),
                    index.delete_segment(round_number),
                ]
                assert tickets == sorted(set(tickets))
                assert index.poll().committed < tickets[0]
                assert index.flush(FLUSH_S)
                assert index.poll() == (tickets[-1], IndexState.WRITABLE, 0)
            last = max(put_all(index, []), index.delete([]))
            assert index.flush(FLUSH_S)
            assert index.poll().committed >= last

    def test_every_order_of_operations_ends_as_queued(self, tmp_path: Path) -> None:
        """All sequences of five steps on one key, each step a put, another put, a deletion or a
        flush."""
        expected: dict[tuple[int, BlockKey], BlockRecord] = {}
        with self.opened(tmp_path) as index:
            sequences = list(product(("put 1", "put 2", "delete", "flush"), repeat=5))
            for step in range(5):
                # Keys that flush at this step come first, so that one flush serves them all.
                order = sorted(range(len(sequences)), key=lambda number: sequences[number][step] != "flush")
                flushed = False
                for number in order:
                    action = sequences[number][step]
                    if action == "flush":
                        flushed = flushed or index.flush(FLUSH_S)
                    elif action == "delete":
                        index.delete([(0, key_of(number))])
                        expected.pop((0, key_of(number)), None)
                    else:
                        record = record_of(number, index=int(action[-1]))
                        put_all(index, [record])
                        expected[0, record.key] = record
            assert index.flush(FLUSH_S)
            assert found_blocks(index) == expected

    def test_a_call_of_many_records_is_committed_whole(self, tmp_path: Path) -> None:
        """More records than a transaction takes, in one call with one ticket, none lost and none
        twice."""
        records = [record_of(number) for number in range(2500)]
        with self.opened(tmp_path) as index:
            ticket = put_all(index, records)
            assert index.flush(FLUSH_S)
            assert index.poll().committed == ticket
            assert found_blocks(index) == {(0, record.key): record for record in records}
            index.delete([(0, record.key) for record in records[:2400]])
            assert index.flush(FLUSH_S)
            assert sorted(found_blocks(index)) == sorted((0, record.key) for record in records[2400:])

    def test_epochs_and_groups_are_kept_apart(self, tmp_path: Path) -> None:
        """One hash in several epochs and groups is several records; each is deleted alone."""
        names = product((0, 1, 256, 2**62), (0, 1, 256))
        records = [
            record_of(1, index=position, epoch=epoch)._replace(key=key_of(1, group))
            for position, (epoch, group) in enumerate(names)
        ]
        expected = {(record.epoch, record.key): record for record in records}
        with self.opened(tmp_path) as index:
            put_all(index, records)
            for name in [(1, key_of(1, 0)), (256, key_of(1, 256)), (0, key_of(1, 1))]:
                index.delete([name])
                del expected[name]
            assert index.flush(FLUSH_S)
            assert found_blocks(index) == expected

    def test_segments_come_ascending_and_can_be_replaced(self, tmp_path: Path) -> None:
        """Segments sort by number, not by bytes or by time; a second put of one replaces it."""
        records = [SegmentRecord(number, 2**33 + number, 7, drive=number % 3) for number in (300, 2, 256, 0, 65536)]
        with self.opened(tmp_path) as index:
            for record in records:
                index.put_segment(record)
            index.put_segment(SegmentRecord(2, 4096, 1))
            index.delete_segment(256)
            index.delete_segment(257)  # there is none
            assert index.flush(FLUSH_S)
            assert list(index.segments()) == [
                records[3],
                SegmentRecord(2, 4096, 1),
                records[0],
                records[4],
            ]

    def test_a_full_queue_refuses_puts_only(self, tmp_path: Path) -> None:
        """While ``max_queued`` operations wait, puts are refused whole, and everything else is
        taken. A flush lets puts in again."""
        with self.opened(tmp_path, max_queued=10) as index:
            ticket = put_all(index, [record_of(number) for number in range(10)])
            assert index.put([record_of(10)]) is None
            deletion = index.delete([(0, key_of(0))])
            assert deletion > ticket
            assert index.put_segment(SegmentRecord(1, 8192, 4)) > deletion
            assert index.put([record_of(11)]) is None
            assert index.flush(FLUSH_S)
            put_all(index, [record_of(12)])
            assert index.flush(FLUSH_S)
            assert sorted(found_blocks(index)) == sorted((0, key_of(number)) for number in [*range(1, 10), 12])
            assert index.poll().dropped_puts == 0

    def test_reopening_finds_what_was_committed(self, tmp_path: Path) -> None:
        """Records, deletions and segments outlive a close, which commits what is queued; tickets
        start again."""
        index = self.open_index(tmp_path, 100_000)
        try:
            put_all(index, [record_of(number, epoch=number % 2) for number in range(50)])
            index.put_segment(SegmentRecord(4, 8192, 4, 1))
            assert index.flush(FLUSH_S)
            index.delete([(number % 2, key_of(number)) for number in range(20)])
            put_all(index, [record_of(49, index=9, epoch=1)])
            index = self.reopen_index(index, tmp_path)
            expected = {(number % 2, key_of(number)): record_of(number, epoch=number % 2) for number in range(20, 50)}
            expected[1, key_of(49)] = record_of(49, index=9, epoch=1)
            assert found_blocks(index) == expected
            assert list(index.segments()) == [SegmentRecord(4, 8192, 4, 1)]
            assert index.poll() == (0, IndexState.WRITABLE, 0)
            index.delete_segment(4)
            index = self.reopen_index(index, tmp_path)
            assert list(index.segments()) == []
            index.close()
        finally:
            index.close()  # once more does nothing
