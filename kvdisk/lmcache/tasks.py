# SPDX-License-Identifier: Apache-2.0
"""Tasks of LMCache's, by number, with the descriptor that says that some have ended."""

from __future__ import annotations

import os
import threading
from itertools import count
from typing import Generic, TypeVar

_Answer = TypeVar("_Answer")


class Tasks(Generic[_Answer]):
    """Any thread makes any call.

    LMCache: it reads the descriptor itself, and then asks for each of its tasks. So nothing here
    reads it: what ends between two of its questions must wake it again.
    """

    def __init__(self) -> None:
        """Raises OSError where there is no descriptor left."""
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._ended: dict[int, _Answer] = {}
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return the descriptor, which stays this object's; -1 after ``close``."""
        return self._fd

    def begin(self) -> int:
        """Return the number of a new task."""
        return next(self._numbers)

    def end(self, task: int, answer: _Answer) -> None:
        """A task has ended so, and LMCache shall know it."""
        with self._lock:
            if self._fd >= 0:
                self._ended[task] = answer
                os.eventfd_write(self._fd, 1)

    def take(self, task: int) -> _Answer | None:
        """Return a task's answer, once; None: it has not ended."""
        with self._lock:
            return self._ended.pop(task, None)

    def take_all(self) -> dict[int, _Answer]:
        """Return the answers of all that have ended since the last call."""
        with self._lock:
            ended, self._ended = self._ended, {}
            return ended

    def close(self) -> None:
        """Close the descriptor. What ends later is not noted. Idempotent."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
