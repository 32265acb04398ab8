# SPDX-License-Identifier: Apache-2.0
"""Host memory that nothing pins is taken ahead of its use, on a thread of its own.

The kernel gives memory out when it is first touched, and clears it then. On a virtual machine the host has to find it,
too, 4 KiB at a time: 32 MiB can take 0.1 s, several times what their read from a drive takes. So the first loads after
a start would wait for memory, and not for the drive.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvdisk.device.base import Buffer

STEP_BYTES = 2 << 20
"""What the kernel takes at a touch, aligned, where ``MADV_HUGEPAGE`` has an effect."""
AT_ONCE_BYTES = 256 << 20
"""How much is taken without a pause: what is used first after a start."""
_PAUSES = 9
"""Afterwards each touch is followed by a pause of so many times its length: the engine has work by then."""
_LOOK_BYTES = 64 << 20
"""How much is taken between two looks at what the machine has left."""
_SPARED = 8
"""One part in so many of the machine's memory is left to others."""
_CLOSE_TIMEOUT_S = 5.0
_MEMINFO = Path("/proc/meminfo")
_ATOMIC_ADD = "_ZN9__gnu_cxx12__atomic_addEPVii"
"""Of the C++ library: adds to an int in memory."""

logger = logging.getLogger("kvdisk.worker")


class Populating:
    """Touches all memory of regions: the first of the tier, then staging, then the rest of the tier.

    ``tier``, ``staging``: 4 KiB-aligned, of any length. Where the kernel does not take ``STEP_BYTES`` at once, as an
    ``Arena`` lets it, next to nothing is taken ahead. Other threads may use the memory meanwhile: no byte of it
    changes. The first ``at_once_bytes`` are taken at once, the rest in a tenth of the time. It ends early where the
    machine has little memory left: what is not taken then is taken as it is used. ``meminfo``: where the kernel says
    how much is left.
    """

    def __init__(
        self,
        tier: Sequence[Buffer],
        staging: Sequence[Buffer],
        *,
        at_once_bytes: int = AT_ONCE_BYTES,
        meminfo: Path = _MEMINFO,
    ) -> None:
        self._stopping = threading.Event()
        regions = deque(in_order(tier, staging, at_once_bytes))
        self._thread = threading.Thread(
            target=_run, args=(regions, at_once_bytes, self._stopping, meminfo), name="kvdisk-populate", daemon=True
        )
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until all is taken that will be; return whether it is."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """End the thread after the touch that it is at. Idempotent. Call it before the memory is given back.

        Where that touch takes very long, the thread is left to itself: it holds a view, and the memory stays mapped.
        """
        self._stopping.set()
        self._thread.join(_CLOSE_TIMEOUT_S)


def in_order(tier: Sequence[Buffer], staging: Sequence[Buffer], first_bytes: int) -> Iterator[Buffer]:
    """Yield regions as they are to be touched: ``first_bytes`` of the tier, of each region its share, before all else.

    Slots are handed out from the start of each region on, and staging is for what finds none.
    """
    total_bytes = sum(region.nbytes for region in tier)
    heads = [min(region.nbytes, -(-first_bytes * region.nbytes // max(total_bytes, 1))) for region in tier]
    yield from (region[:head] for region, head in zip(tier, heads, strict=True))
    yield from staging
    yield from (region[head:] for region, head in zip(tier, heads, strict=True))


def _run(regions: deque[Buffer], at_once_bytes: int, stopping: threading.Event, meminfo: Path) -> None:
    touch = _find_touch()
    if touch is None:
        return
    taken_bytes, look_bytes, pause_s = 0, 0, 0.0
    while regions:  # which are forgotten one by one: a view keeps its memory mapped
        rest = regions.popleft()
        while rest.nbytes:
            if stopping.wait(pause_s):
                return
            if taken_bytes >= look_bytes:
                if not _has_left(meminfo):
                    logger.info("kvdisk takes its host memory as it is used: the machine has little left.")
                    return
                look_bytes += _LOOK_BYTES
            address = ctypes.addressof(ctypes.c_char.from_buffer(rest))
            began_s = time.monotonic()
            touch(address)
            if taken_bytes >= at_once_bytes:
                pause_s = _PAUSES * (time.monotonic() - began_s)
            length = STEP_BYTES - address % STEP_BYTES
            taken_bytes += length
            rest = rest[length:]


def _find_touch() -> Callable[[int], None] | None:
    """Return what takes the memory at an address, without the interpreter lock; None where there is nothing such.

    Adding 0 in one step is a write to the kernel, and changes nothing whoever else writes there. ``madvise`` can take
    memory, too, but all of the process that maps or unmaps memory meanwhile would wait for it, for 5 ms each time on a
    virtual machine; a fault holds up nobody else.
    """
    try:
        add = getattr(ctypes.CDLL("libstdc++.so.6"), _ATOMIC_ADD)
    except (OSError, AttributeError):
        return None
    add.argtypes, add.restype = (ctypes.c_void_p, ctypes.c_int), None
    return lambda address: add(address, 0)


def _has_left(meminfo: Path) -> bool:
    """Whether the machine has memory to spare, as far as it says."""
    try:
        lines = meminfo.read_text("ascii").splitlines()
        found = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        return found["MemAvailable"] >= found["MemTotal"] // _SPARED
    except (OSError, ValueError, KeyError, IndexError):
        return True
