# SPDX-License-Identifier: Apache-2.0
"""The n-th transfer, commit or segment fails, for n = 1, 2, 3 ... until none does: all requests are
served right."""

from __future__ import annotations

import errno
import itertools
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from live_children import SEED
from support.live_audit import audit
from support.live_model import LiveModel
from turned import SHORT, Hook, TurnedEngine, hooked, load_on

from kvdisk.errors import DeviceError

REQUESTS = 5
KINDS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "short": SHORT}


class NthFails(Hook):
    """Fails the n-th event of these kinds, and, if ``for_good``, all that follow."""

    KINDS = frozenset({"read", "write", "segment", "commit"})

    def __init__(self, number: int, error: int, *, for_good: bool = False) -> None:
        self.failed = ""
        self._number = number
        self._error = error
        self._for_good = for_good
        self._count = 0
        self._lock = threading.Lock()

    def before(self, what: str) -> int:
        if what not in self.KINDS:
            return 0
        with self._lock:
            self._count += 1
            fails = self._count == self._number or (self._for_good and self._count > self._number)
        if fails:
            self.failed = self.failed or what
        return self._error if fails else 0


def live_twice(store: Path, model: LiveModel, hook: Hook, seed: int, requests: int, config: dict[str, Any]) -> None:
    """Fill a store, and start again on it, with what the hook lets fail on the way."""
    with hooked(hook):
        for _ in range(2):
            engine = TurnedEngine(store, model, hook, **config)
            try:
                load_on(engine, seed, requests)
                audit(engine)
            finally:
                engine.close()


def check_all(
    path: Path, model: LiveModel, error: int, seed: int, requests: int, *, for_good: bool = False
) -> set[str]:
    """Return the kinds of events that have failed."""
    failed: set[str] = set()
    config = {"cpu_bytes": 0} if seed % 2 else {}
    for number in itertools.count(1):
        hook = NthFails(number, error, for_good=for_good)
        store = path / str(number)
        try:
            live_twice(store, model, hook, seed, requests, config)
        except BaseException as problem:
            problem.add_note(f"the {number}. event, {hook.failed}, failed with {error}; seed {seed}, {model}")
            raise
        shutil.rmtree(store)
        if not hook.failed:
            return failed
        failed.add(hook.failed)
    raise AssertionError("unreachable")


@pytest.mark.parametrize("kind", ["EIO", *[pytest.param(kind, marks=pytest.mark.torture) for kind in KINDS][1:]])
def test_the_nth_failure_harms_nobody(kind: str, quick_path: Path) -> None:
    failed = check_all(quick_path, LiveModel(), KINDS[kind], SEED, REQUESTS)
    assert failed == NthFails.KINDS, "every kind had its turn"


@pytest.mark.torture
@pytest.mark.parametrize("kind", ["EIO", "ENOSPC"])
def test_the_nth_failure_of_a_longer_life(kind: str, quick_path: Path) -> None:
    check_all(quick_path, LiveModel(windowed=True), KINDS[kind], SEED + 2, 2 * REQUESTS)


@pytest.mark.parametrize("kind", ["read", "write", "segment"])
def test_a_drive_that_fails_from_now_on(kind: str, quick_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in memory goes on serving, and nobody hears of it but the log."""
    monkeypatch.setattr(NthFails, "KINDS", frozenset({kind}))
    for number in (1, 2):
        hook = NthFails(number, errno.EIO, for_good=True)
        live_twice(quick_path / str(number), LiveModel(), hook, SEED, REQUESTS, {})
        assert hook.failed == kind


def test_the_hook_stands_before_what_happens(quick_path: Path) -> None:
    """An engine that cannot even begin says so in a KvdiskError."""

    class NoControl(Hook):
        def before(self, what: str) -> int:
            return errno.EIO if what == "control" else 0

    with hooked(NoControl()), pytest.raises(DeviceError):
        TurnedEngine(quick_path / "store", LiveModel(), Hook())
