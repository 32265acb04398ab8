# SPDX-License-Identifier: Apache-2.0
"""Is imported as each process of the fake GPU's environment starts: whoever imports torch gets the
kernels on the host right behind it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")


def load_after_torch(kernels: str) -> None:
    """Load the library of kernels once torch is imported."""

    class _AfterTorch(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name != "torch":
                return None
            sys.meta_path.remove(self)
            spec = importlib.machinery.PathFinder.find_spec(name, path, target)
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                module.ops.load_library(kernels)

            spec.loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, _AfterTorch())
