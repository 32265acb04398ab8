# SPDX-License-Identifier: Apache-2.0
"""Amounts as people write them: bytes and ages. Pure."""

from __future__ import annotations

import re

from kvdisk.config import parse_bytes
from kvdisk.errors import ConfigError

_AGES_S = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def parse_size(key: str, text: str) -> int:
    """Read ``64K``, ``64KiB``, ``2M`` (binary where there is no unit's ``B``) or bytes. Raises ConfigError."""
    stripped = text.strip()
    if stripped[-1:].lower() in {"k", "m", "g", "t"}:
        stripped += "iB"
    return parse_bytes(key, int(stripped) if stripped.isdigit() else stripped)


def parse_age(key: str, text: str) -> int:
    """Read ``90s``, ``30min``, ``12h``, ``7d`` or ``2w``; return whole seconds. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text)
    if match is None or match[2] not in _AGES_S:
        raise ConfigError(f"{key} is a time such as 12h, 7d or 2w, and not {text!r}.")
    return round(float(match[1]) * _AGES_S[match[2]])
