# SPDX-License-Identifier: Apache-2.0
from collections import Counter
from statistics import mean, median

import pytest
from make_traces import FAMILIES, Writer, make_events, make_trace


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_is_as_long_in_tokens_whatever_a_block_has(family: str) -> None:
    small, large = (
        median(len(text) * block_tokens for _, text in make_events(family, 1, block_tokens, 500))
        for block_tokens in (16, 512)
    )
    # The seeds of both differ, and a block of 512 tokens is a rough measure.
    assert 0.5 < small / large < 2
    assert max(len(text) for _, text in make_events(family, 1, 16, 500)) > 1024


def test_coding_agents_are_as_published() -> None:
    writer = Writer(3, 16, evening=True)  # each session to its end
    FAMILIES["coding agents"](writer, 4000)
    texts = [text for _, text in writer.events]
    system_blocks = 18_000 // 16
    agents = [text for text in texts if text[0] in (0, system_blocks, 2 * system_blocks)]
    assert 0.5 < len(agents) / len(texts) < 0.95  # the others are agents of theirs
    # Of a session the first block behind the system prompt is its own, until it is summed up.
    turns = Counter(text[system_blocks] for text in agents)
    assert 30 < median(turns.values()) < 60
    assert 120_000 < mean(len(text) * 16 for text in agents) < 180_000
    seen: set[int] = set()
    repeated = 0
    for text in texts:
        repeated += sum(block in seen for block in text)
        seen.update(text)
    assert repeated / sum(map(len, texts)) > 0.96


def test_a_trace_is_the_same_for_the_same_seed() -> None:
    assert make_trace("chat", 5, 16, 50).requests == make_trace("chat", 5, 16, 50).requests
    assert make_trace("chat", 5, 16, 50).requests != make_trace("chat", 6, 16, 50).requests


@pytest.mark.parametrize("family", FAMILIES)
def test_somebody_new_comes_up_to_the_end(family: str) -> None:
    writer, events = Writer(1, 512), make_events(family, 1, 512, 600)
    FAMILIES[family](writer, 600)
    assert len(events) > 420 and events[-1].time_s <= writer.end_s
    assert events == sorted(writer.events)[: len(events)]


@pytest.mark.parametrize("family", ["chat", "coding agents", "mixed"])
def test_nobody_new_comes_of_an_evening(family: str) -> None:
    writer, events = Writer(1, 512, evening=True), make_events(family, 1, 512, 600, evening=True)
    FAMILIES[family](writer, 600)
    assert len(events) > 540
    assert sum(event.time_s > writer.end_s for event in events) > 150
