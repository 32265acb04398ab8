# SPDX-License-Identifier: Apache-2.0
"""Carries out what a command asks of a running engine: ``kvdisk clear --live``, ``prune --live``.

It runs on a thread beside the engine's steps. It changes nothing itself: each segment is one task
for the scheduler's thread, so that no step is long. See docs/RESETS.md.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial

from kvdisk.device.home import Home, Place
from kvdisk.device.orders import Answer, Request, read_request, remove_request, write_answer
from kvdisk.errors import CorruptRecord
from kvdisk.mailbox import Mailbox
from kvdisk.manager.manager import TierManager
from kvdisk.manager.nvme import NvmeSpace

logger = logging.getLogger("kvdisk")

LOOK_S = 0.5
STEP_WAIT_S = 60.0
"""Seconds that the engine has to take a step; one that takes none hangs."""
_Gone = tuple[int, int]
"""The number of blocks that a task dropped, and the bytes of the segment that goes with them."""


class Orders:
    """See the module. One thread calls ``look``."""

    def __init__(self, home: Home, manager: TierManager, nvme: NvmeSpace, mailbox: Mailbox) -> None:
        self._home = home
        self._manager = manager
        self._nvme = nvme
        self._mailbox = mailbox
        self._answered = ""

    def look(self) -> None:
        """Do what a request asks, if there is one, and answer it. Raises OSError."""
        if self._home.place() is not Place.THERE:
            return
        try:
            request = read_request(self._home.path)
        except CorruptRecord as error:
            logger.warning("kvdisk leaves a request undone that it cannot read: %s", error)
            remove_request(self._home.path)
            return
        if request is None or request.id == self._answered:
            return
        answer = self._carry_out(request)
        self._answered = request.id
        self._home.when_there(write_answer, answer)
        remove_request(self._home.path)
        what = "clear" if request.everything else "prune"
        done = f"{answer.blocks:,} blocks, {answer.segments:,} segments of {answer.bytes:,} bytes"
        logger.info("kvdisk deletes what kvdisk %s --live asked for: %s.", what, done)

    def _carry_out(self, request: Request) -> Answer:
        blocks = segments = segment_bytes = 0
        for task in self._tasks(request):
            gone = self._do(task)
            if gone is None:
                why = f"the engine took no step for {STEP_WAIT_S:.0f} s"
                return Answer(request.id, blocks, segments, segment_bytes, waits=True, why=why)
            blocks += gone[0]
            segments += gone[1] > 0
            segment_bytes += gone[1]
        return Answer(request.id, blocks, segments, segment_bytes, waits=segments > 0 and self._mailbox.rests)

    def _tasks(self, request: Request) -> Iterator[Callable[[], _Gone]]:
        nvme = self._nvme
        if request.everything:
            yield lambda: (self._manager.clear_memory(), 0)
            for segment in [*nvme.segments.in_place.copy(), *nvme.segments.away.copy()]:
                yield partial(nvme.let_go, segment)
            return
        for segment in request.segments:
            yield partial(nvme.let_go, segment, request.generation)
        for segment, ranges in request.slots.items():
            yield partial(nvme.let_go, segment, request.generation, ranges)

    def _do(self, task: Callable[[], _Gone]) -> _Gone | None:
        """Have the scheduler's thread do a task. Return None where it does not come to it within
        STEP_WAIT_S: then the task is not done later either."""
        found: list[_Gone] = []
        ended = threading.Event()

        def run() -> None:
            if not ended.is_set():
                found.append(task())
                ended.set()

        self._mailbox.post(run)
        if not ended.wait(STEP_WAIT_S):
            ended.set()
        return found[0] if found else None
