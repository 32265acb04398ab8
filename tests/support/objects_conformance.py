# SPDX-License-Identifier: Apache-2.0

"""What every ``Objects`` does, as one suite of tests. Needs no pytest to be imported.

A test module subclasses ``ObjectsConformance`` under a name that begins with ``Test`` and says how
a store is opened, and changed behind its back; pytest then runs each ``test_`` method with
``setup_method`` and ``teardown_method`` around it.
"""

from __future__ import annotations

import mmap
import random
from abc import ABC, abstractmethod
from typing import Any

from kvdisk.blocks import BlockKey
from kvdisk.geometry import Namespace
from kvdisk.remote.base import ObjectOp, Objects, ObjectsOutcome, RemoteObject, Result, object_name

WAIT_S = 60.0
"""A bound, not a delay: a store that takes longer has lost a batch."""
UNTOUCHED = 0xA5


def make_bytes(byte_count: int, seed: int) -> bytes:
    """Return bytes that depend on ``seed`` alone."""
    return random.Random(seed).randbytes(byte_count)


class ObjectsCase(ABC):
    """A fixture for tests of a store. ``objects``: open for one test, with none of its names in use
    yet."""

    objects: Objects
    namespace: Namespace
    least_bytes = 0
    """Bytes of the shortest object that the store can hold."""

    @abstractmethod
    def make_objects(self) -> Objects:
        """Open the store; the suite closes it."""

    @abstractmethod
    def write(self, name: str, body: bytes) -> None:
        """Write an object behind the back of ``objects``."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove an object behind the back of ``objects``."""

    def setup_method(self, _method: Any) -> None:
        """Open the store of one test, with names that no other has."""
        self.namespace = Namespace(random.randbytes(32), 0)
        self.objects = self.make_objects()

    def teardown_method(self, _method: Any) -> None:
        """Close the store."""
        self.objects.close()

    def name(self, number: int) -> str:
        """Return a name as blocks have."""
        return object_name(self.namespace, BlockKey(number.to_bytes(34, "little")), 0, 1)

    def end(self, op: ObjectOp, *batch: RemoteObject) -> tuple[Result, ...]:
        """Ask for one batch and return its results."""
        ticket = self.objects.submit(op, batch)
        (outcome,) = self.await_outcomes(1)
        assert outcome.ticket == ticket
        return outcome.results

    def await_outcomes(self, count: int) -> list[ObjectsOutcome]:
        """Poll until ``count`` batches have ended."""
        ended: list[ObjectsOutcome] = []
        while len(ended) < count:
            more = self.objects.poll(WAIT_S)
            assert more, f"{count - len(ended)} batches never ended"
            ended += more
        assert len(ended) == count
        return ended

    def put(self, number: int, body: bytes) -> Result:
        """Put one object."""
        (result,) = self.end(ObjectOp.PUT, RemoteObject(self.name(number), memoryview(body)))
        return result

    def get(self, number: int, byte_count: int) -> tuple[Result, bytes]:
        """Get one object, with what its buffer then holds."""
        buffer = bytearray([UNTOUCHED]) * byte_count
        (result,) = self.end(ObjectOp.GET, RemoteObject(self.name(number), memoryview(buffer)))
        return result, bytes(buffer)

    def exists(self, *numbers: int) -> tuple[Result, ...]:
        """Ask whether objects are there."""
        return self.end(ObjectOp.EXISTS, *(RemoteObject(self.name(number)) for number in numbers))


class ObjectsConformance(ObjectsCase):
    """The suite."""

    def test_what_was_put_is_there_and_is_got(self) -> None:
        for number, byte_count in enumerate((1, 4096, 4097, (1 << 20) + 8192)):
            body = make_bytes(byte_count, number)
            assert self.put(number, body) is Result.OK
            assert self.get(number, byte_count) == (Result.OK, body)
        assert self.exists(3, 9, 0) == (Result.OK, Result.ABSENT, Result.OK)

    def test_what_is_not_there_is_absent_and_leaves_the_buffer(self) -> None:
        assert self.exists(1) == (Result.ABSENT,)
        assert self.get(1, 64) == (Result.ABSENT, bytes([UNTOUCHED]) * 64)

    def test_what_went_is_absent(self) -> None:
        self.put(1, make_bytes(64, 1))
        self.remove(self.name(1))
        assert self.exists(1) == (Result.ABSENT,)
        assert self.get(1, 64)[0] is Result.ABSENT

    def test_the_first_write_wins(self) -> None:
        first, second = make_bytes(4096, 1), make_bytes(4096, 2)
        assert self.put(1, first) is Result.OK
        assert self.put(1, second) is Result.OK
        assert self.get(1, 4096) == (Result.OK, first)

    def test_a_replacement_is_written_whatever_there_is(self) -> None:
        body = make_bytes(4096, 1)
        for number, wrong in enumerate((None, make_bytes(4096, 2), body[: self.least_bytes])):
            if wrong is not None:
                self.write(self.name(number), wrong)
            asked = RemoteObject(self.name(number), memoryview(body))
            assert self.end(ObjectOp.REPLACE, asked) == (Result.OK,)
            assert self.get(number, 4096) == (Result.OK, body)
        assert self.objects.is_sound and self.objects.pause_s == 0.0

    def test_what_has_another_length_is_bad_and_the_next_put_replaces_it(self) -> None:
        body = make_bytes(4096, 1)
        for wrong in (body[: self.least_bytes], body[:-1], body + b"x", make_bytes(1 << 20, 2)):
            self.write(self.name(1), wrong)
            assert self.get(1, 4096) == (Result.BAD, bytes([UNTOUCHED]) * 4096)
            assert self.put(1, body) is Result.OK
            assert self.get(1, 4096) == (Result.OK, body)

    def test_a_batch_answers_each_object_in_its_place(self) -> None:
        bodies = [make_bytes(4096, number) for number in range(100)]
        there = [number for number in range(100) if number % 3]
        puts = [RemoteObject(self.name(number), memoryview(bodies[number])) for number in there]
        assert set(self.end(ObjectOp.PUT, *puts)) == {Result.OK}
        expected = tuple(Result.OK if number % 3 else Result.ABSENT for number in range(100))
        assert self.exists(*range(100)) == expected
        memory = memoryview(bytearray(100 * 4096))
        views = [memory[number * 4096 : (number + 1) * 4096] for number in range(100)]
        gets = [RemoteObject(self.name(number), views[number]) for number in range(100)]
        assert self.end(ObjectOp.GET, *gets) == expected
        assert [bytes(view) for view in views] == [
            body if number % 3 else bytes(4096) for number, body in enumerate(bodies)
        ]

    def test_many_batches_under_way_each_end_once(self) -> None:
        tickets = {
            self.objects.submit(ObjectOp.PUT, [RemoteObject(self.name(at), memoryview(make_bytes(4096, at)))]): at
            for at in range(40)
        }
        assert len(tickets) == 40, "a ticket was given twice"
        ended = self.await_outcomes(40)
        assert {outcome.ticket for outcome in ended} == set(tickets)
        assert {outcome.results for outcome in ended} == {(Result.OK,)}
        assert self.objects.poll(0.0) == []
        assert set(self.exists(*range(40))) == {Result.OK}

    def test_poll_returns_at_once_when_nothing_is_under_way(self) -> None:
        # Were it to wait, the test run would: an hour is far beyond its limit.
        assert self.objects.poll(3600.0) == []
        self.put(1, b"x")
        assert self.objects.poll(3600.0) == []

    def test_memory_can_be_released_after_the_outcome(self) -> None:
        for number in range(10):
            mapping = mmap.mmap(-1, 8192)
            with memoryview(mapping) as memory, memory[:4096] as one, memory[4096:] as other:
                body = make_bytes(4096, number)
                one[:] = body
                assert self.end(ObjectOp.PUT, RemoteObject(self.name(number), one)) == (Result.OK,)
                assert self.end(ObjectOp.GET, RemoteObject(self.name(number), other)) == (Result.OK,)
                assert other == body
            mapping.close()  # BufferError while any view of it is left

    def test_close_lets_go_of_what_is_under_way_and_may_be_called_again(self) -> None:
        body = make_bytes(1 << 20, 1)
        self.put(1, body)
        mapping = mmap.mmap(-1, 64 << 20)
        memory = memoryview(mapping)
        views = [memory[at << 20 : (at + 1) << 20] for at in range(64)]
        self.objects.submit(ObjectOp.GET, [RemoteObject(self.name(1), view) for view in views])
        self.objects.close()
        self.objects.close()
        for view in (*views, memory):
            view.release()
        mapping.close()  # BufferError, or worse, while anything has hold of it

    def test_every_part_of_a_block_in_every_namespace_has_a_name_of_its_own(self) -> None:
        keys = [BlockKey(b"\x01" * 34), BlockKey(b"\x01" * 33 + b"\x02")]
        spaces = [Namespace(bytes([number]) * 32, epoch) for number in (0, 1) for epoch in (0, 7)]
        parts = [(0, 1), (0, 2), (1, 2)]
        names = [object_name(space, key, *part) for space in spaces for key in keys for part in parts]
        assert len(set(names)) == len(names)
        assert names[0] == f"kvdisk1/{'00' * 32}/0/01/{'01' * 34}/r0of1"
