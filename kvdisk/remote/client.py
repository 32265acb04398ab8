# SPDX-License-Identifier: Apache-2.0
"""``Objects`` over a store's own client: one thread runs all requests of all batches in an event
loop.

The network touches only memory of the client's own. That thread copies to and from a buffer between
two awaits. So a request that is given up holds no buffer of the caller's, and there is no late I/O
as there is with a drive.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from kvdisk.config import BUCKETS, REMOTES, Config
from kvdisk.errors import ConfigError, QuietLog, start_thread
from kvdisk.remote.base import (
    ANSWERS,
    Bucket,
    Health,
    ObjectOp,
    ObjectsOutcome,
    RemoteObject,
    Result,
    StoreBusy,
)
from kvdisk.remote.coding import Codec, Coding, make_codec
from kvdisk.remote.mooncake import MooncakeBucket
from kvdisk.remote.obstore_bucket import ObstoreBucket

logger = logging.getLogger("kvdisk.remote")

MOST_OBJECTS = 1 << 14
"""Objects under way at most, over all batches: a batch that would exceed it is refused."""
SEAL_BYTES = 32
LEAST_SECRET_BYTES = 32
MOST_CODED_SHARE = 0.9375
"""An object that coding does not make this much shorter is put as it is: reading it would take a
processor's time, and save next to none of the link's."""
_CLOSE_TIMEOUT_S = 5.0
_CLIENTS: Mapping[str, Callable[..., Bucket]] = {**dict.fromkeys(BUCKETS, ObstoreBucket), "mooncake": MooncakeBucket}
"""By the scheme of ``remote``, what makes a store's client of an address, its options and a
deadline."""
assert tuple(_CLIENTS) == REMOTES


def open_remote(config: Config) -> BucketObjects:
    """Return the remote store; nothing has been asked of it yet. Raises ConfigError."""
    key = None if config.remote_key_file is None else seal_key(config.remote_key_file)
    codec = None if config.remote_codec is None else make_codec(config.remote_codec)
    return BucketObjects(_open_bucket(config), deadline_s=config.remote_deadline_s, key=key, codec=codec)


def open_listed(config: Config) -> ObstoreBucket | None:
    """Return the remote store as a bucket, to list it; None where it is none. Raises
    ConfigError."""
    bucket = _open_bucket(config) if _scheme_of(config) in BUCKETS else None
    assert bucket is None or isinstance(bucket, ObstoreBucket)
    return bucket


def _open_bucket(config: Config) -> Bucket:
    """Return the store's client: the one place that gives a setting of the user's to it."""
    assert config.remote is not None
    return _CLIENTS[_scheme_of(config)](config.remote, dict(config.remote_options), deadline_s=config.remote_deadline_s)


def _scheme_of(config: Config) -> str:
    return (config.remote or "").partition("://")[0]


def seal_key(path: Path) -> bytes:
    """Return the 32-byte key that is derived from the secret in a file. Raises ConfigError."""
    try:
        from blake3 import blake3
    except ImportError as error:
        raise ConfigError("remote_key_file needs blake3 (pip install blake3).") from error
    try:
        secret = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"remote_key_file {str(path)!r} cannot be read: {error.strerror}.") from error
    if len(secret) < LEAST_SECRET_BYTES:
        raise ConfigError(f"remote_key_file {str(path)!r} has {len(secret)} bytes, of {LEAST_SECRET_BYTES} at least.")
    return blake3(secret, derive_key_context="kvdisk remote_key_file 1").digest()


class _Ending(NamedTuple):
    """What came of an object. ``said``: by a failure. ``stored_bytes``: those of the object, where
    it was written or read well."""

    result: Result
    said: str = ""
    stored_bytes: int = 0


_THERE = _Ending(Result.OK)
_ABSENT = _Ending(Result.ABSENT)


def _ending_of(task: asyncio.Task[_Ending]) -> _Ending:
    """Return what came of an object, also where the client's code panicked or cancelled itself."""
    if task.cancelled():
        return _Ending(Result.FAILED, "cancelled")
    error = task.exception()
    return task.result() if error is None else _Ending(Result.FAILED, f"{type(error).__name__}: {error}")


class _Ended(NamedTuple):
    """An ended batch. ``said``: what the first failure said, "" where nothing failed; None where
    the batch was not sent."""

    ticket: int
    results: tuple[Result, ...]
    said: str | None
    stored_bytes: int = 0


class BucketObjects:
    """See ``Objects`` and the module.

    ``deadline_s``: seconds after which a batch ends, whatever has answered. ``key``: 32 bytes; with
    it each object ends with a seal over its name and its bytes, which only those who have the key
    can make. Puts and reads pause separately: a store that is full can still be read.

    ``codec``: codes what is put, where that makes it shorter, and what is put over another; without
    it objects are put as they are. With it coded objects are looked for first, then those that are
    not; without it the latter alone.
    """

    def __init__(
        self,
        bucket: Bucket,
        *,
        deadline_s: float,
        key: bytes | None = None,
        codec: Codec | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bucket = bucket
        self._deadline_s = deadline_s
        self._key = key
        self._coding = None if codec is None else Coding(codec)
        self._log = QuietLog(clock, logger)
        self._reads, self._puts = Health(clock), Health(clock)
        self._ways: dict[ObjectOp, Callable[[RemoteObject], Coroutine[Any, Any, _Ending]]] = {
            ObjectOp.PUT: self._put,
            ObjectOp.REPLACE: partial(self._put, over=True),
            ObjectOp.GET: self._get,
            ObjectOp.EXISTS: self._exists,
        }
        self._last_ticket = 0
        self._under_way: dict[int, tuple[ObjectOp, int]] = {}
        """The operation and the number of objects of each batch under way, by ticket."""
        self._ended: SimpleQueue[_Ended] = SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(bucket.parallel)
        self._batches: set[asyncio.Task[None]] = set()
        """The batches under way: the loop itself keeps no reference to them."""
        self._thread = threading.Thread(target=self._run, name="kvdisk-remote", daemon=True)
        start_thread(self._thread)

    # -- the caller's thread -------------------------------------------------------------------

    @property
    def answers(self) -> bool:
        return self._reads.answers

    @property
    def is_sound(self) -> bool:
        return self._reads.is_sound

    @property
    def pause_s(self) -> float:
        return self._reads.pause_s

    @property
    def hint_life_s(self) -> float:
        return self._bucket.hint_life_s

    def submit(self, op: ObjectOp, batch: Sequence[RemoteObject]) -> int:
        assert batch, "an empty batch"
        assert not self._loop.is_closed(), "the store is closed"
        self._last_ticket = ticket = self._last_ticket + 1
        queued = sum(count for _, count in self._under_way.values())
        self._under_way[ticket] = op, len(batch)
        if queued + len(batch) <= MOST_OBJECTS and self._health(op).begin(ticket):
            self._loop.call_soon_threadsafe(self._start, ticket, op, tuple(batch))
        else:
            self._ended.put(_Ended(ticket, (Result.REFUSED,) * len(batch), None))
        return ticket

    def poll(self, timeout_s: float = 0.0) -> list[ObjectsOutcome]:
        outcomes: list[ObjectsOutcome] = []
        while self._under_way:
            try:
                ended = self._ended.get(timeout=0.0 if outcomes else max(0.0, timeout_s))
            except Empty:
                break
            op, _ = self._under_way.pop(ended.ticket)
            answered = 2 * sum(result in ANSWERS for result in ended.results) >= len(ended.results)
            if ended.said is not None and self._health(op).end(ended.ticket, answered=answered):
                said = ended.said or f"no answer in {self._deadline_s:g} s"
                self._log.warn(op.value, f"{self._bucket.name} is not used for a while, as a {op.value} failed: {said}")
            outcomes.append(ObjectsOutcome(ended.ticket, ended.results, ended.stored_bytes))
        return outcomes

    def close(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CLOSE_TIMEOUT_S)
            assert self._loop.is_closed(), "the client of the remote store blocked its thread"
            self._under_way.clear()

    def _health(self, op: ObjectOp) -> Health:
        return self._puts if op in {ObjectOp.PUT, ObjectOp.REPLACE} else self._reads

    # -- the client's thread -------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._bucket.close()
        if self._coding is not None:
            self._coding.close()
        self._loop.close()

    def _start(self, ticket: int, op: ObjectOp, batch: tuple[RemoteObject, ...]) -> None:
        task = self._loop.create_task(self._do_batch(ticket, op, batch))
        self._batches.add(task)
        task.add_done_callback(self._batches.discard)

    async def _do_batch(self, ticket: int, op: ObjectOp, batch: tuple[RemoteObject, ...]) -> None:
        tasks = [self._loop.create_task(self._do(op, asked)) for asked in batch]
        try:
            _, left = await asyncio.wait(tasks, timeout=self._deadline_s)
        finally:
            for task in tasks:
                task.cancel()  # it then goes no step further, and touches no buffer
        endings = [_Ending(Result.LATE) if task in left else _ending_of(task) for task in tasks]
        said = next((each.said for each in endings if each.result is Result.FAILED), "")
        stored = sum(each.stored_bytes for each in endings)
        self._ended.put(_Ended(ticket, tuple(each.result for each in endings), said, stored))

    async def _do(self, op: ObjectOp, asked: RemoteObject) -> _Ending:
        """Return what came of one object."""
        async with self._slots:
            try:
                return await self._ways[op](asked)
            except StoreBusy:
                return _Ending(Result.REFUSED)
            except Exception as error:  # whatever the client raises
                return _Ending(Result.FAILED, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")

    async def _exists(self, asked: RemoteObject) -> _Ending:
        names = [asked.name] if self._coding is None else [asked.name + self._coding.codec.suffix, asked.name]
        for name in names:
            if await self._bucket.exists(name):
                return _THERE
        return _ABSENT

    async def _get(self, asked: RemoteObject) -> _Ending:
        if self._coding is not None:
            coded = await self._get_coded(self._coding, asked)
            if coded is not _ABSENT:
                return coded
        stored_bytes = self._sealed_bytes(len(asked.buffer))
        found = await self._bucket.get(asked.name, stored_bytes, partial(self._take, asked))
        return _ABSENT if found is None else _Ending(found, "", stored_bytes if found is Result.OK else 0)

    def _take(self, asked: RemoteObject, found: Any) -> Result:
        """Copy an object, and only then check its seal: others may write to this memory, and what
        was checked first might not be what is copied."""
        if memoryview(found).nbytes != self._sealed_bytes(len(asked.buffer)):
            return Result.BAD
        body, seal = np.split(np.frombuffer(found, np.uint8), [len(asked.buffer)])
        np.copyto(np.frombuffer(asked.buffer, np.uint8), body)  # which lets other threads run
        if self._key and not hmac.compare_digest(seal.tobytes(), self._seal(asked)):
            return Result.BAD
        return Result.OK

    async def _get_coded(self, coding: Coding, asked: RemoteObject) -> _Ending:
        """Read the coded object, whose length is not known before, into memory of our own, and
        decode it."""
        name, byte_count = asked.name + coding.codec.suffix, len(asked.buffer)
        most_bytes = coding.codec.most_coded_bytes(byte_count)
        taken: list[RemoteObject] = []

        def take(found: Any) -> Result:
            length = memoryview(found).nbytes - self._sealed_bytes(0)
            if not 0 < length <= most_bytes:
                return Result.BAD
            taken.append(RemoteObject(name, np.empty(length, np.uint8).data))
            return self._take(taken[0], found)

        async with coding.room(most_bytes + byte_count):
            found = await self._bucket.get(name, self._sealed_bytes(most_bytes), take)
            if found is not Result.OK:
                return _ABSENT if found is None else _Ending(found)
            coded = taken.pop().buffer
            decoded = await coding.decode(coded, byte_count)
            if decoded is None:
                return _Ending(Result.BAD)
            np.copyto(np.frombuffer(asked.buffer, np.uint8), decoded)
        return _Ending(Result.OK, "", self._sealed_bytes(len(coded)))

    async def _put(self, asked: RemoteObject, *, over: bool = False) -> _Ending:
        if self._coding is not None:
            coded = await self._put_coded(self._coding, asked, over=over)
            if coded is not None:
                return coded
        return await self._put_as_is(asked, over=over)

    async def _put_as_is(self, asked: RemoteObject, *, over: bool) -> _Ending:
        filled_bytes = 0

        def fill(memory: Any) -> None:
            nonlocal filled_bytes
            self._fill(asked, memory)
            filled_bytes = memoryview(memory).nbytes

        await self._bucket.put(asked.name, self._sealed_bytes(len(asked.buffer)), fill, over=over)
        return _Ending(Result.OK, "", filled_bytes)

    async def _put_coded(self, coding: Coding, asked: RemoteObject, *, over: bool) -> _Ending | None:
        """Put an object coded; return None where it would be hardly shorter, and goes as it is.

        With ``over`` it is coded in any case: a bad object under the name that readers ask for
        first would hide one under the other.
        """
        name = asked.name + coding.codec.suffix
        if not over and await self._bucket.exists(name):
            return _THERE
        async with coding.room(len(asked.buffer) + coding.codec.most_coded_bytes(len(asked.buffer))):
            copy = np.frombuffer(asked.buffer, np.uint8).copy()
            coded = await coding.encode(copy, asked.element_bytes, asked.verify)
            if coded is None:
                return _Ending(Result.BAD)
            if not over and len(coded) > MOST_CODED_SHARE * len(copy):
                return None
            if not over and await self._bucket.exists(asked.name):
                return _THERE
            return await self._put_as_is(RemoteObject(name, memoryview(coded)), over=True)

    def _fill(self, asked: RemoteObject, memory: Any) -> None:
        body, seal = np.split(np.frombuffer(memory, np.uint8), [len(asked.buffer)])
        np.copyto(body, np.frombuffer(asked.buffer, np.uint8))
        if self._key:
            seal[:] = np.frombuffer(self._seal(asked), np.uint8)

    def _sealed_bytes(self, byte_count: int) -> int:
        """Return the length of an object with so many bytes before its seal, if it has one."""
        return byte_count + (SEAL_BYTES if self._key else 0)

    def _seal(self, asked: RemoteObject) -> bytes:
        from blake3 import blake3

        assert self._key is not None
        made = blake3(asked.name.encode(), key=self._key)
        made.update(asked.buffer)
        return made.digest()
