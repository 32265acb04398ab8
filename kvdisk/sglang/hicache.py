# SPDX-License-Identifier: Apache-2.0
"""``HiCache``: pages of SGLang's hierarchical cache in a block store.

SGLang: each rank has one, in its scheduler's process. Three threads call it, with up to 128 pages,
or as many as a prompt has: one looks up, one loads, one stores. The scheduler attaches, clears and
detaches. What a rank finds or loads, SGLang takes the minimum of over all ranks.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import starmap
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolName, PoolTransferResult

from kvdisk.blocks import BlockKey, make_block_key
from kvdisk.config import Config
from kvdisk.errors import ConfigError, EngineLog, KvdiskError
from kvdisk.mover_process import MoverProcess
from kvdisk.sglang import weight_updates
from kvdisk.sglang.host_rows import STAGING_PAGES, PoolRows, StagingRows
from kvdisk.sglang.identity import identity_of, layout_facts
from kvdisk.sglang.refusals import refuse_arguments, refuse_pool, stores_of
from kvdisk.sglang.storage_stats import StorageStats
from kvdisk.shared_store import SharedStore
from kvdisk.store import BlockKind, BlockStore, Get, Put, Result

logger = logging.getLogger("kvdisk")

IO_DEADLINE_S = 5.0
"""For ``io_deadline_s`` where the user says nothing. SGLang waits 10 s for its threads when it
detaches, and 1 s and a quarter for each 1,024 tokens for a prefetch."""
LOOKUP_WAIT_S = 1.0
"""For ``lookup_wait_s``, likewise."""
ROOM_WAIT_S = 4.0
"""How long a batch waits for room that is coming."""
HOLD_S = 10.0
"""How long what was found is held, so that the load finds it as well."""
CLOSE_S = 9.0
KEPT = frozenset({Result.DONE, Result.PRESENT, Result.REFUSED})
"""Results after which SGLang shall go on with the pages behind. What admission refuses is no
failure."""

_P = ParamSpec("_P")
_R = TypeVar("_R")
_UNCLOSED: list[Any] = []
"""Rows of stores that a hanging drive keeps from being closed: it may still write to them."""


def _never_raises(
    failed: Callable[..., _R],
) -> Callable[[Callable[Concatenate[HiCache, _P], _R]], Callable[Concatenate[HiCache, _P], _R]]:
    """Have a call return what ``failed`` makes of its arguments where it would raise. SGLang: some
    of its threads end for the life of the process with an exception."""

    def wrap(call: Callable[Concatenate[HiCache, _P], _R]) -> Callable[Concatenate[HiCache, _P], _R]:
        @functools.wraps(call)
        def called(self: HiCache, /, *arguments: _P.args, **more: _P.kwargs) -> _R:
            try:
                return call(self, *arguments, **more)
            except Exception as error:
                self.engine_log.error(call.__name__, error)
                return failed(*arguments, **more)

        return called

    return wrap


def _nothing(keys: Sequence[str], *_: Any, **__: Any) -> list[bool]:
    return [False] * len(keys)


def _no_tensor(keys: Sequence[str], *_: Any, **__: Any) -> list[torch.Tensor | None]:
    return [None] * len(keys)


class HiCache(HiCacheStorage):  # type: ignore[misc] # SGLang has no types
    """A storage backend of SGLang's, over a store on NVMe: bounded, verified, there after a
    restart.

    A wrong setting, and a model or deployment that kvdisk does not serve, raises ConfigError when
    the backend is attached. Afterwards no call raises but ``clear``: what fails is not there, or is
    not stored, and the log says why. A page of the host pool belongs to kvdisk while a call that
    names it has not returned. Each call returns by kvdisk's own deadlines, however long its drive
    hangs.
    """

    def __init__(self, storage_config: Any, _arguments: Any = None) -> None:
        """``storage_config``: SGLang's; its ``extra_config`` has kvdisk's settings under
        ``"kvdisk"``. Raises ConfigError."""
        extra = storage_config.extra_config or {}
        settings = dict(extra.get("kvdisk") or {})
        self._weights_name = settings.pop("weights_name", None)
        if self._weights_name is not None and not (isinstance(self._weights_name, str) and self._weights_name):
            raise ConfigError('"weights_name" is a text that names the weights.')
        if not settings.get("store_dirs"):
            raise ConfigError(
                'kvdisk needs {"kvdisk": {"store_dirs": ..., "nvme_bytes": ...}} in'
                " --hicache-storage-backend-extra-config."
            )
        refuse_arguments(storage_config)
        weight_updates.watch()
        config = Config.from_mapping({"io_deadline_s": IO_DEADLINE_S, "lookup_wait_s": LOOKUP_WAIT_S} | settings)
        self._config = _share(config, stores_of(storage_config, is_remote=config.remote is not None))
        self._storage = storage_config
        self._moves_rows = bool(extra.get("interface_v1", 0))
        self._rows: PoolRows | StagingRows | None = None
        self._store: SharedStore | None = None
        self._stats = StorageStats(is_on=bool(storage_config.enable_storage_metrics))
        self.engine_log = EngineLog("SGLang", logger)
        self._updates = weight_updates.updates()

    # -- pools -------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the store over SGLang's host pool. Waits for the drive. Raises ConfigError,
        StoreLocked, DeviceError."""
        if self._store is not None:
            raise ConfigError("kvdisk has a host pool already; detach the storage backend first.")
        if self._updates and self._weights_name is None:
            raise ConfigError(
                "Weights of this server were updated, so kvdisk cannot tell which they are: restart it, or name them"
                ' with "weights_name".'
            )
        refuse_pool(mem_pool_host)
        super().register_mem_pool_host(mem_pool_host)
        rows = PoolRows(mem_pool_host) if self._moves_rows else StagingRows(mem_pool_host)
        layout = layout_facts(self._storage, mem_pool_host, rows)
        identity = identity_of(layout, self._weights_name)
        is_shared = self._moves_rows and getattr(mem_pool_host, "fd", None) is not None
        tokens = max(1, rows.page_size // rows.parts)
        kinds = [BlockKind(rows.payload_bytes, tokens, element_bytes=rows.element_bytes)]
        mover = MoverProcess if is_shared else None
        store = BlockStore.open_for(self._config, identity, kinds, rows.memory, mover)
        self._store, self._rows = SharedStore(store, self._config.lookup_wait_s), rows

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take note of the one host pool once more. Raises ConfigError for any other: a model with
        several is not served."""
        if host_pool_name != PoolName.KV or host_pool is not getattr(self, "mem_pool_host", None):
            self.close()
            raise ConfigError(
                f"kvdisk keeps models with one host pool, and this one has another for {host_pool_name}: leave out"
                " kvdisk, or what needs that pool."
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def close(self) -> None:
        """Finish what was asked for, commit, and give the store back. Waits for the drive, for 9 s
        at most. Idempotent."""
        store, self._store = self._store, None
        if store is not None and not store.close(CLOSE_S):
            _UNCLOSED.append((store, self._rows))
            logger.warning("kvdisk leaves a store open: its drive has not answered for %.0f s.", CLOSE_S)

    # -- lookups -----------------------------------------------------------------------------------

    @_never_raises(lambda *_, **__: 0)
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return how many pages from the first on are there, and hold them for a while. Counts as a
        request for all of them."""
        store = self._open_store()
        if store is None or not keys:
            return 0
        blocks = self._blocks(keys)
        store.reached([*self._prefix(extra_info), *blocks])
        found = store.longest_prefix(blocks, HOLD_S)
        if found < len(blocks):  # others of this host, or of the remote store, may have more
            store.find(blocks)
            found = store.longest_prefix(blocks, HOLD_S)
        return found // self._parts

    def exists(self, key: str) -> bool:
        """Return whether a page is there."""
        return self.batch_exists([key]) == 1

    @_never_raises(lambda *_, **__: PoolTransferResult(0, {}, []))
    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """Return what is there of pages that are in several pools: nothing, as there is one."""
        pages = 0 if pool_transfers else self.batch_exists(keys, extra_info)
        return PoolTransferResult(pages, {PoolName.KV: pages} if pages else {}, list(range(1, pages + 1)))

    # -- pages in the pool -------------------------------------------------------------------------

    @_never_raises(_nothing)
    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: Any,
        extra_info: Any = None,  # noqa: ARG002 - of SGLang's interface, like others below
    ) -> list[bool]:
        """Load pages into the host pool; return of each whether it is there now. One that is not
        may hold anything."""
        store, rows = self._open_store(), self._rows
        if store is None or not isinstance(rows, PoolRows) or not self._fits(keys, host_indices):
            return _nothing(keys)
        began_s = time.monotonic()
        jobs = list(starmap(Get, zip(self._blocks(keys), rows.rows_of(host_indices), strict=True)))
        loaded = self._pages(store.get(jobs).result(), frozenset({Result.DONE}))
        self._stats.note_loaded(loaded.count(True), self._page_bytes, time.monotonic() - began_s)
        return loaded

    @_never_raises(_nothing)
    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store pages of the host pool; return of each whether SGLang shall go on. That is so for
        one that admission refuses, too."""
        store, rows = self._open_store(), self._rows
        if store is None or not isinstance(rows, PoolRows) or not self._fits(keys, host_indices):
            return _nothing(keys)
        return self._put(store, keys, rows.rows_of(host_indices), self._last_of_prefix(extra_info))

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:  # noqa: ARG002
        """Return that nothing came, pool by pool: the one pool's pages come by ``batch_get_v1``."""
        return {each.name: _nothing(each.keys or ()) for each in transfers}

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:  # noqa: ARG002
        """Return that nothing was stored, likewise."""
        return {each.name: _nothing(each.keys or ()) for each in transfers}

    # -- pages as tensors --------------------------------------------------------------------------

    @_never_raises(_no_tensor)
    def batch_get(
        self,
        keys: list[str],
        target_locations: Any = None,
        target_sizes: Any = None,  # noqa: ARG002
    ) -> list[torch.Tensor | None]:
        """Load pages into tensors; return these, or None for what is not there."""
        store, rows = self._open_store(), self._rows
        if store is None or not isinstance(rows, StagingRows) or len(target_locations or ()) != len(keys):
            return _no_tensor(keys)
        began_s, found = time.monotonic(), list[torch.Tensor | None]()
        for start in range(0, len(keys), STAGING_PAGES):
            some = keys[start : start + STAGING_PAGES]
            with rows.getting:
                places = rows.rows_to_get(len(some))
                results = store.get(list(starmap(Get, zip(self._blocks(some), places, strict=True)))).result()
                for row, target, result in zip(places, target_locations[start:], results, strict=False):
                    if result is Result.DONE:
                        rows.take(row, target)
                    found.append(target if result is Result.DONE else None)
        self._stats.note_loaded(len(found) - found.count(None), self._page_bytes, time.monotonic() - began_s)
        return found

    @_never_raises(lambda *_, **__: False)
    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,  # noqa: ARG002
        target_sizes: Any = None,  # noqa: ARG002
    ) -> bool:
        """Store pages that are tensors; return whether SGLang shall go on."""
        store, rows = self._open_store(), self._rows
        if store is None or not isinstance(rows, StagingRows) or len(values or ()) != len(keys):
            return False
        before: BlockKey | None = None
        for start in range(0, len(keys), STAGING_PAGES):
            some = keys[start : start + STAGING_PAGES]
            with rows.putting:
                if not all(self._put(store, some, rows.fill(values[start : start + STAGING_PAGES]), before)):
                    return False
            before = self._blocks(some)[-1]
        return True

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:  # noqa: ARG002
        """Load a page into a tensor; return it, or None."""
        return self.batch_get([key], [target_location])[0]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:  # noqa: ARG002
        """Store a page that is a tensor; return whether SGLang shall go on."""
        return self.batch_set([key], [value])

    # -- the whole store ---------------------------------------------------------------------------

    def clear(self) -> bool:
        """Drop every page of this rank for good. Raises KvdiskError where that did not succeed, as
        SGLang takes any return for success."""
        store = self._store
        if store is None or list(store.clear().result()) != [Result.DONE]:
            raise KvdiskError("kvdisk could not clear its store; the log says why.")
        return True

    def get_stats(self) -> Any:
        """Return what was loaded and stored since the last call, for SGLang's metrics."""
        return self._stats.take()

    # -- keys and rows -----------------------------------------------------------------------------

    def _open_store(self) -> SharedStore | None:
        """Return the store, or None where it must not be used: there is none, or weights were
        updated since it was opened."""
        store = self._store
        if store is not None and weight_updates.updates() != self._updates:
            self.engine_log.warn(
                "updates",
                "off, as weights of this server were updated, and what is stored is of others: restart it, or detach"
                ' the storage backend and attach it with "weights_name".',
            )
            return None
        return store

    @property
    def _parts(self) -> int:
        return 1 if self._rows is None else self._rows.parts

    @property
    def _page_bytes(self) -> int:
        return 0 if self._rows is None else self._rows.parts * self._rows.payload_bytes

    def _fits(self, keys: Sequence[str], host_indices: torch.Tensor) -> bool:
        return self._rows is not None and len(host_indices) == len(keys) * self._rows.page_size

    def _blocks(self, keys: Sequence[str]) -> list[BlockKey]:
        parts = range(self._parts)
        return [make_block_key(page_name(key) + bytes([part]), 0) for key in keys for part in parts]

    def _prefix(self, extra_info: Any) -> list[BlockKey]:
        """Return the blocks before those of a call, as far as SGLang tells."""
        return self._blocks(getattr(extra_info, "prefix_keys", None) or ())

    def _last_of_prefix(self, extra_info: Any) -> BlockKey | None:
        keys = getattr(extra_info, "prefix_keys", None) or ()
        return self._blocks(keys[-1:])[-1] if keys else None

    def _put(self, store: SharedStore, keys: Sequence[str], rows: Sequence[int], before: BlockKey | None) -> list[bool]:
        began_s, blocks = time.monotonic(), self._blocks(keys)
        jobs = list(starmap(Put, zip(blocks, [before, *blocks[:-1]], rows, strict=True)))
        results = store.put(jobs, ROOM_WAIT_S).result()
        stored = results.count(Result.DONE) // self._parts
        self._stats.note_stored(stored, self._page_bytes, time.monotonic() - began_s)
        return self._pages(results, KEPT)

    def _pages(self, results: Sequence[Result], good: frozenset[Result]) -> list[bool]:
        """Return of each page whether all of its parts ended well."""
        parts = self._parts
        return [good.issuperset(results[at : at + parts]) for at in range(0, len(results), parts)]


def page_name(key: str) -> bytes:
    """Return the bytes of a key of SGLang's, as a block key has them. SGLang: a key is the hex
    SHA-256 of the tokens up to a page; tests have others."""
    try:
        digest = bytes.fromhex(key) if len(key) == 64 and key == key.lower() else None
    except ValueError:
        digest = None
    return b"h" + digest if digest is not None else b"t" + hashlib.sha256(key.encode()).digest()


def _share(config: Config, stores: int) -> Config:
    """Return a rank's share of what the user allows to all ranks of a host."""
    per_day = config.nvme_write_bytes_per_day
    return replace(
        config,
        nvme_bytes=None if config.nvme_bytes is None else config.nvme_bytes // stores,
        nvme_write_bytes_per_day=None if per_day is None else per_day // stores,
        remote_write_bytes_per_s=config.remote_write_bytes_per_s // stores,
    )
