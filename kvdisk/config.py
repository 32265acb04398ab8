# SPDX-License-Identifier: Apache-2.0
"""One frozen ``Config``, read once from ``kv_connector_extra_config``. Wrong values are one clear sentence at start."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvdisk.errors import ConfigError

_UNITS = {"": 1, "b": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {f"{prefix}b": factor for prefix, factor in list(_UNITS.items()) if prefix in {"k", "m", "g", "t"}}
_UNITS |= {f"{prefix}ib": 1024**power for power, prefix in enumerate(("k", "m", "g", "t"), start=1)}

STORE_POLICIES = ("on_compute", "on_preemption", "spillover")
DEVICES = ("auto", "posix", "nixl", "gds")
EVICTIONS = ("credit", "lru", "s3fifo")
ON_RESET = ("epoch", "keep")
_CLASS_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class Config:
    """Everything a user can set; see the table in the README. Sizes are bytes, times are seconds.

    ``store_dirs``: directories of the NVMe tier, one per drive, the first with the indexes; empty: CPU tier only.
    ``nvme_bytes``: cap of this engine over all ranks, index included. ``cpu_bytes``: host memory of the CPU tier over
    all ranks; 0: no CPU tier. ``staging_bytes``, ``gpu_staging_bytes``: per worker; None: by block size.
    ``nvme_write_bytes_per_day``: written to NVMe in any 24 hours, over all ranks; None: no bound.
    ``max_pinned_gpu_blocks``: GPU blocks that stores may hold at once; None: half of the pool.
    ``min_load_tokens``: None: learnt while running (``"auto"``).
    """

    store_dirs: tuple[Path, ...] = ()
    nvme_bytes: int | None = None
    cpu_bytes: int = 4 << 30
    staging_bytes: int | None = None
    gpu_staging_bytes: int | None = None
    store_policy: str = "on_compute"
    store_decode: bool = False
    cpu_admission: str = "all"
    nvme_admission: str = "adaptive"
    nvme_write_bytes_per_day: int | None = None
    eviction: str = "credit"
    device: str = "auto"
    lookup_wait_s: float = 2.0
    io_deadline_s: float = 30.0
    index_commit_s: float = 0.05
    min_load_tokens: int | None = None
    prefetch: bool = True
    max_pinned_gpu_blocks: int | None = None
    on_reset: str = "epoch"
    segment_bytes: int = 1 << 30

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Config:
        """Build a Config from user values. Raises ConfigError, which names the key and the nearest known one."""
        known = {field.name for field in fields(cls)}
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
                raise ConfigError(f"kvdisk does not know the setting {key!r}; the nearest it knows is {near[0]!r}.")
        config = cls(**{key: _PARSERS[key](key, value) for key, value in values.items() if value is not None})
        config._check_together()
        return config

    def _check_together(self) -> None:
        if self.store_dirs and self.nvme_bytes is None:
            raise ConfigError(
                "store_dirs needs nvme_bytes, the most that this engine may keep there, such as '500GiB'."
            )
        if self.nvme_bytes is not None and not self.store_dirs:
            raise ConfigError("nvme_bytes needs store_dirs, the directory on the drive where blocks shall be kept.")
        if self.nvme_write_bytes_per_day is not None and not self.store_dirs:
            raise ConfigError("nvme_write_bytes_per_day needs store_dirs: without, nothing is written to a drive.")
        if not self.store_dirs and self.cpu_bytes == 0:
            raise ConfigError("With cpu_bytes 0 and no store_dirs there is no tier to keep anything in.")


def parse_bytes(key: str, value: Any) -> int:
    """Read a size: an integer of bytes or text such as ``"500GiB"`` or ``"1.5TB"``. Raises ConfigError."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value) if isinstance(value, str) else None
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(f"{key} must be a size in bytes such as 1073741824 or '500GiB', not {value!r}.")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def _parse_dirs(key: str, value: Any) -> tuple[Path, ...]:
    listed = [value] if isinstance(value, str | Path) else value
    if not isinstance(listed, list | tuple) or not listed or not all(isinstance(d, str | Path) and d for d in listed):
        raise ConfigError(f"{key} must be a directory, or a list of directories, not {value!r}.")
    found = tuple(Path(directory) for directory in listed)
    for path in found:
        if not path.is_absolute():
            raise ConfigError(f"{key} must be an absolute path, not {str(path)!r}.")
        if found.count(path) > 1:
            raise ConfigError(f"{key} lists {str(path)!r} twice.")
    return found


def _parse_seconds(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ConfigError(f"{key} must be a number of seconds, not {value!r}.")
    return float(value)


def _parse_count(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{key} must be a whole number that is not negative, not {value!r}.")
    return value


def _parse_tokens(key: str, value: Any) -> int | None:
    if value == "auto":
        return None
    if isinstance(value, str):
        raise ConfigError(f"{key} must be 'auto' or a whole number that is not negative, not {value!r}.")
    return _parse_count(key, value)


def _parse_flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{key} must be true or false, not {value!r}.")
    return value


def _one_of(choices: tuple[str, ...]) -> Callable[[str, Any], str]:
    def parse(key: str, value: Any) -> str:
        if value not in choices:
            listed = ", ".join(repr(choice) for choice in choices)
            raise ConfigError(f"{key} must be one of {listed}, not {value!r}.")
        return str(value)

    return parse


def _parse_store_policy(key: str, value: Any) -> str:
    if value in STORE_POLICIES or (isinstance(value, str) and _CLASS_NAME.fullmatch(value)):
        return str(value)
    listed = ", ".join(repr(policy) for policy in STORE_POLICIES)
    raise ConfigError(f"{key} must be one of {listed}, or a class of your own as 'module:Class', not {value!r}.")


def _parse_admission(key: str, value: Any) -> str:
    known = r"all|adaptive|reuse\(([1-9]|1[0-6])\)"
    if isinstance(value, str) and (re.fullmatch(known, value) or _CLASS_NAME.fullmatch(value)):
        return value
    raise ConfigError(
        f"{key} must be 'all', 'adaptive', 'reuse(n)' with n from 1 to 16, or a 'module:Class', not {value!r}."
    )


def make_own(key: str, text: str, protocol: type) -> Any:
    """Return a new object, built without arguments, of the class that a setting names as ``module:Class``.

    ``protocol``: the class must have all that it has. Raises ConfigError, so that a slip is told at start.
    """
    module, _, name = text.partition(":")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{key} names {text!r}, whose module cannot be imported: {said}.") from error
    if not isinstance(found, type):
        raise ConfigError(f"{key} names {text!r}, but the module has no class of that name.")
    wanted = [name for name in (*vars(protocol), *inspect.get_annotations(protocol)) if not name.startswith("_")]
    missing = [name for name in wanted if not hasattr(found, name)]
    if missing:
        raise ConfigError(f"{key} names {text!r}, which does not have {', '.join(map(repr, missing))}.")
    try:
        return found()
    except Exception as error:  # whatever the user's class raises
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{key} names {text!r}, which cannot be built without arguments: {said}.") from error


_PARSERS: Mapping[str, Callable[[str, Any], Any]] = {
    "store_dirs": _parse_dirs,
    "nvme_bytes": parse_bytes,
    "cpu_bytes": parse_bytes,
    "staging_bytes": parse_bytes,
    "gpu_staging_bytes": parse_bytes,
    "store_policy": _parse_store_policy,
    "store_decode": _parse_flag,
    "cpu_admission": _parse_admission,
    "nvme_admission": _parse_admission,
    "nvme_write_bytes_per_day": parse_bytes,
    "eviction": _one_of(EVICTIONS),
    "device": _one_of(DEVICES),
    "lookup_wait_s": _parse_seconds,
    "io_deadline_s": _parse_seconds,
    "index_commit_s": _parse_seconds,
    "min_load_tokens": _parse_tokens,
    "prefetch": _parse_flag,
    "max_pinned_gpu_blocks": _parse_count,
    "on_reset": _one_of(ON_RESET),
    "segment_bytes": parse_bytes,
}
