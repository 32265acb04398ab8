# SPDX-License-Identifier: Apache-2.0
"""Which stored blocks an engine may use: those of its fingerprint, which may take a while to find.

The fingerprint of a model has a digest of all its weights, which are read beside the start. Until
it is known, nothing that outlives the process is looked up or written.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

from kvdisk.errors import KvdiskError, NoThread, start_thread

logger = logging.getLogger("kvdisk")

MOST_DESCRIPTION_BYTES = 256 << 10
"""Bytes of a description at most, as an engine store has it: a longer file would not be read
again."""
GUESS = "guess"
"""In the description of an identity that is found later: its guess, as hex digits. Empty in an
engine store of which it has misled."""


class Named(NamedTuple):
    """A fingerprint (32 bytes), and what people and tools shall read of it, as JSON values."""

    fingerprint: bytes
    description: Mapping[str, Any]


class Identity:
    """An engine's fingerprint, now or later.

    ``guess``: equal for all that may have the same fingerprint, and mostly of those that have: with
    it an engine store is chosen before the fingerprint is known. Its description lacks nothing but
    what is still to be found.
    """

    def __init__(self, guess: Named, found: Future[Named]) -> None:
        self.guess = guess
        self._found = found

    @classmethod
    def certain(cls, fingerprint: bytes, description: Mapping[str, Any]) -> Identity:
        """Return one that is known."""
        named, found = Named(fingerprint, description), Future[Named]()
        found.set_result(named)
        return cls(named, found)

    @classmethod
    def found_by(cls, guess: Named, find: Callable[[], Named]) -> Identity:
        """Return one that ``find`` finds, on a thread of its own, which waits for the drive. It
        raises KvdiskError or OSError where it cannot."""
        found, noted = Future[Named](), {GUESS: guess.fingerprint.hex()}

        def run() -> None:
            try:
                named = find()
                found.set_result(Named(named.fingerprint, {**named.description, **noted}))
            except (KvdiskError, OSError) as error:  # who waits raises it
                found.set_exception(error)
            except BaseException as error:
                logger.exception("kvdisk has a bug in how it finds which weights these are")
                found.set_exception(KvdiskError(f"{type(error).__name__}: {error}"))

        try:  # a daemon: a file system that hangs must not hold up the end of the process
            start_thread(threading.Thread(target=run, name="kvdisk-identity", daemon=True))
        except NoThread as error:
            found.set_exception(error)
        return cls(Named(guess.fingerprint, {**guess.description, **noted}), found)

    def wait(self, timeout_s: float) -> Named | None:
        """Return what was found; None: nothing yet. Any thread. Raises what ``find`` raised."""
        try:
            return self._found.result(timeout_s)
        except TimeoutError:
            return self._found.result() if self._found.done() else None  # it may have come just now, or be the answer
