# SPDX-License-Identifier: Apache-2.0
"""What this process has open in a directory: elsewhere others open and close files meanwhile."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def open_below(directory: str | Path) -> list[str]:
    """Return the paths of the files and directories that are open in a directory, sorted; of a
    nameless file, a path that ends in ``(deleted)``."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile, or that of the listing
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return sorted(path for path in found if path.startswith(f"{os.path.realpath(directory)}/"))
