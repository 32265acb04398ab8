# SPDX-License-Identifier: Apache-2.0
"""kvdisk's lines within vLLM: where vLLM's go, unless somebody has said otherwise."""

from __future__ import annotations

import logging
from logging.handlers import BufferingHandler

import pytest

from kvdisk.connector.log import join_log

ROOT, OURS, THEIRS = (logging.getLogger(name) for name in (None, "kvdisk", "vllm"))


def shown() -> BufferingHandler:
    return BufferingHandler(1000)


def lines(handler: BufferingHandler) -> list[str]:
    return [record.getMessage() for record in handler.buffer]


@pytest.fixture
def set_up(monkeypatch):
    """Give each of the three loggers its handlers, within the test only: pytest has some on the
    root of its own."""
    level = OURS.level

    def change(root=(), ours=(), theirs=()):
        for logger, handlers in ((ROOT, root), (OURS, ours), (THEIRS, theirs)):
            monkeypatch.setattr(logger, "handlers", list(handlers))
        THEIRS.setLevel(logging.INFO)
        OURS.setLevel(logging.NOTSET)

    yield change
    OURS.setLevel(level)


def test_lines_go_where_those_of_vllm_go_once_each(set_up):
    theirs = shown()
    set_up(theirs=[theirs])
    for _ in range(2):
        join_log()
    OURS.info("chosen")
    OURS.getChild("device").info("deeper")
    OURS.debug("hidden")
    assert lines(theirs) == ["chosen", "deeper"]


@pytest.mark.parametrize("whose", ["root", "ours", None])
def test_what_somebody_has_set_up_stays_and_so_does_an_engine_without_a_log(set_up, whose):
    theirs, other = shown(), shown()
    set_up(**({whose: [other], "theirs": [theirs]} if whose else {}))
    join_log()
    OURS.warning("theirs to show")
    assert (lines(theirs), lines(other)) == ([], ["theirs to show"] if whose else [])
    assert OURS.level == logging.NOTSET and (whose or not OURS.hasHandlers())
