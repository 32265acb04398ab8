# SPDX-License-Identifier: Apache-2.0
"""What an engine has its workers do beside its steps, of which vLLM tells a connector nothing: load
adapters, and change weights."""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from kvdisk.connector.callers import executor_around

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

_TOUCHES = re.compile(r"weight|param|load_model|apply_model")
"""Of vLLM's own names, and of those that frameworks for training give their workers' methods."""
_ASKS = re.compile(r"(check|compute|get|save|shutdown|supports)_|init_weights?_(transfer|update)")


def name_of(method: str | Callable[..., Any]) -> str:
    """Return the name of what workers are to do; empty where a function has none."""
    while isinstance(method, partial):
        method = method.func
    return method if isinstance(method, str) else getattr(method, "__name__", "")


def may_change_weights(name: str) -> bool:
    """Return whether a call of such a name may change the weights in memory. A function that has
    no telling name is taken for one that does not."""
    return _TOUCHES.search(name) is not None and _ASKS.match(name) is None


def watch_workers(weights: Callable[[str], None], adapter: Callable[[LoRARequest], None] | None = None) -> None:
    """Have ``weights`` called with the name of each call that may change weights, and ``adapter``
    with each adapter that is to be loaded, before the workers hear of it. Call this while the
    connector is built; without an engine around it, nothing is watched.

    ``weights``, ``adapter``: called by the scheduler's thread; must not raise.

    The engine's executor is given a ``collective_rpc`` of its own, by which all such calls go.
    """
    executor = executor_around()
    if executor is None:
        return
    known = executor.collective_rpc
    # No cycle: the executor holds large memory, which must go when the engine does.
    call: Callable[[], Any] = weakref.WeakMethod(known) if inspect.ismethod(known) else lambda: known

    def collective_rpc(method: str | Callable[..., Any], *rest: Any, **more: Any) -> Any:
        name = name_of(method)
        if may_change_weights(name):
            weights(name)
        elif name == "add_lora" and adapter is not None:
            (loaded,) = rest[1] if len(rest) > 1 else more["args"]
            adapter(loaded)
        return call()(method, *rest, **more)

    executor.collective_rpc = collective_rpc
