# SPDX-License-Identifier: Apache-2.0
"""Triton for tests, in a folder of its own: with it in the environment vLLM would take other ways.
Its interpreter runs kernels over CPU tensors, and its compiler needs no GPU."""

from __future__ import annotations

import os
from pathlib import Path

from support.laid import lay

VERSION = "3.8.0"


def lay_triton() -> Path:
    """Return the folder, in which pip has laid it, whole or not at all."""
    return lay(f"triton-{VERSION}", [f"triton=={VERSION}"], f"Triton {VERSION}")


def paths(triton: Path, *more: str | Path, interpreted: bool = True) -> dict[str, str]:
    """Return a PYTHONPATH for processes that shall have it; ``interpreted``: no kernel is
    compiled."""
    ours = [Path(__file__).parent / "interpreting"] if interpreted else []
    return {"PYTHONPATH": os.pathsep.join(map(str, (*ours, triton, *more)))}
