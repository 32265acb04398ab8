# SPDX-License-Identifier: Apache-2.0
"""LMCache's connector on vLLM's CPU build, named by ``kv_connector_module_path``.

LMCache imports numba. vLLM 0.32 looks at ``vars()`` of all that modules hold when it starts a
worker on the CPU, and llvmlite's library answers to any name, so also to that, with a function.
"""

from __future__ import annotations

from typing import Any

from llvmlite.binding import ffi
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_mp_connector import LMCacheMPConnector

__all__ = ["LMCacheMPConnector"]


class _PlainLibrary(type(ffi.lib)):  # type: ignore[misc]
    """llvmlite's library, whose ``vars()`` are a dictionary."""

    __slots__ = ()

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        return {}


ffi.lib.__class__ = _PlainLibrary
