# SPDX-License-Identifier: Apache-2.0
"""``BlockStore``: blocks of bytes by key on NVMe, for any engine or cache server.

Bounded, verified, safe in a crash. Jobs of many blocks go in with a tag, and come back as results
in the order of their blocks: no call waits for a drive but ``open``, ``drain`` and ``close``. What
fails is a result, never an exception. docs/LIBRARY.md has an example.
"""

from __future__ import annotations

import functools
import logging
import math
import operator
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain, compress, count
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from kvdisk.assembly import SchedulerHalf, assemble_row_worker, assemble_scheduler, check_sizes, warn_of_file_systems
from kvdisk.blocks import BlockKey, groups_of, make_block_key
from kvdisk.config import Config
from kvdisk.context import NoPool
from kvdisk.device.control import JointCap
from kvdisk.device.paths import encode_json
from kvdisk.errors import ConfigError
from kvdisk.geometry import FINGERPRINT_BYTES, Geometry, GroupGeometry, share_slots
from kvdisk.identity import MOST_DESCRIPTION_BYTES, Identity
from kvdisk.manager.block_jobs import Prompt
from kvdisk.manager.catalog import ABSENT, READY, WRITING
from kvdisk.manager.copies import Offers
from kvdisk.manager.erasures import Erasure
from kvdisk.manager.events import Journal, Taken
from kvdisk.manager.jobs import JobRecord
from kvdisk.messages import Plan, Reason, Report
from kvdisk.salts import SaltDigests
from kvdisk.stats import Stats
from kvdisk.store_face import (
    MOST_HOLD_S,
    MOST_SALTS,
    BlockKind,
    BlockStoreFace,
    CallCheck,
    Ended,
    Get,
    Memory,
    Presence,
    Put,
    Result,
    Row,
    RowMover,
    Rows,
    StartMover,
    Usage,
    need,
    rows_of,
)
from kvdisk.worker.host_memory import Deployment

__all__ = [
    "BlockKind",
    "BlockStore",
    "Ended",
    "Get",
    "JointCap",
    "Memory",
    "Presence",
    "Put",
    "Result",
    "Row",
    "RowMover",
    "Rows",
    "StartMover",
    "ThreadMover",
    "Usage",
    "geometry_of",
    "make_block_key",
]

_P = ParamSpec("_P")
_R = TypeVar("_R")

logger = logging.getLogger("kvdisk")

ROOM_S = 5.0
"""How long a put that does not say so waits for room that is coming, and with which share of the
rows at most."""
ROOM_SHARE = 0.25
_DRAIN_WAIT_S = 0.05
_CLOSED = "the store is closed"


def geometry_of(kinds: Sequence[BlockKind]) -> Geometry:
    """Return the sizes of slots for blocks of these kinds."""
    groups = [
        GroupGeometry(
            at,
            kind.tokens,
            kind.payload_bytes,
            kind.window_tokens,
            state_tokens=kind.state_tokens,
            element_bytes=kind.element_bytes,
            piece_bytes=tuple(kind.piece_bytes),
        )
        for at, kind in enumerate(kinds)
    ]
    return Geometry(share_slots(groups), 1, math.gcd(*(kind.tokens for kind in kinds)))


def _check_facts(facts: Mapping[str, Any]) -> None:
    try:
        size = len(encode_json({"description": dict(facts)}))
    except (TypeError, ValueError) as error:
        raise ValueError(f"facts are JSON values: {error}") from error
    need(size <= MOST_DESCRIPTION_BYTES, f"facts take {MOST_DESCRIPTION_BYTES >> 10} KiB at most")


def _check_joint_cap(joint_cap: JointCap | None) -> None:
    if joint_cap is not None:
        name, nvme_bytes, member = joint_cap
        need(isinstance(name, str) and bool(name) and isinstance(member, str), "a joint cap and its members have names")
        need(type(nvme_bytes) is int and 0 < nvme_bytes < 1 << 62, "a joint cap is a number of bytes")


class ThreadMover:
    """``RowMover`` on a thread of this process. Raises ConfigError where there is no memory for
    it."""

    def __init__(self, config: Config, geometry: Geometry, memory: Memory) -> None:
        self._parts = assemble_row_worker(config, geometry, memory)

    def submit(self, plan: Plan) -> None:
        self._parts.mover.submit(plan)

    def poll(self, wait_s: float = 0.0) -> Report:
        """See ``RowMover``. Raises, once, what ended the thread: an error of ours."""
        if wait_s > 0:
            self._parts.mover.wait_any(wait_s)
        report = self._parts.mover.poll()
        report.off = self._parts.mover.is_gone(wait_s)
        return report

    def wait(self, wait_s: float) -> None:
        self._parts.mover.wait_any(wait_s)

    def close(self) -> None:
        self._parts.close()


_NONE = Offers()
_ALL = make_block_key(b"", 0)
"""Stands for all blocks in the job that deletes them."""


@dataclass(slots=True, eq=False)
class _Job:
    """What was asked for with a tag. ``results``: of its blocks, None: not known yet. ``wait_s``:
    see ``put``. ``offers``: those of a put that are not planned yet. ``records``: what was planned,
    and the position of each move. ``erasure``: of a deletion. ``is_new``: no step has looked at it.
    ``is_void``: it ends as CANCELLED."""

    tag: int
    keys: Sequence[BlockKey]
    asked_s: float
    results: list[Result | None]
    wait_s: float | None = None
    offers: Offers = _NONE
    records: list[tuple[JobRecord, Sequence[int]]] = field(default_factory=list)
    erasure: Erasure | None = None
    is_new: bool = True
    is_void: bool = False

    @property
    def room_s(self) -> float:
        """How long it waits for room."""
        return ROOM_S if self.wait_s is None else self.wait_s

    def note(self, positions: Iterable[int], result: Result | None) -> None:
        """These blocks have ended so; None: not yet."""
        for at in positions:
            self.results[at] = result

    def give_up(self, keys: Collection[BlockKey]) -> None:
        """Do not put these blocks, as far as they wait for room."""
        are_kept = [key not in keys for key in self.offers.keys]
        self.note(compress(self.offers.positions, map(operator.not_, are_kept)), Result.CANCELLED)
        self.offers = self.offers.at(list(compress(count(), are_kept)))

    def take_ended(self, is_under_way: Callable[[JobRecord], bool]) -> list[tuple[JobRecord, Sequence[int]]]:
        """Return what was planned and has ended, and forget it."""
        ended = [each for each in self.records if not is_under_way(each[0])]
        self.records = [each for each in self.records if is_under_way(each[0])]
        return ended


class _Salts:
    """The salts that callers have named, by digest."""

    def __init__(self, digests: SaltDigests) -> None:
        self._digests = digests
        self._known: dict[str, int] = {"": 0}
        """The one that was named last is the last."""

    def digest_of(self, salt: str) -> int:
        """Return a salt's digest, and remember it."""
        if not salt:
            return 0
        digest = self._known[salt] = self._known.pop(salt, 0) or self._digests.of(salt)
        if len(self._known) > MOST_SALTS:
            del self._known[next(each for each in self._known if each)]
        return digest

    def usage_of(self, found: Mapping[int, int]) -> Usage:
        """Return what tenants have, by digest, as callers name it."""
        by_salt = {salt: found[digest] for salt, digest in self._known.items() if digest in found}
        total = sum(found.values())
        return Usage(total, by_salt, total - sum(by_salt.values()))


def _in_turn(call: Callable[Concatenate[BlockStore, _P], _R]) -> Callable[Concatenate[BlockStore, _P], _R]:
    """Have the manager for one call. Between calls others may: commands that ask a running store
    for something, and its upkeep. Nobody knows which call is the last for long."""

    @functools.wraps(call)
    def called(self: BlockStore, /, *arguments: _P.args, **more: _P.kwargs) -> _R:
        with self._turn:
            return call(self, *arguments, **more)

    return called


_RESULTS = {reason: Result.__members__.get(reason.name, Result.CANCELLED) for reason in Reason}
_RESULTS[Reason.REMOTE_ERROR] = Result.IO_ERROR
_PRESENCES = bytes.maketrans(bytes([ABSENT, WRITING, READY]), bytes([Presence.ABSENT, Presence.COMING, Presence.READY]))


class BlockStore(BlockStoreFace):
    """The store on drives. Make one with ``open``.

    The manager decides, and the mover moves. Here is what joins them: jobs by tag, and the wait for
    room.
    """

    def __init__(
        self,
        config: Config,
        geometry: Geometry,
        check: CallCheck,
        parts: SchedulerHalf,
        mover: RowMover,
    ) -> None:
        self._config = config
        self._payload_bytes = [group.payload_bytes for group in geometry.groups]
        self._check = check
        self._parts = parts
        self._turn = parts.mailbox.turn
        self._manager = parts.manager
        self._blocks = parts.manager.blocks
        assert parts.nvme is not None, "a store without memory has a drive, or does not open"
        self._erasures = parts.manager.blocks.erasures_in(parts.nvme)
        self._mover = mover
        self._salts = _Salts(parts.salts)
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
        self._is_off = self._is_gone = self._is_closed = False
        """``_is_gone``: the mover touches no row any more."""

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
    ) -> BlockStore:
        """Open a store in ``config.store_dirs``, or take over what an earlier process has left
        there.

        ``namespace``: 32 bytes that name all whose keys mean the same bytes; only blocks of the
        same namespace and kinds are found. ``facts``: what people shall read of it, as JSON values
        of 256 KiB at most.
        ``start_mover``: None: a thread of this process. ``joint_cap``: what bounds this store and
        others, of any process and namespace, together, beside each one's ``nvme_bytes``. The CPU
        tier of ``config`` is not used. Waits for the drive. Raises ValueError, ConfigError,
        StoreLocked, DeviceError, CorruptRecord.
        """
        is_name = isinstance(namespace, bytes) and len(namespace) == FINGERPRINT_BYTES
        need(is_name, f"a namespace has {FINGERPRINT_BYTES} bytes")
        identity = Identity.certain(namespace, dict(facts))
        return cls.open_for(config, identity, kinds, memory, start_mover, joint_cap)

    @classmethod
    def open_for(
        cls,
        config: Config,
        identity: Identity,
        kinds: Sequence[BlockKind],
        memory: Memory,
        start_mover: StartMover | None = None,
        joint_cap: JointCap | None = None,
    ) -> BlockStore:
        """As ``open``, for a namespace that may become known later: nothing is found or stored
        before."""
        check = CallCheck(kinds, memory)
        _check_facts(identity.guess.description)
        _check_joint_cap(joint_cap)
        if not config.store_dirs:
            raise ConfigError("A block store needs store_dirs and nvme_bytes.")
        for path in config.store_dirs:  # of a Config that no mapping was read for
            if not Path(path).is_absolute():
                raise ConfigError(f"store_dirs must be an absolute path, not {str(path)!r}.")
        if config.device == "gds":
            raise ConfigError("A block store moves rows of host memory, which device 'gds' does not.")
        config = replace(config, cpu_bytes=0, store_policy="on_compute")
        geometry = geometry_of(kinds)
        warn_of_file_systems(config)
        check_sizes(config, Deployment(1), geometry)
        parts = assemble_scheduler(config, geometry, NoPool(), identity, joint=joint_cap)
        try:
            mover = (start_mover or ThreadMover)(config, geometry, memory)
        except BaseException:
            parts.close()
            raise
        store = cls(config, geometry, check, parts, mover)
        while parts.mailbox.rest():
            pass
        return store

    # -- questions -----------------------------------------------------------------------------

    def presence(self, keys: Sequence[BlockKey]) -> bytes:
        if self._is_off:
            return bytes(len(keys))
        with self._turn:  # what ``_in_turn`` does, in less time
            found = self._blocks.presences(keys).translate(_PRESENCES)
        if not self._asked:
            return found
        asked, absent = self._asked, Presence.ABSENT
        return bytes(
            Presence.ASKED if presence == absent and key in asked else presence
            for key, presence in zip(keys, found, strict=True)
        )

    @_in_turn
    def hold(self, keys: Sequence[BlockKey], hold_s: float) -> None:
        self._check.held(keys, hold_s)
        if not self._is_off and hold_s > 0:
            self._manager.hold(keys, min(hold_s, MOST_HOLD_S), time.monotonic())

    @_in_turn
    def ask(self, keys: Sequence[BlockKey]) -> None:
        self._check.keys(keys)
        if self._is_off:
            return
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
        for number in over:
            prompt, _ = self._questions.pop(number)
            for key in chain.from_iterable(prompt.keys):
                if self._asked.get(key) == number:
                    del self._asked[key]

    @_in_turn
    def reached(self, request: str | None, keys: Sequence[BlockKey]) -> None:
        self._check.keys(keys)
        if not self._is_off:
            self._manager.note_time(int(time.time()))
            name = f"of nobody {next(self._numbers)}" if request is None else request
            self._blocks.reached(name, keys, time.monotonic())

    # -- jobs ------------------------------------------------------------------------------------

    def put(self, tag: int, blocks: Sequence[Put], wait_s: float | None = None) -> None:
        self._check.puts(blocks, wait_s)
        keys, parents, rows, *salts = zip(*blocks, strict=True) if blocks else ((), (), ())
        known = set(keys)
        job, count = self._new_job(tag, keys), len(keys)
        job.wait_s = wait_s
        tenants = [0] * count if not salts or not any(salts[0]) else list(map(self._salts.digest_of, salts[0]))
        job.offers = Offers(keys, parents, (), groups_of(keys), tenants, range(count), list(map(rows_of, rows)))
        if len(known) < count:
            job.offers = job.offers.at(sorted({key: at for at, key in reversed(list(enumerate(keys)))}.values()))

    @_in_turn
    def get(self, tag: int, blocks: Sequence[Get], arrival: int = 0) -> None:
        self._check.gets(blocks, arrival)
        keys = [get.key for get in blocks]
        job = self._new_job(tag, keys)
        if self._is_off or not blocks:
            return
        job.results = [Result.ABSENT] * len(blocks)
        record, found = self._blocks.load(keys, [rows_of(get.row) for get in blocks], arrival)
        if record is not None:
            job.records.append((record, found))

    @_in_turn
    def delete(self, tag: int, keys: Sequence[BlockKey]) -> None:
        self._check.keys(keys)
        job = self._new_job(tag, keys)
        if self._is_off:
            return
        for other in self._jobs.values():
            other.give_up(set(keys))
        job.erasure, are_there = self._erasures.delete(keys, time.monotonic())
        job.results = [Result.DONE if is_there else Result.ABSENT for is_there in are_there]

    @_in_turn
    def clear(self, tag: int) -> None:
        job = self._new_job(tag, [_ALL])
        if self._is_off:
            return
        for other in self._jobs.values():
            other.give_up(other.offers.keys)
        job.erasure, job.results = self._erasures.clear(time.monotonic()), [Result.DONE]

    def _new_job(self, tag: int, keys: Sequence[BlockKey]) -> _Job:
        need(not self._is_closed, _CLOSED)
        is_free = tag not in self._jobs and all(tag != each.tag for each in self._ended)
        need(is_free, f"tag {tag} is in use")
        job = self._jobs[tag] = _Job(tag, keys, time.monotonic(), [None] * len(keys))
        return job

    # -- steps -----------------------------------------------------------------------------------

    @_in_turn
    def step(self, now: float) -> bool:
        need(not self._is_closed, _CLOSED)
        if self._is_off:
            return bool(self._jobs)
        self._parts.mailbox.check()
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
        return bool(self._jobs or self._questions or self._manager.has_pending_work(now))

    def _plan_puts(self, now: float) -> None:
        """Write what there is room for. The rest waits where room is coming: as long as its put has
        said, or not for long and not with too many rows, as others may need these more."""
        left, waiting = max(1, int(ROOM_SHARE * self._check.most_blocks)), list[int]()
        for job in self._jobs.values():
            if not job.offers.keys:
                continue
            answer, present = self._blocks.store(job.offers, now, is_new=job.is_new)
            if answer.record is not None:
                job.records.append((answer.record, answer.taken.positions))
            job.note(present, Result.PRESENT)
            job.note(answer.refused.positions, Result.REFUSED)
            job.note(answer.unserved.positions, Result.NO_ROOM)
            kept = self._blocks.waiting(answer) if now - job.asked_s < job.room_s else []
            if job.wait_s is None:
                kept = kept[:left]
                left -= len(kept)
            self._blocks.give_up(len(answer.unserved.keys) - len(kept))
            job.offers, job.is_new = answer.unserved.at(kept), False
            job.note(job.offers.positions, None)
            waiting += job.offers.groups
        self._blocks.await_room(waiting)

    def poll(self, wait_s: float = 0.0) -> list[Ended]:
        if not self._is_closed:
            self._settle(0.0)
            if not self._ended and wait_s > 0:
                self._settle(wait_s)
        ended, self._ended = self._ended, []
        return ended

    def wait(self, wait_s: float) -> None:
        self._mover.wait(wait_s)

    @property
    def is_off(self) -> bool:
        return self._is_off

    def _settle(self, wait_s: float) -> None:
        """Take in what the mover has finished, and end the jobs of which nothing is left."""
        self._take_in(Report() if self._is_gone else self._poll_mover(wait_s))

    @_in_turn
    def _take_in(self, report: Report) -> None:
        if not self._is_off:
            self._manager.settle(report, time.monotonic(), int(time.time()))
        if self._is_off:
            self._void(self._jobs.values(), also_under_way=self._is_gone)
        for job in list(self._jobs.values()):
            for record, positions in job.take_ended(self._manager.is_under_way):
                for at, position in enumerate(positions):
                    job.results[position] = _RESULTS[record.failed[at]] if at in record.failed else Result.DONE
            if not job.offers.keys and not job.records and self._is_erased(job):
                del self._jobs[job.tag]
                self._ended.append(self._end(job))

    def _is_erased(self, job: _Job) -> bool:
        """Whether what a job deletes is gone for good, or will not be; note the latter."""
        if job.erasure is None or job.is_void:
            return True
        try:
            return self._erasures.is_over(job.erasure, time.monotonic())
        except (OSError, TimeoutError) as error:
            failure = Result.DEADLINE if isinstance(error, TimeoutError) else Result.IO_ERROR
            job.results = [failure] * len(job.results)
            return True

    def _poll_mover(self, wait_s: float) -> Report:
        """Ask the mover. One that is gone says of all that it had that it was cancelled; that is
        not settled, or segments that it should have opened would be given up. One that raises may
        still have drives that write to rows."""
        was_off = self._is_off
        try:
            report = self._mover.poll(wait_s)
            self._is_gone = report.off
            self._is_off |= report.off
        except BaseException:
            self._is_off = True
            raise
        finally:
            if self._is_off and not was_off:
                logger.error("kvdisk's store is off until it is opened again: its mover process exited.")
        return report

    def _void(self, jobs: Iterable[_Job], *, also_under_way: bool) -> None:
        """Have jobs end as CANCELLED; ``also_under_way``: at once, as nothing moves any more."""
        for job in jobs:
            job.is_void = True
            job.offers = _NONE
            if also_under_way:
                job.records = []

    def _end(self, job: _Job) -> Ended:
        results = [Result.CANCELLED] * len(job.keys) if job.is_void else self._results_of(job)
        are_moved = map(Result.DONE.__eq__, results if job.erasure is None else ())
        moved = Counter(groups_of(compress(job.keys, are_moved)))
        moved_bytes = sum(self._payload_bytes[group] * count for group, count in moved.items())
        return Ended(job.tag, results, moved_bytes, time.monotonic() - job.asked_s)

    def _results_of(self, job: _Job) -> list[Result]:
        """Return the results of a job's blocks; of a key that was put twice the later is
        PRESENT, if it was stored."""
        known = [(key, result) for key, result in zip(job.keys, job.results, strict=True) if result is not None]
        if len(known) == len(job.keys):
            return [result for _, result in known]
        first = dict(reversed(known))
        again = {key: Result.PRESENT if result is Result.DONE else result for key, result in first.items()}
        return [again[key] if result is None else result for key, result in zip(job.keys, job.results, strict=True)]

    # -- epochs and the end ----------------------------------------------------------------------

    @_in_turn
    def forget(self, epoch: int) -> None:
        self._check.epoch(epoch)
        if self._is_off:
            return
        dropped = self._manager.held()
        self._manager.reset(epoch)
        self._parts.telemetry.note_reset(epoch, dropped)
        self._void((job for job in self._jobs.values() if job.erasure is None), also_under_way=False)
        self._questions.clear()
        self._asked.clear()

    def drain(self) -> None:
        end_s = time.monotonic() + self._config.io_deadline_s
        while self._jobs and not (self._is_off and time.monotonic() >= end_s):
            self.step(time.monotonic())
            self._settle(_DRAIN_WAIT_S)

    def close(self) -> None:
        if self._is_closed:
            return
        with ExitStack() as end:  # the last first, whatever one of them raises
            end.callback(self._parts.close)
            end.callback(self._cancel_all)
            end.callback(self._mover.close)
            end.callback(self._shut)
            end.callback(self._parts.mailbox.wake)  # for good
            if not self._is_off:
                self._settle(0.0)  # what comes after this is not settled: the next start looks for itself

    def _shut(self) -> None:
        self._is_closed = self._is_off = True

    def _cancel_all(self) -> None:
        self._void(self._jobs.values(), also_under_way=True)
        self._ended += map(self._end, self._jobs.values())
        self._jobs.clear()

    # -- what it tells ---------------------------------------------------------------------------

    @_in_turn
    def changes(self) -> Taken:
        if self._journal is None:
            self._journal = self._manager.publish()
        return self._journal.take()

    @_in_turn
    def keys(self) -> list[BlockKey]:
        return [] if self._is_off else self._blocks.keys()

    @_in_turn
    def usage(self, salts: Iterable[str] = ()) -> Usage:
        salts = list(salts)
        need(all(isinstance(salt, str) for salt in salts), "a salt is text")
        for salt in salts:
            self._salts.digest_of(salt)
        return self._salts.usage_of({} if self._is_off else self._blocks.target.bytes_by_tenant())

    @_in_turn
    def stats(self) -> Stats:
        self._stats.merge(self._parts.telemetry.take_all())
        return self._stats.take()
