# SPDX-License-Identifier: Apache-2.0
"""Which versions of vLLM kvdisk supports."""

from __future__ import annotations

import vllm

from kvdisk.errors import ConfigError

SUPPORTED_VERSIONS = ((0, 32), (0, 33))
"""The (major, minor) versions of vLLM. The tests run on 0.32; 0.33 adds the hooks of sleep mode,
and keeps no reference count on null blocks."""


def vllm_minor_version() -> tuple[int, int]:
    """Return vLLM's version as (major, minor); (0, 0) for a build that has none."""
    major, minor = vllm.__version_tuple__[:2]
    return int(major), int(minor)


def refuse_version() -> None:
    """Raise ConfigError, in one sentence, where this vLLM is not supported."""
    if vllm_minor_version() not in SUPPORTED_VERSIONS:
        listed = " and ".join(f"{major}.{minor}" for major, minor in SUPPORTED_VERSIONS)
        raise ConfigError(f"kvdisk does not support vLLM {vllm.__version__} (it supports {listed}).")
