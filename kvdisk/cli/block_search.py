# SPDX-License-Identifier: Apache-2.0
"""One block, and the chain it stands in, found among all. For the process ``index_child``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvdisk.blocks import GROUP_BYTES
from kvdisk.cli.block_survey import NONE, HomeColumns
from kvdisk.cli.prefixes import Forest, grow_forest, locate

MOST_NAMED = 5
"""Hashes that are named where a prefix is of several."""


def find_block(
    homes: Sequence[tuple[int, HomeColumns]], block_tokens: Sequence[int | None], wanted: str
) -> dict[str, Any]:
    """Return what a namespace's homes have whose key begins with ``wanted`` (hex).

    ``hashes``: how many different block hashes that are, and ``named`` the first of them. Only where it is one, there
    are ``blocks``: one for each epoch and KV-cache group that has it, with copies and chain. ``homes``: with numbers.
    """
    columns = [home for _, home in homes]
    found = [(at, row) for at, home in enumerate(columns) for row in _rows(home, wanted)]
    hashes = sorted({columns[at].columns.keys[row][:-GROUP_BYTES].hex() for at, row in found})
    answer: dict[str, Any] = {"hashes": len(hashes), "named": hashes[:MOST_NAMED], "blocks": []}
    if len(hashes) == 1:
        forest = grow_forest(columns, block_tokens)
        blocks: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for at, row in found:
            home = columns[at]
            blocks.setdefault((int(home.columns.epochs[row]), int(home.groups[row])), []).append((at, row))
        for (epoch, group), copies in sorted(blocks.items()):
            at, row = copies[0]
            tokens = block_tokens[group] if group < len(block_tokens) else None
            answer["blocks"].append(
                {
                    "key": columns[at].columns.keys[row].hex(),
                    "epoch": epoch,
                    "group": group,
                    "block_tokens": tokens,
                    "copies": [_copy(*homes[at], row) for at, row in copies],
                }
                | _chain(homes, forest, int(forest.node_of[at][row]))
            )
    return answer


def _rows(home: HomeColumns, wanted: str) -> list[int]:
    """Return the rows whose keys begin so."""
    whole = bytes.fromhex(wanted[: len(wanted) // 2 * 2])
    rows = [row for row, key in enumerate(home.columns.keys) if key.startswith(whole)]
    return [row for row in rows if home.columns.keys[row].hex().startswith(wanted)]


def _copy(number: int, home: HomeColumns, row: int) -> dict[str, Any]:
    columns = home.columns
    start = int(columns.parent_bytes[:row].sum())
    parent = columns.parents[start : start + int(columns.parent_bytes[row])]
    is_told = home.uses is not None and home.last_use_s is not None and bool(home.is_known[row])
    return {
        "home": number,
        "segment": int(columns.segments[row]),
        "slot": int(columns.indices[row]),
        "generation": int(columns.generations[row]),
        "parent": parent.hex() or None,
        "stored_s": int(columns.stored_s[row]),
        "uses": int(home.uses[row]) if is_told and home.uses is not None else None,
        "last_use_s": int(home.last_use_s[row]) if is_told and home.last_use_s is not None else None,
    }


def _chain(homes: Sequence[tuple[int, HomeColumns]], forest: Forest, node: int) -> dict[str, Any]:
    """Return the hashes of the chain up to a block, from its head on, and how many blocks follow it directly."""
    way = [node]
    while (parent := int(forest.parents[way[-1]])) != NONE:
        way.append(parent)
    columns = [home for _, home in homes]
    chain = []
    for each in reversed(way):
        at, row = locate(columns, int(forest.first_rows[each]))
        chain.append(columns[at].columns.keys[row][:-GROUP_BYTES].hex())
    return {
        "is_whole": bool(forest.is_whole[node]),
        "chain": chain,
        "children": int(np.count_nonzero(forest.parents == node)),
    }
