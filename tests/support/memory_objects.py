# SPDX-License-Identifier: Apache-2.0
"""``Objects`` in this process: the reference, and the store of tests; and a bucket for the real
client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvdisk.remote.base import ObjectOp, ObjectsOutcome, RemoteObject, Result


class MemoryObjects:
    """See ``Objects``. Batches end when ``poll`` is called, in order.

    ``contents``: the objects, by name; others may share it. ``most_bytes``: a write that would
    exceed it FAILs.
    """

    answers = is_sound = True
    pause_s = 0.0
    hint_life_s = 60.0

    def __init__(self, contents: dict[str, bytes] | None = None, most_bytes: int = 1 << 30) -> None:
        self.contents = {} if contents is None else contents
        self._most_bytes = most_bytes
        self._batches: list[tuple[int, ObjectOp, Sequence[RemoteObject]]] = []
        self._last_ticket = 0

    def submit(self, op: ObjectOp, batch: Sequence[RemoteObject]) -> int:
        """See ``Objects.submit``."""
        self._last_ticket += 1
        self._batches.append((self._last_ticket, op, batch))
        return self._last_ticket

    def poll(self, timeout_s: float = 0.0) -> list[ObjectsOutcome]:
        """See ``Objects.poll``."""
        batches, self._batches = self._batches, []
        return [ObjectsOutcome(ticket, tuple(self._do(op, each) for each in batch)) for ticket, op, batch in batches]

    def close(self) -> None:
        """See ``Objects.close``."""
        self._batches.clear()

    def _do(self, op: ObjectOp, asked: RemoteObject) -> Result:
        found = self.contents.get(asked.name)
        if op is ObjectOp.EXISTS:
            return Result.ABSENT if found is None else Result.OK
        fits = found is not None and len(found) == len(asked.buffer)
        if op is ObjectOp.REPLACE or (op is ObjectOp.PUT and not fits):
            if sum(map(len, self.contents.values())) + len(asked.buffer) > self._most_bytes:
                return Result.FAILED
            self.contents[asked.name] = bytes(asked.buffer)
        elif op is ObjectOp.GET and found is not None and fits:
            asked.buffer[:] = found
        elif op is ObjectOp.GET:
            return Result.ABSENT if found is None else Result.BAD
        return Result.OK


class MemoryBucket:
    """``Bucket`` in this process. ``contents``: the objects, by name; others may share it."""

    name = "memory"
    parallel = 64
    hint_life_s = 60.0

    def __init__(self, contents: dict[str, bytes] | None = None) -> None:
        self.contents = {} if contents is None else contents

    async def exists(self, name: str) -> bool:
        """See ``Bucket.exists``."""
        return name in self.contents

    async def get(self, name: str, most_bytes: int, take: Callable[[Any], Result]) -> Result | None:
        """See ``Bucket.get``."""
        found = self.contents.get(name)
        if found is None:
            return None
        return take(found if len(found) <= most_bytes else b"")

    async def put(self, name: str, byte_count: int, fill: Callable[[Any], None], *, over: bool = False) -> None:
        """See ``Bucket.put``."""
        if over or len(self.contents.get(name, b"")) != byte_count:
            body = bytearray(byte_count)
            fill(body)
            self.contents[name] = bytes(body)

    def close(self) -> None:
        """See ``Bucket.close``."""
