# SPDX-License-Identifier: Apache-2.0
"""Requests with a LoRA adapter: their blocks are known by the adapter's path and the content of its
files, not by its name, as in vLLM's hashes.

The scheduler's step never waits for these files: a thread looks at them. A request waits for a look
that began after it arrived. The results of its stores wait for a look that began after they came.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvdisk.blocks import JobId
from kvdisk.connector.weights import changes_show, content_digest
from kvdisk.errors import KvdiskError, NoThread, QuietLog, printable, start_thread
from kvdisk.messages import JobKind, JobResult, Plan, Report

if TYPE_CHECKING:
    from vllm.config import LoRAConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.kv_cache_utils import BlockHash
    from vllm.v1.request import Request

logger = logging.getLogger("kvdisk.connector")

LOOK_WAIT_S = 1.0
"""Seconds that a request waits for a look. A small adapter is read in 10 ms and a status in 0.1 ms,
but a busy machine takes many times as long."""
CHECK_WAIT_S = 5.0
"""Seconds that the results of stores wait for a look."""
_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""vLLM: its workers load the first of these that is there."""
_FILES_CLOCK = 5
"""CLOCK_REALTIME_COARSE, by which Linux sets the times of files: some ms behind the real time."""


class Look(NamedTuple):
    """What a look found. ``began_s``: by ``time.monotonic``. ``content``: None where it is not
    known; ``problem`` says why. ``for_good``: that does not change until the engine starts
    again."""

    began_s: float
    content: str | None
    problem: str = ""
    for_good: bool = False


class Status(NamedTuple):
    """The status of a file, directory or link. ``identity``: stays the same while its content does.
    ``changed_ns``: when anything of it last changed, by the file system."""

    path: Path
    identity: tuple[int, ...]
    changed_ns: int


class Looks:
    """Looks at adapters' files, on a thread that begins with the first question. One thread asks.

    Workers read an adapter when they like, and again when they had to drop it. So its content is
    known only while nothing of it has changed since this engine began: then whatever they have read
    is what is there. Where only a change time has moved, as after ``chmod``, the content is read
    again; at each look where files may change in silence.
    """

    def __init__(self) -> None:
        self._began_ns = time.clock_gettime_ns(_FILES_CLOCK)
        self._known: dict[str, tuple[str, list[Status]]] = {}
        self._found: dict[str, Look] = {}
        self._asked: dict[str, float] = {}
        """When each path was last asked for, until a look has begun since."""
        self._questions: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def since(self, path: str, since_s: float) -> Look | None:
        """Return a look at a path that began after ``since_s``. None: there is none yet, and one
        will come. A look with ``for_good`` stays valid."""
        found = self._found.get(path)
        if found is not None and (found.began_s >= since_s or found.for_good):
            return found
        if self._asked.get(path, -1.0) < since_s:
            self._asked[path] = time.monotonic()
            self._questions.put(path)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="kvdisk-adapters", daemon=True)
                with suppress(NoThread):  # then the files do not answer in time, and the next request tries again
                    start_thread(thread)
                    self._thread = thread
        return None

    def close(self) -> None:
        """Have the thread end, without waiting for it: it may hang in a file system."""
        self._questions.put(None)

    def _run(self) -> None:
        while (path := self._questions.get()) is not None:
            self._found[path] = self._look(path, time.monotonic())

    def _look(self, path: str, now_s: float) -> Look:
        try:
            return self._try(path, now_s)
        except (OSError, RuntimeError, ValueError, KvdiskError) as error:
            return Look(now_s, None, str(error))
        except Exception as error:
            logger.exception("kvdisk has a bug in how it reads adapters")
            return Look(now_s, None, str(error), for_good=True)

    def _try(self, path: str, now_s: float) -> Look:
        """Look once. Raises OSError, RuntimeError, ValueError, KvdiskError: the next look may
        succeed."""
        folder = Path(path).expanduser().absolute()
        weights = next((file for name in _WEIGHTS if (file := folder / name).is_file()), None)
        if weights is None:
            raise ValueError(f"{folder} is no directory with its files")
        files = [folder / _CONFIG, weights]
        content, before = self._known.get(path, ("", []))
        read = ""
        moved = [each.changed_ns for each in _statuses(folder, files)] != [each.changed_ns for each in before]
        if moved or not changes_show(folder):
            read = content_digest(files)
        # Asked last, so that it holds for what was read.
        now = _statuses(folder, files)
        if before:
            same = (read or content) == content and [each[:2] for each in now] == [each[:2] for each in before]
        else:
            same = max(each.changed_ns for each in now) < self._began_ns and not _is_moved(folder, self._began_ns)
        if not same:
            return Look(now_s, None, f"{folder} has changed since this engine began, until the next start", True)
        if before and moved:
            logger.info("kvdisk: the change times of %s are new, and its bytes are the same.", printable(folder))
        if read or not before:
            self._known[path] = (read, now)
        return Look(now_s, read or content)


def _is_moved(folder: Path, since_ns: int) -> bool:
    """Return whether a directory above has another name since then, as far as it shows: its change
    time has moved, and nothing has come into it or left it."""
    above = [parent.stat() for parent in {*folder.parents, *folder.resolve().parents}]
    return any(each.st_mtime_ns < since_ns <= each.st_ctime_ns for each in above)


def _statuses(folder: Path, files: list[Path]) -> list[Status]:
    """Return the status of an adapter's directory, of its files, and of the links that lead
    there."""
    found = []
    for path in (folder, *files):
        found += [_status_of(link, link.lstat()) for link in _links(path)]
        found.append(_status_of(path, path.stat()))
    return found


def _status_of(path: Path, stat: os.stat_result) -> Status:
    # Other files that come into a directory, or leave it, are not the adapter's.
    at = () if path.is_dir() and not path.is_symlink() else (stat.st_size, stat.st_mtime_ns)
    return Status(path, (stat.st_dev, stat.st_ino, *at), stat.st_ctime_ns)


def _links(path: Path) -> Iterator[Path]:
    """Yield the links that lead to a path."""
    for step in (*path.parents, path):
        if step.is_symlink():
            yield step
            yield from _links(step.parent / step.readlink())


class Adapters:
    """Knows requests' adapters, and holds back the results of stores until it is sure. Scheduler's
    thread only.

    A request is *unsure* from the time when it is followed until a look at its adapter that began
    after the request ended: the workers may have read other files than those that its hashes were
    made of. The results of stores are held back until a look that began after them. Where an
    adapter has changed by then, or is not known in time, its requests are stale: all stores under
    way have to fail, and nothing is known by the requests' hashes from then on.
    """

    def __init__(self, settings: LoRAConfig | None) -> None:
        self._settings = settings
        self._looks = Looks()
        self._path_of: dict[int, tuple[str, bool] | None] = {}
        """The path that each of vLLM's numbers stands for, and whether its weights are read as 3D;
        None where it has stood for two: vLLM does not read the second, or reads it in place of the
        first, whose requests go on with it."""
        self._new: dict[str, tuple[Request, float]] = {}
        self._unsure: dict[str, tuple[Request, float | None]] = {}
        """The requests that are followed, and when they ended; None while they live."""
        self._stores: set[JobId] = set()
        """The stores that were planned while a request was unsure, and are not settled yet."""
        self._held: list[tuple[float, dict[JobId, JobResult]]] = []
        self.void: set[bytes] = set()
        """The hashes of blocks whose content is not known."""
        self._log = QuietLog(time.monotonic, logger)

    def arrived(self, request: Request, now: float) -> None:
        """Ask for the content of a new request's adapter: see ``take_known``."""
        adapter = request.lora_request
        self.named(adapter)
        self._new[request.request_id] = (request, now)
        self._looks.since(adapter.lora_path, now)

    def named(self, adapter: LoRARequest) -> None:
        """Take note of the path that a number stands for. A request of it may be running."""
        asked = (adapter.lora_path, adapter.is_3d_lora_weight)
        if self._path_of.setdefault(adapter.lora_int_id, asked) != asked:
            self._path_of[adapter.lora_int_id] = None

    def waits(self, request_id: str) -> bool:
        """Return whether the content of a request's adapter is not known yet."""
        return request_id in self._new

    @property
    def any(self) -> bool:
        """Whether adapters are asked for, or results held back for them."""
        return bool(self._new or self._unsure or self._held)

    def take_known(self, now: float) -> list[Request]:
        """Return the requests whose adapters have become known, with their hashes made anew. The
        others wait, ``LOOK_WAIT_S`` at most, or are not served from now on."""
        known = []
        for request, since_s in list(self._new.values()):
            adapter = request.lora_request
            look = self._looks.since(adapter.lora_path, since_s)
            if look is None and now - since_s < LOOK_WAIT_S:
                continue
            del self._new[request.request_id]
            content = self._content(request, look)
            if content is None or look is None:
                continue
            assert self._settings is not None, "vLLM takes no adapter without its settings"
            # With its path: another request must not find in the engine's cache what this one is
            # just computing.
            settings = f"{adapter.is_3d_lora_weight} {self._settings.compute_hash()}"
            hash_by_content(request, f"{adapter.lora_path} {content} {settings}")
            self._unsure[request.request_id] = (request, None)
            known.append(request)
        return known

    def _content(self, request: Request, look: Look | None) -> str | None:
        """Return the content of a request's adapter, as a look found it. None: the request is not
        to be served, and the log says why."""
        adapter = request.lora_request
        if self._path_of[adapter.lora_int_id] is None:
            cause, why = (
                "number",
                f"its number, {adapter.lora_int_id}, has stood for two paths or layouts, until the next start",
            )
        elif look is None:
            cause, why = "silence", "its files did not answer in time"
        elif look.content is None:
            cause, why = "adapter", look.problem
        else:
            return look.content
        self._log.warn(
            cause, f"kvdisk neither loads nor stores for requests with the adapter {adapter.lora_name}: {why}"
        )
        return None

    def ended(self, request_id: str, now: float) -> None:
        """Take note that a request has ended."""
        self._new.pop(request_id, None)
        if request_id in self._unsure:
            request, _ = self._unsure[request_id]
            self._unsure[request_id] = (request, now)
            self._looks.since(request.lora_request.lora_path, now)

    # -- what was stored -----------------------------------------------------------------------

    def note(self, plan: Plan) -> None:
        """Take note of the stores of a plan, whichever request's blocks they store."""
        if self._unsure:
            self._stores.update(job.id for job in plan.jobs if job.kind is JobKind.STORE)

    def hold(self, report: Report, now: float) -> None:
        """Take the results of such stores out of a report. When they come, the step that has
        computed their blocks is over on every rank."""
        if not self._stores:
            return
        held = {job_id: report.results.pop(job_id) for job_id in self._stores & report.results.keys()}
        if held:
            self._held.append((now, held))

    def check(self, now: float) -> tuple[list[Request], list[Report]]:
        """Return the requests that have become stale, and the reports whose results need not wait
        any longer: all of them where there are stale requests."""
        stale = []
        for request, end_s in list(self._unsure.values()):
            since_s = end_s if end_s is not None or not self._held else self._held[0][0]
            if since_s is None:
                continue
            look = self._looks.since(request.lora_request.lora_path, since_s)
            if look is None and now - since_s < CHECK_WAIT_S:
                continue
            if self._content(request, look) is None:
                stale.append(request)
                self.void.update(request.block_hashes)
                hash_by_content(request, f"nobody else's: {request.request_id} {now}")
            if end_s is not None or request in stale:
                del self._unsure[request.request_id]
        paths = {request.lora_request.lora_path for request, _ in self._unsure.values()}
        free = []
        while self._held:
            since_s, results = self._held[0]
            looks = [self._looks.since(path, since_s) for path in paths]
            if not stale and not all(look is not None and look.content is not None for look in looks):
                break
            del self._held[0]
            self._stores -= results.keys()
            free.append(Report(results=results))
        if not self._unsure and not self._held:
            self._stores.clear()
        return stale, free

    def close(self) -> None:
        """End the thread, unless it hangs."""
        self._looks.close()


def hash_by_content(request: Request, content: str) -> None:
    """Hash a request's blocks anew, and those that are added later, with ``content`` in place of
    its adapter's name and path. vLLM's prefix cache knows the request's blocks by these hashes from
    now on.
    """
    hasher, known = request._block_hasher, copy(request.lora_request)
    hasher = getattr(hasher, "vllm_hasher", hasher)
    known.lora_name, known.lora_path = "", content

    def hash_blocks(changed: Request) -> list[BlockHash]:
        adapter, changed.lora_request = changed.lora_request, known
        try:
            hashes: list[BlockHash] = hasher(changed)
        finally:
            changed.lora_request = adapter
        return hashes

    hash_blocks.vllm_hasher = hasher  # type: ignore[attr-defined]  # for the next time
    request._block_hasher = hash_blocks
    request.block_hashes.clear()
    request.update_block_hashes()
