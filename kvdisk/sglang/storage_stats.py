# SPDX-License-Identifier: Apache-2.0
"""What SGLang's metrics want of a storage backend: pages and speed of each batch."""

from __future__ import annotations

import threading
from typing import Any


class StorageStats:
    """Any thread notes, and SGLang's scheduler takes. ``is_on``: somebody takes; else nothing is
    noted."""

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on
        self._lock = threading.Lock()
        self._loaded: list[tuple[int, float]] = []
        self._stored: list[tuple[int, float]] = []
        """Of each batch its pages, and gigabytes a second."""

    def note_loaded(self, pages: int, page_bytes: int, seconds: float) -> None:
        """A batch was loaded."""
        self._note(self._loaded, pages, page_bytes, seconds)

    def note_stored(self, pages: int, page_bytes: int, seconds: float) -> None:
        """A batch was stored."""
        self._note(self._stored, pages, page_bytes, seconds)

    def _note(self, noted: list[tuple[int, float]], pages: int, page_bytes: int, seconds: float) -> None:
        if self._is_on and pages:
            with self._lock:
                noted.append((pages, pages * page_bytes / max(seconds, 1e-9) / 1e9))

    def take(self) -> Any:
        """Return SGLang's ``StorageMetrics`` of what was noted since the last call; None: nobody
        wants any."""
        if not self._is_on:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            loaded, stored = list(self._loaded), list(self._stored)
            self._loaded.clear()
            self._stored.clear()
        taken = StorageMetrics()
        taken.prefetch_pgs.extend(pages for pages, _ in loaded)
        taken.prefetch_bandwidth.extend(speed for _, speed in loaded)
        taken.backup_pgs.extend(pages for pages, _ in stored)
        taken.backup_bandwidth.extend(speed for _, speed in stored)
        return taken
