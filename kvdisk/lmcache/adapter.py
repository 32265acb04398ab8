# SPDX-License-Identifier: Apache-2.0
"""``L2Adapter``: objects of LMCache's server in a block store.

LMCache: the server has one, for all engines and ranks of a host. Two threads submit tasks and poll
three descriptors: one stores what engines have computed, one looks up and loads. Threads of its
HTTP interface, and of its quotas, delete and ask for usage. What raises in the thread that loads
costs a request its hits, or the thread its life.
"""

from __future__ import annotations

import hashlib
import logging
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, NamedTuple

from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface

from kvdisk.blocks import BlockKey
from kvdisk.errors import EngineLog
from kvdisk.lmcache.models import Models
from kvdisk.lmcache.parameters import parse_parameters
from kvdisk.lmcache.pieces import KINDS, NAME_BYTES, ArenaRows, Layout, layout_of
from kvdisk.lmcache.prompts import Prompts
from kvdisk.lmcache.tasks import Tasks
from kvdisk.lmcache.versions import lmcache_version
from kvdisk.model_identity import vouched_namespace
from kvdisk.shared_store import SharedStore
from kvdisk.store import Get, Presence, Put, Result

logger = logging.getLogger("kvdisk")

FORMAT_VERSION = 1
ROOM_WAIT_S = 5.0
"""How long a store task waits for room that is coming."""
HOLD_S = 30.0
"""How long what was found is held, so that the load finds it as well. LMCache's unlock ends no
hold: another request may have found the same."""
CLOSE_S = 30.0
LOOKUP_THREADS = 4
"""Lookups that may wait for what other stores have, at once."""
LEAST_HASH_BYTES = 16
"""LMCache: its hash of Python's own has 8, too few for a store that outlives the server."""
MOST_SALTS = 1 << 14
"""Salts whose usage is asked for, the last that were seen."""
KEPT = frozenset({Result.DONE, Result.PRESENT, Result.REFUSED})
"""Results that are no failure to LMCache: what admission refuses is none."""
GONE = frozenset({Result.ABSENT, Result.CHECKSUM, Result.HEADER})
"""Results of a load after which a piece is not there any more."""
_UNCLOSED: list[Any] = []
"""Stores that a hanging drive keeps from being closed, and their rows: it may still write to
them."""


class _Object(NamedTuple):
    """One object of a task. ``at``: its place there. ``keys``: of its pieces, from the first on.
    ``rows``: theirs; () in a lookup."""

    at: int
    keys: Sequence[BlockKey]
    rows: Sequence[int] = ()

    @property
    def lead(self) -> BlockKey:
        """The key that a lookup asks for: of the first piece, which comes last in the chain."""
        return self.keys[0]


class L2Adapter(L2AdapterInterface):  # type: ignore[misc] # LMCache has no types
    """An adapter of LMCache's second level, over a store on NVMe: bounded, verified, there after a
    restart.

    A wrong parameter raises ConfigError when the server starts. Afterwards no call raises: what
    fails is not there, or is not stored, and the log says why. An object's memory belongs to kvdisk
    from the submission of a task that names it until the task has ended; each task ends by kvdisk's
    own deadlines, however long its drive hangs. No call waits for the drive but ``delete`` and
    ``close``. LMCache's own eviction stays off: kvdisk keeps to its cap by itself.
    """

    def __init__(self, adapter_params: Any, l1_memory_desc: Any = None) -> None:
        """``adapter_params``: the user's; docs/LMCACHE.md has them. ``l1_memory_desc``: LMCache's
        memory of the first level, which must live until ``close``. Raises ConfigError, StoreLocked,
        DeviceError."""
        super().__init__(max_capacity_bytes=0)
        _join_log()
        version = lmcache_version()
        parameters = parse_parameters(adapter_params)
        self._config = parameters.config
        self._rows = ArenaRows(l1_memory_desc)
        namespace = vouched_namespace("lmcache", {"engine": "lmcache", "format": FORMAT_VERSION})
        self._store = SharedStore.open(self._config, *namespace, KINDS, self._rows.memory)
        self._models = self._start_models(parameters.sources, version)
        self._stores, self._lookups = Tasks[L2StoreResult](), Tasks[Bitmap]()
        self._loads = Tasks[Bitmap]()
        self._prompts = Prompts()
        self._salts: dict[str, None] = {}
        self._layouts: dict[Any, Layout] = {}
        self._pool = ThreadPoolExecutor(LOOKUP_THREADS, "kvdisk-lookup")
        self._log = EngineLog("LMCache", logger)

    def _start_models(self, sources: Any, version: str) -> Models:
        try:
            return Models(sources, {"engine": "lmcache", "version": version, "format": FORMAT_VERSION})
        except BaseException:
            self._store.close()
            raise

    def get_store_event_fd(self) -> int:
        """Return the descriptor that is readable once a store task has ended."""
        return self._stores.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return the descriptor that is readable once a lookup has ended."""
        return self._lookups.fileno()

    def get_load_event_fd(self) -> int:
        """Return the descriptor that is readable once a load has ended."""
        return self._loads.fileno()

    # -- store -------------------------------------------------------------------------------------

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Store objects; return the task's number."""
        failed = L2StoreResult(False, 0)
        return self._submit(self._stores, failed, "submit_store_task", lambda task: self._put(task, keys, objects))

    def _put(self, task: int, keys: Sequence[Any], memory: Sequence[Any]) -> None:
        found = list(self._placed(keys, memory))
        blocks = list[Put]()
        for each in found:
            before = self._prompts.before(each.lead)
            for key, row in zip(reversed(each.keys), reversed(each.rows), strict=True):
                blocks.append(Put(key, before, row, keys[each.at].cache_salt))
                before = key
        sizes = [int(each.get_size()) for each in memory]
        future, failed = self._store.put(blocks, ROOM_WAIT_S), L2StoreResult(False, 0)
        self._when(future, self._stores, task, failed, lambda results: self._end_put(keys, sizes, found, results))

    def _end_put(
        self, keys: Sequence[Any], sizes: Sequence[int], found: Sequence[_Object], results: Iterator[Result]
    ) -> L2StoreResult:
        """Return what a store task has come to. What was kept in part is not found: its lead
        goes."""
        is_fine, stored, in_part = True, list[int](), list[BlockKey]()
        for each in found:
            ended = {next(results) for _ in each.keys}
            is_fine &= ended <= KEPT
            if Result.DONE in ended and ended <= {Result.DONE, Result.PRESENT}:
                stored.append(each.at)
            elif len(ended) > 1:
                in_part.append(each.lead)
        if in_part:
            self._store.delete(in_part)
        if stored:
            self._notify_keys_stored([keys[at] for at in stored], [sizes[at] for at in stored])
        return L2StoreResult(is_fine, sum(sizes[at] for at in stored) if is_fine else 0)

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        """Return the results of the store tasks that have ended since the last call."""
        return self._stores.take_all()

    # -- lookup ------------------------------------------------------------------------------------

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: dict[int, Any]) -> int:
        """Look objects up, and hold what is there for a while; return the task's number. Counts as
        one request."""
        return self._submit(
            self._lookups,
            Bitmap(len(keys)),
            "submit_lookup_and_lock_task",
            lambda task: self._look_up(task, keys, group_layout_descs),
        )

    def _look_up(self, task: int, keys: Sequence[Any], descs: dict[int, Any]) -> None:
        found = list[_Object]()
        for at, key in enumerate(keys):
            desc = descs.get(key.object_group_id)
            layout = None if desc is None else self._layout(desc.shapes, desc.dtypes)
            name = self._name_of(key)
            if layout is not None and name is not None and layout.pieces:
                found.append(_Object(at, layout.keys(name)))
        for row in _rows_of_prompt(keys, found):
            self._prompts.note(each.lead for each in row)
        self._note_salts(keys)
        self._store.reached([key for each in found for key in reversed(each.keys)])
        if self._store.presence([each.lead for each in found]).count(Presence.READY) == len(found):
            self._lookups.end(task, self._held(len(keys), found))
        else:
            self._pool.submit(self._find, task, len(keys), found)

    def _find(self, task: int, count: int, found: Sequence[_Object]) -> None:
        """End a lookup after others were asked: of this host, or of the remote store."""
        try:
            self._store.find([key for each in found for key in reversed(each.keys)])
            answer = self._held(count, found)
        except Exception as error:
            self._log.error("a lookup", error)
            answer = Bitmap(count)
        self._lookups.end(task, answer)

    def _held(self, count: int, found: Sequence[_Object]) -> Bitmap:
        """Return which objects are there, and hold these."""
        presence = self._store.presence([each.lead for each in found])
        there = [each for each, ready in zip(found, presence, strict=True) if ready == Presence.READY]
        self._store.hold([each.lead for each in there], HOLD_S)
        return _bitmap(count, (each.at for each in there))

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """Return which objects are there, once; None: the lookup has not ended."""
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Do nothing: a hold ends by itself."""

    # -- load --------------------------------------------------------------------------------------

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Load objects into their memory; return the task's number. What does not come may hold
        anything."""
        nothing = Bitmap(len(keys))
        return self._submit(self._loads, nothing, "submit_load_task", lambda task: self._get(task, keys, objects))

    def _get(self, task: int, keys: Sequence[Any], memory: Sequence[Any]) -> None:
        found = list(self._placed(keys, memory))
        blocks = [Get(key, row) for each in found for key, row in zip(each.keys, each.rows, strict=True)]
        future, nothing = self._store.get(blocks), Bitmap(len(keys))
        self._when(future, self._loads, task, nothing, lambda results: self._end_get(keys, found, results))

    def _end_get(self, keys: Sequence[Any], found: Sequence[_Object], results: Iterator[Result]) -> Bitmap:
        """Return what has come. An object of which a piece is gone is not found any more."""
        loaded, broken = list[int](), list[BlockKey]()
        for each in found:
            ended = {next(results) for _ in each.keys}
            if ended == {Result.DONE}:
                loaded.append(each.at)
            elif ended & GONE:
                broken.append(each.lead)
        if broken:
            self._store.delete(broken)
        if loaded:
            self._notify_keys_accessed([keys[at] for at in loaded])
        return _bitmap(len(keys), loaded)

    def query_load_result(self, task_id: int) -> Any:
        """Return which objects have come, once; None: the load has not ended."""
        return self._loads.take(task_id)

    # -- deletion and usage ------------------------------------------------------------------------

    def delete(self, keys: list[Any]) -> None:
        """Delete objects for good. Waits for the drive, by kvdisk's deadlines."""
        try:
            names = {name: key for key in keys if (name := self._name_of(key)) is not None}
            there = self._store.keys()
            pieces = [key for key in there if key[:NAME_BYTES] in names]
            results = self._store.delete(pieces).result()
            kept = {key[:NAME_BYTES] for key, result in zip(pieces, results, strict=True) if result not in _DELETED}
            gone = [key for name, key in names.items() if name not in kept]
            # LMCache: its own sums have nothing of what an earlier server has stored
            self._notify_keys_deleted(gone, [0] * len(gone))
        except Exception as error:
            self._log.error("delete", error)

    def get_usage(self) -> Any:
        """Return the bytes that objects take, by salt: of those that were seen since the start."""
        try:
            usage = self._store.usage(list(self._salts))
        except Exception as error:
            self._log.error("get_usage", error)
            return AdapterUsage(0, self._config.nvme_bytes or 0)
        by_salt = MappingProxyType({salt: size for salt, size in usage.by_salt.items() if size > 0})
        return AdapterUsage(usage.total_bytes, self._config.nvme_bytes or 0, by_salt)

    def report_status(self) -> dict[str, Any]:
        """Return what LMCache's status page shows of it."""
        try:
            models, figures = self._models.words(), self._store.figures()
        except Exception as error:
            self._log.error("report_status", error)
            models, figures = {}, {}
        is_healthy = not self._store.is_off and "off" not in models.values()
        return {"is_healthy": is_healthy, "type": "kvdisk", "models": models, "figures": figures}

    def close(self) -> None:
        """Finish what was asked for, commit, and give the store back. Waits for the drive, for 30 s
        at most. Idempotent."""
        self._models.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        if not self._store.close(CLOSE_S):
            _UNCLOSED.append((self._store, self._rows))
            logger.warning("kvdisk leaves a store open: its drive has not answered for %.0f s.", CLOSE_S)
        for tasks in (self._stores, self._lookups, self._loads):
            tasks.close()

    # -- tasks -------------------------------------------------------------------------------------

    def _submit(self, tasks: Tasks[Any], failed: Any, call: str, begin: Callable[[int], None]) -> int:
        """Begin a task; where that raises, it ends as ``failed``."""
        task = tasks.begin()
        try:
            begin(task)
        except Exception as error:
            self._log.error(call, error)
            tasks.end(task, failed)
        return task

    def _when(
        self, future: Any, tasks: Tasks[Any], task: int, failed: Any, answer: Callable[[Iterator[Result]], Any]
    ) -> None:
        """End a task with what its job has come to; as ``failed`` where that raises, in our code or
        in that of who listens."""

        def end(ended: Any) -> None:
            try:
                found = answer(iter(ended.result()))
            except Exception as error:
                self._log.error("the end of a task", error)
                found = failed
            tasks.end(task, found)

        future.add_done_callback(end)

    # -- names and places --------------------------------------------------------------------------

    def _name_of(self, key: Any) -> bytes | None:
        """Return the name of an object: 32 bytes that stand for its model's weights, its part of
        the model, its tenant and its tokens. None: it is not kept."""
        fingerprint = self._models.fingerprint_of(key.model_name)
        if fingerprint is None:
            if not self._models.is_named(key.model_name):
                self._log.warn("model", f'nothing is kept of {key.model_name!r}: name it in "models" of adapter_params')
            return None
        if len(key.chunk_hash) < LEAST_HASH_BYTES:
            self._log.warn("hash", "nothing is kept of chunks with short hashes: use --hash-algorithm blake3")
            return None
        salt = key.cache_salt.encode()
        part = struct.pack(">QQQ", key.kv_rank, key.object_group_id, len(salt))
        return hashlib.sha256(fingerprint + part + salt + key.chunk_hash).digest()

    def _layout(self, shapes: Sequence[Any], dtypes: Sequence[Any]) -> Layout:
        described = (tuple(map(tuple, shapes)), tuple(dtypes))
        if (layout := self._layouts.get(described)) is None:
            layout = self._layouts[described] = layout_of(shapes, dtypes, self._rows.pitch)
        return layout

    def _placed(self, keys: Sequence[Any], memory: Sequence[Any]) -> Iterator[_Object]:
        """Yield those objects that are kept, each with its rows."""
        for at, (key, each) in enumerate(zip(keys, memory, strict=True)):
            name = self._name_of(key)
            if name is None:
                continue
            # LMCache: an object of one tensor may say so in either way
            layout = self._layout(each.meta.shapes or [each.meta.shape], each.meta.dtypes or [each.meta.dtype])
            if layout.size_bytes != int(each.get_size()):
                self._log.warn("serde", "nothing is kept of objects that are packed by a serde: leave it out")
            elif not layout.pieces:
                self._log.warn("size", f"nothing is kept of objects of {layout.size_bytes} bytes: they are too small")
            elif (rows := self._rows.rows_of(int(each.data_ptr), layout)) is None:
                self._log.warn("place", "nothing is kept of objects outside of LMCache's main memory")
            else:
                yield _Object(at, layout.keys(name), rows)

    def _note_salts(self, keys: Sequence[Any]) -> None:
        for salt in {key.cache_salt for key in keys}:
            self._salts.pop(salt, None)
            self._salts[salt] = None
        while len(self._salts) > MOST_SALTS:
            self._salts.pop(next(iter(self._salts)), None)


def _join_log() -> None:
    """Send kvdisk's log lines where LMCache's go, at its level, unless somebody has said where they
    go. LMCache: each of its loggers has handlers of its own, and others have none."""
    ours = logging.getLogger("kvdisk")
    if not ours.hasHandlers():
        theirs = init_logger("lmcache.kvdisk")
        ours.handlers.extend(theirs.handlers)
        if ours.level == logging.NOTSET:
            ours.setLevel(theirs.level)


_DELETED = frozenset({Result.DONE, Result.ABSENT})


def _bitmap(count: int, places: Iterable[int]) -> Bitmap:
    bitmap = Bitmap(count)
    for at in places:
        bitmap.set(at)
    return bitmap


def _rows_of_prompt(keys: Sequence[Any], found: Sequence[_Object]) -> Iterable[list[_Object]]:
    """Return the objects of each part of the model that follow each other in a prompt, in its
    order."""
    rows = dict[Any, list[_Object]]()
    for each in found:
        key = keys[each.at]
        rows.setdefault((key.kv_rank, key.object_group_id), []).append(each)
    return rows.values()
