# SPDX-License-Identifier: Apache-2.0
"""A thread that calls functions now and then, beside the engine's steps.

It is for work that may wait for the drive, or for the reader of the log. A function may take its
time: the others of the same thread wait for it, the engine does not.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from kvdisk.errors import KvdiskError, start_thread

logger = logging.getLogger("kvdisk")

CLOSE_TIMEOUT_S = 5.0


class Background:
    """Calls each of ``jobs`` after ``first_s`` and then at its interval, in seconds, and each of
    ``last`` at the end, on one thread.

    A KvdiskError or an OSError of a function is logged as a warning, unless its last call met the
    same, and the function is called again the next time. Any other error is a bug of ours: it is
    logged as one, and ends the calls of that function alone.
    """

    def __init__(
        self,
        jobs: Sequence[tuple[float, Callable[[], None]]],
        last: Sequence[Callable[[], None]] = (),
        *,
        first_s: float = 0.0,
    ) -> None:
        assert all(interval_s > 0 for interval_s, _ in jobs)
        self._jobs = list(jobs)
        self._last = list(last)
        self._first_s = first_s
        self._warned: dict[Callable[[], None], str] = {}
        """The error of each function whose last call failed."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvdisk-background", daemon=True)
        start_thread(self._thread)

    def close(self) -> None:
        """Have the functions of ``last`` called, and end the thread. Idempotent.

        Does not wait for a drive that hangs. After CLOSE_TIMEOUT_S the thread is left to itself:
        the functions that it calls must do no harm then.
        """
        self._stopping.set()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        due_s = dict.fromkeys(range(len(self._jobs)), time.monotonic() + self._first_s)
        while due_s and not self._stopping.wait(max(0.0, min(due_s.values()) - time.monotonic())):
            position = min(due_s, key=due_s.__getitem__)
            interval_s, job = self._jobs[position]
            if self._call(job):
                # From the end of the call: a job that takes longer than its interval leaves the
                # others their time.
                due_s[position] = time.monotonic() + interval_s
            else:
                del due_s[position]
        self._stopping.wait()
        for job in self._last:
            self._call(job)

    def _call(self, job: Callable[[], None]) -> bool:
        """Call a job; return whether it is to be called again."""
        try:
            job()
            self._warned.pop(job, None)
        except (KvdiskError, OSError) as error:
            if self._warned.get(job) != str(error):
                self._warned[job] = str(error)
                logger.warning("kvdisk's background work failed, and is tried again: %s", error)
        except Exception:
            logger.exception("kvdisk has a bug in its background work, and goes on without it")
            return False
        return True
