# SPDX-License-Identifier: Apache-2.0
"""The prefixes that a namespace's blocks share, as a tree, from the parents that the index has.

A node is a block, however many engine stores hold a copy of it. KV-cache groups whose blocks have
the same size in tokens share their nodes, since the same tokens have the same hash. Nodes that
follow each other without a branch are one prefix. The tree is cut to a number of prefixes: those of
which most is used (bytes times uses; where uses are not known, bytes times the other chains that
share them), with those that lead there.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvdisk.blocks import GROUP_BYTES
from kvdisk.cli.indexes import NONE, HomeColumns

DEEPEST = 12
"""Branches from a root to the last prefix that is shown."""
_MOST_GROUPS = 256

_Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Prefix:
    """Blocks that follow each other without a branch: the KV of all requests that begin so.

    ``key``: hash of the first block, hex, without its KV-cache group. ``bytes``: of the slots of
    all copies. ``chains``: ends of chains that begin with it, at least 1. ``start_tokens``,
    ``tokens``: tokens before it (null where the block before it is not here), and in it. ``uses``:
    of its blocks together, of its first and of its last block; null where there is no USES file;
    a block that several KV-cache groups have counts as often as in that where it was used most.
    ``last_use_s``: 0: never. ``below_blocks``, ``below_bytes``: of all that follows it.
    ``children``: how many follow it, of which ``hidden_children`` are not in ``tree``.
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


def each_prefix(prefixes: Sequence[Prefix], depth: int = 0) -> Iterator[tuple[int, Prefix]]:
    """Yield each prefix before those that follow it, with its depth."""
    for prefix in prefixes:
        yield depth, prefix
        yield from each_prefix(prefix.tree, depth + 1)


class Forest(NamedTuple):
    """Nodes, and of each its parent (NONE: a root) and depth. ``node_of``: of each row, by engine
    store.

    ``is_whole``: whether the chain begins here, and not behind a block that nobody has.
    ``first_rows``: one of the node's rows, counted over all engine stores.
    """

    node_of: list[_Ints]
    parents: _Ints
    depths: _Ints
    is_whole: NDArray[np.bool_]
    first_rows: _Ints


def grow_forest(homes: Sequence[HomeColumns], block_tokens: Sequence[int | None]) -> Forest:
    """Return the nodes of all engine stores of a namespace. ``block_tokens``: by group."""
    every = [name for home in homes for name in _node_names(home, home.columns.keys, block_tokens)]
    above = [name for home in homes for name in _node_names(home, home.columns.each_parent(), block_tokens)]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(every))}
    node_of = np.fromiter(map(numbers.__getitem__, every), np.int64, len(every))
    found = np.fromiter(map(numbers.get, above, repeat(NONE)), np.int64, len(above))
    parents = np.full(len(numbers), NONE, np.int64)
    parents[node_of[found != NONE]] = found[found != NONE]
    lacks = np.zeros(len(numbers), np.bool_)
    lacks[node_of[np.array(list(map(bool, above)), np.bool_)]] = True
    lacks &= parents == NONE
    first_rows = np.zeros(len(numbers), np.int64)
    first_rows[node_of[::-1]] = np.arange(len(every))[::-1]
    depths, tops = climb(parents)
    cuts = np.cumsum([len(home.groups) for home in homes])[:-1].tolist()
    return Forest(np.split(node_of, cuts)[: len(homes)], parents, depths, ~lacks[tops], first_rows)


def _node_names(home: HomeColumns, keys: Sequence[bytes], block_tokens: Sequence[int | None]) -> list[bytes]:
    """Return keys without group, with what tells other block sizes and epochs apart."""
    tokens = np.array([*(size or 0 for size in block_tokens), 0], ">u4")
    sizes = tokens[np.minimum(home.groups, len(block_tokens))].tobytes()
    epochs = home.columns.epochs.astype(">u8").tobytes()
    return [
        key and sizes[4 * row : 4 * row + 4] + epochs[8 * row : 8 * row + 8] + key[:-GROUP_BYTES]
        for row, key in enumerate(keys)
    ]


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
    """Return each value joined with all below it."""
    joined, above = values.tolist(), parents.tolist()
    for number in np.argsort(-depths, kind="stable").tolist():
        if above[number] != NONE:
            joined[above[number]] = join(joined[above[number]], joined[number])
    return np.array(joined, values.dtype)


class _Stretches(NamedTuple):
    """Prefixes, a row each, in columns: the numbers of ``Prefix``, and what they are ranked by."""

    first_nodes: _Ints
    last_nodes: _Ints
    parents: _Ints
    blocks: _Ints
    bytes: _Ints
    uses: _Ints
    last_use_s: _Ints
    chains: _Ints
    children: _Ints
    all_blocks: _Ints
    all_bytes: _Ints
    ranks: NDArray[np.float64]


def find_prefixes(
    homes: Sequence[HomeColumns],
    forest: Forest,
    block_tokens: Sequence[int | None],
    most: int,
    *,
    shared_only: bool = True,
) -> PrefixTree:
    """Return the tree of the biggest prefixes, at most ``most`` of them.

    ``shared_only``: leave out those that one chain has and no request has used again.
    """
    node_bytes, node_uses, node_last_s = _sum_copies(homes, forest)
    told = any(home.uses is not None for home in homes)
    stretches = _fold(forest, node_bytes, node_uses, node_last_s, told)
    roots = np.flatnonzero(stretches.parents == NONE)
    shared = (stretches.chains > 1) | (stretches.uses > 0)
    kept = _choose(stretches, roots, most, shared if shared_only else np.ones(len(shared), np.bool_))

    def describe(number: int) -> Prefix:
        node, last = int(stretches.first_nodes[number]), int(stretches.last_nodes[number])
        at, row = locate(homes, int(forest.first_rows[node]))
        columns, group = homes[at].columns, int(homes[at].groups[row])
        tokens = block_tokens[group] if group < len(block_tokens) else None
        blocks, children = int(stretches.blocks[number]), int(stretches.children[number])
        own_bytes = int(stretches.bytes[number])
        below = [child for child in kept[number] if child in kept]
        return Prefix(
            key=columns.keys[row][:-GROUP_BYTES].hex(),
            epoch=int(columns.epochs[row]),
            block_tokens=tokens,
            start_tokens=int(forest.depths[node]) * tokens if tokens is not None and forest.is_whole[node] else None,
            tokens=None if tokens is None else blocks * tokens,
            blocks=blocks,
            bytes=own_bytes,
            chains=int(stretches.chains[number]),
            uses=int(stretches.uses[number]) if told else None,
            first_uses=int(node_uses[node]) if told else None,
            last_uses=int(node_uses[last]) if told else None,
            last_use_s=int(stretches.last_use_s[number]) if told else None,
            below_blocks=int(stretches.all_blocks[number]) - blocks,
            below_bytes=int(stretches.all_bytes[number]) - own_bytes,
            children=children,
            hidden_children=children - len(below),
            tree=tuple(map(describe, below)),
        )

    tree = tuple(describe(root) for root in kept[NONE] if root in kept)
    listed = [prefix for _, prefix in each_prefix(tree)]
    return PrefixTree(
        total=len(stretches.parents),
        shared=int(np.count_nonzero(shared)),
        roots=len(roots),
        chains=int(stretches.chains[roots].sum()),
        hidden_roots=len(roots) - len(tree),
        hidden_blocks=len(forest.parents) - sum(prefix.blocks for prefix in listed),
        hidden_bytes=int(node_bytes.sum()) - sum(prefix.bytes for prefix in listed),
        tree=tree,
    )


def locate(homes: Sequence[HomeColumns], row: int) -> tuple[int, int]:
    """Return the position of the engine store of a row that counts over all of them, and its row
    there."""
    for at, home in enumerate(homes):
        if row < len(home.groups):
            return at, row
        row -= len(home.groups)
    raise AssertionError("nobody has that row")


def _sum_copies(homes: Sequence[HomeColumns], forest: Forest) -> tuple[_Ints, _Ints, _Ints]:
    """Return bytes, uses and last use of each node, over its copies."""
    count = len(forest.parents)
    node_bytes = np.zeros(count)
    last_s = np.zeros(count, np.int64)
    by_group: dict[int, NDArray[np.float64]] = {}
    for home, nodes in zip(homes, forest.node_of, strict=True):
        node_bytes += np.bincount(nodes, home.slot_bytes, count)
        if home.uses is None or home.last_use_s is None:
            continue
        np.maximum.at(last_s, nodes, home.last_use_s)
        for group in np.unique(home.groups).tolist()[:_MOST_GROUPS]:
            rows = home.groups == group
            counted = np.bincount(nodes[rows], home.uses[rows], count).astype(np.float64)
            by_group[group] = by_group.get(group, 0.0) + counted
    uses = np.zeros(count)
    for of_group in by_group.values():
        np.maximum(uses, of_group, out=uses)
    return node_bytes.astype(np.int64), uses.astype(np.int64), last_s


def _fold(forest: Forest, node_bytes: _Ints, node_uses: _Ints, node_last_s: _Ints, told: bool) -> _Stretches:
    """Join nodes that follow each other without a branch."""
    parents, count = forest.parents, len(forest.parents)
    children = np.bincount(parents[parents != NONE], minlength=count)
    begins = (parents == NONE) | (children[parents] != 1)
    _, first_of = climb(np.where(begins, NONE, parents))
    first_nodes, numbers = np.unique(first_of, return_inverse=True)
    total = len(first_nodes)
    last_nodes = np.zeros(total, np.int64)
    ends = np.flatnonzero(children != 1)
    last_nodes[numbers[ends]] = ends
    last_use_s = np.zeros(total, np.int64)
    np.maximum.at(last_use_s, numbers, node_last_s)
    above, depths = parents[first_nodes], forest.depths[first_nodes]
    above = np.where(above == NONE, NONE, numbers[above])
    blocks, own_bytes = np.bincount(numbers, minlength=total), np.bincount(numbers, node_bytes, total)
    fan = np.bincount(above[above != NONE], minlength=total)
    chains = fold_up((fan == 0).astype(np.int64), above, depths, operator.add)
    used_bytes = np.bincount(numbers, node_bytes.astype(np.float64) * node_uses, total)
    return _Stretches(
        first_nodes,
        last_nodes,
        above,
        blocks,
        own_bytes.astype(np.int64),
        np.bincount(numbers, node_uses, total).astype(np.int64),
        last_use_s,
        chains,
        fan,
        fold_up(blocks, above, depths, operator.add),
        fold_up(own_bytes.astype(np.int64), above, depths, operator.add),
        # Nothing hides behind what leads to it.
        fold_up(used_bytes if told else own_bytes * (chains - 1), above, depths, max),
    )


def _choose(stretches: _Stretches, roots: _Ints, most: int, shown: NDArray[np.bool_]) -> dict[int, list[int]]:
    """Return the prefixes to show, each with its children, the best first; below NONE the roots.

    Not all of these children and roots are shown themselves.
    """
    by_parent = np.argsort(stretches.parents, kind="stable")
    starts = np.searchsorted(stretches.parents[by_parent], np.arange(len(stretches.parents) + 1))

    def best(numbers: _Ints, depth: int) -> list[tuple[float, int, int, int]]:
        """Return what waits to be shown."""
        numbers = numbers[shown[numbers]]
        order = np.lexsort((numbers, -stretches.all_bytes[numbers], -stretches.ranks[numbers]))[:most]
        return [
            (-float(stretches.ranks[number]), -int(stretches.all_bytes[number]), number, depth)
            for number in numbers[order].tolist()
        ]

    heap = best(roots, 0)
    kept = {NONE: [number for *_, number, _ in heap]}
    while heap and len(kept) <= most:
        *_, number, depth = heapq.heappop(heap)
        further = best(by_parent[starts[number] : starts[number + 1]], depth + 1) if depth + 1 < DEEPEST else []
        kept[number] = [child for *_, child, _ in further]
        for item in further:
            heapq.heappush(heap, item)
    return kept
