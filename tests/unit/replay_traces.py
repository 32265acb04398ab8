# SPDX-License-Identifier: Apache-2.0
"""Small traces, the same in every run: lists of prompts, each a list of numbers that name
prefixes."""

from __future__ import annotations

import json
import random
from pathlib import Path

from kvdisk.cli.replay.run import Run, run_setting
from kvdisk.cli.replay.tiers import Capacity, Setting, make_geometry, parse_capacity
from kvdisk.cli.replay.trace import Chain, Trace, TracedRequest
from kvdisk.config import Config

Prompts = list[list[int]]
POLICIES = {name: getattr(Config(), name) for name in ("eviction", "cpu_admission", "nvme_admission", "store_policy")}


class Prefixes:
    """Numbers for prefixes, as a trace's ``hash_ids`` are: one for each different path of
    contents."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, object], int] = {}

    def number(self, contents: list[object]) -> list[int]:
        found, parent = [], -1
        for content in contents:
            parent = self._known.setdefault((parent, content), len(self._known))
            found.append(parent)
        return found


def conversations(requests: int, seed: int = 1) -> Prompts:
    """Chats: a few shared system prompts, prompts that grow turn by turn, heavy-tailed pauses
    between turns.

    Of the last block of a prompt, which is partial, nothing comes back: the next turn goes on in
    it.
    """
    rng = random.Random(seed)
    prefixes = Prefixes()
    events: list[tuple[float, int, int, list[object]]] = []
    chats, now = 0, 0.0
    while len(events) < requests * 1.2:
        chats += 1
        now += rng.expovariate(1.0)
        system = rng.choice([1, 1, 1, 2, 3])
        contents: list[object] = [("system", system)]
        turns = min(40, int(rng.paretovariate(1.7)))
        when = now
        for turn in range(turns):
            contents = [*contents, *((chats, turn, part) for part in range(2 + int(rng.expovariate(1 / 9))))]
            events.append((when, chats, turn, [*contents, (chats, turn, "partial")]))
            when += 30 * rng.lognormvariate(0.0, 0.9)
    events.sort(key=lambda event: event[:3])
    return [prefixes.number(contents) for _, _, _, contents in events[:requests]]


def write_mooncake(path: Path, prompts: Prompts, block_tokens: int = 512) -> Path:
    """Write prompts in Mooncake's form; the last block of each is partial."""
    lines = [
        {
            "timestamp": 100 * at,
            "input_length": (len(prompt) - 1) * block_tokens + 1 + at % block_tokens,
            "output_length": 10,
            "hash_ids": prompt,
        }
        for at, prompt in enumerate(prompts)
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def room_of(trace: Trace, text: str, *, on_nvme: bool = True) -> Capacity:
    return parse_capacity("--nvme", text, trace, make_geometry(trace, 1 << 20), on_nvme=on_nvme)


def replayed(trace: Trace, nvme: str, cpu: str = "0", gpu: int = 0, **policies: str) -> Run:
    rooms = {"cpu": room_of(trace, cpu, on_nvme=False), "nvme": room_of(trace, nvme), "gpu_blocks": gpu}
    return run_setting(trace, 4096, Setting(**rooms | POLICIES | policies))


def of_prompts(prompts: list[list[int]]) -> Trace:
    """Requests that generate for as long as a replay waits."""
    requests = [
        TracedRequest(
            10.0 * at, Chain().hashes([number.to_bytes(4, "little") for number in prompt]), 512 * len(prompt), 0
        )
        for at, prompt in enumerate(prompts)
    ]
    return Trace("t", "made", 512, requests)
