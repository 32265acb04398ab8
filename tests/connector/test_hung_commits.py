# SPDX-License-Identifier: Apache-2.0
"""A file system that hangs in a commit, on vLLM's real scheduler: the engine rests, a pause
completes, the end comes.

Only the transaction is a stand-in: it does not return until it is told.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from schedulers import BLOCK_TOKENS

from kvdisk import assembly
from kvdisk.device.home import Home
from kvdisk.device.listing import list_homes, list_owners
from kvdisk.index import lmdb_index
from kvdisk.index.lmdb_tables import LmdbTables

WAIT_S = 600.0
PROMPT = list(range(100, 100 + 4 * BLOCK_TOKENS + 5))


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Every commit waits for it."""
    made, commit = threading.Event(), LmdbTables.commit

    def hung(tables: LmdbTables, operations: Sequence[Any]) -> bool:
        assert made.wait(WAIT_S)
        return commit(tables, operations)

    monkeypatch.setattr(LmdbTables, "commit", hung)
    monkeypatch.setattr(assembly, "_CLOSE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(lmdb_index, "CLOSE_TIMEOUT_S", 0.1)
    yield made
    made.set()


def test_an_idle_engine_rests_and_ends_though_a_commit_hangs(engines, tmp_path, gate, monkeypatch):
    bench = engines.make(threaded=True, nvme=True)
    request = bench.add("a", PROMPT, max_tokens=4)
    end_s = time.monotonic() + WAIT_S
    nvme = bench.connector.scheduler._parts.nvme
    while not (request.is_finished() and nvme.status.uncommitted):
        bench.step()
        assert time.monotonic() < end_s
    bench.connector.scheduler._manager._longest_silence_s = 0.1  # from now on, or a slow machine would be taken for it
    while bench.scheduler.has_requests():  # as a pause does, before it completes
        bench.step()
        assert time.monotonic() < end_s, "it steps for ever"
    assert nvme.status.uncommitted
    writes: list[Any] = []
    monkeypatch.setattr(Home, "_write", lambda *arguments, **_: writes.append(arguments))
    engines.close()
    assert not writes, "nothing more is written to a file system that hangs"
    (home,) = list_homes(tmp_path / "store")
    assert home.record is not None and not home.record.clean
    (owner,) = list_owners(tmp_path / "store", WAIT_S)
    assert owner.alive, "the commit may end yet, so that nobody may take the home over"
