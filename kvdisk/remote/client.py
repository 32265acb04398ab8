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
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from kvdisk.config import BUCKETS, Config
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
from kvdisk.remote.mooncake import MooncakeBucket
from kvdisk.remote.obstore_bucket import ObstoreBucket

logger = logging.getLogger("kvdisk.remote")

MOST_OBJECTS = 1 << 14
"""Objects under way at most, over all batches: a batch that would exceed it is refused."""
SEAL_BYTES = 32
LEAST_SECRET_BYTES = 32
_CLOSE_TIMEOUT_S = 5.0


def open_remote(config: Config) -> BucketObjects:
    """Return the remote store; nothing has been asked of it yet. Raises ConfigError."""
    key = None if config.remote_key_file is None else seal_key(config.remote_key_file)
    return BucketObjects(_open_bucket(config), deadline_s=config.remote_deadline_s, key=key)


def open_listed(config: Config) -> ObstoreBucket | None:
    """Return the remote store as a bucket, to list it; None where it is none. Raises
    ConfigError."""
    bucket = _open_bucket(config) if _scheme_of(config) in BUCKETS else None
    assert bucket is None or isinstance(bucket, ObstoreBucket)
    return bucket


def _open_bucket(config: Config) -> Bucket:
    """Return the store's client: the one place that gives a setting of the user's to it."""
    assert config.remote is not None
    make: Callable[..., Bucket] = ObstoreBucket if _scheme_of(config) in BUCKETS else MooncakeBucket
    return make(config.remote, dict(config.remote_options), deadline_s=config.remote_deadline_s)


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


def _ending_of(task: asyncio.Task[tuple[Result, str]]) -> tuple[Result, str]:
    """Return what came of an object, also where the client's code panicked or cancelled itself."""
    if task.cancelled():
        return Result.FAILED, "cancelled"
    error = task.exception()
    return task.result() if error is None else (Result.FAILED, f"{type(error).__name__}: {error}")


class _Ended(NamedTuple):
    """An ended batch. ``said``: what the first failure said, "" where nothing failed; None where
    the batch was not sent."""

    ticket: int
    results: tuple[Result, ...]
    said: str | None


class BucketObjects:
    """See ``Objects`` and the module.

    ``deadline_s``: seconds after which a batch ends, whatever has answered. ``key``: 32 bytes; with
    it each object ends with a seal over its name and its bytes, which only those who have the key
    can make. Puts and reads pause separately: a store that is full can still be read.
    """

    def __init__(
        self,
        bucket: Bucket,
        *,
        deadline_s: float,
        key: bytes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bucket = bucket
        self._deadline_s = deadline_s
        self._key = key
        self._log = QuietLog(clock, logger)
        self._reads, self._puts = Health(clock), Health(clock)
        self._ways: dict[ObjectOp, Callable[[RemoteObject], Coroutine[Any, Any, Result]]] = {
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
            outcomes.append(ObjectsOutcome(ended.ticket, ended.results))
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
        ended = [(Result.LATE, "") if task in left else _ending_of(task) for task in tasks]
        said = next((text for result, text in ended if result is Result.FAILED), "")
        self._ended.put(_Ended(ticket, tuple(result for result, _ in ended), said))

    async def _do(self, op: ObjectOp, asked: RemoteObject) -> tuple[Result, str]:
        """Return the result for one object, and the message of its failure ("" without one)."""
        async with self._slots:
            try:
                return await self._ways[op](asked), ""
            except StoreBusy:
                return Result.REFUSED, ""
            except Exception as error:  # whatever the client raises
                return Result.FAILED, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"

    async def _exists(self, asked: RemoteObject) -> Result:
        return Result.OK if await self._bucket.exists(asked.name) else Result.ABSENT

    async def _get(self, asked: RemoteObject) -> Result:
        found = await self._bucket.get(asked.name, self._stored_bytes(asked), partial(self._take, asked))
        return Result.ABSENT if found is None else found

    def _take(self, asked: RemoteObject, found: Any) -> Result:
        """Copy an object, and only then check its seal: others may write to this memory, and what
        was checked first might not be what is copied."""
        if memoryview(found).nbytes != self._stored_bytes(asked):
            return Result.BAD
        body, seal = np.split(np.frombuffer(found, np.uint8), [len(asked.buffer)])
        np.copyto(np.frombuffer(asked.buffer, np.uint8), body)  # which lets other threads run
        if self._key and not hmac.compare_digest(seal.tobytes(), self._seal(asked)):
            return Result.BAD
        return Result.OK

    async def _put(self, asked: RemoteObject, *, over: bool = False) -> Result:
        await self._bucket.put(asked.name, self._stored_bytes(asked), partial(self._fill, asked), over=over)
        return Result.OK

    def _fill(self, asked: RemoteObject, memory: Any) -> None:
        body, seal = np.split(np.frombuffer(memory, np.uint8), [len(asked.buffer)])
        np.copyto(body, np.frombuffer(asked.buffer, np.uint8))
        if self._key:
            seal[:] = np.frombuffer(self._seal(asked), np.uint8)

    def _stored_bytes(self, asked: RemoteObject) -> int:
        return len(asked.buffer) + (SEAL_BYTES if self._key else 0)

    def _seal(self, asked: RemoteObject) -> bytes:
        from blake3 import blake3

        assert self._key is not None
        made = blake3(asked.name.encode(), key=self._key)
        made.update(asked.buffer)
        return made.digest()
