# SPDX-License-Identifier: Apache-2.0
"""``BlockStore``: blocks of bytes by key on NVMe, for any engine or cache server.

Bounded, verified, safe in a crash. Jobs of many blocks go in with a tag, and come back as results
in the order of their blocks: no call waits for a drive but ``open``, ``drain`` and ``close``. What
fails is a result, never an exception. docs/LIBRARY.md has an example.
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import count
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvdisk.assembly import SchedulerParts, assemble_row_worker, assemble_scheduler, check_sizes, warn_of_file_systems
from kvdisk.blocks import GROUP_BYTES, MAX_KEY_BYTES, BlockKey, group_of, make_block_key
from kvdisk.config import Config
from kvdisk.context import NoPool
from kvdisk.errors import ConfigError
from kvdisk.geometry import FINGERPRINT_BYTES, Geometry, GroupGeometry, share_slots
from kvdisk.manager.block_jobs import Offer, Prompt
from kvdisk.manager.catalog import ABSENT, READY, WRITING
from kvdisk.manager.events import Journal, Taken
from kvdisk.manager.jobs import JobRecord
from kvdisk.messages import Plan, Reason, Report
from kvdisk.stats import Stats
from kvdisk.worker.host_memory import Deployment

logger = logging.getLogger("kvdisk")

ROOM_S = 5.0
"""How long a put waits for room that is coming, and with which share of the rows at most."""
ROOM_SHARE = 0.25
_DRAIN_WAIT_S = 0.05

Rows = NDArray[np.uint8]
"""The caller's memory: a row for each block on its way, and each row's bytes beside each other.
Rows lie at any regular distance. It stays the caller's, and must live until ``close``."""


class BlockKind(NamedTuple):
    """Blocks of one size. A key says in its last two bytes which kind it is of, by position: see
    ``kvdisk.blocks.make_block_key``.

    ``payload_bytes``: of a row that are kept, from its first on. ``tokens``: that a block stands
    for: kinds share the drive by their bytes a token. ``window_tokens``: only the last so many
    before a token are read for it. ``state_tokens``: it is a recurrent state, and one in so many
    tokens is kept; None: it is KV.
    """

    payload_bytes: int
    tokens: int = 1
    window_tokens: int | None = None
    state_tokens: int | None = None


class Put(NamedTuple):
    """A block to keep: the bytes of ``row``. ``parent``: the block before it in its chain, without
    which nobody asks for it; None: it is the first. A block leaves before its parent does."""

    key: BlockKey
    parent: BlockKey | None
    row: int


class Get(NamedTuple):
    """A block to bring into ``row``. Where that fails the row may hold anything."""

    key: BlockKey
    row: int


class Presence(IntEnum):
    """What is known of a key. ASKED: others were asked for it. COMING: it is being written."""

    ABSENT = 0
    ASKED = 1
    COMING = 2
    READY = 3


class Result(IntEnum):
    """What became of one block of a job; a closed list.

    Of any job: DONE; IO_ERROR: the drive failed; DEADLINE: it took longer than ``io_deadline_s``;
    CANCELLED: ``forget`` or ``close`` came first, or the mover is gone. Of a put: PRESENT: it is
    there, or being written; REFUSED: admission does not want it; NO_ROOM: none came in time, or the
    write budget is spent; NO_SPACE: the drive is full. Of a get: ABSENT: it is not there (any
    more); HEADER, CHECKSUM: other bytes were there than were written, and are dropped.
    """

    DONE = 0
    PRESENT = 1
    REFUSED = 2
    NO_ROOM = 3
    ABSENT = 4
    HEADER = 5
    CHECKSUM = 6
    IO_ERROR = 7
    NO_SPACE = 8
    DEADLINE = 9
    CANCELLED = 10


class Ended(NamedTuple):
    """A job that has ended: its rows are the caller's again. ``results``: of its blocks, in their
    order. ``moved_bytes``: of the blocks that are DONE. ``seconds``: since it was asked for."""

    tag: int
    results: Sequence[Result]
    moved_bytes: int
    seconds: float


class RowMover(Protocol):
    """Moves bytes between rows and the drive: on a thread here, or in a process of its own. In a
    plan's moves, rows stand where GPU blocks stand. One thread calls everything."""

    def submit(self, plan: Plan) -> None:
        """Take over a plan; each job is reported once. Does not wait."""

    def poll(self, wait_s: float = 0.0) -> Report:
        """Return what was finished since the last call; where that is nothing, wait up to
        ``wait_s`` for something. ``Report.off``: it is gone, touches no row any more, and reports
        nothing more."""

    def close(self) -> None:
        """Cancel what has not ended. Waits for what has begun, however long that takes: no row is
        touched afterwards. Idempotent."""


StartMover = Callable[[Config, Geometry, Rows], RowMover]


class BlockStore(ABC):
    """See the module. One thread at a time calls everything, which may be another each time.

    What a caller does wrong is an assertion: a row or a kind that there is not, a tag that is in
    use.
    """

    @abstractmethod
    def presence(self, keys: Sequence[BlockKey]) -> bytes:
        """Return the ``Presence`` of each key. Neither waits nor counts: about a microsecond a
        key."""

    @abstractmethod
    def ask(self, keys: Sequence[BlockKey]) -> None:
        """Ask the other engines of the store for what is not here. ``keys``: of one prompt, in its
        order. Those are ASKED until an answer, or until ``lookup_wait_s`` is over."""

    @abstractmethod
    def reached(self, request: str, keys: Sequence[BlockKey]) -> None:
        """A request wants these blocks, or has used them. Once for each request, in the order of
        its prompt: what is kept and admitted follows it."""

    @abstractmethod
    def put(self, tag: int, blocks: Sequence[Put]) -> None:
        """Keep blocks. Their rows must not change until the tag has ended.

        It waits for room that is coming, a few seconds at most. Of a key that comes twice the later
        is PRESENT.
        """

    @abstractmethod
    def get(self, tag: int, blocks: Sequence[Get], arrival: int = 0) -> None:
        """Bring blocks into rows, which are the store's until the tag has ended. Verified: what is
        DONE is what was put. ``arrival``: gets of lower ones go first."""

    @abstractmethod
    def step(self, now: float) -> bool:
        """Send what was asked for, and look after the store. ``now``: of ``time.monotonic``. Return
        whether to call again soon, though nothing is asked for: False lets an idle engine rest."""

    @abstractmethod
    def poll(self, wait_s: float = 0.0) -> list[Ended]:
        """Return the jobs that have ended, each once; where there are none, wait up to ``wait_s``
        for one. After ``close`` it returns what is left."""

    @abstractmethod
    def forget(self, epoch: int) -> None:
        """Serve nothing of before: what keys mean has changed, for this engine. ``epoch``: any
        number above 0 that was never used. Jobs on their way end as CANCELLED. The next start with
        the same namespace finds what was written before the first call."""

    @abstractmethod
    def drain(self) -> None:
        """Wait until every job has ended; ``poll`` returns them. Bounded by ``io_deadline_s``, and
        the wait for room."""

    @abstractmethod
    def changes(self) -> Taken:
        """Return which keys became READY and which went since the last call; the first one begins
        with all that are there."""

    @abstractmethod
    def stats(self) -> Stats:
        """Return what was counted and measured since the last call, and how it is now:
        docs/METRICS.md."""

    @abstractmethod
    def close(self) -> None:
        """End every job, commit, and give the store back. Waits for the drive. Idempotent."""

    @staticmethod
    def open(
        config: Config,
        namespace: bytes,
        facts: Mapping[str, Any],
        kinds: Sequence[BlockKind],
        memory: Rows,
        start_mover: StartMover | None = None,
    ) -> BlockStore:
        """Open a store in ``config.store_dirs``, or take over what an earlier process has left
        there.

        ``namespace``: 32 bytes that name all whose keys mean the same bytes; only blocks of the
        same namespace and kinds are found. ``facts``: what people shall read of it, as JSON values.
        ``start_mover``: None: a thread of this process. The CPU tier of ``config`` is not used.
        Waits for the drive. Raises ConfigError, StoreLocked, DeviceError.
        """
        assert len(namespace) == FINGERPRINT_BYTES, "a namespace has 32 bytes"
        assert memory.ndim == 2 and memory.dtype == np.uint8 and memory.strides[1] == 1, "rows are rows of bytes"
        assert kinds and all(0 < kind.payload_bytes <= memory.shape[1] for kind in kinds), "a row holds any block"
        if not config.store_dirs:
            raise ConfigError("A block store needs store_dirs and nvme_bytes.")
        if config.device == "gds":
            raise ConfigError("A block store moves rows of host memory, which device 'gds' does not.")
        config = replace(config, cpu_bytes=0, store_policy="on_compute")
        geometry = geometry_of(kinds)
        warn_of_file_systems(config)
        check_sizes(config, Deployment(1), geometry)
        parts = assemble_scheduler(config, geometry, NoPool(), namespace, dict(facts))
        try:
            mover = (start_mover or ThreadMover)(config, geometry, memory)
        except BaseException:
            parts.close()
            raise
        return DriveBlocks(config, geometry, len(memory), parts, mover)


def geometry_of(kinds: Sequence[BlockKind]) -> Geometry:
    """Return the sizes of slots for blocks of these kinds."""
    groups = [
        GroupGeometry(at, kind.tokens, kind.payload_bytes, kind.window_tokens, state_tokens=kind.state_tokens)
        for at, kind in enumerate(kinds)
    ]
    return Geometry(share_slots(groups), 1, math.gcd(*(kind.tokens for kind in kinds)))


class ThreadMover:
    """``RowMover`` on a thread of this process. Raises ConfigError where there is no memory for
    it."""

    def __init__(self, config: Config, geometry: Geometry, memory: Rows) -> None:
        self._parts = assemble_row_worker(config, geometry, memory)

    def submit(self, plan: Plan) -> None:
        """See ``RowMover``."""
        self._parts.mover.submit(plan)

    def poll(self, wait_s: float = 0.0) -> Report:
        """See ``RowMover``. Raises, once, what ended the thread: an error of ours."""
        if wait_s > 0:
            self._parts.mover.wait_any(wait_s)
        return self._parts.mover.poll()

    def close(self) -> None:
        """See ``RowMover``."""
        self._parts.close()


@dataclass(slots=True, eq=False)
class _Job:
    """What was asked for with a tag. ``results``: of its blocks, None: not known yet. ``waiting``:
    positions of what is not planned yet. ``records``: what was planned, and the position of each
    move. ``is_new``: no step has looked at it. ``is_void``: it ends as CANCELLED."""

    tag: int
    blocks: Sequence[Put] | Sequence[Get]
    asked_s: float
    results: list[Result | None]
    waiting: list[int] = field(default_factory=list)
    records: list[tuple[JobRecord, Sequence[int]]] = field(default_factory=list)
    is_new: bool = True
    is_void: bool = False

    def note(self, positions: Iterable[int], result: Result) -> None:
        """These blocks have ended so."""
        for at in positions:
            self.results[at] = result

    def take_ended(self, is_under_way: Callable[[JobRecord], bool]) -> list[tuple[JobRecord, Sequence[int]]]:
        """Return what was planned and has ended, and forget it."""
        ended = [each for each in self.records if not is_under_way(each[0])]
        self.records = [each for each in self.records if is_under_way(each[0])]
        return ended


_RESULTS = {reason: Result.__members__.get(reason.name, Result.CANCELLED) for reason in Reason}
_PRESENCES = bytes.maketrans(bytes([ABSENT, WRITING, READY]), bytes([Presence.ABSENT, Presence.COMING, Presence.READY]))


class DriveBlocks(BlockStore):
    """``BlockStore`` on drives: what ``BlockStore.open`` returns.

    The manager decides, and the mover moves. Here is what joins them: jobs by tag, and the wait for
    room.
    """

    def __init__(
        self, config: Config, geometry: Geometry, row_count: int, parts: SchedulerParts, mover: RowMover
    ) -> None:
        self._config = config
        self._payload_bytes = [group.payload_bytes for group in geometry.groups]
        self._suffixes = {make_block_key(b"", kind) for kind in range(len(geometry.groups))}
        """What keys end with."""
        self._row_count = row_count
        self._parts = parts
        self._manager = parts.manager
        self._blocks = parts.manager.blocks
        self._mover = mover
        self._jobs: dict[int, _Job] = {}
        """Those that have not ended, by tag, in the order in which they were asked for."""
        self._ended: list[Ended] = []
        self._asked: dict[BlockKey, int] = {}
        """What others were asked for, and with which question."""
        self._questions: dict[int, tuple[Prompt, float]] = {}
        """Those that have no answer, and until when one is awaited."""
        self._numbers = count(1)
        self._stats = Stats()
        self._journal: Journal | None = None
        self._is_off = self._is_closed = False

    # -- questions -----------------------------------------------------------------------------

    def presence(self, keys: Sequence[BlockKey]) -> bytes:
        """See ``BlockStore``."""
        if self._is_off or self._is_closed:
            return bytes(len(keys))
        self._wake()
        found = self._blocks.presences(keys).translate(_PRESENCES)
        if not self._asked:
            return found
        asked, absent = self._asked, Presence.ABSENT
        return bytes(
            Presence.ASKED if presence == absent and key in asked else presence
            for key, presence in zip(keys, found, strict=True)
        )

    def ask(self, keys: Sequence[BlockKey]) -> None:
        """See ``BlockStore``."""
        if self._is_off:
            return
        self._wake()
        prompt, number = self._blocks.ask(keys), next(self._numbers)
        if self._blocks.is_asking(prompt):
            self._questions[number] = prompt, time.monotonic() + self._config.lookup_wait_s
            self._asked |= dict.fromkeys(keys, number)

    def _forget_answered(self, now: float) -> None:
        """Take back ASKED from what was answered, or was asked for too long ago."""
        over = [
            number
            for number, (prompt, until_s) in self._questions.items()
            if now >= until_s or not self._blocks.is_asking(prompt)
        ]
        if over:
            for number in over:
                del self._questions[number]
            self._asked = {key: number for key, number in self._asked.items() if number in self._questions}

    def reached(self, request: str, keys: Sequence[BlockKey]) -> None:
        """See ``BlockStore``."""
        if not self._is_off:
            self._wake()
            self._manager.note_time(int(time.time()))
            self._blocks.reached(request, keys)

    # -- jobs ------------------------------------------------------------------------------------

    def put(self, tag: int, blocks: Sequence[Put]) -> None:
        """See ``BlockStore``."""
        assert all(put.key != put.parent for put in blocks), "no block follows itself"
        self._check([put.key for put in blocks], [put.row for put in blocks])
        self._check([put.parent for put in blocks if put.parent is not None], [])
        job = self._new_job(tag, blocks)
        job.waiting = list({put.key: at for at, put in reversed(list(enumerate(blocks)))}.values())[::-1]

    def get(self, tag: int, blocks: Sequence[Get], arrival: int = 0) -> None:
        """See ``BlockStore``."""
        self._check([get.key for get in blocks], [get.row for get in blocks])
        job = self._new_job(tag, blocks)
        if self._is_off or not blocks:
            return
        self._wake()
        job.results = [Result.ABSENT] * len(blocks)
        record, found = self._blocks.load(blocks, arrival)
        if record is not None:
            job.records.append((record, found))

    def _check(self, keys: Sequence[BlockKey], rows: Sequence[int]) -> None:
        assert max(map(len, keys), default=0) <= MAX_KEY_BYTES, "a key has 128 bytes at most"
        assert {key[-GROUP_BYTES:] for key in keys} <= self._suffixes, "a key of a kind that there is not"
        assert min(rows, default=0) >= 0 and max(rows, default=0) < self._row_count, "a row that there is not"

    def _new_job(self, tag: int, blocks: Sequence[Put] | Sequence[Get]) -> _Job:
        assert not self._is_closed, "the store is closed"
        assert tag not in self._jobs and all(tag != each.tag for each in self._ended), f"tag {tag} is in use"
        job = self._jobs[tag] = _Job(tag, blocks, time.monotonic(), [None] * len(blocks))
        return job

    # -- steps -----------------------------------------------------------------------------------

    def step(self, now: float) -> bool:
        """See ``BlockStore``."""
        assert not self._is_closed, "the store is closed"
        if self._is_off:
            return bool(self._jobs)
        self._wake()
        self._parts.mailbox.work()
        self._manager.commit()
        self._manager.note_time(int(time.time()))
        self._plan_puts(now)
        plan = self._manager.take_plan(now, idle=False)
        if plan.jobs or plan.void:  # or each step would wake the mover for nothing
            self._mover.submit(plan)
        self._forget_answered(now)
        taken = self._parts.telemetry.take(now)
        if taken is not None:
            self._stats.merge(taken)
        if self._jobs or self._questions or self._manager.has_pending_work(now):
            return True
        return self._parts.mailbox.rest()

    def _plan_puts(self, now: float) -> None:
        """Write what there is room for. The rest waits where room is coming, though not for long,
        nor with too many rows: others may need these more."""
        left, waiting = max(1, int(ROOM_SHARE * self._row_count)), list[Offer]()
        for job in self._jobs.values():
            if not job.waiting:
                continue
            positions, offers = job.waiting, [Offer(*job.blocks[at]) for at in job.waiting]
            answer = self._blocks.store(offers, now, is_new=job.is_new)
            if answer.record is not None:
                job.records.append((answer.record, [positions[at] for at in answer.taken]))
            job.note([positions[at] for at in answer.present], Result.PRESENT)
            job.note([positions[at] for at in answer.refused], Result.REFUSED)
            may_wait = left if now - job.asked_s < ROOM_S else 0
            kept, given_up = answer.waiting[:may_wait], [*answer.waiting[may_wait:], *answer.hopeless]
            job.note([positions[at] for at in given_up], Result.NO_ROOM)
            self._manager.stats.add("refused_blocks.room", len(given_up))
            job.waiting, job.is_new = [positions[at] for at in kept], False
            waiting += [offers[at] for at in kept]
            left -= len(kept)
        self._blocks.await_room(waiting)

    def poll(self, wait_s: float = 0.0) -> list[Ended]:
        """See ``BlockStore``."""
        if not self._is_closed:
            self._settle(0.0)
            if not self._ended and wait_s > 0:
                self._settle(wait_s)
        ended, self._ended = self._ended, []
        return ended

    def _settle(self, wait_s: float) -> None:
        """Take in what the mover has finished, and end the jobs of which nothing is left."""
        if not self._is_off:
            self._wake()
            report = self._mover.poll(wait_s)
            self._manager.settle(report, time.monotonic(), int(time.time()))
            if report.off:
                self._is_off = True
                logger.error("kvdisk's store is off until it is opened anew: what moves its blocks is gone.")
        if self._is_off:
            self._void(self._jobs.values(), also_under_way=True)
        for job in list(self._jobs.values()):
            for record, positions in job.take_ended(self._manager.is_under_way):
                for at, position in enumerate(positions):
                    job.results[position] = _RESULTS[record.failed[at]] if at in record.failed else Result.DONE
            if not job.waiting and not job.records:
                del self._jobs[job.tag]
                self._ended.append(self._end(job))

    def _void(self, jobs: Iterable[_Job], *, also_under_way: bool) -> None:
        """Have jobs end as CANCELLED; ``also_under_way``: at once, as nothing moves any more."""
        for job in jobs:
            job.is_void = True
            job.waiting = []
            if also_under_way:
                job.records = []

    def _end(self, job: _Job) -> Ended:
        results, first, moved_bytes = list[Result](), dict[BlockKey, Result](), 0
        blocks: list[Put | Get] = [*job.blocks]
        for block, result in zip(blocks, job.results, strict=True):
            if job.is_void:
                found = Result.CANCELLED
            elif result is not None:
                found = first[block.key] = result
            else:  # a put of a key that was in it before
                found = first[block.key] if first[block.key] is not Result.DONE else Result.PRESENT
            results.append(found)
            if found is Result.DONE:
                moved_bytes += self._payload_bytes[group_of(block.key)]
        return Ended(job.tag, results, moved_bytes, time.monotonic() - job.asked_s)

    # -- epochs and the end ----------------------------------------------------------------------

    def forget(self, epoch: int) -> None:
        """See ``BlockStore``."""
        if self._is_off:
            return
        self._wake()
        dropped = self._manager.held()
        self._manager.reset(epoch)
        self._parts.telemetry.note_reset(epoch, dropped)
        self._void(self._jobs.values(), also_under_way=False)
        self._questions.clear()
        self._asked.clear()

    def drain(self) -> None:
        """See ``BlockStore``."""
        while self._jobs:
            self.step(time.monotonic())
            self._settle(_DRAIN_WAIT_S)

    def close(self) -> None:
        """See ``BlockStore``."""
        if self._is_closed:
            return
        with ExitStack() as end:  # the last first, whatever one of them raises
            end.callback(self._parts.close)
            end.callback(self._cancel_all)
            end.callback(self._mover.close)
            end.callback(setattr, self, "_is_closed", True)
            self._settle(0.0)  # what comes after this is not settled: the next start looks for itself

    def _cancel_all(self) -> None:
        self._void(self._jobs.values(), also_under_way=True)
        self._ended += map(self._end, self._jobs.values())
        self._jobs.clear()

    # -- what it tells ---------------------------------------------------------------------------

    def changes(self) -> Taken:
        """See ``BlockStore``."""
        self._wake()
        if self._journal is None:
            self._journal = self._manager.publish()
        return self._journal.take()

    def stats(self) -> Stats:
        """See ``BlockStore``."""
        self._stats.merge(self._parts.telemetry.take_all())
        return self._stats.take()

    def _wake(self) -> None:
        """Take the manager back from who may have used it while nothing was to be done: the
        commands that ask a running store for something."""
        self._parts.mailbox.wake()
