# SPDX-License-Identifier: Apache-2.0
"""Weights that a running server replaces: what is stored is of others then.

SGLang: it flushes the caches in memory after an update, and says nothing to its storage. Its
scheduler has one class that every update goes through, in the process of each rank. The updates
themselves are bound when the scheduler starts, so what they all call first is wrapped.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

from kvdisk.errors import ConfigError

_UPDATE = "update_weights_from_"
_FIRST = "_observe_weight_load"


class _Watch:
    """The updates of this process. ``count``: those that have begun."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()
        self._is_set = False

    def set(self) -> None:
        """Have updates counted from now on. Raises ConfigError where SGLang does them otherwise."""
        from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager as Updater

        with self._lock:
            if self._is_set:
                return
            updates = [update for name, update in vars(Updater).items() if name.startswith(_UPDATE)]
            if not updates or any(_FIRST not in update.__code__.co_names for update in updates):
                raise ConfigError("kvdisk does not know how this version of SGLang updates weights.")
            begin = getattr(Updater, _FIRST)

            @functools.wraps(begin)
            def counted(*arguments: Any, **more: Any) -> Any:
                self.count += 1  # before: a part of the new weights may be there when it fails
                return begin(*arguments, **more)

            setattr(Updater, _FIRST, counted)
            self._is_set = True


_WATCH = _Watch()


def watch() -> None:
    """Count updates of weights in this process from now on. Idempotent. Raises ConfigError."""
    _WATCH.set()


def updates() -> int:
    """Return how many updates of weights have begun in this process since ``watch``."""
    return _WATCH.count
