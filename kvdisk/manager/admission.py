# SPDX-License-Identifier: Apache-2.0
"""Who may enter a tier. Scheduler thread only."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from kvdisk.blocks import BlockKey
from kvdisk.errors import ConfigError


class AdmissionPolicy(Protocol):
    """Decides for one tier. ``want`` is told before ``admits`` is asked for the same request."""

    def want(self, key: BlockKey, request_id: str) -> None:
        """A request wanted this block (offered it, or was served from it)."""

    def admits(self, key: BlockKey) -> bool:
        """Whether the block may enter now."""

    def count(self, key: BlockKey) -> int:
        """Return a number that rises when ``admits`` may answer otherwise than before."""

    def reset(self) -> None:
        """Forget all counts: the KV they stood for is gone."""


class AdmitAll:
    """Every block may enter."""

    def want(self, key: BlockKey, request_id: str) -> None:
        """Nothing to remember."""

    def admits(self, key: BlockKey) -> bool:  # noqa: ARG002 - the protocol's signature
        """Return True."""
        return True

    def count(self, key: BlockKey) -> int:  # noqa: ARG002 - the protocol's signature
        """Return 0: the answer never changes."""
        return 0

    def reset(self) -> None:
        """Nothing to forget."""


class AdmitReused:
    """A block may enter once ``needed`` distinct requests wanted it.

    Counts live in a least-recently-wanted dictionary of at most ``capacity`` keys, about 300 bytes
    a tracked key (the dictionary's node, the key, and a tuple of up to ``needed`` request hashes).
    """

    def __init__(self, needed: int, capacity: int = 200_000) -> None:
        assert needed >= 1 and capacity >= 1
        self._needed = needed
        self._capacity = capacity
        self._seen: OrderedDict[BlockKey, tuple[int, ...]] = OrderedDict()

    def want(self, key: BlockKey, request_id: str) -> None:
        """Count a request once per key."""
        requests = self._seen.get(key, ())
        mark = hash(request_id)
        if len(requests) < self._needed and mark not in requests:
            requests = (*requests, mark)
        self._seen[key] = requests
        self._seen.move_to_end(key)
        if len(self._seen) > self._capacity:
            self._seen.popitem(last=False)

    def admits(self, key: BlockKey) -> bool:
        """Return whether enough distinct requests wanted the block."""
        return self.count(key) >= self._needed

    def count(self, key: BlockKey) -> int:
        """Return the distinct requests seen, at most ``needed``."""
        return len(self._seen.get(key, ()))

    def reset(self) -> None:
        """Forget all counts."""
        self._seen.clear()


def make_admission(name: str) -> AdmissionPolicy:
    """Return a new policy by its configuration text, ``all`` or ``reuse(n)``."""
    if name == "all":
        return AdmitAll()
    if name.startswith("reuse(") and name.endswith(")"):
        return AdmitReused(int(name[6:-1]))
    raise ConfigError(f"admission must be 'all' or 'reuse(n)', not {name!r}.")
