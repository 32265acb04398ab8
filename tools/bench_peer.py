# SPDX-License-Identifier: Apache-2.0
"""What ``bench_tiers.py`` measures, and its peer: vLLM's own way to a drive, a file for each block
(``fs_io_C``).

The C extension is loaded from its file, without vLLM around it, and called as vLLM's tier for file
systems does (``vllm/v1/kv_offload/tiering/fs``): a list of paths and of buffers for each call,
threads of Python, files opened with O_DIRECT, each written under another name first. It is given
more than it has in vLLM: directories exist already, and the blocks of a measurement are dealt out
evenly, one call for each thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.machinery
import importlib.util
import os
import secrets
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvdisk.cli.output import size
from kvdisk.device.base import Op
from kvdisk.errors import ConfigError
from kvdisk.worker.runner import MOST_READS, PART_BYTES

THREADS = (1, 4, 8, 16)
"""Counts that are measured. vLLM's default is 16 for each direction."""
_FOLDERS = 16
_GET_FLAGS, _SET_FLAGS, _SPREAD = 0x80086601, 0x40086602, 0x00020000
"""Of Linux's ioctl for the attributes of a directory; the last is what ``chattr +T`` sets."""


LANES = MOST_READS
"""Batches that the mover has at a device at once."""


class Layout(Enum):
    """Where on the drive blocks lie that are moved one after the other."""

    CONTIGUOUS = "contiguous"
    SCATTERED = "scattered"


@dataclass(frozen=True)
class Case:
    """One thing to measure: so many blocks, each moved once, ``depth`` of them at a time."""

    op: Op
    layout: Layout
    block_bytes: int
    block_count: int

    @property
    def depth(self) -> int:
        """As many blocks as the mover has at the device at once, within reason."""
        return min(max(MOST_READS * PART_BYTES // self.block_bytes, 4), 256, self.block_count)

    @property
    def total_bytes(self) -> int:
        """Of one measurement."""
        return self.block_bytes * self.block_count

    @property
    def lane_blocks(self) -> int:
        """Blocks of a batch."""
        return -(-self.depth // min(LANES, self.depth))

    @property
    def bytes_in_flight(self) -> int:
        """Memory that the batches need at once."""
        return min(LANES, self.depth) * self.lane_blocks * self.block_bytes

    @property
    def words(self) -> str:
        """The case in words."""
        return f"{self.op.value} {size(self.block_bytes).replace('.0 ', ' ')} x {self.depth} {self.layout.value}"

    def order(self) -> list[int]:
        """Return the blocks in the order in which they are moved, the same in every run."""
        if self.layout is Layout.CONTIGUOUS:
            return list(range(self.block_count))
        return np.random.default_rng(1).permutation(self.block_count).tolist()


def load_extension() -> Any:
    """Return vLLM's ``fs_io_C``. Raises ConfigError where vLLM is not installed, or has none."""
    missing = "vLLM's fs_io_C is not installed here: there is no peer to compare with."
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(missing)
    found = sorted(Path(spec.submodule_search_locations[0]).glob("fs_io_C*.so"))
    if not found:
        raise ConfigError(missing)
    loader = importlib.machinery.ExtensionFileLoader("fs_io_C", str(found[0]))
    try:
        import torch  # noqa: F401 - it is linked with torch's libraries, and finds them when they are loaded

        loaded = importlib.util.module_from_spec(importlib.util.spec_from_loader("fs_io_C", loader))
        loader.exec_module(loaded)
    except ImportError as error:
        raise ConfigError(f"vLLM's fs_io_C cannot be loaded, so that there is no peer: {error}") from None
    return loaded


class VllmFiles:
    """vLLM's files, with each number of threads. Raises as ``load_extension``."""

    def __init__(self) -> None:
        self._extension = load_extension()

    def contenders(
        self, case: Case, directory: Path, memory: memoryview, direct: bool, stack: ExitStack
    ) -> dict[str, Callable[[], float]]:
        """Return what moves a case's blocks once, for each number of threads.

        ``directory``: not made yet. The case's bytes take space there once, until ``stack`` ends.
        """
        files = _Files(self._extension, case, directory, memory, direct)
        if case.op is Op.READ:
            files.store(THREADS[-1])
            stack.callback(files.empty)
        move = files.load if case.op is Op.READ else files.store_anew
        return {f"vLLM fs_io_C x {count}": partial(move, count) for count in THREADS}


class _Files:
    """The files of a case's blocks.

    They are emptied when they were measured, and removed at the end of the run only: ext4 passes
    over inodes that were freed in the last minutes one by one, which would slow the next files
    down, and not in vLLM, which removes none. For the same reason they lie where no run before had
    its files: ext4 is asked to spread directories over the drive.
    """

    def __init__(self, extension: Any, case: Case, directory: Path, memory: memoryview, direct: bool) -> None:
        self._extension = extension
        self._case = case
        self._memory = memory
        self._direct = direct
        self._directory = directory
        self._order = case.order()
        directory.mkdir()
        _spread(directory)
        self._paths: list[str] = []
        self._renew()

    def _renew(self) -> None:
        """Name files that do not exist, in directories that do."""
        folders = [self._directory / secrets.token_hex(8) for _ in range(_FOLDERS)]
        for folder in folders:
            folder.mkdir()
        self._paths = [str(folders[block % _FOLDERS] / f"{block:064x}.bin") for block in self._order]

    def load(self, count: int) -> float:
        """Read every file."""
        return self._run(count, lambda paths, views: self._extension.batch_load_block(paths, views, self._direct))

    def store(self, count: int) -> float:
        """Write every file; what exists already would be left as it is."""
        store = self._extension.batch_store_block
        return self._run(
            count, lambda paths, views: store([f"{path}_1.tmp" for path in paths], paths, views, self._direct)
        )

    def empty(self) -> None:
        """Give the files' space back, and wait until that is done."""
        for path in self._paths:
            if os.path.exists(path):
                os.truncate(path, 0)
        folder = os.open(self._directory, os.O_RDONLY)
        os.fsync(folder)  # what the file system has to do for that is not for the next one to wait for
        os.close(folder)

    def store_anew(self, count: int) -> float:
        """Write every file under a new name, and give the space back."""
        try:
            return self.store(count)
        finally:
            self.empty()
            self._renew()

    def _run(self, count: int, call: Any) -> float:
        """Deal the blocks out to threads, which are there already, and return what their calls
        took."""
        tasks = [(self._paths[at::count], self._views(at, count)) for at in range(count)]
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(lambda _: None, range(count)))

            began_s = time.perf_counter()
            for future in [pool.submit(call, *task) for task in tasks if task[0]]:
                future.result()
            return time.perf_counter() - began_s

    def _views(self, thread: int, count: int) -> list[memoryview]:
        """Return the buffers of a thread's blocks: it has its own part of the memory, and goes
        round in it."""
        size = self._case.block_bytes
        slots = max(1, self._memory.nbytes // size // count)
        first = thread * slots if (thread + 1) * slots * size <= self._memory.nbytes else 0
        mine = [self._memory[(first + at) * size : (first + at + 1) * size] for at in range(slots)]
        return [mine[at % slots] for at in range(len(self._paths[thread::count]))]


def _spread(directory: Path) -> None:
    """Ask the file system to put each directory in this one somewhere else; not all of them can."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            (flags,) = struct.unpack("l", fcntl.ioctl(fd, _GET_FLAGS, struct.pack("l", 0)))
            fcntl.ioctl(fd, _SET_FLAGS, struct.pack("l", flags | _SPREAD))
    finally:
        os.close(fd)
