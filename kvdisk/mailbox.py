# SPDX-License-Identifier: Apache-2.0
"""What other threads want done with the manager, which the scheduler's thread alone may call.

The scheduler's thread does it with its next step. An idle engine takes none, and vLLM lets nobody
wake it. So the thread says when it goes to rest, and until it wakes up who posts does it himself.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class Mailbox:
    """See the module. What is posted waits for no drive: the scheduler's thread may wait for it."""

    def __init__(self) -> None:
        self._posted: deque[Callable[[], None]] = deque()
        self._turn = threading.Lock()
        self._rests = False
        self._error: BaseException | None = None

    # -- the scheduler's thread ------------------------------------------------------------------

    def work(self) -> bool:
        """Do one of what was posted, so that a step is not long; return whether there was any.
        Raises what that raises."""
        if not self._posted:
            return False
        self._posted.popleft()()
        return True

    def rest(self) -> bool:
        """Let others do what they post, from now on; or, where something was posted, do that and
        return True. Before an engine waits for requests."""
        with self._turn:
            if self.work():
                return True
            self._rests = True
        return False

    def wake(self) -> None:
        """Take the manager back, before anything is called of it. Raises what another thread met
        meanwhile."""
        if self._rests:
            with self._turn:
                self._rests = False
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    @property
    def rests(self) -> bool:
        """Whether the engine waits for requests. Any thread."""
        return self._rests

    # -- other threads ---------------------------------------------------------------------------

    def post(self, task: Callable[[], None]) -> None:
        """Have ``task`` done: now where the engine rests, else with its next step. Raises what it
        raises, if now."""
        self._posted.append(task)
        with self._turn:
            if self._rests:
                try:
                    while self.work():
                        pass
                except BaseException as error:
                    self._error = error  # the manager is not what it should be: the engine has to know
                    raise
