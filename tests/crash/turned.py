# SPDX-License-Identifier: Apache-2.0
"""Live engines without threads of movers and devices: what they do, and in which order, depends on
the seed alone.

Every transfer, commit, sync, replaced control file and opened segment is an event that a hook sees,
after it happened or in its place.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from support.live_engine import STUCK_S, LiveEngine
from support.live_load import LiveLoad, LoadShape
from support.live_model import LiveModel
from support.live_rank import LocalRank

from kvdisk.assembly import assemble_worker
from kvdisk.device import paths
from kvdisk.device.base import Op, Outcome, Transfer
from kvdisk.device.batches import cut
from kvdisk.device.posix import PosixDevice
from kvdisk.errors import DeviceError
from kvdisk.geometry import ALIGNMENT, round_up
from kvdisk.index.lmdb_index import TablesProcess
from kvdisk.worker.files import HomeFiles
from kvdisk.worker.mover import Mover
from kvdisk.worker.routes import OpenFile


class Hook:
    """Sees events. ``before`` may return an errno: then the event fails with it. Nothing happens in
    these two."""

    def before(self, what: str) -> int:
        """An event is about to happen."""
        return 0

    def after(self, what: str) -> None:
        """It has happened; for a write also when half of it has."""


class TurnedDevice(PosixDevice):
    """Does everything in ``submit``, one half of a transfer after the other."""

    def __init__(self, hook: Hook) -> None:
        super().__init__(1)
        self._hook = hook
        self._turns = 0
        self._ended: list[Outcome] = []

    def submit(self, op: Op, batch: Sequence[Transfer]) -> int:
        self._turns += 1
        errors = {}
        for position, transfer in enumerate(batch):
            number = self._hook.before(op.value)
            number = number or self._move(op, transfer, short=False)
            if number == SHORT:
                number = self._move(op, transfer, short=True) or errno.EIO
            if number:
                errors[position] = number
        self._ended.append(Outcome(self._turns, errors))
        return self._turns

    def _move(self, op: Op, transfer: Transfer, *, short: bool) -> int:
        half_bytes = round_up(sum(buffer.nbytes for buffer in transfer.buffers) // 2, ALIGNMENT)
        for (half,) in cut([(0, transfer)], half_bytes):
            super().submit(op, [Transfer(half.fd, half.offset, tuple(half.buffers))])
            (outcome,) = super().drain()
            if outcome.errors:
                return outcome.errors[0]
            if op is Op.WRITE:
                self._hook.after("write")
            if short:
                break
        return 0

    def poll(self, timeout_s: float = 0.0) -> list[Outcome]:
        ended, self._ended = self._ended, []
        return ended

    drain = poll


SHORT = -1
"""In place of an errno: half of the transfer is moved, and then it fails."""


def turned_rank(hook: Hook) -> Callable[..., LocalRank]:
    """Return what makes the ranks of a ``LiveEngine``."""

    class Files(HomeFiles):
        def open_segment(self, spec: Any) -> OpenFile | None:
            _fail(hook.before("segment"), "segment")
            file = super().open_segment(spec)
            hook.after("segment")
            return file

    def make(config: Any, model: LiveModel, rank: int, layers: Any) -> Any:
        with (
            patch("kvdisk.worker.mover.Mover", partial(Mover, threaded=False)),
            patch("kvdisk.assembly.choose_device", lambda *_, **__: TurnedDevice(hook)),
            patch("kvdisk.worker.files.HomeFiles", Files),
        ):
            return assemble_worker(config, model.geometry, rank, layers)

    return partial(LocalRank, make=make, turned=True)


@contextmanager
def hooked(hook: Hook) -> Iterator[None]:
    """Let a hook see the commits, syncs and control files of all engines of this process."""

    def wrap(call: Callable[..., Any], what: str) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            _fail(hook.before(what), what)
            result = call(*args, **kwargs)
            hook.after(what)
            return result

        return wrapped

    with ExitStack() as stack:
        stack.enter_context(patch.object(TablesProcess, "commit", wrap(TablesProcess.commit, "commit")))
        stack.enter_context(patch.object(paths, "sync", wrap(paths.sync, "sync")))
        stack.enter_context(patch.object(paths, "write_control", wrap(paths.write_control, "control")))
        yield


def _fail(number: int, what: str) -> None:
    if number:
        raise DeviceError(errno.EIO if number == SHORT else number, f"{what} fails for the test")


class TurnedEngine(LiveEngine):
    """A ``LiveEngine`` of ``turned_rank`` whose time goes on by a hundredth of a second with each
    look at the clock."""

    def __init__(self, store: Path, model: LiveModel, hook: Hook, **config: Any) -> None:
        self.time_s = 1_700_000_000.0
        # Commits come with the flush after the step, so that what the step writes is there before
        # them.
        values = {
            "blocks": 24 if model.windowed else 18,
            "segment_blocks": 2,
            "index_commit_s": STUCK_S,
            "eviction": "lru",  # the short loads were chosen so that with it all kinds of events come
            "store_decode": True,
        } | config
        super().__init__(model.config(str(store), **values), model, turned_rank(hook), clock=self._look)
        for background in self.parts.backgrounds:  # what they would do depends on the time
            background.close()

    def _look(self) -> float:
        self.time_s += 0.01
        return self.time_s

    def step(self, budget_tokens: int = 16) -> None:
        """Run a step, and wait until what it gave the index is committed."""
        super().step(budget_tokens)
        if self.parts.index is not None:
            self.parts.index.flush(STUCK_S)


def load_on(engine: LiveEngine, seed: int, requests: int) -> None:
    """Run a short load to its end."""
    load = LiveLoad(engine, seed, LoadShape(width=3, at_once=3, most_tokens=30, forgets=0.3, aborts=0.05))
    load.run_requests(requests)
