# SPDX-License-Identifier: Apache-2.0
"""Tests over SGLang's package. Where that is on PYTHONPATH, this has it imported as on a machine
without a GPU."""

from importlib.machinery import PathFinder

_spec = PathFinder.find_spec("sglang")
HAS_SGLANG = _spec is not None and _spec.origin is not None

if HAS_SGLANG:
    from hicache import stand_ins  # noqa: F401 - before anything of SGLang
