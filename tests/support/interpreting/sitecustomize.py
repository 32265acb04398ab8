# SPDX-License-Identifier: Apache-2.0
"""Python imports this as it starts where this folder is on its path: Triton's kernels are run by
Triton's interpreter then, over CPU tensors, and vLLM's CPU build uses them.

vLLM: its CPU build takes Triton only where that has a backend for CPUs, of whose driver it asks
nothing.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

import triton.backends

triton.backends.backends["cpu"] = SimpleNamespace(driver=object())
