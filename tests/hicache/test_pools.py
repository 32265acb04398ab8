# SPDX-License-Identifier: Apache-2.0
"""Models with several host pools: sliding windows, sparse attention, recurrent states. Pages of
SGLang's real pools, and what its own backend in files finds of the same."""

from __future__ import annotations

import random
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)

from hicache.backends import Backend, key_of
from kvdisk.errors import ConfigError
from kvdisk.messages import Report
from kvdisk.shared_store import SharedStore

NAMES_ALL = hasattr(HiCacheStorage, "on_host_pools_registered")
KINDS = {
    "swa": (PoolHitPolicy.TRAILING_PAGES, 3),
    "indexer": (PoolHitPolicy.ALL_PAGES, 0),
    "mamba": (PoolHitPolicy.TRAILING_PAGES, 1),
}
COUNT = 20
needs_all = pytest.mark.skipif(not NAMES_ALL, reason="SGLang 0.5.22 does not say when it has named all pools")


def open_backend(model, store, beside, **more):
    if beside == PoolName.INDEXER:
        more = {"mla": True, "page": 64} | more
    return Backend(model, store, beside=beside, **more)


def bytes_in(pool, page):
    return bytes(pool.get_data_page(page * pool.page_size).contiguous().view(torch.uint8).numpy())


def fill(pool, pages, seed):
    """Write other bytes into each page of a pool."""
    for page in pages:
        data = np.random.default_rng([seed, page]).integers(0, 256, len(bytes_in(pool, page)), np.uint8)
        like = pool.get_dummy_flat_data_page()
        pool.set_from_flat_data_page(page * pool.page_size, torch.from_numpy(data).view(like.dtype))


def transfer_of(backend, beside, keys, first=0, pages=None):
    """Return SGLang's transfer of pages that lie from the first on."""
    policy, _ = KINDS[beside]
    size = backend.beside.page_size
    indices = torch.arange(first * size, (first + len(keys)) * size)
    return PoolTransfer(PoolName(beside), host_indices=indices, keys=keys, hit_policy=policy)


@contextmanager
def slow_mover(storage):
    """Have nothing end meanwhile that was begun."""
    store = storage._store._store
    with mock.patch.object(store, "_poll_mover", return_value=Report()):
        yield


def asked(backend, beside, keys):
    """Return what SGLang asks of a prefix."""
    policy, trailing = KINDS[beside]
    named = keys[-trailing:] if trailing else None
    transfers = [PoolTransfer(PoolName(beside), keys=named, hit_policy=policy)]
    return backend.storage.batch_exists_v2(keys, transfers, HiCacheStorageExtraInfo())


@needs_all
@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
@pytest.mark.parametrize("beside", KINDS)
def test_the_same_bytes_come_back_after_a_restart(tmp_path, model, beside, layout):
    keys, pages = [key_of(at) for at in range(COUNT)], range(COUNT)
    backend = open_backend(model, tmp_path / "store", beside, layout=layout)
    for seed, pool in enumerate((backend.pool, backend.beside)):
        fill(pool, pages, seed)
    want = [(bytes_in(backend.pool, page), bytes_in(backend.beside, page)) for page in pages]
    assert asked(backend, beside, keys).kv_hit_pages == 0
    transfer = transfer_of(backend, beside, keys)
    assert backend.storage.batch_set_v2([transfer]) == {PoolName(beside): [True] * COUNT}
    assert backend.store(keys)
    backend.close()
    again = open_backend(model, tmp_path / "store", beside, layout=layout)
    found = asked(again, beside, keys)
    assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (COUNT, {"kv": COUNT, beside: COUNT})
    assert again.load(keys, first=24) == [True] * COUNT
    transfer = transfer_of(again, beside, keys, first=24)
    assert again.storage.batch_get_v2([transfer]) == {PoolName(beside): [True] * COUNT}
    assert [(bytes_in(again.pool, 24 + page), bytes_in(again.beside, 24 + page)) for page in pages] == want
    again.close()


@needs_all
@pytest.mark.parametrize("beside", KINDS)
def test_it_finds_what_sglangs_own_backend_finds(tmp_path, model, beside):
    """Of pages of which some are missing in one pool or both."""
    dice, keys = random.Random(3), [key_of(at) for at in range(12)]
    for turn in range(6):
        of_kv = keys[: dice.randrange(4, 13)]
        there = [key for key in keys if dice.random() < 0.8]
        found = []
        for kind in ("dynamic", "file"):
            place = tmp_path / f"{kind}{turn}"
            place.mkdir()
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(place))
                backend = open_backend(model, place, beside, kind=kind, tensors=kind == "file")
            backend.storage.batch_set_v2([transfer_of(backend, beside, there)])
            assert backend.store(of_kv)
            found.append(asked(backend, beside, keys))
            backend.close()
        assert found[0] == found[1], (of_kv, there)


@needs_all
@pytest.mark.parametrize("beside", ["swa"])
def test_a_pool_that_was_not_named_has_nothing(tmp_path, model, beside):
    keys = [key_of(at) for at in range(4)]
    backend = open_backend(model, tmp_path / "store", beside)
    assert backend.store(keys)
    other = PoolTransfer(PoolName.MAMBA, host_indices=torch.arange(4), keys=keys)
    assert backend.storage.batch_set_v2([other]) == {PoolName.MAMBA: [False] * 4}
    assert backend.storage.batch_get_v2([other]) == {PoolName.MAMBA: [False] * 4}
    found = backend.storage.batch_exists_v2(keys, [other], HiCacheStorageExtraInfo())
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (0, [])
    short = transfer_of(backend, beside, keys)
    short.host_indices = short.host_indices[:5]
    assert backend.storage.batch_set_v2([short]) == {PoolName.SWA: [False] * 4}
    backend.close()


@needs_all
def test_no_rows_are_held_after_a_call_that_names_wrong_ones(tmp_path, model, monkeypatch):
    """SGLang gives the pages to others then: what still reads or writes them would mix them up."""
    keys, jobs = [key_of(at) for at in range(4)], []
    backend = open_backend(model, tmp_path / "store", "swa")
    for name in ("put", "get"):
        begin = getattr(SharedStore, name)
        monkeypatch.setattr(SharedStore, name, lambda *given, begin=begin: jobs.append(begin(*given)) or jobs[-1])
    right, wrong = (transfer_of(backend, "swa", keys) for _ in range(2))
    wrong.host_indices = wrong.host_indices + 1
    with slow_mover(backend.storage):
        assert backend.storage.batch_set_v2([right, wrong]) == {PoolName.SWA: [False] * 4}
        assert backend.storage.batch_get_v2([right, wrong]) == {PoolName.SWA: [False] * 4}
        assert not [job for job in jobs if not job.done()]
    backend.close()


@needs_all
@pytest.mark.parametrize("beside", ["mamba", "swa"])
def test_what_each_rank_has_beside_kv_that_they_share_is_refused(tmp_path, model, beside):
    with pytest.raises(ConfigError, match="one tensor-parallel rank"):
        open_backend(model, tmp_path / "store", beside, mla=True, rank=(1, 2))


@pytest.mark.skipif(NAMES_ALL, reason="later versions say when they have named all pools")
def test_an_older_sglang_is_refused(tmp_path, model):
    with pytest.raises(ConfigError, match=r"from SGLang 0\.5\.23 on"):
        open_backend(model, tmp_path / "store", "swa")
