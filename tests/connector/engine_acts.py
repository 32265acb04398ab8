# SPDX-License-Identifier: Apache-2.0
"""What tests run inside a real engine's process (``EngineChild.call``): requests, resets, new
weights, and an audit."""

from __future__ import annotations

import hashlib
import time
from functools import partial
from typing import Any

from support.live_audit import audit_manager

from kvdisk.blocks import Tier

STUCK_S = 600.0
_KEPT: dict[str, Any] = {}


def core_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core


def connectors_of(llm: Any) -> list[Any]:
    from kvdisk.connector import KVDiskConnector

    connector = core_of(llm).scheduler.connector
    found = [connector, *getattr(connector, "_connectors", ())]
    return [one for one in found if isinstance(one, KVDiskConnector)]


# -- requests --------------------------------------------------------------------------------------


class _Run:
    """Requests with staggered starts and aborts, of ``run_requests``. ``ended``: by number, the
    tokens of each sample, and the weights; None: they changed on the way."""

    def __init__(self, llm: Any, requests: list[dict[str, Any]]) -> None:
        self._llm = llm
        self._engine = llm.llm_engine
        self._requests = requests
        self._waiting = sorted(range(len(requests)), key=lambda at: requests[at]["at"])
        self._aborts: dict[str, int] = {}
        self._began: dict[str, int] = {}
        self._name = str(time.monotonic_ns())
        self._end_s = time.monotonic() + 2 * STUCK_S
        self.steps = 0
        self.resets = 0
        self.ended: dict[str, tuple[list[list[int]], int | None]] = {}

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting) or self._engine.has_unfinished_requests()

    def step(self) -> None:
        while self._waiting and (
            self._requests[self._waiting[0]]["at"] <= self.steps or not self._engine.has_unfinished_requests()
        ):
            at = self._waiting.pop(0)
            self._add(str(at), self._requests[at])
        late = [number for number, when in self._aborts.items() if when <= self.steps]
        self._engine.abort_request([f"{self._name}-{number}" for number in late])
        for number in late:
            del self._aborts[number]
        outputs = self._engine.step()
        self.steps += 1
        assert time.monotonic() < self._end_s, f"stuck at step {self.steps}: {describe(self._llm)}"
        for output in outputs:
            reasons = {sample.finish_reason for sample in output.outputs}
            if output.finished and "abort" not in reasons:
                assert reasons == {"length"}, f"request {output.request_id} ended with {reasons}"
                number = output.request_id.rsplit("-", 1)[1]
                weights = self.resets % 2 if self._began[number] == self.resets else None
                self.ended[number] = [list(sample.token_ids) for sample in output.outputs], weights

    def _add(self, number: str, request: dict[str, Any]) -> None:
        from vllm import SamplingParams

        # Of several samples each takes the most likely token too, which greedy sampling refuses to
        # do twice.
        several = {"temperature": 1.0, "top_k": 1, "n": request["n"]} if request["n"] > 1 else {"temperature": 0.0}
        sampling = SamplingParams(
            **several,
            max_tokens=request["max_tokens"],
            ignore_eos=True,
            detokenize=False,
            prompt_logprobs=1 if request["logprobs"] else None,
        )
        salted = {"cache_salt": request["salt"]} if request["salt"] else {}
        self._engine.add_request(f"{self._name}-{number}", {"prompt_token_ids": request["prompt"]} | salted, sampling)
        self._began[number] = self.resets
        if request["abort"] is not None:
            self._aborts[number] = self.steps + request["abort"]


def run_requests(llm: Any, requests: list[dict[str, Any]], steps_between: int = 0) -> dict[str, Any]:
    """Run requests; return ``_Run.ended``, and counts.

    A request: prompt, max_tokens, at (engine step of its arrival), abort (steps after arrival, or
    None), salt, logprobs (asks for prompt log-probabilities), n. ``steps_between``: everything is
    reset after so many steps each time, whatever runs, and the other one of two sets of weights
    comes, from 0 on; 0: never. Where vLLM refuses because a request loads, the load ends first, as
    docs/RESETS.md says.
    """
    run = _Run(llm, requests)
    stores_out = interrupted = 0
    while run.is_busy:
        run.step()
        if steps_between and run.steps >= steps_between * (run.resets + 1):
            stores_out += bool(core_of(llm).scheduler.connector.has_pending_push_work())
            interrupted += llm.llm_engine.has_unfinished_requests()
            while not _reset(llm):
                run.step()
            run.resets += 1
            use_weights(llm, run.resets % 2)
    return {"ended": run.ended, "resets": run.resets, "stores_out": stores_out, "interrupted": interrupted}


def run_session(llm: Any, turns: list[list[int]]) -> list[int]:
    """Run a streaming session, which samples 40 tokens after each input; return all its tokens."""
    from vllm import SamplingParams
    from vllm.v1.request import Request, RequestStatus

    core = core_of(llm)
    requests = core.scheduler.requests
    for turn in turns:
        sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        asked = {"resumable": True, "block_hasher": core.request_block_hasher}
        core.add_request(Request("session", turn, sampling, None, **asked))
        while requests["session"].status is not RequestStatus.WAITING_FOR_STREAMING_REQ:
            llm.llm_engine.engine_core.get_output()
    tokens = list(requests["session"].all_token_ids)
    core.abort_requests(["session"])
    return tokens


# -- what must hold when nothing is under way ------------------------------------------------------


def describe(llm: Any) -> str:
    scheduler = core_of(llm).scheduler
    parts = [f"running {len(scheduler.running)}, waiting {len(scheduler.waiting)}"]
    for connector in connectors_of(llm):
        manager = connector.scheduler._manager
        parts.append(f"jobs {len(manager._transfers)}, sources {len(manager._stores.sources)}, {manager.stats.counts}")
    return "; ".join(parts)


def audit(llm: Any) -> dict[str, Any]:
    """Drain, and assert all that must hold when nothing is under way; return counts for the
    parent's checks."""
    scheduler, end_s = core_of(llm).scheduler, time.monotonic() + STUCK_S
    while scheduler.has_requests():
        assert time.monotonic() < end_s, f"no end of the drain: {describe(llm)}"
        llm.llm_engine.step()
    assert not scheduler.requests
    held = [block.block_id for block in scheduler.kv_cache_manager.block_pool.blocks[1:] if block.ref_cnt]
    assert not held, f"GPU blocks still held: {held}"
    facts = [_audit_connector(connector) for connector in connectors_of(llm)]
    assert llm.reset_prefix_cache(), "blocks are still held after a drain"
    return {"connectors": facts}


def _audit_connector(connector: Any) -> dict[str, Any]:
    side = connector.scheduler
    manager = side._manager
    assert not side._requests and not side._local_tokens, (side._requests, side._local_tokens)
    audit_manager(manager)
    catalog, nvme = manager._catalog, manager._tiers.get(Tier.NVME)
    assert nvme is None or not (nvme._drops or nvme.segments.opening or any(nvme.pool.awaiting))
    on_nvme = [] if nvme is None else list(catalog.ready_keys(Tier.NVME))
    return {
        "counters": dict(manager.stats.counts),
        "nvme_blocks": len(on_nvme),
        "dropped_puts": 0 if nvme is None else nvme._index.poll().dropped_puts,
    }


# -- weights, pauses and resets --------------------------------------------------------------------


def reset_all(llm: Any) -> bool:
    """Reset the prefix cache with whatever runs, and the connector's."""
    return bool(llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True))


def _reset(llm: Any) -> bool:
    """Reset everything; False where vLLM refuses, which it may do for requests whose blocks were or
    are being loaded, aborted ones too, and for nothing else."""
    try:
        assert reset_all(llm)
    except RuntimeError:
        scheduler = core_of(llm).scheduler
        caches = scheduler.kv_cache_manager
        loading = {
            block
            for request in scheduler.requests.values()
            if request in scheduler.kv_holding_waiting or request.is_finished()
            for group in caches.get_block_ids(request.request_id)
            for block in group
        }
        held = {block.block_id for block in caches.block_pool.blocks[1:] if block.ref_cnt}
        assert held and held <= loading, "blocks are held that nobody loads to"
        return False
    return True


def pause(llm: Any, mode: str) -> None:
    """Pause the engine and have it clear its caches, the connector's among them, as before a weight
    update."""
    llm.llm_engine.engine_core.call_utility("pause_scheduler", mode, True)


def resume(llm: Any) -> None:
    llm.llm_engine.engine_core.call_utility("resume_scheduler")


def sleep_and_wake(llm: Any) -> None:
    """Put the engine to sleep as far as it goes without vLLM's sleep mode, and wake it."""
    llm.sleep(level=0)
    llm.wake_up(tags=["scheduling"])


def use_weights(llm: Any, number: int) -> None:
    """Give the model in memory one of many sets of weights, on every rank; 0 are those that it was
    loaded with."""
    assert all(llm.apply_model(partial(_use_weights, number)))


def _use_weights(number: int, model: Any) -> bool:
    import torch

    for at, (name, parameter) in enumerate(model.named_parameters()):
        parameter.data.copy_(_KEPT.setdefault(name, parameter.data.clone()))
        if number and "layernorm" in name:  # the matrices may have been packed for the CPU's kernels
            noise = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(at))
            parameter.data.mul_(1 + 0.8 * number * noise.to(parameter))
    return True


# -- pipeline stages -------------------------------------------------------------------------------


def warm_stages(llm: Any) -> None:
    """Run each stage's profile run. vLLM's CPU worker skips it where the KV cache has a fixed size,
    and a later stage has no room for what the one before it sends then."""
    llm.collective_rpc(_profile)


def _profile(worker: Any) -> None:
    worker.model_runner.profile_run()


# -- adapters --------------------------------------------------------------------------------------


def await_adapters(_: Any) -> None:
    """From now on let requests wait for their adapters' files, however busy the machine."""
    from kvdisk.connector import lora

    lora.LOOK_WAIT_S = lora.CHECK_WAIT_S = STUCK_S


def generate_with(llm: Any, prompts: list[list[int]], name: str, number: int, path: str) -> list[Any]:
    """Decode 8 tokens greedily with a LoRA adapter, one prompt after the other; return of each its
    tokens, and how many of the prompt were cached."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    answers = []
    for prompt in prompts:
        request = LoRARequest(name, number, path)
        (output,) = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False, lora_request=request)
        answers.append([list(output.outputs[0].token_ids), output.num_cached_tokens])
    return answers


# -- loads ---------------------------------------------------------------------------------------


def zero_loads(llm: Any, group: int | None = None, stage: int | None = None) -> None:
    """From now on let loads bring zeros for one KV-cache group, or all, on the workers of one
    stage, or all, and what they should elsewhere. ``group`` -1: nowhere zeros."""
    llm.collective_rpc(_check_with_zeros, args=(group, stage))


# By their names kvdisk takes none of these for an update of the weights.
def _check_with_zeros(_: Any, group: int | None, stage: int | None) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from vllm.distributed.parallel_state import get_pp_group

    from kvdisk.worker.copier import HostCopier, Passed

    copier = get_kv_transfer_group().worker.mover._runner._resources.copier
    is_here = stage in {None, get_pp_group().rank_in_group}

    def scatter(of: int, slots: Any, blocks: Any, after: Any = None) -> Any:
        if not is_here or group not in {None, of}:
            return HostCopier.scatter(copier, of, slots, blocks, after)
        for stack in copier.groups[of].stacks:
            stack.blocks[list(blocks)] = 0
        return Passed()

    copier.scatter = scatter


def watch_loads(llm: Any) -> None:
    """From now on note the blocks that loads fill, for ``block_digests``."""
    llm.collective_rpc(_check_loads)


def _check_loads(worker: Any) -> None:
    from kvdisk.worker.copier import Slots

    copier = _copier()
    scatter, worker.kvdisk_loaded = copier.scatter, set()

    def noted(of: int, slots: Slots, blocks: Any, after: Any = None) -> Any:
        worker.kvdisk_loaded.update((of, block) for block in blocks)
        return scatter(of, slots, blocks, after)

    copier.scatter = noted


def block_digests(llm: Any, loaded: bool) -> dict[str, str]:
    """Return a digest of the bytes of each block in the engine's prefix cache, by its hash and
    KV-cache group. ``loaded``: only of those that were loaded since ``watch_loads``."""
    from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id

    blocks = core_of(llm).scheduler.kv_cache_manager.block_pool.blocks
    found = {
        f"{get_group_id(block.block_hash)} {get_block_hash(block.block_hash).hex()}": (
            get_group_id(block.block_hash),
            block.block_id,
        )
        for block in blocks
        if block.block_hash is not None
    }
    (digests,) = llm.collective_rpc(_get_block_digests, args=(sorted(found.values()), loaded))
    return {name: digests[place] for name, place in found.items() if place in digests}


def _get_block_digests(worker: Any, places: list[tuple[int, int]], loaded: bool) -> dict[tuple[int, int], str]:
    groups = _copier().groups

    def digest(group: int, block: int) -> str:
        parts = [layer[block].contiguous().numpy().tobytes() for layer in groups[group].layers]
        return hashlib.sha256(b"".join(parts)).hexdigest()

    return {place: digest(*place) for place in places if not loaded or place in worker.kvdisk_loaded}


def _copier() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().worker.mover._runner._resources.copier
