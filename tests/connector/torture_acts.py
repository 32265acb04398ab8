# SPDX-License-Identifier: Apache-2.0
"""What torture tests run inside an engine's process (layout inproc), and the audit of kvdisk's state there."""

from __future__ import annotations

import time
from typing import Any

from kvdisk.blocks import Slot, Tier, group_of
from kvdisk.manager.catalog import CopyState

STUCK_S = 600.0


def core_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core


def connectors_of(llm: Any) -> list[Any]:
    from kvdisk.connector import KVDiskConnector

    connector = core_of(llm).scheduler.connector
    found = [connector, *getattr(connector, "_connectors", ())]
    return [one for one in found if isinstance(one, KVDiskConnector)]


def run_requests(llm: Any, requests: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    """Run requests with staggered starts and aborts; return the tokens of each, per sample, and whether it ended.

    A request: prompt, max_tokens, at (engine step of its arrival), abort (steps after arrival, or None), salt,
    logprobs (asks for prompt log-probabilities), n.
    """
    from vllm import SamplingParams

    engine = llm.llm_engine
    waiting = sorted(range(len(requests)), key=lambda at: requests[at]["at"])
    aborts: dict[str, int] = {}
    ended: dict[int, list[list[int]]] = {}
    step = 0
    run_id = f"{seed}-{time.monotonic_ns()}"
    changed_s = time.monotonic()
    progress = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and (requests[waiting[0]]["at"] <= step or not engine.has_unfinished_requests()):
            at = waiting.pop(0)
            request = requests[at]
            # Of several samples each takes the most likely token too, which greedy sampling refuses to do twice.
            several = {"temperature": 1.0, "top_k": 1, "n": request["n"]} if request.get("n", 1) > 1 else {}
            sampling = SamplingParams(
                **(several or {"temperature": 0.0}),
                max_tokens=request["max_tokens"],
                ignore_eos=True,
                detokenize=False,
                prompt_logprobs=1 if request.get("logprobs") else None,
            )
            prompt = {"prompt_token_ids": request["prompt"]}
            if request.get("salt"):
                prompt["cache_salt"] = request["salt"]
            engine.add_request(f"{run_id}-{at}", prompt, sampling)
            if request.get("abort") is not None:
                aborts[f"{run_id}-{at}"] = step + request["abort"]
        late = [name for name, when in aborts.items() if when <= step]
        if late:
            engine.abort_request(late)
            for name in late:
                del aborts[name]
        outputs = engine.step()
        step += 1
        seen = len(ended) * 100000 + sum(sum(len(o.token_ids) for o in out.outputs) for out in outputs)
        if outputs or seen != progress:
            progress, changed_s = seen, time.monotonic()
        assert time.monotonic() - changed_s < STUCK_S, f"stuck at step {step}: {describe(llm)}"
        for output in outputs:
            if output.finished:
                at = int(output.request_id.rsplit("-", 1)[1])
                reasons = {sample.finish_reason for sample in output.outputs}
                if "abort" in reasons:
                    continue
                assert reasons == {"length"}, f"request {at} ended with {reasons}"
                ended[at] = [list(sample.token_ids) for sample in output.outputs]
    return {"steps": step, "ended": {str(at): tokens for at, tokens in ended.items()}}


def describe(llm: Any) -> str:
    scheduler = core_of(llm).scheduler
    parts = [f"running {len(scheduler.running)}, waiting {len(scheduler.waiting)}"]
    for connector in connectors_of(llm):
        manager = connector.scheduler._manager
        parts.append(f"jobs {len(manager._transfers)}, sources {len(manager._sources)}, {manager.stats.counts}")
    return "; ".join(parts)


def drain(llm: Any, timeout_s: float = STUCK_S) -> None:
    end_s = time.monotonic() + timeout_s
    while core_of(llm).scheduler.has_requests():
        assert time.monotonic() < end_s, f"no end of the drain: {describe(llm)}"
        llm.llm_engine.step()


def reset(llm: Any, connector: bool = False) -> bool:
    return bool(llm.reset_prefix_cache(reset_connector=connector))


def audit(llm: Any) -> dict[str, Any]:
    """Drain, and assert all that must hold when nothing is under way; return counts for the parent's checks."""
    drain(llm)
    scheduler = core_of(llm).scheduler
    assert not scheduler.requests
    held = [block.block_id for block in scheduler.kv_cache_manager.block_pool.blocks[1:] if block.ref_cnt]
    assert not held, f"GPU blocks still held: {held}"
    facts = [audit_connector(connector) for connector in connectors_of(llm)]
    assert reset(llm), "blocks are still held after a drain"
    return {"connectors": facts}


def audit_connector(connector: Any) -> dict[str, Any]:
    side = connector.scheduler
    manager = side._manager
    assert not side._requests and not side._local_tokens, (side._requests, side._local_tokens)
    assert not manager._requests
    assert not getattr(manager._stores._store_policy, "_watermarks", None)
    assert not manager._stores._tables and not manager._urgent
    assert len(manager._transfers) == 0 and not manager._transfers._queued
    assert all(count == 0 for count in manager._transfers._counts.values())
    assert not len(manager._sources)
    assert not manager._void
    catalog = manager._catalog
    for tier, space in ((Tier.CPU, manager._tiers.get(Tier.CPU)), (Tier.NVME, manager._tiers.get(Tier.NVME))):
        if space is not None:
            audit_space(catalog, tier, space)
    rows = list(catalog.rows())
    assert len(rows) == len(catalog)
    live = {catalog.keys[row]: row for row in rows}
    for key, row in catalog._rows.items():
        assert catalog.keys[row] == key and live.get(key) is not None
    nvme = manager._tiers.get(Tier.NVME)
    on_nvme = [] if nvme is None else [r for r in rows if catalog.state(r, Tier.NVME) == CopyState.READY]
    dropped = 0
    if nvme is not None:
        assert not nvme._drops and not nvme.segments._attaching
        assert not any(nvme.pool.limbo), nvme.pool.limbo
        dropped = nvme._index.poll().dropped_puts
    return {
        "counters": dict(manager.stats.counts),
        "nvme_blocks": len(on_nvme),
        "dropped_puts": dropped,
        "home_open": nvme.is_open if nvme is not None else None,
        "backlog": [demotions.total for demotions in manager._demotions],
        "nvme_total": list(nvme.pool.total) if nvme is not None else [],
        "nvme_free": list(nvme.pool.free) if nvme is not None else [],
        "cpu_total": list(manager._tiers.get(Tier.CPU).pool.total) if manager._tiers.get(Tier.CPU) is not None else [],
    }


def audit_space(catalog: Any, tier: Tier, space: Any) -> None:
    space.pool.check()
    slots: set[Slot] = set()
    used: dict[int, set[int]] = {}
    held = [0] * len(space.pool.total)
    ordered = [set(policy._policy.proposals()) for policy in space._orders]
    for row in catalog.rows():
        state = catalog.state(row, tier)
        if state == CopyState.ABSENT:
            assert not any(row in rows for rows in ordered)
            continue
        assert state == CopyState.READY, (tier, row, state)
        assert catalog.pins(row, tier) == 0, (tier, row)
        slot = catalog.slot(row, tier)
        assert slot not in slots, f"two copies in {slot}"
        slots.add(slot)
        size_class = space._geometry.size_classes[group_of(catalog.keys[row])]
        assert row in ordered[size_class], "a copy that eviction does not know"
        held[size_class] += 1
        assert slot.index in used.setdefault(slot.segment, set(space.pool.used_indices(slot.segment))), slot
    for size_class, total in enumerate(space.pool.total):
        assert held[size_class] + space.pool.free[size_class] + space.pool.limbo[size_class] == total, (
            tier,
            held,
            space.pool.free,
            space.pool.limbo,
            space.pool.total,
        )
