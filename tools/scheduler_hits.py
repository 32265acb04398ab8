# SPDX-License-Identifier: Apache-2.0
"""Parts of ``measure_scheduler``: requests that hit, and requests whose blocks the tier does not want."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scheduler_stands import BLOCK_TOKENS, BothSides, completed, report_of

from kvdisk.messages import JobKind

WITH_NVME = ", with NVMe"
OURS, THEIRS = "kvdisk", "vLLM"
Sample = tuple[str, str, float]
"""What was measured, whose it is, and how long it took, in seconds; per block where the name says so."""


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the processor time of a call, in seconds, and its answer."""
    start_s = time.thread_time()
    answer = call()
    return time.thread_time() - start_s, answer


class Hits:
    """A prompt that was stored before: what it takes to plan its load, and to book it.

    ``store_dir``: see ``BothSides``; where it is given kvdisk's memory holds just less than two prompts, so that it
    loads from NVMe, and memory makes room for what it loads. vLLM's own has no such tier, and always loads from memory.
    """

    def __init__(self, blocks: int, store_dir: Path | None = None) -> None:
        self._blocks = blocks
        self._from = "memory" if store_dir is None else "NVMe"
        room = 1 << 16 if store_dir is None else 2 * blocks - blocks // 8
        self._sides = BothSides(0, 1, room, store_dir, their_blocks=1 << 16)
        self._hashes: list[list[bytes]] = []
        # The first waits in memory for the first segment to be made, so that others leave before it: it is not used.
        for number in range(1, 9):
            request = self._sides.add(blocks)
            self._hashes += [request.block_hashes[:blocks]] * (number > 1)
            while self._sides.stored_blocks < number * blocks:  # what finds no room at first is offered again
                self._sides.settle(*self._sides.plan_both(self._sides.still()))
            self._rest()
            self._sides.finish(request.request_id)

    def round(self) -> Iterator[Sample]:
        """Load the prompt that was used longest ago."""
        sides, blocks = self._sides, self._blocks
        hashes = self._hashes.pop(0)
        self._hashes.append(hashes)
        request = sides.come(hashes)
        request.append_output_token_ids(1)  # so that all of its prompt may hit
        assert sides.ours.matched_tokens(request, 0) == (blocks * BLOCK_TOKENS, True)
        assert sides.theirs.get_num_new_matched_tokens(request, 0) == (blocks * BLOCK_TOKENS, True)
        table = sides.allocate(request)
        tokens, step = blocks * BLOCK_TOKENS, sides.output([], {})
        ours_s, _ = timed(lambda: sides.ours.allocated(request, table, tokens))
        more_s, plan = timed(lambda: sides.ours.plan(step))
        theirs_s, _ = timed(lambda: sides.theirs.update_state_after_alloc(request, table, tokens))
        their_s, meta = timed(lambda: sides.theirs.build_connector_meta(step))
        loads = [move for job in plan.jobs if job.kind is JobKind.LOAD for move in job.moves]
        read = sum(move.nvme is not None for move in loads)
        assert len(loads) == blocks and (read >= 0.9 * blocks if self._from == "NVMe" else not read), read
        report, done = report_of(plan), completed(meta)
        booking_s, _ = timed(lambda: sides.ours.settle(report, set()))
        their_booking_s, _ = timed(lambda: sides.theirs.update_connector_output(done))
        what = f"a hit of {blocks:,} blocks in {self._from}"
        yield f"{what}, planning its load, a block", OURS, (ours_s + more_s) / blocks
        yield f"{what}, planning its load, a block", THEIRS, (theirs_s + their_s) / blocks
        yield f"{what}, booking it, a block", OURS, booking_s / blocks
        yield f"{what}, booking it, a block", THEIRS, their_booking_s / blocks
        sides.finish(request.request_id)
        self._rest()

    def _rest(self) -> None:
        """Go on until all is on NVMe that goes there, and committed."""
        while self._sides.ours.has_pending_work():
            self._sides.settle(*self._sides.plan_both(self._sides.output([], {})))


class Unwanted:
    """Requests that decode, each with blocks that ``reuse(2)`` has refused and that wait for a second request."""

    def __init__(self, requests: int, blocks: int) -> None:
        self._sides = BothSides(requests, blocks, 1 << 16, admission="reuse(2)")
        self._what = f"build_connector_meta, nothing new, {blocks:,} blocks of each of {requests} requests refused"

    def round(self) -> Iterator[Sample]:
        """Plan a step in which nothing is new."""
        seconds, plan = timed(lambda: self._sides.ours.plan(self._sides.still()))
        assert not plan.jobs
        yield self._what, OURS, seconds
