# SPDX-License-Identifier: Apache-2.0
"""The store policies by their configuration names. A new one needs a line here, and nothing anywhere else."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvdisk.config import make_own
from kvdisk.manager.spillover import Spillover
from kvdisk.manager.store_policy import OnCompute, OnPreemption, StorePolicy

_POLICIES: Mapping[str, Callable[[], StorePolicy]] = {
    "on_compute": OnCompute,
    "on_preemption": OnPreemption,
    "spillover": Spillover,
}


def make_store_policy(name: str) -> StorePolicy:
    """Return a new policy by its name, or of the class that ``module:Class`` names. Raises ConfigError."""
    if name in _POLICIES:
        return _POLICIES[name]()
    own: StorePolicy = make_own("store_policy", name, StorePolicy)
    return own
