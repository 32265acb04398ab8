# SPDX-License-Identifier: Apache-2.0
"""Bugs in reading other engines' homes that the state machine must catch; as ``test_planted_bugs``."""

from __future__ import annotations

from typing import Any

import pytest
from machines import Bugs, Patch, wrap
from support.manager_sizes import BUDGET, NVME_BUDGET, NVME_ONLY, REUSE_CPU

from kvdisk.blocks import Tier
from kvdisk.manager.manager import TierManager
from kvdisk.manager.neighbours import NeighbourCopies
from kvdisk.manager.settlement import Settlement
from kvdisk.messages import JobKind

BUGS = Bugs()


@BUGS.plant_in(NVME_BUDGET, BUDGET, NVME_ONLY)
def foreign_copy_that_failed_asked_for_again(patch: Patch) -> None:
    patch.setattr(NeighbourCopies, "reject", lambda *_: None)


@BUGS.plant
def foreign_block_served_after_the_weights_changed(patch: Patch) -> None:
    patch.setattr(NeighbourCopies, "stop", lambda _: None)


@BUGS.plant
def foreign_segment_closed_under_a_load(patch: Patch) -> None:
    def pin(original: Any, self: NeighbourCopies, copy: Any) -> Any:
        slot = original(self, copy)
        segment = self._open[slot.segment]
        if segment.users == 1:
            self._transfers.add(JobKind.DROP_SEGMENT, [], [], segment=segment.spec)
        return slot

    wrap(patch, NeighbourCopies, "pin", pin)


@BUGS.plant
def foreign_segment_never_closed(patch: Patch) -> None:
    def unpin(self: NeighbourCopies, slot: Any) -> None:
        self._open[slot.segment].users -= 1

    patch.setattr(NeighbourCopies, "unpin", unpin)


@BUGS.plant_in(REUSE_CPU, NVME_ONLY)
def foreign_segment_closed_under_a_late_read(patch: Patch) -> None:
    def settle(original: Any, self: Settlement, move: Any, reason: Any, late: bool) -> None:
        original(self, move, reason, False)

    wrap(patch, Settlement, "_settle_neighbours", settle)


@BUGS.plant
def foreign_block_kept_under_a_generation_of_its_own(patch: Patch) -> None:
    def settle(original: Any, self: Settlement, record: Any, *args: Any) -> None:
        original(self, record, *args)
        for detail, move in zip(record.details, record.job.moves, strict=True):
            row = detail.row
            if Tier.NVME in move.slots and row >= 0 and self._catalog.state(row, Tier.NVME) == 0:
                self._catalog.generations[row] += 1

    wrap(patch, Settlement, "_settle_load", settle)


@BUGS.plant
def waiting_for_an_answer_without_end(patch: Patch) -> None:
    def lookup(original: Any, self: TierManager, request_id: str, *args: Any) -> Any:
        request = self._requests[request_id]
        request.gave_up_waiting, request.wait_started_s = False, None
        return original(self, request_id, *args)

    wrap(patch, TierManager, "lookup", lookup)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS.must_be_caught(name, monkeypatch)
