# SPDX-License-Identifier: Apache-2.0
"""What a state machine and a simulation do with a manager over a fake engine, whatever else they
choose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvdisk.index.memory_index import MemoryIndex
from support.fake_engine import FakeEngine, Phase
from support.manager_parts import ManagerParts
from support.manager_watch import ManagerWatch

LONGEST_QUARANTINE_S = 3601.0


class Life:
    """A process, and its clock. ``budget_tokens``: of a step."""

    budget_tokens: int
    quiet_rounds: int
    now: float
    engine: FakeEngine
    parts: ManagerParts
    watch: ManagerWatch
    ranks: Sequence[Any]
    index: MemoryIndex

    def _advance(self, seconds: float) -> None:
        self.now += seconds
        self.engine.now = self.now

    def _drift(self) -> None:
        """Let time pass in which transfers may go on."""

    def _finish_step(self) -> None:
        if self.engine.phase is Phase.SCHEDULED:
            self.engine.forward()
        if self.engine.phase is Phase.COMPUTED:
            self._drift()
            self.engine.update()

    def _round(self) -> None:
        """Let everything end that is under way, and run a step."""
        for rank in self.ranks:
            rank.work_off()
        self.index.refuse_puts = False
        self.index.commit()
        self._advance(2.5)
        self.engine.schedule(self.budget_tokens)
        self._finish_step()

    def _rest(self) -> None:
        """Let every request end, and step until nothing is pending: then nothing is left of
        them."""
        self._finish_step()
        for request in self.engine.requests.values():
            request.finishing = True
        self.index.refuse_puts = False
        for _ in range(self.quiet_rounds):
            self.parts.manager.commit()  # as the connector does before it asks
            self.watch.note_progress()
            if not self.engine.requests and not self.parts.manager.has_pending_work(self.now):
                break
            self._round()
        else:
            left = list(self.engine.requests.values())
            raise AssertionError(f"it never becomes quiet: {left}, {len(self.parts.transfers)} jobs")
        self.watch.check()
        self.watch.check_quiet()
