# SPDX-License-Identifier: Apache-2.0
"""A replay that moves bytes: real manager, index, mover and files. Needs torch.

The GPU's blocks lie in host memory. Every computed block is filled with bytes of its own, and every
loaded one is compared with them. A request waits for its load before the next one comes, so waits
are those of a drive without other load.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import numpy as np

from kvdisk.assembly import assemble_scheduler, assemble_worker
from kvdisk.cli.replay.capacity import nvme_bytes_for
from kvdisk.cli.replay.engine import Engine
from kvdisk.cli.replay.run import Run, run_engine, waits_of
from kvdisk.cli.replay.tiers import Setting, make_geometry, make_pool
from kvdisk.cli.replay.trace import Trace
from kvdisk.config import Config
from kvdisk.errors import ConfigError
from kvdisk.geometry import FINGERPRINT_BYTES
from kvdisk.messages import Plan, Report
from kvdisk.worker.arena import Arena

if TYPE_CHECKING:
    from kvdisk.worker.mover import Mover

_PREFIX = ".kvdisk-replay-"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LEFT_FREE_BYTES = 1 << 30
_IDLE_WAIT_S = 0.02
_DEADLINE_S = 120.0
_MOST_MEMORY = 0.7
"""Of the machine's."""


class MovingBackend:
    """``Backend`` of one rank with a real mover, and the machine's clock.

    ``wrong``: blocks loaded that were not what had been stored.
    """

    def __init__(self, mover: Mover, gpu: Arena, block_bytes: int) -> None:
        self._mover = mover
        self._blocks = gpu.tensor(0).numpy()
        self._block_bytes = block_bytes
        self.wrong = 0

    @property
    def now(self) -> float:
        """See ``Backend``."""
        return time.monotonic()

    def arrive(self, time_s: float) -> None:
        """See ``Backend``. Requests come one behind the other, whatever the trace says."""

    def run(self, plan: Plan, *, idle: bool) -> Report:
        """Hand a plan to the mover; where nothing is computed, wait a little for what it is at."""
        if plan.jobs or plan.void:
            self._mover.submit(plan, self._mover.compute_done())
        if idle:
            self._mover.wait_any(_IDLE_WAIT_S)
        return self._mover.poll()

    def computed(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Fill blocks with bytes of their own."""
        for block_hash, block_id in zip(hashes, block_ids, strict=True):
            self._blocks[block_id] = self._content(block_hash)

    def loaded(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Compare blocks with what they were filled with."""
        for block_hash, block_id in zip(hashes, block_ids, strict=True):
            self.wrong += not np.array_equal(self._blocks[block_id], self._content(block_hash))

    def _content(self, block_hash: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        return np.resize(np.frombuffer(block_hash, np.uint8), self._block_bytes)


@contextmanager
def moving_bytes(directory: Path, block_bytes: int) -> Iterator[Callable[[Trace, int, Setting], Run]]:
    """Yield what takes a trace through a store in ``directory``, which is removed after each run.

    Signals end the program in order meanwhile. Raises ConfigError where it cannot begin, DeviceError
    where the drive fails.
    """
    if not directory.is_dir() or not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"--io {directory}: that is not a directory in which files can be made.")

    def run(trace: Trace, slot_bytes: int, setting: Setting) -> Run:
        with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=directory, ignore_cleanup_errors=True) as store:
            return _run(trace, setting, block_bytes, slot_bytes, Path(store).resolve())

    with _ending_on_signals():
        yield run


@contextmanager
def _ending_on_signals() -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP end the program in order, so that it removes the store.

    A second signal does not disturb that. For the main thread.
    """

    def end(number: int, _: FrameType | None) -> None:
        for one in _SIGNALS:
            signal.signal(one, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(trace: Trace, setting: Setting, block_bytes: int, slot_bytes: int, store: Path) -> Run:
    geometry, pool = make_geometry(trace, block_bytes), make_pool(trace, setting.gpu_blocks)
    nvme_bytes = nvme_bytes_for(setting.nvme.slots, geometry) if setting.nvme.slots else None
    if nvme_bytes is not None and shutil.disk_usage(store).free < nvme_bytes + _LEFT_FREE_BYTES:
        raise ConfigError(f"--io {store.parent}: there is no room for an NVMe tier of {nvme_bytes} bytes.")
    config = Config(
        store_dirs=(store / "store",) if nvme_bytes is not None else (),
        nvme_bytes=nvme_bytes,
        cpu_bytes=setting.cpu.slots * slot_bytes,
        store_policy=setting.store_policy,
        cpu_admission=setting.cpu_admission,
        nvme_admission=setting.nvme_admission,
        eviction=setting.eviction,
        io_deadline_s=_DEADLINE_S,
        min_load_tokens=0,
    )
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if pool.block_count * block_bytes + config.cpu_bytes > _MOST_MEMORY * memory_bytes:
        raise ConfigError(
            f"--io holds {pool.block_count} GPU blocks of {block_bytes} bytes and the CPU tier in memory, which is too"
            " much for this machine; give smaller ones with --block-bytes."
        )
    with ExitStack() as stack:
        gpu = Arena([block_bytes], [pool.block_count], pin=False)
        stack.callback(gpu.close)
        description = {"model": f"replay of {trace.name}"}
        parts = assemble_scheduler(config, geometry, pool, bytes(FINGERPRINT_BYTES), description)
        stack.callback(parts.close)
        worker = assemble_worker(config, geometry, 0, [[gpu.tensor(0)]])
        stack.callback(worker.close)
        backend = MovingBackend(worker.mover, gpu, block_bytes)
        engine = Engine(trace, parts.manager, pool, backend)
        engine.settle()
        run = run_engine(trace, slot_bytes, setting, engine)
        run.waits_s = waits_of(engine.counts.waits_s)
        run.failed["wrong_bytes"] = backend.wrong
        return run
