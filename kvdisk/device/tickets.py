# SPDX-License-Identifier: Apache-2.0
"""Batches of a device whose tasks report from threads: a batch has ended when the last of its tasks has."""

from __future__ import annotations

import queue
import time
from typing import NamedTuple

from kvdisk.device.base import Outcome


class Done(NamedTuple):
    """A task that has ended, with errno by position of the failed transfers."""

    ticket: int
    errors: dict[int, int]


class Tickets:
    """What a device answers of ``submit``, ``poll`` and ``drain``. The device's thread calls all but ``report``."""

    def __init__(self) -> None:
        self._last = 0
        self._in_flight: dict[int, tuple[int, dict[int, int]]] = {}
        """Reports that are still to come, and errors so far, by ticket."""
        self._done: queue.SimpleQueue[Done] = queue.SimpleQueue()

    def take(self) -> int:
        """Return the ticket of a new batch. Its tasks may begin and report at once: no report is looked at before the
        next poll."""
        self._last += 1
        return self._last

    def expect(self, ticket: int, reports: int, errors: dict[int, int]) -> None:
        """So many reports of a batch will come. ``errors``: what failed before it began."""
        self._in_flight[ticket] = (max(1, reports), errors)
        if not reports:
            self._done.put(Done(ticket, {}))

    def report(self, done: Done) -> None:
        """A task of a batch has ended. Any thread."""
        self._done.put(done)

    def poll(self, timeout_s: float) -> list[Outcome]:
        """See ``Device``."""
        ended: list[Outcome] = []
        deadline_s = time.monotonic() + timeout_s
        while self._in_flight:
            remaining_s = 0.0 if ended else deadline_s - time.monotonic()
            try:
                self._note(self._done.get(timeout=remaining_s) if remaining_s > 0 else self._done.get_nowait(), ended)
            except queue.Empty:
                break
        return ended

    def drain(self) -> list[Outcome]:
        """See ``Device``."""
        ended: list[Outcome] = []
        while self._in_flight:
            self._note(self._done.get(), ended)
        return ended

    def _note(self, done: Done, ended: list[Outcome]) -> None:
        """Take in a report; of two errors of one transfer the first in time counts."""
        left, errors = self._in_flight[done.ticket]
        for position, number in done.errors.items():
            errors.setdefault(position, number)
        if left > 1:
            self._in_flight[done.ticket] = (left - 1, errors)
        else:
            del self._in_flight[done.ticket]
            ended.append(Outcome(done.ticket, errors))
