# SPDX-License-Identifier: Apache-2.0
"""The hooks of vLLM's connector API: which there are, and which of them kvdisk leaves alone."""

from __future__ import annotations

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from kvdisk.connector.adapter import ADDED_HOOKS, LEFT_ALONE, vllm_minor_version
from kvdisk.connector.connector import KVDiskConnector

pytestmark = pytest.mark.vllm

OWN = {"counters", "scheduler", "worker"}
"""Public names of the connector that are no hooks."""


def _public(*classes: type) -> set[str]:
    return {name for each in classes for name in vars(each) if not name.startswith("_")}


def test_every_hook_of_vllm_is_known() -> None:
    hooks, overridden = _public(KVConnectorBase_V1, SupportsHMA), _public(KVDiskConnector) - OWN
    missing = {name for name, since in ADDED_HOOKS.items() if vllm_minor_version() < since}
    assert sorted(hooks - overridden - LEFT_ALONE.keys()) == [], "hooks that are new: override or leave alone"
    assert sorted((overridden | LEFT_ALONE.keys()) - missing - hooks) == [], "hooks that vLLM calls no more"
    assert not hooks & missing, "ADDED_HOOKS names a later version than the first"
    assert not overridden & LEFT_ALONE.keys()
