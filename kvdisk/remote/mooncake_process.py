# SPDX-License-Identifier: Apache-2.0
"""The process that calls Mooncake's client, and ends with its parent: see ``mooncake``.

It reads questions from a pipe, has each answered on the thread of its room, and sends the answers
back in any order. Nothing else of kvdisk runs here.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from queue import SimpleQueue
from typing import Any

from kvdisk.child import ParentPipe

MISSING = -704
TOO_LONG = -600
"""The client's code for an object that is longer than the room for it."""


class Client:
    """Mooncake's client, opened when it is first needed. Any thread may call it."""

    def __init__(self, make: Any, settings: Mapping[str, str], deadline_s: float) -> None:
        self._make = make
        self._settings = dict(settings)
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._store: Any = None

    def open(self) -> Any:
        """Return the open client. Raises OSError where it cannot be opened now."""
        with self._lock:
            if self._store is None:
                host, _, port = self._settings["master_server_addr"].rpartition(":")
                # Without a master, the client's own attempt to connect takes many times as long.
                with socket.create_connection((host.strip("[]"), int(port)), self._deadline_s) as way:
                    address = way.getsockname()[0]
                settings = self._settings | {"local_hostname": self._settings["local_hostname"] or address}
                store = self._make()
                if code := store.setup(settings):
                    raise OSError(f"it cannot be set up ({code})")
                self._store = store
            return self._store

    def close(self) -> None:
        """Close the client, if it is open. Nothing may be under way."""
        if self._store is not None:
            self._store.close()


class Room:
    """Memory that is shared with the parent, and the thread that makes the calls in it.

    ``busy``: whether a call is under way.
    """

    def __init__(self, number: int, descriptor: int, client: Client, answer: Any) -> None:
        self._number = number
        self._descriptor = descriptor
        self._client = client
        self._answer = answer
        self._memory: mmap.mmap | None = None
        self._address = 0
        self.busy = False
        self._questions: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def ask(self, question: Sequence[Any]) -> None:
        """Begin a call. The main thread calls this."""
        self.busy = True
        self._questions.put(question)

    def _run(self) -> None:
        while True:
            question = self._questions.get()
            codes: Sequence[int] = ()
            said = ""
            try:
                codes = self._do(*question)
            except Exception as error:  # whatever the client raises
                said = f"{type(error).__name__}: {error}"
            self.busy = False
            self._answer((self._number, codes, said))

    def _do(self, room_bytes: int, op: str, names: list[str], lengths: list[int]) -> Sequence[int]:
        store = self._client.open()
        if op == "exists":
            found: Sequence[int] = store.batch_is_exist(names)
            return found
        self._map(store, room_bytes)
        starts = [self._address + end - length for end, length in zip(accumulate(lengths), lengths, strict=True)]
        if op == "get":
            return list(store.batch_get_into(names, starts, lengths))
        return _put(store, names, starts, lengths, over=op == "replace")

    def _map(self, store: Any, byte_count: int) -> None:
        """Register all of the room with the client: the room may have grown."""
        if self._memory is not None and len(self._memory) == byte_count:
            return
        if self._memory is not None:
            store.unregister_buffer(self._address)
            self._memory = None
        memory = mmap.mmap(self._descriptor, byte_count)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if code := store.register_buffer(self._address, byte_count):
            raise OSError(f"memory cannot be registered ({code})")
        self._memory = memory


def _put(store: Any, names: list[str], starts: list[int], lengths: list[int], *, over: bool) -> Sequence[int]:
    """Write the objects that are not there, and replace those of another length, or with ``over``
    all: Mooncake's own put replaces nothing. Return a code for each object, 0 for success."""
    codes = dict.fromkeys(range(len(names)), 0)
    new = []
    for at, there in enumerate(store.batch_is_exist(names)):
        found = store.get_size(names[at]) if there == 1 else there
        if there == 0 or found == MISSING:
            new.append(at)
        elif found < 0:
            codes[at] = found
        elif over or found != lengths[at]:
            codes[at] = store.upsert_from(names[at], starts[at], lengths[at])
    if new:
        asked = [[each[at] for at in new] for each in (names, starts, lengths)]
        codes.update(zip(new, store.batch_put_from(*asked), strict=True))
    return list(codes.values())


def main(descriptor: int, parent: int, rooms: Sequence[int]) -> None:
    """Be the child: answer questions until the parent is gone."""
    pipe = ParentPipe(descriptor, parent)

    def answer(said: object) -> None:
        with suppress(OSError):
            pipe.send(said)

    with suppress(EOFError):
        settings, deadline_s = pipe.receive()
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            answer(str(error))
            return
        answer(None)
        client = Client(MooncakeDistributedStore, settings, deadline_s)
        threads = [Room(number, room, client, answer) for number, room in enumerate(rooms)]
        while True:
            number, *question = pipe.receive()
            threads[number].ask(question)
    if int(settings["global_segment_size"]) and not any(room.busy for room in threads):
        client.close()  # so that the master forgets what lies here
    os._exit(0)  # its own end crashes where a call is under way
