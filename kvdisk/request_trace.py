# SPDX-License-Identifier: Apache-2.0
"""``trace_file``: which requests came, without what was in them, for ``kvdisk replay``.

A line is a JSON object. The first says of what the file is::

    {"kvdisk_trace": 1, "block_tokens": 16, "block_bytes": 2097152, "model": "..."}

and each other is a request that has ended: ``time_s`` (when it came, seconds since the first of
the file), ``prompt_tokens`` of its full blocks, ``output_tokens``, and ``blocks``: of each full
block 48 bits of a keyed hash of vLLM's hash. The key is random, of each file its own, and kept
nowhere: so equal beginnings of prompts can be told within a file, and no text can be tested against
it.

A file of ``MOST_BYTES`` is renamed to end in ``.1``, in the place of the one before, and another
begun. The scheduler's thread calls ``add``, another thread the rest.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from kvdisk.device import paths
from kvdisk.errors import ConfigError

logger = logging.getLogger("kvdisk")

VERSION = 1
WRITE_S = 1.0
MOST_BYTES = 64 << 20
MOST_WAITING = 4096
"""Requests that may wait to be written; of more, the oldest are lost."""
HASH_BYTES = 6
_BLOCKS_AT_ONCE = 256
"""Blocks that are hashed before another thread has its turn."""


class _Request(NamedTuple):
    """A request that has ended. ``came_s``: seconds since the Unix epoch. ``hashes``: vLLM's, of
    the prompt's full blocks."""

    came_s: float
    output_tokens: int
    hashes: Sequence[bytes]


@contextmanager
def _config_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"trace_file {str(path)!r} cannot be written: {error.strerror or error}.") from error


def check_trace(path: Path) -> None:
    """Raise ConfigError where another engine writes the file, or where it is no trace. Writes
    nothing."""
    with _config_errors(path):
        if not os.path.lexists(path):
            return
        fd = paths.open_regular(path, os.O_RDONLY)
        try:
            if fd < 0 or not os.read(fd, 64).startswith(b'{"kvdisk_trace"'):
                raise OSError(errno.EEXIST, "something else than a trace of kvdisk is there")
            if not paths.try_lock(fd, fcntl.LOCK_EX):
                raise OSError(errno.EBUSY, "another engine writes it")
        finally:
            if fd >= 0:
                os.close(fd)


class RequestTrace:
    """See the module. ``block_tokens``, ``block_bytes``: of one of vLLM's hashed blocks, in all
    layers and on all ranks.

    A trace that is there already is renamed like a full one. Raises ConfigError where none can be
    made, another engine writes it, or something else is in its place.
    """

    def __init__(self, path: Path, *, block_tokens: int, block_bytes: int, model: str) -> None:
        self._path = path
        self._block_tokens = block_tokens
        self._head = {"kvdisk_trace": VERSION, "block_tokens": block_tokens, "block_bytes": block_bytes, "model": model}
        self._waiting = deque[_Request](maxlen=MOST_WAITING)
        self._added = self._written = 0
        self._fd, self._bytes = -1, 0
        check_trace(path)
        with _config_errors(path):
            self._begin()

    def add(self, came_s: float, output_tokens: int, hashes: Sequence[bytes]) -> None:
        """Take note of a request that has ended; never waits. ``hashes``: must not change any
        more."""
        self._added += 1
        self._waiting.append(_Request(came_s, output_tokens, hashes))

    def write(self) -> None:
        """Write the requests that have ended since the last call. Waits for the drive. Raises
        OSError; the request that it was writing is lost then."""
        while self._waiting and self._fd >= 0:
            request = self._waiting.popleft()
            self._written += 1
            line = self._line(request)
            if self._bytes and self._bytes + len(line) > MOST_BYTES:
                self._begin()
                line = self._line(request)
            self._put(line)

    def close(self) -> None:
        """Write the rest, and log how many requests were lost. Idempotent."""
        if self._fd < 0:
            return
        try:
            self.write()
        finally:
            os.close(self._fd)
            self._fd = -1
            if self._added > self._written:
                logger.warning(
                    "kvdisk's trace_file lacks %d requests: they came too fast.", self._added - self._written
                )

    def _begin(self) -> None:
        """Begin a file, with a key of its own. Raises OSError."""
        with suppress(FileNotFoundError):
            os.replace(self._path, self._path.with_name(f"{self._path.name}.1"))
        fd = paths.create_file(self._path)
        paths.try_lock(fd, fcntl.LOCK_EX)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._key, self._first_s = fd, secrets.token_bytes(16), 0.0
        self._put(json.dumps(self._head) + "\n")
        self._bytes = 0

    def _put(self, line: str) -> None:
        data = line.encode()
        while data:
            data = data[os.write(self._fd, data) :]
        self._bytes += len(line)

    def _line(self, request: _Request) -> str:
        self._first_s = self._first_s or request.came_s
        blocks = []
        for at, block_hash in enumerate(request.hashes, start=1):
            blocks.append(blake2b(block_hash, digest_size=HASH_BYTES, key=self._key).hexdigest())
            if at % _BLOCKS_AT_ONCE == 0:
                time.sleep(0)
        fields = {
            "time_s": round(request.came_s - self._first_s, 3),
            "prompt_tokens": len(blocks) * self._block_tokens,
            "output_tokens": request.output_tokens,
            "blocks": blocks,
        }
        return json.dumps(fields, separators=(",", ":")) + "\n"
