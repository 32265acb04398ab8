# SPDX-License-Identifier: Apache-2.0
"""The protocol of a copier, which copies between an engine's blocks and slots. Without torch.

``copier`` has those for vLLM's tensors; ``RowCopier`` is for blocks that are rows of host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvdisk.geometry import HEADER_BYTES
from kvdisk.worker.arena import SlotMemory
from kvdisk.worker.row_memory import RowMemory


class Event(Protocol):
    """A point in a stream of device work, such as the end of a copy: a ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Return whether the device has passed the point."""

    def synchronize(self) -> None:
        """Wait until the device has passed the point."""


class Passed:
    """An ``Event`` that has passed already."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """See ``Event``."""


class Slots(NamedTuple):
    """Some slots of one size class, by their indices."""

    memory: SlotMemory
    size_class: int
    indices: Sequence[int]


class Copier(Protocol):
    """Moves whole blocks between an engine's memory and slots of an arena.

    A slot has one or several of the engine's blocks, the same number for all slots of a group.
    ``blocks``: the ids of the blocks of the first slot, then of the next, and so on. A scatter
    leaves a block alone that is given as NO_BLOCK.

    Only the payloads of slots are copied, though a gather may overwrite their headers. The copier
    owns the slots and blocks from a call until the event that it returns has passed. The model's
    thread calls ``compute_done`` and ``hold_model``, the mover's thread all else.
    """

    def thread(self) -> AbstractContextManager[Any]:
        """Return the context that the mover's thread runs within."""

    def compute_done(self) -> Event | None:
        """Return the end of the model's work launched so far, for ``after``; None where it has
        ended."""

    def hold_model(self) -> None:
        """Let the model's next work begin after every gather so far. The host does not wait."""

    def settle(self) -> None:
        """Wait until no copy is under way, once none begins any more. Any thread; does not
        raise."""

    def gather(self, group: int, blocks: Sequence[int], slots: Slots, after: Event | None = None) -> Event | None:
        """Start copying blocks to slots, once ``after`` has passed. Return None where there is no
        memory for it now; then none of it is under way."""

    def scatter(self, group: int, slots: Slots, blocks: Sequence[int], after: Event | None = None) -> Event | None:
        """Start copying slots to blocks, once ``after`` has passed. None as with ``gather``."""


class RowCopier:
    """``Copier`` of blocks that are rows of host memory, or several rows each. It copies at once,
    on the mover's thread.

    ``pieces``: by KV-cache group, how many bytes of each row of a block are its, from the row's
    start; what is behind them is left alone.
    """

    def __init__(self, memory: RowMemory, pieces: Sequence[Sequence[int]]) -> None:
        self._memory = memory
        self._pieces = tuple(map(tuple, pieces))

    def thread(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def compute_done(self) -> Event | None:
        """See ``Copier``: the caller has written the rows before it asks for a copy."""
        return None

    def hold_model(self) -> None:
        """See ``Copier``: a copy ends before the call returns."""

    def settle(self) -> None:
        """See ``Copier``: nothing is ever under way."""

    def gather(self, group: int, blocks: Sequence[int], slots: Slots, after: Event | None = None) -> Event:  # noqa: ARG002
        sizes = self._pieces[group]
        for at, index in enumerate(slots.indices):
            rows = blocks[at * len(sizes) : (at + 1) * len(sizes)]
            self._memory.gather(rows, sizes, self._payload(slots, index, sizes))
        return Passed()

    def scatter(self, group: int, slots: Slots, blocks: Sequence[int], after: Event | None = None) -> Event:  # noqa: ARG002
        sizes = self._pieces[group]
        for at, index in enumerate(slots.indices):
            rows = blocks[at * len(sizes) : (at + 1) * len(sizes)]
            self._memory.scatter(self._payload(slots, index, sizes), rows, sizes)
        return Passed()

    @staticmethod
    def _payload(slots: Slots, index: int, sizes: Sequence[int]) -> NDArray[np.uint8]:
        slot = slots.memory.view(slots.size_class, index)
        return np.frombuffer(slot, np.uint8, sum(sizes), HEADER_BYTES)
