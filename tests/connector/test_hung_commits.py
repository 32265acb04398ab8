# SPDX-License-Identifier: Apache-2.0
"""A commit that hangs, on vLLM's real scheduler: the engine rests, a pause completes, the end
comes.

The process that has the index open is stopped.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from schedulers import BLOCK_TOKENS
from support.waits import lives, until

from kvdisk import engine_store
from kvdisk.device.home import Home
from kvdisk.device.listing import list_homes, list_owners
from kvdisk.index import lmdb_index

WAIT_S = 600.0
PROMPT = list(range(100, 100 + 4 * BLOCK_TOKENS + 5))


def test_an_idle_engine_rests_and_ends_though_a_commit_hangs(engines, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_store, "_CLOSE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(lmdb_index, "CLOSE_TIMEOUT_S", 0.1)
    bench = engines.make(threaded=True, nvme=True)
    parts = bench.connector.scheduler._parts
    pid, nvme = parts.index.pid, parts.nvme
    os.kill(pid, signal.SIGSTOP)
    request = bench.add("a", PROMPT, max_tokens=4)
    end_s = time.monotonic() + WAIT_S
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
    until(lambda: not lives(pid), "the end of the process")
    (home,) = list_homes(tmp_path / "store")
    assert home.record is not None and not home.record.clean
    (owner,) = list_owners(tmp_path / "store", WAIT_S)
    assert not owner.alive, "the next engine takes it over"
