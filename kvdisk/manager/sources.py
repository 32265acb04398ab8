# SPDX-License-Identifier: Apache-2.0
"""The fence: which GPU blocks stores still copy from, and which of them a step is about to overwrite.

A store holds no reference on a GPU block: the engine frees and reuses blocks as if nobody read them. What protects a
copy is that the step which writes to its source anew waits for it, in the worker, before it writes. A request's end,
an abort, a window that moves on and a preemption are all the same case. Scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Collection

from kvdisk.blocks import JobId
from kvdisk.context import SchedulerContext
from kvdisk.manager.transfers import JobRecord
from kvdisk.messages import Reason


class StoreSources:
    """The GPU blocks that stores copy from, until their copies out of the GPU are known to have ended."""

    def __init__(self, context: SchedulerContext) -> None:
        self._context = context
        self._records: dict[int, JobRecord] = {}
        self._reused: list[tuple[int, JobRecord]] = []
        """Sources that were handed out, for the next fence."""

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: JobRecord) -> None:
        """A store was planned. Its blocks hold what it stores, or will when this step's forward pass is over."""
        self._note_reused()  # of this step: from now on the blocks belong to the new store
        blocks = [move.block for move in record.job.moves]
        self._records.update(dict.fromkeys(blocks, record))
        self._context.watch(blocks)

    def end(self, record: JobRecord) -> None:
        """The job's copies out of the GPU have ended on every rank, or will never begin."""
        self._note_reused()
        if self._reused:
            self._reused = [(block, other) for block, other in self._reused if other is not record]
        mine = [move.block for move in record.job.moves if self._records.get(move.block) is record]
        for block in mine:
            del self._records[block]
        self._context.unwatch(mine)

    def take_fence(self, overwritten: Collection[int]) -> tuple[JobId, ...]:
        """Return the stores whose sources this step writes to.

        ``overwritten``: blocks that the model runner may write to before the worker can wait. Of a source among them
        nobody can tell what was copied: its move fails, whatever the ranks answer.
        """
        self._note_reused()
        found: dict[JobId, None] = {}
        for block, record in self._reused:
            if block in overwritten:
                for position, move in enumerate(record.job.moves):
                    if move.block == block:
                        record.failed.setdefault(position, Reason.OVERWRITTEN)
            found[record.job.id] = None
        self._reused = []
        return tuple(found)

    def _note_reused(self) -> None:
        for block in self._context.take_reused():
            record = self._records.pop(block, None)
            if record is not None:
                self._reused.append((block, record))
