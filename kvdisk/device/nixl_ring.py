# SPDX-License-Identifier: Apache-2.0
"""An io_uring behind NIXL's POSIX plugin. The only room that knows NIXL, and that notices where it is missing."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import itertools
import logging
import logging.config
import mmap
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvdisk.device.base import Buffer, Op
from kvdisk.errors import ConfigError
from kvdisk.geometry import ALIGNMENT

_PACKAGES = ("nixl_cu13", "nixl_cu12", "nixl")
_PLUGIN = "POSIX"
POOL = 1024
"""Ranges that a ring holds at once."""
_AT_ONCE = 64
"""Ranges that NIXL starts in one call."""
_WHOLE_FILE = (1 << 63) - 1
_TRIAL_S = 2.0
_TRIAL_SLEEP_S = 0.0001

logger = logging.getLogger("kvdisk.device")

_names = itertools.count(1)
_making = threading.Lock()


class Range(NamedTuple):
    """What one buffer fills or empties, of the transfer at ``position`` in its batch."""

    position: int
    fd: int
    offset: int
    buffer: Buffer
    address: int


@dataclass(slots=True)
class Piece:
    """What of a batch is one request to NIXL. ``handle``: NIXL's number of it, 0 before it has begun."""

    ticket: int
    op: Op
    ranges: list[Range]
    handle: int = 0


class Ring:
    """An agent of NIXL with one io_uring. ``waiting``: pieces that have no room yet.

    ``fd``: of the io_uring, readable while something has ended that NIXL has not seen; None where it was not found.
    """

    def __init__(self, library: Any) -> None:
        self.waiting: deque[Piece] = deque()
        self._library = library
        self._name = f"kvdisk-{os.getpid()}-{next(_names)}"
        with _making:
            before = ring_fds()
            config = library.nixl_agent_config(enable_prog_thread=False, enable_listen_thread=False, backends=[])
            try:
                self._agent = library.nixl_agent(self._name, config)
                wanted = {"use_uring": "true", "ios_pool_size": str(POOL), "kernel_queue_size": str(POOL)}
                self._agent.create_backend(_PLUGIN, wanted)
            except Exception as error:
                raise ConfigError(
                    f"device 'nixl' cannot use io_uring here, which the kernel or a container forbids ({error})."
                ) from error
            found = ring_fds() - before
        self.fd = found.pop() if len(found) == 1 else None
        self._plugins = [self._agent.backends[_PLUGIN]]
        self._in_progress = library.nixlBind.NIXL_IN_PROG
        self._memory: dict[tuple[int, int], Any] = {}
        self._files: dict[int, Any] = {}
        self._begun: list[Piece] = []
        self._room = POOL

    def add_memory(self, start: int, end: int) -> None:
        """Register memory."""
        self._memory[start, end] = self._register((start, end - start, 0, ""), "DRAM")

    def remove_memory(self, start: int, end: int) -> None:
        """Deregister memory that was registered so."""
        self._deregister(self._memory.pop((start, end)))

    def add_file(self, fd: int) -> None:
        """Register an open file, whatever its length will be."""
        self._files[fd] = self._register((0, _WHOLE_FILE, fd, ""), "FILE")

    def remove_file(self, fd: int) -> None:
        """Deregister a file; one that is not registered is no error."""
        if fd in self._files:
            self._deregister(self._files.pop(fd))

    def has_room(self, ranges: int) -> bool:
        """Whether a piece of so many ranges may begin."""
        return ranges <= self._room

    def begin(self, piece: Piece) -> bool:
        """Start a piece; return whether NIXL has taken it. If not, nothing of it is under way."""
        count, agent = len(piece.ranges), self._agent.agent
        memory, file = np.zeros((2, count, 3), np.uint64)
        lengths = [each.buffer.nbytes for each in piece.ranges]
        memory[:, 0], memory[:, 1] = [each.address for each in piece.ranges], lengths
        file[:, 0], file[:, 1] = [each.offset for each in piece.ranges], lengths
        file[:, 2] = [each.fd for each in piece.ranges]
        try:
            piece.handle = agent.createXferReq(
                self._agent.nixl_ops[piece.op.name],
                self._agent.get_xfer_descs(memory, "DRAM"),
                self._agent.get_xfer_descs(file, "FILE"),
                self._name,
                "",
                self._plugins,
            )
        except Exception as error:
            logger.warning("kvdisk: NIXL does not take a batch, which goes without it: %s", error)
            return False
        with contextlib.suppress(Exception):  # take_ended hears of it
            agent.postXferReq(piece.handle)
        self._begun.append(piece)
        self._room -= count
        for _ in range(_AT_ONCE, count, _AT_ONCE):  # what one call does not start
            self._has_ended(piece)
        return True

    def take_ended(self) -> Iterator[tuple[Piece, bool]]:
        """Yield the pieces that have ended, each once, and whether they went well."""
        # The look at one piece takes in what ends the others: those before it are looked at again.
        for piece in [*self._begun, *self._begun[:-1]]:
            if piece.handle:
                well = self._has_ended(piece)
                if well is not None:
                    self._agent.agent.releaseXferReq(piece.handle)
                    piece.handle = 0
                    self._begun.remove(piece)
                    self._room += len(piece.ranges)
                    yield piece, well

    def _has_ended(self, piece: Piece) -> bool | None:
        """Return whether a piece that has ended went well; None while it is under way."""
        try:
            status = self._agent.agent.getXferStatus(piece.handle)
        except Exception:  # NIXL raises once every range has ended and one has failed, or was short
            return False
        return None if status == self._in_progress else True

    def _register(self, what: tuple[int, int, int, str], kind: str) -> Any:
        return self._agent.register_memory([what], kind, [_PLUGIN])

    def _deregister(self, known: Any) -> None:
        with contextlib.suppress(Exception):  # NIXL's own; it holds numbers only, and no batch names them
            self._agent.deregister_memory(known, [_PLUGIN])


def address_of(buffer: Buffer) -> int:
    """Return where a buffer begins."""
    if buffer.readonly:
        return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))  # some times as fast


def ring_fds() -> set[int]:
    """Return this process's descriptors of io_urings; empty where the kernel does not list them."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed since, as the one of this list
                if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[io_uring]":
                    found.add(int(name))
    return found


def prove_ring(ring: Ring) -> None:
    """Try a ring on a file in memory. Raises ConfigError where it does not read, or calls a short read a whole one."""
    memory = memoryview(mmap.mmap(-1, 2 * ALIGNMENT, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    start = address_of(memory)
    data = os.urandom(ALIGNMENT)
    fd = os.memfd_create("kvdisk-nixl")
    try:
        os.write(fd, data)
        ring.add_memory(start, start + memory.nbytes)
        ring.add_file(fd)
        whole = _tried(ring, Range(0, fd, 0, memory[:ALIGNMENT], start))
        if not whole or memory[:ALIGNMENT] != data:
            raise ConfigError("device 'nixl' cannot use io_uring here: a read that was tried with it failed.")
        if _tried(ring, Range(0, fd, 0, memory, start)):
            raise ConfigError("device 'nixl' needs a newer nixl (1.5.1 or later): this one does not tell short reads.")
        ring.remove_file(fd)
        ring.remove_memory(start, start + memory.nbytes)
    finally:
        os.close(fd)


def _tried(ring: Ring, wanted: Range) -> bool:
    """Read a range and return whether that went well; too late is not well."""
    if not ring.begin(Piece(0, Op.READ, [wanted])):
        return False
    deadline = time.monotonic() + _TRIAL_S
    while time.monotonic() < deadline:
        for _, well in ring.take_ended():
            return well
        time.sleep(_TRIAL_SLEEP_S)
    return False


def load_nixl() -> Any:
    """Import NIXL's Python side, under whichever name it is installed. Raises ConfigError."""
    for package in sorted(_PACKAGES, key=lambda name: name not in sys.modules):
        with _importing_quietly():
            try:
                return sys.modules[importlib.import_module(package).nixl_agent.__module__]
            except ModuleNotFoundError as error:
                if error.name != package:
                    raise ConfigError(f"device 'nixl' cannot be loaded: {error}.") from error
            except Exception as error:  # whatever a library that does not fit this machine raises
                raise ConfigError(f"device 'nixl' cannot be loaded: {' '.join(str(error).split())}.") from error
    raise ConfigError("device 'nixl' needs the package nixl-cu13, as in: pip install 'kvdisk[nixl]'.")


def _ignore(config: Any) -> None:
    pass


@contextlib.contextmanager
def _importing_quietly() -> Iterator[None]:
    """Keep NIXL from printing and from setting up Python's logging anew, which closes the files that others log to.

    What it says on an error is no news: kvdisk says it with the errno. A level that the user has set stays.
    """
    configure, raises = logging.config.dictConfig, logging.raiseExceptions
    mine = "NIXL_LOG_LEVEL" not in os.environ
    if mine:
        os.environ["NIXL_LOG_LEVEL"] = "FATAL"
    logging.config.dictConfig = _ignore
    try:
        yield
    finally:
        logging.config.dictConfig, logging.raiseExceptions = configure, raises
        if mine:
            del os.environ["NIXL_LOG_LEVEL"]
