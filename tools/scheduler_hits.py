# SPDX-License-Identifier: Apache-2.0
"""Parts of ``measure_scheduler``: requests that hit, and requests whose blocks the tier does not want."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scheduler_stands import BLOCK_TOKENS, BothSides, completed, report_of

from kvdisk.blocks import Tier
from kvdisk.messages import JobKind, Plan

WITH_NVME = ", with NVMe"
OURS, THEIRS = "kvdisk", "vLLM"
Sample = tuple[str, str, float]
"""What was measured, whose it is, and how long it took, in seconds; per block where the name says so."""


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the processor time of a call, in seconds, and its answer."""
    start_s = time.thread_time()
    answer = call()
    return time.thread_time() - start_s, answer


class Turns:
    """Times kvdisk and vLLM at the same work. Who begins changes with each round: who comes second finds the request,
    and what of Python both use, in the processor's caches."""

    def __init__(self) -> None:
        self._ours_first = False

    def next_round(self) -> None:
        """Let the other one begin."""
        self._ours_first = not self._ours_first

    def both(self, ours: Callable[[], Any], theirs: Callable[[], Any]) -> tuple[tuple[float, Any], tuple[float, Any]]:
        """Return ``timed`` of both, kvdisk's first."""
        if self._ours_first:
            mine = timed(ours)
            return mine, timed(theirs)
        other = timed(theirs)
        return timed(ours), other


class Hits:
    """A prompt that was stored before: what it takes to look it up, to plan its load, and to book that.

    ``store_dir``: see ``BothSides``; where it is given kvdisk's memory holds just less than two prompts, so that it
    loads from NVMe, and memory makes room for what it loads. vLLM's own has no such tier, and always loads from memory.
    """

    def __init__(self, blocks: int, store_dir: Path | None = None) -> None:
        self._blocks = blocks
        self._from = "memory" if store_dir is None else "NVMe"
        room = 1 << 16 if store_dir is None else 2 * blocks - blocks // 8
        self._sides, self._turns = BothSides(0, 1, room, store_dir, their_blocks=1 << 16), Turns()
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
        sides, blocks, both = self._sides, self._blocks, self._turns.both
        self._turns.next_round()
        hashes = self._hashes.pop(0)
        self._hashes.append(hashes)
        request = sides.come(hashes)
        request.append_output_token_ids(1)  # so that all of its prompt may hit
        tokens, step = blocks * BLOCK_TOKENS, sides.output([], {})
        looking = both(
            lambda: sides.ours.matched_tokens(request, 0), lambda: sides.theirs.get_num_new_matched_tokens(request, 0)
        )
        assert [found for _, found in looking] == [(tokens, True)] * 2
        table = sides.allocate(request)

        def plan_ours() -> Plan:
            sides.ours.allocated(request, table, tokens)
            return sides.ours.plan(step)

        def plan_theirs() -> Any:
            sides.theirs.update_state_after_alloc(request, table, tokens)
            return sides.theirs.build_connector_meta(step)

        planning = (_, plan), (_, meta) = both(plan_ours, plan_theirs)
        loads = [move for job in plan.jobs if job.kind is JobKind.LOAD for move in job.moves]
        read = sum(Tier.NVME in move.slots for move in loads)
        assert len(loads) == blocks and (read >= 0.75 * blocks if self._from == "NVMe" else not read), read
        report, done = report_of(plan), completed(meta)
        booking = both(lambda: sides.ours.settle(report, set()), lambda: sides.theirs.update_connector_output(done))
        what = f"a hit of {blocks:,} block{'s'[: blocks > 1]} in {self._from}"
        for at, owner in enumerate((OURS, THEIRS)):
            parts = [seconds[at][0] / blocks for seconds in (looking, planning, booking)]
            yield f"{what}, looking it up, a block", owner, parts[0]
            yield f"{what}, planning its load, a block", owner, parts[1]
            yield f"{what}, booking it, a block", owner, parts[2]
            yield f"{what}, in all, a block", owner, sum(parts)
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
