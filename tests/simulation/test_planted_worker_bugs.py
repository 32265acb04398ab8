# SPDX-License-Identifier: Apache-2.0
"""The simulation is tested too: it must catch each of these bugs, planted in the real worker wing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from support.simulator import run_seeds

from kvdisk.blocks import Tier
from kvdisk.device import header
from kvdisk.device.base import Op, Outcome
from kvdisk.messages import JobKind, JobResult, Reason
from kvdisk.worker import slot_headers
from kvdisk.worker.copier import Slots
from kvdisk.worker.device_io import DeviceIo
from kvdisk.worker.mover import Mover
from kvdisk.worker.routes import Part, Work
from kvdisk.worker.runner import Copies, Runner

SEEDS = 200
"""At most: the first that fails ends the search."""
Patch = pytest.MonkeyPatch
BUGS: dict[str, Callable[[Patch], None]] = {}


def plant(bug: Callable[[Patch], None]) -> Callable[[Patch], None]:
    """Take a bug into the table; a decorator."""
    BUGS[bug.__name__] = bug
    return bug


def wrap(patch: Patch, owner: type, name: str, around: Callable[..., Any]) -> None:
    """Replace a method by ``around(original, self, ...)``."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda self, *args, **kwargs: around(original, self, *args, **kwargs))


def _tolerate(patch: Patch, reason: Reason) -> None:
    def check(original: Callable[..., Reason | None], *args: Any, **kwargs: Any) -> Reason | None:
        found = original(*args, **kwargs)
        return None if found is reason else found

    patch.setattr(slot_headers, "check_slot", partial(check, slot_headers.check_slot))


@plant
def checksum_not_verified(patch: Patch) -> None:
    _tolerate(patch, Reason.CHECKSUM)


@plant
def header_of_another_generation_accepted(patch: Patch) -> None:
    """Whatever generation the header has, and whichever key that then is, is asked for."""

    def check(original: Callable[..., Reason | None], view: memoryview, wanted: header.SlotIdentity) -> Reason | None:
        try:
            found = header.read_header(view)
        except header.CorruptRecord:
            return Reason.HEADER
        return original(view, wanted._replace(generation=found.generation, key=found.key))

    patch.setattr(slot_headers, "check_slot", partial(check, slot_headers.check_slot))


@plant
def slot_not_sealed_with_its_generation(patch: Patch) -> None:
    patch.setattr(slot_headers, "seal_slot", partial(_seal_older, slot_headers.seal_slot))


def _seal_older(original: Callable[..., None], view: memoryview, identity: header.SlotIdentity, *rest: Any) -> None:
    original(view, identity._replace(generation=identity.generation - 1), *rest)


@plant
def staging_of_a_late_part_reused(patch: Patch) -> None:
    """Given back when its moves fail, and not when the device has ended it."""

    def give_up(original: Any, self: Runner, now_s: float) -> bool:
        before = {part for part in _parts_at_device(self) if part.late}
        happened = original(self, now_s)
        for part in _parts_at_device(self):
            if part.late and part not in before:
                self._parts.give_back(part)
                part.staging = []
        return happened

    wrap(patch, Runner, "_give_up", give_up)


def _parts_at_device(runner: Runner) -> list[Part]:
    return [flight.part for flight in runner._device_io._flights.values()]


@plant
def late_slots_released_before_the_device_has_ended_them(patch: Patch) -> None:
    def finish(original: Any, self: Runner, work: Work) -> None:
        original(self, work)
        if work.late:
            self._report.released[work.job.id] = 1

    def end_late(original: Any, self: Runner, part: Part) -> None:
        self._parts.give_back(part)

    wrap(patch, Runner, "_finish", finish)
    wrap(patch, Runner, "_end_late", end_late)


@plant
def late_slots_never_released(patch: Patch) -> None:
    wrap(patch, Runner, "_end_late", lambda original, self, part: self._parts.give_back(part))


@plant
def late_moves_not_said_to_be_late(patch: Patch) -> None:
    def result(original: Any, self: Work) -> Any:
        found = original(self)
        found.late, found.late_ranks = set(), 0
        return found

    wrap(patch, Work, "result", result)
    wrap(patch, Runner, "_end_late", lambda original, self, part: self._parts.give_back(part))


@plant
def late_read_goes_on_when_it_ends(patch: Patch) -> None:
    """Its job was reported as failed, and its blocks are somebody else's by now."""

    def reap(original: Any, self: Runner, outcomes: Sequence[Outcome]) -> None:
        for part, failed in list(self._device_io.ended(outcomes)):
            if part.late:
                self._end_late(part)
                if part.route.scatters:
                    blocks = [part.work.job.moves[at].block for at in part.positions]
                    self._resources.copier.scatter(part.group, Slots(part.arena, part.size_class, part.slots), blocks)
            else:
                self._drop(part, failed)
                self._advance(part)

    wrap(patch, Runner, "_reap", reap)


@plant
def store_reported_before_its_write_ended(patch: Patch) -> None:
    def send(original: Any, self: Runner, part: Part, op: Op) -> dict[int, Reason]:
        failed = original(self, part, op)
        if op is Op.WRITE:
            self._report.results[part.work.job.id] = JobResult()
        return failed

    def finish(self: Runner, work: Work) -> None:
        del self._works[work.job.id]
        if not _writes(work):
            self._report.results[work.job.id] = work.result()

    wrap(patch, Runner, "_send", send)
    patch.setattr(Runner, "_finish", finish)


def _writes(work: Work) -> bool:
    moves = work.job.moves
    return work.job.kind is JobKind.DEMOTE or (work.job.kind is JobKind.STORE and Tier.CPU not in moves[0].slots)


@plant
def one_ranks_failure_swallowed(patch: Patch) -> None:
    def result(original: Any, self: Work) -> Any:
        found = original(self)
        if self.job.kind in {JobKind.STORE, JobKind.DEMOTE}:
            found.failed = {at: reason for at, reason in found.failed.items() if at in found.late}
        return found

    wrap(patch, Work, "result", result)


@plant
def second_try_of_a_transfer_forgets_the_first(patch: Patch) -> None:
    """A merged transfer that failed counts as moved."""

    def ended(original: Any, self: DeviceIo, outcomes: Sequence[Outcome]) -> Any:
        return original(self, [Outcome(outcome.ticket, {}) for outcome in outcomes])

    wrap(patch, DeviceIo, "ended", ended)


@plant
def copies_not_awaited(patch: Patch) -> None:
    """A part goes on when its copy was begun."""

    def start(original: Any, self: Copies, part: Part, leg: Any) -> bool:
        ended = original(self, part, leg)
        if not ended:
            for copies in self._under_way:
                if copies and copies[-1][0] is part:
                    copies.pop()
        return True

    wrap(patch, Copies, "start", start)


@plant
def void_load_served(patch: Patch) -> None:
    patch.setattr(Runner, "void", lambda self, job_ids: None)
    patch.setattr("kvdisk.worker.mover.Mover._cancelled", lambda self, job_id, result=None: result)


@plant
def deadline_never_looked_at(patch: Patch) -> None:
    patch.setattr(DeviceIo, "overdue", lambda self, sent_before_s: [])


@plant
def step_that_does_not_wait_for_the_copies(patch: Patch) -> None:
    def protect(original: Any, self: Mover, *args: Any) -> None:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(self._copier, "hold_model", lambda: None)
            original(self, *args)

    wrap(patch, Mover, "protect", protect)


@plant
def step_that_waits_for_what_was_copied_before(patch: Patch) -> None:
    """Its event is from before the copies were launched."""

    def protect(original: Any, self: Mover, *args: Any) -> None:
        self._copier.hold_model()
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(self._copier, "hold_model", lambda: None)
            original(self, *args)

    wrap(patch, Mover, "protect", protect)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", "kvdisk")
    BUGS[name](monkeypatch)
    with pytest.raises(AssertionError):
        run_seeds(0, SEEDS)
