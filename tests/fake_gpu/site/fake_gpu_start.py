# SPDX-License-Identifier: Apache-2.0
"""Is imported as each process of the fake GPU's environment starts. Whoever imports torch gets the
kernels on the host right behind it. Whoever imports Triton gets its interpreter, whose kernels are
operations of the fake GPU's streams."""

from __future__ import annotations

import importlib
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


def run_as_operations(interpreter: ModuleType) -> None:
    """Have Triton's interpreter run kernels as operations of the fake GPU."""
    importlib.import_module("fake_gpu_triton").run_as_operations(interpreter)


def take_first_choice(autotuner: ModuleType) -> None:
    """Have Triton's autotuner measure nothing."""
    importlib.import_module("fake_gpu_triton").take_first_choice(autotuner)


def may_be_forked(torch: ModuleType) -> None:
    """Have torch not mark the process as one that has asked how many GPUs there are: in what is
    forked from such a one it refuses to use them."""
    count = int(os.environ.get("FAKE_GPU_DEVICES", "1"))
    torch._C._cuda_getDeviceCount = lambda: count


def start(kernels: str) -> None:
    """Prepare this process. ``kernels``: the library of torch's kernels on the host."""
    act_after("torch", lambda torch: torch.ops.load_library(kernels))
    if os.environ.get("FAKE_GPU_FORKS"):  # engines are forked from one that has imported vLLM
        act_after("torch.cuda", lambda cuda: may_be_forked(sys.modules["torch"]))
    act_after("triton.runtime.interpreter", run_as_operations)
    act_after("triton.runtime.autotuner", take_first_choice)
