# SPDX-License-Identifier: Apache-2.0
"""The segment files of one rank: the jobs that open and drop them, on a thread of their own.

Jobs of files (OPEN_HOME, OPEN_SEGMENT, DROP_SEGMENT) run one after the other. They wait for the
disk and for locks, for seconds where a file is preallocated; transfers go on meanwhile. The thread
calls nothing but ``SegmentFiles``: the device hears of a file on the mover's thread.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import time
from collections import deque
from collections.abc import Collection
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Protocol

from kvdisk.blocks import Tier
from kvdisk.device import segment as segments
from kvdisk.device.control import PLATFORM
from kvdisk.device.drives import Directories, check_first_is_mounted
from kvdisk.device.home import JoinedHome
from kvdisk.device.paths import NO_ROOM, device_errors, is_directory
from kvdisk.device.segment import DriveFolder
from kvdisk.device.store import Store
from kvdisk.errors import CorruptRecord, DeviceError, GeometryMismatch, KvdiskError, QuietLog, start_thread
from kvdisk.messages import HomeSpec, Job, JobKind, Reason, SegmentSpec
from kvdisk.worker.device_io import DeviceIo
from kvdisk.worker.routes import OpenFile

logger = logging.getLogger("kvdisk.worker")

_MOST_FILES = 65536
_SPARE_FILES = 64
"""Descriptors that segments leave to the rest of the process, or a quarter where there are few."""
_NO_FILE = frozenset({errno.ENOENT, errno.ENOTDIR})
GIVE_BACK_S = 30.0
"""How often a rank looks for files that others have removed, between what it opens and drops."""


class SegmentFiles(Protocol):
    """Opens and drops what ``SegmentSpec`` and ``HomeSpec`` name.

    Operating failures are a KvdiskError: DeviceError, GeometryMismatch, CorruptRecord, StoreLocked
    or ConfigError. A call that raises leaves things as they were.
    """

    def open_home(self, spec: HomeSpec) -> None:
        """Join the home before any segment; remove this rank's files of unknown segments. Called
        again, it does what it could not do before."""

    def open_segment(self, spec: SegmentSpec) -> OpenFile | None:
        """Make (``spec.create``) or open this rank's file; return it, kept open here. DeviceError
        with ENOENT: it is gone, from a directory that can be read.

        None: there is nothing to open, or it is open already. Where all ranks share a file, the one
        that writes it makes it and has it open from then on; the others open it with a second job.
        Of another home (``spec.source``) a file is opened to read only, and only on a drive that
        the home here is open on. To make one waits up to two seconds for the store.
        """

    def drop_segment(self, spec: SegmentSpec) -> None:
        """Close and remove this rank's file (of another home: close). Gone already is no error."""

    def give_back(self) -> Collection[int]:
        """Free the bytes of this rank's files that others have removed; nothing finds them again.
        Return their segments. Now and then; a guest is looked after, too (``Store.tend``)."""

    def close(self) -> None:
        """Close all files and leave the home. Idempotent."""


class HomeFiles:
    """``SegmentFiles`` of the home that the scheduler owns; ``directories`` None: no NVMe tier.

    A directory that this rank cannot open fails only what is to be opened or made on its drive.
    ``sharers``: so many ranks, one after the other, share the file of each segment
    (``Geometry.ranks_of_shard``). ``platform``: see ``assemble_worker``.
    """

    def __init__(
        self, directories: Directories | None, rank: int, rank_count: int, *, sharers: int = 1, platform: str = ""
    ) -> None:
        assert 0 <= rank < rank_count and rank_count % sharers == 0
        self._directories = directories
        self._platform = platform
        self._sharers = sharers
        self._number = rank % sharers
        """Among them."""
        self._part, self._part_count = rank // sharers, rank_count // sharers
        self._joined: tuple[Store, JoinedHome] | None = None
        self._is_clean = False
        """Whether files of unknown segments were removed from all drives that are open."""
        self._most_files = _MOST_FILES
        self._open: dict[int, segments.SegmentFile] = {}
        self._mine: set[int] = set()
        """Those of them that this rank writes."""
        self._log = QuietLog(time.monotonic, logger)

    def open_home(self, spec: HomeSpec) -> None:
        assert self._directories is not None, "a home was named, and there is no NVMe tier"
        if self._joined is None:
            self._join(spec)
        elif None in self._joined[1].folders:
            self._look_for_drives()
        _, home = self._in_home()

        def clean(part: DriveFolder) -> None:
            # Of a segment that goes nobody else removes the files of ranks that were here before.
            segments.remove_unknown_segments(part, self._part, spec.known_segments, of_all=home.is_spread)

        if self._number == 0 and not self._is_clean:
            home.clean_drives(clean)
        self._is_clean = True

    def _join(self, spec: HomeSpec) -> None:
        assert self._directories is not None
        self._most_files = _allow_files()
        guests = spec.guests
        if guests is not None:
            guests = guests._replace(description={**guests.description, PLATFORM: self._platform})
            if guests.mounted and spec.known_segments:
                check_first_is_mounted(self._directories)
        store = Store.open(self._directories, create=guests is not None, need_all=False)
        self._joined = store, store.join_home(spec.home_id, spec.fingerprint, guests)

    def _look_for_drives(self) -> None:
        """Open the drives of the home that could not be opened before, where that is possible by
        now."""
        assert self._directories is not None
        (_, home), store = self._in_home(), Store.open(self._directories, create=False, need_all=False)
        found = store.folders_again(home)
        if found != home.folders:
            home.folders, self._is_clean = found, False
            self._joined = store, home

    def open_segment(self, spec: SegmentSpec) -> OpenFile | None:
        writes = self._writes(spec)
        if (self._sharers > 1 and spec.create and not writes) or (not spec.create and spec.segment in self._open):
            return None
        assert spec.segment not in self._open
        self._check_files_left(spec.segment)
        (store, home), mine, drive = self._in_home(), (self._part, self._part_count), spec.drive
        if spec.source is not None:
            folder = store.foreign_folder(spec.source, spec.drive)
            drive = home.drive_of(folder)
            theirs = spec._replace(segment=spec.source.segment)
            file = segments.open_segment(folder, theirs, *mine, home.fingerprint, writable=False)
        elif spec.create:
            file = store.make_segment(home, spec, *mine)
        else:
            file = self._open_own(home.folder(spec.drive), spec, home.fingerprint, writable=writes)
        self._open[spec.segment] = file
        if spec.source is None and writes and os.fstat(file.fd).st_nlink:  # not every file system counts names
            self._mine.add(spec.segment)
        return OpenFile(file.fd, spec.slot_bytes, spec.slot_count, drive)

    def _open_own(
        self, folder: DriveFolder, spec: SegmentSpec, fingerprint: bytes, *, writable: bool
    ) -> segments.SegmentFile:
        """Open a file of this rank. One that is missing is gone only where its directory can be
        read: not where a drive was taken away."""
        try:
            return segments.open_segment(folder, spec, self._part, self._part_count, fingerprint, writable=writable)
        except DeviceError as error:
            if error.errno not in _NO_FILE:
                raise
            with device_errors(f"looking for segment {spec.segment} in {folder.segments_path}"):
                if not is_directory(folder.segments_path):
                    raise OSError(errno.ENODEV, os.strerror(errno.ENODEV)) from error
                os.listdir(folder.segments_path)
            raise DeviceError(errno.ENOENT, f"segment {spec.segment} is not in {folder.segments_path}") from error

    def _check_files_left(self, segment: int) -> None:
        """Raise DeviceError (EMFILE) where segments have all descriptors that they may have."""
        with device_errors(f"opening segment {segment}"):
            fd = os.open(os.devnull, os.O_RDONLY)  # the lowest that is free
            os.close(fd)
            if fd >= self._most_files:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def drop_segment(self, spec: SegmentSpec) -> None:
        _, home = self._in_home()
        file = self._open.pop(spec.segment, None)
        self._mine.discard(spec.segment)
        if file is not None:
            file.close()
        if spec.source is None and self._writes(spec):
            segments.drop_segment(home.folder(spec.drive), spec.segment, None if home.is_spread else self._part)

    def give_back(self) -> Collection[int]:
        """See ``SegmentFiles``. The scheduler has them dropped, but not before the next step, and
        an idle engine takes none. What reads meanwhile finds no header: a miss."""
        removed = []
        if self._joined is not None and self._joined[1].is_guest:
            store, home = self._joined
            try:
                store.tend(home)
            except KvdiskError as error:  # it is tried again
                self._log.warn("tend", f"a rank cannot maintain its part of the engine store on this machine: {error}")
        for segment in sorted(self._mine):
            fd = self._open[segment].fd
            status = os.fstat(fd)
            if not status.st_nlink:
                removed.append(segment)
                if status.st_blocks:
                    segments.free_bytes(fd, status.st_size)
        return removed

    def close(self) -> None:
        self._mine.clear()
        for file in self._open.values():
            file.close()
        self._open.clear()
        if self._joined is not None:
            store, home = self._joined
            store.leave(home)
            self._joined = None

    def _writes(self, spec: SegmentSpec) -> bool:
        return spec.segment % self._sharers == self._number

    def _in_home(self) -> tuple[Store, JoinedHome]:
        if self._joined is None:
            raise DeviceError(errno.ENODEV, "the engine store of this segment is not open")
        return self._joined


def _allow_files() -> int:
    """Raise this process's limit of open files: each segment is one while the home is open. Return
    below which descriptors segments may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_FILES if most == resource.RLIM_INFINITY else most - min(_SPARE_FILES, most // 4)


FILE_KINDS = frozenset({JobKind.OPEN_HOME, JobKind.OPEN_SEGMENT, JobKind.DROP_SEGMENT})


class FileJobs:
    """Runs the jobs in order; the mover's thread calls everything.

    ``device_io``: hears of the files that can be used. Before one is dropped no batch there names
    it any more. ``threaded``: False: they run within ``turn``.
    """

    def __init__(self, files: SegmentFiles, device_io: DeviceIo, log: QuietLog, *, threaded: bool) -> None:
        self._files = files
        self._device_io = device_io
        self._log = log
        self._removed: SimpleQueue[Collection[int]] = SimpleQueue()
        """Segments whose files others have removed."""
        self._waiting: deque[Job] = deque()
        self._handed: deque[tuple[Job, Future[OpenFile | None]]] = deque()
        """Those that the thread has, in order."""
        self._tasks: SimpleQueue[tuple[Job, Future[OpenFile | None]] | None] = SimpleQueue()
        self._thread: Thread | None = None
        if threaded:  # a daemon, as a file system that hangs must not hold up the end of the process
            self._thread = Thread(target=self._work, name="kvdisk-files", daemon=True)
            start_thread(self._thread)

    def add(self, job: Job) -> None:
        """Queue a job."""
        assert job.kind in FILE_KINDS
        self._waiting.append(job)

    def is_blocked(self, job: Job) -> bool:
        """Whether a job that has not ended opens or drops a segment of ``job``."""
        pending = {
            other.segment.segment
            for other in (*(handed for handed, _ in self._handed), *self._waiting)
            if other.segment is not None
        }
        return bool(pending) and any(
            move.slots[Tier.NVME].segment in pending for move in job.moves if Tier.NVME in move.slots
        )

    def turn(self) -> list[tuple[Job, Reason | None]]:
        """Start what can start; return the jobs that have ended, and why they failed."""
        ended: list[tuple[Job, Reason | None]] = []
        while True:
            if self._handed and self._handed[0][1].done():
                ended.append(self._end(*self._handed.popleft()))
            elif not self._hand_over():
                return ended

    def take_removed(self) -> set[int]:
        """Return the segments whose files others were found to have removed since the last
        call."""
        found: set[int] = set()
        while not self._removed.empty():
            found.update(self._removed.get())
        return found

    def close(self) -> None:
        """End the thread after its job at hand, and close the files. No batch is under way."""
        for _, task in self._handed:
            task.cancel()
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join()
        for segment in list(self._device_io.open):
            self._device_io.detach(segment)
        self._files.close()

    def _hand_over(self) -> bool:
        """Give the thread one more job; return whether there was one that has not to wait."""
        if not self._waiting:
            return False
        job = self._waiting[0]
        if job.kind is JobKind.DROP_SEGMENT:
            assert job.segment is not None
            # It waits for batches of its segment, and for its opening.
            if self._handed or self._device_io.uses(job.segment.segment):
                return False
            self._device_io.detach(job.segment.segment)
        task: Future[OpenFile | None] = Future()
        self._handed.append((self._waiting.popleft(), task))
        if self._thread is not None:
            self._tasks.put((job, task))
        else:
            self._fulfil(job, task)
        return True

    def _work(self) -> None:
        next_s = time.monotonic() + GIVE_BACK_S
        while True:
            with suppress(Empty):
                handed = self._tasks.get(timeout=max(0.0, next_s - time.monotonic()))
                if handed is None:
                    return
                self._fulfil(*handed)
            if time.monotonic() >= next_s:
                with suppress(OSError):  # it is tried again
                    self._removed.put(self._files.give_back())
                next_s = time.monotonic() + GIVE_BACK_S

    def _fulfil(self, job: Job, task: Future[OpenFile | None]) -> None:
        if task.set_running_or_notify_cancel():
            try:
                task.set_result(self._run(job))
            except BaseException as error:  # it is raised where the result is asked for
                task.set_exception(error)

    def _end(self, job: Job, task: Future[OpenFile | None]) -> tuple[Job, Reason | None]:
        try:
            file = task.result()
        except KvdiskError as error:
            self._log.warn(job.kind.name, f"{job.kind.name} failed: {error}")
            return job, _reason_of(error)
        if file is not None:
            assert job.segment is not None
            self._device_io.attach(job.segment.segment, file)
        return job, None

    def _run(self, job: Job) -> OpenFile | None:
        """Run a job, on the thread; return the file that it opened."""
        if job.kind is JobKind.OPEN_HOME:
            assert job.home is not None
            self._files.open_home(job.home)
            return None
        assert job.segment is not None
        if job.kind is JobKind.OPEN_SEGMENT:
            return self._files.open_segment(job.segment)
        self._files.drop_segment(job.segment)
        return None


def _reason_of(error: KvdiskError) -> Reason:
    if isinstance(error, DeviceError) and error.errno in NO_ROOM:
        return Reason.NO_SPACE
    if isinstance(error, DeviceError) and error.errno == errno.ENOENT:
        return Reason.ABSENT
    return Reason.HEADER if isinstance(error, GeometryMismatch | CorruptRecord) else Reason.IO_ERROR
