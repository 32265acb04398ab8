# SPDX-License-Identifier: Apache-2.0
"""The settings of kvdisk as a tier of vLLM's own connector, checked before weights are loaded.

This imports nothing of vLLM's offloading: the plugin imports it in every process.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from kvdisk.assembly import check_settings, warn_of_file_systems
from kvdisk.config import Config
from kvdisk.connector.adapter import refuse_version
from kvdisk.connector.identity import refuse_nameless_rows, refuse_other_machines, refuse_unstable
from kvdisk.connector.model_weights import read_weights_early
from kvdisk.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

TYPE = "kvdisk"
"""The tier's name in ``secondary_tiers``."""
MODULE = "kvdisk.offloading"
"""The module that names the tier's class, where vLLM's plugins are off."""
KEYS = (
    "store_dirs",
    "nvme_bytes",
    "nvme_admission",
    "nvme_write_bytes_per_day",
    "eviction",
    "device",
    "staging_bytes",
    "lookup_wait_s",
    "io_deadline_s",
    "index_commit_s",
    "max_age_s",
    "on_reset",
    "log_requests",
    "segment_bytes",
    "remote",
    "remote_options",
    "remote_admission",
    "remote_read_only",
    "remote_write_bytes_per_s",
    "remote_deadline_s",
    "remote_key_file",
)
"""The settings of ``Config`` that a tier has too."""
_VLLM_KEYS = frozenset({"type", "module_path", "backpressure"})
"""The settings of a tier that vLLM reads itself."""
_LOCALITIES = ("LOCAL", "REMOTE")
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
        values = {key: value for key, value in values.items() if key not in _VLLM_KEYS}
        own = {key: values.pop(key) for key in cls._fields[1:] if key in values}
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


def _refuse_unknown(key: str) -> None:
    if key in KEYS:
        return
    if key in Config.__dataclass_fields__:
        raise ConfigError(f"The tier 'kvdisk' has no setting {key!r}: that is of KVDiskConnector alone.")
    known = (*KEYS, *TierSettings._fields[1:], *_VLLM_KEYS)
    near = difflib.get_close_matches(str(key).lower(), known, n=1, cutoff=0.8)
    meant = f"; the nearest it knows is {near[0]!r}" if near else ""
    raise ConfigError(f"The tier 'kvdisk' does not know the setting {key!r}{meant}.")


def own_tiers(vllm_config: VllmConfig) -> list[dict[str, Any]]:
    """Return the entries of ``secondary_tiers`` that name kvdisk."""
    transfer = vllm_config.kv_transfer_config
    tiers = None if transfer is None else transfer.kv_connector_extra_config.get("secondary_tiers")
    return [
        tier
        for tier in (tiers if isinstance(tiers, list) else [])
        if isinstance(tier, dict) and (tier.get("type") == TYPE or tier.get("module_path") == MODULE)
    ]


def refuse_tiers_early(vllm_config: VllmConfig) -> None:
    """Raise ConfigError for all that is known to keep a tier of kvdisk's from starting, where the
    engine's configuration names one."""
    tiers = own_tiers(vllm_config)
    if not tiers:
        return
    refuse_version()
    if len(tiers) > 1:
        raise ConfigError("kvdisk is one tier: name all its directories in the store_dirs of one.")
    if vllm_config.kv_transfer_config.kv_connector_extra_config.get("spec_name", _PLAIN_SPEC) == _PLAIN_SPEC:
        raise ConfigError(
            'vLLM reads secondary_tiers only with "spec_name": "TieringOffloadingSpec" beside it: add that.'
        )
    settings = TierSettings.of(tiers[0])
    warn_of_file_systems(settings.config)
    refuse_unstable(vllm_config)
    refuse_other_machines(vllm_config)
    if settings.namespace is None:
        refuse_nameless_rows(vllm_config)
        read_weights_early(vllm_config)
