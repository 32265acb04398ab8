# SPDX-License-Identifier: Apache-2.0
"""What is offered again, and when."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvdisk.blocks import BlockKey
from kvdisk.manager.store_policy import FIRST_BACK_OFF_S, LAST_BACK_OFF_S, Watermark

KEYS = [BlockKey(bytes([number])) for number in range(8)]


def candidates(watermark: Watermark, limit: int, room: int = 0, now: float = 0.0) -> list[int]:
    return list(watermark.candidates(limit, room, now))


def test_refused_for_room_it_is_offered_when_room_came_free_with_back_off():
    watermark = Watermark("a")
    candidates(watermark, 1, 7, 100.0)
    now, back_off_s = 100.0, FIRST_BACK_OFF_S
    for room in range(7, 17):
        watermark.refuse((0,), room, now)
        later = now + back_off_s + 0.001
        assert candidates(watermark, 1, room, later + 60) == [], "no room came free"
        assert candidates(watermark, 1, room + 1, now + back_off_s - 0.001) == [], "too soon"
        assert candidates(watermark, 1, room + 1, later) == [0]
        now, back_off_s = later, min(2 * back_off_s, LAST_BACK_OFF_S)
    assert back_off_s == LAST_BACK_OFF_S
    watermark.accept((0,))
    assert candidates(watermark, 1, 99, now + 99) == []


@given(st.lists(st.tuples(st.integers(0, 6), st.sampled_from("arn"), st.booleans()), max_size=30))
def test_nothing_is_skipped_for_good(steps):
    """Whatever is answered: with room, counts and time each position that was not accepted comes
    again."""
    watermark, accepted, room = Watermark("a"), set(), 0
    limit = 0
    for at, (growth, answer, frees) in enumerate(steps):
        limit = min(8, limit + growth)
        room += frees
        offered = candidates(watermark, limit, room, float(at))
        assert accepted.isdisjoint(offered), "offered again, though it is stored"
        for positions in (offered[::2], offered[1::2]):
            if answer == "a":
                accepted.update(positions)
                watermark.accept(positions)
            elif answer == "r":
                watermark.refuse(positions, room, float(at))
            else:
                watermark.refuse_unused(positions, [KEYS[position] for position in positions])
    for key in KEYS:
        watermark.rise(key)
    assert set(candidates(watermark, limit, room + 1, len(steps) + 60.0)) == set(range(limit)) - accepted
