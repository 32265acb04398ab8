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

from kvdisk.connector.callers import engine_around

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

_TOUCHES = re.compile(r"weight|param|load_model|apply_model")
"""What vLLM's own engine has workers do by another name leaves the weights as they are."""
_ASKS = re.compile(r"_*(annotate|check|compute|get|is|list|pin|profile|release|save|shutdown|supports)(_|$)")
_KEEPS = frozenset(
    {
        *("init_weight_transfer_engine", "init_weights_update_group", "add_lora", "remove_lora"),
        *("execute_dummy_batch", "synchronize_device", "reset_mm_cache", "reset_encoder_cache"),
    }
)


def name_of(method: str | Callable[..., Any]) -> str:
    """Return the name of what workers are to do; empty where a function has none."""
    while isinstance(method, partial):
        method = method.func
    return method if isinstance(method, str) else getattr(method, "__name__", "")


def may_change_weights(name: str, *, asked_for: bool) -> bool:
    """Return whether a call of such a name may change the weights in memory. ``asked_for``: by a
    user of the engine, who may call whatever the workers have: what no name says is doubtful."""
    if name in _KEEPS or _ASKS.match(name) is not None:
        return False
    return asked_for or _TOUCHES.search(name) is not None


def watch_workers(weights: Callable[[str], None], adapter: Callable[[LoRARequest], None] | None = None) -> None:
    """Have ``weights`` called with the name of each call that may change weights, and ``adapter``
    with each adapter that is to be loaded, before the workers hear of it. Call this while the
    connector is built; without an engine around it, nothing is watched.

    ``weights``, ``adapter``: called by the scheduler's thread; must not raise.

    A user's calls go by the engine's ``collective_rpc``, and all calls by its executor's: both are
    given another one.
    """
    engine = engine_around()
    if engine is None:
        return

    def asked_for(name: str, *_: Any) -> None:
        if may_change_weights(name, asked_for=True) and not may_change_weights(name, asked_for=False):
            weights(name)  # the others are told of below

    def called(name: str, *arguments: Any) -> None:
        if may_change_weights(name, asked_for=False):
            weights(name)
        elif name == "add_lora" and adapter is not None:
            adapter(*arguments)

    if hasattr(engine, "collective_rpc"):
        _tell_first(engine, asked_for)
    _tell_first(engine.model_executor, called)


def _tell_first(owner: Any, tell: Callable[..., None]) -> None:
    """Have ``tell`` called with the name and the arguments of each ``collective_rpc`` first."""
    known = owner.collective_rpc
    # No cycle: an executor holds large memory, which must go when the engine does.
    call: Callable[[], Any] = weakref.WeakMethod(known) if inspect.ismethod(known) else lambda: known

    def collective_rpc(
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        **more: Any,
    ) -> Any:
        tell(name_of(method), *args)
        return call()(method, timeout, args, kwargs, **more)

    owner.collective_rpc = collective_rpc
