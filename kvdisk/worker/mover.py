# SPDX-License-Identifier: Apache-2.0
"""Plans go in, reports come out, and a thread of its own moves the bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from kvdisk.blocks import JobId
from kvdisk.errors import start_thread
from kvdisk.geometry import FINGERPRINT_BYTES
from kvdisk.messages import JobResult, Plan, Reason, Report
from kvdisk.worker.resources import Resources
from kvdisk.worker.runner import BATCH_BYTES, Runner

if TYPE_CHECKING:
    from kvdisk.worker.copier_base import Event

_WAIT_S = 0.001
"""Longest wait for the device, or for files, before new plans are looked for."""
_COPY_WAIT_S = 0.0002
"""The same while a copy goes on, which takes about so long. No event wakes this thread."""
URGENT_S = 0.25
"""How long a step waits for copies of what a preemption takes away to begin."""
FENCE_S = 0.5
"""How long a step may wait for the mover's thread: what has not begun then never begins."""


class Mover:
    """Runs every plan of one rank.

    ``fingerprint``: of the namespace until a home is open; any will do where no tier outlives the
    process. ``io_deadline_s``: what has not started so long after ``submit`` fails, and so do the
    moves of a batch that is so long at the device: late, until the device has ended it.
    ``batch_bytes``: aim for the size of a batch. ``threaded``: False for simulations, which call
    ``turn`` themselves.

    The model's thread calls everything but ``turn``; no call waits for a transfer but ``wait_any``
    and ``close``. An exception on the mover's thread is an error of ours: it ends all work, and
    ``poll`` raises it once.
    """

    def __init__(
        self,
        resources: Resources,
        *,
        io_deadline_s: float,
        fingerprint: bytes = bytes(FINGERPRINT_BYTES),
        clock: Callable[[], float] = time.monotonic,
        batch_bytes: int = BATCH_BYTES,
        threaded: bool = True,
    ) -> None:
        self._copier = resources.copier
        self._io_deadline_s = io_deadline_s
        self._clock = clock
        self._changed = threading.Condition()
        self._runner = Runner(
            resources,
            fingerprint=fingerprint,
            io_deadline_s=io_deadline_s,
            clock=clock,
            batch_bytes=batch_bytes,
            threaded=threaded,
        )
        # Under the condition's lock, which nobody holds while waiting for anything:
        self._inbox: list[tuple[Plan, Event | None, float]] = []
        self._fenced: set[JobId] = set()
        """Jobs of which some copy from the GPU has not begun, while ``protect`` waits for them."""
        self._hangs = False
        """``protect`` waited in vain, and no turn has ended since: the next step does not wait."""
        self._out: dict[JobId, int] = {}
        """Moves of each job that was submitted and not yet polled for."""
        self._void: set[JobId] = set()
        """Loads of which no byte may be used: what ``poll`` returns of them is CANCELLED."""
        self._report = Report()
        self._error: BaseException | None = None
        self._raised = False
        self._closing = False
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="kvdisk-mover", daemon=True) if threaded else None
        if self._thread is not None:
            start_thread(self._thread)
        else:
            self._runner.attach()

    # -- the model's thread --------------------------------------------------------------------

    def submit(self, plan: Plan) -> None:
        """Take over a plan. Each job is reported once; one with late moves is released once, too.

        Copies from and to the GPU's blocks begin when the model's work launched so far has ended.
        """
        assert not self._closing, "the mover is closed"
        after = self._copier.compute_done()
        with self._changed:
            twice = [job.id for job in plan.jobs if job.id in self._out]
            assert not twice, f"jobs {twice} were submitted twice"
            self._out.update((job.id, len(job.moves)) for job in plan.jobs)
            self._void.update(self._out.keys() & set(plan.void))
            if self._ended:
                self._cancel_rest()
            else:
                self._inbox.append((plan, after, self._clock()))
                self._fenced.update(job_id for job_id in (*plan.urgent, *plan.fence) if job_id in self._out)
            self._changed.notify_all()

    def protect(self, plan: Plan) -> None:
        """Take over a plan, and let the model's next work wait for the copies of its fenced stores.

        ``plan``: ``Plan.fence`` and ``Plan.urgent``, with those of their jobs that are new. Waits,
        on the host, until their copies from the GPU have begun, or are given up: what cannot begin
        at once, the urgent after ``URGENT_S``, all after ``FENCE_S``, whatever the mover's thread
        hangs at; while it hangs on, the next ones at once. What has been given up never begins. On
        a GPU its streams wait for the copies themselves. What comes after them, in memory or on
        drives, is not waited for.
        """
        started_s = self._clock()
        self.submit(plan)
        if self._thread is None:
            now_s = started_s
            while self._fenced:
                if not self.turn(now_s=now_s):
                    now_s += URGENT_S  # without a thread nothing happens while it waits, so that it waits in vain
        else:
            with self._changed:
                self._changed.wait_for(lambda: not self._fenced, 0.0 if self._hangs else FENCE_S)
                self._hangs = bool(self._fenced)
                unbegun, self._fenced = self._fenced, set()
            self._runner.copies.give_up(unbegun)
        self._copier.hold_model()
        with self._changed:
            self._report.stats.observe("fence_seconds", max(0.0, self._clock() - started_s))

    @property
    def out(self) -> set[JobId]:
        """Jobs that were submitted, and that ``poll`` has not returned yet."""
        with self._changed:
            return set(self._out)

    def halt(self) -> None:
        """Begin nothing more, of the jobs under way either; what has begun ends.

        When it returns no copy from the GPU begins, and the model waits for those that have begun.
        """
        with self._changed:
            self._runner.halt()
            self._changed.notify_all()
        self._runner.copies.give_up(self.out)
        self._copier.hold_model()

    def leave_gpu(self) -> None:
        """Touch no memory of the GPU until ``return_to_gpu``, and wait for what does. Idempotent.

        What else needs it fails meanwhile, as CANCELLED, and so do stores that were submitted
        before and have not begun, whenever they would. Memory and drives go on.
        """
        self._runner.copies.give_up(self.out)
        self._runner.copies.leave_gpu()

    def return_to_gpu(self) -> None:
        """The GPU's memory is where it was. Idempotent."""
        self._runner.copies.return_to_gpu()

    def poll(self) -> Report:
        """Return what was finished since the last call. Raises, once, what ended the mover."""
        with self._changed:
            if self._error is not None and not self._raised:
                self._raised = True
                raise self._error
            report, self._report = self._report, Report()
            for job_id, result in report.results.items():
                if job_id in self._void:
                    report.results[job_id] = self._cancelled(job_id, result)
                del self._out[job_id]
            self._void.difference_update(report.results)
            self._runner.copies.given_up.difference_update(report.results)
            return report

    def wait_any(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for a result of ``poll``; return whether it has one. When idle.

        Waits also when nothing is out: the scheduler steps then for a commit, and should not spin.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._report.results or self._error, timeout_s)
            return bool(self._report.results)

    def is_gone(self, wait_s: float = 0.0) -> bool:
        """Whether its thread has ended after an error that ``poll`` has raised: no drive writes to
        any memory of it any more. After the error wait up to ``wait_s`` for that."""
        if not self._raised or self._thread is None:
            return False
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Cancel what has not ended, and close device and files. Idempotent.

        Waits for the legs under way, late ones too, and for the files, however long they take:
        nothing writes to a slot afterwards. ``poll`` has the results of all jobs, long before that
        where the drive takes long.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        else:
            self._finish()

    # -- the mover's thread --------------------------------------------------------------------

    def turn(self, wait_s: float = 0.0, now_s: float | None = None) -> bool:
        """Take in plans, go one step on, and publish results. Return whether anything happened.

        Without a thread (``threaded=False``) the caller takes the place of the mover's; what this
        raises is an error of ours. ``wait_s``: longest wait for the device where there is nothing
        else to do. ``now_s``: the time, where it is not the clock's.
        """
        with self._changed:
            inbox, self._inbox = self._inbox, []
        for plan, after, submitted_s in inbox:
            for job in plan.jobs:
                urgent = job.id in plan.urgent
                deadline_s = submitted_s + (URGENT_S if urgent else self._io_deadline_s)
                self._runner.add(job, after, deadline_s, urgent=urgent)
            self._runner.fence(plan.fence)
        happened = self._runner.turn(self._clock() if now_s is None else now_s, wait_s) or bool(inbox)
        self._publish()
        return happened

    def _run(self) -> None:
        with ExitStack() as within:  # the end, too: it waits for copies, and gives memory of the GPU back
            try:
                within.enter_context(self._copier.thread())
                self._runner.attach()
                self._turn_until_closed()
            except BaseException as error:  # whatever it is, ``poll`` raises it on the model's thread
                self._error = error
            self._finish()

    def _turn_until_closed(self) -> None:
        happened = True
        while not self._closing:
            wait_s = _COPY_WAIT_S if self._runner.copying else _WAIT_S
            if happened or self._runner.at_device:
                happened = self.turn(0.0 if happened else wait_s)
                continue
            with self._changed:
                if not self._inbox and not self._closing:
                    self._changed.wait(None if self._runner.idle else wait_s)
            happened = True

    def _finish(self) -> None:
        """Cancel what has not ended, now and from now on; then close.

        So a request that waits for a load does not wait for the drive, too, which may never end.
        """
        if self._ended:
            return
        self._runner.await_copies()
        with self._changed:
            self._ended = True
            self._inbox.clear()
            self._fenced.clear()
            self._cancel_rest()
            self._changed.notify_all()
        try:
            self._runner.close()
        except BaseException as error:
            self._error = self._error or error

    def _publish(self) -> None:
        runner = self._runner
        if self._fenced or self._hangs:
            with self._changed:
                self._hangs = False
                coming = {job_id for plan, _, _ in self._inbox for job_id in (*plan.urgent, *plan.fence)}
                self._fenced = {
                    job_id for job_id in self._fenced if job_id in coming or not runner.has_launched(job_id)
                }
                self._changed.notify_all()
        report = runner.take_report()
        if report.empty:
            return
        with self._changed:
            self._report.merge(report)
            if report.results:
                self._changed.notify_all()

    def _cancel_rest(self) -> None:
        for job_id in self._out:
            if job_id not in self._report.results:
                self._report.results[job_id] = self._cancelled(job_id)

    def _cancelled(self, job_id: JobId, result: JobResult | None = None) -> JobResult:
        """Return a job's answer with every move failed; what was late in ``result`` stays late."""
        moves = self._out[job_id]
        late, late_ranks = (result.late, result.late_ranks) if result is not None else (set[int](), 0)
        return JobResult(1, dict.fromkeys(range(moves) if moves else (-1,), Reason.CANCELLED), late, late_ranks)
