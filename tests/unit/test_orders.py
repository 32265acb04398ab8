# SPDX-License-Identifier: Apache-2.0
"""Requests of commands to running engines: who may take them, and for how long they are meant."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvdisk.device.home import Home
from kvdisk.device.orders import (
    SLIP_BYTES,
    Answer,
    Request,
    is_taken,
    read_answer,
    read_request,
    take_request,
    withdraw,
    write_answer,
    write_request,
)
from kvdisk.device.store import Store
from kvdisk.mailbox import Mailbox
from kvdisk.manager.tiers import Cleared
from kvdisk.orders import Orders

DAY_S = 86_400.0
ONE, OTHER = "1" * 32, "2" * 32


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Store.open(tmp_path / "store").acquire_home(b"\1" * 32, {"model": "m"}, 64 << 20)
    yield home
    home.close(clean=True)


class Engine:
    """An engine at rest with a segment of three blocks. ``asked``: how often they were let go."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.asked = 0
        manager: Any = SimpleNamespace(last_generation=5, clear_memory=lambda _: Cleared())
        nvme: Any = SimpleNamespace(segments=SimpleNamespace(specs={7: None}), let_go=self.let_go)
        self.mailbox = Mailbox()
        self.orders = Orders(home, manager, nvme, self.mailbox)
        self.orders.look()
        assert not self.mailbox.rest()

    def let_go(self, segment: int) -> Cleared:
        assert segment == 7
        self.asked += 1
        return Cleared(3, 100)

    def answer_to(self, request: Request) -> Answer:
        write_request(self.home.path, request)
        self.orders.look()
        answer = read_answer(self.home.path)
        assert answer is not None and answer.id == request.id
        assert not list(self.home.path.glob("REQUEST*")), "it is looked at once"
        return answer


def request_of(home: Home, ago_s: float = 0.0, **changes: Any) -> Request:
    return Request(ONE, home.id, time.time() - ago_s, 600.0, everything=True)._replace(**changes)


def test_a_request_is_done_once(home):
    engine = Engine(home)
    assert engine.answer_to(request_of(home)) == Answer(ONE, 3, 1, 100, waits=True)
    engine.orders.look()
    assert engine.asked == 1


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"home_id": OTHER}, "it was for an earlier engine of this engine store"),
        ({"ago_s": 601.0}, "it was valid for 600 s, and is 601 s old by this host's clock"),
        ({"ago_s": -DAY_S}, "it was valid for 600 s, and is -86400 s old by this host's clock"),
        ({"wait_s": 0.0}, "it was valid for 0 s, and is 0 s old by this host's clock"),
    ],
)
def test_what_was_meant_for_another_owner_or_time_is_left_undone(home, changes, why, caplog):
    engine = Engine(home)
    assert engine.answer_to(request_of(home, **changes)) == Answer(ONE, 0, 0, 0, waits=False, why=why)
    assert engine.asked == 0 and why in caplog.text


def test_what_a_step_comes_to_after_its_time_is_not_done(home, monkeypatch):
    """As in an engine that was stopped (SIGSTOP) after it had taken the request."""
    engine = Engine(home)
    engine.mailbox.wake()
    answer = engine.answer_to(request_of(home, wait_s=0.05))
    assert (answer.blocks, answer.why) == (0, "it has expired")
    while engine.mailbox.work():
        pass
    assert engine.asked == 0


def test_of_taking_and_withdrawing_one_succeeds(home):
    path = home.path
    assert take_request(path) is None and not withdraw(path, ONE)
    write_request(path, request_of(home))
    assert withdraw(path, ONE) and take_request(path) is None and not withdraw(path, ONE)
    write_request(path, request := request_of(home))
    assert take_request(path) == request
    assert not withdraw(path, ONE) and is_taken(path, ONE) and not is_taken(path, OTHER)
    write_request(path, other := request_of(home, id=OTHER))
    assert not withdraw(path, ONE), "nobody takes back what another command has asked for"
    assert read_request(path) == other
    write_answer(path, Answer(ONE, 0, 0, 0, waits=False))
    assert not is_taken(path, ONE) and (path / "ANSWER").stat().st_size == SLIP_BYTES


def test_what_cannot_be_read_is_no_request(home, caplog):
    engine = Engine(home)
    for text in ("{", '{"json_version": 1}', '{"json_version": 2, "id": 5}'):
        (home.path / "REQUEST").write_text(text)
        engine.orders.look()
    assert engine.asked == 0 and caplog.text.count("ignores a deletion request that it cannot read") == 3
    assert engine.answer_to(request_of(home)).blocks == 3


def test_a_drive_that_does_not_take_the_answer_is_asked_again(home, monkeypatch):
    engine = Engine(home)

    def fail(*_: object) -> None:
        raise OSError(5, "no")

    monkeypatch.setattr("kvdisk.orders.write_answer", fail)
    write_request(home.path, request_of(home))
    with pytest.raises(OSError, match="no"):
        engine.orders.look()
    monkeypatch.undo()
    engine.orders.look()
    assert engine.asked == 1 and read_answer(home.path) == Answer(ONE, 3, 1, 100, waits=True)
