# SPDX-License-Identifier: Apache-2.0
"""Requests of the fake engine, and their block tables: allocation, windows and prefix hits, as vLLM
does them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum

from kvdisk.blocks import BlockKey, group_of, make_block_key
from kvdisk.context import HandedState
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.manager.catalog import TierChoice
from support.fake_pool import FakePool

BESIDE = " | "
"""Between what the GPU blocks of one block hold."""


class Status(Enum):
    """What a request does. WAITING ones may hold blocks, loaded and not yet computed upon."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    GONE = "gone"


@dataclass(eq=False, slots=True)
class FakeRequest:
    """One request. ``computed``: tokens whose KV is there, or will be after this step. ``table``:
    block ids by group.

    ``most_tokens``: it samples up to there, and then waits for somebody to set ``finishing``.
    ``recved``: ranks that have reported the load under way. ``load_tiers``: that it may load from;
    None: all.
    """

    id: str
    tokens: str
    prompt_tokens: int
    most_tokens: int
    table: list[list[int]]
    hashes: list[bytes] = field(default_factory=list)
    status: Status = Status.WAITING
    computed: int = 0
    load_failed: bool = False
    finishing: bool = False
    recved: int = 0
    load_tiers: TierChoice = None

    def hash_of(self, end_tokens: int) -> bytes:
        """Return the hash of a beginning: the text itself."""
        return self.tokens[:end_tokens].encode()

    def copied_table(self) -> list[list[int]]:
        return [list(table) for table in self.table]

    def extend_hashes(self, hash_tokens: int) -> None:
        for end in range((len(self.hashes) + 1) * hash_tokens, len(self.tokens) + 1, hash_tokens):
            self.hashes.append(self.hash_of(end))


def key_of(request: FakeRequest, group: GroupGeometry, position: int, tokens: int | None = None) -> BlockKey:
    """Return the key of a request's block; of its beginning, where only ``tokens`` of the request
    are there."""
    end = (position + 1) * group.block_tokens
    return make_block_key(request.hash_of(end if tokens is None else min(end, tokens)), group.group)


def engine_geometry(geometry: Geometry) -> Geometry:
    """Return the sizes of the engine's own blocks, several of which may be one of kvdisk's."""
    own = [replace(group, block_tokens=group.gpu_block_tokens, gpu_blocks=1) for group in geometry.groups]
    return replace(geometry, groups=tuple(own))


def values_of(key: BlockKey, weights: int, rank: int, group: GroupGeometry) -> list[str]:
    """Return what the GPU blocks of a block hold on a rank."""
    text = key[:-2].decode()
    ends = range(len(text) - group.block_tokens + group.gpu_block_tokens, len(text) + 1, group.gpu_block_tokens)
    return [f"w{weights} r{rank} g{group_of(key)} {text[:end]}" for end in ends]


def value_of(key: BlockKey, weights: int, rank: int, group: GroupGeometry | None = None) -> str:
    """Return what the block of a key holds on a rank; without ``group`` the GPU's block."""
    if group is not None:
        return BESIDE.join(values_of(key, weights, rank, group))
    return f"w{weights} r{rank} g{group_of(key)} {key[:-2].decode()}"


class BlockTables:
    """Gives requests blocks of a pool and takes them back. Of recurrent states a request has the
    block that its last step ended in, and the one that its next step ends in."""

    def __init__(self, geometry: Geometry, pool: FakePool) -> None:
        self._groups = geometry.groups
        self._pool = pool
        self.alignment_tokens = math.lcm(*(group.block_tokens for group in geometry.groups))
        """A hit is a multiple of this."""
        self._state_tokens = math.lcm(*(group.block_tokens for group in self._groups if group.state_tokens is not None))

    def local_hit(self, request: FakeRequest) -> tuple[list[list[int]], int]:
        """Return the blocks and tokens of the longest prefix that the GPU holds, short of the last
        token."""
        end = (len(request.tokens) - 1) // self.alignment_tokens * self.alignment_tokens
        while end > 0:
            tables: list[list[int | None]] = []
            for group in self._groups:
                skipped = _skipped(group, end)
                positions = range(skipped, end // group.block_tokens)
                found = [self._pool.find(key_of(request, group, position)) for position in positions]
                tables.append([*[0] * skipped, *found])
            if all(None not in table for table in tables):
                return [[block or 0 for block in table] for table in tables], end
            end -= self.alignment_tokens
        return [[] for _ in self._groups], 0

    def missing_blocks(self, request: FakeRequest) -> int:
        """Return how many blocks a request still needs for the tokens it has."""
        return sum(
            min(
                math.ceil(len(request.tokens) / group.block_tokens) - len(table),
                2**31 if group.state_tokens is None else 2,
            )
            for group, table in zip(self._groups, request.table, strict=True)
        )

    def step_tokens(self, request: FakeRequest, computed: int, budget_tokens: int) -> int:
        """Return how many tokens a step computes. With recurrent states it ends where a block does,
        or behind the last that does: so vLLM keeps a state for each block's end."""
        total, each = len(request.tokens), self._state_tokens
        end, last = min(computed + budget_tokens, total), total - total % each
        if end < last:
            end -= end % each
        elif computed < last:
            end = last
        return max(0, end - computed)

    def states_of(self, request: FakeRequest, computed: int) -> list[HandedState]:
        """Return the states that a step keeps which ends here."""
        return [
            HandedState(group.group, table[computed // group.block_tokens - 1], computed)
            for group, table in zip(self._groups, request.table, strict=True)
            if group.state_tokens is not None and computed % group.block_tokens == 0
        ]

    def allocate(
        self, request: FakeRequest, tokens: int, local: list[list[int]] | None = None, computed: int | None = None
    ) -> bool:
        """Give a request blocks for ``tokens``; False where too few are free.

        ``local``: blocks of a local hit, which come first. Blocks behind the window of the token at
        ``computed`` are given back, or never taken.
        """
        computed = request.computed if computed is None else computed
        tables: list[list[int]] = []
        wanted: list[int] = []
        shared: list[int] = []
        for at, (group, old) in enumerate(zip(self._groups, request.table, strict=True)):
            skipped = _skipped(group, computed)
            behind = range(min(skipped, len(old)))
            self._pool.free_blocks(old[position] for position in reversed(behind) if old[position])
            old[: len(behind)] = [0] * len(behind)
            table = list(old)
            if local is not None and not old:
                table = [0] * min(skipped, len(local[at])) + local[at][skipped:]
                shared += [block for block in table if block]
            stop = math.ceil(tokens / group.block_tokens)
            table += [0] * ((skipped if group.state_tokens is None else stop - 1) - len(table))
            tables.append(table)
            wanted.append(max(0, stop - len(table)))
        unused = sum(self._pool.get_block(block).ref_cnt == 0 for block in shared)
        if sum(wanted) + unused > self._pool.free_count:
            return False
        self._pool.touch(shared)
        request.table = [table + self._pool.take(count) for table, count in zip(tables, wanted, strict=True)]
        return True

    def cache(self, request: FakeRequest, computed: int) -> None:
        """Make a request's full blocks known to the prefix cache: as vLLM does it, before they are
        computed."""
        for group, table in zip(self._groups, request.table, strict=True):
            for position in range(min(computed, len(request.tokens)) // group.block_tokens):
                if table[position]:
                    self._pool.cache(key_of(request, group, position), table[position])

    def free(self, request: FakeRequest) -> None:
        """Take all blocks of a request back, the tail first."""
        for table in request.table:
            self._pool.free_blocks(block for block in reversed(table) if block)
        request.table = [[] for _ in self._groups]


def _skipped(group: GroupGeometry, computed: int) -> int:
    """Return how many blocks of a group lie wholly before the window of the token at
    ``computed``."""
    if group.window_tokens is None:
        return 0
    return max(0, computed - group.window_tokens + 1) // group.block_tokens
