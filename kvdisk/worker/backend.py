# SPDX-License-Identifier: Apache-2.0
"""The protocol of what runs the legs of batches: the copies on an engine's blocks, a host's
processors, the drives, and the remote store are backends."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

from kvdisk.messages import Reason
from kvdisk.worker.routes import Batch

_NONE: Mapping[int, Reason] = MappingProxyType({})


class Progress(NamedTuple):
    """What a backend says of a batch's leg.

    ``failed``: the moves that failed just now. ``by_host``: the moves that have to be loaded again,
    through host memory. ``ended``: False: the backend has the other moves still. ``unanswered``:
    the remote store said nothing about some of them, so that it is asked no more for their job.
    """

    batch: Batch
    failed: Mapping[int, Reason] = _NONE
    by_host: Collection[int] = ()
    ended: bool = True
    unanswered: bool = False


class Backend(Protocol):
    """Runs legs of one kind. The mover's thread makes all calls."""

    @property
    def busy(self) -> bool:
        """Whether a batch is under way."""

    def start(self, batch: Batch) -> Progress:
        """Begin a batch's leg. Does not wait. Unless it has ended at once, the backend owns the
        batch's slots until ``poll`` says that it has."""

    def poll(self, wait_s: float) -> Iterable[Progress]:
        """Return what came of the legs under way since the last call. A backend that waits for
        others than this process waits up to ``wait_s`` for the first."""


def fail_all(batch: Batch, reason: Reason) -> Progress:
    """Say that a leg has ended with every move failed."""
    return Progress(batch, dict.fromkeys(batch.positions, reason))
