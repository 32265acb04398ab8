# SPDX-License-Identifier: Apache-2.0
"""A job of a load in the making: columns, an item a block. Scheduler thread only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvdisk.blocks import CPU, BlockKey, Slot, Tier
from kvdisk.manager.catalog import Catalog
from kvdisk.manager.transfers import MoveDetail, make_details
from kvdisk.messages import Move, make_moves


class LoadDraft:
    """See the module. The columns are those of ``Move`` and ``MoveDetail``, all of one length.

    Blocks are added by ``extend``, and then, with what is known of their copies, by ``found`` or ``await_places``.
    """

    def __init__(self) -> None:
        self.keys: list[BlockKey] = []
        self.generations: list[int] = []
        self.blocks: list[int] = []
        self.cpu: list[Slot | None] = []
        self.nvme: list[Slot | None] = []
        self.parents: list[BlockKey | None] = []
        self.rows: list[int] = []
        self.groups: list[int] = []
        self.positions: list[int] = []

    def extend(self, group: int, positions: Sequence[int], keys: Sequence[BlockKey], blocks: Sequence[int]) -> None:
        """Add blocks of one group, by their positions in the request. ``keys``, ``blocks``: all of the group's."""
        count, first = len(positions), positions[0]
        assert positions[-1] < min(len(keys), len(blocks)), "a block without a key, or without a place on the GPU"
        if positions[-1] - first == count - 1:  # all in a row, as most are
            self.keys += keys[first : first + count]
            self.blocks += blocks[first : first + count]
        else:
            self.keys += [keys[position] for position in positions]
            self.blocks += [blocks[position] for position in positions]
        self.groups += [group] * count
        self.positions += positions

    def found(self, rows: Sequence[int], tier: Tier, catalog: Catalog) -> None:
        """All blocks added last have copies in one tier, as most have: note their rows and those copies."""
        slots, others = (self.cpu, self.nvme) if tier is CPU else (self.nvme, self.cpu)
        slots += catalog.slots(rows, tier)
        others += [None] * len(rows)
        self.rows += rows
        self.generations += map(catalog.generations.__getitem__, rows)
        self.parents += map(catalog.parents.__getitem__, rows)

    def await_places(self, positions: Sequence[int], keys: Sequence[BlockKey]) -> None:
        """The blocks added last have no row, no slot and generation 0 until ``find`` tells.

        ``keys``: of all the group's. Their parents are the blocks before them in their request.
        """
        count = len(positions)
        self.generations += [0] * count
        self.cpu += [None] * count
        self.nvme += [None] * count
        self.parents += [keys[position - 1] if position else None for position in positions]
        self.rows += [-1] * count

    def find(self, start: int, places: Sequence[int], rows: Sequence[int], tier: Tier, catalog: Catalog) -> None:
        """Note the rows, and the copies in a tier, of blocks, whose places are counted from ``start``."""
        slots = self.cpu if tier is CPU else self.nvme
        columns: tuple[tuple[list[Any], Iterable[Any]], ...] = (
            (self.rows, rows),
            (slots, catalog.slots(rows, tier)),
            (self.generations, map(catalog.generations.__getitem__, rows)),
            (self.parents, map(catalog.parents.__getitem__, rows)),
        )
        for column, values in columns:
            for at, value in zip(places, values, strict=True):
                column[start + at] = value

    def moves(self) -> list[Move]:
        """Return the moves."""
        return make_moves(self.keys, self.generations, self.blocks, self.cpu, self.nvme, self.parents)

    def details(self) -> list[MoveDetail]:
        """Return their details."""
        return make_details(self.rows, self.groups, self.positions)
