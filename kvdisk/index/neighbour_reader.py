# SPDX-License-Identifier: Apache-2.0
"""``Neighbours`` over the reader process, which is asked about each of the other engine stores.

An engine store whose index ends the reader process, or holds it up, is left alone for a while. So
nothing that another engine does, or that a drive does to its files, reaches this process.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvdisk.blocks import BlockKey
from kvdisk.errors import KvdiskError, QuietLog
from kvdisk.index.base import Answer, ForeignCopy
from kvdisk.index.reader_process import ReaderProcess
from kvdisk.reader_thread import ReaderThread

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.25
"""Seconds between looks for engine stores that came or went, and at most until the thread stops."""
ANSWER_TIMEOUT_S = 2.0
LEFT_ALONE_S = 60.0
_CLOSE_TIMEOUT_S = 5.0
_Question = tuple[int, int, tuple[BlockKey, ...]]
"""Ticket, epoch and keys."""


class NeighbourReader(ReaderThread[_Question, Answer]):
    """See ``Neighbours`` and the module.

    ``find_homes``: returns the index directory of each engine store to ask now, by its id: those of
    other engines and of stopped ones. The reader's thread calls it every LOOK_INTERVAL_S. It may
    raise a KvdiskError or an OSError.
    """

    def __init__(self, find_homes: Callable[[], Mapping[str, Path]]) -> None:
        self._find_homes = find_homes
        self._reader = ReaderProcess()
        self._log = QuietLog(time.monotonic, logger)
        self._left_alone: dict[str, float] = {}
        self._look_at_s = 0.0
        self._homes: Mapping[str, Path] = {}
        self._look()
        super().__init__("kvdisk-neighbours", _CLOSE_TIMEOUT_S)

    # -- the scheduler's thread ----------------------------------------------------------------

    @property
    def any(self) -> bool:
        return bool(self._homes)

    def ask(self, ticket: int, epoch: int, keys: Sequence[BlockKey]) -> bool:
        return self._queue((ticket, epoch, tuple(keys)))

    # -- the reader's thread -------------------------------------------------------------------

    def _idle_s(self) -> float:
        return LOOK_INTERVAL_S

    def _end(self) -> None:
        self._homes = {}
        self._reader.stop()

    def _look(self) -> None:
        now = time.monotonic()
        if now < self._look_at_s:
            return
        self._look_at_s = now + LOOK_INTERVAL_S
        before = self._homes
        try:
            homes = self._find_homes()
        except (KvdiskError, OSError) as error:
            self._log.warn("look", f"other engine stores cannot be listed, and are not read meanwhile: {error}")
            homes = {}
        self._left_alone = {home_id: until_s for home_id, until_s in self._left_alone.items() if until_s > now}
        self._homes = {home_id: path for home_id, path in homes.items() if home_id not in self._left_alone}
        if not before.keys() <= self._homes.keys():
            # An open index keeps its space on the drive after its engine store is deleted.
            self._reader.stop()

    def _begin(self, question: _Question) -> None:
        ticket, epoch, keys = question
        copies: dict[BlockKey, list[ForeignCopy]] = {}
        for home_id, index_path in self._homes.items():
            try:
                found = self._reader.find(home_id, index_path, epoch, keys, ANSWER_TIMEOUT_S)
            except KvdiskError as error:
                self._leave_alone(home_id, index_path, error)
                continue
            for key, copy in found.items():
                copies.setdefault(key, []).append(copy)
        self._answers.append(Answer(ticket, {key: tuple(found) for key, found in copies.items()}))

    def _leave_alone(self, home_id: str, index_path: Path, error: KvdiskError) -> None:
        if os.path.exists(index_path):  # of a path, it would raise what a drive that has failed says
            logger.warning("kvdisk does not read engine store %s for %.0f s: %s", home_id, LEFT_ALONE_S, error)
        self._left_alone[home_id] = time.monotonic() + LEFT_ALONE_S
        self._homes = {other: path for other, path in self._homes.items() if other != home_id}
