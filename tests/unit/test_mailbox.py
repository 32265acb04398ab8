# SPDX-License-Identifier: Apache-2.0
"""Who does what is posted: the scheduler's thread, and while it rests whoever posts."""

from __future__ import annotations

import threading

import pytest

from kvdisk.mailbox import Mailbox


def test_a_step_does_one_and_a_rest_begins_when_nothing_is_left():
    mailbox, done = Mailbox(), []
    for number in range(3):
        mailbox.post(lambda number=number: done.append(number))
    assert done == [] and mailbox.work() and done == [0]
    assert mailbox.rest() and done == [0, 1], "the engine takes another step"
    mailbox.wake()
    assert mailbox.rest() and not mailbox.rest() and done == [0, 1, 2]
    mailbox.post(lambda: done.append("at once"))
    assert done[-1] == "at once"
    mailbox.wake()
    mailbox.post(lambda: done.append("with the next step"))
    assert done[-1] == "at once" and mailbox.work() and done[-1] == "with the next step"


def test_an_engine_that_wakes_up_waits_for_who_has_its_turn():
    mailbox, order, inside, go_on = Mailbox(), [], threading.Event(), threading.Event()

    def slow() -> None:
        inside.set()
        go_on.wait()
        order.append("posted")

    def wake() -> None:
        mailbox.wake()
        order.append("awake")

    assert not mailbox.rest()
    poster, sleeper = threading.Thread(target=mailbox.post, args=(slow,)), threading.Thread(target=wake)
    poster.start()
    inside.wait()
    sleeper.start()
    go_on.set()
    for thread in (poster, sleeper):
        thread.join()
    assert order == ["posted", "awake"]


def test_what_fails_meanwhile_reaches_the_engine():
    mailbox = Mailbox()
    assert not mailbox.rest()
    with pytest.raises(ZeroDivisionError):
        mailbox.post(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        mailbox.wake()
    mailbox.wake()
