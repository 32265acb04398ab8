# SPDX-License-Identifier: Apache-2.0
"""Has the kernel give arenas their memory ahead of use, where it is not pinned.

The first write to a page waits until the kernel has found and cleared it, 2 MiB at a time: the
first loads after a start would take several times as long as later ones.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread, get_native_id

import numpy as np

from kvdisk.worker.arena import Arena

logger = logging.getLogger("kvdisk.worker")

PIECE_BYTES = 8 << 20
"""Taken at once: close to the time that one load takes, so that no load and no end waits long."""
LEFT_FREE_BYTES = 1 << 30
"""What the machine keeps for others."""
_POPULATE_WRITE = 23
"""``MADV_POPULATE_WRITE``, of Linux 5.14 and later."""
_LOWEST_PRIORITY = 19

MEMORY_INFO = Path("/proc/meminfo")
CONTROL_GROUPS = Path("/sys/fs/cgroup")
OWN_GROUP = Path("/proc/self/cgroup")


class Populating:
    """A thread that takes the memory of some arenas, of the first first, after all that wants to
    run at once.

    It stops where ``free_bytes`` says that too little is left; what it has not taken is taken as
    slots are first written. Close it before the arenas.
    """

    def __init__(self, arenas: Sequence[Arena], free_bytes: Callable[[], int] | None = None) -> None:
        self._arenas = tuple(arenas)
        self._free_bytes = free_bytes or free_memory_bytes
        self._closing = Event()
        self._thread = Thread(target=self._run, name="kvdisk-populate", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more. Idempotent."""
        self._closing.set()
        self._thread.join()
        self._arenas = ()

    def _run(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, get_native_id(), _LOWEST_PRIORITY)  # of this thread alone
        for arena in self._arenas:
            memory = np.frombuffer(arena.memory, np.uint8)  # holds the mapping
            for offset in range(0, len(memory), PIECE_BYTES):
                piece = memory[offset : offset + PIECE_BYTES]
                if self._closing.is_set():
                    return
                if self._free_bytes() < LEFT_FREE_BYTES + piece.nbytes:
                    logger.info("kvdisk takes the rest of its memory as it is used: little is free now.")
                    return
                if not _populate(piece.ctypes.data, piece.nbytes):
                    return


def _populate(address: int, byte_count: int) -> bool:
    """Have the kernel give these pages, whatever they hold; return whether it can. The interpreter
    lock is given up meanwhile.

    No byte is written here: a load may be writing to the page. Where the kernel is too old, locking
    pages in memory for a moment does the same, as far as this process may.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    place = ctypes.c_void_p(address), ctypes.c_size_t(byte_count)
    if libc.madvise(*place, _POPULATE_WRITE) == 0:
        return True
    return ctypes.get_errno() == errno.EINVAL and libc.mlock(*place) == 0 and libc.munlock(*place) == 0


def free_memory_bytes() -> int:
    """Return what can be taken now of the machine, and of each control group that this process is
    in; what caches of files could give back counts as free."""
    found = dict(line.split(":") for line in MEMORY_INFO.read_text().splitlines())
    free = [int(found["MemAvailable"].split()[0]) << 10]
    with suppress(OSError):
        for line in OWN_GROUP.read_text().splitlines():
            _, kinds, own = line.split(":", 2)
            if not kinds or "memory" in kinds.split(","):
                root = CONTROL_GROUPS / "memory" if kinds else CONTROL_GROUPS
                place = root / own.lstrip("/")
                free += [left for group in (place, *place.parents) if (left := _left_in(group, not kinds)) is not None]
    return min(free)


def _left_in(group: Path, is_second: bool) -> int | None:
    """Return what a control group of version 2, or 1, may still take; None where it has no
    limit."""
    limit, used, cache = (
        ("memory.max", "memory.current", "inactive_file")
        if is_second
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    try:
        left = int((group / limit).read_text()) - int((group / used).read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return left + int(counts.get(cache, 0))
    except (OSError, ValueError):  # "max", or no group
        return None
