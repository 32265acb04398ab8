# SPDX-License-Identifier: Apache-2.0
"""Python's collector waits while the manager makes many objects at once.

It counts what is made, not what could be garbage. A load of a long prompt makes some objects for
each block, which all live until it is settled, and nothing in a circle: the collector would walk
them again and again while they are made, and all else that the process holds with them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

_Asked = ParamSpec("_Asked")
_Answer = TypeVar("_Answer")


def uncollected(call: Callable[_Asked, _Answer]) -> Callable[_Asked, _Answer]:
    """Let the collector wait while a call runs. Where it was off before, it stays off."""

    @wraps(call)
    def run(*args: _Asked.args, **kwargs: _Asked.kwargs) -> _Answer:
        if not gc.isenabled():
            return call(*args, **kwargs)
        gc.disable()
        try:
            return call(*args, **kwargs)
        finally:
            gc.enable()

    return run
