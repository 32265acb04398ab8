# SPDX-License-Identifier: Apache-2.0
"""The tree of prefixes, over random forests, beside one that is made block by block."""

from __future__ import annotations

import random
from collections import defaultdict

import numpy as np
import pytest

from kvdisk.blocks import BlockKey, make_block_key
from kvdisk.cli.indexes import HomeColumns, join, join_home
from kvdisk.cli.prefixes import Prefix, each_prefix, find_prefixes, grow_forest
from kvdisk.device.uses import USES_RECORD
from kvdisk.index.base import BlockColumns, SegmentRecord
from kvdisk.index.columns import ascending

TOKENS = (16, 16, 32)
SLOT_BYTES = 4096
Name = tuple[int, int, int]
"""Epoch, tokens of a block, number."""


class Wood:
    """Blocks in homes, by their numbers: what the index would have, and what the tree must be."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        rng = self.rng
        self.rows: list[list[tuple[int, int, int, int | None, int]]] = [[] for _ in range(rng.choice([1, 1, 2, 3]))]
        groups, epochs = rng.choice([1, 1, 2, 3]), rng.choice([1, 1, 2])
        count = rng.choice([0, 1, 5, 40, 120])
        parents: list[int | None] = []
        for number in range(count):
            parents.append(rng.choice([None, 1000 + number, number - 1, number - 1, rng.randrange(max(1, number))]))
            if number == 0 and parents[0] is not None and parents[0] < 1000:
                parents[0] = None
        seen = set()
        for number, parent in enumerate(parents):
            for _ in range(rng.choice([1, 1, 2, 4])):
                home, group, epoch = rng.randrange(len(self.rows)), rng.randrange(groups), rng.randrange(epochs)
                if (home, group, epoch, number) not in seen:
                    seen.add((home, group, epoch, number))
                    self.rows[home].append((epoch, group, number, parent, rng.choice([0, 0, 1, 7])))

    @staticmethod
    def key(number: int, group: int) -> BlockKey:
        return make_block_key(number.to_bytes(4, "big") * 8, group)

    def home(self, at: int) -> HomeColumns:
        rows = self.rows[at]
        keys = [self.key(number, group) for _, group, number, _, _ in rows]
        order = ascending(np.array([row[0] for row in rows], np.uint64), keys).tolist()
        sorted_rows = [rows[place] for place in order]
        parents = [b"" if parent is None else self.key(parent, group) for _, group, _, parent, _ in sorted_rows]
        slots = np.arange(len(rows)).astype(np.uint32)
        columns = BlockColumns(
            np.array([row[0] for row in sorted_rows], np.uint64),
            [keys[place] for place in order],
            np.zeros(len(rows), np.uint32),
            slots,
            np.arange(1, len(rows) + 1).astype(np.uint64),
            b"".join(parents),
            np.array(list(map(len, parents)), np.int64),
            np.zeros(len(rows), np.uint32),
        )
        uses = np.zeros(len(rows), USES_RECORD)
        uses["generation"], uses["uses"] = columns.generations, [row[4] for row in sorted_rows]
        uses["last_use_s"] = uses["uses"] * 100
        return join_home(columns, [SegmentRecord(0, SLOT_BYTES, 1000)], 1, TOKENS, uses)

    def expected(self) -> dict[tuple[str, int, int], tuple[object, ...]]:
        """By hash, epoch and tokens of the first block: what the prefix is."""
        above: dict[Name, Name] = {}
        copies: dict[Name, int] = defaultdict(int)
        uses: dict[Name, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        lacking: set[Name] = set()
        for rows in self.rows:
            for epoch, group, number, parent, used in rows:
                name = (epoch, TOKENS[group], number)
                copies[name] += 1
                uses[name][group] += used
                if parent is not None:
                    above[name] = (epoch, TOKENS[group], parent)
        for name, parent_name in list(above.items()):
            if parent_name not in copies:
                lacking.add(name)
                del above[name]
        below: dict[Name, list[Name]] = defaultdict(list)
        for name, parent_name in above.items():
            below[parent_name].append(name)
        found = {}
        for name in copies:
            if name in above and len(below[above[name]]) == 1:
                continue
            chain = [name]
            while len(below[chain[-1]]) == 1:
                chain.append(below[chain[-1]][0])
            depth, top = 0, name
            while top in above:
                depth, top = depth + 1, above[top]
            blocks = [max(uses[each].values()) for each in chain]
            found[self.key(name[2], 0)[:-2].hex(), name[0], name[1]] = (
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
    return (
        prefix.blocks,
        prefix.bytes,
        prefix.start_tokens,
        (prefix.uses, prefix.first_uses, prefix.last_uses),
        prefix.chains,
        prefix.children,
    )


@pytest.mark.parametrize("seed", range(60))
def test_prefixes_are_those_of_one_by_one(seed):
    wood = Wood(seed)
    blocks = join([wood.home(at) for at in range(len(wood.rows))])
    forest = grow_forest(blocks)
    expected = wood.expected()
    tree = find_prefixes(blocks, forest, 10_000, shared_only=False)
    listed = list(each_prefix(tree.tree))
    found = {(each.key, each.epoch, each.block_tokens): described(each) for _, each in listed}
    deep = tree.total - len(listed)
    assert {name: expected[name] for name in found} == found
    assert len(expected) == tree.total and (deep == 0 or max(depth for depth, _ in listed) == 11)
    few = find_prefixes(blocks, forest, 7)
    shown = [each for _, each in each_prefix(few.tree)]
    assert len(shown) <= 7 and all(each.uses is not None for each in shown)
    assert few.hidden_bytes + sum(each.bytes for each in shown) == SLOT_BYTES * sum(map(len, wood.rows))
    assert few.hidden_blocks + sum(each.blocks for each in shown) == sum(each[0] for each in expected.values())
