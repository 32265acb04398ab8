# SPDX-License-Identifier: Apache-2.0
"""Which versions of SGLang kvdisk runs behind."""

from __future__ import annotations

from kvdisk.errors import ConfigError

SUPPORTED_VERSIONS = ("0.5.22", "0.5.23")


def sglang_version() -> str:
    """Return SGLang's version. Raises ConfigError where it is none of those."""
    from sglang.version import __version__

    if __version__.partition(".post")[0] not in SUPPORTED_VERSIONS:
        raise ConfigError(f"kvdisk runs behind SGLang {' and '.join(SUPPORTED_VERSIONS)}, and this is {__version__}.")
    return str(__version__)
