# SPDX-License-Identifier: Apache-2.0
"""What every command shares: JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import PurePath


def as_json(value: object) -> object:
    """Return plain JSON values: dataclasses by field, paths as text, enums by value, bytes as hex."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): as_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if isinstance(value, Enum):
        return as_json(value.value)
    if isinstance(value, PurePath):
        return str(value)
    return value.hex() if isinstance(value, bytes) else value
