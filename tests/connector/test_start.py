# SPDX-License-Identifier: Apache-2.0
"""What happens at start: how vLLM finds the connector, what is refused, and what makes a
namespace."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvdisk.connector import adapter
from kvdisk.connector.adapter import geometry_of, layer_blocks, refuse_unsupported
from kvdisk.connector.identity import fingerprint_of
from kvdisk.connector.plugin import register
from kvdisk.errors import ConfigError

pytestmark = pytest.mark.vllm

SIZES = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}


WINDOWED_DRAFTER = KVCacheGroupSpec(["layer.0"], SlidingWindowSpec(**SIZES, sliding_window=64), is_eagle_group=True)
MLA = MLAAttentionSpec(**(SIZES | {"num_kv_heads": 1, "head_size": 576}))
MLA_CASES = [
    ((MLA,), 4, True),
    ((MLA, MLA), 2, True),
    ((MLA,), 1, False),
    ((MLA, FullAttentionSpec(**SIZES)), 2, False),
]


def _cache(*specs: KVCacheSpec) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer.{at}"], spec) for at, spec in enumerate(specs)]
    return KVCacheConfig(8, [], groups, hash_block_size=32)


def _config(**changes: Any) -> SimpleNamespace:
    """Return what the adapter reads of a VllmConfig."""
    values = {
        "parallel_config": SimpleNamespace(
            pipeline_parallel_size=1,
            tensor_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        "model_config": SimpleNamespace(is_encoder_decoder=False),
        "speculative_config": None,
        "kv_transfer_config": SimpleNamespace(kv_role="kv_both"),
    }
    return SimpleNamespace(**(values | changes))


def test_vllm_finds_the_connector_by_its_name() -> None:
    (entry,) = [entry for entry in entry_points(group="vllm.general_plugins") if entry.name == "kvdisk"]
    assert entry.load() is register
    register()
    register()
    config = KVTransferConfig(kv_connector="KVDiskConnector", kv_role="kv_both")
    assert KVConnectorFactory.get_connector_class(config).__name__ == "KVDiskConnector"
    assert KVConnectorFactory.supports_hma_config(config)


def test_the_module_path_works_too() -> None:
    config = KVTransferConfig(
        kv_connector="KVDiskConnector", kv_role="kv_both", kv_connector_module_path="kvdisk.connector"
    )
    assert KVConnectorFactory.get_connector_class(config).__name__ == "KVDiskConnector"


MAMBA = MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,))
FULL = FullAttentionSpec(**SIZES)


def _refused(config: Any, cache: KVCacheConfig, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as refusal:
        refuse_unsupported(config, cache)
    assert str(refusal.value).count("\n") == 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_config": SimpleNamespace(is_encoder_decoder=True)}, "encoder-decoder"),
        ({"model_config": SimpleNamespace(is_encoder_decoder=False, enable_sleep_mode=True)}, "sleep"),
        ({"kv_transfer_config": SimpleNamespace(kv_role="kv_producer")}, "kv_producer"),
        ({"speculative_config": SimpleNamespace(method="medusa")}, "medusa"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"decode_context_parallel_size": 2}, "context parallelism"),
        ({"prefill_context_parallel_size": 2}, "context parallelism"),
    ],
)
def test_an_engine_that_is_not_supported_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    config = _config()
    refuse_unsupported(config, _cache(FULL, SlidingWindowSpec(**SIZES, sliding_window=64)))
    for name, value in changes.items():
        setattr(config if hasattr(config, name) else config.parallel_config, name, value)
    _refused(config, _cache(FULL), named)


@pytest.mark.parametrize(
    ("cache", "named"),
    [
        (_cache(FULL, MAMBA), "MambaSpec"),
        (_cache(ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=64)), "ChunkedLocalAttentionSpec"),
        (_cache(), "models without KV cache, such as encoders"),
        (KVCacheConfig(8, [], [WINDOWED_DRAFTER], hash_block_size=32), "drafters with sliding windows"),
    ],
)
def test_a_kv_cache_that_is_not_supported_is_refused_by_name(cache: KVCacheConfig, named: str) -> None:
    _refused(_config(), cache, named)


@pytest.mark.parametrize("chunked", [False, True])
def test_mla_that_begins_with_what_is_not_loaded_is_refused(chunked: bool) -> None:
    """vLLM's CPU reference of MLA gives wrong tokens after any external hit; it runs with chunked
    prefill off."""
    model = SimpleNamespace(is_encoder_decoder=False, use_mla=True)
    config = _config(model_config=model, scheduler_config=SimpleNamespace(enable_chunked_prefill=chunked))
    if chunked:
        refuse_unsupported(config, _cache(MLA))
        return
    _refused(config, _cache(MLA), "MLA with chunked prefill off")


def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "vllm_minor_version", lambda: (0, 34))
    _refused(_config(), _cache(FULL), r"supports 0\.32 and 0\.33")


def test_geometry_of_uniform_and_window_groups() -> None:
    wide = FullAttentionSpec(**(SIZES | {"head_size": 64}))
    uniform = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"layer.0": FULL, "layer.0b": wide})
    cache = KVCacheConfig(
        8,
        [],
        [
            KVCacheGroupSpec(["layer.0", "layer.0b"], uniform),
            KVCacheGroupSpec(["layer.1"], SlidingWindowSpec(**SIZES, sliding_window=64)),
        ],
        hash_block_size=32,
    )
    geometry = geometry_of(_config(), cache)
    assert geometry.groups[0].payload_bytes == FULL.page_size_bytes + wide.page_size_bytes
    assert [group.window_tokens for group in geometry.groups] == [None, 64]
    assert geometry.slot_sizes == tuple(sorted({group.slot_bytes for group in geometry.groups}))


@pytest.mark.parametrize(("specs", "ranks", "replicated"), MLA_CASES)
def test_mla_is_the_same_on_every_rank(specs: tuple[KVCacheSpec, ...], ranks: int, replicated: bool) -> None:
    config = _config()
    config.parallel_config.tensor_parallel_size = ranks
    geometry = geometry_of(config, _cache(*specs))
    assert geometry.replicated == replicated
    assert geometry.part_count == (1 if replicated else ranks)


def test_blocks_are_seen_as_bytes_whatever_the_layout() -> None:
    cache = _cache(FULL)
    geometry = geometry_of(_config(), cache)
    values = torch.arange(8 * 32 * 2 * 64, dtype=torch.float32)
    plain = values.view(8, 2, 32, 64)
    ((view,),) = layer_blocks(cache, geometry, {"layer.0": plain})
    assert view.shape == (8, FULL.page_size_bytes)
    assert view.data_ptr() == plain.data_ptr(), "vLLM's own memory, no copy"
    assert bytes(view[3].numpy()) == plain[3].contiguous().view(torch.uint8).numpy().tobytes()
    # Heads and tokens swapped: the same bytes in the same block.
    ((swapped,),) = layer_blocks(cache, geometry, {"layer.0": plain.transpose(1, 2)})
    assert torch.equal(swapped, view)
    # Kernel blocks of half the size are grouped back.
    ((split,),) = layer_blocks(cache, geometry, {"layer.0": values.view(16, 2, 16, 64)})
    assert torch.equal(split, view)


def test_a_block_in_pieces_is_refused() -> None:
    cache = _cache(FULL)
    geometry = geometry_of(_config(), cache)
    with pytest.raises(ConfigError, match="not contiguous"):
        layer_blocks(cache, geometry, {"layer.0": torch.zeros(8, 2, 32, 128)[..., :64]})
    with pytest.raises(ConfigError, match="layout"):
        layer_blocks(cache, geometry, {"layer.0": torch.zeros(8, 2, 32, 32)})


# -- the namespace ---------------------------------------------------------------------------------


@pytest.fixture
def engine_config(tiny_llama: Path, tmp_path: Path) -> Callable[..., Any]:
    """Return a maker of real VllmConfigs over a private copy of the tiny model."""
    from schedulers import vllm_config

    register()
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama, folder)

    def make(**changes: Any) -> Any:
        config = vllm_config(folder, 64, 512, None, connector=True)
        for name, value in changes.items():
            room, _, field = name.partition("__")
            setattr(getattr(config, room), field, value)
        return config

    make.folder = folder  # type: ignore[attr-defined]
    return make


def _fingerprint(config: Any) -> bytes:
    return fingerprint_of(config, _cache(FULL))[0]


def test_the_same_model_has_the_same_fingerprint_wherever_it_lies(engine_config: Any, tmp_path: Path) -> None:
    first = _fingerprint(engine_config())
    assert first == _fingerprint(engine_config())
    moved = tmp_path / "moved"
    shutil.copytree(engine_config.folder, moved)
    config = engine_config()
    config.model_config.model = str(moved)
    assert _fingerprint(config) == first


def test_one_changed_weight_is_another_model(engine_config: Any) -> None:
    first = _fingerprint(engine_config())
    (weights,) = engine_config.folder.glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    header_bytes = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + header_bytes])
    start = max(tensor["data_offsets"][0] for name, tensor in header.items() if name != "__metadata__")
    content[8 + header_bytes + start] ^= 1
    weights.write_bytes(content)
    assert _fingerprint(engine_config()) != first


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cache_config__cache_dtype", "fp8"),
        ("model_config__dtype", "bfloat16"),
        ("parallel_config__tensor_parallel_size", 2),
        ("model_config__quantization", "awq"),
        ("cache_config__prefix_caching_hash_algo", "sha256_cbor"),
        ("rope", {"rope_type": "default", "rope_theta": 1234.5}),
        ("groups", None),
    ],
)
def test_whatever_changes_the_bytes_changes_the_fingerprint(engine_config: Any, name: str, value: Any) -> None:
    first = _fingerprint(engine_config())
    config = engine_config(**({name: value} if "__" in name else {}))
    if name == "rope":
        config.model_config.hf_config.rope_parameters = value
    assert fingerprint_of(config, _cache(FULL, FULL) if name == "groups" else _cache(FULL))[0] != first


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("load_config__load_format", "dummy", "load_format is 'dummy'"),
        ("cache_config__prefix_caching_hash_algo", "xxhash", "set prefix_caching_hash_algo to sha256"),
    ],
)
def test_without_identity_the_nvme_tier_is_refused(engine_config: Any, name: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        _fingerprint(engine_config(**{name: value}))


def _header(**tensors: Any) -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 64,
        (1 << 62).to_bytes(8, "little") + b"{}",
        (3).to_bytes(8, "little") + b"{}",
        (200_000).to_bytes(8, "little") + b"[" * 200_000,
        (2).to_bytes(8, "little") + b"[]",
        _header(a={"data_offsets": [0]}),
        _header(a={"data_offsets": [0.0, 4.0]}) + b"1234",
        _header(a={"data_offsets": [-100, 4]}) + b"1234",
        _header(a={"data_offsets": [4, 0]}) + b"1234",
        _header(a={"data_offsets": [0, 5]}) + b"1234",
        _header(a={"data_offsets": [1 << 70, (1 << 70) + 4]}) + b"1234",
    ],
)
def test_a_weight_file_of_garbage_is_named(engine_config: Any, content: bytes) -> None:
    """Whatever length it claims, of its header or of a tensor: no more is read than the file can
    have."""
    (engine_config.folder / "other.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"other\.safetensors") as refusal:
        _fingerprint(engine_config())
    assert str(refusal.value).count("\n") == 0


def test_a_header_longer_than_any_is_not_read(engine_config: Any) -> None:
    file = engine_config.folder / "other.safetensors"
    file.write_bytes((10 << 30).to_bytes(8, "little"))
    with file.open("r+b") as stream:
        stream.truncate(11 << 30)  # a file with a hole, and nothing else
    with pytest.raises(ConfigError, match=r"other\.safetensors"):
        _fingerprint(engine_config())


def test_another_drafter_changes_the_fingerprint(engine_config: Any, tmp_path: Path) -> None:
    first = _fingerprint(engine_config())
    drafter = engine_config().model_config
    drafter.model = str(shutil.copytree(engine_config.folder, tmp_path / "drafter"))
    config = engine_config()
    config.speculative_config = SimpleNamespace(method="eagle", draft_model_config=drafter)
    drafted = _fingerprint(config)
    assert drafted != first
    assert _fingerprint(config) == drafted
    (weights,) = (tmp_path / "drafter").glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    content[8 + int.from_bytes(content[:8], "little")] ^= 1
    weights.write_bytes(content)
    assert _fingerprint(config) != drafted


def test_without_weight_files_the_nvme_tier_is_refused(engine_config: Any) -> None:
    for weights in engine_config.folder.glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(ConfigError, match="weight files"):
        _fingerprint(engine_config())
