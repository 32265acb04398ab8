# SPDX-License-Identifier: Apache-2.0
"""The tree of prefixes, over random forests, beside one that is made block by block."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from typing import NamedTuple

import numpy as np
import pytest

from kvdisk.blocks import BlockKey, Slot, make_block_key
from kvdisk.cli.indexes import HomeColumns, join, join_home
from kvdisk.cli.prefixes import Prefix, each_prefix, find_prefixes
from kvdisk.device.uses import USES_RECORD
from kvdisk.index.base import BlockRecord, SegmentRecord
from kvdisk.index.memory_index import MemoryIndex

TOKENS = (16, 16, 32)
SLOT_BYTES = 4096
Name = tuple[int, int, int]
"""Epoch, tokens of a block, number."""


class Row(NamedTuple):
    """A copy of a block. Blocks are numbered; a parent of 1000 or more is one that nobody has."""

    epoch: int
    group: int
    number: int
    parent: int | None
    uses: int


def key(number: int, group: int = 0) -> BlockKey:
    return make_block_key(number.to_bytes(4, "big") * 8, group)


def random_homes(rng: random.Random) -> list[list[Row]]:
    homes: list[list[Row]] = [[] for _ in range(rng.choice([1, 1, 2, 3]))]
    groups, epochs = rng.choice([1, 1, 2, 3]), rng.choice([1, 1, 2])
    for number in range(rng.choice([0, 1, 5, 40, 120])):
        before = number - 1 if number else None
        parent = rng.choice([None, 1000 + number, before, before, rng.randrange(number) if number else None])
        places = {
            (rng.randrange(len(homes)), rng.randrange(groups), rng.randrange(epochs))
            for _ in range(rng.choice([1, 1, 2, 4]))
        }
        for home, group, epoch in sorted(places):
            homes[home].append(Row(epoch, group, number, parent, rng.choice([0, 0, 1, 7])))
    return homes


def read(rows: list[Row]) -> HomeColumns:
    """What would be read of an engine store with these rows."""
    index, uses = MemoryIndex(), np.zeros(len(rows), USES_RECORD)
    for at, row in enumerate(rows):
        parent = None if row.parent is None else key(row.parent, row.group)
        index.put([BlockRecord(row.epoch, key(row.number, row.group), Slot(0, at), at + 1, parent)])
        uses[at] = (at + 1, row.uses, 100 * row.uses)
    assert index.flush(1)
    return join_home(index.block_columns(), [SegmentRecord(0, SLOT_BYTES, 1000)], 1, TOKENS, uses)


def one_by_one(homes: list[list[Row]]) -> dict[tuple[str, int, int], tuple[object, ...]]:
    """By hash, epoch and tokens of the first block: what ``described`` says of its prefix."""
    copies: Counter[Name] = Counter()
    above: dict[Name, Name] = {}
    uses: dict[Name, Counter[int]] = defaultdict(Counter)
    for row in (row for rows in homes for row in rows):
        name = (row.epoch, TOKENS[row.group], row.number)
        copies[name] += 1
        uses[name][row.group] += row.uses
        if row.parent is not None:
            above[name] = (row.epoch, TOKENS[row.group], row.parent)
    lacking = {name for name, parent in above.items() if parent not in copies}
    below: dict[Name, list[Name]] = defaultdict(list)
    for name in above.keys() - lacking:
        below[above[name]].append(name)
    found = {}
    for name in copies:
        if name in above and name not in lacking and len(below[above[name]]) == 1:
            continue
        chain, depth, top = [name], 0, name
        while len(below[chain[-1]]) == 1:
            chain.append(below[chain[-1]][0])
        while top in above and top not in lacking:
            depth, top = depth + 1, above[top]
        blocks = [max(uses[each].values()) for each in chain]
        found[key(name[2])[:-2].hex(), name[0], name[1]] = (
            len(chain),
            SLOT_BYTES * sum(copies[each] for each in chain),
            None if top in lacking else depth * name[1],
            (sum(blocks), blocks[0], blocks[-1]),
            _ends(name, below),
            len(below[chain[-1]]),
        )
    return found


def _ends(name: Name, below: dict[Name, list[Name]]) -> int:
    return sum(_ends(child, below) for child in below[name]) if below[name] else 1


def described(prefix: Prefix) -> tuple[object, ...]:
    uses = (prefix.uses, prefix.first_uses, prefix.last_uses)
    return prefix.blocks, prefix.bytes, prefix.start_tokens, uses, prefix.chains, prefix.children


@pytest.mark.parametrize("seed", range(60))
def test_prefixes_are_those_of_one_by_one(seed):
    homes = random_homes(random.Random(seed))
    expected = one_by_one(homes)
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
    assert few.hidden_bytes + sum(each.bytes for each in shown) == SLOT_BYTES * sum(map(len, homes))
    assert few.hidden_blocks + sum(each.blocks for each in shown) == sum(each[0] for each in expected.values())
