# SPDX-License-Identifier: Apache-2.0
"""``KVDISK_<KEY>`` variables: the configuration of a vLLM engine that is given no KV connector.

The plugin and ``kvdisk check`` read them by the same rules. SGLang and LMCache have settings of
their own, and do not look at them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from kvdisk.config import PARSERS, TIER_KEYS, Config, nearest, parse_bytes
from kvdisk.errors import ConfigError
from kvdisk.tier_settings import TYPE, TierSettings

CONNECTOR, OFFLOADING_CONNECTOR = "KVDiskConnector", "OffloadingConnector"
PREFIX = "KVDISK_"
DOOR = "KVDISK_DOOR"
DOORS = ("connector", "offloading")
_MEMORY = "cpu_bytes"
_OF_TIERS = TierSettings._fields[1:]
_TEXTS = frozenset({"namespace", "locality"})
_KNOWN = (*PARSERS, *_OF_TIERS, DOOR.removeprefix(PREFIX).lower())
_OF_TESTS = frozenset({"KVDISK_GPU_TESTS_ON", "KVDISK_PLANTED", "KVDISK_TESTS_NEED_ALL", "KVDISK_TORTURE_SEED"})
"""What kvdisk's own tests are told."""
_OF_KUBERNETES = re.compile(
    r"KVDISK_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
"""What Kubernetes tells every container of a Service whose name begins with ``kvdisk``."""


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which somebody configures kvdisk, ordered by name. An empty one
    counts as not set."""
    return {
        name: text
        for name, text in sorted(environment.items())
        if name.startswith(PREFIX) and text.strip() and name not in _OF_TESTS and _OF_KUBERNETES.fullmatch(name) is None
    }


def transfer_of(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Return what ``--kv-transfer-config`` would have to be given, as JSON has it; None where no
    variable is set.

    Looks at no directory. Raises ConfigError, which names the variable.
    """
    found = variables(environment)
    if not found:
        return None
    door = found.pop(DOOR, DOORS[0]).strip()
    if door not in DOORS:
        raise ConfigError(f"{DOOR} must be one of {', '.join(map(repr, DOORS))}, not {door!r}.")
    is_tier = door == "offloading"
    settings = {}
    for name, text in found.items():
        key = _key_of(name, is_tier)
        settings[key] = value = _read(key, text)
        if key in PARSERS:
            PARSERS[key](name, value)
    if not is_tier:
        Config.from_mapping(settings)
        return _transfer(CONNECTOR, settings)
    memory_bytes = parse_bytes(_MEMORY, settings.pop(_MEMORY, Config().cpu_bytes))
    if not memory_bytes:
        raise ConfigError(f"{DOOR}=offloading needs memory for vLLM: {PREFIX}CPU_BYTES must be more than 0.")
    for key in ("store_dirs", "nvme_bytes"):
        if key not in settings:
            raise ConfigError(f"{DOOR}=offloading needs {PREFIX}{key.upper()} as well.")
    tier = {"type": TYPE, **settings}
    spec = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": memory_bytes, "secondary_tiers": [tier]}
    return _transfer(OFFLOADING_CONNECTOR, spec)


def _transfer(connector: str, extra: dict[str, Any]) -> dict[str, Any]:
    return {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def _key_of(name: str, is_tier: bool) -> str:
    """Return the setting that a variable names. Raises ConfigError where this door has none."""
    key = name.removeprefix(PREFIX).lower()
    if name != f"{PREFIX}{key.upper()}" or key not in _KNOWN:
        known = [f"{PREFIX}{each.upper()}" for each in _KNOWN]
        raise ConfigError(f"kvdisk does not know the variable {name!r}{nearest(name, known, PREFIX)}.")
    if is_tier and key not in (*TIER_KEYS, *_OF_TIERS, _MEMORY):
        raise ConfigError(f"{name} is of {CONNECTOR} alone: leave it out with {DOOR}=offloading.")
    if not is_tier and key in _OF_TIERS:
        raise ConfigError(f"{name} needs {DOOR}=offloading: {CONNECTOR} has no such setting.")
    return key


def _read(key: str, text: str) -> Any:
    """Return a variable's text as JSON where it is some, and otherwise as it is. Of ``store_dirs``
    commas separate several."""
    text = text.strip()
    if key in _TEXTS:
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        listed = [each.strip() for each in text.split(",")]
        return listed if key == "store_dirs" and len(listed) > 1 else text
