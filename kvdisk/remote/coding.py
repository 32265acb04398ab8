# SPDX-License-Identifier: Apache-2.0
"""Coding beside the client's event loop: a few threads, and room for what they hold.

A thread never touches a buffer of the client's caller: it gets bytes of its own, and returns
others. So a request that is given up holds none while a thread goes on.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial

from kvdisk.remote.planes import Bytes, PlanesCodec

THREADS = 4
"""Threads of a client at most. It has no more than half as many as it may use processors, but one
at least."""
ROOM_BYTES = 256 << 20
"""Bytes that are held for coding and decoding, over all requests, unless a single object takes
more."""


class Coding:
    """Codes and decodes on threads, which start when they are first needed. The event loop's thread
    makes all calls; ``close`` may come from any."""

    def __init__(self, codec: PlanesCodec) -> None:
        self._codec = codec
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
            return self._codec.encode(raw, element_bytes)

        return await asyncio.get_running_loop().run_in_executor(self._threads, run)

    async def decode(self, coded: memoryview, byte_count: int) -> Bytes | None:
        """See ``PlanesCodec.decode``."""
        run = partial(self._codec.decode, coded, byte_count)
        return await asyncio.get_running_loop().run_in_executor(self._threads, run)

    def close(self) -> None:
        """Begin nothing more. Does not wait for what the threads have begun: it touches nobody's
        memory."""
        self._threads.shutdown(wait=False, cancel_futures=True)
