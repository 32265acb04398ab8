# SPDX-License-Identifier: Apache-2.0
"""What the demo of two hosts ends with; ``make demo-remote`` runs it."""

from __future__ import annotations

from dataclasses import replace

import demo_remote
from demo import DOCUMENTS, QUESTIONS, Pass
from engine_child import Answer
from rich.console import Console

NAMES = ("vLLM alone", "S3 host A", "S3 host B", "Mooncake host A", "Mooncake host B")


def made(name: str) -> Pass:
    asked = DOCUMENTS * len(QUESTIONS)
    counted = {"hit_tokens.remote": 11000} if name.endswith("B") else {}
    return Pass(name, [[1] * 4000] * asked, [Answer([1, 2], 2000, 12.345)] * asked, counted, None)


PASSES = [made(name) for name in NAMES]


def test_it_passes_where_tokens_are_equal_and_each_store_was_read():
    assert demo_remote.verdict(PASSES) == []


def test_it_says_which_pass_gave_other_tokens_or_loaded_nothing():
    wrong = replace(PASSES[4], counted={}, answers=[Answer([1, 3], 0, 1.0)] * len(PASSES[4].answers))
    said = demo_remote.verdict([*PASSES[:4], wrong])
    assert len(said) == 2
    assert all("'Mooncake host B'" in sentence for sentence in said)


def test_its_table_fits_a_terminal():
    console = Console(width=demo_remote.TABLE_WIDTH, record=True)
    console.print(demo_remote.table_of(PASSES))
    shown = console.export_text()
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    assert shown.count("11,000") == 2
