# SPDX-License-Identifier: Apache-2.0
"""Functions called at intervals on a thread: what fails, what hangs, and the end."""

from __future__ import annotations

import logging
import threading

from support.waits import WAIT_S, until

from kvdisk import background
from kvdisk.background import Background
from kvdisk.errors import ConfigError


def test_functions_are_called_at_once_at_their_intervals_and_at_the_end(monkeypatch, caplog):
    monkeypatch.setattr(background, "CLOSE_TIMEOUT_S", WAIT_S)
    failed, broken, often, rarely = [], [], [], []

    def fails() -> None:
        failed.append(1)
        raise ConfigError("no")

    def breaks() -> None:
        broken.append(1)
        raise ZeroDivisionError

    with caplog.at_level(logging.WARNING, logger="kvdisk"):
        jobs = [(0.01, fails), (0.01, breaks), (0.01, lambda: often.append(1)), (600, lambda: rarely.append(1))]
        thread = Background(jobs, [lambda: rarely.append(2)])
        until(lambda: len(failed) >= 3 and len(often) >= 3)
        assert len(rarely) == 1
        thread.close()
    assert not thread._thread.is_alive(), "nothing is called any more"
    thread.close()
    assert rarely == [1, 2] and len(broken) == 1
    assert sorted(record.levelname for record in caplog.records) == ["ERROR", "WARNING"], "each is told once"


def test_one_that_hangs_does_not_keep_the_engine_from_ending(monkeypatch):
    monkeypatch.setattr(background, "CLOSE_TIMEOUT_S", 0.05)
    released = threading.Event()
    thread = Background([(0.01, lambda: released.wait(WAIT_S) and None)])
    thread.close()
    assert thread._thread.is_alive(), "it is left to itself"
    released.set()
