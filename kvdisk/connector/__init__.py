# SPDX-License-Identifier: Apache-2.0
"""The door to vLLM. ``KVDiskConnector`` is loaded on first use, so that importing this package is
cheap.

All that depends on vLLM's insides is in this folder: vLLM calls its connector API experimental.
What other modules assume about vLLM is marked there: docs/TESTING.md, "Another vLLM".

``drain`` and ``counters`` are for engines in the caller's process
(``VLLM_ENABLE_V1_MULTIPROCESSING=0``): tests, the demo, notebooks. There nothing steps the engine
after ``generate`` returns, so transfers would not settle.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM

__all__ = ["KVDiskConnector", "counters", "drain"]


def __getattr__(name: str) -> Any:
    """Load the connector on first use, and check the settings of an engine that looks it up."""
    if name == "KVDiskConnector":
        from kvdisk.connector.callers import config_being_built, transfer_looked_up
        from kvdisk.connector.connector import KVDiskConnector, refuse_early

        transfer = transfer_looked_up()
        if transfer is not None:
            refuse_early(transfer, config_being_built())
        return KVDiskConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def drain(llm: LLM, timeout_s: float = 60.0) -> bool:
    """Step the engine until no transfer is under way and every record is committed. Return False
    when the time ran out.

    Call it between ``generate`` calls, from the thread that calls them.
    """
    connector = _connector_of(llm)
    end_s = time.monotonic() + timeout_s
    while connector.has_pending_push_work():
        if time.monotonic() > end_s:
            return False
        llm.llm_engine.step()
    return True


def counters(llm: LLM) -> dict[str, int]:
    """Return the totals of kvdisk's counters since the engine started, by series (see
    ``kvdisk.stats``)."""
    return dict(_connector_of(llm).counters())


def _connector_of(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler.connector
