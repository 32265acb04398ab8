# SPDX-License-Identifier: Apache-2.0
"""The process of an index, as one that dies at a commit: of a file beside the index that says when.

Its text is a word, ``before`` or ``after``, which says what of the commit is done. Each file is one
death. Beside the index's directory lies another, in which each name is a death at a reading.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvdisk.index import child_main
from kvdisk.index.child_main import Server

ORDERS = "orders"
"""In the index's directory."""

DEATHS = "deaths"
"""In the directory that the index's is in."""


class DyingServer(Server):
    """See the module."""

    def open(self, path: str, map_bytes: int) -> Iterator[int]:
        self._orders = Path(path) / ORDERS
        self._deaths = Path(path).parent / DEATHS
        return super().open(path, map_bytes)

    def commit(self, operations: Sequence[Any]) -> Iterator[int]:
        order = self._orders.read_text() if self._orders.exists() else ""
        self._orders.unlink(missing_ok=True)
        if order == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        number = list(super().commit(operations))
        if order == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        yield from number

    def scan(self, table: Any) -> Iterator[Any]:
        if left := list(self._deaths.glob("*")):
            left[0].unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().scan(table)


def main(descriptor: int, parent: int) -> None:
    """Be the child."""
    child_main.main(descriptor, parent, DyingServer)
