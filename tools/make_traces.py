# SPDX-License-Identifier: Apache-2.0
"""Writes a trace of a family of requests, for ``kvdisk replay``: the same for the same seed.

    python tools/make_traces.py agents --seed 2 --block-tokens 512 >agents.jsonl

The families are not traces of anybody. They have the shapes that decide between policies: many fast
turns, long pauses, documents of which some are asked for often, prompts that never come back. A
prompt has as many tokens as a user's, whatever a block has: of 16 tokens it is thousands of blocks.

Somebody new comes up to a trace's end, as on a server. With ``--evening`` nobody new comes from
early on, and what has begun goes on to its end.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count, islice
from typing import NamedTuple

from kvdisk.cli.replay.trace import Chain, Trace, TracedRequest

EVENING = ", an evening"
"""Behind a trace's name: nobody new comes from early on."""
_DAY_S = 86_400.0
_LONGEST_TOKENS = 100_000
_LONGEST_CODING_TOKENS = 320_000
"""A coding agent's context that is as long is summed up, and begun anew."""

Text = list[int]
"""Blocks by number: of equal content the numbers are equal."""


class Event(NamedTuple):
    """A request. ``text``: its prompt."""

    time_s: float
    text: Text


class Writer:
    """Makes texts, and notes requests for them.

    ``evening``: see the module. ``rng``: decides everything. ``end_s``: up to then somebody new
    comes, of every kind of work.
    """

    def __init__(self, seed: int, block_tokens: int, *, evening: bool = False) -> None:
        self.rng = random.Random(f"{seed} {block_tokens}")  # noqa: S311 - nothing is secret
        self.events: list[Event] = []
        self.end_s = math.inf
        self.evening = evening
        self._block_tokens = block_tokens
        self._numbers = count()

    def text(self, tokens: float) -> Text:
        """Return a text that nobody has written before."""
        return list(islice(self._numbers, max(1, round(min(tokens, _LONGEST_TOKENS) / self._block_tokens))))

    def around(self, median: float, spread: float) -> float:
        """Return a number near ``median``: its logarithm is normal."""
        return median * math.exp(self.rng.gauss(0, spread))

    def ask(self, time_s: float, text: Text) -> None:
        """Note a request; its last block is partial, and its own."""
        self.events.append(Event(time_s, [*text, next(self._numbers)]))

    def arrivals(
        self, requests: int, every_s: float, load: Callable[[float], float] = lambda _: 1.0
    ) -> Iterator[float]:
        """Yield times until so many requests have come by then, or, of an evening, are noted; of
        another kind of work than the first up to ``end_s``. ``load``: how busy a time is."""
        time_s, noted, coming = 0.0, len(self.events), list[float]()
        while requests > 0 if self.end_s == math.inf else time_s < self.end_s:
            time_s += self.rng.expovariate(load(time_s) / every_s)
            yield time_s
            for event in self.events[noted:]:
                heappush(coming, event.time_s)
            noted = len(self.events)
            while coming and (self.evening or coming[0] <= time_s):
                heappop(coming)
                requests -= 1
        self.end_s = min(self.end_s, time_s)

    def is_long(self, text: Text, most_tokens: float = _LONGEST_TOKENS) -> bool:
        """Whether a context is full."""
        return len(text) * self._block_tokens > most_tokens


def write_agents(
    writer: Writer, requests: int, every_s: float = 20.0, systems: int = 4, system_tokens: float = 6000
) -> None:
    """Agents of many turns: tools answer in seconds, builds and users in minutes; some start agents
    of their own. A full context is begun anew."""
    rng = writer.rng
    prompts = [writer.text(system_tokens) for _ in range(systems)]
    helpers = [writer.text(system_tokens / 2) for _ in range(3)]
    for start_s in writer.arrivals(requests, every_s):
        time_s, text = start_s, rng.choice(prompts) + writer.text(writer.around(3000, 0.8))
        for _ in range(min(120, 1 + int(rng.expovariate(1 / 18)))):
            writer.ask(time_s, text)
            text = text + writer.text(writer.around(700, 0.9))
            what = rng.random()
            if what < 0.08:
                time_s += writer.around(90, 1.0)
            elif what < 0.13:
                time_s = _ask_helper(writer, time_s, rng.choice(helpers)) + 3
            else:
                time_s += writer.around(6, 0.9)
            if writer.is_long(text):
                text = rng.choice(prompts) + writer.text(4000)


def _ask_helper(writer: Writer, time_s: float, prompt: Text, tokens: float = 700) -> float:
    """An agent's agent, which reads so many tokens a turn; return when it is done."""
    text = prompt + writer.text(writer.around(1500, 0.7))
    for _ in range(1 + int(writer.rng.expovariate(1 / 6))):
        time_s += writer.around(5, 0.8)
        writer.ask(time_s, text)
        text = text + writer.text(writer.around(tokens, 0.9))
    return time_s


def write_coding_agents(writer: Writer, requests: int, every_s: float = 150.0) -> None:
    """Coding agents as operators publish them: a median of 43 turns, 142,000 tokens in and 444 out
    a turn, of which more than 96 % came before; 44 % of sessions have agents of their own."""
    rng = writer.rng
    prompts = [writer.text(18_000) for _ in range(3)]
    helpers = [writer.text(9000) for _ in range(3)]
    for start_s in writer.arrivals(requests, every_s):
        has_helpers = rng.random() < 0.44
        time_s, prompt = start_s, rng.choice(prompts)
        text = prompt + writer.text(writer.around(20_000, 0.6))
        for turn in range(max(1, min(200, round(writer.around(43, 0.7))))):
            writer.ask(time_s, text)
            text = text + writer.text(444 + writer.around(2400, 0.8))
            if has_helpers and (turn == 1 or rng.random() < 0.03):
                time_s = _ask_helper(writer, time_s, rng.choice(helpers), tokens=2000)
            time_s += writer.around(240, 1.2) if rng.random() < 0.06 else writer.around(9, 0.9)
            if writer.is_long(text, _LONGEST_CODING_TOKENS):
                text = prompt + writer.text(12_000)


def write_documents(
    writer: Writer, requests: int, every_s: float = 4.0, documents: int = 400, skew: float = 0.9
) -> None:
    """Documents that many ask about, some much more often than others; now and then one is new."""
    rng, prompt = writer.rng, writer.text(1000)
    texts = [prompt + writer.text(writer.around(12_000, 0.9)) for _ in range(documents)]
    weights = [(at + 1) ** -skew for at in range(documents)]
    for start_s in writer.arrivals(requests, every_s):
        if rng.random() < 0.01:
            texts[rng.randrange(documents)] = prompt + writer.text(writer.around(12_000, 0.9))
        time_s, text = start_s, rng.choices(texts, weights)[0]
        for _ in range(1 + int(rng.expovariate(1 / 0.8))):
            text = text + writer.text(writer.around(100, 0.5))
            writer.ask(time_s, text)
            text = text + writer.text(writer.around(400, 0.6))
            time_s += writer.around(40, 1.0)


def write_chat(
    writer: Writer,
    requests: int,
    every_s: float = 1.0,
    pause_s: float = 120,
    system_tokens: float = 1500,
    load: Callable[[float], float] = lambda _: 1.0,
) -> None:
    """Conversations of few turns or many, with pauses of minutes, and a few of hours."""
    rng = writer.rng
    prompts = [writer.text(system_tokens * (at + 1)) for at in range(3)]
    for start_s in writer.arrivals(requests, every_s, load):
        time_s, text = start_s, prompts[min(2, int(rng.paretovariate(1.3)) - 1)]
        for _ in range(min(60, int(rng.paretovariate(1.25)))):
            text = text + writer.text(writer.around(1500, 1.1))
            writer.ask(time_s, text)
            text = text + writer.text(writer.around(400, 0.8))
            time_s += writer.around(pause_s, 1.4)
            if rng.random() < 0.05:
                time_s += writer.around(3 * 3600, 1.0)


def write_scans(writer: Writer, requests: int, every_s: float = 2.0) -> None:
    """A batch of prompts that never come back, but for what they begin with."""
    prompt = writer.text(800)
    for time_s in writer.arrivals(requests, every_s):
        writer.ask(time_s, prompt + writer.text(writer.around(6000, 0.7)))


def write_day(writer: Writer, requests: int) -> None:
    """Two days and more of chat, busy and quiet, and batches at night."""
    write_chat(writer, int(requests * 0.7), every_s=6 * _DAY_S / requests, load=lambda time_s: 1 + 0.8 * _sun(time_s))
    prompt, nights = writer.text(800), max(1, round(writer.end_s / _DAY_S))
    for _ in range(int(requests * 0.3)):
        time_s = (writer.rng.randrange(nights) + writer.rng.uniform(0.6, 0.9)) * _DAY_S
        writer.ask(time_s, prompt + writer.text(writer.around(6000, 0.7)))


def _sun(time_s: float) -> float:
    return math.sin(2 * math.pi * time_s / _DAY_S)


def write_mixed(writer: Writer, requests: int) -> None:
    """Agents, chat, documents and a batch on one server."""
    write_agents(writer, int(requests * 0.4))
    every_s = writer.end_s / requests
    write_chat(writer, int(requests * 0.25), every_s=every_s / 0.25 * 3)
    write_documents(writer, int(requests * 0.2), every_s=every_s / 0.2 * 1.8)
    write_scans(writer, int(requests * 0.15), every_s=every_s / 0.15)


FAMILIES: Mapping[str, Callable[[Writer, int], None]] = {
    "agents": write_agents,
    "busy agents": lambda writer, requests: write_agents(writer, requests, 3.0, systems=8, system_tokens=15_000),
    "coding agents": write_coding_agents,
    "documents": write_documents,
    "many documents": lambda writer, requests: write_documents(writer, requests, documents=1500, skew=0.6),
    "chat": write_chat,
    "slow chat": lambda writer, requests: write_chat(writer, requests, pause_s=900, system_tokens=4000),
    "scans": write_scans,
    "day": write_day,
    "mixed": write_mixed,
}


def make_events(family: str, seed: int, block_tokens: int, requests: int, *, evening: bool = False) -> Sequence[Event]:
    """Return a trace of a family, in order of time."""
    writer = Writer(seed, block_tokens, evening=evening)
    FAMILIES[family](writer, requests)
    return sorted(event for event in writer.events if evening or event.time_s <= writer.end_s)[:requests]


def make_trace(family: str, seed: int, block_tokens: int, requests: int, *, evening: bool = False) -> Trace:
    """Return what ``kvdisk replay`` would read of such a trace."""
    chain, events = Chain(), make_events(family, seed, block_tokens, requests, evening=evening)
    found = []
    for time_s, text in events:
        tokens = (len(text) - 1) * block_tokens + block_tokens // 2
        found.append(TracedRequest(time_s, chain.hashes([number.to_bytes(4, "little") for number in text]), tokens, 0))
    return Trace(f"{family}, {block_tokens}{EVENING * evening}", "made", block_tokens, found)


def main() -> None:
    """Write a trace to standard output."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--block-tokens", type=int, default=512)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--evening", action="store_true", help="nobody new comes from early on")
    options = parser.parse_args()
    events = make_events(options.family, options.seed, options.block_tokens, options.requests, evening=options.evening)
    for time_s, text in events:
        tokens = (len(text) - 1) * options.block_tokens + options.block_tokens // 2
        json.dump({"time_s": round(time_s, 3), "blocks": text, "prompt_tokens": tokens}, sys.stdout)
        sys.stdout.write("\n")


if __name__ == "__main__":
    main()
