# SPDX-License-Identifier: Apache-2.0
"""The settings of kvdisk as a tier of vLLM's own connector, as far as they can be checked without
vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvdisk.assembly import check_settings
from kvdisk.config import TIER_KEYS, Config, nearest
from kvdisk.errors import ConfigError

TYPE = "kvdisk"
"""The tier's name in ``secondary_tiers``."""
MODULE = "kvdisk.offloading"
"""The module that names the tier's class, where vLLM's plugins are off."""
_VLLM_KEYS = frozenset({"type", "module_path", "backpressure"})
"""The settings of a tier that vLLM reads itself."""
_LOCALITIES = ("LOCAL", "REMOTE")
DETECTOR = f"{MODULE}.WriteBackpressure"
"""kvdisk's own detector of backpressure, as a user names it in ``backpressure``."""
MOST_ROWS = 0.5
"""The share of memory's rows that stores may hold before it tells of pressure."""
_TIMING_POLICY = "ThrottledDropPolicy"
"""vLLM: asserts that the detector is the one that times stores."""
_PLAIN_SPEC = "CPUOffloadingSpec"


class TierSettings(NamedTuple):
    """The settings of one tier. ``namespace``: the user's name for the KV, needed where nothing
    else identifies it."""

    config: Config
    namespace: str | None = None
    locality: str | None = None
    enable_kv_events: bool = False

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> TierSettings:
        """Read an entry of ``secondary_tiers``. Looks at directories, and writes nothing. Raises
        ConfigError; CorruptRecord or DeviceError for what is wrong in a directory."""
        backpressure = values.get("backpressure")
        values = {key: value for key, value in values.items() if key not in _VLLM_KEYS}
        own = {key: values.pop(key) for key in cls._fields[1:] if key in values}
        if isinstance(backpressure, Mapping) and backpressure.get("backpressure_cls") == DETECTOR:
            check_backpressure({key: value for key, value in backpressure.items() if key != "backpressure_cls"})
        for key in values:
            _refuse_unknown(key)
        if not values.get("store_dirs"):
            raise ConfigError("The tier 'kvdisk' needs store_dirs, the directory on the drive.")
        if "nvme_bytes" not in values:
            raise ConfigError("The tier 'kvdisk' needs nvme_bytes, the most that it may keep, such as '500GiB'.")
        settings = cls(check_settings(values | {"cpu_bytes": 0}), **own)
        if settings.namespace is not None and not (isinstance(settings.namespace, str) and settings.namespace.strip()):
            raise ConfigError(f"namespace must be a text, not {settings.namespace!r}.")
        if settings.locality not in (None, *_LOCALITIES):
            raise ConfigError(f"locality must be one of 'LOCAL', 'REMOTE', not {settings.locality!r}.")
        if not isinstance(settings.enable_kv_events, bool):
            raise ConfigError(f"enable_kv_events must be true or false, not {settings.enable_kv_events!r}.")
        if settings.config.device == "gds":
            raise ConfigError("device 'gds' is not for a tier, whose blocks come from memory: leave device out.")
        return settings


def check_backpressure(settings: Mapping[str, Any]) -> None:
    """Check what stands beside ``DETECTOR`` in ``backpressure``. Raises ConfigError."""
    unknown = sorted(settings.keys() - {"most_rows", "policy_cls"})
    if unknown:
        raise ConfigError(f"{DETECTOR} has most_rows and policy_cls, and no {unknown[0]!r}.")
    most_rows = settings.get("most_rows", MOST_ROWS)
    if isinstance(most_rows, bool) or not isinstance(most_rows, int | float) or not 0 < most_rows <= 1:
        raise ConfigError(f"most_rows is a share of memory's rows, more than 0 and 1 at most, not {most_rows!r}.")
    policy = settings.get("policy_cls")
    if isinstance(policy, str) and policy.rpartition(".")[2] == _TIMING_POLICY:
        raise ConfigError(f"{_TIMING_POLICY} works with vLLM's EMABackpressureDetector alone: leave policy_cls out.")


def _refuse_unknown(key: str) -> None:
    if key in TIER_KEYS:
        return
    if key in Config.__dataclass_fields__:
        raise ConfigError(f"The tier 'kvdisk' has no setting {key!r}: that is of KVDiskConnector alone.")
    known = (*TIER_KEYS, *TierSettings._fields[1:], *_VLLM_KEYS)
    raise ConfigError(f"The tier 'kvdisk' does not know the setting {key!r}{nearest(key, known)}.")


def is_tier(entry: Any) -> bool:
    """Return whether an entry of ``secondary_tiers`` names kvdisk."""
    return isinstance(entry, dict) and (entry.get("type") == TYPE or entry.get("module_path") == MODULE)


def own_tier(extra: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return kvdisk's entry of ``secondary_tiers`` in the settings of a connector of vLLM's; None
    where there is none. Raises ConfigError where there are two, or vLLM would read none."""
    entries = extra.get("secondary_tiers")
    tiers = [entry for entry in entries if is_tier(entry)] if isinstance(entries, list) else []
    if not tiers:
        return None
    if len(tiers) > 1:
        raise ConfigError("kvdisk is one tier: name all its directories in the store_dirs of one.")
    if extra.get("spec_name", _PLAIN_SPEC) == _PLAIN_SPEC:
        raise ConfigError(
            'vLLM reads secondary_tiers only with "spec_name": "TieringOffloadingSpec" beside it: add that.'
        )
    tier: dict[str, Any] = tiers[0]
    return tier


def check_either(values: Mapping[str, Any]) -> Config:
    """Return the Config of a user's values, those of a tier or of ``KVDiskConnector``. Raises as
    ``check_settings``."""
    return TierSettings.of(values).config if is_tier(values) else check_settings(values)
