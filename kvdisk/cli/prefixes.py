# SPDX-License-Identifier: Apache-2.0
"""The prefixes that a namespace's blocks share, as a tree, from the parents that the index has.

A node is a block, however many homes hold a copy of it. KV-cache groups whose blocks have the same
size in tokens share their nodes, since the same tokens have the same hash. Nodes that follow each
other without a branch are one prefix. The tree is cut to a number of prefixes: those of which most
is used (bytes times uses; where uses are not known, bytes times the other chains that share them),
with those that lead there.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
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
    of its blocks together, of its first and of its last block; null where no home has a USES file;
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
    """Nodes, and of each its parent (NONE: a root) and depth. ``node_of``: of each row, by home.

    ``is_whole``: whether the chain begins here, and not behind a block that nobody has.
    """

    node_of: list[_Ints]
    parents: _Ints
    depths: _Ints
    is_whole: NDArray[np.bool_]
    first_rows: _Ints
    """Of each node, one of its rows, counted over all homes."""


def grow_forest(homes: Sequence[HomeColumns], block_tokens: Sequence[int | None]) -> Forest:
    """Return the nodes of all homes of a namespace. ``block_tokens``: by group."""
    counts = [len(home.names) for home in homes]
    if len(homes) == 1 and len(np.unique(homes[0].groups)) <= 1:
        (home,) = homes
        node_of, parents = np.arange(counts[0]), home.parents.copy()
        lacks = (home.columns.parent_bytes > 0) & (parents == NONE)
        first_rows = node_of
    else:
        names = [_node_names(home, home.names, block_tokens) for home in homes]
        every = [name for part in names for name in part]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(every))}
        node_of = np.fromiter(map(numbers.__getitem__, every), np.int64, len(every))
        wanted = [name for home in homes for name in _node_names(home, home.parent_names, block_tokens)]
        found = np.fromiter(map(numbers.get, wanted, repeat(NONE)), np.int64, len(wanted))
        parents = np.full(len(numbers), NONE, np.int64)
        parents[node_of[found != NONE]] = found[found != NONE]
        lacks = np.zeros(len(numbers), np.bool_)
        lacks[node_of[np.array(list(map(bool, wanted)), np.bool_)]] = True
        lacks &= parents == NONE
        first_rows = np.zeros(len(numbers), np.int64)
        first_rows[node_of[::-1]] = np.arange(len(every))[::-1]
    depths, tops = _climb(parents)
    lost = lacks[tops]
    cuts = np.cumsum([0, *counts])
    parts = [node_of[start:end] for start, end in pairwise(cuts.tolist())]
    return Forest(parts, parents, depths, ~lost, first_rows)


def _node_names(home: HomeColumns, names: Sequence[bytes], block_tokens: Sequence[int | None]) -> list[bytes]:
    """Return names without group, with what tells other block sizes and epochs apart."""
    sizes = [block_tokens[group] if group < len(block_tokens) else None for group in range(len(block_tokens) + 1)]
    tokens = np.array([0 if size is None else size for size in sizes], ">u4")
    classes = tokens[np.minimum(home.groups, len(block_tokens))].tobytes()
    epochs = home.columns.epochs.astype(">u8").tobytes()
    has_epochs = len(home.names) > 0 and home.columns.epochs[0] != home.columns.epochs[-1]
    start = 8 if has_epochs else 0
    return [
        name and classes[4 * row : 4 * row + 4] + epochs[8 * row : 8 * row + 8] + name[start:-GROUP_BYTES]
        for row, name in enumerate(names)
    ]


def _climb(parents: _Ints) -> tuple[_Ints, _Ints]:
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
    if circling.any():
        parents[circling] = NONE
        depths[circling] = 0
        above[circling] = own[circling]
    return depths, above


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
    below_blocks: _Ints
    below_bytes: _Ints
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
    shown = shared if shared_only else np.ones(len(shared), np.bool_)

    kept = _choose(stretches, roots, most, shown)

    def describe(number: int) -> Prefix:
        node, last = int(stretches.first_nodes[number]), int(stretches.last_nodes[number])
        at, row = locate(homes, int(forest.first_rows[node]))
        home = homes[at]
        group = int(home.groups[row])
        tokens = block_tokens[group] if group < len(block_tokens) else None
        blocks, children = int(stretches.blocks[number]), int(stretches.children[number])
        below = [child for child in kept[number] if child in kept]
        return Prefix(
            key=home.columns.keys[row][:-GROUP_BYTES].hex(),
            epoch=int(home.columns.epochs[row]),
            block_tokens=tokens,
            start_tokens=int(forest.depths[node]) * tokens if tokens is not None and forest.is_whole[node] else None,
            tokens=None if tokens is None else blocks * tokens,
            blocks=blocks,
            bytes=int(stretches.bytes[number]),
            chains=int(stretches.chains[number]),
            uses=int(stretches.uses[number]) if told else None,
            first_uses=int(node_uses[node]) if told else None,
            last_uses=int(node_uses[last]) if told else None,
            last_use_s=int(stretches.last_use_s[number]) if told else None,
            below_blocks=int(stretches.below_blocks[number]),
            below_bytes=int(stretches.below_bytes[number]),
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
    """Return the position of the home of a row that counts over all homes, and its row there."""
    for at, home in enumerate(homes):
        if row < len(home.names):
            return at, row
        row -= len(home.names)
    raise AssertionError("no home has that row")


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
    parents = forest.parents
    count = len(parents)
    children = np.bincount(parents[parents != NONE], minlength=count)
    begins = (parents == NONE) | (children[parents] != 1)
    first_of = np.where(begins, np.arange(count), parents)
    for _ in range(count.bit_length() + 1):
        further = first_of[first_of]
        if np.array_equal(further, first_of):
            break
        first_of = further
    first_nodes = np.flatnonzero(begins)
    number_of = np.zeros(count, np.int64)
    number_of[first_nodes] = np.arange(len(first_nodes))
    numbers = number_of[first_of]
    total = len(first_nodes)
    blocks = np.bincount(numbers, minlength=total)
    last_nodes = np.zeros(total, np.int64)
    ends = np.flatnonzero(children != 1)
    last_nodes[numbers[ends]] = ends
    last_use_s = np.zeros(total, np.int64)
    np.maximum.at(last_use_s, numbers, node_last_s)
    above = parents[first_nodes]
    stretch_parents = np.where(above == NONE, NONE, numbers[above])
    own_bytes = np.bincount(numbers, node_bytes, total)
    own_used = np.bincount(numbers, node_bytes.astype(np.float64) * node_uses, total)
    fan = np.bincount(stretch_parents[stretch_parents != NONE], minlength=total)
    order = np.argsort(-forest.depths[first_nodes], kind="stable").tolist()
    chains = _fold_up((fan == 0).astype(np.int64), stretch_parents, order, operator.add)
    all_blocks = _fold_up(blocks, stretch_parents, order, operator.add)
    all_bytes = _fold_up(own_bytes.astype(np.int64), stretch_parents, order, operator.add)
    ranks = own_used if told else own_bytes * (chains - 1)
    return _Stretches(
        first_nodes,
        last_nodes,
        stretch_parents,
        blocks,
        own_bytes.astype(np.int64),
        np.bincount(numbers, node_uses, total).astype(np.int64),
        last_use_s,
        chains,
        fan,
        all_blocks - blocks,
        all_bytes - own_bytes.astype(np.int64),
        # Nothing hides behind what leads to it.
        _fold_up(ranks.astype(np.float64), stretch_parents, order, max),
    )


def _fold_up(
    values: NDArray[Any], parents: _Ints, order: Sequence[int], join: Callable[[Any, Any], Any]
) -> NDArray[Any]:
    """Return each value joined with all below it. ``order``: those below come before."""
    joined, above = values.tolist(), parents.tolist()
    for number in order:
        parent = above[number]
        if parent != NONE:
            joined[parent] = join(joined[parent], joined[number])
    return np.array(joined, values.dtype)


def _choose(stretches: _Stretches, roots: _Ints, most: int, shown: NDArray[np.bool_]) -> dict[int, list[int]]:
    """Return the prefixes to show, each with its children, the best first; below NONE the roots.

    Not all of these children and roots are shown themselves.
    """
    sizes = stretches.bytes + stretches.below_bytes
    by_parent = np.argsort(stretches.parents, kind="stable")
    starts = np.searchsorted(stretches.parents[by_parent], np.arange(len(stretches.parents) + 1))

    def best(numbers: _Ints) -> list[int]:
        numbers = numbers[shown[numbers]]
        found: list[int] = numbers[np.lexsort((numbers, -sizes[numbers], -stretches.ranks[numbers]))][:most].tolist()
        return found

    def waiting(numbers: list[int], depth: int) -> list[tuple[float, int, int, int]]:
        return [(-float(stretches.ranks[number]), -int(sizes[number]), number, depth) for number in numbers]

    kept = {NONE: best(roots)}
    heap = waiting(kept[NONE], 0)
    heapq.heapify(heap)
    while heap and len(kept) <= most:
        *_, number, depth = heapq.heappop(heap)
        kept[number] = best(by_parent[starts[number] : starts[number + 1]]) if depth + 1 < DEEPEST else []
        for item in waiting(kept[number], depth + 1):
            heapq.heappush(heap, item)
    return kept
