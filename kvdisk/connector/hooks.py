# SPDX-License-Identifier: Apache-2.0
"""Whether this vLLM calls its hooks as kvdisk's methods take them: compared by signature at the
start, because an engine that meets a difference later ends with a TypeError.

A hook is what a class of vLLM's declares and a class of kvdisk's overrides. Types are not compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from inspect import Parameter, Signature, signature
from types import FunctionType
from typing import Any

import vllm

from kvdisk.errors import ConfigError

ADDED_HOOKS: Mapping[str, tuple[int, int]] = {
    "restore_kv_caches": (0, 33),
    "supports_sleep_mode": (0, 33),
    "unregister_kv_caches": (0, 33),
}
"""Hooks that not every supported version has, and the first that has them."""

_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_ANY = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def refuse_other_hooks(ours: type, own: Collection[str] = ()) -> None:
    """Raise ConfigError, in one sentence, for the first hook that this vLLM calls otherwise than
    the class takes it. ``own``: the public names of the class that are no hooks."""
    change = next(_changes(ours, own), None)
    if change is not None:
        raise ConfigError(f"kvdisk does not support this build of vLLM {vllm.__version__}, {change}.")


def _changes(ours: type, own: Collection[str]) -> Iterator[str]:
    for name in sorted(getattr(ours, "__abstractmethods__", ())):
        yield f"which demands the hook {name}: kvdisk has none"
    theirs = {name: hook for base in reversed(ours.__mro__[1:-1]) for name, hook in vars(base).items()}
    for name, hook in vars(ours).items():
        if name in own or (name[0] == "_" and (name != "__init__" or name not in theirs)) or _parameters(hook) is None:
            continue
        if name not in theirs:
            if name not in ADDED_HOOKS:
                yield f"which has no hook {name} any more"
        elif type(hook) is not type(theirs[name]):
            yield f"where {name} is a {type(theirs[name]).__name__}: kvdisk has a {type(hook).__name__}"
        elif not _takes(hook, theirs[name]):
            told, known = (_written(each) for each in (theirs[name], hook))
            yield f"which calls the hook {name} with {told}: kvdisk takes {known}"


def _parameters(hook: Any) -> list[Parameter] | None:
    """Return the parameters of a hook without its object; none of a property, None of what is no
    hook."""
    if isinstance(hook, property):
        return []
    function = hook.__func__ if isinstance(hook, classmethod) else hook
    return list(signature(function).parameters.values())[1:] if isinstance(function, FunctionType) else None


def _takes(hook: Any, theirs: Any) -> bool:
    """Return whether a hook of ours takes every call that vLLM's declaration allows."""
    ours, told = _parameters(hook) or [], _parameters(theirs) or []
    by_name = {each.name: (at, each) for at, each in enumerate(ours) if each.kind not in _ANY}
    kinds = {each.kind for each in ours}
    for at, each in enumerate(told):
        place, known = by_name.pop(each.name, (at, None))
        if each.kind in _ANY:
            taken = each.kind in kinds
        elif known is None:
            taken = each.kind is Parameter.KEYWORD_ONLY and Parameter.VAR_KEYWORD in kinds
        else:
            by_place = each.kind not in _BY_POSITION or (place == at and known.kind in _BY_POSITION)
            taken = by_place and (each.default is Parameter.empty or known.default is not Parameter.empty)
        if not taken:
            return False
    return all(known.default is not Parameter.empty for _, known in by_name.values())


def _written(hook: Any) -> str:
    return str(Signature([each.replace(annotation=Parameter.empty) for each in _parameters(hook) or []]))
