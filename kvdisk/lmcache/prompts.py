# SPDX-License-Identifier: Apache-2.0
"""Which object comes before which in a prompt.

LMCache: a store has objects of several prompts, and does not say where one begins. A lookup has the
objects of one prompt, in its order, and comes before the prompt is computed and stored.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from kvdisk.blocks import BlockKey

MOST = 1 << 17
"""Objects that are remembered, the last that were looked up."""


class Prompts:
    """Any thread makes any call. Objects are named by the keys of their first pieces."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._before: dict[BlockKey, BlockKey | None] = {}

    def note(self, prompt: Iterable[BlockKey]) -> None:
        """These objects follow each other in a prompt, the first one first."""
        before: BlockKey | None = None
        with self._lock:
            for key in prompt:
                self._before.pop(key, None)  # the one that was noted last is the last
                self._before[key] = before
                before = key
            while len(self._before) > self._most:
                del self._before[next(iter(self._before))]

    def before(self, key: BlockKey) -> BlockKey | None:
        """Return what comes before an object; None: nothing, or it is not known."""
        with self._lock:
            return self._before.get(key)
