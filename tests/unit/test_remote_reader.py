# SPDX-License-Identifier: Apache-2.0
"""What the remote store is asked, and what its answers are taken to mean."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence

import pytest
from support.memory_objects import MemoryObjects
from support.waits import WAIT_S

from kvdisk.blocks import BlockKey
from kvdisk.reader_thread import MOST_QUESTIONS
from kvdisk.remote.base import ObjectOp, ObjectsOutcome, RemoteObject, Result
from kvdisk.remote.reader import MOST_ALONE, ChainSearch, RemoteReader


@pytest.mark.parametrize("count", [1, 2, 3, 16, 17, 100, 1000])
def test_a_chain_is_found_to_its_end_in_few_rounds(count):
    for there in range(0, count + 1, max(1, count // 97)):
        search, rounds, asked = ChainSearch(count), 0, 0
        while probes := search.probes():
            assert len(set(probes)) == len(probes)
            rounds, asked = rounds + 1, asked + len(probes)
            search.take_answers({at: at < there for at in probes})
        assert (search.there, search.gone) == (there, there)
        assert rounds <= 4
        assert asked <= 64
        if there == count:
            assert rounds == 1, "a whole prompt is found at once"


def test_behind_a_hole_nothing_is_thought_to_be_there():
    search = ChainSearch(1000)
    while probes := search.probes():
        search.take_answers({at: at != 7 for at in probes})
    assert search.there == 7


class Store(MemoryObjects):
    """The reference, whose names are keys in hex. ``result``: of every object, instead of its
    own."""

    def __init__(self, there: Sequence[BlockKey]) -> None:
        super().__init__({key.hex(): b"" for key in there})
        self.batches: list[int] = []
        self.result: Result | None = None
        self.hangs = threading.Event()
        self.answers = True
        self.closed = False

    def submit(self, op: ObjectOp, batch: Sequence[RemoteObject]) -> int:
        self.batches.append(len(batch))
        return super().submit(op, batch)

    def poll(self, timeout_s: float = 0.0) -> list[ObjectsOutcome]:
        if self.hangs.is_set():
            return []
        found = super().poll(timeout_s)
        return [each._replace(results=(self.result,) * len(each.results)) if self.result else each for each in found]

    def close(self) -> None:
        self.closed = True


def keys_of(chain: int, count: int) -> list[BlockKey]:
    return [BlockKey(bytes([chain]) + at.to_bytes(4, "big")) for at in range(count)]


def await_answers(reader: RemoteReader, count: int):
    found = []
    end_s = time.monotonic() + WAIT_S
    while len(found) < count:
        assert time.monotonic() < end_s
        found += reader.poll()
        time.sleep(0.001)
    assert len(found) == count
    return found


def open_reader(store: Store) -> RemoteReader:
    return RemoteReader(store, lambda key: key.hex())


def test_chains_and_blocks_of_their_own():
    one, two, alone = keys_of(1, 500), keys_of(2, 40), keys_of(3, MOST_ALONE + 50)
    there = one[:333] + alone[3::7]
    store = Store(there)
    reader = open_reader(store)
    assert reader.any
    assert reader.ask(5, [one, two], alone)
    (answer,) = await_answers(reader, 1)
    assert answer.ticket == 5
    assert set(answer.found) == {*one[:333], *(key for key in alone[3::7] if key in alone[-MOST_ALONE:])}
    assert len(store.batches) <= 4
    reader.ask(6, [], [])
    assert await_answers(reader, 1) == [(6, frozenset(), True)]
    reader.close()
    reader.close()
    assert store.closed and not reader.any
    assert not reader.ask(7, [one], [])


def test_many_questions_are_answered_side_by_side():
    chain = keys_of(1, 200)
    reader = open_reader(Store(chain[:150]))
    asked = [reader.ask(ticket, [chain[ticket:]], []) for ticket in range(40)]
    assert all(asked)
    answers = {answer.ticket: answer.found for answer in await_answers(reader, 40)}
    assert answers == {ticket: frozenset(chain[ticket:150]) for ticket in range(40)}
    reader.close()


@pytest.mark.parametrize("result", [Result.LATE, Result.REFUSED, Result.FAILED])
def test_a_store_that_fails_has_nothing(result):
    chain = keys_of(1, 20)
    store = Store(chain)
    store.result = result
    store.answers = False
    reader = open_reader(store)
    store.is_sound = False
    reader.ask(1, [chain], chain)
    assert await_answers(reader, 1) == [(1, frozenset(), False)]
    assert not reader.is_sound, "who has an answer knows what it is worth"
    end_s = time.monotonic() + WAIT_S
    while reader.any:
        assert time.monotonic() < end_s
    store.result, store.answers, store.is_sound = None, True, True
    while not reader.any:
        assert time.monotonic() < end_s, "nobody looks whether it answers again"
    reader.ask(2, [chain], [])
    assert await_answers(reader, 1) == [(2, frozenset(chain), True)]
    reader.close()


class Shaky(Store):
    """Of each ten objects or so that it is asked for, one is not answered."""

    def __init__(self, there: Sequence[BlockKey], seed: int) -> None:
        super().__init__(there)
        self._rng = random.Random(seed)

    def poll(self, timeout_s: float = 0.0) -> list[ObjectsOutcome]:
        def fail(result: Result) -> Result:
            return self._rng.choice((Result.FAILED, Result.LATE)) if self._rng.random() < 0.1 else result

        return [each._replace(results=tuple(map(fail, each.results))) for each in super().poll(timeout_s)]


@pytest.mark.parametrize("seed", range(5))
def test_where_one_object_in_ten_is_not_answered_the_rest_is_known(seed):
    chain, alone = keys_of(1, 800), keys_of(2, 200)
    store = Shaky(chain + alone[::2], seed)
    reader = open_reader(store)
    reader.ask(1, [chain], alone)
    (answer,) = await_answers(reader, 1)
    assert set(answer.found) == {*chain, *alone[::2]} and answer.is_whole
    assert len(store.batches) < 12
    reader.close()


def test_an_object_that_is_never_answered_costs_what_is_behind_it_and_no_more():
    class Broken(Store):
        def _do(self, op: ObjectOp, asked: RemoteObject) -> Result:
            return Result.FAILED if asked.name == keys_of(1, 800)[-1].hex() else super()._do(op, asked)

    chain = keys_of(1, 800)
    store = Broken(chain)
    reader = open_reader(store)
    reader.ask(1, [chain], [])
    (answer,) = await_answers(reader, 1)
    assert answer.found == frozenset(chain[:-1]) and not answer.is_whole
    assert len(store.batches) < 20
    reader.close()


def test_questions_are_bounded_and_a_store_that_hangs_does_not_hold_up_the_end():
    chain = keys_of(1, 20)
    store = Store(chain)
    store.hangs.set()
    reader = open_reader(store)
    refused = 0
    for ticket in range(10 * MOST_QUESTIONS):
        refused += not reader.ask(ticket, [chain], [])
    assert refused > 0
    reader.close()
    assert store.closed
    assert not reader.poll()
