# SPDX-License-Identifier: Apache-2.0
"""What ``SharedStore`` must do over any ``BlockStore``. Subclass ``SharedStoreConformance`` in a
test module, and pytest runs it."""

from __future__ import annotations

import os
import random
import select
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvdisk.blocks import BlockKey
from kvdisk.shared_store import Endings, SharedStore
from kvdisk.store_face import BlockKind, BlockStoreFace, Get, Memory, Presence, Put, Result, Rows
from kvdisk.testing.store_conformance import (
    KINDS,
    KINDS_IN_PIECES,
    ROWS,
    InPieces,
    content_of,
    holds,
    key_of,
    make_rows,
)

SAFETY_S = 120.0
"""After so long a test gives up on what should have ended; no test waits for it to pass."""
_THREADS = 4


def chain_of(keys: Sequence[BlockKey], first_row: int = 0) -> list[Put]:
    """Return the puts of a chain, from a row on."""
    return [Put(key, parent, first_row + at) for at, (key, parent) in enumerate(zip(keys, [None, *keys], strict=False))]


def put_all(store: SharedStore, rows: Rows, keys: Sequence[BlockKey], version: int = 0) -> Sequence[Result]:
    """Put a chain of blocks from the first rows on; return the results."""
    for at, key in enumerate(keys):
        rows[at] = content_of(key, version)
    return store.put(chain_of(keys)).result(SAFETY_S)


def get_all(store: SharedStore, keys: Sequence[BlockKey]) -> Sequence[Result]:
    """Get blocks into the first rows; return the results."""
    return store.get([Get(key, at) for at, key in enumerate(keys)]).result(SAFETY_S)


def in_threads(*calls: Callable[[], None]) -> None:
    """Make calls side by side; raise what one of them raises."""
    futures: list[Future[None]] = [Future() for _ in calls]

    def run(call: Callable[[], None], future: Future[None]) -> None:
        try:
            call()
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)

    for call, future in zip(calls, futures, strict=True):
        threading.Thread(target=run, args=(call, future), daemon=True).start()
    for future in futures:
        future.result(SAFETY_S)


class SharedStoreConformance(ABC):
    """The suite. A subclass says how to open a store that is shared then."""

    @abstractmethod
    def open_store(self, path: Path, kinds: Sequence[BlockKind], memory: Memory, most_blocks: int) -> BlockStoreFace:
        """Return an empty store, as ``BlockStoreConformance.open_store``; it need not have room
        yet."""

    @contextmanager
    def opened(
        self, path: Path, memory: Memory, most_blocks: int = 1000, kinds: Sequence[BlockKind] = KINDS
    ) -> Iterator[SharedStore]:
        """Open a store and close it after the test."""
        store = SharedStore(self.open_store(path, kinds, memory, most_blocks))
        try:
            yield store
        finally:
            assert store.close(SAFETY_S)

    # -- jobs ----------------------------------------------------------------------------------

    def test_the_first_put_of_all_rows_is_done(self, tmp_path: Path) -> None:
        """It waits for its room, however few rows may wait otherwise; the bytes come back."""
        rows, keys = make_rows(), [key_of(number) for number in range(ROWS)]
        with self.opened(tmp_path, rows) as store:
            assert put_all(store, rows, keys) == [Result.DONE] * ROWS
            assert put_all(store, rows, keys[:2], version=1) == [Result.PRESENT] * 2
            rows[:] = 0
            assert get_all(store, [*keys[: ROWS - 1], key_of(ROWS)]) == [Result.DONE] * (ROWS - 1) + [Result.ABSENT]
            assert all(holds(rows, at, key, KINDS) for at, key in enumerate(keys[:-1]))

    def test_brings_back_blocks_in_pieces(self, tmp_path: Path) -> None:
        """Of several memories, from several threads."""
        held = InPieces(make_rows(40), make_rows(50, 512, 0))
        with self.opened(tmp_path, held.memory, kinds=KINDS_IN_PIECES) as store:
            held.write()
            puts = [Put(key, None, row) for key, row in zip(held.keys, held.rows, strict=True)]
            assert list(store.put(puts, SAFETY_S).result(SAFETY_S)) == [Result.DONE] * 12
            held.wide[:], held.narrow[:] = 7, 7

            def load(at: int) -> None:
                assert store.get([Get(held.keys[at], held.rows[at])]).result(SAFETY_S) == [Result.DONE]

            in_threads(*(partial(load, at) for at in range(12)))
            assert all(held.holds(at, row) for at, row in enumerate(held.rows))
            assert (held.wide == 7).all()
            with pytest.raises(ValueError, match="a row"):
                store.get([Get(held.keys[0], 3)])

    def test_jobs_of_nothing_end(self, tmp_path: Path) -> None:
        """So do questions of nothing."""
        with self.opened(tmp_path, make_rows()) as store:
            assert store.put([]).result(SAFETY_S) == []
            assert store.get([]).result(SAFETY_S) == []
            assert store.presence([]) == store.find([]) == b""
            store.reached([])

    def test_many_threads_at_once(self, tmp_path: Path) -> None:
        """Each has rows of its own, puts and gets what others do, too, and asks meanwhile, beyond
        what the store holds: what is DONE has the bytes of its key."""
        rows = make_rows()
        share = ROWS // _THREADS
        with self.opened(tmp_path, rows, most_blocks=120) as store:

            def work(thread: int) -> None:
                dice, first = random.Random(thread), thread * share  # noqa: S311 - no secret
                for _ in range(30):
                    keys = [key_of(number, dice.randint(0, 1)) for number in dice.sample(range(200), share)]
                    for at, key in enumerate(keys):
                        rows[first + at] = content_of(key)
                    put = store.put([Put(key, None, first + at) for at, key in enumerate(keys)])
                    store.reached(keys)
                    assert len(store.presence(keys)) == share
                    stored = put.result(SAFETY_S)
                    assert set(stored) <= {Result.DONE, Result.PRESENT, Result.NO_ROOM, Result.REFUSED}
                    rows[first : first + share] = 0
                    found = store.get([Get(key, first + at) for at, key in enumerate(keys)]).result(SAFETY_S)
                    assert set(found) <= {Result.DONE, Result.ABSENT}
                    for at, (key, result) in enumerate(zip(keys, found, strict=True)):
                        assert result is Result.ABSENT or holds(rows, first + at, key, KINDS)

            in_threads(*(lambda thread=thread: work(thread) for thread in range(_THREADS)))

    def test_a_job_cannot_be_cancelled(self, tmp_path: Path) -> None:
        """Its rows are the store's until it has ended, whatever the caller says."""
        rows, keys = make_rows(), [key_of(number) for number in range(8)]
        for at, key in enumerate(keys):
            rows[at] = content_of(key)
        with self.opened(tmp_path, rows) as store:
            future = store.put(chain_of(keys))
            assert not future.cancel()
            assert future.result(SAFETY_S) == [Result.DONE] * 8

    def test_a_job_asks_for_the_next(self, tmp_path: Path) -> None:
        """A callback may call the store, and one that raises harms nobody."""
        rows, keys = make_rows(), [key_of(number) for number in range(4)]
        with self.opened(tmp_path, rows) as store:
            put_all(store, rows, keys)
            second, done = [], threading.Event()

            def go_on(_: Future[Sequence[Result]]) -> None:
                second.append(store.get([Get(keys[1], 9)]))
                done.set()
                raise RuntimeError("of a caller")

            store.get([Get(keys[0], 8)]).add_done_callback(go_on)
            assert done.wait(SAFETY_S)
            assert second[0].result(SAFETY_S) == [Result.DONE]
            assert holds(rows, 9, keys[1], KINDS)

    # -- who waits in poll(2) --------------------------------------------------------------------

    def test_endings_wake_who_polls(self, tmp_path: Path) -> None:
        """The descriptor is readable while something has ended; ``take`` returns each job once,
        also where the reader has read the descriptor."""
        rows, keys = make_rows(), [key_of(number) for number in range(8)]
        endings, seen = Endings(), dict[object, Sequence[Result]]()
        waiter = select.poll()
        waiter.register(endings.fileno(), select.POLLIN)
        with self.opened(tmp_path, rows) as store:
            assert waiter.poll(0) == []
            assert endings.take() == []
            put_all(store, rows, keys)
            for at, key in enumerate(keys):
                endings.add(at, store.get([Get(key, at)]))
            endings.add("absent", store.get([Get(key_of(99), 9)]))
            while len(seen) < 9:
                assert waiter.poll(1000 * SAFETY_S)
                if len(seen) % 2:
                    os.eventfd_read(endings.fileno())
                taken = endings.take()
                assert not seen.keys() & {name for name, _ in taken}
                seen.update(taken)
            assert waiter.poll(0) == []
            assert seen.pop("absent") == [Result.ABSENT]
            assert seen == {at: [Result.DONE] for at in range(8)}
            endings.close()
            endings.close()
            assert endings.fileno() == -1
            endings.add("late", store.get([Get(keys[0], 0)]))
            assert endings.take() == []

    # -- the end -------------------------------------------------------------------------------

    def test_close_under_load_ends_every_job(self, tmp_path: Path) -> None:
        """Threads go on asking while another closes: every future is done, what was asked for later
        is CANCELLED, and no call raises."""
        rows = make_rows()
        share = ROWS // _THREADS
        store = SharedStore(self.open_store(tmp_path, KINDS, rows, 1000))
        started = threading.Barrier(_THREADS + 1)

        def work(thread: int) -> None:
            started.wait(SAFETY_S)
            for turn in range(10**6):
                keys = [key_of(1000 * thread + turn * share + at) for at in range(share)]
                results = store.put(chain_of(keys, thread * share)).result(SAFETY_S)
                store.reached(keys)
                if set(results) == {Result.CANCELLED} and store.is_off:
                    return

        def end() -> None:
            started.wait(SAFETY_S)
            time.sleep(0.05)
            assert store.close(SAFETY_S)

        in_threads(*(lambda thread=thread: work(thread) for thread in range(_THREADS)), end)

    def test_a_closed_store_answers(self, tmp_path: Path) -> None:
        """Nothing is there, jobs are CANCELLED at once, and nothing raises."""
        rows, keys = make_rows(), [key_of(0), key_of(1)]
        store = SharedStore(self.open_store(tmp_path, KINDS, rows, 1000))
        assert not store.is_off
        put_all(store, rows, keys)
        last = store.get([Get(keys[0], 5)])
        assert store.close()
        assert last.result(0) == [Result.DONE]
        assert store.close()
        assert store.is_off
        assert store.presence(keys) == store.find(keys) == bytes([Presence.ABSENT] * 2)
        assert store.put(chain_of(keys)).result(0) == [Result.CANCELLED] * 2
        assert store.get([Get(keys[0], 0)]).result(0) == [Result.CANCELLED]
        store.reached(keys)
        store.forget(5)

    def test_a_callback_may_close(self, tmp_path: Path) -> None:
        """It does not wait for itself."""
        rows = make_rows()
        store = SharedStore(self.open_store(tmp_path, KINDS, rows, 1000))
        said = list[bool]()
        future = store.put(chain_of([key_of(0)]))
        future.add_done_callback(lambda _: said.append(store.close()))
        wait([future], SAFETY_S)
        assert store.close(SAFETY_S)
        assert future.done()
        assert store.is_off

    def test_forget_serves_nothing_of_before(self, tmp_path: Path) -> None:
        """The same keys mean other bytes then."""
        rows, keys = make_rows(), [key_of(number) for number in range(8)]
        with self.opened(tmp_path, rows) as store:
            put_all(store, rows, keys)
            store.forget(77)
            assert get_all(store, keys) == [Result.ABSENT] * 8
            assert put_all(store, rows, keys, version=1) == [Result.DONE] * 8
            rows[:] = 0
            assert get_all(store, keys) == [Result.DONE] * 8
            assert all(holds(rows, at, key, KINDS, version=1) for at, key in enumerate(keys))

    def test_deletes_and_clears(self, tmp_path: Path) -> None:
        """At once; what others put meanwhile is kept or CANCELLED, and has its bytes."""
        rows, keys = make_rows(), [key_of(number) for number in range(8)]
        with self.opened(tmp_path, rows) as store:
            put_all(store, rows, keys)
            deleted = store.delete([*keys[:3], key_of(99)])
            assert store.presence(keys) == bytes([Presence.ABSENT] * 3 + [Presence.READY] * 5)
            assert deleted.result(SAFETY_S) == [Result.DONE] * 3 + [Result.ABSENT]
            cleared = store.clear()
            assert store.presence(keys) == bytes(8)
            assert cleared.result(SAFETY_S) == [Result.DONE]
            assert put_all(store, rows, keys, version=1) == [Result.DONE] * 8
            assert get_all(store, keys) == [Result.DONE] * 8
            assert all(holds(rows, at, key, KINDS, version=1) for at, key in enumerate(keys))
        assert store.delete(keys).result(0) == [Result.CANCELLED] * 8
        assert store.clear().result(0) == [Result.CANCELLED]

    def test_a_lookup_holds_what_it_has_found(self, tmp_path: Path) -> None:
        """For as long as it says, from many puts of others."""
        rows, keys = make_rows(), [key_of(number) for number in range(1000, 1010)]
        with self.opened(tmp_path, rows, most_blocks=100) as store:
            put_all(store, rows, keys)
            assert store.longest_prefix([*keys, key_of(5), keys[0]], hold_s=50.0) == 10
            for start in range(0, 400, 50):
                put_all(store, rows, [key_of(number) for number in range(start, start + 50)])
            assert store.longest_prefix(keys) == 10
            store.hold(keys, 1.0)
            assert set(keys) <= set(store.keys())
        assert (store.longest_prefix(keys, 1.0), store.keys()) == (0, [])

    def test_tells_what_it_has(self, tmp_path: Path) -> None:
        """Usage by salt, and figures that add up from call to call, also after the end."""
        rows, keys = make_rows(), [key_of(number) for number in range(4)]
        with self.opened(tmp_path, rows) as store:
            store.put([Put(key, None, at, "ada") for at, key in enumerate(keys)]).result(SAFETY_S)
            assert store.usage() == (4 * KINDS[0].payload_bytes, {"ada": 4 * KINDS[0].payload_bytes}, 0)
            assert store.figures()["stored_blocks"] == 4
            get_all(store, keys[:3])
            found = store.figures()
            assert (found["stored_blocks"], found["loaded_blocks"]) == (4, 3)
        assert store.usage() == (0, {}, 0)
        assert store.figures()["stored_blocks"] == 4

    def test_what_a_caller_does_wrong_is_an_error(self, tmp_path: Path) -> None:
        """It is a ValueError on the thread of the caller, and the store goes on."""
        rows, keys = make_rows(), [key_of(number) for number in range(4)]
        with self.opened(tmp_path, rows) as store:
            with pytest.raises(ValueError, match="a row"):
                store.put([Put(keys[0], None, ROWS)])
            with pytest.raises(ValueError, match="a row"):
                store.get([Get(keys[0], -1)])
            with pytest.raises(ValueError, match="a kind"):
                store.delete([key_of(1, 2)])
            with pytest.raises(ValueError, match="a kind"):
                store.reached([key_of(1, 2)])
            with pytest.raises(ValueError, match="a kind"):
                store.find([key_of(1, 2)])
            with pytest.raises(ValueError, match="epoch"):
                store.forget(0)
            wrong: Any = "wrong"
            calls: list[Callable[[], object]] = [
                lambda: store.put([wrong]),
                lambda: store.put([(keys[0],)]),  # type: ignore[list-item]
                lambda: store.put([Put(keys[0], None, 0)], wait_s=wrong),
                lambda: store.get([wrong]),
                lambda: store.get([Get(keys[0], 0)], arrival=wrong),
                lambda: store.presence([wrong]),
                lambda: store.longest_prefix([wrong]),
                lambda: store.longest_prefix(keys, hold_s=wrong),
                lambda: store.hold(keys, wrong),
                lambda: store.delete([wrong]),
                lambda: store.forget(wrong),
                lambda: store.usage([b"salt"]),  # type: ignore[list-item]
            ]
            for call in calls:
                with pytest.raises(ValueError, match=r"a key|a time|no Put|no Get|an arrival|epoch|a salt"):
                    call()
            assert not store.is_off
            assert put_all(store, rows, keys) == [Result.DONE] * 4
            assert get_all(store, keys) == [Result.DONE] * 4

    def test_a_name_counts_once(self, tmp_path: Path) -> None:
        """Asking others and ``reached``, also of blocks that nobody has, change nothing that is
        there."""
        rows, keys = make_rows(), [key_of(number) for number in range(8)]
        with self.opened(tmp_path, rows) as store:
            put_all(store, rows, keys[:4])
            store.reached(keys, "one")
            store.reached(keys, "one")
            store.reached(keys)
            assert store.find(keys, 0.0)[:4] == bytes([Presence.READY] * 4)
            assert store.find(keys) == bytes([Presence.READY] * 4 + [Presence.ABSENT] * 4)
