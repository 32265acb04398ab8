# SPDX-License-Identifier: Apache-2.0
"""The hooks of vLLM's connector API: which there are, and which of them kvdisk leaves alone."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from kvdisk.connector.connector import KVDiskConnector
from kvdisk.connector.tier import KVDiskTier
from kvdisk.connector.versions import vllm_minor_version

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

ADDED_HOOKS = {
    "restore_kv_caches": (0, 33),
    "supports_sleep_mode": (0, 33),
    "unregister_kv_caches": (0, 33),
}
"""Hooks that not every supported version has, and the first that has them."""

OWN = {"counters", "scheduler", "worker"}
"""Public names of the connector that are no hooks."""


def _public(*classes: type) -> set[str]:
    return {name for each in classes for name in vars(each) if not name.startswith("_")}


def test_every_hook_of_vllm_is_known():
    hooks, overridden = _public(KVConnectorBase_V1, SupportsHMA), _public(KVDiskConnector) - OWN
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
TIER_OWN = {"is_off", "store", "switch_off"}


def test_every_hook_of_a_tier_is_known():
    hooks, overridden = (
        _public(SecondaryTierManager),
        _public(KVDiskTier) - TIER_OWN - {"cache_hit_source"},
    )  # set by the base
    assert sorted(hooks - overridden - TIER_LEFT_ALONE.keys()) == [], "hooks that are new: override or leave alone"
    assert sorted(overridden - hooks) == [], "hooks that vLLM calls no more"
    assert not overridden & TIER_LEFT_ALONE.keys()
