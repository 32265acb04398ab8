# SPDX-License-Identifier: Apache-2.0
"""The remote store Mooncake, through its own client, which runs in a process of its own.

A call of that client hangs as long as a node does, a process that ends during a call crashes, and
whoever reaches the client's ports can write to memory that it has registered. So a child process
calls the client, on a thread for each of a few rooms of memory, and shares only these rooms with
this process. The requests of one turn of the event loop go together, in one call for each room.
"""

from __future__ import annotations

import asyncio
import math
import mmap
import os
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from kvdisk.child import ChildProcess
from kvdisk.errors import ConfigError
from kvdisk.remote import mooncake_process
from kvdisk.remote.base import ObjectOp, Result, StoreBusy

ROOMS = 4
"""Rooms, so calls at a time."""
ROOM_BYTES = 16 << 20
"""Bytes of the objects in one call, unless a single object is longer. A room takes memory when it
is first used."""
TOGETHER = 64
"""Objects in one call at most."""
PACKAGE = "mooncake-transfer-engine-non-cuda"
_LIBRARIES = {"libibverbs.so.1": "libibverbs1"}
"""The packages of Debian and Ubuntu for the libraries that the client loads."""
_OPTIONS = {
    "metadata_server": "P2PHANDSHAKE",
    "protocol": "tcp",
    "rdma_devices": "",
    "global_segment_size": "0",
    "local_hostname": "",
    "tenant_id": "default",
}
_WRITES = frozenset({ObjectOp.PUT, ObjectOp.REPLACE})
_START_S = 60.0
_CLOSE_S = 2.0
_MEANINGS = {
    -200: "no room is left",
    mooncake_process.MISSING: "it was evicted while it was written",
    -800: "a node does not answer",
    -900: "the master does not answer",
}


class MooncakeError(Exception):
    """What Mooncake's client answered, or why its process has ended."""


class _Asked(NamedTuple):
    """A request for one object. ``use``: called with the memory that holds the object, or is to
    hold it."""

    op: ObjectOp
    name: str
    byte_count: int
    use: Callable[[Any], Any]
    future: asyncio.Future[Any]


class MooncakeBucket:
    """See ``base.Bucket``.

    ``url``: ``mooncake://host:port`` of the master. ``options``: keys of ``_OPTIONS``, as
    Mooncake's own ``setup`` names them. ``deadline_s``: seconds after which the caller gives a
    request up. The constructor starts the child, and asks the store nothing yet. Raises
    ConfigError.
    """

    parallel = 1024
    hint_life_s = 5.0  # half its lease: what is asked for stays that long

    def __init__(self, url: str, options: Mapping[str, str], *, deadline_s: float) -> None:
        self.name = url
        self._settings = _settings(url, options)
        self._deadline_s = deadline_s
        self._waiting: dict[ObjectOp, deque[_Asked]] = {
            op: deque() for op in (ObjectOp.EXISTS, ObjectOp.GET, ObjectOp.PUT, ObjectOp.REPLACE)
        }
        """The requests that wait, by operation, in the order in which operations are served."""
        self._running: dict[int, list[_Asked]] = {}
        """The requests in each room. They keep it until the client answers, even where they were
        given up."""
        try:
            self._child: _Child | None = _Child(self._settings, deadline_s)
        except OSError as error:
            needs = f"needs a process, and memory shared with it (memfd_create): {error.strerror}"
            raise ConfigError(f"remote {url!r} {needs}.") from error
        if (problem := self._child.first_word()) is not None:
            self.close()
            raise ConfigError(f"remote {url!r} {problem}.")

    async def exists(self, name: str) -> bool:
        return bool(await self._ask(ObjectOp.EXISTS, name, 0, bool))

    async def get(self, name: str, most_bytes: int, take: Callable[[Any], Result]) -> Result | None:
        found: Result | None = await self._ask(ObjectOp.GET, name, most_bytes, take)
        return found

    async def put(self, name: str, byte_count: int, fill: Callable[[Any], None], *, over: bool = False) -> None:
        await self._ask(ObjectOp.REPLACE if over else ObjectOp.PUT, name, byte_count, fill)

    def close(self) -> None:
        if self._child is not None:
            self._child.stop()
            self._child = None

    async def _ask(self, op: ObjectOp, name: str, byte_count: int, use: Callable[[Any], Any]) -> Any:
        taken = self._running.values()
        if len(taken) == ROOMS and all(asked.future.done() for group in taken for asked in group):
            raise StoreBusy
        loop = asyncio.get_running_loop()
        asked = _Asked(op, name, byte_count, use, loop.create_future())
        self._waiting[op].append(asked)
        loop.call_soon(self._send)
        return await asked.future

    def _next_group(self) -> list[_Asked]:
        """Take the requests that go together next off their queue; none where nothing waits."""
        for queue in self._waiting.values():
            group: list[_Asked] = []
            left = ROOM_BYTES
            while queue and len(group) < TOGETHER and (not group or queue[0].byte_count <= left):
                asked = queue.popleft()
                if not asked.future.done():
                    group.append(asked)
                    left -= asked.byte_count
            if group:
                return group
        return []

    def _send(self) -> None:
        """Send waiting requests while a room is free."""
        while len(self._running) < ROOMS and (group := self._next_group()):
            room = min(set(range(ROOMS)) - self._running.keys())
            try:
                if self._child is None:
                    self._child = _Child(self._settings, self._deadline_s)
                self._child.watch(self._hear)
                parts = self._child.parts(room, [asked.byte_count for asked in group])
                if group[0].op in _WRITES:
                    for asked, part in zip(group, parts, strict=True):
                        asked.use(part)
                self._child.send(room, group[0].op, [asked.name for asked in group], list(map(len, parts)))
            except OSError as error:  # no process, or no memory; one that has ended is heard of, too
                _fail(group, f"{type(error).__name__}: {error}")
            else:
                self._running[room] = group

    def _hear(self) -> None:
        """Take what has come from the child."""
        assert self._child is not None
        for heard in self._child.pipe.look():
            if isinstance(heard, tuple):  # or it is the first word of a child in the place of another
                self._take_answer(self._child, *heard)
        if self._child.pipe.has_ended:
            ended, self._child = self._child.stop(), None
            for group in self._running.values():
                _fail(group, f"its client has ended ({ended})")
            self._running.clear()
        self._send()

    def _take_answer(self, child: _Child, room: int, codes: Sequence[int], said: str) -> None:
        group = self._running.pop(room)
        if said:
            _fail(group, said)
            return
        parts = child.parts(room, [asked.byte_count for asked in group])
        for asked, code, part in zip(group, codes, parts, strict=True):
            _end(asked, code, part)


def _end(asked: _Asked, code: int, part: memoryview) -> None:
    """Answer a request. ``code``: 0 or 1 for EXISTS, the object's length for GET, 0 for writes;
    below 0 it says what went wrong."""
    if asked.future.done():
        return
    if asked.op is ObjectOp.EXISTS and code >= 0:
        asked.future.set_result(code)
    elif asked.op is ObjectOp.GET and (code >= 0 or code == mooncake_process.TOO_LONG):
        asked.future.set_result(asked.use(part[: max(0, code)]))
    elif code == (0 if asked.op in _WRITES else mooncake_process.MISSING):
        asked.future.set_result(None)
    else:
        _fail([asked], f"{_MEANINGS.get(code, 'it failed')} ({code})")


def _fail(group: Sequence[_Asked], said: str) -> None:
    for asked in group:
        if not asked.future.done():
            asked.future.set_exception(MooncakeError(said))


class _Child:
    """The child process and the rooms. Raises OSError where it cannot be started.

    What its client writes to stderr goes where the engine's goes: it may be much.
    """

    def __init__(self, settings: Mapping[str, str], deadline_s: float) -> None:
        limit_ms = str(math.ceil(1000 * deadline_s))
        # Where the client has no setting for it, it waits for a node as long as it likes: see
        # ``ROOMS``.
        environment = {
            "GLOG_minloglevel": "3",
            "MC_RPC_TIMEOUT_MS": limit_ms,
            "MC_RPC_CONNECT_TIMEOUT_MS": limit_ms,
            "MC_STORE_CLIENT_SETUP_RETRIES": "3",
            "MC_TCP_PROGRESS_TIMEOUT_SEC": str(math.ceil(deadline_s)),
        }
        self._loop: asyncio.AbstractEventLoop | None = None
        self._memory: dict[int, memoryview] = {}
        with ExitStack() as undo:
            self._rooms = [os.memfd_create("kvdisk-mooncake") for _ in range(ROOMS)]
            for room in self._rooms:
                undo.callback(os.close, room)
            self._process = ChildProcess(
                mooncake_process.__name__, self._rooms, fds=self._rooms, environment=environment, keeps_words=False
            )
            self.pipe = self._process.pipe
            self.pipe.post((dict(settings), deadline_s))
            undo.pop_all()

    def first_word(self) -> str | None:
        """Return why the child cannot serve, as the end of a sentence; None where it can."""
        try:
            said = self.pipe.receive(_START_S)
        except TimeoutError:
            said = f"did not start within {_START_S:g} s"
        except (EOFError, OSError):
            said = f"ended with {self.stop()}"
        if said is None:
            return None
        library = re.match(r"(?:\S*/)?(\S+): (?:cannot open shared object file|file too short|invalid ELF)", said)
        if library:
            package = _LIBRARIES.get(library[1])
            return f"needs {library[1]}, which Mooncake's client loads" + (
                f" (Debian's and Ubuntu's package {package})" if package else ""
            )
        if said.startswith("No module named"):
            return f"needs {PACKAGE} (pip install {PACKAGE})"
        return f"cannot be used: Mooncake's client {said}"

    def watch(self, hear: Callable[[], None]) -> None:
        """From the first call on, call ``hear`` when there is something to hear."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self.pipe.fileno(), hear)

    def parts(self, room: int, lengths: Sequence[int]) -> list[memoryview]:
        """Return a room's memory for objects of these lengths, one behind the other."""
        needed = sum(lengths)
        memory = self._memory.get(room, memoryview(b""))
        if needed > len(memory):
            byte_count = max(ROOM_BYTES, needed)
            os.ftruncate(self._rooms[room], byte_count)
            memory = self._memory[room] = memoryview(mmap.mmap(self._rooms[room], byte_count))
        return [memory[end - length : end] for end, length in zip(accumulate(lengths), lengths, strict=True)]

    def send(self, room: int, op: ObjectOp, names: Sequence[str], lengths: Sequence[int]) -> None:
        """Have the child make a call in a room."""
        room_bytes = len(self._memory.get(room, b""))
        self.pipe.post((room, room_bytes, op.value, names, lengths))

    def stop(self) -> str:
        """End the process, and return how it ended. A client at work is killed. Idempotent."""
        if self._loop is not None and self._rooms:
            self._loop.remove_reader(self.pipe.fileno())
        ended = self._process.end(_CLOSE_S)
        while self._rooms:
            os.close(self._rooms.pop())
        return ended.how


def _settings(url: str, options: Mapping[str, str]) -> dict[str, str]:
    """Return the settings for Mooncake's ``setup``. Raises ConfigError."""
    try:
        port = urlsplit(url).port
    except ValueError:
        port = None
    if port is None or urlsplit(url).path.strip("/"):
        raise ConfigError(
            f"remote {url!r} must be the address of Mooncake's master, such as mooncake://10.0.0.1:50051."
        )
    for name in options.keys() - _OPTIONS:
        raise ConfigError(f"remote_options of Mooncake are {', '.join(_OPTIONS)}, and not {name!r}.")
    if not options.get("global_segment_size", "0").isdecimal():
        raise ConfigError("remote_options: global_segment_size is a number of bytes.")
    return {"master_server_addr": urlsplit(url).netloc, "local_buffer_size": "0"} | _OPTIONS | dict(options)
