# SPDX-License-Identifier: Apache-2.0
"""``BlockStore`` on the drive that has a test's directory."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kvdisk import assembly
from kvdisk.config import Config
from kvdisk.device.base import Outcome
from kvdisk.device.cap import HOME_OVERHEAD_BYTES
from kvdisk.device.posix import PosixDevice
from kvdisk.engine_store import nvme_layout_in
from kvdisk.errors import ConfigError
from kvdisk.store import BlockKind, BlockStore, Memory, StartMover, geometry_of
from support.faulty_device import FaultyDevice

NAMESPACE = bytes(range(32))
FACTS = {"model": "a test's"}
_SAFETY_S = 60.0


def open_drive(
    path: Path,
    kinds: Sequence[BlockKind],
    memory: Memory,
    nvme_bytes: int,
    start_mover: StartMover | None = None,
    **settings: Any,
) -> BlockStore:
    """Open a store on the drive that has the test's directory."""
    values = {"store_dirs": str(path / "store"), "nvme_bytes": nvme_bytes, "index_commit_s": 0.005} | settings
    return BlockStore.open(Config.from_mapping(values), NAMESPACE, FACTS, kinds, memory, start_mover)


def bytes_for(kinds: Sequence[BlockKind], most_blocks: int) -> int:
    """Return a cap that so many blocks of the first kind fit in, if nothing else is there, and no
    more."""
    geometry = geometry_of(kinds)
    slot_bytes = geometry.groups[0].slot_bytes
    few, many = HOME_OVERHEAD_BYTES, 1 << 40
    while many - few > slot_bytes // 8:
        nvme_bytes = (few + many) // 2
        try:
            held = nvme_layout_in(nvme_bytes, 1 << 30, geometry, 1).segments_bytes // slot_bytes
        except ConfigError:
            held = 0
        few, many = (few, nvme_bytes) if held > most_blocks else (nvme_bytes, many)
    return few


def make_room(store: BlockStore) -> None:
    """Step a new store until each kind has a segment, so that few rows suffice from the first job
    on."""
    nvme, give_up_s = store._parts.nvme, time.monotonic() + _SAFETY_S
    assert nvme is not None
    while not all(nvme.pool.free):
        assert time.monotonic() < give_up_s
        store.step(time.monotonic())
        store.poll(0.01)


class GatedDevice(FaultyDevice):
    """Lets go what it keeps back when it is told to, on the thread that it belongs to."""

    def __init__(self) -> None:
        super().__init__(PosixDevice())
        self.opens = threading.Event()
        self.fails = False
        """The next ``poll`` raises."""

    def poll(self, timeout_s: float = 0.0) -> list[Outcome]:
        """See ``Device``."""
        if self.fails:
            self.fails = False
            raise RuntimeError("ours")
        if self.opens.is_set():
            self.plan.hold = False
            self.release()
        return super().poll(timeout_s)

    def drain(self) -> list[Outcome]:
        """See ``Device``: what is kept back ends when it is let go."""
        if self.held:
            self.opens.wait()
        return super().drain()


@contextmanager
def gated_device() -> Iterator[GatedDevice]:
    """Have stores that are opened meanwhile use a device that can be told to misbehave."""
    device = GatedDevice()
    with patch.object(assembly, "choose_device", lambda *_: device):
        yield device
    device.opens.set()
