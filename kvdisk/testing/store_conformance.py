# SPDX-License-Identifier: Apache-2.0
"""What every ``BlockStore`` must do. Subclass ``BlockStoreConformance`` in a test module, and
pytest runs it.

The suite needs nothing but the face, a way to open, and pytest's ``tmp_path``.
"""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdisk.blocks import BlockKey, group_of, make_block_key
from kvdisk.store_face import (
    BlockKind,
    BlockStoreFace,
    Ended,
    Get,
    Memory,
    Presence,
    Put,
    Result,
    Row,
    Rows,
    rows_of,
)

KINDS = (BlockKind(10_000, tokens=16), BlockKind(3_000, tokens=16, window_tokens=64))
ROW_BYTES = 12_345
ROWS = 64
KINDS_IN_PIECES = (
    BlockKind(10_000, tokens=16, piece_bytes=(4_000, 1, 5_999)),
    BlockKind(3_072, tokens=16, piece_bytes=(512,) * 6),
    BlockKind(3_000, tokens=16),
)
"""In pieces that lie in rows of any length, in pieces that are rows side by side, and in one."""
_MISUSE = "a row|a key|a kind|epoch|itself|in use|closed"
"""What an error says of what a caller does wrong."""
_SAFETY_S = 120.0
"""After so long a test gives up on what should have ended; no test waits for it to pass."""


def key_of(number: int, kind: int = 0) -> BlockKey:
    """Return a key that is unique to ``number`` and ``kind``."""
    return make_block_key(number.to_bytes(32, "little"), kind)


def content_of(key: BlockKey, version: int = 0, size: int = ROW_BYTES) -> Rows:
    """Return a row's bytes as they belong to a key."""
    seed = [version, *np.frombuffer(key, np.uint8).tolist()]
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def make_rows(count: int = ROWS, row_bytes: int = ROW_BYTES, apart: int = 321) -> Rows:
    """Return rows that lie apart, at a distance that is not aligned, full of ones."""
    return np.full((count, row_bytes + apart), 1, np.uint8)[:, :row_bytes]


def run_until(store: BlockStoreFace, is_over: Callable[[], bool], ended: list[Ended]) -> None:
    """Step a store until something is so; add what ends meanwhile to ``ended``."""
    give_up_s = time.monotonic() + _SAFETY_S
    while not is_over():
        assert time.monotonic() < give_up_s, "it never came"
        store.step(time.monotonic())
        ended += store.poll(0.01)


def finish(store: BlockStoreFace, *tags: int) -> dict[int, Ended]:
    """Step a store until these jobs have ended, and no other; return them."""
    ended: list[Ended] = []
    run_until(store, lambda: len(ended) >= len(tags), ended)
    assert sorted(each.tag for each in ended) == sorted(tags)
    return {each.tag: each for each in ended}


def put_all(
    store: BlockStoreFace, rows: Rows, keys: Sequence[BlockKey], version: int = 0, tag: int = 1
) -> list[Result]:
    """Put a chain of blocks from the first rows on; return the results."""
    for at, key in enumerate(keys):
        rows[at] = content_of(key, version)
    parents = [None, *keys[:-1]]
    store.put(tag, [Put(key, parent, at) for at, (key, parent) in enumerate(zip(keys, parents, strict=True))])
    return list(finish(store, tag)[tag].results)


def get_all(store: BlockStoreFace, keys: Sequence[BlockKey], tag: int = 2) -> list[Result]:
    """Get blocks into the first rows; return the results."""
    store.get(tag, [Get(key, at) for at, key in enumerate(keys)])
    return list(finish(store, tag)[tag].results)


def holds(rows: Rows, at: int, key: BlockKey, kinds: Sequence[BlockKind], version: int = 0) -> bool:
    """Whether a row begins with what was put as a key."""
    size = kinds[group_of(key)].payload_bytes
    return bool(np.array_equal(rows[at, :size], content_of(key, version)[:size]))


class InPieces:
    """Two memories, of 40 long rows and of 50 that lie side by side, and blocks in pieces there.

    ``wide``, ``narrow``: the memories. ``rows``: of each block.
    """

    def __init__(self, wide: Rows, narrow: Rows) -> None:
        self.wide, self.narrow = wide, narrow
        assert (len(wide), narrow.shape) == (40, (50, 512))
        self.keys = [key_of(number, number % 3) for number in range(12)]
        rows = {0: iter(range(39, 0, -1)), 1: iter(range(89, 40, -1))}
        self.rows: list[Row] = [
            next(rows[0]) if kind == 2 else tuple(next(rows[kind]) for _ in KINDS_IN_PIECES[kind].pieces)
            for kind in map(group_of, self.keys)
        ]

    @property
    def memory(self) -> tuple[Rows, Rows]:
        """Both."""
        return self.wide, self.narrow

    def pieces(self, at: int, row: Row) -> Iterator[Rows]:
        """Return where the pieces of a block are."""
        for each, size in zip(rows_of(row), KINDS_IN_PIECES[at % 3].pieces, strict=True):
            yield (self.wide[each] if each < 40 else self.narrow[each - 40])[:size]

    def write(self) -> None:
        """Write each block's bytes where its pieces are."""
        for at, key in enumerate(self.keys):
            content, end = content_of(key), 0
            for piece in self.pieces(at, self.rows[at]):
                piece[:] = content[end : end + len(piece)]
                end += len(piece)

    def holds(self, at: int, row: Row) -> bool:
        """Whether a block's bytes are where its pieces are; fill these with sevens."""
        found = np.concatenate(list(self.pieces(at, row)))
        for piece in self.pieces(at, row):
            piece[:] = 7
        return bool(np.array_equal(found, content_of(self.keys[at])[: len(found)]))


class BlockStoreConformance(ABC):
    """The suite. A subclass says how to open a store."""

    @abstractmethod
    def open_store(self, path: Path, kinds: Sequence[BlockKind], memory: Memory, most_blocks: int) -> BlockStoreFace:
        """Return an empty store, whose files (if it has any) go into the directory ``path``, and
        which holds about ``most_blocks`` of the first kind at most, and not much less."""

    def make_rows(self, count: int = ROWS, row_bytes: int = ROW_BYTES, apart: int = 321) -> Rows:
        """Return rows for a store to move to and from, so many bytes apart; full of ones."""
        return make_rows(count, row_bytes, apart)

    @contextmanager
    def opened(
        self, path: Path, memory: Memory, kinds: Sequence[BlockKind] = KINDS, most_blocks: int = 1000
    ) -> Iterator[BlockStoreFace]:
        """Open a store and close it after the test."""
        store = self.open_store(path, kinds, memory, most_blocks)
        try:
            yield store
        finally:
            store.close()

    # -- bytes ---------------------------------------------------------------------------------

    def test_starts_empty(self, tmp_path: Path) -> None:
        """Nothing is there, nothing ends, and soon nothing is to be done."""
        with self.opened(tmp_path, self.make_rows()) as store:
            assert store.presence([]) == b""
            assert store.presence([key_of(1), key_of(2, 1)]) == bytes([Presence.ABSENT] * 2)
            assert store.poll() == []
            ended: list[Ended] = []
            run_until(store, lambda: not store.step(time.monotonic()), ended)
            assert ended == []

    def test_brings_back_what_was_put(self, tmp_path: Path) -> None:
        """Into other rows, whole, of every kind, and nothing beside it."""
        rows, keys = self.make_rows(), [key_of(number, number % 2) for number in range(20)]
        with self.opened(tmp_path, rows) as store:
            assert put_all(store, rows, keys) == [Result.DONE] * 20
            assert store.presence(keys) == bytes([Presence.READY] * 20)
            rows[:] = 7
            store.get(5, [Get(key, 63 - at) for at, key in enumerate(keys)])
            ended = finish(store, 5)[5]
            assert ended.results == [Result.DONE] * 20
            assert ended.moved_bytes == 10 * (KINDS[0].payload_bytes + KINDS[1].payload_bytes)
            assert ended.seconds >= 0
            for at, key in enumerate(keys):
                assert holds(rows, 63 - at, key, KINDS)
                assert (rows[63 - at, KINDS[group_of(key)].payload_bytes :] == 7).all()
            assert (rows[:44] == 7).all()

    def test_brings_back_blocks_in_pieces(self, tmp_path: Path) -> None:
        """Of several memories, into other rows than they were put from, and nothing beside it."""
        held = InPieces(self.make_rows(40), self.make_rows(50, 512, 0))
        with self.opened(tmp_path, held.memory, KINDS_IN_PIECES) as store:
            held.write()
            store.put(1, [Put(key, None, row) for key, row in zip(held.keys, held.rows, strict=True)])
            assert finish(store, 1)[1].results == [Result.DONE] * 12
            held.wide[:], held.narrow[:] = 7, 7
            elsewhere: list[Row] = [*held.rows[3:], *held.rows[:3]]
            elsewhere[1] = [40, 42, 41, 65, 64, 63]  # not of what was put
            elsewhere[4], elsewhere[5] = map(
                list, (rows_of(elsewhere[4]), rows_of(elsewhere[5]))
            )  # any sequence will do
            store.get(2, [Get(key, row) for key, row in zip(held.keys, elsewhere, strict=True)])
            ended = finish(store, 2)[2]
            assert ended.results == [Result.DONE] * 12
            assert ended.moved_bytes == 4 * sum(kind.payload_bytes for kind in KINDS_IN_PIECES)
            assert all(held.holds(at, row) for at, row in enumerate(elsewhere))
            assert (held.wide == 7).all()
            assert (held.narrow == 7).all()

    @pytest.mark.parametrize(
        ("kind", "row"),
        [
            (0, 3),
            (0, (3, 4)),
            (0, (3, 4, 5, 6)),
            (0, (3, 4, 90)),
            (0, (3, 4, -1)),
            (0, (3, 4, 0.5)),
            (0, (3, 4, 41)),
            (0, "345"),
            (2, (3, 4)),
            (2, 41),
            (2, None),
        ],
    )
    def test_wrong_pieces_are_an_error(self, tmp_path: Path, kind: int, row: Any) -> None:
        """A row for each piece, and long enough for it."""
        held = InPieces(self.make_rows(40), self.make_rows(50, 512, 0))
        with self.opened(tmp_path, held.memory, KINDS_IN_PIECES) as store:
            with pytest.raises(ValueError, match=_MISUSE):
                store.put(1, [Put(key_of(1, kind), None, row)])
            with pytest.raises(ValueError, match=_MISUSE):
                store.get(1, [Get(key_of(1, kind), row)])
            store.put(1, [Put(held.keys[0], None, held.rows[0])])
            assert finish(store, 1)[1].results == [Result.DONE]

    def test_keeps_recurrent_states(self, tmp_path: Path) -> None:
        """Beside the KV that they belong to, which is a little larger."""
        kinds = (BlockKind(10_000, tokens=16), BlockKind(9_000, tokens=16, state_tokens=512))
        rows, keys = self.make_rows(), [*(key_of(number) for number in range(8)), key_of(7, 1)]
        with self.opened(tmp_path, rows, kinds) as store:
            assert put_all(store, rows, keys) == [Result.DONE] * 9
            store.reached("one", keys)
            store.reached("two", keys)
            rows[:] = 0
            assert get_all(store, keys) == [Result.DONE] * 9
            assert all(holds(rows, at, key, kinds) for at, key in enumerate(keys))

    def test_rows_are_the_callers_again_once_a_tag_has_ended(self, tmp_path: Path) -> None:
        """Rounds over the same rows, each with other blocks: each block keeps its own bytes."""
        rows, rounds = self.make_rows(8), [[key_of(8 * turn + at) for at in range(8)] for turn in range(6)]
        with self.opened(tmp_path, rows) as store:
            for keys in rounds:
                assert put_all(store, rows, keys) == [Result.DONE] * 8
                rows[:] = 0
            for keys in rounds:
                assert get_all(store, keys) == [Result.DONE] * 8
                assert all(holds(rows, at, key, KINDS) for at, key in enumerate(keys))

    # -- jobs ------------------------------------------------------------------------------------

    def test_a_job_of_no_blocks_ends(self, tmp_path: Path) -> None:
        """A put and a get of nothing end once, with nothing."""
        with self.opened(tmp_path, self.make_rows()) as store:
            store.put(1, [])
            store.get(2, [])
            ended = finish(store, 1, 2)
            assert [list(each.results) for each in ended.values()] == [[], []]
            assert all(each.moved_bytes == 0 for each in ended.values())

    def test_each_tag_ends_once(self, tmp_path: Path) -> None:
        """Many jobs at once, of both kinds; a tag may be used again when it has ended."""
        rows = self.make_rows()
        with self.opened(tmp_path, rows) as store:
            for turn in range(3):
                for at in range(32):
                    rows[at] = content_of(key_of(100 * turn + at))
                    store.put(2 * at, [Put(key_of(100 * turn + at), None, at)])
                    store.get(2 * at + 1, [Get(key_of(10_000 + at), 32 + at)])
                ended = finish(store, *range(64))
                assert all(ended[2 * at].results == [Result.DONE] for at in range(32))
                assert all(ended[2 * at + 1].results == [Result.ABSENT] for at in range(32))
            assert store.poll() == []

    def test_a_key_twice_is_kept_once(self, tmp_path: Path) -> None:
        """A key twice in one job, in two jobs at once, and later: the first is kept."""
        rows, key = self.make_rows(), key_of(1)
        with self.opened(tmp_path, rows) as store:
            rows[0], rows[1] = content_of(key), content_of(key_of(2))
            store.put(1, [Put(key, None, 0), Put(key, None, 1)])
            store.put(2, [Put(key, None, 1)])
            ended = finish(store, 1, 2)
            assert ended[1].results == [Result.DONE, Result.PRESENT]
            assert ended[2].results == [Result.PRESENT]
            store.put(3, [Put(key, None, 1)])
            assert finish(store, 3)[3].results == [Result.PRESENT]
            assert get_all(store, [key, key]) == [Result.DONE] * 2
            assert holds(rows, 0, key, KINDS)
            assert holds(rows, 1, key, KINDS)

    def test_what_is_not_there_is_absent(self, tmp_path: Path) -> None:
        """An absent key among present ones; results are in the order of the blocks."""
        rows = self.make_rows()
        with self.opened(tmp_path, rows) as store:
            put_all(store, rows, [key_of(1), key_of(3)])
            found = get_all(store, [key_of(0), key_of(1), key_of(2), key_of(3), key_of(1, 1)])
            assert found == [Result.ABSENT, Result.DONE, Result.ABSENT, Result.DONE, Result.ABSENT]
            assert holds(rows, 1, key_of(1), KINDS)
            assert holds(rows, 3, key_of(3), KINDS)

    @pytest.mark.parametrize("row", [-1, ROWS])
    def test_a_row_that_there_is_not_is_an_error(self, tmp_path: Path, row: int) -> None:
        """It is a ValueError, and no tag is taken."""
        rows = self.make_rows()
        with self.opened(tmp_path, rows) as store:
            with pytest.raises(ValueError, match=_MISUSE):
                store.put(1, [Put(key_of(1), None, row)])
            with pytest.raises(ValueError, match=_MISUSE):
                store.get(1, [Get(key_of(1), row)])
            assert put_all(store, rows, [key_of(1)]) == [Result.DONE]

    def test_a_kind_that_there_is_not_is_an_error(self, tmp_path: Path) -> None:
        """The kind of a block, and that of a parent."""
        with self.opened(tmp_path, self.make_rows()) as store:
            with pytest.raises(ValueError, match=_MISUSE):
                store.put(1, [Put(key_of(1, 2), None, 0)])
            with pytest.raises(ValueError, match=_MISUSE):
                store.put(1, [Put(key_of(1), key_of(0, 65535), 0)])
            with pytest.raises(ValueError, match=_MISUSE):
                store.get(1, [Get(key_of(1, 2), 0)])

    def test_a_key_that_is_too_long_is_an_error(self, tmp_path: Path) -> None:
        """So is a block that names itself as its parent."""
        longest, longer = (make_block_key(bytes(count), 0) for count in (126, 127))
        rows = self.make_rows()
        with self.opened(tmp_path, rows) as store:
            with pytest.raises(ValueError, match=_MISUSE):
                store.put(1, [Put(longer, None, 0)])
            with pytest.raises(ValueError, match=_MISUSE):
                store.put(1, [Put(longest, longest, 0)])
            assert put_all(store, rows, [longest]) == [Result.DONE]
            assert get_all(store, [longest]) == [Result.DONE]
            assert holds(rows, 0, longest, KINDS)

    @pytest.mark.parametrize("wrong", [key_of(1, 2), make_block_key(bytes(127), 0), b"", "text", None, 5])
    def test_a_wrong_key_is_an_error_in_every_call(self, tmp_path: Path, wrong: Any) -> None:
        """One among right ones, too. Nothing is changed, and the store goes on."""
        rows, keys = self.make_rows(), [key_of(1), key_of(2)]
        with self.opened(tmp_path, rows) as store:
            put_all(store, rows, keys)
            calls: list[Callable[[], object]] = [
                lambda: store.put(1, [Put(keys[0], None, 0), Put(wrong, None, 1)]),
                lambda: store.get(1, [Get(keys[0], 0), Get(wrong, 1)]),
                lambda: store.delete(1, [keys[0], wrong]),
                lambda: store.ask([keys[0], wrong]),
                lambda: store.reached("one", [keys[0], wrong]),
            ]
            for call in calls:
                with pytest.raises(ValueError, match="a key"):
                    call()
            assert store.poll() == []
            assert get_all(store, keys, tag=1) == [Result.DONE] * 2

    @pytest.mark.parametrize("row", [1.0, "1", None])
    def test_a_row_that_is_no_number_is_an_error(self, tmp_path: Path, row: Any) -> None:
        """The store goes on."""
        rows = self.make_rows()
        with self.opened(tmp_path, rows) as store:
            with pytest.raises(ValueError, match="a row is a number"):
                store.put(1, [Put(key_of(1), None, 0), Put(key_of(2), None, row)])
            with pytest.raises(ValueError, match="a row is a number"):
                store.get(1, [Get(key_of(1), 0), Get(key_of(2), row)])
            assert put_all(store, rows, [key_of(1), key_of(2)]) == [Result.DONE] * 2

    def test_wrong_rows_and_kinds_are_an_error(self, tmp_path: Path) -> None:
        """Before anything is opened: then the same directory opens with right ones."""
        rows = self.make_rows()
        for memory in (rows[0], rows.astype(np.int8), rows[:, ::2], np.asfortranarray(rows)):
            with pytest.raises(ValueError, match="rows are rows"):
                self.open_store(tmp_path, KINDS, memory, 100)  # type: ignore[arg-type]
        fixed = rows.copy()
        fixed.setflags(write=False)
        with pytest.raises(ValueError, match="rows, so"):
            self.open_store(tmp_path, KINDS, fixed, 100)
        for kinds in ([], [BlockKind(0)], [BlockKind(-1)], [BlockKind(ROW_BYTES + 1)]):
            with pytest.raises(ValueError, match="kind"):
                self.open_store(tmp_path, kinds, rows, 100)
        with pytest.raises(ValueError, match="there is memory"):
            self.open_store(tmp_path, KINDS, [], 100)
        for pieces in ((60, 30), (60, 50), (0, 100), (ROW_BYTES + 1,)):
            with pytest.raises(ValueError, match=r"pieces of a block|a piece of it"):
                self.open_store(tmp_path, [BlockKind(100, piece_bytes=pieces)], rows, 100)
        for kind in (BlockKind(100, 0), BlockKind(100, 1, 0), BlockKind(100, 1, None, -1)):
            with pytest.raises(ValueError, match="one token"):
                self.open_store(tmp_path, [kind], rows, 100)
        with self.opened(tmp_path, rows) as store:
            assert put_all(store, rows, [key_of(1)]) == [Result.DONE]

    def test_a_tag_in_use_is_an_error(self, tmp_path: Path) -> None:
        """A tag is in use until ``poll`` has returned it."""
        with self.opened(tmp_path, self.make_rows()) as store:
            store.put(1, [])
            with pytest.raises(ValueError, match=_MISUSE):
                store.get(1, [])
            finish(store, 1)
            store.get(1, [])
            finish(store, 1)

    def test_drain_ends_every_job(self, tmp_path: Path) -> None:
        """Jobs that no step has seen, too; ``poll`` then returns each without a step."""
        rows = self.make_rows()
        with self.opened(tmp_path, rows) as store:
            for at in range(20):
                store.put(at, [Put(key_of(at), None, at)])
            store.get(20, [Get(key_of(99), 40)])
            store.drain()
            ended = {each.tag: each for each in store.poll()}
            assert sorted(ended) == list(range(21))
            assert all(ended[at].results == [Result.DONE] for at in range(20))
            assert store.poll() == []
            store.drain()

    # -- bounds --------------------------------------------------------------------------------

    def test_is_bounded(self, tmp_path: Path) -> None:
        """Many times what it holds: every put ends, it holds no more than it may, not nothing, and
        what it says is there comes back."""
        rows, most = self.make_rows(16), 100
        with self.opened(tmp_path, rows, most_blocks=most) as store:
            keys: list[BlockKey] = []
            for turn in range(40):
                some = [key_of(16 * turn + at) for at in range(16)]
                results = put_all(store, rows, some)
                assert set(results) <= {Result.DONE, Result.NO_ROOM, Result.REFUSED}
                keys += some
                found = store.presence(keys)
                assert found.count(Presence.READY) <= most
            ready = [key for key, presence in zip(keys, store.presence(keys), strict=True) if presence]
            assert most // 4 <= len(ready) <= most
            for start in range(0, len(ready), 16):
                some = ready[start : start + 16]
                for at, result in enumerate(get_all(store, some)):
                    assert result in {Result.DONE, Result.ABSENT}  # a search for room may still go on
                    assert result is Result.ABSENT or holds(rows, at, some[at], KINDS)

    @pytest.mark.parametrize("at_once", [True, False])
    def test_parents_that_name_each_other_leave_like_others(self, tmp_path: Path, at_once: bool) -> None:
        """In one job, or each in its own. What comes after them finds room."""
        rows, most = self.make_rows(16), 60
        with self.opened(tmp_path, rows, most_blocks=most) as store:
            rings = [key_of(number) for number in range(1000, 1120)]
            for start in range(0, len(rings), 3):
                ring = rings[start : start + 3]
                for at, key in enumerate(ring):
                    rows[at] = content_of(key)
                puts = [Put(key, ring[at - 1], at) for at, key in enumerate(ring)]
                for some in [puts] if at_once else [[put] for put in puts]:
                    store.put(1, some)
                    finish(store, 1)
            keys = [key_of(number) for number in range(160)]
            for start in range(0, len(keys), 16):
                put_all(store, rows, keys[start : start + 16])
            assert len(list(_ready(store, keys))) >= most // 4 > len(list(_ready(store, rings)))

    def test_against_a_model(self, tmp_path: Path) -> None:
        """Jobs of both kinds in any order, several at once, beyond what it holds: what is DONE has
        the bytes of its key, and what was never put is never there."""
        dice, rows = random.Random(5), self.make_rows()  # noqa: S311 - no secret
        numbers = range(300)
        with self.opened(tmp_path, rows, most_blocks=120) as store:
            put: set[BlockKey] = set()
            free, out, tag, seen = set(range(ROWS)), dict[int, Sequence[Put] | Sequence[Get]](), 0, 0
            while seen < 400:
                while free and len(out) < 6:
                    tag += 1
                    taken = dice.sample(sorted(free), min(len(free), dice.randint(0, 12)))
                    free.difference_update(taken)
                    keys = [key_of(dice.choice(numbers), dice.randint(0, 1)) for _ in taken]
                    if dice.random() < 0.6:
                        for key, row in zip(keys, taken, strict=True):
                            rows[row] = content_of(key)
                        out[tag] = [Put(key, None, row) for key, row in zip(keys, taken, strict=True)]
                        put.update(keys)
                        store.put(tag, [each for each in out[tag] if isinstance(each, Put)])
                    else:
                        rows[taken] = 0
                        out[tag] = [Get(key, row) for key, row in zip(keys, taken, strict=True)]
                        store.get(tag, [each for each in out[tag] if isinstance(each, Get)], arrival=tag)
                    if dice.random() < 0.2:
                        store.reached(f"request {tag}", [key_of(number) for number in numbers[:40]])
                store.step(time.monotonic())
                for ended in store.poll(0.01):
                    blocks = out.pop(ended.tag)
                    assert len(ended.results) == len(blocks)
                    for block, result in zip(blocks, ended.results, strict=True):
                        if isinstance(block, Get) and result is Result.DONE:
                            assert block.key in put
                            assert holds(rows, rows_of(block.row)[0], block.key, KINDS)
                    free.update(row for block in blocks for row in rows_of(block.row))
                    seen += 1

    # -- what a lookup finds -----------------------------------------------------------------------

    def test_finds_the_longest_prefix(self, tmp_path: Path) -> None:
        """Up to the first block that is not there, whatever comes behind."""
        rows, keys = self.make_rows(), [key_of(number) for number in range(6)]
        with self.opened(tmp_path, rows) as store:
            put_all(store, rows, [*keys[:3], *keys[4:]])
            assert [store.longest_prefix(keys[:count]) for count in range(7)] == [0, 1, 2, 3, 3, 3, 3]
            assert store.longest_prefix(keys[3:]) == 0
            assert store.longest_prefix(keys[4:]) == 2
            assert sorted(store.keys()) == sorted([*keys[:3], *keys[4:]])

    @pytest.mark.parametrize("is_held", [True, False])
    def test_what_is_held_is_not_evicted(self, tmp_path: Path, is_held: bool) -> None:
        """With the blocks before it; the rest leaves as ever."""
        rows, most = self.make_rows(16), 100
        with self.opened(tmp_path, rows, most_blocks=most) as store:
            chain = [key_of(number) for number in range(1000, 1010)]
            put_all(store, rows, chain)
            if is_held:
                store.hold(chain[:3], 50.0)
                store.hold([*chain[5:8], key_of(5000)], 50.0)
            store.hold(chain, 0.0)
            self._put_many(store, rows, 4 * most)
            left = [at for at, key in enumerate(chain) if key in set(_ready(store, chain))]
            assert left[:8] == list(range(8)) if is_held else len(left) < 8

    def test_holds_are_bounded(self, tmp_path: Path) -> None:
        """What is held beyond what may be leaves in the end: new blocks find room."""
        rows, most = self.make_rows(16), 100
        with self.opened(tmp_path, rows, most_blocks=most) as store:
            self._put_many(store, rows, 2 * most)
            store.hold(store.keys(), 1e9)
            self._put_many(store, rows, 2 * most, first=10_000)
            new = [key_of(number) for number in range(10_000, 10_000 + 2 * most)]
            assert len(list(_ready(store, new))) >= most // 4

    def _put_many(self, store: BlockStoreFace, rows: Rows, count: int, first: int = 0) -> None:
        for start in range(first, first + count, 16):
            keys = [key_of(number) for number in range(start, start + 16)]
            for at, key in enumerate(keys):
                rows[at] = content_of(key)
            store.put(1, [Put(key, None, at) for at, key in enumerate(keys)])
            finish(store, 1)

    def test_usage_by_salt(self, tmp_path: Path) -> None:
        """Bytes of content, by the salt that a put has named; what is deleted takes none."""
        rows, keys = self.make_rows(), [key_of(number) for number in range(12)]
        small, (large_bytes, small_bytes) = key_of(1, 1), (kind.payload_bytes for kind in KINDS)
        with self.opened(tmp_path, rows) as store:
            assert store.usage() == (0, {}, 0)
            salts = ["", "ada", "bob"]
            store.put(1, [Put(key, None, at, salts[at % 3]) for at, key in enumerate(keys)])
            store.put(2, [Put(small, keys[0], 12, "bob")])
            finish(store, 1, 2)
            used = store.usage()
            assert used.by_salt == {"": 4 * large_bytes, "ada": 4 * large_bytes, "bob": 4 * large_bytes + small_bytes}
            assert (used.total_bytes, used.unnamed_bytes) == (sum(used.by_salt.values()), 0)
            store.put(3, [Put(keys[1], None, 0, "carl")])
            store.delete(4, [*keys[2::3], keys[0]])
            finish(store, 3, 4)
            used = store.usage(["dora"])
            assert used.by_salt == {"": 3 * large_bytes, "ada": 4 * large_bytes, "bob": small_bytes}
            store.clear(5)
            finish(store, 5)
            assert store.usage() == (0, {}, 0)
            with pytest.raises(ValueError, match="a salt is text"):
                store.put(6, [Put(keys[1], None, 0, b"carl")])  # type: ignore[arg-type]

    # -- epochs and the end --------------------------------------------------------------------

    def test_forget_serves_nothing_of_before(self, tmp_path: Path) -> None:
        """Neither what was there nor what is on its way; the same keys may mean other bytes
        then."""
        rows, keys = self.make_rows(), [key_of(number) for number in range(8)]
        with self.opened(tmp_path, rows) as store:
            put_all(store, rows, keys)
            store.put(7, [Put(key_of(20), None, 20)])
            store.get(8, [Get(keys[0], 21)])
            store.step(time.monotonic())
            store.put(9, [Put(key_of(22), None, 22)])
            store.forget(1234)
            ended = finish(store, 7, 8, 9)
            assert all(set(each.results) == {Result.CANCELLED} for each in ended.values())
            assert store.presence([*keys, key_of(20), key_of(22)]) == bytes([Presence.ABSENT] * 10)
            assert get_all(store, keys) == [Result.ABSENT] * 8
            assert put_all(store, rows, keys, version=1) == [Result.DONE] * 8
            rows[:] = 0
            assert get_all(store, keys) == [Result.DONE] * 8
            assert all(holds(rows, at, key, KINDS, version=1) for at, key in enumerate(keys))

    @pytest.mark.parametrize("epoch", [-1, 0, 1 << 63, 1 << 64])
    def test_an_epoch_that_there_is_not_is_an_error(self, tmp_path: Path, epoch: int) -> None:
        """It is a ValueError, and forgets nothing; the last one serves like another."""
        rows, keys = self.make_rows(), [key_of(1), key_of(2)]
        with self.opened(tmp_path, rows) as store:
            assert put_all(store, rows, keys) == [Result.DONE] * 2
            with pytest.raises(ValueError, match=_MISUSE):
                store.forget(epoch)
            assert get_all(store, keys) == [Result.DONE] * 2
            store.forget((1 << 63) - 1)
            assert put_all(store, rows, keys, version=1) == [Result.DONE] * 2
            assert get_all(store, keys) == [Result.DONE] * 2
            assert holds(rows, 1, keys[1], KINDS, version=1)

    def test_deletes_blocks(self, tmp_path: Path) -> None:
        """Those that are named, at once, and each has a result; the others stay, and the same keys
        can be put again."""
        rows, keys = self.make_rows(), [key_of(number) for number in range(8)]
        with self.opened(tmp_path, rows) as store:
            put_all(store, rows, keys)
            store.delete(5, [keys[2], key_of(99), keys[6], keys[2]])
            gone = [2, 6]
            assert [at for at, each in enumerate(store.presence(keys)) if not each] == gone
            (ended,) = finish(store, 5).values()
            assert ended.results == [Result.DONE, Result.ABSENT, Result.DONE, Result.DONE]
            assert ended.moved_bytes == 0
            found = get_all(store, keys)
            assert [at for at, each in enumerate(found) if each is Result.ABSENT] == gone
            assert all(holds(rows, at, key, KINDS) for at, key in enumerate(keys) if at not in gone)
            again = [keys[2], keys[6]]
            assert put_all(store, rows, again, version=1) == [Result.DONE] * 2
            assert get_all(store, again) == [Result.DONE] * 2
            assert all(holds(rows, at, key, KINDS, version=1) for at, key in enumerate(again))
            store.delete(6, [])
            assert finish(store, 6)[6].results == []

    def test_clears_all(self, tmp_path: Path) -> None:
        """Of every kind, at once; what is put afterwards is kept."""
        rows = self.make_rows()
        keys = [key_of(number, number % 2) for number in range(20)]
        with self.opened(tmp_path, rows) as store:
            for start in (0, 10):
                put_all(store, rows, keys[start : start + 10])
            store.clear(5)
            assert store.presence(keys) == bytes(20)
            assert finish(store, 5)[5].results == [Result.DONE]
            assert get_all(store, keys) == [Result.ABSENT] * 20
            for at, key in enumerate(keys):
                rows[at] = content_of(key, 1)
            store.put(7, [Put(key, None, at) for at, key in enumerate(keys)], wait_s=_SAFETY_S)
            assert finish(store, 7)[7].results == [Result.DONE] * 20
            assert get_all(store, keys) == [Result.DONE] * 20
            assert all(holds(rows, at, key, KINDS, version=1) for at, key in enumerate(keys))
            store.clear(8)
            store.clear(9)
            assert {ended.results[0] for ended in finish(store, 8, 9).values()} == {Result.DONE}

    @pytest.mark.parametrize("all_of_it", [True, False])
    def test_what_is_on_its_way_to_what_is_deleted(self, tmp_path: Path, all_of_it: bool) -> None:
        """A get under way brings the right bytes; a put, begun or not, leaves nothing, and one that
        was asked for later is kept."""
        rows, keys = self.make_rows(), [key_of(number) for number in range(8)]
        with self.opened(tmp_path, rows) as store:
            put_all(store, rows, keys)
            begun, asked = key_of(20), key_of(21)
            rows[20], rows[21] = content_of(begun), content_of(asked)
            store.put(2, [Put(begun, keys[7], 20)])
            store.get(3, [Get(key, 30 + at) for at, key in enumerate(keys)])
            store.step(time.monotonic())
            store.put(4, [Put(asked, None, 21)])
            going = [*keys, begun, asked]
            if all_of_it:
                store.clear(5)
            else:
                store.delete(5, going)
            assert store.presence(going) == bytes(10)
            ended = finish(store, 2, 3, 4, 5)
            assert ended[4].results == [Result.CANCELLED]
            for at, (key, result) in enumerate(zip(keys, ended[3].results, strict=True)):
                assert result in {Result.DONE, Result.ABSENT}
                assert result is Result.ABSENT or holds(rows, 30 + at, key, KINDS)
            assert set(ended[5].results) <= {Result.DONE, Result.ABSENT}
            assert store.presence(going) == bytes(10)
            store.put(6, [Put(begun, None, 20), Put(asked, None, 21)], wait_s=_SAFETY_S)
            assert finish(store, 6)[6].results == [Result.DONE] * 2
            assert get_all(store, [begun, asked]) == [Result.DONE] * 2
            assert holds(rows, 1, asked, KINDS)

    def test_waits_for_what_a_poll_takes_in(self, tmp_path: Path) -> None:
        """While a job is out ``wait`` and ``poll`` come to its end, and nothing but a poll takes
        it."""
        rows, ended = self.make_rows(), list[Ended]()
        with self.opened(tmp_path, rows) as store:
            put_all(store, rows, [key_of(1)])
            store.get(2, [Get(key_of(1), 1)])
            store.step(time.monotonic())
            give_up_s = time.monotonic() + _SAFETY_S
            while not ended and time.monotonic() < give_up_s:
                store.wait(1.0)
                store.wait(1.0)
                ended += store.poll()
            assert [(each.tag, each.results) for each in ended] == [(2, [Result.DONE])]
            assert not store.is_off
        assert store.is_off

    def test_close_ends_every_job(self, tmp_path: Path) -> None:
        """Jobs that were asked for end, and jobs under way; ``poll`` returns each once, also after
        ``close``."""
        rows = self.make_rows()
        store = self.open_store(tmp_path, KINDS, rows, 1000)
        put_all(store, rows, [key_of(0)])
        store.put(1, [Put(key_of(1), None, 1)])
        store.get(2, [Get(key_of(0), 2)])
        store.step(time.monotonic())
        store.put(3, [Put(key_of(3), None, 3)])
        store.close()
        ended = {each.tag: each.results for each in store.poll()}
        assert sorted(ended) == [1, 2, 3]
        assert ended[3] == [Result.CANCELLED]
        assert store.poll() == []
        store.close()
        with pytest.raises(ValueError, match=_MISUSE):
            store.put(4, [])
        store.ask([key_of(0)])
        store.reached("late", [key_of(0)])
        store.forget(5)
        with pytest.raises(ValueError, match=_MISUSE):
            store.clear(5)
        store.drain()
        assert store.presence([key_of(0)]) == bytes([Presence.ABSENT])

    # -- what it tells -------------------------------------------------------------------------

    def test_changes_say_what_is_there(self, tmp_path: Path) -> None:
        """A reader of the changes knows what is READY, from the first call on, through evictions
        and a new epoch."""
        rows, known = self.make_rows(16), set[BlockKey]()

        def follow(store: BlockStoreFace) -> None:
            while True:
                taken = store.changes()
                known.difference_update(known if taken.cleared else ())
                for change in taken.changes:
                    (known.update if change.stored else known.difference_update)(change.keys)
                if not taken.changes:
                    return

        with self.opened(tmp_path, rows, most_blocks=50) as store:
            everything = [key_of(number) for number in range(320)]
            for turn in range(20):
                put_all(store, rows, everything[16 * turn : 16 * turn + 16])
                follow(store)
                assert known == set(_ready(store, everything))
            assert known
            store.forget(99)
            follow(store)
            assert known == set()

    def test_stats_count_what_was_moved(self, tmp_path: Path) -> None:
        """Everything counts once: the next call begins anew."""
        rows, keys = self.make_rows(), [key_of(number) for number in range(5)]
        with self.opened(tmp_path, rows) as store:
            put_all(store, rows, keys)
            get_all(store, keys[:3])
            stats = store.stats()
            assert (stats["stored_blocks"], stats["loaded_blocks"]) == (5, 3)
            assert store.stats()["stored_blocks"] == 0

    def test_questions_are_harmless(self, tmp_path: Path) -> None:
        """Asking others and ``reached``, also for blocks that nobody has, change nothing that is
        there."""
        rows, keys = self.make_rows(), [key_of(number) for number in range(8)]
        with self.opened(tmp_path, rows) as store:
            put_all(store, rows, keys[:4])
            store.ask(keys)
            store.reached("one", keys)
            store.reached("two", [])
            store.reached(None, keys)
            store.reached(None, keys)
            run_until(store, lambda: Presence.ASKED not in store.presence(keys), [])
            assert store.presence(keys) == bytes([Presence.READY] * 4 + [Presence.ABSENT] * 4)


def _ready(store: BlockStoreFace, keys: Sequence[BlockKey]) -> Iterable[BlockKey]:
    found: Mapping[BlockKey, int] = dict(zip(keys, store.presence(keys), strict=True))
    return [key for key, presence in found.items() if presence == Presence.READY]
