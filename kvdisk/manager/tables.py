# SPDX-License-Identifier: Apache-2.0
"""What the running requests hold: each one's block table as of its last step. Scheduler thread only."""

from __future__ import annotations

from collections.abc import Sequence


class Table:
    """A request's GPU blocks by group, 0 where it needs none, and how many of its tokens are computed in them.

    Never changed. Of a group with a window the engine may have taken blocks since that lie wholly before the window.
    """

    def __init__(self, computed_tokens: int, block_ids: Sequence[Sequence[int]]) -> None:
        self.computed_tokens = computed_tokens
        self.block_ids = block_ids


EMPTY = Table(0, ())


class BlockTables:
    """The tables of requests that have been scheduled. A victim is named when its blocks have been freed already."""

    def __init__(self) -> None:
        self._tables: dict[str, Table] = {}

    def get(self, request_id: str) -> Table:
        """Return a request's table; ``EMPTY`` where it holds nothing that is known."""
        return self._tables.get(request_id, EMPTY)

    def put(self, request_id: str, table: Table) -> Table:
        """Note what a request holds from now on; return what ``get`` would have returned."""
        before = self._tables.get(request_id, EMPTY)
        self._tables[request_id] = table
        return before

    def take(self, request_id: str) -> Table:
        """Forget a request's table, and return it."""
        return self._tables.pop(request_id, EMPTY)

    def clear(self) -> None:
        """Forget all: what the blocks hold is of no use any more."""
        self._tables.clear()
