# SPDX-License-Identifier: Apache-2.0
"""The codecs of ``remote_codec``, by name; and coding beside the client's event loop: a few
threads, and room for what they hold.

A thread never touches a buffer of the client's caller: it gets bytes of its own, and returns
others. So a request that is given up holds none while a thread goes on.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol

from kvdisk.config import CODECS
from kvdisk.remote.planes import Bytes, PlanesCodec

THREADS = 4
"""Threads of a client at most. It has no more than half as many as it may use processors, but one
at least."""
ROOM_BYTES = 256 << 20
"""Bytes that are held for coding and decoding, over all requests, unless a single object takes
more."""


class Codec(Protocol):
    """Codes objects without loss. Any thread may call.

    ``suffix``: what the name of a coded object ends with, behind the name that it would have as it
    is: who does not know the codec never asks for it. ``package``: what it needs beside kvdisk.
    """

    suffix: str
    package: str

    @staticmethod
    def most_coded_bytes(byte_count: int) -> int:
        """Return the length of the longest object that so many bytes are coded to."""

    @staticmethod
    def raw_bytes_of(coded: memoryview) -> int | None:
        """Return how many bytes a coded object says that it is decoded to; None where it is
        none."""

    def encode(self, raw: Bytes, element_bytes: int = 1) -> bytes:
        """Return a vector coded. ``element_bytes``: the size of its elements, which makes it
        shorter and matters to nothing else."""

    def decode(self, coded: memoryview, byte_count: int) -> Bytes | None:
        """Return the ``byte_count`` bytes that were coded; None where it is not so many, or not
        coded like this. ``coded`` is foreign: what it says is checked before memory is taken."""


CODEC_TYPES: Mapping[str, type[Codec]] = {"zstd-planes": PlanesCodec}
assert tuple(CODEC_TYPES) == CODECS


def make_codec(name: str) -> Codec:
    """Return a codec; ``name``: one of ``CODECS``. Raises ConfigError where its package is
    missing."""
    return CODEC_TYPES[name]()


def codec_of(object_name: str) -> type[Codec] | None:
    """Return what coded the object of a name; None: it is there as it is."""
    return next((codec for codec in CODEC_TYPES.values() if object_name.endswith(codec.suffix)), None)


class Coding:
    """Codes and decodes on threads, which start when they are first needed. The event loop's thread
    makes all calls; ``close`` may come from any."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._threads = ThreadPoolExecutor(max(1, min(THREADS, len(os.sched_getaffinity(0)) // 2)), "kvdisk-codec")
        self._left = ROOM_BYTES
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def room(self, byte_count: int) -> AsyncIterator[None]:
        """Wait until so many bytes may be held, and hold them meanwhile; first come, first
        served."""
        taken = min(byte_count, ROOM_BYTES)
        if self._waiting or taken > self._left:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append((taken, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._give_back(taken)
                raise
        else:
            self._left -= taken
        try:
            yield
        finally:
            self._give_back(taken)

    def _give_back(self, byte_count: int) -> None:
        self._left += byte_count
        while self._waiting and (self._waiting[0][1].done() or self._waiting[0][0] <= self._left):
            taken, turn = self._waiting.popleft()
            if not turn.done():
                self._left -= taken
                turn.set_result(None)

    async def encode(self, raw: Bytes, element_bytes: int, verify: Callable[[memoryview], bool] | None) -> bytes | None:
        """Return a vector coded; None where ``verify`` says that it is not what it was. Nobody may
        change it."""

        def run() -> bytes | None:
            if verify is not None and not verify(raw.data):
                return None
            return self.codec.encode(raw, element_bytes)

        return await asyncio.get_running_loop().run_in_executor(self._threads, run)

    async def decode(self, coded: memoryview, byte_count: int) -> Bytes | None:
        """See ``Codec.decode``."""
        run = partial(self.codec.decode, coded, byte_count)
        return await asyncio.get_running_loop().run_in_executor(self._threads, run)

    def close(self) -> None:
        """Begin nothing more. Does not wait for what the threads have begun: it touches nobody's
        memory."""
        self._threads.shutdown(wait=False, cancel_futures=True)
