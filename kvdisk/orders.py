# SPDX-License-Identifier: Apache-2.0
"""Carries out what a command asks of a running engine: ``kvdisk clear --live``, ``prune --live``.

It runs on a thread beside the engine's steps. It changes nothing itself: each segment, and some
blocks of memory, are one task for the scheduler's thread, so that no step is long. No task begins
once the time is over for which the command has asked: what it says then stays true. See
docs/RESETS.md.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

from kvdisk.blocks import AHEAD_S
from kvdisk.device.home import Home, Place
from kvdisk.device.orders import Answer, Request, keep_answer, take_request, write_answer
from kvdisk.errors import CorruptRecord
from kvdisk.mailbox import Mailbox
from kvdisk.manager.manager import TierManager
from kvdisk.manager.nvme import NvmeSpace
from kvdisk.manager.tiers import Cleared

logger = logging.getLogger("kvdisk")

LOOK_S = 0.5
STEP_WAIT_S = 60.0
"""Seconds that the engine has to take a step; one that takes none hangs."""
PAUSE_S = 0.001
"""Between two tasks, for a call of the engine that waits for its turn: it might wait for all."""


class Orders:
    """See the module. One thread calls ``look``."""

    def __init__(self, home: Home, manager: TierManager, nvme: NvmeSpace, mailbox: Mailbox) -> None:
        self._home = home
        self._manager = manager
        self._nvme = nvme
        self._mailbox = mailbox
        self._unsent: Answer | None = None
        """An answer that the drive has not taken yet."""

    def look(self) -> None:
        """Do what a request asks, if there is one, and answer it. Raises OSError."""
        if self._home.place() is not Place.THERE:
            return
        if self._unsent is None:
            keep_answer(self._home.path)
            try:
                request = take_request(self._home.path)
            except CorruptRecord as error:
                logger.warning("kvdisk ignores a deletion request that it cannot read: %s", error)
                return
            if request is None:
                return
            self._unsent = self._answer_to(request)
        self._home.when_there(write_answer, self._unsent)
        self._unsent = None

    def _answer_to(self, request: Request) -> Answer:
        what = f"kvdisk {'clear' if request.everything else 'prune'} --live"
        late_s = time.time() - request.asked_s
        if request.home_id != self._home.id:
            why = "it was for an earlier engine of this engine store"
        elif not -AHEAD_S <= late_s < request.wait_s:
            why = f"it was valid for {request.wait_s:g} s, and is {late_s:.0f} s old by this host's clock"
        else:
            answer = self._carry_out(request, time.monotonic() + min(request.wait_s, request.wait_s - late_s))
            done = f"{answer.blocks:,} blocks, {answer.segments:,} segments of {answer.bytes:,} bytes"
            stays = "" if answer.why is None else f"; the rest stays: {answer.why}"
            logger.info("kvdisk deletes what %s asked for: %s%s.", what, done, stays)
            return answer
        logger.warning("kvdisk ignores a request of %s: %s.", what, why)
        return Answer(request.id, 0, 0, 0, waits=False, why=why)

    def _carry_out(self, request: Request, deadline: float) -> Answer:
        blocks = segments = segment_bytes = 0
        for task in self._tasks(request):
            more = True
            while more:
                gone = self._do(task, deadline)
                if gone is None:
                    hangs = time.monotonic() < deadline
                    why = f"the engine took no step for {STEP_WAIT_S:.0f} s" if hangs else "it has expired"
                    return Answer(request.id, blocks, segments, segment_bytes, waits=True, why=why)
                blocks += gone.blocks
                segments += gone.segment_bytes > 0
                segment_bytes += gone.segment_bytes
                more = gone.more
                time.sleep(PAUSE_S)
        return Answer(request.id, blocks, segments, segment_bytes, waits=segments > 0 and self._mailbox.rests)

    def _tasks(self, request: Request) -> Iterator[Callable[[], Cleared]]:
        """Yield tasks, each of which is done until it has nothing more to delete."""
        nvme = self._nvme
        if request.everything:
            clear_memory = partial(self._manager.clear_memory, self._manager.last_generation)
            yield clear_memory
            for segment in list(nvme.segments.specs.copy()):
                yield partial(nvme.let_go, segment)
            yield clear_memory  # what was read from segments meanwhile
            return
        for segment in request.segments:
            yield partial(nvme.let_go, segment, request.generation)
        for segment, ranges in request.slots.items():
            yield partial(nvme.let_go, segment, request.generation, ranges)

    def _do(self, task: Callable[[], Cleared], deadline: float) -> Cleared | None:
        """Have the scheduler's thread do a task. Return None where it does not come to it within
        STEP_WAIT_S, or by ``deadline``: then the task is not done later either."""
        found: list[Cleared] = []
        ended, turn, is_over = threading.Event(), threading.Lock(), False

        def run() -> None:
            try:
                with turn:
                    if not is_over and time.monotonic() < deadline:
                        found.append(task())
            finally:
                ended.set()

        self._mailbox.post(run)
        ended.wait(min(STEP_WAIT_S, max(0.0, deadline - time.monotonic())))
        with turn:  # a task that has begun is waited for
            is_over = True
        return found[0] if found else None
