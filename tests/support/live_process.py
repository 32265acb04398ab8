# SPDX-License-Identifier: Apache-2.0
"""A live engine as a process, under load: ``PYTHONPATH=tests python -m support.live_process --store
DIR``.

Prints a JSON line when it serves, one per second (or as told), and one at the end. Ends with 1 on a
wrong byte or any other failure, with 2 where the store refuses to be opened; SIGTERM ends it in
order. ``start_process`` forks one from a server that has imported everything, for tests that start
hundreds.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass, fields, replace
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from kvdisk.config import Config
from kvdisk.errors import KvdiskError
from support.live_audit import audit
from support.live_engine import LiveEngine
from support.live_load import LiveLoad, LoadShape
from support.live_model import LiveModel
from support.live_rank import LocalRank, RemoteRank, WrongBytesError, serve_rank

WRONG, REFUSED = 1, 2
_SERVER = multiprocessing.get_context("forkserver")


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """What a process shall do. ``requests`` 0 and ``seconds`` 0: until SIGTERM. ``log``: a file
    instead of the console.

    ``blocks``: room for so many on NVMe, see ``LiveModel.config``. ``cpu_blocks``: likewise in host
    memory; 0: no such tier. ``rank_processes``: each rank in a process of its own. ``audit``: check
    all invariants at start and end; ``damaged``: but not that all records and files are as kvdisk
    left them. ``every_s``: seconds between lines.
    """

    store: str
    seed: int = 0
    seconds: float = 0.0
    requests: int = 0
    model: str = "model"
    ranks: int = 2
    windowed: bool = False
    replicated: bool = False
    payload_bytes: int = 3000
    blocks: int = 64
    segment_blocks: int = 8
    cpu_blocks: int = 8
    commit_s: float = 0.01
    width: int = 6
    at_once: int = 6
    resets: float = 0.0
    rank_processes: bool = False
    audit: bool = False
    damaged: bool = False
    every_s: float = 1.0
    log: str = ""

    def live_model(self) -> LiveModel:
        return LiveModel(self.model, self.ranks, self.windowed, self.payload_bytes, self.replicated)

    def config(self) -> Config:
        """Return the product's configuration. Raises ConfigError."""
        model = self.live_model()
        per_block = sum(group.slot_bytes for group in model.geometry.groups) * self.ranks
        return model.config(
            self.store,
            blocks=self.blocks,
            segment_blocks=self.segment_blocks,
            cpu_bytes=self.cpu_blocks * per_block,
            index_commit_s=self.commit_s,
            store_decode=True,
        )

    def shape(self) -> LoadShape:
        return LoadShape(width=self.width, at_once=self.at_once, resets=self.resets)


class _Run:
    """One process's run."""

    def __init__(self, settings: ProcessSettings) -> None:
        self._settings = settings
        self._stopping = False
        self._processes: list[BaseProcess] = []
        self._started_s = time.monotonic()
        self._printed_s = self._started_s
        signal.signal(signal.SIGTERM, self._stop)
        self._engine = LiveEngine(settings.config(), settings.live_model(), self._make_rank)
        self._load = LiveLoad(self._engine, settings.seed, settings.shape())

    def run(self) -> None:
        """Load the engine until it is enough, and close it. Raises WrongBytesError,
        AssertionError."""
        home = self._engine.parts.home
        if self._settings.audit:
            self._engine.run_until_quiet()
            self._audit()
        self._print("serving", pids=[process.pid for process in self._processes], home=home.id if home else "")
        self._load.run(self._is_enough)
        self._load.end()
        blocks = self._audit() if self._settings.audit else 0
        self._print("ended", blocks=blocks)
        if blocks < 0:
            return  # with a damaged index the end would only take its time
        self._engine.close()
        for process in self._processes:
            process.join()

    def _audit(self) -> int:
        whole = not self._settings.damaged
        return audit(self._engine, records_hold=whole, files_hold=whole)

    def _make_rank(self, config: Config, model: LiveModel, rank: int, block_count: int) -> LocalRank | RemoteRank:
        if not self._settings.rank_processes:
            return LocalRank(config, model, rank, block_count)
        ours, theirs = _SERVER.Pipe()
        process = _SERVER.Process(
            target=_rank_process, args=(theirs, config, model, rank, block_count, self._settings.log)
        )
        process.start()
        theirs.close()
        assert process.pid is not None
        self._processes.append(process)
        return RemoteRank(ours, process.pid)

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def _is_enough(self) -> bool:
        settings, now = self._settings, time.monotonic()
        if now >= self._printed_s + settings.every_s:
            self._printed_s = now
            self._print("running")
        return (
            self._stopping
            or bool(settings.requests and self._load.finished >= settings.requests)
            or bool(settings.seconds and now >= self._started_s + settings.seconds)
        )

    def _print(self, what: str, **more: Any) -> None:
        counts = self._engine.manager.stats.counts
        line = {
            "what": what,
            "seconds": round(time.monotonic() - self._started_s, 1),
            "steps": self._engine.step_count,
            "finished": self._load.finished,
            "preempted": self._engine.counting.preempted,
            **more,
            "counts": dict(sorted(counts.items())),
        }
        # In one write: log lines of other threads go to the same file.
        os.write(sys.stdout.fileno(), f"{json.dumps(line)}\n".encode())


def run_process(settings: ProcessSettings) -> int:
    """Run, and return the exit code. The main thread of a process calls it: it takes over
    SIGTERM."""
    try:
        run = _Run(settings)
    except KvdiskError as error:
        print(f"REFUSED: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return REFUSED
    try:
        run.run()
    except WrongBytesError as error:
        print(f"WRONG BYTES: {error}", file=sys.stderr, flush=True)
        return WRONG
    except Exception:
        print(f"FAILED with {settings}", file=sys.stderr)
        traceback.print_exc()
        return WRONG
    return 0


def _leave(code: int) -> NoReturn:
    """End without waiting for ranks: they hear of it, and end by themselves."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _rank_process(connection: Any, config: Config, model: LiveModel, rank: int, blocks: int, log: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the scheduler ends its ranks
    _redirect(log)
    serve_rank(connection, config, model, rank, blocks)


def _engine_process(settings: ProcessSettings) -> None:
    _redirect(settings.log)
    _leave(run_process(settings))


def _redirect(log: str) -> None:
    """Let everything go to the end of a file, the standard streams of this process included."""
    if log:
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, force=True)


def _prepare_server() -> None:
    """Have the server import everything. It would find nothing of ours: this Python does not tell
    it where."""
    _SERVER.set_forkserver_preload(["support.live_process"])
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))):
        forkserver.ensure_running()


def start_process(settings: ProcessSettings) -> BaseProcess:
    """Start a process that runs these settings; its exit code is ``run_process``'s, or 1 for any
    other error."""
    assert settings.log, "a process of the server has no console"
    _prepare_server()
    process = _SERVER.Process(target=_engine_process, args=(settings,))
    process.start()
    return process


def read_lines(log: str | Path, what: str = "") -> list[dict[str, Any]]:
    """Return the JSON lines of a log so far, of one kind or all."""
    try:
        text = Path(log).read_text("utf-8", "replace")
    except FileNotFoundError:
        return []
    found = [json.loads(line) for line in text.splitlines() if line.startswith('{"what"') and line.endswith("}")]
    return [line for line in found if what in ("", line["what"])]


def main() -> NoReturn:
    _prepare_server()
    parser = argparse.ArgumentParser(description=__doc__)
    for one in fields(ProcessSettings):
        kind = {"float": float, "int": int, "str": str}.get(str(one.type))
        how: dict[str, Any] = {"type": kind} if kind else {"action": "store_true"}
        if one.name == "store":
            how["required"] = True
        parser.add_argument("--" + one.name.replace("_", "-"), default=one.default, **how)
    settings = ProcessSettings(**vars(parser.parse_args()))
    _redirect(settings.log)
    _leave(run_process(replace(settings, store=str(Path(settings.store).absolute()))))


if __name__ == "__main__":
    main()
