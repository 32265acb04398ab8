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
from itertools import starmap
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult

from kvdisk.blocks import BlockKey, make_block_key
from kvdisk.config import Config
from kvdisk.errors import ConfigError, EngineLog, KvdiskError
from kvdisk.mover_process import MoverProcess
from kvdisk.sglang import weight_updates
from kvdisk.sglang.host_rows import STAGING_PAGES, PoolRows, StagingRows
from kvdisk.sglang.identity import identity_of, layout_facts
from kvdisk.sglang.refusals import refuse_arguments, refuse_pool, refuse_together
from kvdisk.sglang.shares import share_of
from kvdisk.sglang.storage_stats import StorageStats
from kvdisk.shared_store import SharedStore
from kvdisk.store import BlockKind, BlockStore, Get, Presence, Put, Result, Row, Rows

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
STATE_TOKENS = 1024
"""For about how many tokens there is one recurrent state: with how much room states begin. SGLang:
one for each node of its tree."""
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


def _nothing_of(transfers: Any, *_: Any, **__: Any) -> dict[str, list[bool]]:
    return {each.name: _nothing(each.keys or ()) for each in transfers}


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
        self._config, self._joint_cap = share_of(config, storage_config)
        self._storage = storage_config
        self._moves_rows = bool(extra.get("interface_v1", 0))
        self._host_pools: dict[str, Any] = {}
        """SGLang's, by its names for them: those that a page lies in."""
        self._rows: dict[str, PoolRows | StagingRows] = {}
        self._kinds: dict[str, int] = {PoolName.KV: 0}
        self._store: SharedStore | None = None
        self._stats = StorageStats(is_on=bool(storage_config.enable_storage_metrics))
        self.engine_log = EngineLog("SGLang", logger)
        self._updates = weight_updates.updates()

    # -- pools -------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take note of SGLang's host pool, and open the store over it where SGLang does not say
        when it has named all: then waits for the drive. Raises ConfigError, StoreLocked,
        DeviceError."""
        if self._host_pools:
            raise ConfigError("kvdisk has a host pool already; detach the storage backend first.")
        if self._updates and self._weights_name is None:
            raise ConfigError(
                "Weights of this server were updated, so kvdisk cannot tell which they are: restart it, or name them"
                ' with "weights_name".'
            )
        refuse_pool(PoolName.KV, mem_pool_host)
        super().register_mem_pool_host(mem_pool_host)
        self._host_pools = {PoolName.KV: mem_pool_host}
        if not hasattr(HiCacheStorage, "on_host_pools_registered"):  # SGLang: 0.5.22 does not say it
            self.on_host_pools_registered()

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take note of one more host pool, or of the first once more. Raises ConfigError for one
        that is not served, or comes too late."""
        if host_pool_name != PoolName.KV or host_pool is not self._host_pools.get(PoolName.KV):
            try:
                refuse_pool(host_pool_name, host_pool)
                if self._store is not None or not self._moves_rows:
                    raise ConfigError(
                        "kvdisk needs all host pools when it is attached, from SGLang 0.5.23 on and with interface_v1,"
                        f" and {host_pool_name} is one more."
                    )
            except ConfigError:
                self.close()
                raise
            self._host_pools[host_pool_name] = host_pool
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def on_host_pools_registered(self) -> None:
        """Open the store over all host pools, which SGLang has named by now. Waits for the drive.
        Raises ConfigError, StoreLocked, DeviceError."""
        pools = dict(sorted(self._host_pools.items(), key=lambda each: (each[0] != PoolName.KV, each[0])))
        refuse_together(self._storage, pools)
        rows: dict[str, PoolRows | StagingRows] = {}
        memory: list[Rows] = []
        for name, pool in pools.items():
            rows[name] = made = PoolRows(pool, sum(map(len, memory))) if self._moves_rows else StagingRows(pool)
            memory += made.memory
        identity = identity_of(layout_facts(self._storage, pools, rows), self._weights_name)
        kinds = [kind_of(name, rows[name], rows[PoolName.KV].page_size) for name in pools]
        is_shared = self._moves_rows and all(getattr(pool, "fd", None) is not None for pool in pools.values())
        mover = MoverProcess if is_shared else None
        store = BlockStore.open_for(self._config, identity, kinds, memory, mover, self._joint_cap)
        self._store, self._rows = SharedStore(store, self._config.lookup_wait_s), rows
        self._kinds = {name: kind for kind, name in enumerate(pools)}

    def close(self) -> None:
        """Finish what was asked for, commit, and give the store back. Waits for the drive, for 9 s
        at most. Idempotent."""
        store, self._store, self._host_pools = self._store, None, {}
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
        return found

    def exists(self, key: str) -> bool:
        """Return whether a page is there."""
        return self.batch_exists([key]) == 1

    @_never_raises(lambda *_, **__: PoolTransferResult(0, {}, []))
    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """Return how long a prefix of pages is there in all pools that SGLang names, and all
        lengths at which it is; hold what the longest needs. Counts as a request for that."""
        pages, store = self.batch_exists(keys, extra_info), self._open_store()
        if store is None or not pages:
            return PoolTransferResult(0, {}, [])
        hits, lengths = {PoolName.KV: pages}, list(range(1, pages + 1))
        for transfer in pool_transfers or ():
            served = _lengths_served(transfer, self._are_there(store, transfer.name, keys[:pages]))
            lengths = sorted(served.intersection(lengths))
            if served:
                hits[transfer.name] = max(served)
            if not lengths:
                return PoolTransferResult(0, hits, [])
        for transfer in pool_transfers or ():
            needed = keys[max(0, lengths[-1] - _pages_needed(transfer, pages)) : lengths[-1]]
            blocks = self._blocks(needed, transfer.name)
            store.reached(blocks)
            store.hold(blocks, HOLD_S)
        return PoolTransferResult(lengths[-1], hits, lengths)

    def _are_there(self, store: SharedStore, pool: str, keys: Sequence[str]) -> list[bool]:
        """Return of each page whether it is there in a pool."""
        if pool not in self._kinds:
            return [False] * len(keys)
        return [presence == Presence.READY for presence in store.find(self._blocks(keys, pool))]

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
        began_s = time.monotonic()
        loaded = self._get([(PoolName.KV, keys, host_indices)])[0]
        self._stats.note_loaded(loaded.count(True), self._page_bytes, time.monotonic() - began_s)
        return loaded

    @_never_raises(_nothing)
    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store pages of the host pool; return of each whether SGLang shall go on. That is so for
        one that admission refuses, too."""
        store, rows = self._open_store(), self._rows_in(PoolName.KV, keys, host_indices)
        if store is None or rows is None:
            return _nothing(keys)
        return self._put(store, keys, rows, self._last_of_prefix(extra_info))

    @_never_raises(_nothing_of)
    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:  # noqa: ARG002
        """As ``batch_get_v1``, of several pools; return the same by pool."""
        found = self._get([(each.name, each.keys or (), each.host_indices) for each in transfers])
        return {each.name: loaded for each, loaded in zip(transfers, found, strict=True)}

    @_never_raises(_nothing_of)
    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:  # noqa: ARG002
        """As ``batch_set_v1``, of other pools than the first; return the same by pool. What lies in
        these follows the same page in the first, without which nobody asks for it."""
        found, store = _nothing_of(transfers), self._open_store()
        if store is None:
            return found
        wanted: list[tuple[str, list[Put]]] = []
        for each in transfers:
            rows = self._rows_in(each.name, each.keys or (), each.host_indices)
            if rows is not None:
                pages, before = self._blocks(each.keys or (), each.name), self._blocks(each.keys or ())
                parents = [None] * len(pages) if each.name == PoolName.KV else before
                wanted.append((each.name, list(starmap(Put, zip(pages, parents, rows, strict=True)))))
        # Only now: of what raises before, no job is left that has rows after the call.
        jobs = [(name, store.put(puts, ROOM_WAIT_S)) for name, puts in wanted]
        return found | {name: [result in KEPT for result in job.result()] for name, job in jobs}

    def _get(self, wanted: Sequence[tuple[str, Sequence[str], Any]]) -> list[list[bool]]:
        """Load pages of several pools, each with its keys and SGLang's indices; return of each
        whether it is there now."""
        store = self._open_store()
        asked: list[list[Get] | None] = []
        for pool, keys, host_indices in wanted:
            rows = self._rows_in(pool, keys, host_indices)
            gets = list(starmap(Get, zip(self._blocks(keys, pool), rows, strict=True))) if rows is not None else None
            asked.append(gets)
        # Only now, as in ``batch_set_v2``.
        jobs = [None if store is None or gets is None else store.get(gets) for gets in asked]
        return [
            _nothing(keys) if job is None else [result is Result.DONE for result in job.result()]
            for (_, keys, _), job in zip(wanted, jobs, strict=True)
        ]

    def _rows_in(self, pool: str, keys: Sequence[str], host_indices: Any) -> Sequence[Row] | None:
        """Return the rows of pages in one of SGLang's pools; None where that is none, or the
        indices are not those of so many pages."""
        rows = self._rows.get(pool)
        if not isinstance(rows, PoolRows) or host_indices is None or len(host_indices) != len(keys) * rows.page_size:
            return None
        return rows.rows_of(host_indices)

    # -- pages as tensors --------------------------------------------------------------------------

    @_never_raises(_no_tensor)
    def batch_get(
        self,
        keys: list[str],
        target_locations: Any = None,
        target_sizes: Any = None,  # noqa: ARG002
    ) -> list[torch.Tensor | None]:
        """Load pages into tensors; return these, or None for what is not there."""
        store, rows = self._open_store(), self._rows.get(PoolName.KV)
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
        store, rows = self._open_store(), self._rows.get(PoolName.KV)
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
    def _page_bytes(self) -> int:
        rows = self._rows.get(PoolName.KV)
        return 0 if rows is None else rows.payload_bytes

    def _blocks(self, keys: Sequence[str], pool: str = PoolName.KV) -> list[BlockKey]:
        kind = self._kinds[pool]
        return [make_block_key(page_name(key), kind) for key in keys]

    def _prefix(self, extra_info: Any) -> list[BlockKey]:
        """Return the blocks before those of a call, as far as SGLang tells."""
        return self._blocks(getattr(extra_info, "prefix_keys", None) or ())

    def _last_of_prefix(self, extra_info: Any) -> BlockKey | None:
        keys = getattr(extra_info, "prefix_keys", None) or ()
        return self._blocks(keys[-1:])[-1] if keys else None

    def _put(self, store: SharedStore, keys: Sequence[str], rows: Sequence[Row], before: BlockKey | None) -> list[bool]:
        began_s, blocks = time.monotonic(), self._blocks(keys)
        jobs = list(starmap(Put, zip(blocks, [before, *blocks[:-1]], rows, strict=True)))
        results = store.put(jobs, ROOM_WAIT_S).result()
        self._stats.note_stored(results.count(Result.DONE), self._page_bytes, time.monotonic() - began_s)
        return [result in KEPT for result in results]


def _pages_needed(transfer: Any, pages: int) -> int:
    """Return how many of the last pages of a prefix must be there in a pool. ``pages``: of the
    longest prefix."""
    return max(1, len(transfer.keys or ())) if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES else pages


def _lengths_served(transfer: Any, are_there: Sequence[bool]) -> set[int]:
    """Return the lengths of prefixes of which a pool has what it must have."""
    needed, run, found = _pages_needed(transfer, len(are_there)), 0, set[int]()
    for length, is_there in enumerate(are_there, 1):
        run = run + 1 if is_there else 0
        if run >= min(needed, length):
            found.add(length)
    return found


def kind_of(pool: str, rows: PoolRows | StagingRows, page_tokens: int) -> BlockKind:
    """Return the blocks of one of SGLang's pools. ``page_tokens``: of a page of the first one."""
    state_tokens = STATE_TOKENS if pool == PoolName.MAMBA else None
    return BlockKind(
        rows.payload_bytes,
        page_tokens,
        state_tokens=state_tokens,
        element_bytes=rows.element_bytes,
        piece_bytes=rows.piece_bytes,
    )


def page_name(key: str) -> bytes:
    """Return the bytes of a key of SGLang's, as a block key has them. SGLang: a key is the hex
    SHA-256 of the tokens up to a page; tests have others."""
    try:
        digest = bytes.fromhex(key) if len(key) == 64 and key == key.lower() else None
    except ValueError:
        digest = None
    return b"h" + digest if digest is not None else b"t" + hashlib.sha256(key.encode()).digest()
