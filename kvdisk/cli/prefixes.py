# SPDX-License-Identifier: Apache-2.0
"""The prefixes that a namespace's blocks share, as a tree, from the parents in the index.

A node is a block, however many engine stores hold a copy of it. KV-cache groups whose blocks have
the same size in tokens share their nodes, since the same tokens have the same hash. Nodes that
follow each other without a branch are one prefix. The tree is cut to a number of prefixes: those
that are used most (bytes times uses; where uses are not known, bytes times the other chains that
share them), and those that lead to them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvdisk.blocks import GROUP_BYTES
from kvdisk.cli.indexes import NONE, HomeColumns

DEEPEST = 12
"""Branches from a root to the deepest prefix that is shown."""
_GROUP_BITS = 16
_USES = ("uses", "first_uses", "last_uses", "last_use_s")
"""Fields that are null where USES has no block."""

_Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Prefix:
    """Blocks that follow each other without a branch: the KV of all requests that begin so.

    ``key``: hash of the first block, hex, without its KV-cache group. ``bytes``: of the slots of
    all copies. ``chains``: ends of chains that begin with it, at least 1. ``start_tokens``: tokens
    before it; null where the block before it is not here. ``tokens``: tokens in it. ``uses``: of
    all its blocks together, ``first_uses`` and ``last_uses``: of its first and its last block; null
    where USES has none. A block that several KV-cache groups have counts as often as in the group
    where it was used most. ``last_use_s``: 0 for never. ``below_blocks``, ``below_bytes``: of all
    that follows it. ``children``: how many follow it directly; ``hidden_children`` of them are not
    in ``tree``.
    """

    key: str
    epoch: int
    block_tokens: int | None
    start_tokens: int | None
    tokens: int | None
    blocks: int
    bytes: int
    chains: int
    uses: int | None
    first_uses: int | None
    last_uses: int | None
    last_use_s: int | None
    below_blocks: int
    below_bytes: int
    children: int
    hidden_children: int
    tree: tuple[Prefix, ...]


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """The biggest prefixes of a namespace, the most used bytes first.

    ``total``: how many prefixes there are. ``shared``: how many of them several chains begin with,
    or were used again. ``roots``: how many have none before them. ``chains``: how many ends of
    chains there are. ``hidden_roots``, ``hidden_blocks``, ``hidden_bytes``: what is not in
    ``tree``.
    """

    total: int
    shared: int
    roots: int
    chains: int
    hidden_roots: int
    hidden_blocks: int
    hidden_bytes: int
    tree: tuple[Prefix, ...]


def each_prefix(prefixes: Sequence[Prefix], lead: str | None = None) -> Iterator[tuple[str, Prefix]]:
    """Yield each prefix before those that follow it, with the lines of the tree that lead to it."""
    for prefix in prefixes:
        is_last = prefix is prefixes[-1]
        yield "" if lead is None else f"{lead}{'└─' if is_last else '├─'}", prefix
        yield from each_prefix(prefix.tree, "" if lead is None else f"{lead}{'  ' if is_last else '│ '}")


class Forest(NamedTuple):
    """Nodes in the order of rows. For each: its parent (NONE for a root), its depth, and its first
    row.

    ``node_of``: the node of each row. ``is_whole``: whether the node's chain begins at its root,
    and not behind a block that nobody has.
    """

    node_of: _Ints
    parents: _Ints
    depths: _Ints
    is_whole: NDArray[np.bool_]
    first_rows: _Ints


def grow_forest(blocks: HomeColumns) -> Forest:
    """Return the nodes of a namespace's blocks. Groups of one block size share nodes."""
    first_rows, node_of, above = blocks.identify(blocks.tokens)
    parents = np.full(len(first_rows), NONE, np.int64)
    parents[node_of[above != NONE]] = above[above != NONE]
    lacks = np.zeros(len(first_rows), np.bool_)
    lacks[node_of[blocks.above != 0]] = True
    lacks &= parents == NONE
    depths, tops = climb(parents)
    return Forest(node_of, parents, depths, ~lacks[tops], first_rows)


def climb(parents: _Ints) -> tuple[_Ints, _Ints]:
    """Return each node's depth and root. Cuts ``parents`` where the way up is a circle."""
    count = len(parents)
    own = np.arange(count)
    above = np.where(parents == NONE, own, parents)
    depths = (parents != NONE).astype(np.int64)
    for _ in range(count.bit_length() + 1):  # twice as far each time
        further = above[above]
        if np.array_equal(further, above):
            break
        depths += depths[above]
        above = further
    circling = parents[above] != NONE
    parents[circling], depths[circling], above[circling] = NONE, 0, own[circling]
    return depths, above


def fold_up(values: NDArray[Any], parents: _Ints, depths: _Ints, join: Callable[[Any, Any], Any]) -> NDArray[Any]:
    """Return each value joined with all values below it."""
    joined, above = values.tolist(), parents.tolist()
    for number in np.argsort(-depths, kind="stable").tolist():
        if above[number] != NONE:
            joined[above[number]] = join(joined[above[number]], joined[number])
    return np.array(joined, values.dtype)


class _Stretches(NamedTuple):
    """Prefixes, one row each. ``facts``: numeric fields of ``Prefix``, by their names.
    ``all_bytes``: with all that follows. ``ranks``: the highest is shown first; none is above that
    of its parent."""

    first_nodes: _Ints
    parents: _Ints
    facts: dict[str, _Ints]
    all_bytes: _Ints
    ranks: NDArray[np.float64]


def find_prefixes(blocks: HomeColumns, most: int, *, shared_only: bool = True) -> PrefixTree:
    """Return the tree of the biggest prefixes of a namespace, at most ``most`` of them.

    ``shared_only``: leave out those that one chain has and no request has used again.
    """
    forest = grow_forest(blocks)
    stretches = _fold(blocks, forest)
    facts, parents = stretches.facts, stretches.parents
    has_uses = bool(blocks.is_known.any())
    shared = (facts["chains"] > 1) | (facts["uses"] > 0)
    kept = _choose(stretches, shared if shared_only else np.ones_like(shared), most)

    def describe(number: int) -> Prefix:
        node = int(stretches.first_nodes[number])
        row = int(forest.first_rows[node])
        size = int(blocks.tokens[row])
        tokens = None if size == NONE else size
        below = kept.get(number, [])
        mine = {name: int(column[number]) for name, column in facts.items()}
        return Prefix(
            key=blocks.columns.keys[row][:-GROUP_BYTES].hex(),
            epoch=int(blocks.columns.epochs[row]),
            block_tokens=tokens,
            start_tokens=int(forest.depths[node]) * tokens if tokens is not None and forest.is_whole[node] else None,
            tokens=None if tokens is None else mine["blocks"] * tokens,
            hidden_children=mine["children"] - len(below),
            tree=tuple(map(describe, below)),
            **(mine if has_uses else mine | dict.fromkeys(_USES)),
        )

    tree = tuple(map(describe, kept.get(NONE, [])))
    shown = [number for numbers in kept.values() for number in numbers]
    roots = parents == NONE
    return PrefixTree(
        total=len(parents),
        shared=int(np.count_nonzero(shared)),
        roots=int(np.count_nonzero(roots)),
        chains=int(facts["chains"][roots].sum()),
        hidden_roots=int(np.count_nonzero(roots)) - len(tree),
        hidden_blocks=int(facts["blocks"].sum() - facts["blocks"][shown].sum()),
        hidden_bytes=int(facts["bytes"].sum() - facts["bytes"][shown].sum()),
        tree=tree,
    )


def _sum_copies(blocks: HomeColumns, nodes: _Ints, count: int) -> tuple[_Ints, _Ints, _Ints]:
    """Return bytes, uses and last use of each node, over its copies."""
    node_bytes = np.bincount(nodes, blocks.slot_bytes, count).astype(np.int64)
    # A request uses the blocks of all groups at once: the group with the most uses counts.
    of_group, at = np.unique(nodes << _GROUP_BITS | blocks.groups, return_inverse=True)
    group_uses = np.bincount(at, blocks.uses).astype(np.int64)
    node_uses, last_use_s = np.zeros(count, np.int64), np.zeros(count, np.int64)
    np.maximum.at(node_uses, of_group >> _GROUP_BITS, group_uses)
    np.maximum.at(last_use_s, nodes, blocks.last_use_s)
    return node_bytes, node_uses, last_use_s


def _fold(blocks: HomeColumns, forest: Forest) -> _Stretches:
    """Join nodes that follow each other without a branch."""
    parents, count = forest.parents, len(forest.parents)
    node_bytes, node_uses, node_last_s = _sum_copies(blocks, forest.node_of, count)
    children = np.bincount(parents[parents != NONE], minlength=count)
    begins = (parents == NONE) | (children[parents] != 1)
    _, first_of = climb(np.where(begins, NONE, parents))
    first_nodes, numbers = np.unique(first_of, return_inverse=True)
    total = len(first_nodes)
    last_nodes, last_use_s = np.zeros(total, np.int64), np.zeros(total, np.int64)
    ends = np.flatnonzero(children != 1)
    last_nodes[numbers[ends]] = ends
    np.maximum.at(last_use_s, numbers, node_last_s)
    above, depths = parents[first_nodes], forest.depths[first_nodes]
    above = np.where(above == NONE, NONE, numbers[above])
    own_blocks = np.bincount(numbers, minlength=total)
    own_bytes = np.bincount(numbers, node_bytes, total).astype(np.int64)
    all_bytes = fold_up(own_bytes, above, depths, operator.add)
    fan = np.bincount(above[above != NONE], minlength=total)
    chains = fold_up((fan == 0).astype(np.int64), above, depths, operator.add)
    used_bytes = np.bincount(numbers, node_bytes.astype(np.float64) * node_uses, total)
    facts = {
        "blocks": own_blocks,
        "bytes": own_bytes,
        "chains": chains,
        "uses": np.bincount(numbers, node_uses, total).astype(np.int64),
        "first_uses": node_uses[first_nodes],
        "last_uses": node_uses[last_nodes],
        "last_use_s": last_use_s,
        "below_blocks": fold_up(own_blocks, above, depths, operator.add) - own_blocks,
        "below_bytes": all_bytes - own_bytes,
        "children": fan,
    }
    own_ranks = used_bytes if blocks.is_known.any() else own_bytes * (chains - 1)
    # A prefix ranks as high as the best one below it, so that what leads to a prefix never hides
    # it.
    ranks = fold_up(own_ranks.astype(np.float64), above, depths, max)
    return _Stretches(first_nodes, above, facts, all_bytes, ranks)


def _choose(stretches: _Stretches, candidates: NDArray[np.bool_], most: int) -> dict[int, list[int]]:
    """Return the prefixes to show, by their parents, the best first; the roots are under NONE.

    The parent of each comes before it in the order, and has at least two chains: so it is shown
    too.
    """
    depths, _ = climb(stretches.parents.copy())
    order = np.lexsort((np.arange(len(depths)), depths, -stretches.all_bytes, -stretches.ranks))
    order = order[(candidates & (depths < DEEPEST))[order]][:most]
    kept: dict[int, list[int]] = {}
    for number, parent in zip(order.tolist(), stretches.parents[order].tolist(), strict=True):
        kept.setdefault(parent, []).append(number)
    return kept
