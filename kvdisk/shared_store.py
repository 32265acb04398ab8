# SPDX-License-Identifier: Apache-2.0
"""``SharedStore``: a ``BlockStore`` for several threads, which may wait.

Any thread asks at any time. A question is a direct call. A job is a future, which a thread of the
store ends. ``Endings`` wakes who waits in ``poll`` or ``select``. docs/LIBRARY.md has an example.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from numbers import Real
from typing import Any, TypeVar

from kvdisk.blocks import BlockKey
from kvdisk.config import Config
from kvdisk.errors import NoThread, start_thread
from kvdisk.stats import Stats
from kvdisk.store import BlockStore, JointCap
from kvdisk.store_face import (
    BlockKind,
    BlockStoreFace,
    Ended,
    Get,
    Memory,
    Presence,
    Put,
    Result,
    StartMover,
    Usage,
    need,
)

logger = logging.getLogger("kvdisk")

Results = Sequence[Result]
_Answer = TypeVar("_Answer")
ROOM_S = 5.0
"""How long a put waits for room that is coming, unless it says how long."""
_LOOK_S = 0.01
"""How often the store's thread steps while a job, a commit or a question is out. What its mover has
finished wakes it at once."""
_SOON_S = 0.001
"""How long after a step it steps again at the earliest, unless for a new job."""
_REST_S = 0.5
"""How often it steps while there is nothing to do."""
_ASK_LOOK_S = 0.001


class SharedStore:
    """See the module. It takes a ``BlockStoreFace`` over: nobody else may call that any more.

    Any thread may make any call. No call waits for a drive but ``open``, ``close`` and, for a while
    that it is told, ``find``. What fails is a ``Result``, also after the store has gone off by an
    error, or was closed: then each block of a job is CANCELLED, and no block is there. What a
    caller does wrong raises ValueError, and changes nothing.

    A job is a future. It ends by kvdisk's own deadlines, however long its drive hangs, so who waits
    needs no other. It cannot be cancelled: until it has ended its rows are the store's. Its
    callbacks run on the store's thread, or on that of the call: they must not wait for another job.
    """

    def __init__(self, store: BlockStoreFace, lookup_wait_s: float = 2.0) -> None:
        """``lookup_wait_s``: how long ``find`` waits if it does not say. Raises NoThread; then the
        store is closed."""
        self._store = store
        self._lookup_wait_s = lookup_wait_s
        self._lock = threading.Lock()
        """Held for each call of the store but ``wait`` and ``close``."""
        self._has_work = threading.Event()
        self._jobs: dict[int, tuple[Future[Results], int]] = {}
        """By tag, each with the number of its results."""
        self._tags = count(1)
        self._told = Stats()
        """All that the store has counted so far."""
        self._is_off = self._is_ending = False
        """``_is_off``: no call reaches the store any more."""
        self._stepped_s = 0.0
        """When a step was taken last."""
        self._thread = threading.Thread(target=self._run, name="kvdisk-store", daemon=True)
        try:
            start_thread(self._thread)
        except NoThread:
            store.close()
            raise

    @classmethod
    def open(
        cls,
        config: Config,
        namespace: bytes,
        facts: Mapping[str, Any],
        kinds: Sequence[BlockKind],
        memory: Memory,
        start_mover: StartMover | None = None,
        joint_cap: JointCap | None = None,
    ) -> SharedStore:
        """Open a store; see ``BlockStore.open``. Raises what that raises, and NoThread."""
        store = BlockStore.open(config, namespace, facts, kinds, memory, start_mover, joint_cap)
        return cls(store, config.lookup_wait_s)

    # -- jobs ------------------------------------------------------------------------------------

    def put(self, blocks: Sequence[Put], wait_s: float = ROOM_S) -> Future[Results]:
        """Keep blocks. Their rows must not change until the future is done. ``wait_s``: how long
        they may wait for room that is coming, such as the first segment of a new store."""
        return self._begin(len(blocks), lambda tag: self._store.put(tag, blocks, wait_s))

    def get(self, blocks: Sequence[Get], arrival: int = 0) -> Future[Results]:
        """Bring blocks into rows, which are the store's until the future is done. What is DONE is
        what was put. What is READY now is not evicted before. ``arrival``: gets of lower ones go
        first."""
        return self._begin(len(blocks), lambda tag: self._store.get(tag, blocks, arrival))

    def delete(self, keys: Sequence[BlockKey]) -> Future[Results]:
        """Delete blocks for good; see ``BlockStoreFace.delete``. Nobody finds them here from now
        on."""
        return self._begin(len(keys), lambda tag: self._store.delete(tag, keys))

    def clear(self) -> Future[Results]:
        """Delete all that this engine store has, for good; see ``BlockStoreFace.clear``. One
        result."""
        return self._begin(1, self._store.clear)

    def _begin(self, count: int, ask: Callable[[int], None]) -> Future[Results]:
        """Ask for a job of so many results, and have it sent at once."""
        future: Future[Results] = Future()
        future.set_running_or_notify_cancel()  # so that nobody can cancel it

        is_known = False  # whether the store's thread ends it, also where an error stops it half-way

        def begin() -> None:
            nonlocal is_known
            if self._is_ending:
                return
            tag = next(self._tags)
            self._jobs[tag], is_known = (future, count), True
            try:
                ask(tag)
            except ValueError:  # nothing has changed
                del self._jobs[tag]
                raise
            self._step()

        self._ask(begin, otherwise=None, wakes=True)
        if not is_known:
            future.set_result([Result.CANCELLED] * count)
        return future

    # -- questions ---------------------------------------------------------------------------------

    def _ask(self, question: Callable[[], _Answer], otherwise: _Answer, *, wakes: bool = False) -> _Answer:
        """Ask the store, unless it is off. An error of ours puts it off. Raises ValueError.

        ``wakes``: have the store's thread step now. Who only asks leaves it at rest: it holds the
        lock while it waits for the interpreter, and beside busy Python the next question would wait
        for both.
        """
        with self._lock:
            if self._is_off:
                return otherwise
            try:
                return question()
            except ValueError:
                raise
            except Exception:
                self._note_error()
                return otherwise
            finally:
                if wakes or self._is_off:
                    self._has_work.set()

    def presence(self, keys: Sequence[BlockKey]) -> bytes:
        """Return the ``Presence`` of each key. Neither waits nor counts: about a microsecond a
        key."""
        need(set(map(type, keys)) <= {bytes}, "a key is bytes")
        with self._lock:  # what ``_ask`` does, in less time
            return bytes(len(keys)) if self._is_off else self._store.presence(keys)

    def longest_prefix(self, keys: Sequence[BlockKey], hold_s: float = 0.0) -> int:
        """Return how many of the first keys are READY, up to the first that is not, and hold these
        for so long: see ``hold``."""
        need(set(map(type, keys)) <= {bytes} and isinstance(hold_s, Real), "a key is bytes, and a time a number")

        def look() -> int:
            found = self._store.longest_prefix(keys)
            if found and hold_s > 0:
                self._store.hold(keys[:found], hold_s)
            return found

        return self._ask(look, otherwise=0)

    def hold(self, keys: Sequence[BlockKey], hold_s: float) -> None:
        """Keep blocks that are READY from eviction for so long; see ``BlockStoreFace.hold``."""
        self._ask(lambda: self._store.hold(keys, hold_s), otherwise=None)

    def keys(self) -> list[BlockKey]:
        """Return the keys of all blocks that are READY here; see ``BlockStoreFace.keys``."""
        return self._ask(self._store.keys, otherwise=[])

    def usage(self, salts: Iterable[str] = ()) -> Usage:
        """Return the bytes that blocks take here, by salt; see ``BlockStoreFace.usage``."""
        return self._ask(lambda: self._store.usage(salts), otherwise=Usage(0, {}, 0))

    def figures(self) -> dict[str, float]:
        """Return what was counted since the store was opened, and how it is now, by series of
        docs/METRICS.md; of a histogram ``name.count`` and ``name.sum``."""
        self._ask(lambda: self._told.merge(self._store.stats()), otherwise=None)
        with self._lock:
            samples = self._told.samples.items()
            found: dict[str, float] = {**self._told.counts, **self._told.gauges}
            found |= {f"{name}.count": each.count for name, each in samples}
            return found | {f"{name}.sum": each.total for name, each in samples}

    def find(self, keys: Sequence[BlockKey], wait_s: float | None = None) -> bytes:
        """Return the ``Presence`` of each key when the other engines of the store, and the remote
        store, have answered for what is not here, or have not within ``wait_s`` (None: as the store
        was told). ``keys``: of one prompt, in its order."""
        found = self.presence(keys)
        if found.count(Presence.READY) == len(found):
            return found
        until_s = time.monotonic() + (self._lookup_wait_s if wait_s is None else wait_s)
        self._ask(lambda: self._store.ask(keys), otherwise=None, wakes=True)
        while Presence.ASKED in (found := self.presence(keys)) and time.monotonic() < until_s:
            time.sleep(_ASK_LOOK_S)
            self._ask(self._step, otherwise=False)
        return found

    def reached(self, keys: Sequence[BlockKey], request: str | None = None) -> None:
        """A request wants these blocks, or has used them, in the order of its prompt: what is kept
        and admitted follows it. Once for each request. ``request``: its name, if it may come again;
        None: each call is one."""
        self._ask(lambda: self._store.reached(request, keys), otherwise=None)

    # -- the end ---------------------------------------------------------------------------------

    @property
    def is_off(self) -> bool:
        """Whether it serves nothing until it is opened again: it was closed, or an error, which is
        in the log, has ended it."""
        return self._is_off or self._is_ending or self._store.is_off

    def forget(self, epoch: int) -> None:
        """Serve nothing of before, in this process; see ``BlockStoreFace.forget``."""
        self._ask(lambda: self._store.forget(epoch), otherwise=None, wakes=True)

    def close(self, wait_s: float | None = None) -> bool:
        """Finish every job that was asked for, commit, and give the store back. New jobs are
        CANCELLED from now on. Idempotent.

        Waits for the drive: without end, or for ``wait_s``. Return whether it is closed. Where it
        is not, a drive that hangs may still write to rows, so their memory must stay.
        """
        with self._lock:
            self._is_ending = True
        self._has_work.set()
        if threading.current_thread() is not self._thread:  # a callback may say it, and cannot wait
            self._thread.join(wait_s)
        return not self._thread.is_alive()

    # -- the store's thread ------------------------------------------------------------------------

    def _step(self) -> bool:
        """Take a step of a store that is on; return whether to take another soon. The caller has
        the lock."""
        if self._is_off:
            return False
        self._stepped_s = time.monotonic()
        try:
            return self._store.step(self._stepped_s)
        except Exception:
            self._note_error()
            return False

    def _note_error(self) -> None:
        logger.exception("kvdisk's store goes off until it is opened again: kvdisk has a bug")
        self._is_off = True

    def _run(self) -> None:
        """Step and poll until the end; then close."""
        while not self._is_off and (self._jobs or not self._is_ending):
            try:
                self._turn()
            except Exception:
                with self._lock:
                    self._note_error()
        with self._lock:
            self._is_off = True
        try:
            self._store.close()
        except Exception:
            logger.exception("kvdisk's store was not closed in order")
        self._end(self._take_rest())

    def _turn(self) -> None:
        """End what has ended, step where that is due, and wait for more, without the lock."""
        self._has_work.clear()
        with self._lock:
            ended = [] if self._is_off else self._take(self._store.poll())
        self._end(ended)  # who waits for these does not wait for the step
        with self._lock:
            is_due = time.monotonic() >= self._stepped_s + _SOON_S  # who asked for a job has just stepped
            is_busy = self._step() if is_due else True
            are_out = bool(self._jobs)
        wait_s = _LOOK_S if is_due else _SOON_S
        if are_out and not self._store.is_off:
            self._store.wait(wait_s)
        else:
            self._has_work.wait(wait_s if is_busy or are_out else _REST_S)

    def _take(self, ended: Sequence[Ended]) -> list[tuple[Future[Results], Results]]:
        return [(self._jobs.pop(each.tag)[0], each.results) for each in ended]

    def _take_rest(self) -> list[tuple[Future[Results], Results]]:
        """Return the futures of all jobs of a closed store."""
        with self._lock:
            ended = self._take(self._store.poll())
            ended += [(future, [Result.CANCELLED] * count) for future, count in self._jobs.values()]
            self._jobs.clear()
            return ended

    def _end(self, ended: Sequence[tuple[Future[Results], Results]]) -> None:
        """End futures, without the lock: what they call may ask for more."""
        for future, results in ended:
            try:
                future.set_result(results)
            except BaseException:  # of a callback: others wait for theirs
                logger.exception("a callback of a job of kvdisk's store has failed")


class Endings:
    """Jobs that have ended, and a descriptor that is readable while there are some.

    For a loop that waits in ``poll``, ``select`` or an event loop, and takes all that has ended:
    who asks for one job after the other would miss the rest. Any thread may make any call. A reader
    may read the descriptor's counter before ``take``, as of any eventfd. Raises OSError where there
    is no descriptor left.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = deque[tuple[Any, Results]]()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return the descriptor, which stays this object's; -1 after ``close``."""
        return self._fd

    def add(self, name: Any, future: Future[Results]) -> None:
        """Have ``take`` return a job by this name once it has ended."""
        future.add_done_callback(lambda ended: self._note(name, ended.result()))

    def _note(self, name: Any, results: Results) -> None:
        with self._lock:
            if self._fd >= 0:
                self._ended.append((name, results))
                os.eventfd_write(self._fd, 1)

    def take(self) -> list[tuple[Any, Results]]:
        """Return what has ended since the last call, each job once: its name and its results. Does
        not wait."""
        with self._lock:
            if self._fd >= 0:
                with suppress(BlockingIOError):  # somebody else may have read it
                    os.eventfd_read(self._fd)
            ended = list(self._ended)
            self._ended.clear()
            return ended

    def close(self) -> None:
        """Close the descriptor. What ends later is not noted. Idempotent."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
