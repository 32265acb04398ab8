# SPDX-License-Identifier: Apache-2.0
"""The legs that a host's processors run: seals, checks, and copies between two tiers in memory."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from kvdisk.blocks import Tier
from kvdisk.errors import QuietLog
from kvdisk.messages import Reason
from kvdisk.worker.arena import Arena
from kvdisk.worker.backend import Progress
from kvdisk.worker.routes import Batch, Leg
from kvdisk.worker.slot_headers import SlotHeaders

SHORT_BYTES = 1 << 20
"""A batch of so many bytes takes less time than a thread needs to be woken, and to be heard."""

_Checked = tuple[dict[int, Reason], list[int]]
"""See ``SlotHeaders.check``."""


class HostWork:
    """``Backend`` of CHECK, of SEAL in host memory, and of READ and WRITE between two arenas.

    ``threads``: how many run legs, several at once; 0: the mover's own does, within ``start``. It
    also does what is on GPU staging, of which only the headers are here.
    """

    def __init__(self, headers: SlotHeaders, arenas: Mapping[Tier, Arena], log: QuietLog, threads: int) -> None:
        self._headers = headers
        self._arenas = arenas
        self._log = log
        self._threads = ThreadPoolExecutor(threads, "kvdisk-checksum") if threads else None
        self._under_way: list[tuple[Batch, Future[_Checked]]] = []

    @property
    def busy(self) -> bool:
        return bool(self._under_way)

    def start(self, batch: Batch) -> Progress:
        is_short = len(batch.positions) * batch.slot_bytes <= SHORT_BYTES
        if self._threads is None or batch.route.direct or is_short:
            return self._end(batch, self._run(batch))
        batch.pending = True
        self._under_way.append((batch, self._threads.submit(self._run, batch)))
        return Progress(batch, ended=False)

    def poll(self, wait_s: float = 0.0) -> list[Progress]:  # noqa: ARG002 - it takes no longer than a moment
        ended = [each for each in self._under_way if each[1].done()]
        self._under_way = [each for each in self._under_way if each not in ended]
        return [self._end(batch, future.result()) for batch, future in ended]

    def close(self) -> None:
        """End the threads after what they have begun."""
        if self._threads is not None:
            self._threads.shutdown()

    def _run(self, batch: Batch) -> _Checked:
        if batch.leg is Leg.CHECK:
            return self._headers.check(batch)
        if batch.leg is Leg.SEAL:
            self._headers.seal(batch)
        else:
            _copy_slots(batch, self._arenas[batch.far])
        return {}, []

    def _end(self, batch: Batch, checked: _Checked) -> Progress:
        batch.pending = False
        bad, unknown = checked
        for position, reason in bad.items():
            if batch.is_of_objects:
                what = "header" if reason is Reason.HEADER else "checksum"
                self._headers.warn_of_object(self._log, batch, position, what)
            else:
                slots = dict(batch.work.job.moves[position].slots)
                self._log.warn(reason.name, f"a block was refused: {reason.name} of {slots}")
        return Progress(batch, bad, unknown)


def _copy_slots(batch: Batch, slow: Arena) -> None:
    """Copy what a batch reads from the slow tier, or writes to it, as its leg says. The interpreter
    lock is released meanwhile. kvdisk ships one tier in memory: a second one needs this (decision
    30, ``tests/unit/test_seams.py``).

    ``slow``: the arena of that tier.
    """
    moves, size_class = batch.work.job.moves, batch.size_class
    for position, slot in zip(batch.positions, batch.slots, strict=True):
        fast_view = np.frombuffer(batch.memory.view(size_class, slot), np.uint8)
        slow_view = np.frombuffer(slow.view(size_class, moves[position].slots[batch.far].index), np.uint8)
        if batch.leg is Leg.READ:
            np.copyto(fast_view, slow_view)
        else:
            np.copyto(slow_view, fast_view)
