# SPDX-License-Identifier: Apache-2.0
"""Tests over LMCache's package, where that is on PYTHONPATH. Nothing stands in for any of it."""

from importlib.machinery import PathFinder

_spec = PathFinder.find_spec("lmcache")
HAS_LMCACHE = _spec is not None and _spec.origin is not None
