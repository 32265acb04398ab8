# SPDX-License-Identifier: Apache-2.0
"""Whether somebody new still comes."""

import random

import pytest

from kvdisk.blocks import BlockKey
from kvdisk.manager.admission import AdmitLearned
from kvdisk.manager.newcomers import Newcomers
from kvdisk.manager.reuse import STATES, ReuseHistory


@pytest.mark.parametrize("share", [0.05, 0.1, 0.5, 0.9, 1.0])
def test_it_is_an_evening_once_nobody_new_has_come_for_long(share):
    rng, newcomers, clock = random.Random(7), Newcomers(), iter(range(10**6))

    def come(count, share):
        found = []
        for _ in range(count):
            newcomers.note(next(clock), is_new=rng.random() < share)
            found.append(newcomers.is_evening)
        return found

    assert not any(come(20_000, share)), "while somebody comes"
    evening = come(2000, 0.0)
    assert not any(evening[:28]) and all(evening[1500:])
    assert not any(evening[: int(10 / share)]), "the fewer are new, the longer it takes"
    assert not come(2, 1.0)[-1], "two end it"


def test_a_share_that_falls_for_good_is_no_evening_for_long():
    """An hour after a server's work has changed, fewer who are new are as many as ever."""
    rng, newcomers = random.Random(3), Newcomers()
    for at in range(3000):
        newcomers.note(at, is_new=rng.random() < 0.7)
    found = []
    for at in range(3000, 12_000):
        newcomers.note(at, is_new=rng.random() < 0.04)
        found.append(newcomers.is_evening)
    assert any(found[:3000]) and not any(found[5000:])


def key_of(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(34, "little"))


def test_a_request_counts_once_whatever_its_groups_parts_and_states():
    """Of seven groups, of which each brings something, and of parts, the first says what it is."""
    history, noted = ReuseHistory([6]), []
    history._newcomers.note = lambda came, *, is_new: noted.append((came, is_new))
    keys = [[key_of(1000 * group + at) for at in range(40)] for group in range(6)]

    def ask(blocks, parts):
        came = None
        for group in range(6):
            visit = history.begin(0, blocks, before=came)
            came, origin = visit.before, 0
            for start, stop in zip((0, *parts), (*parts, blocks), strict=True):
                origin = history.count(keys[group], start, stop, origin, visit)
        history.count((key_of(9000 + blocks),), 0, 1, STATES, history.begin(0, 1, is_prompt=False, before=came))
        return came

    first = ask(10, ())
    second = ask(40, (5, 20))
    assert set(noted) == {(first, True), (second, False)}, "what begins, and what goes on"
    counted = Newcomers()
    for came, is_new in noted:
        counted.note(came, is_new=is_new)
    assert counted._count == 4, "two, and two that are assumed"
    noted.clear()
    ask(40, ())
    assert not noted, "all was known"


def test_of_an_evening_all_may_enter_again():
    """Conversations that pause were refused while others came, as few of them go on."""
    history = ReuseHistory()
    history.reserve(100)
    admission = AdmitLearned(history)
    admission.note_room(0, 100)
    assert not admission.admits_all
    talks, number = [[key_of(at)] for at in range(40)], 100
    for at in range(40 * 6):
        if at > 40:
            number += 1
            talks[at % 40].append(key_of(number))
        talk = talks[at % 40]
        history.count(talk, 0, len(talk), 0, history.begin(0, len(talk)))
    assert history.is_evening and admission.admits_all
    for at in range(2):
        history.count([key_of(10**6 + at)], 0, 1, 0, history.begin(0, 1))
    assert not admission.admits_all
