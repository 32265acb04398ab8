# SPDX-License-Identifier: Apache-2.0
"""On vLLM's real scheduler: KV hints, as vLLM's envelope and in ``kv_transfer_params``."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from schedulers import BLOCK_TOKENS, BLOCKS, PROMPT, Bench, prompt_of
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

from kvdisk.blocks import Tier
from kvdisk.connector.controls import MOST_ACTIONS, Controls
from kvdisk.manager.requests import KVHint

WAYS = ["Request.kv_hints", "kv_transfer_params"]


def sent(way: str, *actions: tuple[Any, Any]) -> dict[str, Any]:
    """Return what ``Bench.add`` takes to send these actions, by type and payload."""
    if way == "kv_transfer_params":
        return {"params": {"kv_hints": {"actions": [{"action_type": name, "payload": told} for name, told in actions]}}}
    listed = [KvHintAction(str(at), name, "1.0", told) for at, (name, told) in enumerate(actions)]
    return {"kv_hints": KvHintsEnvelope("0.1", "message", listed)}


def held(bench: Bench, request_id: str) -> list[bool]:
    """Return which blocks of a request are in memory."""
    return [key in bench.in_tier(Tier.CPU) for key in bench.keys(request_id)[:BLOCKS]]


def full(bench: Bench) -> None:
    """Have memory full of other prompts."""
    slots = bench.manager._tiers.first.pool.total[0]
    for number in range(slots // BLOCKS + 1):
        bench.serve(f"other {number} of {len(bench.known)}", prompt_of(100 + number))
        bench.forget()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("action", ["kv.retain", "kv.pin"])
def test_a_hint_keeps_the_beginning_of_a_prompt(way, action, engines):
    bench = engines.make(extra={"pin_share": 0.5})
    bench.serve("a", PROMPT, **sent(way, (action, {"seconds": 600, "tokens": 2 * BLOCK_TOKENS})))
    bench.forget()
    full(bench)
    assert held(bench, "a") == [True] * 2 + [False] * (BLOCKS - 2)


@pytest.mark.parametrize("way", WAYS)
def test_a_hint_lets_a_prompt_leave_first(way, engines):
    bench = engines.make()
    slots = bench.manager._tiers.first.pool.total[0]
    bench.serve("a", PROMPT)
    bench.forget()
    bench.serve("b", prompt_of(9), **sent(way, ("kv.demote", {})))
    bench.forget()
    for number in range((slots - 2 * BLOCKS) // BLOCKS + 1):
        bench.serve(f"c{number}", prompt_of(100 + number))
        bench.forget()
    assert held(bench, "a") == [True] * BLOCKS and not all(held(bench, "b"))


@pytest.mark.parametrize("way", WAYS)
def test_a_hint_reads_a_prompt_into_memory(way, engines):
    bench = engines.make(nvme=True, extra={"prefetch": False}).warm(1)
    bench.add("a", prompt_of(1), **sent(way, ("kv.prefetch", None if way == "kv_transfer_params" else {})))
    bench.abort("a")
    bench.run()
    assert held(bench, "a") == [True] * BLOCKS and not bench.loads()


def test_what_the_documentation_shows_is_understood():
    page = Path(__file__).parents[2] / "docs" / "OPERATING.md"
    params = json.loads(page.read_text().split('```\n"kv_transfer_params": ')[1].split("```")[0])
    assert Controls().hints(None, params) == (KVHint("pin", 8192, 3600), KVHint("retain", None, 600))


WRONG = [
    ("kv.pin", {}),
    ("kv.pin", {"seconds": 0}),
    ("kv.pin", {"seconds": float("nan")}),
    ("kv.retain", {"seconds": "60"}),
    ("kv.retain", {"seconds": True}),
    ("kv.retain", {"seconds": 60, "tokens": -1}),
    ("kv.retain", {"seconds": 60, "token": 1}),
    ("kv.prefetch", {"seconds": 60}),
    ("kv.demote", {"tokens": 1}),
    ("kv.demote", [1]),
    ("pin", {"seconds": 60}),
    ([], {}),
    (10**5000, {}),
]


@pytest.mark.parametrize("way", WAYS)
def test_a_wrong_hint_is_ignored_and_said_once(way, engines, caplog):
    bench = engines.make()
    for at, wrong in enumerate(WRONG):
        bench.connector.scheduler._controls = type(bench.connector.scheduler._controls)()
        caplog.clear()
        with caplog.at_level(logging.WARNING, "kvdisk.connector"):
            for again in range(2):
                bench.serve(f"{at} {again}", prompt_of(2 * at + again), **sent(way, wrong))
        assert not bench.manager._kv_hints._standings.held, wrong
        (said,) = [record.getMessage() for record in caplog.records]
        assert "kv." in said and len(said) < 200


@pytest.mark.parametrize("wrong", [{"kv_hints": 1}, {"kv_hints": {}}, {"kv_hints": {"actions": 1}}, {"kv_hints": []}])
def test_a_wrong_form_is_ignored_and_said_once(wrong, engines, caplog):
    bench = engines.make()
    bench.serve("a", PROMPT, params=wrong)
    assert ["list of actions" in record.getMessage() for record in caplog.records if "kv_hints" in record.getMessage()]
    assert len(bench.stored()) == BLOCKS


def test_too_much_is_cut_and_said(engines, caplog):
    bench = engines.make()
    bench.serve("a", PROMPT, **sent(WAYS[0], *[("kv.retain", {"seconds": 10**9})] * (MOST_ACTIONS + 1)))
    said = [record.getMessage() for record in caplog.records]
    assert [any(part in line for line in said) for part in ("more than 86400 seconds", "all behind 16")] == [True, True]
    standings, now = bench.manager._kv_hints._standings, bench.manager._state.now
    assert {end - now < 86_402 for _, end in standings.held.values()} == {True}
