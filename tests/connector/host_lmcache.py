# SPDX-License-Identifier: Apache-2.0
"""LMCache's connector on vLLM's CPU build, named by ``kv_connector_module_path``.

LMCache imports numba. vLLM 0.32 looks at ``vars()`` of all that modules hold when it starts a
worker on the CPU, and llvmlite's library answers to any name, so also to that, with a function.
"""

from __future__ import annotations

from typing import Any


def plain_library(ffi: Any) -> None:
    """Have ``vars()`` of llvmlite's library be a dictionary. ``ffi``: ``llvmlite.binding.ffi``."""

    class PlainLibrary(type(ffi.lib)):  # type: ignore[misc]
        __slots__ = ()

        @property
        def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
            return {}

    ffi.lib.__class__ = PlainLibrary


def __getattr__(name: str) -> Any:
    """Return LMCache's connector where vLLM looks for it here."""
    if name != "LMCacheMPConnector":
        raise AttributeError(name)
    from llvmlite.binding import ffi
    from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_mp_connector import LMCacheMPConnector

    plain_library(ffi)
    return LMCacheMPConnector
