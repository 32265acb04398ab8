# SPDX-License-Identifier: Apache-2.0
"""Pages of SGLang's real host pools in kvdisk's store, and what comes back."""

from __future__ import annotations

import pytest
import torch

from hicache.backends import Backend, key_of, write_model
from kvdisk.errors import ConfigError
from kvdisk.mover_process import MoverProcess
from kvdisk.sglang import identity

COUNT = 40
WAYS = [
    (mla, layout, tensors)
    for mla in (False, True)
    for tensors in (False, True)
    for layout in ("page_first", "page_first_direct", *(("page_head",) if not mla else ()))
] + [(mla, "layer_first", tensors) for mla in (False, True) for tensors in (False, True)]


@pytest.mark.parametrize(("mla", "layout", "tensors"), WAYS)
def test_the_same_bytes_come_back_after_a_restart(tmp_path, model, mla, layout, tensors):
    keys, pages = [key_of(at) for at in range(COUNT)], range(COUNT)
    backend = Backend(model, tmp_path / "store", mla=mla, layout=layout, tensors=tensors)
    backend.fill(pages)
    want = [backend.bytes_of(page) for page in pages]
    assert backend.exists(keys) == 0
    assert backend.store(keys)
    backend.close()
    again = Backend(model, tmp_path / "store", mla=mla, layout=layout, tensors=tensors)
    assert again.exists(keys) == COUNT
    assert again.load(keys, first=64) == [True] * COUNT
    assert [again.bytes_of(64 + page) for page in pages] == want
    assert [again.bytes_of(page) for page in pages] != want, "other pages are left alone"
    again.close()


def test_a_process_moves_the_pages_of_a_pool_in_shared_memory(tmp_path, model):
    keys, pages = [key_of(at) for at in range(COUNT)], range(COUNT)
    backend = Backend(model, tmp_path / "store", shm=True)
    assert isinstance(backend.storage._store._store._mover, MoverProcess)
    backend.fill(pages)
    want = [backend.bytes_of(page) for page in pages]
    assert backend.store(keys)
    assert backend.load(keys, first=64) == [True] * COUNT
    assert [backend.bytes_of(64 + page) for page in pages] == want
    backend.close()


@pytest.mark.parametrize("mla", [False, True])
def test_a_flipped_bit_costs_its_page_alone(tmp_path, model, mla):
    keys = [key_of(at) for at in range(COUNT)]
    backend = Backend(model, tmp_path / "store", mla=mla)
    backend.fill(range(COUNT))
    want = [backend.bytes_of(page) for page in range(COUNT)]
    assert backend.store(keys)
    backend.close()
    flip_a_bit(tmp_path / "store", want[7])
    again = Backend(model, tmp_path / "store", mla=mla)
    loaded = again.load(keys, first=64)
    assert loaded == [at != 7 for at in range(COUNT)]
    assert all(again.bytes_of(64 + at) == want[at] for at in range(COUNT) if loaded[at])
    assert again.exists(keys) == 7
    again.close()


def flip_a_bit(store, page):
    """Flip a bit of a page on the drive, in its first part."""
    hits = 0
    for file in (each for each in store.rglob("*") if each.is_file()):
        content = bytearray(file.read_bytes())
        at = content.find(page[:512])
        if at >= 0:
            content[at + 100] ^= 4
            file.write_bytes(content)
            hits += 1
    assert hits == 1


def test_a_page_that_is_not_there_ends_what_is_found(tmp_path, model):
    backend = Backend(model, tmp_path / "store")
    backend.fill(range(COUNT))
    keys = [key_of(at) for at in range(COUNT)]
    assert backend.store(keys[:5])
    assert backend.store(keys[6:10], first=6)
    assert backend.exists(keys) == 5
    assert backend.storage.exists(keys[7])
    assert not backend.storage.exists(keys[5])
    assert backend.load(keys[:8], first=64) == [True] * 5 + [False] + [True] * 2
    assert backend.exists([]) == 0
    assert backend.load([]) == []
    backend.close()


def test_the_cap_holds_over_all_ranks(tmp_path, model):
    """Each rank puts one and a half times what all may have."""
    cap, allocated, store = 64 << 20, [], tmp_path / "store"
    ranks = [Backend(model, store, rank=(rank, 2), nvme_bytes=cap, nvme_admission="all") for rank in (0, 1)]
    page_bytes = len(ranks[0].bytes_of(0))
    for turn in range(int(1.5 * cap / page_bytes / 64)):
        for backend in ranks:
            backend.fill(range(64), seed=turn)
            backend.store([key_of(turn * 64 + at) for at in range(64)])
        allocated.append(sum(each.stat().st_blocks * 512 for each in store.rglob("*") if each.is_file()))
    for backend in ranks:
        backend.close()
    assert cap // 2 < max(allocated) <= cap


@pytest.mark.parametrize("mla", [False, True])
def test_full_ranks_find_again_what_each_had(tmp_path, model, mla):
    """Whichever of them starts first. With MLA all look into what rank 0 has written."""
    cap, store, count = 48 << 20, tmp_path / "store", 64
    ranks = [Backend(model, store, mla=mla, rank=(rank, 2), nvme_bytes=cap, nvme_admission="all") for rank in (0, 1)]
    writers = ranks[:1] if mla else ranks
    for turn in range(2 * cap // (len(ranks[0].bytes_of(0)) * count)):
        for backend in writers:
            backend.fill(range(count), seed=turn)
            backend.store([key_of(turn * count + at) for at in range(count)])
    held = [set(backend.storage._store.keys()) for backend in ranks]
    assert all(len(each) > count for each in held[: len(writers)])
    for backend in ranks:
        backend.close()
    for rank in (1, 0):
        ranks[rank] = Backend(model, store, mla=mla, rank=(rank, 2), nvme_bytes=cap, nvme_admission="all")
        assert set(ranks[rank].storage._store.keys()) == held[rank]
    assert sum(each.stat().st_blocks * 512 for each in store.rglob("*") if each.is_file()) <= cap
    for backend in ranks:
        backend.close()


def test_pages_go_out_with_the_prefix_as_their_parent(tmp_path, model):
    backend = Backend(model, tmp_path / "store")
    backend.fill(range(4))
    keys = [key_of(at) for at in range(4)]
    puts = []
    store = backend.storage._store
    put = store.put
    store.put = lambda blocks, *more: puts.extend(blocks) or put(blocks, *more)
    assert backend.store(keys[2:], first=2, prefix=keys[:2])
    parents = [each.parent for each in puts]
    assert parents[0] == backend.storage._blocks(keys[1:2])[-1]
    assert parents[1:] == [each.key for each in puts[:-1]]
    backend.close()


# -- identity ------------------------------------------------------------------------------------

OTHERS = {
    "weights": lambda tmp: {"model": write_model(tmp / "other", weights=2)},
    "configuration": lambda tmp: {"model": write_model(tmp / "other", rope_theta=500_000.0)},
    "data type": lambda tmp: {"dtype": torch.float16},
    "layout": lambda tmp: {"layout": "page_first_direct"},
    "page size": lambda tmp: {"page": 32},
    "tensors": lambda tmp: {"tensors": True},
    "tensor parallelism": lambda tmp: {"rank": (0, 2)},
    "another rank": lambda tmp: {"rank": (1, 2)},
    "quantized cache": lambda tmp: {"arguments": {"kv_cache_dtype": "fp8_e5m2"}},
    "how experts on the processor compute": lambda tmp: {"arguments": {"kt_method": "BF16"}},
    "kernel of linear attention": lambda tmp: {"arguments": {"linear_attn_backend": "cutedsl"}},
    "weights of experts on the processor": lambda tmp: {"arguments": {"kt_weight_path": str(write_model(tmp / "kt"))}},
    "override": lambda tmp: {"arguments": {"json_model_override_args": '{"rope_theta": 7.0}'}},
}
SAME = {
    "nothing": lambda tmp: {},
    "the same files elsewhere": lambda tmp: {"model": write_model(tmp / "copy")},
    "memory": lambda tmp: {"pages": 96, "arguments": {"mem_fraction_static": 0.5, "port": 30_777}},
}


def found_after(tmp_path, first, second):
    """Store pages with one deployment; return how many another one finds."""
    keys = [key_of(at) for at in range(4)]
    model = write_model(tmp_path / "model")
    backend = Backend(**{"model": model, "store": tmp_path / "store"} | first)
    backend.fill(range(4))
    assert backend.store(keys)
    assert backend.exists(keys) == 4
    backend.close()
    second = second() if callable(second) else second
    other = Backend(**{"model": model, "store": tmp_path / "store"} | second)
    found = other.exists(keys)
    assert other.load(keys, first=8) == [True] * found + [False] * (4 - found)
    other.close()
    return found


@pytest.mark.parametrize("what", OTHERS)
def test_nothing_of_another_model_or_layout_is_found(tmp_path, what):
    assert found_after(tmp_path, {}, OTHERS[what](tmp_path)) == 0


@pytest.mark.parametrize("variable", ["SGLANG_USE_HND_KVCACHE", "SGLANG_FP8_IGNORED_LAYERS"])
def test_nothing_is_found_where_a_variable_computes_otherwise(tmp_path, monkeypatch, variable):
    first = {"weights_name": "llama"}  # of which nothing else differs

    def then():
        monkeypatch.setenv(variable, "1")
        return first

    assert found_after(tmp_path, first, then) == 0


def test_the_code_of_a_package_of_models_counts(tmp_path, monkeypatch):
    package = tmp_path / "my_models"
    package.mkdir()
    (package / "__init__.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "my_models")

    def then():
        (package / "__init__.py").write_text("x = 2\n")
        return {}

    assert found_after(tmp_path, {}, then) == 0
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "no_models")
    with pytest.raises(ConfigError, match="the code of SGLANG_EXTERNAL_MODEL_PACKAGE no_models"):
        Backend(tmp_path / "model", tmp_path / "store")


@pytest.mark.parametrize("what", SAME)
def test_what_is_the_same_is_found(tmp_path, what):
    assert found_after(tmp_path, {}, SAME[what](tmp_path)) == 4


def test_a_model_that_is_one_of_several_files_is_named_by_it(tmp_path):
    """As with several quantisations. ``unit/test_model_identity.py`` shows that it counts."""
    file = write_model(tmp_path) / "model.safetensors"
    assert identity.model_place(str(file), None, None) == file


def test_mla_is_found_with_another_tensor_parallel_size(tmp_path):
    assert found_after(tmp_path, {"mla": True}, {"mla": True, "rank": (0, 4)}) == 4


def test_named_weights_are_found_by_their_name(tmp_path):
    dummy = {"weights_name": "llama, step 1", "arguments": {"load_format": "dummy"}}
    assert found_after(tmp_path / "a", dummy, dummy) == 4
    assert found_after(tmp_path / "b", dummy, dummy | {"weights_name": "llama, step 2"}) == 0


# -- clear ---------------------------------------------------------------------------------------


def test_clear_holds_over_a_restart(tmp_path, model):
    keys = [key_of(at) for at in range(COUNT)]
    backend = Backend(model, tmp_path / "store")
    backend.fill(range(COUNT))
    assert backend.store(keys)
    backend.storage.clear()
    assert backend.exists(keys) == 0
    assert backend.store(keys[:3])
    assert backend.exists(keys) == 3
    backend.close()
    again = Backend(model, tmp_path / "store")
    assert again.exists(keys) == 3
    assert again.load(keys[3:], first=64) == [False] * (COUNT - 3)
    again.close()


def test_clear_says_where_it_did_not_succeed(tmp_path, model):
    backend = Backend(model, tmp_path / "store")
    backend.close()
    with pytest.raises(Exception, match="could not clear"):
        backend.storage.clear()
