# SPDX-License-Identifier: Apache-2.0
"""What kvdisk refuses behind SGLang: with one sentence, when it is attached; and what it does once
weights were updated."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers.scheduler_components import weight_updater
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.utils.weight_checker import WeightChecker
from sglang.version import __version__

from hicache.backends import Backend, key_of, write_model
from kvdisk.errors import ConfigError
from kvdisk.sglang import hicache, identity, versions, weight_updates
from kvdisk.sglang.storage_stats import StorageStats

PAGE = Path(__file__).parents[2] / "docs" / "SGLANG.md"

REFUSED = {
    "LoRA": ({"arguments": {"enable_lora": True}}, "leave out --enable-lora"),
    "context parallelism": ({"storage": {"attn_cp_size": 2}}, "context parallelism"),
    "split heads": ({"storage": {"should_split_heads": True}}, "leave out tp_lcm_size"),
    "dummy weights": ({"arguments": {"load_format": "dummy"}}, "--load-format dummy"),
    "a copy of weights": ({"arguments": {"load_format": "npcache"}}, "--load-format npcache"),
    "no directory": ({"store_dirs": None}, '{"kvdisk": {"store_dirs"'),
    "an unknown setting": ({"nvme_byte": 7}, "nvme_byte"),
    "no name": ({"weights_name": 7}, '"weights_name" is a text'),
    "too small": ({"nvme_bytes": "1MiB"}, "nvme_bytes"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused_in_one_sentence(tmp_path, model, what):
    how, said = REFUSED[what]
    how = dict(how)
    storage = how.pop("storage", {})
    with pytest.raises(ConfigError, match=re.escape(said)) as refused, changed(storage):
        Backend(model, tmp_path / "store", **how)
    assert str(refused.value).endswith(".")
    assert "\n" not in str(refused.value)


class changed:  # noqa: N801 - reads as a word
    """SGLang's configuration of a backend is another one meanwhile."""

    def __init__(self, values):
        self.values = values

    def __enter__(self):
        from hicache import backends

        self.made = backends.HiCacheStorageConfig
        backends.HiCacheStorageConfig = lambda **fields: self.made(**fields | self.values)

    def __exit__(self, *_):
        from hicache import backends

        backends.HiCacheStorageConfig = self.made


def test_weights_that_are_not_there_are_refused(tmp_path, model):
    (model / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="There are no weight files"):
        Backend(model, tmp_path / "store")


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr("sglang.version.__version__", "0.6.0")
    with pytest.raises(ConfigError, match=r"0\.5\.22 and 0\.5\.23, and this is 0\.6\.0\."):
        versions.sglang_version()
    monkeypatch.setattr("sglang.version.__version__", f"{__version__}.post1")
    assert versions.sglang_version() == f"{__version__}.post1"


def test_a_pool_that_comes_late_is_refused(tmp_path, model):
    backend = Backend(model, tmp_path / "store")
    backend.fill(range(1))
    with pytest.raises(ConfigError, match="and swa is one more"):
        backend.storage.register_mem_host_pool_v2(backend.pool, PoolName.SWA)
    assert not backend.store([key_of(0)]), "and its store is closed"
    assert backend.exists([key_of(0)]) == 0
    backend.close()


def test_another_kind_of_pool_is_refused(tmp_path, model, monkeypatch):
    backend = Backend(model, tmp_path / "store")
    backend.close()

    class Quantized(MHATokenToKVPoolHost):
        pass

    monkeypatch.setattr(backend.pool, "__class__", Quantized)
    with pytest.raises(ConfigError, match="has a Quantized"):
        backend.storage.register_mem_pool_host(backend.pool)


def test_a_pool_with_scales_beside_it_is_refused(tmp_path, model, monkeypatch):
    backend = Backend(model, tmp_path / "store")
    backend.close()
    monkeypatch.setattr(backend.pool, "size_per_token", backend.pool.size_per_token + 8)
    with pytest.raises(ConfigError, match="no scales"):
        attach(backend)


def test_another_layout_is_refused(tmp_path, model, monkeypatch):
    backend = Backend(model, tmp_path / "store")
    backend.close()
    monkeypatch.setattr(backend.pool, "layout", "page_first_kv_split")
    with pytest.raises(ConfigError, match="layout of host memory page_first_kv_split"):
        attach(backend)


def attach(backend):
    """Attach a backend again that was closed, as it is."""
    backend.storage.register_mem_pool_host(backend.pool)
    backend.storage.on_host_pools_registered()


def test_draft_models_are_refused(tmp_path, model):
    backend = Backend(model, tmp_path / "store")
    with pytest.raises(ConfigError, match="has a MHATokenToKVPoolHost for draft"):
        backend.storage.register_mem_host_pool_v2(backend.pool, PoolName.DRAFT)
    backend.close()


@pytest.mark.skipif(not __version__.startswith("0.5.22"), reason="later versions name images by 256 bits")
def test_media_are_refused_where_they_have_short_names(tmp_path):
    model = write_model(tmp_path / "model", architectures=["LlavaLlamaForCausalLM"])
    with pytest.raises(ConfigError, match=r"from SGLang 0\.5\.23 on"):
        Backend(model, tmp_path / "store", arguments={"enable_multimodal": True})


def test_every_sentence_stands_in_the_documentation():
    text = " ".join(PAGE.read_text().split())
    for module in ("refusals", "host_rows", "versions"):
        source = Path(versions.__file__).with_name(f"{module}.py").read_text()
        assert "ConfigError(" in source
    for said in ("LoRA", "context parallelism", "tp_lcm_size", "layer_first", "several media", "several pools"):
        assert said in text


# -- updates of weights ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["disk", "tensor", "distributed", "ipc", "others write", "reset"])
def test_updated_weights_turn_it_off(tmp_path, model, kind, monkeypatch):
    monkeypatch.setattr(weight_updates._WATCH, "count", 0)
    keys = [key_of(at) for at in range(4)]
    backend = Backend(model, tmp_path / "store")
    backend.fill(range(4))
    assert backend.store(keys)
    update(kind)
    assert backend.exists(keys) == 0
    assert backend.load(keys) == [False] * 4
    assert not backend.store(keys)
    backend.close()
    with pytest.raises(ConfigError, match="were updated"):
        Backend(model, tmp_path / "store")
    named = Backend(model, tmp_path / "store", weights_name="step 2")
    assert named.exists(keys) == 0
    assert named.store(keys)
    named.close()


def update(kind):
    """Have SGLang's real class update weights, of a model runner that fails."""
    if kind == "reset":
        with pytest.raises(AttributeError):
            object.__new__(WeightChecker)._reset_tensors()
        return
    updater = object.__new__(weight_updater.SchedulerWeightUpdaterManager)
    if kind == "others write":
        runner = SimpleNamespace(weight_updater=object.__new__(WeightUpdater))
        worker = SimpleNamespace(weight_update_runners=lambda: [("target", runner)])
        object.__setattr__(updater, "tp_worker", worker)
        object.__setattr__(updater, "_session", None)
        with pytest.raises(AttributeError):
            updater.begin_weight_update(SimpleNamespace(selector="target"))
        return
    for name, value in {"metrics_collector": None, "tp_worker": None, "_session": SimpleNamespace()}.items():
        object.__setattr__(updater, name, value)
    with pytest.raises(AttributeError):
        getattr(updater, f"update_weights_from_{kind}")(SimpleNamespace(selector="target", names=()))


RUNNING = {"hicache_storage_backend": None, "hicache_storage_backend_extra_config": None}
"""SGLang's arguments in a running server to which no store is attached."""


def test_a_server_that_was_started_without_it_has_no_known_weights(tmp_path, model, monkeypatch):
    monkeypatch.setattr(identity, "_LOADED", [])
    with pytest.raises(ConfigError, match="which weights this running server has"):
        Backend(model, tmp_path / "store", arguments=RUNNING)
    Backend(model, tmp_path / "store", arguments=RUNNING, weights_name="step 1").close()
    with pytest.raises(ConfigError, match="which weights this running server has"):
        Backend(model, tmp_path / "store", arguments=RUNNING)


def test_files_that_changed_since_the_start_are_not_what_a_server_has(tmp_path, model, monkeypatch):
    monkeypatch.setattr(identity, "_LOADED", [])
    backend = Backend(model, tmp_path / "store")
    backend.fill(range(1))
    assert backend.store([key_of(0)])
    backend.close()
    again = Backend(model, tmp_path / "store", arguments=RUNNING)
    assert again.exists([key_of(0)]) == 1
    again.close()
    write_model(model, weights=2)
    with pytest.raises(ConfigError, match="its files have changed since"):
        Backend(model, tmp_path / "store", arguments=RUNNING)


# -- small things ----------------------------------------------------------------------------------


def test_metrics_of_sglang_have_batches(tmp_path, model):
    backend = Backend(model, tmp_path / "store")
    backend.fill(range(4))
    keys = [key_of(at) for at in range(4)]
    assert backend.store(keys)
    backend.load(keys)
    taken = backend.storage.get_stats()
    assert taken.backup_pgs == [4]
    assert taken.prefetch_pgs == [4]
    assert all(speed > 0 for speed in taken.backup_bandwidth + taken.prefetch_bandwidth)
    assert backend.storage.get_stats().backup_pgs == []
    backend.close()
    assert StorageStats(is_on=False).take() is None


def test_indices_that_do_not_fit_are_not_served(tmp_path, model):
    backend = Backend(model, tmp_path / "store")
    backend.fill(range(4))
    keys = [key_of(at) for at in range(4)]
    assert backend.storage.batch_set_v1(keys, backend.indices(range(3))) == [False] * 4
    assert backend.storage.batch_get_v1(keys, torch.arange(0)) == [False] * 4
    assert backend.storage.batch_set_v1(keys[:1], torch.arange(7, 23)) == [False], "no page begins there"
    backend.close()


def test_settings_of_the_user_are_shared_by_the_ranks(tmp_path, model):
    config = Backend(model, tmp_path / "store", rank=(0, 2), nvme_bytes="1GiB", nvme_write_bytes_per_day="2GB")
    assert config.storage._config.nvme_bytes == 1 << 29
    assert config.storage._config.nvme_write_bytes_per_day == 10**9
    assert config.storage._config.io_deadline_s == hicache.IO_DEADLINE_S
    config.close()
    alone = Backend(model, tmp_path / "other", rank=(0, 2), mla=True, nvme_bytes="1GiB", io_deadline_s=2)
    assert alone.storage._config.nvme_bytes == 1 << 30, "rank 0 writes for all"
    assert alone.storage._config.io_deadline_s == 2.0
    alone.close()
    assert json.dumps(alone.config.extra_config["kvdisk"])
