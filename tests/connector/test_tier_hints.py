# SPDX-License-Identifier: Apache-2.0
"""KV hints of requests behind vLLM's own connector."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from support.tiering import TOKENS
from test_tier import Bench
from test_tier import make as make  # noqa: PLC0414 - a fixture
from test_tier_drive import DriveBench
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import _create_req_context
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.request import Request

from kvdisk.manager.requests import KVHint
from kvdisk.store import Presence

WAYS = ["ReqContext.kv_hints", "kv_transfer_params"]
CHUNKS = 10


def sent(way: str, *actions: tuple[str, Any]) -> dict[str, Any]:
    """Return what ``Bench.begin`` takes to send these actions, by type and payload."""
    if way == "kv_transfer_params":
        listed = [{"action_type": name, "payload": told} for name, told in actions]
        return {"kv_transfer_params": {"kv_hints": {"actions": listed}}}
    return {
        "kv_hints": KvHintsEnvelope(
            "0.1", "m", [KvHintAction(str(at), *each[:1], "1.0", *each[1:]) for at, each in enumerate(actions)]
        )
    }


def test_vllm_hands_hints_of_a_request_to_its_tiers():
    told = sent(WAYS[0], ("kv.pin", {"seconds": 60}))
    context = _create_req_context(Request("a", [1, 2, 3], SamplingParams(), None, **told))
    assert context.kv_hints is told["kv_hints"]


# -- what the store is told ------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_the_store_is_told_of_a_prompt_when_it_has_come_and_when_it_has_ended(make, way):
    bench: Bench = make()
    keys = bench.begin("a", 1, CHUNKS, **sent(way, ("kv.pin", {"seconds": 60, "tokens": 32})))
    bench.begin("without", 2, CHUNKS)
    bench.step("a")
    names = [bench.tier._names.block(key) for key in keys]
    more = make_offload_key(b"generated".ljust(32), 0)
    bench.requests["a"].set_offload_key_position(more, (CHUNKS + 1) * TOKENS)
    bench.step()
    bench.end("a", "without")
    bench.step()
    assert bench.store.told.keys() == {"a", "without"}
    assert [ended for ended, _ in bench.store.hinted] == [False, True]
    for _, prompt in bench.store.hinted:
        assert prompt.keys == [names, []], "and nothing that was generated"
        assert (prompt.prompt_tokens, *prompt.kv_hints) == (CHUNKS * TOKENS, KVHint("pin", 32, 60))


def test_the_store_is_told_once_vllm_has_named_the_chunks(make):
    bench: Bench = make()
    keys = bench.begin("a", 1, 3, 1, **sent(WAYS[0], ("kv.demote", {})))
    context = bench.requests["a"]
    positions = dict(context._offload_key_positions)
    context._offload_key_positions.clear()
    bench.step()
    assert not bench.store.hinted
    context._offload_key_positions.update(positions)
    context.set_offload_key_position(make_offload_key(b"a state".ljust(32), 70_000), TOKENS + 5)
    bench.step()
    ((_, prompt),) = bench.store.hinted
    assert prompt.keys == [[], [bench.tier._names.block(key) for key in keys]]


def test_a_request_that_ends_unnamed_and_one_that_a_reset_met_tell_nothing(make):
    bench: Bench = make()
    hint = sent(WAYS[0], ("kv.pin", {"seconds": 60}))
    bench.begin("a", 1, 3, **hint)
    bench.requests["a"]._offload_key_positions.clear()
    bench.end("a")
    bench.begin("b", 2, 3, **hint)
    bench.begin("c", 3, 3, **hint)
    bench.end("c")
    bench.manager.reset_cache()
    bench.step()
    bench.end("b")
    bench.step()
    assert bench.store.told.keys() == {"b", "c"}
    assert not bench.store.hinted
    assert not bench.tier._hints._new and not bench.tier._hints._sent


def test_a_prefetch_and_a_wrong_hint_are_told_of(make, caplog):
    bench: Bench = make()
    with caplog.at_level(logging.WARNING, "kvdisk.connector"):
        bench.begin("a", 1, 3, **sent(WAYS[0], ("kv.prefetch", {}), ("kv.pin", {"seconds": -1})))
        bench.step("a")
        bench.end("a")
        bench.step()
    assert not bench.store.hinted
    pin, prefetch = (record.getMessage() for record in caplog.records if record.name == "kvdisk.connector")
    assert "kv.pin must have" in pin and "kv.prefetch does nothing behind" in prefetch


# -- what becomes of the blocks --------------------------------------------------------------------


def make_drive(tmp_path: Path, **settings: Any) -> DriveBench:
    return DriveBench(tmp_path, device="posix", lookup_wait_s=600, io_deadline_s=600, **settings)


def test_hints_rank_the_blocks_on_the_drive(tmp_path):
    """Of a small store that keeps what was used last."""
    settings = {"nvme_bytes": "12MiB", "segment_bytes": "1MiB", "eviction": "lru", "nvme_admission": "all"}
    drive = make_drive(tmp_path, pin_share=0.5, **settings)
    for document, action in enumerate(("kv.pin", "kv.retain")):
        drive.serve(action, document, CHUNKS, **sent(WAYS[0], (action, {"seconds": 600, "tokens": 4 * TOKENS})))
    for document in range(2, 6):
        drive.serve(f"kept {document}", document, CHUNKS)
    drive.serve("demoted", 6, CHUNKS, **sent(WAYS[1], ("kv.demote", {})))
    filled = 0
    while not any(gone(drive, document) for document in range(7)):
        drive.serve(f"other {filled}", 100 + filled, CHUNKS)
        filled += 1
        assert filled < 100, "nothing ever leaves"
    assert gone(drive, 6) and not any(gone(drive, document) for document in range(6))
    for number in range(filled + 10):
        drive.serve(f"more {number}", 300 + number, CHUNKS)
    assert [gone(drive, document) for document in range(6)] == [CHUNKS - 4] * 2 + [CHUNKS] * 4
    drive.forget_memory()
    assert [drive.serve(f"again {document}", document, CHUNKS) for document in range(3)] == [4, 4, 0]
    drive.close()


def gone(drive: DriveBench, document: int) -> int:
    """Return how many chunks of a document are not on the drive, without a request for it."""
    keys = [make_offload_key(f"{document}:{at}".encode().ljust(32), 0) for at in range(CHUNKS)]
    return CHUNKS - drive.store.presence(drive.tier._names.blocks(keys)).count(Presence.READY)


def test_a_pin_is_admitted_where_others_are_not(tmp_path):
    drive = make_drive(tmp_path, nvme_admission="reuse(3)")
    drive.serve("a", 1, CHUNKS, **sent(WAYS[0], ("kv.pin", {"seconds": 600})))
    drive.serve("without", 2, CHUNKS)
    drive.forget_memory()
    assert drive.serve("again", 1, CHUNKS) == CHUNKS
    assert drive.serve("without, again", 2, CHUNKS) == 0
    drive.close()
