# SPDX-License-Identifier: Apache-2.0
"""``BlockStore`` without a drive: a dictionary, for tests of what uses one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np

from kvdisk.blocks import BlockKey, Tier, group_of
from kvdisk.manager.events import Journal, Taken
from kvdisk.stats import Stats
from kvdisk.store_face import (
    MOST_HOLD_S,
    BlockKind,
    BlockStoreFace,
    CallCheck,
    Ended,
    Get,
    Memory,
    Presence,
    Put,
    Result,
    Usage,
    need,
    rows_of,
)
from kvdisk.worker.row_memory import RowMemory, Rows

_Blocks = Sequence[Put] | Sequence[Get]
_Job = tuple[int, _Blocks, float]


class MemoryBlocks(BlockStoreFace):
    """Keeps up to ``most_blocks``, and evicts what was used longest ago. ``step`` begins jobs and
    ``poll`` ends them."""

    def __init__(self, kinds: Sequence[BlockKind], memory: Memory, most_blocks: int = 1 << 20) -> None:
        self._check = CallCheck(kinds, memory)
        self._kinds = kinds
        self._memory = RowMemory(memory)
        self._most_blocks = most_blocks
        self._blocks: dict[BlockKey, Rows] = {}
        """The blocks that are there, the one used longest ago first."""
        self._coming: set[BlockKey] = set()
        self._salts: dict[BlockKey, str] = {}
        self._parents: dict[BlockKey, BlockKey | None] = {}
        """Of the blocks that are there, and of some that were."""
        self._named: set[str] = {""}
        self._holds: dict[BlockKey, float] = {}
        """Until when blocks are held."""
        self._asked: list[_Job] = []
        self._begun: list[tuple[_Job, list[Result]]] = []
        self._deleted: set[tuple[int, BlockKey]] = set()
        """Tags and keys of puts that had not begun when the block was deleted."""
        self._ended: list[Ended] = []
        self._tags: set[int] = set()
        self._stats = Stats()
        self._journal: Journal | None = None
        self._is_closed = False

    def presence(self, keys: Sequence[BlockKey]) -> bytes:
        ready, coming, absent = Presence.READY, Presence.COMING, Presence.ABSENT
        return bytes(ready if key in self._blocks else coming if key in self._coming else absent for key in keys)

    def ask(self, keys: Sequence[BlockKey]) -> None:
        self._check.keys(keys)

    def hold(self, keys: Sequence[BlockKey], hold_s: float) -> None:
        self._check.held(keys, hold_s)
        until_s = time.monotonic() + min(hold_s, MOST_HOLD_S)
        self._holds = {key: end_s for key, end_s in self._holds.items() if self._is_held(key)}
        for key in keys:
            if len(self._holds) >= self._most_blocks // 4:
                return
            before: BlockKey | None = key
            while before in self._blocks and self._holds.get(before, 0.0) < until_s:
                self._holds[before] = until_s
                before = self._parents[before]

    def reached(self, request: str | None, keys: Sequence[BlockKey]) -> None:  # noqa: ARG002
        self._check.keys(keys)
        for key in reversed(keys):
            if key in self._blocks:
                self._blocks[key] = self._blocks.pop(key)

    def put(self, tag: int, blocks: Sequence[Put], wait_s: float | None = None) -> None:
        self._check.puts(blocks, wait_s)
        self._ask_for(tag, blocks)

    def get(self, tag: int, blocks: Sequence[Get], arrival: int = 0) -> None:
        self._check.gets(blocks, arrival)
        self._ask_for(tag, blocks)

    def _ask_for(self, tag: int, blocks: _Blocks) -> None:
        self._take_tag(tag)
        self._asked.append((tag, blocks, time.monotonic()))

    def _take_tag(self, tag: int) -> None:
        need(not self._is_closed, "the store is closed")
        need(tag not in self._tags, f"tag {tag} is in use")
        self._tags.add(tag)

    def delete(self, tag: int, keys: Sequence[BlockKey]) -> None:
        self._check.keys(keys)
        self._take_tag(tag)
        results = [Result.DONE if presence else Result.ABSENT for presence in self.presence(keys)]
        self._erase(keys)
        self._ended.append(Ended(tag, results, 0, 0.0))

    def clear(self, tag: int) -> None:
        self._take_tag(tag)
        self._erase({*self._blocks, *self._coming, *(block.key for _, blocks, _ in self._asked for block in blocks)})
        self._ended.append(Ended(tag, [Result.DONE], 0, 0.0))

    def _erase(self, keys: Collection[BlockKey]) -> None:
        self._deleted.update((tag, key) for tag, _, _ in self._asked for key in keys)
        self._coming.difference_update(keys)
        gone = [key for key in dict.fromkeys(keys) if key in self._blocks]
        for key in gone:
            del self._blocks[key]
        self._note(False, gone)

    def step(self, now: float) -> bool:  # noqa: ARG002
        need(not self._is_closed, "the store is closed")
        for job in self._asked:
            self._begun.append((job, list(self._begin(*job[:2]))))
        self._asked.clear()
        self._deleted.clear()
        return bool(self._tags)

    def _begin(self, tag: int, blocks: _Blocks) -> Iterator[Result]:
        for block in blocks:
            if isinstance(block, Get):
                yield Result.DONE if block.key in self._blocks else Result.ABSENT
            elif (tag, block.key) in self._deleted:
                yield Result.CANCELLED
            elif block.key in self._blocks or block.key in self._coming:
                yield Result.PRESENT
            elif len(self._coming) >= self._most_blocks:
                yield Result.NO_ROOM
            else:
                self._coming.add(block.key)
                yield Result.DONE

    def poll(self, wait_s: float = 0.0) -> list[Ended]:  # noqa: ARG002
        for job, results in self._begun:
            blocks: list[Put | Get] = [*job[1]]
            for at, block in enumerate(blocks):
                if results[at] is Result.DONE:
                    results[at] = self._move(block)
            self._end(job, results)
        self._begun.clear()
        ended, self._ended = self._ended, []
        self._tags.difference_update(each.tag for each in ended)
        return ended

    def wait(self, wait_s: float) -> None:
        """See ``BlockStoreFace``: what a step has begun can be polled at once."""

    @property
    def is_off(self) -> bool:
        return self._is_closed

    def _move(self, block: Put | Get) -> Result:
        kind, rows = self._kinds[group_of(block.key)], rows_of(block.row)
        if isinstance(block, Put):
            if block.key not in self._coming:  # it was deleted meanwhile
                return Result.DONE
            self._coming.discard(block.key)
            if len(self._blocks) >= self._most_blocks:
                leaving = next((key for key in self._blocks if not self._is_held(key)), next(iter(self._blocks)))
                del self._blocks[leaving]
                self._note(False, [leaving])
            payload = np.empty(kind.payload_bytes, np.uint8)
            self._memory.gather(rows, kind.pieces, payload)
            self._blocks[block.key] = payload
            self._salts[block.key], self._parents[block.key] = block.salt, block.parent
            self._named.add(block.salt)
            self._note(True, [block.key])
            self._stats.add("stored_blocks")
        elif block.key not in self._blocks:  # a put has taken its room
            return Result.ABSENT
        else:
            self._memory.scatter(self._blocks[block.key], rows, kind.pieces)
            self._blocks[block.key] = self._blocks.pop(block.key)
            self._stats.add("loaded_blocks")
        return Result.DONE

    def _is_held(self, key: BlockKey) -> bool:
        return self._holds.get(key, 0.0) > time.monotonic()

    def _end(self, job: _Job, results: Sequence[Result]) -> None:
        tag, blocks, asked_s = job
        sizes = (self._kinds[group_of(block.key)].payload_bytes for block in blocks)
        moved_bytes = sum(size for size, result in zip(sizes, results, strict=True) if result is Result.DONE)
        self._ended.append(Ended(tag, results, moved_bytes, time.monotonic() - asked_s))

    def _note(self, stored: bool, keys: Sequence[BlockKey]) -> None:
        if self._journal is not None:
            self._journal.note(Tier.NVME, stored, keys)

    def forget(self, epoch: int) -> None:
        self._check.epoch(epoch)
        self._cancel()
        self._note(False, list(self._blocks))
        self._blocks.clear()

    def _cancel(self) -> None:
        for job in (*self._asked, *(job for job, _ in self._begun)):
            self._end(job, [Result.CANCELLED] * len(job[1]))
        self._asked.clear()
        self._begun.clear()
        self._coming.clear()

    def drain(self) -> None:
        if not self._is_closed:
            self.step(time.monotonic())
        ended = self.poll()
        self._tags.update(each.tag for each in ended)
        self._ended = ended

    def changes(self) -> Taken:
        if self._journal is None:
            self._journal = Journal(self._stats)
            self._note(True, list(self._blocks))
        return self._journal.take()

    def keys(self) -> list[BlockKey]:
        return list(self._blocks)

    def usage(self, salts: Iterable[str] = ()) -> Usage:
        salts = list(salts)
        need(all(isinstance(salt, str) for salt in salts), "a salt is text")
        self._named.update(salts)
        found = Counter[str]()
        for key, content in self._blocks.items():
            found[self._salts[key]] += len(content)
        by_salt = {salt: size for salt, size in found.items() if salt in self._named}
        return Usage(found.total(), by_salt, found.total() - sum(by_salt.values()))

    def stats(self) -> Stats:
        return self._stats.take()

    def close(self) -> None:
        self._is_closed = True
        self._cancel()
