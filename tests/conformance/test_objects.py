# SPDX-License-Identifier: Apache-2.0
"""The suite of ``Objects`` over the reference and over a real S3 server, and what that server does
when it fails."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import obstore
import psutil
import pytest
from obstore.store import from_url
from support import objects_conformance
from support.memory_objects import MemoryBucket, MemoryObjects
from support.mooncake_store import MooncakeStore
from support.objects_conformance import UNTOUCHED, ObjectsCase, ObjectsConformance, make_bytes
from support.s3_server import S3Server
from support.waits import WAIT_S, until

from kvdisk.errors import ConfigError
from kvdisk.remote.base import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    Health,
    ObjectOp,
    Objects,
    ObjectsOutcome,
    RemoteObject,
    Result,
)
from kvdisk.remote.client import MOST_OBJECTS, BucketObjects, seal_key
from kvdisk.remote.coding import CODEC_TYPES, Codec, make_codec
from kvdisk.remote.mooncake import PACKAGE, ROOM_BYTES, ROOMS, MooncakeBucket
from kvdisk.remote.obstore_bucket import ObstoreBucket
from kvdisk.remote.planes import PlanesCodec

URL = "s3://kvdisk-tests/some/prefix"
ROOT = Path(__file__).resolve().parents[2]
PATIENT_S = 30.0
"""A deadline that a server that works never misses, however busy the machine is."""


def shrinking(byte_count: int, seed: int) -> bytes:
    """Return what every kind of codec makes shorter: numbers near 0, a byte each and each eight
    times, which depend on ``seed`` alone."""
    numbers = np.random.default_rng(seed).normal(0, 4, -(-byte_count // 8)).astype(np.int8)
    return numbers.repeat(8)[:byte_count].tobytes()


class TestMemory(ObjectsConformance):
    def make_objects(self) -> Objects:
        self.contents: dict[str, bytes] = {}
        return MemoryObjects(self.contents)

    def write(self, name: str, body: bytes) -> None:
        self.contents[name] = body

    def remove(self, name: str) -> None:
        del self.contents[name]


class BucketCase(ObjectsCase):
    """Tests of the real client with a bucket in memory: what needs no server."""

    codec: Codec | None = None

    def make_objects(self) -> Objects:
        self.contents: dict[str, bytes] = getattr(self, "contents", {})
        return BucketObjects(MemoryBucket(self.contents), deadline_s=PATIENT_S, codec=self.codec)

    def write(self, name: str, body: bytes) -> None:
        self.contents[name] = body

    def remove(self, name: str) -> None:
        del self.contents[name]

    def read(self, name: str) -> bytes:
        if name not in self.contents:
            raise FileNotFoundError(name)
        return self.contents[name]


class TestBucket(BucketCase, ObjectsConformance):
    pass


class S3Case(ObjectsCase):
    """Tests with the server."""

    server: S3Server
    key: bytes | None = None
    codec: Codec | None = None
    deadline_s = PATIENT_S

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _server(cls, s3_server) -> None:
        cls.server = s3_server
        cls.bucket = from_url(URL, config=s3_server.options, client_options={"allow_http": True})

    def make_objects(self) -> Objects:
        self.clock_s = 0.0
        return self.open(self.server.options)

    def open(self, options: dict[str, str]) -> BucketObjects:
        bucket = ObstoreBucket(URL, options, deadline_s=self.deadline_s)
        clock = lambda: self.clock_s  # noqa: E731
        return BucketObjects(bucket, deadline_s=self.deadline_s, key=self.key, codec=self.codec, clock=clock)

    def write(self, name: str, body: bytes) -> None:
        obstore.put(self.bucket, name, body)

    def remove(self, name: str) -> None:
        obstore.delete(self.bucket, name)

    def read(self, name: str) -> bytes:
        return bytes(obstore.get(self.bucket, name).bytes())


class TestS3(S3Case, ObjectsConformance):
    pass


class MooncakeCase(ObjectsCase):
    """Tests with a master and a node."""

    store: MooncakeStore
    key: bytes | None = None
    codec: Codec | None = None
    deadline_s = PATIENT_S
    least_bytes = 1

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _store(cls, mooncake_store) -> None:
        cls.store = mooncake_store

    def make_objects(self) -> Objects:
        self.clock_s = 0.0
        return self.open(self.store.url)

    def open(self, url: str) -> BucketObjects:
        bucket = MooncakeBucket(url, {}, deadline_s=self.deadline_s)
        clock = lambda: self.clock_s  # noqa: E731
        return BucketObjects(bucket, deadline_s=self.deadline_s, key=self.key, codec=self.codec, clock=clock)

    def write(self, name: str, body: bytes) -> None:
        self.store.write(name, body)

    def remove(self, name: str) -> None:
        self.store.remove(name)

    def read(self, name: str) -> bytes:
        return self.store.read(name)


class TestMooncake(MooncakeCase, ObjectsConformance):
    pass


class SealedCase(ObjectsCase):
    """Tests of a store that seals."""

    key = b"k" * 32
    read: Callable[[str], bytes]
    """Returns what an object holds."""

    def test_what_somebody_without_the_key_wrote_is_bad(self) -> None:
        body = make_bytes(4096, 1)
        assert self.put(1, body) is Result.OK
        sealed = self.read(self.name(1))
        assert len(sealed) == len(body) + 32
        forged = [bytes([sealed[0] ^ 1]) + sealed[1:], sealed[:-1] + bytes([sealed[-1] ^ 1]), os.urandom(len(sealed))]
        for wrong in forged:
            self.write(self.name(1), wrong)
            assert self.get(1, 4096)[0] is Result.BAD
        self.write(self.name(2), sealed)  # the bytes of one object under the name of another
        assert self.get(2, 4096)[0] is Result.BAD
        self.write(self.name(1), sealed)
        assert self.get(1, 4096) == (Result.OK, body)


class TestS3Sealed(SealedCase, TestS3):
    pass


class TestMooncakeSealed(SealedCase, TestMooncake):
    pass


class CodedCase(ObjectsCase):
    """Tests of a store that codes, beside one that does not. The suite's own bodies shrink here,
    unless they are a byte or two."""

    codec: Codec | None
    read: Callable[[str], bytes]
    """Returns what an object holds."""
    seal_bytes = 0

    @pytest.fixture(autouse=True)
    def _like_kv(self, monkeypatch) -> None:
        assert self.codec is not None
        self.suffix = self.codec.suffix
        monkeypatch.setattr(objects_conformance, "make_bytes", shrinking)

    def remove(self, name: str) -> None:
        for each in filter(self.is_there, (name + self.suffix, name)):
            super().remove(each)

    def is_there(self, name: str) -> bool:
        with suppress(FileNotFoundError):
            return bool(self.read(name))
        return False

    def test_what_has_another_length_is_bad_and_the_next_put_replaces_it(self) -> None:
        """It leaves one alone that engines without the codec look for: who finds it bad has it
        written over."""
        body = shrinking(4096, 1)
        for wrong in (body[: self.least_bytes], body[:-1], body + b"x", shrinking(1 << 20, 2)):
            self.write(self.name(1), wrong)
            assert self.get(1, 4096) == (Result.BAD, bytes([UNTOUCHED]) * 4096)
            asked = RemoteObject(self.name(1), memoryview(body))
            assert self.end(ObjectOp.REPLACE, asked) == (Result.OK,)
            assert self.get(1, 4096) == (Result.OK, body)
            self.remove(self.name(1))

    def test_what_shrinks_is_shorter_there_and_has_a_name_of_its_own(self) -> None:
        body = shrinking(1 << 16, 1)
        (ended,) = self.outcomes(ObjectOp.PUT, RemoteObject(self.name(1), memoryview(body), 2))
        there = self.read(self.name(1) + self.suffix)
        assert len(there) < 0.9 * len(body) and ended.stored_bytes == len(there)
        assert not self.is_there(self.name(1))
        buffer = bytearray(len(body))
        (ended,) = self.outcomes(ObjectOp.GET, RemoteObject(self.name(1), memoryview(buffer)))
        assert (ended.stored_bytes, buffer) == (len(there), body)

    def test_what_does_not_shrink_is_put_as_it_is(self) -> None:
        body = make_bytes(1 << 16, 1)
        (ended,) = self.outcomes(ObjectOp.PUT, RemoteObject(self.name(1), memoryview(body), 2))
        assert ended.stored_bytes == len(self.read(self.name(1))) == len(body) + self.seal_bytes
        assert not self.is_there(self.name(1) + self.suffix)
        assert self.get(1, len(body)) == (Result.OK, body)

    def test_an_object_as_it_is_is_found_and_not_put_again(self) -> None:
        body = shrinking(1 << 16, 1)
        plain = self.plain()
        try:
            plain.submit(ObjectOp.PUT, [RemoteObject(self.name(1), memoryview(body))])
            assert plain.poll(WAIT_S)[0].results == (Result.OK,)
            assert self.exists(1) == (Result.OK,)
            assert self.get(1, len(body)) == (Result.OK, body)
            (ended,) = self.outcomes(ObjectOp.PUT, RemoteObject(self.name(1), memoryview(body)))
            assert (ended.results, ended.stored_bytes) == ((Result.OK,), 0)
            assert not self.is_there(self.name(1) + self.suffix)
        finally:
            plain.close()

    def test_who_does_not_code_takes_no_coded_object(self) -> None:
        body = shrinking(1 << 16, 1)
        self.put(1, body)
        plain = self.plain()
        try:
            buffer = bytearray([UNTOUCHED]) * len(body)
            for op in (ObjectOp.EXISTS, ObjectOp.GET):
                plain.submit(op, [RemoteObject(self.name(1), memoryview(buffer))])
                assert plain.poll(WAIT_S)[0].results == (Result.ABSENT,)
            assert set(buffer) == {UNTOUCHED}
        finally:
            plain.close()

    def test_each_kind_under_the_name_of_the_other_is_bad(self) -> None:
        body = shrinking(1 << 16, 1)
        self.put(1, body)
        coded = self.read(self.name(1) + self.suffix)
        self.write(self.name(2), coded)
        self.write(self.name(3) + self.suffix, body)
        for number in (2, 3):
            assert self.get(number, len(body)) == (Result.BAD, bytes([UNTOUCHED]) * len(body))

    def test_a_bad_coded_object_is_written_over_whether_or_not_its_block_shrinks(self) -> None:
        for number, body in enumerate((shrinking(1 << 16, 1), make_bytes(1 << 16, 1))):
            for wrong in (b"x", body, bytes(1 << 20)):
                self.write(self.name(number) + self.suffix, wrong)
                assert self.get(number, len(body)) == (Result.BAD, bytes([UNTOUCHED]) * len(body))
                assert self.end(ObjectOp.REPLACE, RemoteObject(self.name(number), memoryview(body))) == (Result.OK,)
                assert self.get(number, len(body)) == (Result.OK, body)

    def test_what_is_not_what_was_sealed_is_not_put(self) -> None:
        asked = []
        body = shrinking(4096, 1)
        for op in (ObjectOp.PUT, ObjectOp.REPLACE):
            mine = RemoteObject(self.name(1), memoryview(body), 2, lambda seen: asked.append(bytes(seen)))
            assert self.end(op, mine) == (Result.BAD,)
            assert self.exists(1) == (Result.ABSENT,)
        assert asked == [body, body]

    def outcomes(self, op: ObjectOp, *batch: RemoteObject) -> list[ObjectsOutcome]:
        self.objects.submit(op, batch)
        return self.await_outcomes(1)

    def plain(self) -> Objects:
        """Open the same store for somebody who does not code."""
        self.codec = None
        return self.make_objects()


class TestCoded(CodedCase, BucketCase, ObjectsConformance):
    """Each codec that there is."""

    @pytest.fixture(autouse=True, scope="class", params=CODEC_TYPES)
    @classmethod
    def _each(cls, request) -> None:
        cls.codec = make_codec(request.param)


class TestS3Coded(CodedCase, TestS3):
    codec = PlanesCodec()


class TestMooncakeCoded(CodedCase, TestMooncake):
    codec = PlanesCodec()


class TestS3CodedSealed(CodedCase, S3Case):
    codec = PlanesCodec()
    key = b"k" * 32
    seal_bytes = 32

    def test_what_somebody_without_the_key_coded_is_bad(self) -> None:
        body = shrinking(4096, 1)
        self.put(1, body)
        there = self.read(self.name(1) + self.suffix)
        for wrong in (PlanesCodec().encode(np.frombuffer(body, np.uint8)), there[:-1] + bytes([there[-1] ^ 1])):
            self.write(self.name(1) + self.suffix, wrong)
            assert self.get(1, 4096)[0] is Result.BAD
        self.write(self.name(2) + self.suffix, there)  # the bytes of one object under the name of another
        assert self.get(2, 4096)[0] is Result.BAD


class TestS3Failures(S3Case):
    """One server, which hangs, dies and comes back empty. Results come as values within the
    deadline of a batch; the pauses are those of a clock of the test's own."""

    deadline_s = 1.0

    def until_ok(self, op: ObjectOp, number: int, buffer: bytearray) -> None:
        """Ask again, a pause later each time, until the server has answered in time."""
        while self.end(op, RemoteObject(self.name(number), memoryview(buffer))) != (Result.OK,):
            self.clock_s += LONGEST_PAUSE_S

    @pytest.fixture
    def body(self) -> bytes:
        """What the object 1 holds."""
        body = make_bytes(1 << 20, 1)
        self.until_ok(ObjectOp.PUT, 1, bytearray(body))
        return body

    def test_a_server_that_hangs_is_late_then_left_alone_then_used(self, body) -> None:
        buffers = [bytearray(len(body)) for _ in range(16)]
        self.server.hold()
        try:
            asked = [RemoteObject(self.name(1), memoryview(buffer)) for buffer in buffers]
            assert self.end(ObjectOp.GET, *asked) == (Result.LATE,) * 16
            assert not self.objects.answers and not self.objects.is_sound
            assert self.objects.pause_s == FIRST_PAUSE_S
            assert self.exists(*range(100)) == (Result.REFUSED,) * 100
            assert self.put(2, body) is Result.LATE, "puts have a pause of their own"
            assert self.put(2, body) is Result.REFUSED
        finally:
            self.server.resume()
        self.clock_s += FIRST_PAUSE_S
        assert self.objects.answers and not self.objects.is_sound and self.objects.pause_s == 0.0
        buffer = bytearray(len(body))
        self.until_ok(ObjectOp.GET, 1, buffer)
        assert buffer == body and self.objects.is_sound
        assert not any(map(any, buffers)), "what was late came after all"

    def test_a_server_that_is_killed_and_comes_back_empty(self, body) -> None:
        self.server.kill(wipe=True)
        assert self.get(1, len(body))[0] in {Result.FAILED, Result.LATE}
        assert self.exists(1) == (Result.REFUSED,)
        self.clock_s += FIRST_PAUSE_S
        assert self.exists(1)[0] in {Result.FAILED, Result.LATE}, "the trial after the pause"
        self.clock_s += FIRST_PAUSE_S
        assert self.exists(1) == (Result.REFUSED,), "the second pause is longer"
        self.server.start()
        self.until_ok(ObjectOp.PUT, 2, bytearray(body))
        self.until_ok(ObjectOp.GET, 2, bytearray(len(body)))
        self.objects.close()
        self.deadline_s = PATIENT_S
        self.objects = self.open(self.server.options)
        assert self.get(1, len(body))[0] is Result.ABSENT

    def test_wrong_credentials_fail(self, caplog) -> None:
        stranger = self.open(self.server.options | {"aws_secret_access_key": "wrong"})
        self.objects, mine = stranger, self.objects
        try:
            assert self.get(1, 4096)[0] is Result.FAILED
            assert self.put(1, b"x") is Result.FAILED
        finally:
            self.objects = mine
            stranger.close()
        assert "PermissionDeniedError" in caplog.text
        assert URL in caplog.text
        assert "secret" not in caplog.text

    def test_nobody_at_the_address(self) -> None:
        nobody = self.open(self.server.options | {"aws_endpoint": "http://127.0.0.1:9"})
        self.objects, mine = nobody, self.objects
        try:
            assert self.get(1, 4096)[0] in {Result.FAILED, Result.LATE}
        finally:
            self.objects = mine
            nobody.close()

    def test_too_many_objects_are_refused(self) -> None:
        name = self.name(1)
        assert set(self.end(ObjectOp.EXISTS, *[RemoteObject(name)] * (MOST_OBJECTS + 1))) == {Result.REFUSED}
        assert self.objects.answers, "that says nothing of the server"


class TestMooncakeFailures(MooncakeCase):
    """A master and a node that hang, die and come back empty."""

    deadline_s = 1.0

    @pytest.fixture(autouse=True)
    def _patient_client(self, monkeypatch) -> None:
        """Its calls wait for a node that hangs as long as it does, as they do with RDMA."""
        monkeypatch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", "3600")
        self.objects.close()
        self.objects = self.make_objects()

    def until(self, wanted: Result, op: ObjectOp, number: int, buffer: bytearray) -> None:
        """Ask again, a pause later each time, until that is the result."""
        end_s = time.monotonic() + WAIT_S
        while self.end(op, RemoteObject(self.name(number), memoryview(buffer))) != (wanted,):
            assert time.monotonic() < end_s
            self.clock_s += LONGEST_PAUSE_S

    @pytest.fixture
    def body(self) -> bytes:
        """What the object 1 holds."""
        body = make_bytes(1 << 20, 1)
        self.until(Result.OK, ObjectOp.PUT, 1, bytearray(body))
        return body

    def test_a_node_that_hangs_is_late_then_left_alone_then_refused_then_used(self, body) -> None:
        buffers = [bytearray(len(body)) for _ in range(16)]
        asked = [RemoteObject(self.name(1), memoryview(buffer)) for buffer in buffers]
        self.store.hold_node()
        try:
            for _ in range(ROOMS):
                assert self.end(ObjectOp.GET, *asked) == (Result.LATE,) * 16
                assert not self.objects.answers
                assert self.exists(1) == (Result.REFUSED,)
                self.clock_s += LONGEST_PAUSE_S
            assert self.objects.answers
            assert self.end(ObjectOp.GET, *asked) == (Result.REFUSED,) * 16, "each call has its room"
            assert not self.objects.answers
            assert self.put(2, body) is Result.REFUSED
        finally:
            self.store.resume_node()
        buffer = bytearray(len(body))
        self.until(Result.OK, ObjectOp.GET, 1, buffer)
        assert buffer == body
        assert not any(map(any, buffers)), "what was late came after all"

    @pytest.mark.torture
    def test_a_node_that_is_killed_and_comes_back_empty(self, body) -> None:
        self.store.kill_node()
        try:
            assert self.get(1, len(body))[0] in {Result.FAILED, Result.LATE}
            assert self.exists(1) == (Result.REFUSED,)
        finally:
            self.store.start_node()
        self.until(Result.ABSENT, ObjectOp.GET, 1, bytearray(len(body)))
        self.until(Result.OK, ObjectOp.PUT, 1, bytearray(body))
        buffer = bytearray(len(body))
        self.until(Result.OK, ObjectOp.GET, 1, buffer)
        assert buffer == body

    def test_a_master_that_is_killed_and_comes_back_empty(self, body) -> None:
        self.store.kill_master()
        mine, self.objects = self.objects, self.open(self.store.url)  # which finds no master at its start
        try:
            assert self.exists(1) == (Result.FAILED,)
        finally:
            self.store.start_master()
            late, self.objects = self.objects, mine
        self.until(Result.ABSENT, ObjectOp.EXISTS, 1, bytearray())
        self.until(Result.OK, ObjectOp.PUT, 1, bytearray(body))
        mine.close()
        self.objects = late
        self.until(Result.OK, ObjectOp.GET, 1, bytearray(len(body)))

    def test_what_there_is_no_room_for_fails_and_the_rest_of_the_batch_is_there(self, tmp_path) -> None:
        small = MooncakeStore(tmp_path, node_bytes=32 << 20)
        small.start()
        self.objects.close()
        self.deadline_s = PATIENT_S
        self.objects = self.open(small.url)
        try:
            bodies = [make_bytes(1 << 20, 1), bytes(33 << 20)]
            self.until(Result.OK, ObjectOp.PUT, 0, bytearray(bodies[0]))
            self.until(Result.OK, ObjectOp.GET, 0, bytearray(len(bodies[0])))  # it then stays for a while
            asked = [RemoteObject(self.name(at), memoryview(body)) for at, body in enumerate(bodies)]
            assert self.end(ObjectOp.PUT, *asked) == (Result.OK, Result.FAILED)
            buffer = bytearray(len(bodies[0]))
            self.until(Result.OK, ObjectOp.GET, 0, buffer)
            assert buffer == bodies[0]
        finally:
            small.kill()

    def test_where_its_process_is_killed_the_batch_fails_and_another_is_started(self, body, caplog) -> None:
        self.objects.close()
        self.deadline_s = PATIENT_S  # on a busy machine its end may be seen late
        self.objects = self.make_objects()
        self.until(Result.OK, ObjectOp.GET, 1, bytearray(len(body)))
        (child,) = (each for each in psutil.Process().children() if "mooncake_process" in " ".join(each.cmdline()))
        self.store.hold_node()
        try:
            buffer = memoryview(bytearray(len(body)))
            ticket = self.objects.submit(ObjectOp.GET, [RemoteObject(self.name(1), buffer)])
            until(lambda: self.objects._bucket._running, "the batch to be at the process")
            child.kill()
            assert self.await_outcomes(1) == [ObjectsOutcome(ticket, (Result.FAILED,), 0)]
        finally:
            self.store.resume_node()
        self.until(Result.OK, ObjectOp.GET, 1, bytearray(len(body)))
        assert not [record.getMessage() for record in caplog.records if record.name == "asyncio"]

    def test_an_object_that_is_longer_than_a_room_has_one(self) -> None:
        body = make_bytes(ROOM_BYTES + 5, 1)
        self.until(Result.OK, ObjectOp.PUT, 1, bytearray(body))
        buffer = bytearray(len(body))
        self.until(Result.OK, ObjectOp.GET, 1, buffer)
        assert buffer == body

    @pytest.mark.torture
    def test_a_process_that_never_closes_its_store_ends_well_while_a_node_hangs(self, body) -> None:
        program = f"""
import sys
from kvdisk.remote.base import ObjectOp, RemoteObject
from kvdisk.remote.client import BucketObjects
from kvdisk.remote.mooncake import MooncakeBucket
objects = BucketObjects(MooncakeBucket({self.store.url!r}, {{}}, deadline_s=5.0), deadline_s=5.0)
asked = [RemoteObject({self.name(1)!r}, memoryview(bytearray({len(body)})))]
for _ in range(2):
    objects.submit(ObjectOp.GET, asked)
    print(objects.poll(60.0)[0].results[0].name, flush=True)
    sys.stdin.read()
"""
        command = [sys.executable, "-c", program]
        with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline() == b"OK\n"
            self.store.hold_node()
            try:
                said, _ = process.communicate(timeout=WAIT_S)
            finally:
                self.store.resume_node()
        assert (process.returncode, said) == (0, b"LATE\n")


@pytest.mark.torture
class TestS3Torture(S3Case):
    """A server that is stopped, killed and started at random while four kinds of batches are under
    way."""

    deadline_s = 1.0

    def test_whatever_happens_each_batch_ends_and_nothing_wrong_is_got(self) -> None:
        seed = int(os.environ.get("KVDISK_TORTURE_SEED", "0"))
        choose = random.Random(seed)
        bodies = {number: make_bytes(choose.choice((100, 1 << 16, 1 << 20)), number) for number in range(60)}
        seen: Counter[tuple[ObjectOp, Result]] = Counter()
        for _ in range(80):
            self.clock_s += choose.choice((0.0, FIRST_PAUSE_S, LONGEST_PAUSE_S))
            act = choose.choice(("nothing", "nothing", "hold", "kill"))
            if act == "hold":
                self.server.hold()
            elif act == "kill":
                self.server.kill(wipe=choose.random() < 0.5)
            buffers: dict[int, list[tuple[int, bytearray]]] = {}
            ops: dict[int, ObjectOp] = {}
            for op in choose.choices(list(ObjectOp), k=4):
                numbers = choose.sample(sorted(bodies), choose.randint(1, 30))
                writes = op in {ObjectOp.PUT, ObjectOp.REPLACE}
                filled = [(n, bytearray(bodies[n] if writes else len(bodies[n]))) for n in numbers]
                asked = [RemoteObject(self.name(n), memoryview(buffer)) for n, buffer in filled]
                ticket = self.objects.submit(op, asked)
                ops[ticket], buffers[ticket] = op, filled
            for outcome in self.await_outcomes(4):
                op = ops.pop(outcome.ticket)
                for result, (number, buffer) in zip(outcome.results, buffers[outcome.ticket], strict=True):
                    seen[op, result] += 1
                    if op is ObjectOp.GET:
                        assert result is not Result.BAD
                        assert (buffer == bodies[number]) if result is Result.OK else not any(buffer)
            if act == "hold":
                self.server.resume()
            elif act == "kill":
                self.server.start()
        for op in ObjectOp:
            assert {Result.OK, Result.REFUSED} <= {result for each, result in seen if each is op}, (seed, seen)
        assert {Result.ABSENT, Result.LATE} <= {result for _, result in seen}, (seed, seen)

    def test_a_full_server_fails_puts_and_serves_the_rest(self, tmp_path) -> None:
        self.deadline_s = PATIENT_S
        small = S3Server(tmp_path / "small", most_volumes=8)
        small.start()
        self.objects.close()
        self.objects = self.open(small.options)
        try:
            results: list[Result] = []
            while Result.FAILED not in results[:-9]:  # coded objects are shorter: it has room for more of them
                assert len(results) < 1000, "the server takes more than it has room for"
                results.append(self.put(len(results), make_bytes(1 << 20, len(results))))
            failed = results.index(Result.FAILED)
            assert failed > 0
            assert set(results[failed:]) <= {Result.FAILED, Result.REFUSED, Result.OK}
            assert self.get(0, 1 << 20) == (Result.OK, make_bytes(1 << 20, 0))
        finally:
            small.kill()


@pytest.mark.torture
class TestS3CodedTorture(TestS3Torture):
    """The same with objects that are coded."""

    codec = PlanesCodec()

    @pytest.fixture(autouse=True)
    def _like_kv(self, monkeypatch) -> None:
        assert self.codec is not None
        self.suffix = self.codec.suffix
        monkeypatch.setitem(globals(), "make_bytes", shrinking)


@pytest.mark.parametrize(
    ("url", "options", "said"),
    [
        ("s3://", {}, "recognise"),
        ("s3://bucket/prefix", {"aws_no_such_thing": "1"}, "aws_no_such_thing"),
    ],
)
def test_what_cannot_be_opened_is_one_sentence(url, options, said):
    with pytest.raises(ConfigError, match=said) as raised:
        ObstoreBucket(url, options, deadline_s=1.0)
    assert str(raised.value).startswith(f"remote {url!r} cannot be used: ")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "options", "said"),
    [
        ("mooncake://host", {}, "must be the address of Mooncake's master"),
        ("mooncake://host:1/prefix", {}, "must be the address of Mooncake's master"),
        ("mooncake://host:many", {}, "must be the address of Mooncake's master"),
        ("mooncake://host:1", {"aws_region": "x"}, "and not 'aws_region'"),
        ("mooncake://host:1", {"global_segment_size": "4GiB"}, "global_segment_size is a number"),
    ],
)
def test_what_mooncake_cannot_be_opened_with_is_one_sentence(url, options, said):
    with pytest.raises(ConfigError, match=said):
        MooncakeBucket(url, options, deadline_s=1.0)


@pytest.mark.parametrize(
    ("store", "said"),
    [
        ("", f"needs {PACKAGE} (pip install {PACKAGE})."),
        (
            "raise ImportError('libibverbs.so.1: cannot open shared object file: No such file or directory')",
            "needs libibverbs.so.1, which Mooncake's client loads (Debian's and Ubuntu's package libibverbs1).",
        ),
        (
            "raise ImportError('/lib/x86_64-linux-gnu/libibverbs.so.1: file too short')",
            "needs libibverbs.so.1, which Mooncake's client loads (Debian's and Ubuntu's package libibverbs1).",
        ),
        ("raise ImportError('was built for another machine')", "Mooncake's client was built for another machine."),
        ("import os; os.kill(os.getpid(), 4)", "Mooncake's client ended with SIGILL."),
    ],
)
def test_where_its_client_is_missing_one_sentence_says_what_to_install(tmp_path, monkeypatch, store, said):
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text("")
    if store:
        (tmp_path / "mooncake" / "store.py").write_text(store)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as raised:
        MooncakeBucket("mooncake://127.0.0.1:9", {}, deadline_s=1.0)
    assert str(raised.value).startswith("remote 'mooncake://127.0.0.1:9' ")
    assert str(raised.value).endswith(said)


def test_what_seals_is_a_file_of_32_bytes_or_more(tmp_path):
    path = tmp_path / "key"
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        seal_key(path)
    path.write_bytes(b"x" * 31)
    with pytest.raises(ConfigError, match="has 31 bytes, of 32 at least"):
        seal_key(path)
    keys = set()
    for secret in (b"x" * 32, b"x" * 33, b"y" * 5000):
        path.write_bytes(secret)
        keys.add(seal_key(path))
    assert {len(key) for key in keys} == {32} and len(keys) == 3


class Panic(BaseException):
    """As a client of another language raises."""


@pytest.mark.parametrize("error", [Panic("gone"), asyncio.CancelledError(), OSError("gone")])
def test_whatever_the_client_raises_the_batch_ends(error):
    closed = []

    class Failing:
        name = "failing"

        parallel = 2
        hint_life_s = 1.0

        async def exists(self, name):
            if name == "bad":
                raise error
            return False

        def close(self):
            closed.append(True)

    objects = BucketObjects(Failing(), deadline_s=60.0)
    ticket = objects.submit(ObjectOp.EXISTS, [RemoteObject("bad"), RemoteObject("good")])
    assert objects.poll(WAIT_S) == [ObjectsOutcome(ticket, (Result.FAILED, Result.ABSENT))]
    objects.close()
    assert closed == [True]


def test_a_missing_package_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"needs obstore \(pip install obstore\)"):
        ObstoreBucket("s3://bucket", {}, deadline_s=1.0)


def test_a_full_reference_refuses_puts_and_serves_the_rest():
    objects = MemoryObjects(most_bytes=10)
    for body in (b"12345678", b"123"):
        objects.submit(ObjectOp.PUT, [RemoteObject(str(len(body)), memoryview(body))])
    buffer = bytearray(8)
    objects.submit(ObjectOp.GET, [RemoteObject("8", memoryview(buffer))])
    assert [outcome.results for outcome in objects.poll()] == [(Result.OK,), (Result.FAILED,), (Result.OK,)]
    assert buffer == b"12345678"


def test_pauses_double_and_end_with_an_answer():
    now_s = [0.0]
    health = Health(lambda: now_s[0])
    assert health.begin(1) and health.begin(2)
    assert health.end(1, answered=False)
    assert not health.end(2, answered=False), "sent before the pause"
    pauses = []
    for ticket in range(3, 12):
        began_s = now_s[0]
        while not health.begin(ticket):
            now_s[0] += 0.5
        assert not health.begin(99), "one trial at a time"
        pauses.append(now_s[0] - began_s)
        assert health.end(ticket, answered=False)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert pauses[0] == FIRST_PAUSE_S and pauses[-1] == LONGEST_PAUSE_S
    now_s[0] += LONGEST_PAUSE_S
    assert health.begin(20)
    assert not health.end(20, answered=True)
    assert health.begin(21) and health.begin(22)


def test_a_process_that_never_closes_its_store_ends(s3_server):
    program = f"""
from kvdisk.remote.base import ObjectOp, RemoteObject
from kvdisk.remote.client import BucketObjects
from kvdisk.remote.obstore_bucket import ObstoreBucket
objects = BucketObjects(ObstoreBucket({URL!r}, {s3_server.options!r}, deadline_s=5.0), deadline_s=5.0)
objects.submit(ObjectOp.GET, [RemoteObject(str(at), memoryview(bytearray(1))) for at in range(100)])
print("ends")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, b"ends\n"), done.stderr.decode()
