# SPDX-License-Identifier: Apache-2.0
"""Objects in large numbers: made while Python's collector waits, and let go in pieces. Scheduler
thread only.

The collector counts what is made, not what could be garbage. A load of a long prompt makes some
objects for each block, which all live until it is settled, and nothing in a circle: the collector
would walk them again and again while they are made, and all else that the process holds with them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from kvdisk.manager.step_work import Kind, StepWork, Work

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


def let_go(work: StepWork, *held: dict[Any, Any]) -> None:
    """Have steps empty what nobody uses any more: to free a million objects takes as long as some
    steps."""
    for each in held:
        if each:
            work.add(Kind.GONE, let_go, _empty(work, each))


def _empty(work: StepWork, held: dict[Any, Any]) -> Work:
    while held:
        count = min(len(held), work.left(Kind.GONE))
        for _ in range(count):
            held.popitem()
        yield count
