# SPDX-License-Identifier: Apache-2.0
"""Which versions of LMCache kvdisk runs behind."""

from __future__ import annotations

from kvdisk.errors import ConfigError

SUPPORTED_VERSIONS = ("0.5.5", "0.5.6")


def lmcache_version() -> str:
    """Return LMCache's version. Raises ConfigError where it is none of those."""
    from lmcache._version import __version__

    if __version__.partition(".post")[0] not in SUPPORTED_VERSIONS:
        raise ConfigError(f"kvdisk runs behind LMCache {' and '.join(SUPPORTED_VERSIONS)}, and this is {__version__}.")
    return str(__version__)
