# SPDX-License-Identifier: Apache-2.0
"""The counts and runs of a ``SlotPool`` against its map of states."""

from __future__ import annotations

from kvdisk.manager.pool import AWAITING, FREE, SlotPool


def check_pool(pool: SlotPool) -> None:
    """Assert that each slot is counted where its state says (invariant 1)."""
    for size_class, total in enumerate(pool.total):
        maps = [pool.states[segment] for segment, place in pool._place_of.items() if place[0] == size_class]
        assert total == sum(map(len, maps))
        assert pool.free[size_class] == sum(states.count(FREE) for states in maps)
        assert pool.awaiting[size_class] == sum(states.count(AWAITING) for states in maps)
    for place, runs in pool._runs.items():
        ends = {start: start + length for length, starts in runs.starts.items() for start in starts}
        in_runs = [at for start, end in ends.items() for at in range(start, end)]
        segments = [segment for segment, other in pool._place_of.items() if other == place]
        free = {
            (segment << 32) + at
            for segment in segments
            for at, state in enumerate(pool.states[segment])
            if state == FREE
        }
        assert len(in_runs) == len(free) == runs.slots() and set(in_runs) == free
        assert not ends.keys() & set(ends.values()), "two that touch"
