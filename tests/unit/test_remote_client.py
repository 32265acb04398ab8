# SPDX-License-Identifier: Apache-2.0
"""When the client of a remote store leaves it alone, and where it codes."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest
from support.memory_objects import MemoryBucket
from support.waits import WAIT_S, until

from kvdisk.remote import coding, mooncake, mooncake_process
from kvdisk.remote.base import ObjectOp, RemoteObject, Result
from kvdisk.remote.client import BucketObjects
from kvdisk.remote.planes import SUFFIX, PlanesCodec


class Partial:
    """A bucket that fails where a name says so."""

    name = "partial"
    parallel = 64
    hint_life_s = 60.0

    def close(self):
        pass

    async def exists(self, name):
        return await self.size(name) is not None

    async def size(self, name):
        if name.startswith("bad"):
            raise OSError("gone")


@pytest.mark.parametrize(("good", "bad", "answers"), [(4, 0, True), (2, 2, True), (1, 3, False), (0, 4, False)])
def test_a_store_that_fails_most_of_a_batch_is_left_alone(good, bad, answers):
    objects = BucketObjects(Partial(), deadline_s=60.0)
    objects.submit(ObjectOp.EXISTS, [RemoteObject("good")] * good + [RemoteObject("bad")] * bad)
    assert objects.poll(WAIT_S)
    assert objects.answers is answers
    objects.close()


@pytest.mark.parametrize("op", [ObjectOp.PUT, ObjectOp.REPLACE])
def test_what_left_mooncake_while_it_was_written_was_not_written(op):
    async def ending(code: int, asked_op: ObjectOp) -> asyncio.Future:
        asked = mooncake._Asked(asked_op, "name", 1, len, asyncio.get_running_loop().create_future())
        mooncake._end(asked, code, memoryview(b"x"))
        return asked.future

    lost = asyncio.run(ending(mooncake_process.MISSING, op))
    assert isinstance(lost.exception(), mooncake.MooncakeError)
    assert asyncio.run(ending(0, op)).result() is None
    assert asyncio.run(ending(mooncake_process.MISSING, ObjectOp.GET)).result() is None


# -- coding ------------------------------------------------------------------------------------

SIZE, COUNT = 1 << 16, 12


class Watched(PlanesCodec):
    """Says on which threads it was at work, and how many at once; waits for ``goes_on``."""

    def __init__(self):
        super().__init__()
        self.threads, self.most, self._now = set(), 0, 0
        self._lock = threading.Lock()
        self.goes_on = threading.Event()
        self.goes_on.set()

    def _watch(self, work):
        with self._lock:
            self.threads.add(threading.current_thread().name)
            self._now += 1
            self.most = max(self.most, self._now)
        assert self.goes_on.wait(WAIT_S)
        try:
            return work()
        finally:
            with self._lock:
                self._now -= 1

    def encode(self, raw, element_bytes=1):
        return self._watch(lambda: PlanesCodec.encode(self, raw, element_bytes))

    def decode(self, coded, byte_count):
        return self._watch(lambda: PlanesCodec.decode(self, coded, byte_count))


@pytest.fixture
def codec():
    made = Watched()
    yield made
    made.goes_on.set()  # or Python would wait for its threads


@pytest.fixture
def bodies():
    choose = np.random.default_rng(1)
    return [choose.normal(0, 4, SIZE).astype(np.int8).tobytes() for _ in range(COUNT)]


def end(objects, op, buffers):
    objects.submit(op, [RemoteObject(str(at), memoryview(buffer)) for at, buffer in enumerate(buffers)])
    (outcome,) = objects.poll(WAIT_S)
    return outcome.results


def test_a_few_threads_code_and_the_clients_own_never(codec, bodies, monkeypatch):
    monkeypatch.setattr(coding, "THREADS", 2)
    monkeypatch.setattr(coding.os, "sched_getaffinity", lambda _: range(64))
    objects = BucketObjects(MemoryBucket(), deadline_s=WAIT_S, codec=codec)
    buffers = [bytearray(SIZE) for _ in bodies]
    for op, memory in ((ObjectOp.PUT, bodies), (ObjectOp.GET, buffers)):
        assert end(objects, op, memory) == (Result.OK,) * COUNT
    objects.close()
    assert buffers == bodies
    assert codec.most <= 2 and {name.rpartition("_")[0] for name in codec.threads} == {"kvdisk-codec"}


def test_what_is_held_for_coding_is_bounded(codec, bodies, monkeypatch):
    """No more is read than there is room for, whatever is asked for at once; and an object that
    takes more than all of it goes alone."""
    bucket = MemoryBucket()
    objects = BucketObjects(bucket, deadline_s=WAIT_S, codec=codec)
    assert end(objects, ObjectOp.PUT, bodies) == (Result.OK,) * COUNT
    for room, most in ((5 * SIZE, 2), (SIZE, 1)):
        monkeypatch.setattr(coding, "ROOM_BYTES", room)
        held = BucketObjects(Counting(bucket.contents), deadline_s=WAIT_S, codec=codec)
        codec.goes_on.clear()
        buffers = [bytearray(SIZE) for _ in bodies]
        held.submit(ObjectOp.GET, [RemoteObject(str(at), memoryview(each)) for at, each in enumerate(buffers)])
        until(lambda counted=held._bucket, most=most: counted.read == most, "as many reads as there is room for")
        time.sleep(0.05)
        assert held._bucket.read == most
        codec.goes_on.set()
        assert held.poll(WAIT_S)[0].results == (Result.OK,) * COUNT and buffers == bodies
        assert held._coding._left == room and not held._coding._waiting
        held.close()
    objects.close()


class Counting(MemoryBucket):
    """Counts what was read."""

    read = 0

    async def get(self, name, most_bytes, take):
        self.read += 1
        return await super().get(name, most_bytes, take)


@pytest.mark.parametrize("op", [ObjectOp.GET, ObjectOp.PUT])
def test_what_is_given_up_while_it_is_coded_is_left_alone(codec, bodies, op):
    bucket = MemoryBucket()
    with_time = BucketObjects(bucket, deadline_s=WAIT_S, codec=codec)
    assert end(with_time, ObjectOp.PUT, bodies) == (Result.OK,) * COUNT
    with_time.close()
    there = dict(bucket.contents)
    if op is ObjectOp.PUT:
        bucket.contents.clear()
    objects = BucketObjects(bucket, deadline_s=0.2, codec=codec)
    codec.goes_on.clear()
    memory = [bytearray(body if op is ObjectOp.PUT else SIZE) for body in bodies]
    assert end(objects, op, memory) == (Result.LATE,) * COUNT
    for buffer in memory:
        buffer[:] = bytes(SIZE)
    codec.goes_on.set()
    until(lambda: not codec._now, "the threads to end")
    time.sleep(0.05)
    assert not any(map(any, memory)) and bucket.contents == (there if op is ObjectOp.GET else {})
    assert objects._coding._left == coding.ROOM_BYTES and not objects._coding._waiting
    objects.close()


def test_a_client_that_is_closed_while_it_codes_ends(codec, bodies):
    objects = BucketObjects(MemoryBucket(), deadline_s=WAIT_S, codec=codec)
    codec.goes_on.clear()
    objects.submit(ObjectOp.PUT, [RemoteObject(str(at), memoryview(each)) for at, each in enumerate(bodies)])
    until(lambda: codec._now, "the threads to begin")
    objects.close()
    codec.goes_on.set()


def test_what_is_there_is_not_coded_again(codec, bodies):
    bucket = MemoryBucket()
    objects = BucketObjects(bucket, deadline_s=WAIT_S, codec=codec)
    assert end(objects, ObjectOp.PUT, bodies) == (Result.OK,) * COUNT
    assert set(bucket.contents) == {f"{at}{SUFFIX}" for at in range(COUNT)}
    codec.threads.clear()
    assert end(objects, ObjectOp.PUT, bodies) == (Result.OK,) * COUNT
    assert not codec.threads
    objects.close()
