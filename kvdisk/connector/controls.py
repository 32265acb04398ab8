# SPDX-License-Identifier: Apache-2.0
"""What a request's sender has to say to kvdisk."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from kvdisk.errors import QuietLog
from kvdisk.manager.requests import RequestLimits

logger = logging.getLogger("kvdisk.connector")

MOST_LOAD = "max_load_tokens"
STORE_LIMIT = "max_offload_tokens"


class Controls:
    """Reads a request's limits from its ``kv_transfer_params``.

    A wrong value is ignored, and logged at most once a minute. Other keys belong to other
    connectors. The names are those of vLLM's own offloading connector.
    """

    def __init__(self) -> None:
        self._log = QuietLog(time.monotonic, logger)

    def read(self, params: Any) -> RequestLimits:
        """Return the limits of a request; ``params``: what came with it, of any form."""
        if params is None:
            return RequestLimits()
        if not isinstance(params, Mapping):
            self._log.warn("params", f"kv_transfer_params must be a mapping, not {type(params).__name__}; ignored.")
            return RequestLimits()
        return RequestLimits(self._tokens(params, MOST_LOAD), self._tokens(params, STORE_LIMIT))

    def _tokens(self, params: Mapping[Any, Any], name: str) -> int | None:
        value = params.get(name)
        if value is None or (type(value) is int and value >= 0):
            return value
        self._log.warn(name, f"{name} must be a number of tokens, 0 or more, not {_short(value)}; ignored.")
        return None


def _short(value: Any) -> str:
    """Return a value that came from outside so that a log can take it."""
    text = repr(value) if isinstance(value, str | int | float) else type(value).__name__
    return text if len(text) <= 40 else f"{text[:40]}..."
