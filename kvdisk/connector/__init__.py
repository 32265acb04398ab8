# SPDX-License-Identifier: Apache-2.0
"""The door to vLLM. ``KVDiskConnector`` is loaded when it is asked for, so that importing this package is cheap."""

from __future__ import annotations

from typing import Any

__all__ = ["KVDiskConnector", "counters", "drain"]


def __getattr__(name: str) -> Any:
    """Load the connector, or the tools for in-process engines, on first use."""
    if name == "KVDiskConnector":
        from kvdisk.connector.connector import KVDiskConnector

        return KVDiskConnector
    if name in {"counters", "drain"}:
        from kvdisk.connector import inprocess

        return getattr(inprocess, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
