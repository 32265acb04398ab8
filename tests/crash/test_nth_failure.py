# SPDX-License-Identifier: Apache-2.0
"""The n-th transfer, commit or segment fails, for n = 1, 2, 3 ... until none does: all requests are
served right."""

from __future__ import annotations

import errno
import itertools
import shutil
import threading
from pathlib import Path

import pytest
from live_children import SEED
from support.live_audit import audit
from support.live_model import LiveModel
from turned import SHORT, Hook, TurnedEngine, hooked, load_on

REQUESTS = 5
KINDS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "short": SHORT}


class NthFails(Hook):
    """Fails the n-th event of these kinds."""

    KINDS = frozenset({"read", "write", "segment", "commit"})

    def __init__(self, number: int, error: int) -> None:
        self.failed = ""
        self._number = number
        self._error = error
        self._count = 0
        self._lock = threading.Lock()

    def before(self, what: str) -> int:
        if what not in self.KINDS:
            return 0
        with self._lock:
            self._count += 1
            fails = self._count == self._number
        if fails:
            self.failed = self.failed or what
        return self._error if fails else 0


def live_twice(store: Path, hook: Hook) -> None:
    """Fill a store, and start again on it, with what the hook lets fail on the way."""
    with hooked(hook):
        for _ in range(2):
            engine = TurnedEngine(store, LiveModel(), hook)
            try:
                load_on(engine, SEED + 4, REQUESTS)  # which reads
                audit(engine)
            finally:
                engine.close()


@pytest.mark.parametrize(
    ("kind", "every"), [("EIO", 3), *(pytest.param(kind, 1, marks=pytest.mark.torture) for kind in KINDS)]
)
def test_the_nth_failure_harms_nobody(kind: str, every: int, quick_path: Path) -> None:
    """``every``: so many-th n is tried."""
    failed: set[str] = set()
    for number in itertools.count(1, every):
        hook = NthFails(number, KINDS[kind])
        try:
            live_twice(quick_path / str(number), hook)
        except BaseException as problem:
            problem.add_note(f"the {number}. event, {hook.failed}, failed with {kind}; seed {SEED}")
            raise
        shutil.rmtree(quick_path / str(number))
        if not hook.failed:
            break
        failed.add(hook.failed)
    assert failed == NthFails.KINDS, "every kind had its turn"
