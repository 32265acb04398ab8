# SPDX-License-Identifier: Apache-2.0
"""Is imported as each process of the fake GPU's environment starts. Whoever imports torch gets the
kernels on the host right behind it. Whoever imports Triton gets its interpreter, over what the host
sees of the fake GPU's memory.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")
Act = Callable[[ModuleType], None]


class _After(importlib.abc.MetaPathFinder):
    """Calls ``act`` with a module once that is imported."""

    def __init__(self, wanted: str, act: Act) -> None:
        self._wanted, self._act = wanted, act

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self._wanted:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            self._act(module)

        spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec


def act_after(name: str, act: Act) -> None:
    """Call ``act`` with a module once that is imported."""
    sys.meta_path.insert(0, _After(name, act))


def interpret_on_host(interpreter: ModuleType) -> None:
    """Have Triton's interpreter work on the host's view of a tensor's bytes, once the tensor's
    stream has come so far."""

    def on_host(arg: Any) -> Any:
        if isinstance(arg, tuple):
            return interpreter._tuple_create(arg, map(on_host, arg))
        if not hasattr(arg, "data_ptr"):
            return arg
        import torch

        inner = interpreter._unwrap_tensor(arg)
        return interpreter._rewrap_tensor(torch.ops.fake_gpu.host_view(inner), original_tensor=arg)

    def arguments_on_host(_self: Any, args: Any, kwargs: Any) -> Any:
        return [on_host(arg) for arg in args], {name: on_host(arg) for name, arg in kwargs.items()}

    interpreter.GridExecutor._init_args_hst = arguments_on_host
    interpreter.GridExecutor._restore_args_dev = lambda self, *_: None


def start(kernels: str) -> None:
    """Prepare this process. ``kernels``: the library of torch's kernels on the host."""
    act_after("torch", lambda torch: torch.ops.load_library(kernels))
    act_after("triton.runtime.interpreter", interpret_on_host)
