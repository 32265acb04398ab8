# SPDX-License-Identifier: Apache-2.0
"""Processes of live engines for the crash tests: started from a fork server, watched, killed,
stopped and ended."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

from support.live_process import ProcessSettings, read_lines, start_process
from support.waits import WAIT_S, until

from kvdisk.device.control import LOCK_FILE
from kvdisk.device.paths import allocated_bytes, take_lock, unlock

SEED = int(os.environ.get("KVDISK_TORTURE_SEED", "0"))


def held_bytes(store: Path) -> int:
    """The allocated bytes of a store in use.

    A look at all files takes its time, the more so on a busy machine, and counts twice what is
    deleted behind it and made before it. So it is taken again until two in a row agree.
    """
    held = allocated_bytes(store)
    while held != (held := allocated_bytes(store)):
        pass
    return held


class Child:
    """One live engine's process. Its output is a file of its own, which a failure shows."""

    def __init__(self, directory: Path, settings: ProcessSettings) -> None:
        self._number = len(list(directory.glob("log*")))
        self.log = directory / f"log{self._number}"
        self.settings = replace(settings, log=str(self.log))
        self.log.touch()
        self._stopped: list[int] = []
        self.process: BaseProcess = start_process(self.settings)
        assert self.process.pid is not None
        self.pid = self.process.pid

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()
        for pid in [*self._stopped, *self.rank_pids]:
            _signal(pid, signal.SIGKILL)

    def lines(self, what: str = "") -> list[dict[str, Any]]:
        return read_lines(self.log, what)

    def text(self) -> str:
        return f"{self.settings}\n{self.log.read_text('utf-8', 'replace')}"

    @property
    def rank_pids(self) -> list[int]:
        return [pid for line in self.lines("serving") for pid in line["pids"]]

    def wait_serving(self) -> Child:
        until(lambda: self.lines("serving") or not self.process.is_alive(), "serving")
        assert self.lines("serving"), self.text()
        return self

    def count(self, name: str) -> int:
        """A counter as of the last line."""
        return int((self.lines()[-1:] or [{"counts": {}}])[0]["counts"].get(name, 0))

    def kill(self) -> None:
        """kill -9, and wait."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join(WAIT_S)
        assert self.process.exitcode is not None

    def assert_killed(self) -> None:
        """It has died of the kill, and of nothing before."""
        self.kill()
        assert self.process.exitcode == -signal.SIGKILL, self.text()
        assert "WRONG BYTES" not in self.text()

    def stop_rank(self, rank: int) -> int:
        pid = self.rank_pids[rank]
        self._stopped.append(pid)
        _stop(pid, self.settings.store)
        return pid

    def pause(self) -> None:
        """SIGSTOP to the engine."""
        _stop(self.pid, self.settings.store)

    def resume(self) -> None:
        _signal(self.pid, signal.SIGCONT)

    def end(self) -> dict[str, Any]:
        """SIGTERM, or the end of its time: a clean end. Returns the last line."""
        if self.process.is_alive() and not (self.settings.seconds or self.settings.requests):
            self.process.terminate()
        self.process.join(WAIT_S)
        assert self.process.exitcode == 0, self.text()
        (last,) = self.lines("ended")
        return last


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _stop(pid: int, store: str) -> None:
    """SIGSTOP while the process does not hold the lock of its store, without which no engine could
    start; wait until each thread has stopped: what was in a system call ends that first."""
    lock = take_lock(Path(store) / LOCK_FILE, fcntl.LOCK_EX, WAIT_S, "the store")
    _signal(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    until(lambda: all(_state(thread) == "T" for thread in threads.iterdir()), "a stop")
    unlock(lock)


def _state(thread: Path) -> str:
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:  # it has ended
        return "T"


class SpaceWatch:
    """Samples a store's allocated bytes all the time, against a limit. ``worst``: the largest
    excess seen, in bytes."""

    def __init__(self, store: Path, limit_bytes: Callable[[], int]) -> None:
        self.samples = 0
        self.worst = -(1 << 62)
        self.most_bytes = 0
        self._store = store
        self._limit_bytes = limit_bytes
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> SpaceWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(0.02):
            held = held_bytes(self._store)
            self.samples += 1
            self.most_bytes = max(self.most_bytes, held)
            self.worst = max(self.worst, held - self._limit_bytes())
