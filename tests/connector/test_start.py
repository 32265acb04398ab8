# SPDX-License-Identifier: Apache-2.0
"""What happens at start: how vLLM finds the connector, what is refused, and what makes a
namespace."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import reduce
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from schedulers import vllm_config
from support.waits import WAIT_S
from transformers import configuration_utils
from vllm import LLM
from vllm.config import KVTransferConfig, LoadConfig, MultiModalConfig, ParallelConfig, PoolerConfig
from vllm.config.quantization import QuantizationConfigArgs, QuantSpec
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.renderers.base import BaseRenderer
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from kvdisk.connector import connector, descriptions, identity
from kvdisk.connector.connector import KVDiskConnector
from kvdisk.connector.deployment import rank_of
from kvdisk.connector.identity import fingerprint_of
from kvdisk.connector.layout import layer_blocks
from kvdisk.connector.model_weights import identity_of, read_weights_early
from kvdisk.connector.plugin import register
from kvdisk.connector.refusals import refuse_unsupported
from kvdisk.connector.sizes import geometry_of, least_geometry
from kvdisk.connector.tier_settings import refuse_tiers_early
from kvdisk.connector.weights import WeightsChanged
from kvdisk.errors import ConfigError
from kvdisk.identity import Named
from kvdisk.worker.host_memory import host_memory

SIZES = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
FULL = FullAttentionSpec(**SIZES)
WINDOW = SlidingWindowSpec(**SIZES, sliding_window=64)
MLA = MLAAttentionSpec(**(SIZES | {"num_kv_heads": 1, "head_size": 576}))
MAMBA = MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,))
STATE = replace(MAMBA, mamba_cache_mode="align")
REPLAYED = SlidingWindowMLASpec(**SIZES, sliding_window=64, bounded_replay=True)
CHUNKED = ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=64)


def _cache(*specs: KVCacheSpec, drafter: bool = False) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer.{at}"], spec, is_eagle_group=drafter) for at, spec in enumerate(specs)]
    return KVCacheConfig(8, [], groups, hash_block_size=32)


def _config(**changes: Any) -> SimpleNamespace:
    """Return what the adapter reads of a VllmConfig, with these changes in whatever part has a
    field of the name."""
    parts = {
        "parallel_config": SimpleNamespace(
            pipeline_parallel_size=1,
            tensor_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            nnodes_within_dp=1,
            distributed_executor_backend="mp",
            data_parallel_backend="mp",
            data_parallel_size_local=1,
        ),
        "model_config": SimpleNamespace(
            is_encoder_decoder=False,
            enable_sleep_mode=False,
            use_mla=False,
            pooler_config=None,
            is_prefix_caching_supported=False,
            hf_text_config=None,
            is_diffusion=False,
            multimodal_config=None,
            uses_mrope=False,
        ),
        "scheduler_config": SimpleNamespace(enable_chunked_prefill=False),
        "aux_output_config": SimpleNamespace(enabled=False),
        "kv_transfer_config": SimpleNamespace(kv_role="kv_both"),
    }
    for name, value in changes.items():
        for part in parts.values():
            if hasattr(part, name):
                setattr(part, name, value)
    speculative = None
    if "drafter" in changes:
        method = changes["drafter"]
        speculative = SimpleNamespace(method=method, use_eagle_block_drop=lambda: "ngram" not in method)
    runner = changes.get("use_v2_model_runner", False)
    return SimpleNamespace(**parts, speculative_config=speculative, use_v2_model_runner=runner)


PRUNED = MultiModalConfig(video_pruning_rate=0.5)
ENGRAM = SimpleNamespace(engram_layer_ids=[1])


def _tells_of_sleeps(monkeypatch: pytest.MonkeyPatch, *, tells: bool) -> None:
    """Have this vLLM tell of sleeps, or not, as 0.33 and 0.32 do."""
    monkeypatch.setattr(KVConnectorBase_V1, "unregister_kv_caches", lambda self: None, raising=False)
    if not tells:
        monkeypatch.delattr(KVConnectorBase_V1, "unregister_kv_caches")


@pytest.mark.parametrize("more", [{}, {"kv_connector_module_path": "kvdisk.connector"}], ids=["plugin", "module path"])
def test_vllm_finds_the_connector(more):
    (entry,) = [entry for entry in entry_points(group="vllm.general_plugins") if entry.name == "kvdisk"]
    assert entry.load() is register
    register()
    register()
    config = KVTransferConfig(kv_connector="KVDiskConnector", kv_role="kv_both", **more)
    assert KVConnectorFactory.get_connector_class(config).__name__ == "KVDiskConnector"
    assert KVConnectorFactory.supports_hma_config(config)


@pytest.mark.parametrize(
    ("changes", "cache", "named"),
    [
        ({}, _cache(FULL, WINDOW), None),
        ({"is_encoder_decoder": True}, _cache(FULL), "encoder-decoder"),
        ({"enable_sleep_mode": True, "tells": False}, _cache(FULL), "sleep mode with this vLLM"),
        ({"enable_sleep_mode": True, "tells": True}, _cache(FULL), None),
        ({"enabled": True}, _cache(FULL), "enable_return_routed_experts"),
        ({"pooler_config": PoolerConfig()}, _cache(FULL), "pooling needs each prompt computed whole"),
        ({"pooler_config": PoolerConfig(), "is_prefix_caching_supported": True}, _cache(FULL), None),
        ({}, _cache(WINDOW, replace(FULL, non_causal=True)), "later tokens of a prompt"),
        ({"hf_text_config": ENGRAM}, _cache(FULL), "Engram with vLLM's model runner V1"),
        ({"hf_text_config": ENGRAM, "use_v2_model_runner": True}, _cache(FULL), None),
        ({"multimodal_config": PRUNED, "uses_mrope": True}, _cache(FULL), "video_pruning_rate with this model"),
        ({"multimodal_config": PRUNED}, _cache(FULL), None),
        ({"multimodal_config": MultiModalConfig(), "uses_mrope": True}, _cache(FULL), None),
        ({"kv_role": "kv_producer"}, _cache(FULL), "kv_producer"),
        ({"drafter": "medusa"}, _cache(FULL), "medusa"),
        ({"drafter": "eagle"}, _cache(FULL), None),
        ({"drafter": "ngram_gpu"}, _cache(WINDOW), None),
        ({"drafter": "mtp"}, _cache(FULL, WINDOW), "drafters with sliding windows"),  # it may be in any group
        ({"pipeline_parallel_size": 2, "drafter": "ngram"}, _cache(FULL), None),
        ({"pipeline_parallel_size": 2, "drafter": "eagle"}, _cache(FULL), "drafters .* under pipeline parallelism"),
        ({"decode_context_parallel_size": 2}, _cache(FULL), "context parallelism"),
        ({"prefill_context_parallel_size": 2}, _cache(FULL), "context parallelism"),
        ({}, _cache(FULL, MAMBA), "cache mode 'none'; set mamba_cache_mode to 'align'"),
        ({}, _cache(FULL, replace(MAMBA, mamba_cache_mode="all")), "cache mode 'all'"),
        ({}, _cache(FULL, STATE, CHUNKED), None),
        ({"drafter": "ngram"}, _cache(FULL, STATE), None),
        ({"drafter": "mtp"}, _cache(FULL, STATE), None),  # no drafter has states
        ({"drafter": "mtp"}, _cache(FULL, STATE, WINDOW), "drafters with sliding windows"),
        ({}, _cache(EncoderOnlyAttentionSpec(**SIZES)), "EncoderOnlyAttentionSpec"),
        ({}, _cache(REPLAYED), "prefix cache keeps nothing"),
        ({}, _cache(REPLAYED, FULL), None),
        ({}, _cache(), "models without KV cache, such as encoders"),
        ({}, _cache(WINDOW, drafter=True), "drafters with sliding windows"),
        ({}, _cache(CHUNKED, drafter=True), "drafters with sliding windows"),
        # vLLM's CPU reference of MLA gives wrong tokens after any external hit; it runs with
        # chunked prefill off.
        ({"use_mla": True}, _cache(MLA), "MLA with chunked prefill off"),
        ({"use_mla": True, "enable_chunked_prefill": True}, _cache(MLA), None),
        ({"version": (0, 34)}, _cache(FULL), r"supports 0\.32 and 0\.33"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, cache, named, monkeypatch):
    if "version" in changes:
        monkeypatch.setattr(vllm, "__version_tuple__", changes["version"])
    if "tells" in changes:
        _tells_of_sleeps(monkeypatch, tells=changes["tells"])
    if named is None:
        refuse_unsupported(_config(**changes), cache)
        return
    with pytest.raises(ConfigError, match=named) as refusal:
        refuse_unsupported(_config(**changes), cache)
    assert str(refusal.value).count("\n") == 0


# -- what is told before weights are loaded --------------------------------------------------------

MISSPELT = {"stor_dirs": "/nvme/kv"}
SENTENCE = "kvdisk does not know the setting 'stor_dirs'; the nearest it knows is 'store_dirs'."


def _transfer(settings: dict[str, Any], **more: Any) -> KVTransferConfig:
    asked = {"kv_connector": "KVDiskConnector", "kv_connector_extra_config": settings} | more
    return KVTransferConfig(kv_role="kv_both", **asked)


def _configure(model: Path, transfer: KVTransferConfig | None, **more: Any) -> None:
    """Have vLLM build an engine's configuration, and no more."""
    EngineArgs(model=str(model), dtype="float32", kv_transfer_config=transfer, **more).create_engine_config()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (MISSPELT, SENTENCE),
        ({"cpu_bytes": "4 gigs"}, "cpu_bytes must be a size"),
        ({"nvme_admission": "absent.module:Own"}, "whose module cannot be imported"),
        ({"store_policy": "json:JSONDecoder"}, "which does not have"),
        ({"store_dirs": "FILE", "nvme_bytes": "1GiB"}, "is not a directory"),
        ({"store_dirs": "FILE/below", "nvme_bytes": "1GiB"}, "is not a directory"),
    ],
)
def test_what_is_wrong_ends_vllms_configuration(tiny_llama, tmp_path, settings, said):
    """On this CPU, where vLLM plans no CUDA graphs and asks no hook; and by the hook, which it asks
    with them."""
    (tmp_path / "FILE").touch()
    if "store_dirs" in settings:
        settings = settings | {"store_dirs": str(tmp_path / settings["store_dirs"])}
    child = {"kv_connector": "KVDiskConnector", "kv_role": "kv_both", "kv_connector_extra_config": settings}
    for transfer in (
        _transfer(settings),
        _transfer(settings, kv_connector_module_path="kvdisk.connector"),
        _transfer({"connectors": [child]}, kv_connector="MultiConnector"),
    ):
        with pytest.raises(ConfigError, match=said) as refusal:
            _configure(tiny_llama, transfer)
        assert "\n" not in str(refusal.value)
    with pytest.raises(ConfigError, match=said):
        KVDiskConnector.requires_piecewise_for_cudagraph(settings)


@pytest.mark.parametrize(
    ("settings", "more", "said"),
    [
        ({"cpu_bytes": "900TiB"}, {}, "A rank needs 921,600.12 GiB of host memory, and .* lower cpu_bytes"),
        ("most of it", {"tensor_parallel_size": 2}, None),
        ("more than it", {"tensor_parallel_size": 2}, "2 ranks need"),
        ("most of it", {"data_parallel_size": 2}, "2 ranks of 2 engines need"),
        ({"cpu_bytes": 20_000}, {}, "cpu_bytes 20000 is too small for a block of each size"),
        ({"cpu_bytes": 60_000}, {"block_size": 32}, None),
        ({"cpu_bytes": 60_000}, {"block_size": 64}, "cpu_bytes 60000 is too small for a block"),
        ({"store_dirs": "kv", "nvme_bytes": "1MiB"}, {}, "nvme_bytes leaves .* give it more"),
    ],
)
def test_sizes_are_judged_before_the_weights(tiny_llama, tmp_path, settings, more, said):
    if isinstance(settings, str):
        share = 0.7 if settings == "most of it" else 1.4
        settings = {"cpu_bytes": int(host_memory().limit_bytes * share), "staging_bytes": 0}
    if "store_dirs" in settings:
        settings = settings | {"store_dirs": str(tmp_path / "kv")}
    child = {"kv_connector": "KVDiskConnector", "kv_role": "kv_both", "kv_connector_extra_config": settings}
    for transfer in (_transfer(settings), _transfer({"connectors": [child]}, kv_connector="MultiConnector")):
        with nullcontext() if said is None else pytest.raises(ConfigError, match=said):
            _configure(tiny_llama, transfer, **more)


@pytest.mark.parametrize(
    ("settings", "more", "said"),
    [
        ({}, {"load_format": "dummy"}, None),
        ({"store_dirs": "kv"}, {"load_format": "dummy"}, "load_format is .*dummy"),
        ({"store_dirs": "kv"}, {"prefix_caching_hash_algo": "xxhash"}, "set prefix_caching_hash_algo to sha256"),
        ({"store_policy": "spillover"}, {"enable_prefix_caching": False}, "and that is off"),
        ({"device": "gds"}, {}, "device 'gds' cannot be used: kvikio is not installed"),
        ({}, {"role": "kv_consumer"}, "set kv_role to kv_both"),
    ],
)
def test_what_the_deployment_lacks_is_said_before_the_weights(tiny_llama, tmp_path, settings, more, said, monkeypatch):
    monkeypatch.setattr(connector, "_why_no_gds", lambda: "kvikio is not installed")
    if "store_dirs" in settings:
        settings = settings | {"store_dirs": str(tmp_path / "kv"), "nvme_bytes": "1GiB"}
    transfer = _transfer(settings)
    transfer.kv_role = more.get("role", "kv_both")
    with nullcontext() if said is None else pytest.raises(ConfigError, match=said):
        _configure(tiny_llama, transfer, **{name: value for name, value in more.items() if name != "role"})


@pytest.mark.parametrize("backend", ["native", "lmcache"])
def test_vllms_flag_for_offloading_does_not_replace_kvdisk_silently(tiny_llama, backend):
    """It is given to vLLM's own arguments, which load plugins first."""
    child = {"kv_connector": "KVDiskConnector", "kv_role": "kv_both", "kv_connector_extra_config": {}}
    asked = {"kv_offloading_size": 2.5, "kv_offloading_backend": backend}
    for transfer in (_transfer({}), _transfer({"connectors": [child]}, kv_connector="MultiConnector")):
        with pytest.raises(ConfigError, match=r"--kv-offloading-size .* cpu_bytes \('2.5GiB'\)"):
            _configure(tiny_llama, transfer, **asked)
    _configure(tiny_llama, _transfer({}, kv_connector="ExampleConnector"), kv_offloading_size=1.0)
    _configure(tiny_llama, None, kv_offloading_size=1.0)


_TIER = {"type": "kvdisk", "nvme_bytes": "1GiB"}


def test_both_doors_in_one_multi_connector_are_refused(tiny_llama, tmp_path):
    """vLLM would end when both register their metrics."""
    ours = {"kv_connector": "KVDiskConnector", "kv_role": "kv_both", "kv_connector_extra_config": {}}
    spec = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 1 << 30}
    theirs = ours | {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": spec}
    _configure(tiny_llama, _transfer({"connectors": [ours, theirs]}, kv_connector="MultiConnector"))
    tiers = [_TIER | {"store_dirs": str(tmp_path / "kv")}]
    theirs["kv_connector_extra_config"] = spec | {"secondary_tiers": tiers}
    with pytest.raises(ConfigError, match="a connector and a tier of another one"):
        _configure(tiny_llama, _transfer({"connectors": [ours, theirs]}, kv_connector="MultiConnector"))


@pytest.mark.parametrize(
    ("tiers", "more", "said"),
    [
        ([_TIER], {}, None),
        ([{"type": "KVDiskTier", "module_path": "kvdisk.offloading", "nvme_bytes": "1GiB"}], {}, None),
        ([_TIER | {"nvme_byte": 1}], {}, "the nearest it knows is 'nvme_bytes'"),
        ([_TIER, _TIER], {}, "kvdisk is one tier"),
        ([_TIER], {"spec_name": None}, '"spec_name": "TieringOffloadingSpec"'),
        ([_TIER], {"load_format": "dummy"}, "load_format is .*dummy.* set the tier's namespace"),
        ([_TIER | {"namespace": "mine"}], {"prefix_caching_hash_algo": "xxhash"}, "to sha256"),
        ([_TIER], {"enable_lora": True}, "have an adapter's name, and not what it holds"),
        ([_TIER | {"namespace": "mine"}], {"nnodes": 2, "tensor_parallel_size": 2}, "on one machine, whose memory"),
        ([_TIER | {"namespace": "mine"}], {"enable_lora": True, "load_format": "dummy"}, None),
        ([{"type": "fs", "root_dir": "anywhere"}], {"load_format": "dummy"}, None),
    ],
)
@pytest.mark.parametrize("size", [None, 1.0])
def test_a_tier_of_vllms_own_connector_is_judged_before_the_weights(tiny_llama, tmp_path, tiers, more, said, size):
    ours = [tier | ({} if tier["type"] == "fs" else {"store_dirs": str(tmp_path / "kv")}) for tier in tiers]
    extra = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": ours, "cpu_bytes_to_use": 1 << 30}
    settings = {name: value for name, value in (extra | more).items() if value is not None and name in extra}
    transfer = _transfer(settings, kv_connector="OffloadingConnector")
    flags = {name: value for name, value in more.items() if name not in extra} | {"kv_offloading_size": size}
    with nullcontext() if said is None else pytest.raises(ConfigError, match=said) as caught:
        _configure(tiny_llama, transfer, **flags)
    assert said is None or str(caught.value).endswith(".")


class _Placing(MultiprocExecutor):
    """Somebody's own, which may place workers on other machines, as ``RayExecutorV2`` does."""


@pytest.mark.parametrize("namespace", [{}, {"namespace": "mine"}], ids=["found", "named"])
@pytest.mark.parametrize(
    ("placing", "said"),
    [
        ({"distributed_executor_backend": "mp"}, None),
        ({"distributed_executor_backend": "uni"}, None),
        ({"distributed_executor_backend": "ray"}, "'ray' and data_parallel_backend 'mp' nobody knows"),
        ({"distributed_executor_backend": "external_launcher"}, "'external_launcher' .* set both to 'mp'"),
        ({"distributed_executor_backend": _Placing}, "_Placing"),
        ({"distributed_executor_backend": "a_module.Executor"}, "a_module.Executor"),
        ({"data_parallel_backend": "ray"}, "data_parallel_backend 'ray'"),
        ({"nnodes": 2, "tensor_parallel_size": 2}, "on one machine, whose memory it reads: use KVDiskConnector"),
    ],
)
def test_a_tier_is_refused_where_workers_may_be_on_other_machines(folder, tmp_path, placing, said, namespace):
    """Whoever places them; also one that is alone. Half of each row would be stored as zeros."""
    config = vllm_config(folder)
    for name, value in placing.items():
        setattr(config.parallel_config, name, value)
    tier = _TIER | {"store_dirs": str(tmp_path / "kv")} | namespace
    extra = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier]}
    config.kv_transfer_config = _transfer(extra, kv_connector="OffloadingConnector")
    with nullcontext() if said is None else pytest.raises(ConfigError, match=said):
        refuse_tiers_early(config)


@pytest.mark.parametrize("block_tokens", [32, None])
def test_the_least_sizes_are_those_of_the_model(folder, block_tokens):
    """Where the block size is not the user's, vLLM may yet choose a larger one."""
    config = vllm_config(folder)
    config.cache_config.user_specified_block_size = block_tokens is not None
    groups = [KVCacheGroupSpec(["layer.0", "layer.1"], FULL)]
    real = geometry_of(config, KVCacheConfig(8, [], groups, hash_block_size=32))
    least = least_geometry(config)
    assert least.rank_count == real.rank_count
    assert least.groups[0].payload_bytes == real.groups[0].payload_bytes // (1 if block_tokens else 2)
    config.model_config.hf_text_config.layer_types = ["full_attention", "sliding_attention"]
    assert least_geometry(config) is None


def test_a_server_ends_with_the_sentence_as_its_last_line(tiny_llama):
    transfer = {"kv_connector": "KVDiskConnector", "kv_role": "kv_both"}
    settings = {"kv_connector_extra_config": {"cpu_bytes": "900TiB"}}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny_llama)]
    command.append(f"--kv-transfer-config={json.dumps(transfer | settings)}")
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("kvdisk.errors.ConfigError: A rank needs 921,600.12 GiB of host memory") and last.endswith(
        "; lower cpu_bytes."
    )


@pytest.mark.parametrize("machines", [{}, {"nnodes": 2, "tensor_parallel_size": 2}], ids=["one", "two"])
def test_what_is_right_passes_and_nothing_is_made_yet(tiny_llama, tmp_path, machines):
    settings = {"store_dirs": str(tmp_path / "kv"), "nvme_bytes": "1Gi"}
    _configure(tiny_llama, _transfer(settings), enforce_eager=True, **machines)
    assert not KVDiskConnector.requires_piecewise_for_cudagraph(settings)
    assert not (tmp_path / "kv").exists()


def test_settings_of_a_connector_that_builds_on_ours_are_left_to_it(tiny_llama, tmp_path, monkeypatch):
    (tmp_path / "built_on.py").write_text(
        "from kvdisk.connector import KVDiskConnector\nclass Own(KVDiskConnector):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    transfer = _transfer({"of_its_own": 1}, kv_connector="Own", kv_connector_module_path="built_on")
    _configure(tiny_llama, transfer)


def test_sleep_mode_and_the_gpus_own_way_to_the_drive_are_refused_together(folder, monkeypatch):
    _tells_of_sleeps(monkeypatch, tells=True)
    config = vllm_config(folder, sleeps=True)
    config.kv_transfer_config.kv_connector_extra_config["device"] = "gds"
    with pytest.raises(ConfigError, match="device 'gds' with sleep mode: leave device out"):
        KVDiskConnector(config, KVConnectorRole.SCHEDULER, _cache(FULL))


def test_another_vllm_ends_the_configuration_too(tiny_llama, monkeypatch):
    monkeypatch.setattr(vllm, "__version_tuple__", (0, 34))
    with pytest.raises(ConfigError, match=r"supports 0\.32 and 0\.33"):
        _configure(tiny_llama, _transfer({}))


def _newer(self: Any, *, novel: int) -> None:
    """What a hook without parameters may become."""


def test_a_hook_that_this_vllm_calls_otherwise_ends_the_configuration_too(tiny_llama, monkeypatch):
    monkeypatch.setattr(KVConnectorBase_V1, "wait_for_save", _newer)
    said = r"calls the hook wait_for_save with \(\*, novel\): kvdisk takes \(\)"
    child = {"kv_connector": "KVDiskConnector", "kv_role": "kv_both", "kv_connector_extra_config": {}}
    for transfer in (_transfer({}), _transfer({"connectors": [child]}, kv_connector="MultiConnector")):
        with pytest.raises(ConfigError, match=said):
            _configure(tiny_llama, transfer)
    with pytest.raises(ConfigError, match=said):
        KVDiskConnector.requires_piecewise_for_cudagraph({})
    with pytest.raises(ConfigError, match=said):
        KVDiskConnector(vllm_config(tiny_llama), KVConnectorRole.SCHEDULER, _cache(FULL))


def test_a_hook_of_a_tier_that_this_vllm_calls_otherwise_ends_the_configuration_too(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.setattr(SecondaryTierManager, "drain_jobs", _newer)
    tier = _TIER | {"store_dirs": str(tmp_path / "kv")}
    extra = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier], "cpu_bytes_to_use": 1 << 30}
    with pytest.raises(ConfigError, match=r"calls the hook drain_jobs with \(\*, novel\): kvdisk takes \(\)"):
        _configure(tiny_llama, _transfer(extra, kv_connector="OffloadingConnector"))


def test_an_engine_ends_with_the_sentence_last_and_before_it_has_processes(tiny_llama):
    with pytest.raises(ConfigError) as refusal:
        LLM(str(tiny_llama), enforce_eager=True, kv_transfer_config=_transfer(MISSPELT))
    assert traceback.format_exception(refusal.value)[-1] == f"kvdisk.errors.ConfigError: {SENTENCE}\n"
    assert not multiprocessing.active_children(), "so no weights were read"


# -- sizes and tensors -----------------------------------------------------------------------------


def test_of_diffusion_only_prompts_are_stored():
    """A canvas that is only read is handed out without the step that computes its KV."""
    for is_diffusion in (False, True):
        groups = geometry_of(_config(is_diffusion=is_diffusion), _cache(FULL, WINDOW)).groups
        assert [group.prompt_only for group in groups] == [is_diffusion] * 2


def test_geometry_of_uniform_and_window_groups():
    wide = FullAttentionSpec(**(SIZES | {"head_size": 64}))
    uniform = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"layer.0": FULL, "layer.0b": wide})
    groups = [KVCacheGroupSpec(["layer.0", "layer.0b"], uniform), KVCacheGroupSpec(["layer.1"], WINDOW)]
    geometry = geometry_of(_config(), KVCacheConfig(8, [], groups, hash_block_size=32))
    assert geometry.groups[0].payload_bytes == FULL.page_size_bytes + wide.page_size_bytes
    assert [group.window_tokens for group in geometry.groups] == [None, 64]
    assert geometry.slot_sizes == tuple(sorted({group.slot_bytes for group in geometry.groups}))
    # A stage without layers of a group keeps its whole description.
    stages = [[KVCacheGroupSpec([], uniform), groups[1]], [groups[0], KVCacheGroupSpec([], WINDOW)]]
    for some in (stages, stages[::-1]):
        first = KVCacheConfig(8, [], some[0], hash_block_size=32)
        by_stage = geometry_of(_config(pipeline_parallel_size=2), first, some)
        assert by_stage.groups == geometry.groups and by_stage.rank_count == 2


@pytest.mark.parametrize(("interval", "state_tokens"), [(None, 32), (0, 512), (32, 32), (128, 128), (4096, 512)])
def test_a_state_is_as_large_as_it_is_and_counts_as_often_as_it_is_kept(interval, state_tokens):
    padded = replace(STATE, page_size_padded=FULL.page_size_bytes)
    cache = replace(_cache(FULL, padded, CHUNKED, REPLAYED), prefix_cache_retention_interval=interval)
    full, state, chunked = geometry_of(_config(), cache).groups
    assert (state.payload_bytes, state.state_tokens, state.least_bytes) == (64, state_tokens, 0)
    assert (state.window_tokens, state.chunk_tokens) == (2, None)
    assert (chunked.window_tokens, chunked.chunk_tokens) == (None, 64)
    assert full.reads_all and not state.reads_all and not chunked.reads_all


@pytest.mark.parametrize(
    ("specs", "tensor", "prefill", "decode", "replicated"),
    [
        ((MLA, MLA), 4, 1, 1, True),
        ((MLA,), 1, 1, 1, False),
        ((MLA, FULL), 2, 1, 1, False),
        ((MLA,), 2, 2, 1, True),  # PCP alone divides the work on a prompt, and not its KV
        ((MLA,), 1, 2, 1, True),
        ((MLA,), 4, 1, 2, False),  # each rank has half the tokens
        ((MLA,), 2, 2, 4, False),
    ],
)
def test_mla_is_the_same_on_every_rank(specs, tensor, prefill, decode, replicated):
    sizes = {"tensor_parallel_size": tensor, "prefill_context_parallel_size": prefill}
    config = _config(**sizes, decode_context_parallel_size=decode)
    geometry = geometry_of(config, _cache(*specs))
    assert geometry.replicated == replicated
    assert geometry.shard_count == (1 if replicated else tensor * prefill)
    assert {group.block_tokens for group in geometry.groups} == {32 * decode}
    ranks = [ParallelConfig(**sizes, rank=rank) for rank in range(2 * tensor * prefill)]  # of two engines
    assert [rank_of(SimpleNamespace(parallel_config=rank)) for rank in ranks] == [*range(tensor * prefill)] * 2


@pytest.mark.parametrize(
    ("changes", "hosts", "parts"),
    [
        ({}, 1, 4),
        ({"nnodes_within_dp": 2}, 2, 4),
        ({"nnodes_within_dp": 2, "use_mla": True}, 2, 2),  # each machine has all of a block
        ({"nnodes_within_dp": 4, "use_mla": True}, 4, 4),
        ({"distributed_executor_backend": "ray"}, 4, 4),
        ({"distributed_executor_backend": "external_launcher"}, 4, 4),
        ({"distributed_executor_backend": object}, 4, 4),
        ({"data_parallel_backend": "ray"}, 4, 4),
        ({"distributed_executor_backend": "ray", "use_mla": True}, 1, 1),  # who shares a drive is not known
        ({"data_parallel_size_local": 2}, 1, 4),
    ],
)
def test_on_how_many_hosts_the_ranks_may_lie(changes, hosts, parts):
    cache = _cache(MLA if "use_mla" in changes else FULL)
    geometry = geometry_of(_config(tensor_parallel_size=4, **changes), cache)
    assert (geometry.hosts, geometry.shard_count) == (hosts, parts)
    assert [geometry.shard_of(rank) for rank in range(4)] == sorted(
        part for part in range(parts) for _ in range(4 // parts)
    )
    writers = [[rank for rank in range(4) if geometry.writes(rank, segment)] for segment in range(4)]
    assert all(sorted(map(geometry.shard_of, ranks)) == list(range(parts)) for ranks in writers), "one of each part"


def test_machines_do_not_change_what_blocks_mean(folder):
    assert _fingerprint(folder, {"parallel_config.nnodes": 2}) == _fingerprint(folder)


def test_a_stage_without_kv_is_refused():
    cache = KVCacheConfig(8, [], [KVCacheGroupSpec([], FULL)], hash_block_size=32)
    with pytest.raises(ConfigError, match="stages without KV cache"):
        layer_blocks(cache, {})


def test_blocks_are_seen_as_bytes_whatever_the_layout():
    cache = _cache(FULL)
    values = torch.arange(8 * 32 * 2 * 64, dtype=torch.float32)
    plain = values.view(8, 2, 32, 64)
    ((view,),) = layer_blocks(cache, {"layer.0": plain})
    assert view.shape == (8, FULL.page_size_bytes)
    assert view.data_ptr() == plain.data_ptr(), "vLLM's own memory, no copy"
    assert bytes(view[3].numpy()) == plain[3].contiguous().view(torch.uint8).numpy().tobytes()
    # Heads and tokens swapped; kernel blocks of half the size: the same bytes in the same block.
    for same in (plain.transpose(1, 2), values.view(16, 2, 16, 64)):
        ((other,),) = layer_blocks(cache, {"layer.0": same})
        assert torch.equal(other, view)
    torn, small = torch.zeros(8, 2, 32, 128)[..., :64], torch.zeros(8, 2, 32, 32)
    for wrong, named in ((torn, "not contiguous"), (small, "layout")):
        with pytest.raises(ConfigError, match=named):
            layer_blocks(cache, {"layer.0": wrong})


# -- the namespace ---------------------------------------------------------------------------------


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model of the test's own."""
    register()
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def _identity(
    folder: Path, changes: dict[str, Any] | None = None, *, groups: int = 1, more: tuple[KVCacheSpec, ...] = ()
) -> tuple[bytes, dict[str, Any]]:
    """Return the fingerprint of an engine of this model, and what describes it; ``changes``: to its
    configuration, as "part.field"."""
    return fingerprint_of(_changed(folder, changes or {}), _cache(*[FULL] * groups, *more))


def _fingerprint(folder: Path, *changes: dict[str, Any], **more: Any) -> bytes:
    return _identity(folder, *changes, **more)[0]


def _changed(folder: Path, changes: dict[str, Any]) -> Any:
    config = vllm_config(folder)
    for name, value in changes.items():
        *parts, field = name.split(".")
        setattr(reduce(getattr, parts, config), field, value)
    return config


def _change_the_last_weight(folder: Path) -> None:
    (weights,) = folder.glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    header_bytes = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + header_bytes])
    start = max(tensor["data_offsets"][0] for name, tensor in header.items() if name != "__metadata__")
    content[8 + header_bytes + start] ^= 1
    weights.write_bytes(content)


def test_whatever_changes_the_bytes_changes_the_fingerprint(folder, tmp_path):
    drafter = vllm_config(folder).model_config
    drafter.model = str(shutil.copytree(folder, tmp_path / "drafter"))
    changes: dict[str, Any] = {
        "cache_config.cache_dtype": "fp8",
        "model_config.dtype": "bfloat16",
        "parallel_config.tensor_parallel_size": 2,
        "model_config.quantization": "awq",
        "model_config.quantization_config": QuantizationConfigArgs(linear=QuantSpec(weight="fp8_per_tensor_static")),
        "model_config.model_class_overrides": {"LlamaForCausalLM": "second_machine:Class"},
        "cache_config.prefix_caching_hash_algo": "sha256_cbor",
        "model_config.hf_config.rope_parameters": {"rope_type": "default", "rope_theta": 1234.5},
        "speculative_config": SimpleNamespace(method="eagle", draft_model_config=drafter),
    }
    first = _fingerprint(folder)
    assert first == _fingerprint(folder)
    assert first == _fingerprint(folder, {"model_config.model": str(shutil.copytree(folder, tmp_path / "moved"))})
    found = {name: _fingerprint(folder, {name: value}) for name, value in changes.items()}
    assert found["speculative_config"] == _fingerprint(folder, {"speculative_config": changes["speculative_config"]})
    _change_the_last_weight(tmp_path / "drafter")
    found["another drafter"] = _fingerprint(folder, {"speculative_config": changes["speculative_config"]})
    found["more groups"] = _fingerprint(folder, groups=2)
    # Of three layers one is on the other stage, or two are.
    stages = [KVCacheGroupSpec([f"layer.{at}" for at in some], FULL) for some in ((0,), (1, 2), (0, 1), (2,))]
    for cut in (stages[:2], stages[2:]):
        found[str(cut)] = fingerprint_of(vllm_config(folder), _cache(FULL), [[group] for group in cut])[0]
    shards = {"parallel_config.decode_context_parallel_size": 2}
    for more in (
        {},
        {"parallel_config.prefill_context_parallel_size": 2},
        {"parallel_config.cp_kv_cache_interleave_size": 8},
        {"parallel_config.dcp_kv_cache_interleave_size": 16},  # takes the other's place, in the workers
    ):
        found[f"shards, {more}"] = _fingerprint(folder, shards | more)
    for spec in (MLA, FULL):
        by_ranks = [
            fingerprint_of(_changed(folder, {"parallel_config.tensor_parallel_size": ranks}), _cache(MLA, spec))[0]
            for ranks in (1, 2, 4)
        ]
        assert len(set(by_ranks)) == (1 if spec is MLA else 3), "MLA alone is the same on any number of ranks"
    _change_the_last_weight(folder)
    found["one weight"] = _fingerprint(folder)
    assert len({first, *found.values()}) == 1 + len(found)


def test_how_images_are_processed_is_in_the_fingerprint(folder, monkeypatch):
    """vLLM's hash of an image has what is in the file and in the request, and not the engine's own
    settings."""
    changes = [
        {},
        {"mm_processor_kwargs": {"do_resize": False}},
        {"media_io_kwargs": {"image": {"rgba_background_color": [0, 0, 0]}}},
        {"mm_device_do_normalize": False},
        {"video_pruning_rate": 0.5},
        {"video_pruning_rate": 0.5, "video_pruning_method": "vidcom2"},
    ]

    def fingerprint(change: dict[str, Any]) -> bytes:
        return _fingerprint(folder, {"model_config.multimodal_config": MultiModalConfig(**change)})

    found = [_fingerprint(folder), *map(fingerprint, changes)]
    assert fingerprint({"mm_processor_cache_gb": 1.0, "skip_mm_profiling": True}) == fingerprint({})
    for content in ("{}", '{"do_resize": false}'):
        (folder / "preprocessor_config.json").write_text(content)
        found.append(fingerprint({}))
    scales = folder / "scales.json"
    for content in ("{}", '{"visual.0.attn": {"q": 2.0, "k": 1.0, "v": 1.0}}'):
        scales.write_text(content)
        found.append(fingerprint({"mm_encoder_attn_dtype": "fp8", "mm_encoder_fp8_scale_path": str(scales)}))
    for variable in ("VLLM_MEDIA_CONNECTOR", "VLLM_VIDEO_LOADER_BACKEND", "XHS_VIDEO_JPEG_QUALITY"):
        without = _fingerprint(folder)
        monkeypatch.setenv(variable, "40")
        assert _fingerprint(folder) == without, "of a model that takes none"
        found.append(fingerprint({}))
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("architecture", ["NemotronH_Nano_VL_V2", "Dots3NoteForCausalLM", "LlamaForCausalLM"])
def test_limits_by_which_media_are_processed_are_in_the_fingerprint(architecture, folder):
    """Of two of vLLM's processors; the others only count by them."""

    def of(length: int, **limits: int) -> bytes:
        media = MultiModalConfig(limit_per_prompt=limits)
        changes = {"model_config._architecture": architecture, "model_config.multimodal_config": media}
        return _fingerprint(folder, changes | {"model_config.max_model_len": length})

    same = architecture == "LlamaForCausalLM"
    assert of(512, audio=1) == of(512, audio=1)
    assert (of(512) == of(1024)) == (of(512) == of(512, audio=0)) == same


def test_which_of_several_weight_files_are_loaded_is_in_the_fingerprint(folder):
    """vLLM: "auto" takes ``consolidated*.safetensors`` where there are any, "hf" those of the
    index."""
    (weights,) = folder.glob("*.safetensors")
    alike = ("auto", "hf", "safetensors", "fastsafetensors")

    def fingerprint(load_format: str, extra: dict[str, Any] | None = None, **more: Any) -> bytes:
        load = LoadConfig(load_format=load_format, model_loader_extra_config=extra or {})
        return _fingerprint(folder, {"load_config": load, **more})

    assert len({*map(fingerprint, alike), fingerprint("hf", {"enable_multithread_load": True})}) == 1
    by_hand = fingerprint("sharded_state", {"pattern": "model-{rank}-{part}.safetensors"})
    assert len({fingerprint("auto"), fingerprint("sharded_state"), fingerprint("pt"), by_hand}) == 4
    for name in ("consolidated.safetensors", "other.safetensors"):
        shutil.copy(weights, folder / name)
    assert fingerprint("auto") == fingerprint("mistral") != fingerprint("hf") == fingerprint("safetensors")
    files = [fingerprint("auto", **{"model_config.model": str(file)}) for file in folder.glob("*.safetensors")]
    assert len({fingerprint("auto"), *files}) == 4, "vLLM is given one file"


@pytest.mark.parametrize(("caches", "cache_gb"), [(False, 0.0), (True, 0.0), (False, 1.0)])
def test_where_vllm_counts_images_the_nvme_tier_is_refused(folder, caches, cache_gb):
    """The first image of the next process would be taken for the first one of this."""
    counts = not caches and not cache_gb
    media = MultiModalConfig(mm_processor_cache_gb=cache_gb)
    config = _changed(folder, {"model_config.multimodal_config": media, "cache_config.enable_prefix_caching": caches})
    renderer = SimpleNamespace(model_config=config.model_config, config=config, _validate_mm_uuids=lambda *_: None)
    images = SimpleNamespace(get_all_counts=lambda: {"image": 1})
    known = BaseRenderer._process_mm_uuids(renderer, {}, images, {}, "first")
    assert (known == {"image": ["first-image-0"]}) == counts, "this vLLM counts in other cases"
    with pytest.raises(ConfigError, match="known by their content") if counts else nullcontext():
        fingerprint_of(config, _cache(FULL))


PLAIN = KVCacheConfig(8, [], [KVCacheGroupSpec(["layer.0"], FULL)], hash_block_size=32, kv_cache_layout="LBNHC")


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's kernels are those for CUDA, as far as anybody asks for the namespace."""
    monkeypatch.setattr(descriptions, "current_platform", SimpleNamespace(is_cuda=lambda: True))


def _by_version(
    monkeypatch: pytest.MonkeyPatch, config: Any, cache: KVCacheConfig, versions: tuple[Any, ...]
) -> set[bytes]:
    """Return the namespaces that these versions, of vLLM and transformers, have."""
    found = set()
    for minor, library in versions:
        monkeypatch.setattr(identity, "vllm_minor_version", lambda minor=minor: minor)
        monkeypatch.setattr(configuration_utils, "__version__", library)
        found.add(fingerprint_of(config, cache)[0])
    return found


VERSIONS = (((0, 32), "5.1.0"), ((0, 33), "5.1.0"), ((0, 33), "5.2.0"))


@pytest.mark.usefixtures("on_cuda")
def test_versions_that_write_the_same_bytes_share_a_namespace(folder, monkeypatch):
    assert len(_by_version(monkeypatch, vllm_config(folder), PLAIN, VERSIONS)) == 1
    block_major = replace(PLAIN, kv_cache_layout="BLNHC")
    assert len(_by_version(monkeypatch, vllm_config(folder), block_major, VERSIONS)) == 1
    told = fingerprint_of(vllm_config(folder), PLAIN)[1]["facts"]
    assert told["vllm"] == "null" and told["code"] != "null" and "model_config.transformers_version" not in told


def _plain_but(**changes: Any) -> KVCacheConfig:
    return replace(PLAIN, kv_cache_groups=[KVCacheGroupSpec(["layer.0"], replace(FULL, **changes))])


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(
    ("cache", "changes"),
    [
        (replace(PLAIN, kv_cache_layout="LBHNC"), {}),  # by heads within the kernel's blocks, which are a backend's
        (replace(PLAIN, kv_cache_layout=None), {}),
        (_plain_but(kv_quant_mode=KVQuantMode.FP8_PER_TENSOR), {}),
        (_plain_but(dtype=torch.uint8), {}),
        (_plain_but(num_head_slots=4), {}),
        (_plain_but(state_content_bytes=512), {}),
        (_plain_but(tokens_per_state=2), {}),
        (replace(PLAIN, kv_cache_groups=[KVCacheGroupSpec(["layer.0"], MLA)]), {}),
        (
            replace(PLAIN, kv_cache_groups=[KVCacheGroupSpec(["layer.0"], FULL), KVCacheGroupSpec(["layer.1"], STATE)]),
            {},
        ),
        (PLAIN, {"model_config._architecture": "TransformersForCausalLM"}),
        (PLAIN, {"model_config._architecture": "OfAPlugin"}),
        (PLAIN, {"model_config.multimodal_config": object()}),
        (PLAIN, {"speculative_config": SimpleNamespace(method="mtp", draft_model_config=None)}),
    ],
)
def test_where_the_bytes_are_not_all_told_each_version_has_its_own(folder, monkeypatch, cache, changes):
    config = _changed(folder, changes)
    monkeypatch.setattr(identity, "get_conv_state_layout", lambda: "SD")
    assert len(_by_version(monkeypatch, config, cache, VERSIONS)) == 3


def test_on_a_cpu_each_version_has_its_own(folder, monkeypatch):
    """Its attention packs keys and values as it likes."""
    assert len(_by_version(monkeypatch, vllm_config(folder), PLAIN, VERSIONS)) == 3


@pytest.mark.usefixtures("on_cuda")
def test_whatever_tells_of_bytes_changes_a_namespace_without_a_version(folder, monkeypatch):
    found = [fingerprint_of(vllm_config(folder), PLAIN)[0]]
    more = {"block_size": 64, "num_kv_heads": 1, "head_size": 64, "head_size_v": 16, "dtype": torch.bfloat16}
    more |= {"sliding_window": 64, "page_size_padded": 1 << 20}
    found += [fingerprint_of(vllm_config(folder), _plain_but(**{name: value}))[0] for name, value in more.items()]
    window, chunks = ([KVCacheGroupSpec(["layer.0"], spec)] for spec in (WINDOW, CHUNKED))
    others = [replace(PLAIN, kv_cache_groups=groups) for groups in (window, chunks)]
    others += [replace(PLAIN, kv_cache_layout="BLNHC"), replace(PLAIN, hash_block_size=16)]
    found += [fingerprint_of(vllm_config(folder), cache)[0] for cache in others]
    monkeypatch.setattr(identity, "hash_chain", lambda _: "another")
    found.append(fingerprint_of(vllm_config(folder), PLAIN)[0])
    monkeypatch.setattr(identity, "code_digest", lambda *_: "another")
    found.append(fingerprint_of(vllm_config(folder), PLAIN)[0])
    assert len(set(found)) == len(found)


def test_groups_are_described_by_what_is_not_as_it_is_by_default():
    """As text that every version gives."""
    (told,) = descriptions.group_descriptions([PLAIN.kv_cache_groups])
    assert told == {
        "layers": ["layer.0"],
        "specs": [
            "FullAttentionSpec 16384 [('block_size', 32), ('dtype', torch.float32), ('head_size', 32), "
            "('head_size_v', 32), ('num_kv_heads', 2)]"
        ],
    }


def test_the_content_of_a_file_that_says_how_to_quantise_is_in_the_fingerprint(folder, tmp_path):
    changes = {"model_config.hf_config.quantization_config_file": str(tmp_path / "torchao.json")}
    found = set()
    for content in ("int4", "int8"):
        (tmp_path / "torchao.json").write_text(content)
        found.add(_fingerprint(folder, changes))
    assert len(found) == 2


def test_which_of_a_groups_layers_are_quantised_is_in_the_fingerprint(folder):
    """By their specifications, and by the setting where only the first layer's is known."""
    skips = (["1"], ["2"], ["1", "2"], [])
    found = {_fingerprint(folder, {"cache_config.kv_cache_dtype_skip_layers": layers}) for layers in skips}
    assert len(found) == 4
    assert _fingerprint(folder) in found
    quantised = replace(FULL, dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)
    found = set()
    for specs in ((FULL, quantised), (quantised, FULL)):
        layers = {f"layer.{at}": spec for at, spec in enumerate(specs)}
        group = KVCacheGroupSpec(list(layers), UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=layers))
        found.add(fingerprint_of(vllm_config(folder), replace(PLAIN, kv_cache_groups=[group]))[0])
    assert len(found) == 2


@pytest.mark.parametrize("rope", ["longrope", "dynamic", "default"])
def test_the_longest_context_counts_where_rotary_embeddings_depend_on_it(rope, folder):
    """That for which the model is built. vLLM sets a length that it chooses itself after that."""

    def of(length: int, asked: int | None = None) -> bytes:
        changes = {
            "model_config.hf_config.rope_parameters": {"rope_type": rope},
            "model_config.max_model_len": length,
            "model_config.original_max_model_len": asked,
        }
        return _fingerprint(folder, changes)

    depends = rope != "default"
    assert of(512, -1) == of(1024, -1)
    assert (of(512) != of(1024)) == (of(512) != of(512, -1)) == depends


def test_what_tunes_the_attention_of_llama_4_is_in_the_fingerprint(folder):
    """vLLM sets it in the workers, which may be other processes than the scheduler's."""

    def of(length: int = 512, asked: int | None = None, **generation: Any) -> bytes:
        changes = {
            "model_config.hf_text_config.attn_temperature_tuning": True,
            "model_config.max_model_len": length,
            "model_config.original_max_model_len": asked,
            "model_config.override_generation_config": generation,
        }
        return _fingerprint(folder, changes)

    tuned = of(attn_temperature_tuning=True)
    assert of(32_768) == of() == of(40_000, attn_temperature_tuning=False)
    assert tuned == of(32_769) == of(1 << 20)
    assert of(512, -1) == of(1024, -1)
    assert len({of(), tuned, of(512, -1)}) == 3
    (folder / "generation_config.json").write_text(json.dumps({"attn_temperature_tuning": True}))
    assert of() == tuned


def test_hashes_are_chained_as_they_were(monkeypatch):
    """Another chain is another namespace: say so in the CHANGELOG."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert descriptions.hash_chain("sha256") == "6119ed9517fd5e7901769e3ca47a2ab5b862f8835cf3a497ad9b8c2865b1d36c"
    assert descriptions.hash_chain("sha256_cbor") != descriptions.hash_chain("sha256")


def test_the_code_of_a_model_is_its_modules_and_what_they_import(tmp_path):
    models, rotary = (tmp_path / "vllm" / "model_executor" / name for name in ("models", "layers/rotary_embedding"))
    for file, text in {
        models / "__init__.py": "",
        models / "own.py": "from .base import Base\nfrom vllm.model_executor.models.far import Far\nfrom . import near",
        models / "base.py": "from .utils import load\nimport torch",
        models / "far.py": "",
        models / "near.py": "",
        models / "utils.py": "",
        models / "unused.py": "",
        rotary / "__init__.py": "from .yarn import Yarn",
        rotary / "yarn.py": "",
        rotary / "unused.py": "",
    }.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def digest() -> str | None:
        return identity.code_digest(tmp_path, "vllm.model_executor.models.own")

    seen = {digest()}
    for file in (models / "utils.py", models / "unused.py", rotary / "unused.py"):
        file.write_text("changed = True")
        assert {digest()} == seen
    for file in (models / "own.py", models / "base.py", models / "far.py", models / "near.py", rotary / "yarn.py"):
        file.write_text(f"{file.read_text()}\nchanged = True")
        seen.add(digest())
    assert len(seen) == 6 and None not in seen
    for elsewhere in ("vllm.model_executor.models.absent", "a_plugin.own", "vllm.model_executor.models.utils"):
        assert identity.code_digest(tmp_path, elsewhere) is None


def test_what_differs_has_a_name(folder):
    """By which ``kvdisk why`` says why one namespace does not serve the other's requests."""
    facts = [_identity(folder, changes)[1]["facts"] for changes in ({}, {"cache_config.cache_dtype": "fp8"})]
    assert {name for name in facts[0] if facts[0][name] != facts[1][name]} == {"kv_dtype"}
    assert facts[1]["kv_dtype"] == '"fp8"' and json.loads(facts[0]["hash"])[0] == "sha256"
    assert {"vllm", "weights", "model_config.vocab_size", "platform"} <= facts[0].keys()
    assert max(map(len, facts[0].values())) <= 80


def test_the_layout_of_convolution_states_is_in_the_fingerprint_where_there_are_any(folder, monkeypatch):
    monkeypatch.setattr(identity, "get_conv_state_layout", lambda: "SD")
    plain, states = _fingerprint(folder), _fingerprint(folder, more=(STATE,))
    wider = _fingerprint(folder, more=(replace(STATE, shapes=((4, 8),)),))
    monkeypatch.setattr(identity, "get_conv_state_layout", lambda: "DS")
    assert _fingerprint(folder) == plain
    assert len({plain, states, wider, _fingerprint(folder, more=(STATE,))}) == 4


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("load_config.load_format", "dummy", "load_format is 'dummy'"),
        ("load_config.load_format", "ipc_cache", "load_format is 'ipc_cache'"),
        ("load_config.load_format", "modelexpress", "load_format is 'modelexpress'"),
        ("load_config.load_format", "npcache", "load_format is 'npcache'"),
        ("cache_config.prefix_caching_hash_algo", "xxhash", "set prefix_caching_hash_algo to sha256"),
        ("model_config.model", "", "weight files"),
    ],
)
def test_without_identity_the_nvme_tier_is_refused(folder, name, value, said):
    empty = folder / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match=said):
        _fingerprint(folder, {name: value or str(empty)})


def test_weights_that_change_while_an_engine_starts_are_not_known(folder):
    """Which of them it has loaded is not known. A later start takes them as they are."""
    config = vllm_config(folder)

    def start(change: Callable[[], object] = lambda: None) -> Named | None:
        read_weights_early(config)  # as its configuration is built
        change()
        return identity_of(lambda digest: fingerprint_of(config, PLAIN, digest=digest)).wait(WAIT_S)

    before = start()
    with pytest.raises(WeightsChanged, match="changed while the engine was starting"):
        start((folder / "model.safetensors").touch)
    assert start() == before
    other = Path(shutil.copytree(folder, folder.with_name("other")))
    with pytest.raises(WeightsChanged, match="changed while the engine was starting"):
        start(lambda: (folder.rename(folder.with_name("before")), other.rename(folder)))
    assert start() == before


def _header(**tensors: Any) -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("content", "file_bytes"),
    [
        (b"", 0),
        (b"\xff" * 64, 0),
        ((1 << 62).to_bytes(8, "little") + b"{}", 0),
        ((3).to_bytes(8, "little") + b"{}", 0),
        ((200_000).to_bytes(8, "little") + b"[" * 200_000, 0),
        ((2).to_bytes(8, "little") + b"[]", 0),
        (_header(a={"data_offsets": [0]}), 0),
        (_header(a={"data_offsets": [0.0, 4.0]}) + b"1234", 0),
        (_header(a={"data_offsets": [-100, 4]}) + b"1234", 0),
        (_header(a={"data_offsets": [4, 0]}) + b"1234", 0),
        (_header(a={"data_offsets": [0, 5]}) + b"1234", 0),
        (_header(a={"data_offsets": [1 << 70, (1 << 70) + 4]}) + b"1234", 0),
        ((10 << 30).to_bytes(8, "little"), 11 << 30),  # with a hole, and nothing else
    ],
)
def test_a_weight_file_of_garbage_is_named(folder, content, file_bytes):
    """Whatever length it claims, of its header or of a tensor: no more is read than the file can
    have."""
    file = folder / "other.safetensors"
    file.write_bytes(content)
    os.truncate(file, max(len(content), file_bytes))
    with pytest.raises(ConfigError, match=r"other\.safetensors") as refusal:
        identity_of(lambda digest: fingerprint_of(vllm_config(folder), PLAIN, digest=digest))
    assert str(refusal.value).count("\n") == 0
