# SPDX-License-Identifier: Apache-2.0
"""What an engine does now and then beside its steps, on a thread that calls functions.

For what may wait for the disk, or for the reader of the log. What is called may take its time: the
others of the same thread wait for it, the engine does not.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from kvdisk.errors import KvdiskError

logger = logging.getLogger("kvdisk")

CLOSE_TIMEOUT_S = 5.0


class Background:
    """Calls each of ``jobs`` after ``first_s`` and then at its interval, in seconds, and each of
    ``last`` at the end, on one thread.

    A KvdiskError or an OSError of one is a warning, once for each that is not the one before, and
    the function is called again the next time; any other error is a bug of ours, is logged as one,
    and ends that function's calls alone.
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
        """What each function met the last time, where that was not in order."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvdisk-background", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Call what is to be called last and end the thread. Idempotent.

        Does not wait for a disk that hangs. After CLOSE_TIMEOUT_S the thread is left to itself:
        what it calls must do no harm then.
        """
        self._stopping.set()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        due_s = dict.fromkeys(range(len(self._jobs)), time.monotonic() + self._first_s)
        while due_s and not self._stopping.wait(max(0.0, min(due_s.values()) - time.monotonic())):
            position = min(due_s, key=due_s.__getitem__)
            interval_s, job = self._jobs[position]
            if self._call(job):
                # From the end of the call: what takes longer than its interval leaves the others
                # their time.
                due_s[position] = time.monotonic() + interval_s
            else:
                del due_s[position]
        self._stopping.wait()
        for job in self._last:
            self._call(job)

    def _call(self, job: Callable[[], None]) -> bool:
        """Call one; return whether it is to be called again."""
        try:
            job()
            self._warned.pop(job, None)
        except (KvdiskError, OSError) as error:
            if self._warned.get(job) != str(error):
                self._warned[job] = str(error)
                logger.warning("kvdisk goes on, and tries again what it does beside the engine's steps: %s", error)
        except Exception:
            logger.exception("kvdisk has a bug in what it does in the background; it goes on without that")
            return False
        return True
