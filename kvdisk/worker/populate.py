# SPDX-License-Identifier: Apache-2.0
"""Has the kernel populate arenas that are not pinned, ahead of their use.

The first write to a page waits until the kernel has found and cleared it, 2 MiB at a time: without
this the first loads after a start would take several times as long as later ones.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Event, Thread, get_native_id

import numpy as np

from kvdisk.errors import NoThread, start_thread
from kvdisk.worker.arena import Arena
from kvdisk.worker.host_memory import free_memory_bytes

logger = logging.getLogger("kvdisk.worker")

PIECE_BYTES = 8 << 20
"""Bytes taken at once. It takes about as long as one load, so that neither a load nor the end waits
long."""
LEFT_FREE_BYTES = 1 << 30
"""Bytes of the machine that are left free for others."""
_POPULATE_WRITE = 23
"""``MADV_POPULATE_WRITE``, of Linux 5.14 and later."""
_LOWEST_PRIORITY = 19


class Populating:
    """A thread that takes the memory of some arenas, in their order, at the lowest priority.

    It stops where ``free_bytes`` says that too little is left; the rest is taken as slots are first
    written. Close it before the arenas.
    """

    def __init__(self, arenas: Sequence[Arena], free_bytes: Callable[[], int] | None = None) -> None:
        self._arenas = tuple(arenas)
        self._free_bytes = free_bytes or free_memory_bytes
        self._closing = Event()
        self._thread = Thread(target=self._run, name="kvdisk-populate", daemon=True)
        with suppress(NoThread):  # it is taken as it is used
            start_thread(self._thread)

    def close(self) -> None:
        """Stop, and wait for the thread. Idempotent."""
        self._closing.set()
        if self._thread.ident is not None:
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
                    logger.info("kvdisk allocates the rest of its memory as it is used: little is free now.")
                    return
                if not _populate(piece.ctypes.data, piece.nbytes):
                    return


def _populate(address: int, byte_count: int) -> bool:
    """Have the kernel populate these pages, whatever they hold; return whether it can. The
    interpreter lock is released meanwhile.

    No byte is written here: a load may be writing to the page. Where the kernel is too old, locking
    pages in memory for a moment does the same, as far as this process may.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    place = ctypes.c_void_p(address), ctypes.c_size_t(byte_count)
    if libc.madvise(*place, _POPULATE_WRITE) == 0:
        return True
    return ctypes.get_errno() == errno.EINVAL and libc.mlock(*place) == 0 and libc.munlock(*place) == 0
