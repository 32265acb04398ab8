# SPDX-License-Identifier: Apache-2.0
"""The hooks of vLLM's connector API: which there are, which of them kvdisk leaves alone, and that
one that is called otherwise than kvdisk takes it is refused."""

from __future__ import annotations

from collections.abc import Callable
from inspect import isfunction, signature
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from kvdisk.connector import connector, tier
from kvdisk.connector.connector import KVDiskConnector
from kvdisk.connector.hooks import ADDED_HOOKS
from kvdisk.connector.off import SchedulerOff, WorkerOff
from kvdisk.connector.tier import KVDiskTier
from kvdisk.connector.tier_off import TierOff
from kvdisk.connector.versions import vllm_minor_version
from kvdisk.errors import ConfigError

LEFT_ALONE = {
    "bind_kv_cache_manager": "it hands the manager's pool to bind_gpu_block_pool, and kvdisk needs no more of it",
    "clear_connector_metadata": "the base keeps the step's metadata",
    "finish_forward": "stores begin in wait_for_save, which comes after it",
    "get_finished": "get_transfer_results answers in its place, and says also which loads failed",
    "get_finished_count": "None: a load has ended when every rank says so",
    "get_kv_connector_kv_cache_events": "events come from the scheduler, by take_events",
    "get_loaded_kv_cache_group_ids": "all groups that can be in a prefix cache: those of every kind that is accepted",
    "get_mem_pool_context": "None: the engine allocates the KV cache as it does without a connector",
    "has_connector_metadata": "the base keeps the step's metadata",
    "has_pending_block_frees": "False: no transfer holds a block that a preemption could wait for",
    "register_finished_partial_tail": "False: a state behind the last full block has no key",
    "reset_capture_state": "hooks by layer do nothing, so a capture changes nothing",
    "role": "the base keeps it",
    "set_host_xfer_buffer_ops": "kvdisk copies the blocks itself",
    "supports_divergent_local_hybrid_hits": "False: blocks before the end of the GPU's hit are not loaded",
}
"""The hooks that kvdisk does not override, and why."""


def _public(*classes: type) -> set[str]:
    return {name for each in classes for name in vars(each) if not name.startswith("_")}


def test_every_hook_of_vllm_is_known():
    hooks = _public(KVConnectorBase_V1, SupportsHMA)
    overridden = _public(KVDiskConnector) - connector.OWN_NAMES[KVDiskConnector]
    missing = {name for name, since in ADDED_HOOKS.items() if vllm_minor_version() < since}
    assert sorted(hooks - overridden - LEFT_ALONE.keys()) == [], "hooks that are new: override or leave alone"
    assert sorted((overridden | LEFT_ALONE.keys()) - missing - hooks) == [], "hooks that vLLM calls no more"
    assert not hooks & missing, "ADDED_HOOKS names a later version than the first"
    assert not overridden & LEFT_ALONE.keys()


TIER_LEFT_ALONE = {
    "block_size_bytes": "the base keeps it",
    "bp_detector": "the base keeps it",
    "cache_hit_source": "DISK, by the medium",
    "config_info": "facts for an info metric: kvdisk's own metrics have them",
    "config_info_keys": "the same",
    "serve_external_requests": "no other engine asks this one",
    "tolerates_off_thread_polling": "False: nobody waits between steps",
    "touch": "vLLM never calls it: see on_request_finished",
}
"""The hooks of a tier that kvdisk does not override, and why."""


def test_every_hook_of_a_tier_is_known():
    hooks, overridden = (
        _public(SecondaryTierManager),
        _public(KVDiskTier) - tier.OWN_NAMES - {"cache_hit_source"},
    )  # set by the base
    assert sorted(hooks - overridden - TIER_LEFT_ALONE.keys()) == [], "hooks that are new: override or leave alone"
    assert sorted(overridden - hooks) == [], "hooks that vLLM calls no more"
    assert not overridden & TIER_LEFT_ALONE.keys()


# -- hooks that this vLLM calls otherwise ----------------------------------------------------------

DOORS = {"connector": connector.refuse_vllm, "tier": tier.refuse_vllm}


@pytest.mark.parametrize("refuse", DOORS.values(), ids=DOORS)
def test_this_vllm_calls_each_hook_as_kvdisk_takes_it(refuse):
    refuse()


def changed(*names: str, **more: Any) -> Callable[..., None]:
    """A hook with these parameters; with ``more`` as defaults."""
    listed = [*names, *(f"{name}={value!r}" for name, value in more.items())]
    found: dict[str, Any] = {}
    exec(f"def hook({', '.join(['self', *listed])}): pass", found)  # noqa: S102
    return found["hook"]


OTHERS: list[tuple[Callable[[], None], type, str, Any, str]] = [
    (DOORS["connector"], KVConnectorBase_V1, "wait_for_save", changed(late=None), r"\(late=None\): kvdisk takes \(\)"),
    (
        DOORS["connector"],
        KVConnectorBase_V1,
        "on_new_request",
        changed("request", "*", "novel"),
        r"on_new_request with \(request, \*, novel\)",
    ),
    (DOORS["connector"], KVConnectorBase_V1, "on_new_request", changed("req"), r"\(req\): kvdisk takes \(request\)"),
    (DOORS["connector"], KVConnectorBase_V1, "on_new_request", changed(), r"with \(\): kvdisk takes \(request\)"),
    (DOORS["connector"], KVConnectorBase_V1, "on_new_request", changed(request=None), r"\(request=None\)"),
    (DOORS["connector"], KVConnectorBase_V1, "on_new_request", changed("request", "*more"), r"\(request, \*more\)"),
    (DOORS["connector"], KVConnectorBase_V1, "on_new_request", changed("request", "**more"), r"\(request, \*\*more\)"),
    (
        DOORS["connector"],
        KVConnectorBase_V1,
        "get_num_new_matched_tokens",
        changed("num_computed_tokens", "request"),
        "get_num_new_matched_tokens",
    ),
    (DOORS["connector"], KVConnectorBase_V1, "__init__", changed("vllm_config", "role"), "__init__ with"),
    (DOORS["connector"], SupportsHMA, "request_finished_all_groups", changed("request"), "request_finished_all_groups"),
    (DOORS["connector"], KVConnectorBase_V1, "requires_kv_delivery", changed(), "is a function: kvdisk has a property"),
    (DOORS["connector"], KVConnectorBase_V1, "get_required_kvcache_layout", changed("vllm_config"), "is a function"),
    (DOORS["connector"], KVConnectorStats, "aggregate", changed("other", "when"), "aggregate with"),
    (DOORS["connector"], KVConnectorPromMetrics, "observe", changed("transfer_stats_data"), ""),
    (DOORS["connector"], KVConnectorWorkerMetadata, "aggregate", changed("other", weight=1), "weight=1"),
    (DOORS["tier"], SecondaryTierManager, "lookup", changed("key", "req_context", "*", "novel"), "lookup with"),
    (DOORS["tier"], SecondaryTierManager, "submit_store", changed("job"), r"\(job\): kvdisk takes \(job_metadata\)"),
    (DOORS["tier"], SecondaryTierManager, "__init__", changed("offloading_spec", "tier_type"), "__init__ with"),
]


@pytest.mark.parametrize(
    ("refuse", "owner", "name", "hook", "said"), OTHERS, ids=[f"{each[2]} {at}" for at, each in enumerate(OTHERS)]
)
def test_a_hook_that_is_called_otherwise_is_refused(refuse, owner, name, hook, said, monkeypatch):
    monkeypatch.setattr(owner, name, hook)
    if not said:  # what ours takes, and more
        refuse()
        return
    with pytest.raises(ConfigError, match=said) as caught:
        refuse()
    text = str(caught.value)
    assert name in text and "\n" not in text and text.endswith(".")
    assert text.startswith("kvdisk does not support this build of vLLM ")


@pytest.mark.parametrize(
    ("refuse", "owner", "name"),
    [
        (DOORS["connector"], KVConnectorBase_V1, "handle_preemptions"),
        (DOORS["tier"], SecondaryTierManager, "on_schedule_end"),
    ],
)
def test_a_hook_that_is_gone_is_refused(refuse, owner, name, monkeypatch):
    """Another one may be called in its place: then nothing waits for a copy, or nothing is sent."""
    monkeypatch.delattr(owner, name)
    with pytest.raises(ConfigError, match=f"which has no hook {name} any more"):
        refuse()


def test_a_hook_that_vllm_demands_is_refused(monkeypatch):
    monkeypatch.setattr(KVDiskConnector, "__abstractmethods__", frozenset({"novel"}))
    with pytest.raises(ConfigError, match="which demands the hook novel: kvdisk has none"):
        DOORS["connector"]()


@pytest.mark.parametrize("refuse", DOORS.values(), ids=DOORS)
def test_a_hook_that_is_new_and_not_demanded_passes(refuse, monkeypatch):
    for owner in (KVConnectorBase_V1, SecondaryTierManager):
        monkeypatch.setattr(owner, "novel", changed("request"), raising=False)
    refuse()


# -- who answers after an error --------------------------------------------------------------------


def guarded_of(door: type) -> dict[str, Any]:
    return {name: each for name, each in vars(door).items() if isfunction(each) and hasattr(each, "__wrapped__")}


@pytest.mark.parametrize(
    ("door", "stand_ins", "by_both"),
    [
        (KVDiskConnector, (SchedulerOff, WorkerOff), {"get_kv_connector_stats", "shutdown"}),
        (KVDiskTier, (TierOff,), set()),
    ],
)
def test_each_guarded_hook_has_a_stand_in_that_takes_no_other_parameters(door, stand_ins, by_both):
    for name, hook in guarded_of(door).items():
        answers = [vars(each)[name] for each in stand_ins if name in vars(each)]
        assert len(answers) == 1 + (name in by_both), name
        assert all(signature(answer).parameters.keys() <= signature(hook).parameters.keys() for answer in answers), name
