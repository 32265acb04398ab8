# SPDX-License-Identifier: Apache-2.0
"""Replay a trace of prompts against a tier of limited room: how much hits, and how much is written.

The policies, the prefix rule, the catalog and the admission are those of the manager; there are no bytes and no
time. A trace has one JSON object a line, whose ``hash_ids`` are the blocks of a prompt in order; an equal id means an
equal prefix up to there. A block hits when it and all before it are in the tier when its request comes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvdisk.blocks import BlockKey, Slot, Tier, make_block_key
from kvdisk.manager.admission import make_admission
from kvdisk.manager.catalog import Catalog
from kvdisk.manager.eviction import EVICTIONS, make_eviction
from kvdisk.manager.tail_first import TailFirst

CAPACITIES_PERCENT = (1, 5, 10, 25, 50)
ADMISSIONS = ("all", "reuse(2)", "adaptive")


class Outcome(NamedTuple):
    """Blocks that hit, and that were written."""

    hits: int
    written: int


class ModelTier:
    """A tier with room for ``capacity`` blocks."""

    def __init__(self, eviction: str, admission: str, capacity: int) -> None:
        self._catalog = Catalog()
        self._order = TailFirst(make_eviction(eviction, self._catalog.keys), self._catalog, Tier.NVME)
        self._admission = make_admission(admission, capacity)
        self._capacity = capacity
        self._stored = 0

    def serve(self, request_id: str, keys: Sequence[BlockKey]) -> Outcome:
        """Serve a prompt: count what hits, use it, and store what is missing and admitted, as far as there is room."""
        catalog, order = self._catalog, self._order
        self._admission.note_room(self._capacity - len(catalog), self._capacity)
        rows = [catalog.find(key) for key in keys]
        hits = next((position for position, row in enumerate(rows) if row < 0), len(rows))
        for key in keys:
            self._admission.want((key,), request_id)
        for row in reversed(rows):
            if row >= 0:
                order.access(row)
        missing = [p for p, row in enumerate(rows) if row < 0 and self._admission.admits(keys[p])]
        taken = missing[: self._make_room(len(missing), {row for row in rows if row >= 0})]
        for position in reversed(taken):
            self._stored += 1
            parent = keys[position - 1] if position else None
            row = catalog.add(keys[position], self._stored, 0, parent)
            catalog.adopt(row, Tier.NVME, Slot(0, 0))
            order.insert((row,))
        return Outcome(hits, len(taken))

    def _make_room(self, count: int, own: set[int]) -> int:
        """Evict others' blocks until ``count`` fit; return how many do."""
        free = self._capacity - len(self._catalog)
        while free < count:
            leaving = self._order.victims(count - free, lambda row: row not in own)
            if not leaving:
                break
            for row in leaving:
                self._order.remove((row,))
                self._catalog.drop(row, Tier.NVME)
            free += len(leaving)
        return min(free, count)


def read_trace(path: Path) -> list[list[BlockKey]]:
    """Return the keys of each request's blocks."""
    with path.open() as lines:
        return [
            [make_block_key(block.to_bytes(32, "big"), 0) for block in json.loads(line)["hash_ids"]] for line in lines
        ]


def replay(requests: Sequence[Sequence[BlockKey]], eviction: str, admission: str, capacity: int) -> Outcome:
    """Serve all requests in order from an empty tier."""
    tier = ModelTier(eviction, admission, capacity)
    outcomes = [tier.serve(str(number), keys) for number, keys in enumerate(requests)]
    return Outcome(sum(outcome.hits for outcome in outcomes), sum(outcome.written for outcome in outcomes))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--evictions", nargs="+", default=EVICTIONS, choices=EVICTIONS)
    parser.add_argument("--admissions", nargs="+", default=ADMISSIONS, help="or 'reuse(n)', or 'module:Class'")
    options = parser.parse_args()
    requests = read_trace(options.trace)
    total = sum(map(len, requests))
    distinct = len({key for keys in requests for key in keys})
    print(f"{len(requests)} requests, {total} blocks, {distinct} distinct")
    print("hits in percent of all blocks / blocks written, for room in percent of distinct blocks")
    print(f"{'admission':10}{'eviction':10}" + "".join(f"{percent:>15} %" for percent in CAPACITIES_PERCENT))
    for admission in options.admissions:
        for eviction in options.evictions:
            cells = []
            for percent in CAPACITIES_PERCENT:
                outcome = replay(requests, eviction, admission, distinct * percent // 100)
                cells.append(f"{100 * outcome.hits / total:8.2f} /{outcome.written:7}")
            print(f"{admission:10}{eviction:10}" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
