# SPDX-License-Identifier: Apache-2.0
"""SGLang's own radix tree, controller and threads over kvdisk's store: what they store, find and
load, and that they live on whatever happens."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache import hicache_storage
from support.drive_blocks import gated_device

from hicache.trees import Tree, WindowTree, extra_config, prompt, write_model

NAMES_ALL = hasattr(hicache_storage.HiCacheStorage, "on_host_pools_registered")
needs_all = pytest.mark.skipif(not NAMES_ALL, reason="SGLang 0.5.22 does not say when it has named all pools")
WAYS = [
    (mla, layout, tensors)
    for mla in (False, True)
    for layout, tensors in (("page_first", False), ("layer_first", True))
]


def check_a_restart(make):
    """Compute prompts in one life of a tree, and load them in the next."""
    tree = make()
    for number in range(3):
        tree.compute(prompt(number, 8))
    tree.compute(prompt(1, 12))  # goes on where an earlier one ended
    tree.close()
    again = make()
    assert again.load(prompt(0, 8)) == len(prompt(0, 8))
    assert again.load(prompt(1, 12)) == len(prompt(1, 12))
    assert again.load(prompt(2, 10)) == len(prompt(2, 8))
    assert again.load(prompt(9, 4)) == 0
    again.close()


@pytest.mark.parametrize(("mla", "layout", "tensors"), [*WAYS, (False, "page_first_direct", False)])
def test_prompts_are_loaded_after_a_restart(tmp_path, model, mla, layout, tensors):
    extra = extra_config(tmp_path / "store", tensors=tensors)
    check_a_restart(lambda: Tree(model, extra, mla=mla, layout=layout))


@needs_all
@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_prompts_of_a_model_with_windows_are_loaded_after_a_restart(tmp_path, model, layout):
    extra = extra_config(tmp_path / "store")
    check_a_restart(lambda: WindowTree(model, extra, layout=layout))


@needs_all
def test_a_prompt_whose_window_is_lost_is_computed(tmp_path, model):
    """Of the second pool a page of the last window is gone: a shorter prompt has all of its own."""
    extra = extra_config(tmp_path / "store")
    tree = WindowTree(model, extra)
    tree.compute(prompt(0, 8))
    tree.close()
    again, asked = WindowTree(model, extra), hicache_storage.PoolName.SWA
    get = again.backend.batch_get_v2

    def lose_one(transfers, extra_info=None):
        found = get(transfers, extra_info)
        return {name: [False, *each[1:]] if name == asked else each for name, each in found.items()}

    again.backend.batch_get_v2 = lose_one
    assert again.load(prompt(0, 8)) < len(prompt(0, 8))
    del again.backend.batch_get_v2
    again.compute(prompt(1, 8))
    assert again.load(prompt(1, 8)) == len(prompt(1, 8))
    again.close()


def test_a_long_prompt_goes_in_several_batches(tmp_path, model):
    pages = 300
    tree = Tree(model, extra_config(tmp_path / "store"), pages=400)
    tree.compute(prompt(5, pages))
    tree.close()
    again = Tree(model, extra_config(tmp_path / "store"), pages=400)
    assert again.load(prompt(5, pages)) == len(prompt(5, pages))
    again.close()


def test_other_weights_under_the_same_name_hit_nothing(tmp_path, model):
    tree = Tree(model, extra_config(tmp_path / "store"), weights=1)
    tree.compute(prompt(0, 8))
    tree.close()
    write_model(model, weights=2)  # the same path, the same name
    again = Tree(model, extra_config(tmp_path / "store"), weights=2)
    assert again.load(prompt(0, 8)) == 0
    again.compute(prompt(0, 8))
    again.close()
    third = Tree(model, extra_config(tmp_path / "store"), weights=2)
    assert third.load(prompt(0, 8)) == len(prompt(0, 8))
    third.close()


def test_clear_by_its_endpoint_holds(tmp_path, model):
    tree = Tree(model, extra_config(tmp_path / "store"))
    tree.compute(prompt(0, 8))
    assert tree.cache.clear_storage_backend()
    tree.close()
    again = Tree(model, extra_config(tmp_path / "store"))
    assert again.load(prompt(0, 8)) == 0
    assert again.threads
    again.backend.close()
    assert not again.cache.clear_storage_backend(), "a store that is not open was not cleared, and SGLang says so"
    again.close()


@pytest.mark.parametrize("call", ["batch_exists", "batch_get_v1", "batch_set_v1"])
def test_no_exception_comes_to_a_thread_of_sglang(tmp_path, model, call, monkeypatch):
    extra = extra_config(tmp_path / "store")
    tree = Tree(model, extra)
    tree.compute(prompt(0, 8))
    tree.close()
    again = Tree(model, extra)

    def fail(*_, **__):
        raise ZeroDivisionError("a bug of kvdisk's")

    monkeypatch.setattr(again.backend, "_blocks", fail)
    if call == "batch_set_v1":
        again.compute(prompt(1, 8))
    assert again.load(prompt(0, 8)) == 0
    monkeypatch.undo()
    assert all(thread.is_alive() for thread in again.threads)
    assert again.load(prompt(0, 8)) == len(prompt(0, 8)), "the threads serve on"
    again.compute(prompt(2, 8))
    again.close()


def test_a_store_that_goes_off_costs_hits_alone(tmp_path, model):
    tree = Tree(model, extra_config(tmp_path / "store"))
    tree.compute(prompt(0, 4))
    tree.backend._store.close()  # as an error of the store's would
    tree.compute(prompt(1, 4))
    assert tree.load(prompt(2, 4)) == 0
    assert tree.load(prompt(1, 4)) == len(prompt(1, 4)), "of memory"
    assert all(thread.is_alive() for thread in tree.threads)
    tree.close()


def test_it_is_attached_and_detached_while_the_server_runs(tmp_path, model):
    extra = extra_config(tmp_path / "store")
    tree = Tree(model, extra)
    tree.compute(prompt(0, 8))
    attachment = tree.cache._storage_attachment
    assert attachment.detach()[0]
    assert tree.backend is None
    with tree.placed():
        wrong = extra.replace('"nvme_bytes": "256MiB"', '"nvme_bytes": "much"')
        attached, message = attachment.attach("dynamic", wrong)
        assert not attached
        assert "nvme_bytes" in message
        assert attachment.attach("dynamic", extra) == (True, "Attached HiCache storage backend successfully.")
    tree.cache.reset()
    assert tree.load(prompt(0, 8)) == len(prompt(0, 8))
    tree.close()


def test_threads_of_sglang_that_are_busy_at_once(tmp_path, model):
    """Stores, lookups and loads of many prompts, with Python busy beside them."""
    extra, ends = extra_config(tmp_path / "store"), threading.Event()
    tree = Tree(model, extra, pages=256)
    for number in range(8):
        tree.compute(prompt(number, 6))
    tree.cache.reset()
    busy = threading.Thread(target=lambda: [sum(range(1000)) for _ in iter(ends.is_set, True)])
    busy.start()
    try:
        for number in range(8):
            tree.compute(prompt(100 + number, 6))
            assert tree.load(prompt(number, 6)) == len(prompt(number, 6))
    finally:
        ends.set()
        busy.join()
    assert all(thread.is_alive() for thread in tree.threads)
    tree.close()


def test_a_hanging_drive_holds_no_thread_longer_than_the_deadline(tmp_path, model):
    extra = extra_config(tmp_path / "store", io_deadline_s=1.0)
    tree = Tree(model, extra)
    tree.compute(prompt(0, 8))
    tree.close()
    with gated_device() as device:
        again = Tree(model, extra)
        device.plan.hold = True
        began_s = time.monotonic()
        assert again.load(prompt(0, 8)) == 0
        again.compute(prompt(1, 8))
        assert time.monotonic() - began_s < 20.0
        assert device.held
        assert all(thread.is_alive() for thread in again.threads)
        device.opens.set()
        again.close()


@pytest.mark.skipif(not hasattr(hicache_storage, "HiCacheStorageFailureInjector"), reason="0.5.23 has it first")
def test_behind_sglangs_own_injector_of_failures_and_delays(tmp_path, model):
    chance, delay_s = (envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE, envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY)
    with chance.override(0.3), delay_s.override(0.01):
        tree = Tree(model, extra_config(tmp_path / "store"))
        assert isinstance(tree.backend, hicache_storage.HiCacheStorageFailureInjector)
        for number in range(8):
            tree.compute(prompt(number, 6))
        tree.cache.reset()
        found = [tree.load(prompt(number, 6)) for number in range(8)]
        assert 0 < sum(found) < 8 * len(prompt(0, 6))
        assert all(thread.is_alive() for thread in tree.threads)
        tree.close()


def test_rows_are_torchs_memory(tmp_path, model):
    """Not a copy of it: what is loaded lies in the pool at once."""
    tree = Tree(model, extra_config(tmp_path / "store"))
    pool = tree.controller.storage_host_pool
    rows, _ = tree.backend._rows["kv"].memory
    pool.kv_buffer.view(torch.uint8).flatten()[:3] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    assert rows.reshape(-1)[:3].tolist() == [1, 2, 3]
    tree.close()
