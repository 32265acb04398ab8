# SPDX-License-Identifier: Apache-2.0
"""What vLLM passes to no hook, and its callers have: found in the interpreter's frames."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from kvdisk.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def _callers() -> Iterator[FrameType]:
    """Yield the frames of who called this, the innermost first; but for the one that asks for them:
    its variables would hold itself, and with it all callers' until garbage is collected."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _owners() -> Iterator[Any]:
    """Yield the objects whose methods called this, the innermost first."""
    for frame in _callers():
        owner = frame.f_locals.get("self")
        if owner is not None:
            yield owner


def transfer_looked_up() -> KVTransferConfig | None:
    """Return the transfer configuration that names kvdisk, where vLLM's factory is looking the
    connector up now; otherwise None.

    vLLM looks it up whenever a configuration is built. It calls the hook that is given the settings
    only where full CUDA graphs are planned: not on CPUs, nor with ``enforce_eager``.
    """
    looking = (frame for frame in _callers() if frame.f_code.co_name == "get_connector_class")
    frame = next(looking, None)
    found = None if frame is None else frame.f_locals.get("kv_transfer_config")
    is_ours = getattr(found, "kv_connector", None) == "KVDiskConnector"  # and not a class that builds on it
    return found if is_ours else None


def config_being_built() -> VllmConfig | None:
    """Return the VllmConfig that is being built by a caller of this function; None where there is
    none."""
    return next((owner for owner in _owners() if isinstance(owner, VllmConfig)), None)


def offloading_being_built() -> tuple[VllmConfig, KVCacheConfig] | None:
    """Return the configurations of vLLM's connector that is being built around a tier; None where
    there is none. vLLM gives a tier what names the model, but nothing that says which weights it
    has."""
    for frame in _callers():
        found = frame.f_locals
        if isinstance(found.get("self"), KVConnectorBase_V1) and {"vllm_config", "kv_cache_config"} <= found.keys():
            return found["vllm_config"], found["kv_cache_config"]
    return None


def engine_around() -> Any:
    """Return the engine that is building its scheduler now; None without one."""
    return next(
        (owner for owner in _owners() if hasattr(getattr(owner, "model_executor", None), "collective_rpc")), None
    )


def request_being_added() -> Any:
    """Return the request that the scheduler is adding now; None where it adds none."""
    added = (frame.f_locals.get("request") for frame in _callers() if frame.f_code.co_name == "on_new_request")
    return next((request for request in added if hasattr(request, "mm_features")), None)


def recompute_failed_loads(vllm_config: VllmConfig) -> bool:
    """Set ``kv_load_failure_policy`` to recompute; return whether it was something else. Call it
    while the connector is built.

    The scheduler reads the setting afterwards, from its own configuration. A child of
    ``MultiConnector`` is given a copy of that configuration; then the outermost connector that is
    being built has the scheduler's. Raises ConfigError where that connector does not show it,
    unless kvdisk's own says recompute already.
    """
    outer: VllmConfig | None = vllm_config
    for owner in _owners():
        if isinstance(owner, KVConnectorBase_V1):
            outer = getattr(owner, "_vllm_config", None)
    was_set = (outer or vllm_config).kv_transfer_config.kv_load_failure_policy == "recompute"
    if outer is None:
        if was_set:
            return False
        raise ConfigError(
            "kvdisk cannot change the settings of the MultiConnector around it: set kv_load_failure_policy to "
            "recompute there and for kvdisk."
        )
    outer.kv_transfer_config.kv_load_failure_policy = "recompute"
    return not was_set


def asked_by_another() -> bool:
    """Return whether another connector, such as ``MultiConnector``, is asking for its children's
    layouts."""
    return sum(frame.f_code.co_name == "get_required_kvcache_layout" for frame in _callers()) > 1


def handshakes_beside(connector: KVConnectorBase_V1) -> list[str]:
    """Return the classes of the connectors beside ``connector`` that also take a handshake. Call it
    in the hook that brings the handshake.

    vLLM: ``MultiConnector`` hands all its children what the first of them has sent.
    """
    children: Collection[Any] = ()
    for owner in _owners():
        children = getattr(owner, "_connectors", children)
    hooks = ("set_xfer_handshake_metadata", "set_xfer_handshake_metadata_pp_aware")
    return [
        type(child).__name__
        for child in children
        if child is not connector
        and any(getattr(type(child), hook) is not getattr(KVConnectorBase_V1, hook) for hook in hooks)
    ]
