# SPDX-License-Identifier: Apache-2.0
"""What is offered again, and when."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvdisk.manager.watermark import FIRST_BACK_OFF_S, LAST_BACK_OFF_S, Refusal, Watermark


def never(_: int) -> int:
    return 0


def test_a_block_is_offered_once():
    watermark = Watermark()
    assert watermark.candidates(2, 0, 0.0, never) == [0, 1]
    for position in (0, 1):
        watermark.accept(position)
    assert watermark.candidates(2, 5, 9.0, never) == []
    assert watermark.candidates(4, 5, 9.0, never) == [2, 3]


def test_refused_for_reuse_it_is_offered_when_its_count_rises_and_no_other():
    watermark, counts = Watermark(), [1, 1]
    watermark.candidates(2, 0, 0.0, counts.__getitem__)
    for position in (0, 1):
        watermark.refuse(position, Refusal.NOT_REUSED, counts[position], 0.0)
    assert watermark.candidates(2, 9, 9.0, counts.__getitem__) == [], "room and time are nothing to it"
    counts[1] = 2
    assert watermark.candidates(2, 9, 9.0, counts.__getitem__) == [1]


def test_refused_for_room_it_is_offered_when_room_came_free_with_back_off():
    watermark = Watermark()
    watermark.candidates(1, 7, 100.0, never)
    now, back_off_s = 100.0, FIRST_BACK_OFF_S
    for room in range(7, 17):
        watermark.refuse(0, Refusal.NO_ROOM, room, now)
        later = now + back_off_s + 0.001
        assert watermark.candidates(1, room, later + 60, never) == [], "no room came free"
        assert watermark.candidates(1, room + 1, now + back_off_s - 0.001, never) == [], "too soon"
        assert watermark.candidates(1, room + 1, later, never) == [0]
        now, back_off_s = later, min(2 * back_off_s, LAST_BACK_OFF_S)
    assert back_off_s == LAST_BACK_OFF_S
    watermark.accept(0)
    assert watermark.candidates(1, 99, now + 99, never) == []


def test_beyond_the_frontier_nothing_is_refused():
    watermark = Watermark()
    watermark.refuse(3, Refusal.NO_ROOM, 0, 0.0)
    assert watermark.candidates(5, 9, 9.0, never) == [0, 1, 2, 3, 4]


@given(st.lists(st.tuples(st.integers(0, 6), st.sampled_from("arn"), st.booleans()), max_size=30))
def test_nothing_is_skipped_for_good(steps):
    """Whatever is answered: with room, counts and time each position that was not accepted comes again."""
    watermark, accepted, room, counts = Watermark(), set(), 0, [0] * 8
    limit = 0
    for at, (growth, answer, frees) in enumerate(steps):
        limit = min(8, limit + growth)
        room += frees
        for position in watermark.candidates(limit, room, float(at), counts.__getitem__):
            assert position not in accepted, "offered again, though it is stored"
            if answer == "a":
                accepted.add(position)
                watermark.accept(position)
            else:
                why = Refusal.NO_ROOM if answer == "r" else Refusal.NOT_REUSED
                mark = room if why is Refusal.NO_ROOM else counts[position]
                watermark.refuse(position, why, mark, float(at))
    counts = [count + 1 for count in counts]
    last = watermark.candidates(limit, room + 1, len(steps) + 60.0, counts.__getitem__)
    assert set(last) == set(range(limit)) - accepted
