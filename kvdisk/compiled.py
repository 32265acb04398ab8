# SPDX-License-Identifier: Apache-2.0
"""The compiled form of ``kvdisk/manager/``: where it lies, and whether a process uses it (decision 27).

The manager is written in Python. Where there is a C compiler when kvdisk is installed, mypyc makes machine code of
those files (``setup.py``). It lies in a directory that is named by the digest of what it was made from, so that sources
that were changed since run as they are now, and never as they were.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from kvdisk.errors import ConfigError

VARIABLE = "KVDISK_COMPILED"
"""Environment variable. 0: the sources run. 1: the compiled form, or nothing. Unset: the compiled form where it is."""

INTERPRETED = frozenset({"__init__", "admission", "spillover", "store_policy"})
"""Modules of the manager that are not compiled: users derive policies of their own from what is in them."""

_PACKAGE = Path(__file__).parent
_FLOORS = (".", "index", "manager")
"""The manager and what it imports."""


def compiled_sources() -> list[Path]:
    """Return the files that are compiled."""
    return sorted(path for path in (_PACKAGE / "manager").glob("*.py") if path.stem not in INTERPRETED)


def compiled_directory() -> Path:
    """Return the directory, there or not, of what this Python runs in place of the sources as they are now."""
    digest = hashlib.sha256()
    for floor in _FLOORS:
        for path in sorted((_PACKAGE / floor).glob("*.py")):
            source = path.read_bytes()
            digest.update(f"{floor}/{path.name} {len(source)}\n".encode())
            digest.update(source)
    return _PACKAGE / "manager" / "compiled" / f"{sys.implementation.cache_tag}-{digest.hexdigest()[:16]}"


def compiled_path() -> list[str]:
    """Return what goes before the sources in the manager's search path. Raises ConfigError for a wrong variable."""
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in {"", "0", "1"}:
        raise ConfigError(f"{VARIABLE} is {wanted!r}: set it to 0 (run the sources) or 1 (run the compiled form).")
    if wanted == "0":
        return []
    directory = compiled_directory()
    if directory.is_dir():
        return [str(directory)]
    if wanted == "1":
        raise ConfigError(
            f"{VARIABLE} is 1, and these sources have not been compiled: run make compile in a checkout,"
            " or install kvdisk with a C compiler at hand."
        )
    return []
