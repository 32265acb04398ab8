# SPDX-License-Identifier: Apache-2.0
"""What is saved of a victim whose window has moved on: a fake engine over the real manager."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.manager_sizes import ON_PREEMPTION_WINDOW
from support.small_engine import SmallEngine

from kvdisk.blocks import make_block_key
from kvdisk.messages import JobKind


class Place(SmallEngine):
    """An engine with a window of 4 tokens in its second group, and what its plans stored.

    A block must be wanted before it is let in.
    """

    def __init__(self) -> None:
        sizes = ON_PREEMPTION_WINDOW
        super().__init__(
            replace(
                sizes,
                geometry=replace(sizes.geometry, rank_count=1),
                config=replace(sizes.config, cpu_admission="reuse(1)"),
                cpu_slots=(8, 8),
                block_count=30,
            )
        )
        self.stored: list[bytes] = []

    def run(self) -> None:
        plan = self.step(work=False)
        self.stored += [move.key for job in plan.jobs if job.kind is JobKind.STORE for move in job.moves]

    def preempt(self) -> None:
        """As for lack of room, in the next step."""
        victim = self.engine.running.pop()
        self.engine._preempt(victim)
        self.engine._preempted.append(victim.id)


@pytest.mark.parametrize("given_away", [False, True])
def test_a_block_that_the_window_left_behind_is_saved_if_nobody_has_it(given_away):
    place = Place()
    request = place.engine.add("a", "aabbccdd", 4)
    place.run()
    assert request.computed == 8
    # A step in which the engine looks at the request, takes what is behind its window, and does not
    # schedule it.
    left = request.table[1][:2]
    assert all(left)
    place.engine.pool.free_blocks(left)
    request.table[1][:2] = [0, 0]
    if given_away:
        place.engine.pool.take(place.engine.pool.free_count)
    place.preempt()
    if given_away:
        place.engine.pool.free_blocks(left)
    place.run()
    window = [make_block_key(text.encode(), 1) for text in ("aa", "aabb", "aabbcc", "aabbccdd")]
    assert [key in place.stored for key in window] == [not given_away, not given_away, True, True]


def test_admission_is_told_who_wants_a_generated_block_before_it_is_asked(monkeypatch):
    place = Place()
    monkeypatch.setattr(place.watch, "_is_admitted", lambda *_: True)  # it hears of prompts alone
    place.engine.add("a", "aabbccddt", 4)
    for _ in range(4):
        place.run()
    place.preempt()
    place.run()
    assert make_block_key(b"aabbccddtzzz", 0) in place.stored
