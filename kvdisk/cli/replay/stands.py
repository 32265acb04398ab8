# SPDX-License-Identifier: Apache-2.0
"""What a replay without I/O puts under the manager: a clock, an index, and workers that answer at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvdisk.blocks import BlockKey
from kvdisk.index.base import BlockColumns, BlockRecord, IndexState, Progress, SegmentRecord
from kvdisk.index.columns import decode_blocks
from kvdisk.messages import JobKind, JobResult, Plan, Report

STEP_S = 0.05


class TraceClock:
    """``Clock`` that goes by the trace: a step takes ``STEP_S``, and else time passes between requests only."""

    def __init__(self) -> None:
        self.now = 0.0
        self._origin_s: float | None = None

    def advance_to(self, time_s: float) -> None:
        """See ``Clock``; the first request comes at 0."""
        if self._origin_s is None:
            self._origin_s = time_s
        self.now = max(self.now, time_s - self._origin_s)

    def step(self) -> None:
        """See ``Clock``."""
        self.now += STEP_S


class NoIndex:
    """``Index`` of a home that nobody will open again: everything is committed at once, and nothing is kept."""

    def __init__(self) -> None:
        self._ticket = 0

    def segments(self) -> Iterator[SegmentRecord]:
        """Yield nothing."""
        return iter(())

    def blocks(self) -> Iterator[BlockRecord]:
        """Yield nothing."""
        return iter(())

    def block_columns(self) -> BlockColumns:
        """Return no blocks."""
        return decode_blocks([], [])

    def put(self, records: Sequence[BlockRecord]) -> int:  # noqa: ARG002 - the protocol's signature, here and below
        """Take records."""
        return self._next()

    def delete(self, keys: Sequence[tuple[int, BlockKey]]) -> int:  # noqa: ARG002
        """Take deletions."""
        return self._next()

    def put_segment(self, record: SegmentRecord) -> int:  # noqa: ARG002
        """Take a segment."""
        return self._next()

    def delete_segment(self, segment: int) -> int:  # noqa: ARG002
        """Take the end of a segment."""
        return self._next()

    def poll(self) -> Progress:
        """Say that all is committed."""
        return Progress(self._ticket, IndexState.WRITABLE, 0)

    def flush(self, timeout_s: float) -> bool:  # noqa: ARG002
        """Nothing waits."""
        return True

    def close(self) -> None:
        """Nothing is open."""

    def _next(self) -> int:
        self._ticket += 1
        return self._ticket


class Moved:
    """Blocks that plans had written to NVMe and read from it."""

    def __init__(self) -> None:
        self.written = self.read = 0

    def count(self, plan: Plan) -> None:
        """Count a plan's moves."""
        for job in plan.jobs:
            if job.kind in {JobKind.STORE, JobKind.DEMOTE}:
                self.written += len(job.moves) if job.moves[0].nvme is not None else 0
            elif job.kind in {JobKind.LOAD, JobKind.PROMOTE}:
                self.read += sum(move.nvme is not None for move in job.moves)


class InstantRanks:
    """``Ranks`` of one rank that has done everything by the end of the step, and touched no byte."""

    def __init__(self) -> None:
        self.moved = Moved()
        self._done = JobResult()
        self._nothing = Report()

    def run(self, plan: Plan, *, idle: bool) -> Report:  # noqa: ARG002 - the protocol's signature
        """Answer every job. What it returns is read at once, and only that."""
        if not plan.jobs:
            return self._nothing
        self.moved.count(plan)
        return Report(dict.fromkeys([job.id for job in plan.jobs], self._done), stats=self._nothing.stats)
