# SPDX-License-Identifier: Apache-2.0
"""Tasks of other threads for the manager, which only the scheduler's thread may call.

The scheduler's thread does them with its next step. But an idle engine takes no step, and vLLM lets
nobody wake it. So that thread says when it goes to rest, and until it wakes, a thread that posts a
task does it itself. A store whose owner tells nobody which call is the last for long rests between
all its calls, and holds ``turn`` in each.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class Mailbox:
    """See the module. A task waits for no drive: the scheduler's thread may wait for it."""

    def __init__(self) -> None:
        self._posted: deque[Callable[[], None]] = deque()
        self.turn = threading.Lock()
        """Held by who works with the manager while the engine rests."""
        self._rests = False
        self._error: BaseException | None = None

    # -- the scheduler's thread ------------------------------------------------------------------

    def work(self) -> bool:
        """Do one posted task, so that a step is not long; return whether there was one. Raises what
        the task raises."""
        if not self._posted:
            return False
        self._posted.popleft()()
        return True

    def rest(self) -> bool:
        """Call this before an engine waits for requests. From now on other threads do what they
        post. Where a task is waiting, do that instead, and return True."""
        with self.turn:
            if self.work():
                return True
            self._rests = True
        return False

    def wake(self) -> None:
        """Take the manager back, before any call to it. Raises what a task raised on another thread
        meanwhile."""
        if self._rests:
            with self.turn:
                self._rests = False
        self.check()

    def check(self) -> None:
        """Raise what a task raised on another thread meanwhile: for who holds ``turn`` for each of
        its calls, and never wakes."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    @property
    def rests(self) -> bool:
        """Whether the engine waits for requests. Any thread may read it."""
        return self._rests

    # -- other threads ---------------------------------------------------------------------------

    def post(self, task: Callable[[], None]) -> None:
        """Have ``task`` done: now, on this thread, where the engine rests; otherwise with its next
        step. Where it is done now, raises what it raises."""
        self._posted.append(task)
        with self.turn:
            if self._rests:
                try:
                    while self.work():
                        pass
                except BaseException as error:
                    self._error = error  # the manager is not what it should be: the engine has to know
                    raise
