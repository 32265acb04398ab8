# SPDX-License-Identifier: Apache-2.0
"""The tree of prefixes, over random forests, beside one that is made block by block.

A block is named by the letters on the way to it: what is before ``abc`` is ``ab``.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from typing import NamedTuple

import numpy as np
import pytest
from mass_stores import key

from kvdisk.blocks import Slot
from kvdisk.cli.indexes import HomeColumns, join, join_home
from kvdisk.cli.prefixes import Prefix, each_prefix, find_prefixes
from kvdisk.device.uses import USES_RECORD
from kvdisk.index.base import BlockRecord, SegmentRecord
from kvdisk.index.memory_index import MemoryIndex

TOKENS = (16, 16, 32)
SLOT_BYTES = 4096
Node = tuple[int, int, str]
"""Epoch, tokens of a block, name."""


class Row(NamedTuple):
    """A copy of a block."""

    epoch: int
    group: int
    name: str
    uses: int


COMB = ["a" * length + end for length in range(15) for end in "ab"]
"""A branch at every block, and more of them than are shown."""


def random_homes(rng: random.Random) -> list[list[Row]]:
    homes: list[list[Row]] = [[] for _ in range(rng.choice([1, 1, 2, 3]))]
    groups, epochs = rng.choice([1, 1, 2, 3]), rng.choice([1, 1, 2])
    names = [""]
    for _ in range(rng.choice([0, 1, 5, 40, 120])):
        # Mostly one chain goes on; some begin anew, and some lack the block before them.
        before = rng.choice([names[-1], names[-1], rng.choice(names), ""])
        names.append(before[:29] + rng.choice(["a", "b", "c", "no"]))
    for name in COMB if rng.random() < 0.1 else names[1:]:
        for _ in range(rng.choice([1, 1, 2, 4])):
            home = rng.choice(homes)
            row = Row(rng.randrange(epochs), rng.randrange(groups), name, rng.choice([0, 0, 1, 7]))
            if all(row[:3] != other[:3] for other in home):
                home.append(row)
    return homes


def read(rows: list[Row]) -> HomeColumns:
    """What would be read of an engine store with these rows."""
    index, uses = MemoryIndex(), np.zeros(len(rows), USES_RECORD)
    for at, row in enumerate(rows):
        parent = key(row.name[:-1], row.group) if row.name[:-1] else None
        index.put([BlockRecord(row.epoch, key(row.name, row.group), Slot(0, at), at + 1, parent)])
        uses[at] = (at + 1, row.uses, 100 * row.uses)
    assert index.flush(1)
    return join_home(index.block_columns(), [SegmentRecord(0, SLOT_BYTES, 1000)], 1, TOKENS, uses)


def one_by_one(rows: list[Row]) -> dict[tuple[str, int, int], tuple[object, ...]]:
    """By hash, epoch and tokens of the first block: what ``described`` says of its prefix."""
    copies: Counter[Node] = Counter()
    uses: dict[Node, Counter[int]] = defaultdict(Counter)
    for row in rows:
        node = (row.epoch, TOKENS[row.group], row.name)
        copies[node] += 1
        uses[node][row.group] += row.uses
    below: dict[Node, list[Node]] = defaultdict(list)
    for epoch, tokens, name in copies:
        below[epoch, tokens, name[:-1]].append((epoch, tokens, name))

    def ends(node: Node) -> int:
        return sum(map(ends, below[node])) or 1

    def all_bytes(node: Node) -> int:
        return SLOT_BYTES * copies[node] + sum(map(all_bytes, below[node]))

    found = {}
    for node in copies:
        epoch, tokens, name = node
        above = (epoch, tokens, name[:-1])
        if above in copies and len(below[above]) == 1:
            continue
        chain = [node]
        while len(below[chain[-1]]) == 1:
            chain += below[chain[-1]]
        is_whole = all((epoch, tokens, name[:length]) in copies for length in range(1, len(name)))
        used = [max(uses[each].values()) for each in chain]
        found[key(name)[:-2].hex(), epoch, tokens] = (
            *(len(chain), SLOT_BYTES * sum(copies[each] for each in chain), all_bytes(node)),
            *((len(name) - 1) * tokens if is_whole else None, len(chain) * tokens),
            *(sum(used), used[0], used[-1]),
            *(ends(node), len(below[chain[-1]])),
        )
    return found


def described(prefix: Prefix) -> tuple[object, ...]:
    return (
        *(prefix.blocks, prefix.bytes, prefix.bytes + prefix.below_bytes),
        *(prefix.start_tokens, prefix.tokens),
        *(prefix.uses, prefix.first_uses, prefix.last_uses),
        *(prefix.chains, prefix.children),
    )


@pytest.mark.parametrize("seed", range(40))
def test_prefixes_are_those_of_one_by_one(seed):
    homes = random_homes(random.Random(seed))
    expected = one_by_one([row for rows in homes for row in rows])
    blocks = join([read(rows) for rows in homes])
    tree = find_prefixes(blocks, 10_000, shared_only=False)
    listed = list(each_prefix(tree.tree))
    found = {(each.key, each.epoch, each.block_tokens): described(each) for _, each in listed}
    deep = tree.total - len(listed)
    assert {name: expected[name] for name in found} == found
    assert len(expected) == tree.total and (deep == 0 or max(len(lead) for lead, _ in listed) == 2 * 11)
    few = find_prefixes(blocks, 7)
    shown = [each for _, each in each_prefix(few.tree)]
    assert len(shown) == min(7, few.shared) or deep
    assert all(each.hidden_children == each.children - len(each.tree) for each in shown)
    assert few.hidden_bytes + sum(each.bytes for each in shown) == SLOT_BYTES * sum(map(len, homes))
    assert few.hidden_blocks + sum(each.blocks for each in shown) == sum(each[0] for each in expected.values())
