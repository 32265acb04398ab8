# SPDX-License-Identifier: Apache-2.0
"""The legs on an engine's blocks, and on staging in GPU memory: all that a worker does on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

from kvdisk.blocks import JobId
from kvdisk.errors import QuietLog
from kvdisk.messages import Reason
from kvdisk.worker.backend import Progress, fail_all
from kvdisk.worker.copier_base import Slots
from kvdisk.worker.resources import Resources
from kvdisk.worker.routes import Batch, Leg
from kvdisk.worker.slot_headers import SlotHeaders

if TYPE_CHECKING:
    from kvdisk.worker.copier_base import Event

_ON_BLOCKS = frozenset({Leg.GATHER, Leg.SCATTER})
"""Legs that wait for the model's work on vLLM's blocks."""


class BlockCopies:
    """``Backend`` of GATHER and SCATTER, and on a direct route of SUM and SEAL.

    ``given_up``: stores of which no copy from the GPU may begin any more.
    """

    def __init__(self, resources: Resources, headers: SlotHeaders, log: QuietLog) -> None:
        self.given_up: set[JobId] = set()
        self._gathering = threading.Lock()
        """Held while a copy from the GPU begins."""
        self._touching = threading.Lock()
        """Held while any work on the GPU begins."""
        self._unmapped = False
        """No work on the GPU may begin: vLLM has taken its memory away, or is about to."""
        self._copier = resources.copier
        self._direct = resources.direct
        self._groups = resources.geometry.groups
        self._headers = headers
        self._log = log
        self._under_way: list[tuple[Batch, Event]] = []

    # -- any thread ----------------------------------------------------------------------------

    def give_up(self, job_ids: Iterable[JobId]) -> None:
        """Give stores up. Of their copies from the GPU none begins after it returns."""
        self.given_up.update(job_ids)
        with self._gathering:
            pass

    def leave_gpu(self) -> None:
        """Let no work on the GPU begin until ``return_to_gpu``; return when none is under way. What
        would begin fails as CANCELLED."""
        with self._touching:
            self._unmapped = True
        for _, copy in list(self._under_way):
            copy.synchronize()
        self._copier.settle()

    def return_to_gpu(self) -> None:
        """The GPU's memory is there again."""
        self._unmapped = False

    # -- the mover's thread --------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        return bool(self._under_way)

    @property
    def ends_soon(self) -> bool:
        """Whether a copy goes on that has to be asked for its end; not one that waits for the
        model's work, which takes as long as a step."""
        return any(
            batch.leg not in _ON_BLOCKS or batch.work.after is None or batch.work.after.query()
            for batch, _ in self._under_way
        )

    def start(self, batch: Batch) -> Progress:
        """See ``Backend``. Nothing begins of a store that was given up."""
        if batch.leg in _ON_BLOCKS and batch.memory.is_pageable and batch.work.after is not None:
            batch.work.after.synchronize()  # or the copy would wait for it, and who gives stores up for the locks
        with self._touching, self._gathering if batch.leg is Leg.GATHER else nullcontext():
            if self._unmapped:
                return fail_all(batch, Reason.CANCELLED)
            if batch.leg is Leg.GATHER and batch.work.job.id in self.given_up:
                return fail_all(batch, Reason.OVERWRITTEN)
            copy = self._begin(batch)
            if copy is not None:
                batch.pending = True
                self._under_way.append((batch, copy))
        if copy is None:
            text = "the GPU has no memory left for copies: blocks are not stored, or computed instead of loaded"
            self._log.warn("gpu memory", text)
            return fail_all(batch, Reason.NO_GPU_MEMORY)
        return Progress(batch, ended=self._has_ended(batch, copy))

    def poll(self, wait_s: float = 0.0) -> list[Progress]:  # noqa: ARG002 - no event wakes this thread
        return [Progress(batch) for batch, copy in list(self._under_way) if self._has_ended(batch, copy)]

    def settle(self) -> None:
        """Wait until no copy touches the GPU's blocks, once none begins any more. Does not
        raise."""
        for _, copy in list(self._under_way):
            with suppress(Exception):  # a call that a capture forbids, or a GPU that fails
                copy.synchronize()
        self._copier.settle()

    def _begin(self, batch: Batch) -> Event | None:
        """Start the copy; None: the GPU has no memory for it."""
        work = batch.work
        if batch.leg in {Leg.SUM, Leg.SEAL}:
            assert self._direct is not None
            staging = self._direct.staging
            if batch.leg is Leg.SEAL:
                self._headers.seal(batch)
                return staging.start_headers(batch.size_class, batch.slots)
            from kvdisk.worker.copier import Lane  # imports torch

            lane = Lane.STORE if batch.route.gathers else Lane.LOAD
            return staging.start_sums(batch.size_class, batch.slots, self._groups[batch.group].payload_bytes, lane)
        blocks = [block for position in batch.positions for block in work.job.moves[position].gpu_blocks]
        slots = Slots(batch.memory, batch.size_class, batch.slots)
        if batch.leg is Leg.GATHER:
            return self._copier.gather(batch.group, blocks, slots, work.after)
        return self._copier.scatter(batch.group, slots, blocks, work.after)

    def _has_ended(self, batch: Batch, copy: Event) -> bool:
        if not copy.query():
            return False
        copy.synchronize()
        batch.pending = False
        self._under_way = [each for each in self._under_way if each[0] is not batch]
        return True
