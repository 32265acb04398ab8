# SPDX-License-Identifier: Apache-2.0
"""Weights that a running server replaces: what is stored is of others then.

SGLang: it flushes the caches in memory after an update, and says nothing to its storage. In the
process of each rank a scheduler's class and a model runner's make all updates. They are bound when
the scheduler starts, so what they call first is wrapped: of an update that brings its weights
along, and of the beginning of one whose weights others write into memory (RDMA).
"""

from __future__ import annotations

import functools
import threading
from typing import Any

from kvdisk.errors import ConfigError

_UPDATE = "update_weights_from_"
_FIRST, _BEGIN, _RESET = "_observe_weight_load", "begin_weight_update", "_reset_tensors"


class _Watch:
    """The updates of this process. ``count``: those that have begun."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()
        self._is_set = False

    def set(self) -> None:
        """Have updates counted from now on. Raises ConfigError where SGLang does them otherwise."""
        from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager as Updater
        from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
        from sglang.srt.utils.weight_checker import WeightChecker

        with self._lock:
            if self._is_set:
                return
            updates = [update for name, update in vars(Updater).items() if name.startswith(_UPDATE)]
            is_known = updates and all(_FIRST in update.__code__.co_names for update in updates)
            if not is_known or _BEGIN not in getattr(Updater, _BEGIN).__code__.co_names:
                raise ConfigError("kvdisk does not know how this version of SGLang updates weights.")
            self._count(Updater, _FIRST)
            self._count(WeightUpdater, _BEGIN)
            self._count(WeightChecker, _RESET)  # by an endpoint for tests of updates
            self._is_set = True

    def _count(self, whose: type, name: str) -> None:
        begin = getattr(whose, name)

        @functools.wraps(begin)
        def counted(*arguments: Any, **more: Any) -> Any:
            self.count += 1  # before: a part of the new weights may be there when it fails
            return begin(*arguments, **more)

        setattr(whose, name, counted)


_WATCH = _Watch()


def watch() -> None:
    """Count updates of weights in this process from now on. Idempotent. Raises ConfigError."""
    _WATCH.set()


def updates() -> int:
    """Return how many updates of weights have begun in this process since ``watch``."""
    return _WATCH.count
