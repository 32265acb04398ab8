# SPDX-License-Identifier: Apache-2.0
"""KV caches as vLLM lays them out for GPUs, over CPU tensors: how many operations a copy takes,
that a slot has the same bytes whatever the layout, and which layout kvdisk asks for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.addressed_device import CpuLanes
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.platforms.interface import DeviceCapability
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvdisk.connector import layout
from kvdisk.connector.connector import KVDiskConnector
from kvdisk.connector.kv_groups import element_bytes
from kvdisk.connector.layout import layer_blocks
from kvdisk.connector.sizes import geometry_of
from kvdisk.geometry import HEADER_BYTES
from kvdisk.worker import copier as copiers
from kvdisk.worker.arena import Arena
from kvdisk.worker.copier import CudaCopier, LayerBlocks, Slots

BLOCKS = 6
FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
LATENT = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
INDEXER = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=132, dtype=torch.uint8)


def eighty_layers() -> KVCacheGroupSpec:
    return KVCacheGroupSpec([f"layers.{at}.attn" for at in range(80)], FULL)


def mla_with_indexer() -> KVCacheGroupSpec:
    """As of DeepSeek-V3.2: 61 layers of both kinds, which take turns."""
    specs = {f"layers.{at}.{kind}": spec for at in range(61) for kind, spec in (("attn", LATENT), ("indexer", INDEXER))}
    uniform = UniformTypeKVCacheSpecs.from_specs(specs)
    assert uniform is not None
    return KVCacheGroupSpec(list(specs), uniform)


def caches_of(group: KVCacheGroupSpec, layout: str) -> tuple[KVCacheConfig, dict[str, torch.Tensor]]:
    """Return vLLM's own tensors of one group, each byte drawn from its layer and place."""
    settings = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: KVCacheLayout[layout],
        num_gpu_blocks_override=BLOCKS,
        prefix_cache_retention_interval=None,
    )
    config = SimpleNamespace(cache_config=settings, attention_config=SimpleNamespace(hisparse_config=None))
    cache = get_kv_cache_config_from_groups(config, [group], 1 << 30)
    cache.kv_cache_layout, cache.hash_block_size = layout, 16
    caches = allocate_kv_cache(cache, torch.device("cpu"), KVCacheLayout[layout])
    for at, name in enumerate(group.layer_names):
        generator = torch.Generator().manual_seed(at)
        tensor = caches[name]
        tensor.copy_(torch.randint(-128, 128, tensor.shape, dtype=torch.int8, generator=generator))
    return cache, caches


def payloads(group: KVCacheGroupSpec, caches: dict[str, torch.Tensor], layout: str, block: int) -> bytes:
    """Return what a slot of a block should have: the layers in the group's order, heads inside of
    tokens or outside as the layout says."""
    order = [dim - 1 for dim in KVCacheLayout[layout].layer_view_order if dim]
    blocks = [caches[name][block].permute(order).contiguous() for name in group.layer_names]
    return b"".join(each.view(torch.uint8).numpy().tobytes() for each in blocks)


@pytest.mark.parametrize(
    ("make", "layout", "stacks", "in_rows"),
    [
        (eighty_layers, "LBNHC", 1, False),
        (eighty_layers, "LBHNC", 1, False),
        (eighty_layers, "BLNHC", 1, True),
        (eighty_layers, "BLHNC", 1, True),
        (mla_with_indexer, "LBNHC", 2, False),
        (mla_with_indexer, "BLHNC", 2, False),
    ],
)
def test_a_slot_has_the_same_bytes_however_the_engine_lays_blocks_out(make, layout, stacks, in_rows, monkeypatch):
    group = make()
    cache, caches = caches_of(group, layout)
    (layers,) = layer_blocks(cache, caches)
    blocks = LayerBlocks(layers)
    assert (len(blocks.stacks), blocks.rows is not None) == (stacks, in_rows)
    parallel = SimpleNamespace(
        pipeline_parallel_size=1,
        distributed_executor_backend="mp",
        data_parallel_backend="mp",
        data_parallel_size_local=1,
        nnodes_within_dp=1,
        tensor_parallel_size=1,
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
    )
    model = SimpleNamespace(is_diffusion=False)
    config = SimpleNamespace(parallel_config=parallel, speculative_config=None, model_config=model)
    geometry = geometry_of(config, cache)
    assert geometry.groups[0].payload_bytes == blocks.payload_bytes
    assert geometry.groups[0].element_bytes == (2 if make is eighty_layers else 1), "the indexer's are bytes"
    expected = [payloads(group, caches, layout, block) for block in range(BLOCKS)]
    for straight in (False, True):
        for name in ("STRAIGHT_BYTES", "STRAIGHT_ROW_BYTES"):
            monkeypatch.setattr(copiers, name, 0 if straight else 1 << 60)
        lanes, arena = CpuLanes(), Arena(geometry.slot_sizes, [BLOCKS], pin=False)
        copier = CudaCopier([blocks], lanes, 0)
        slots = Slots(arena, 0, [3, 4, 0, 1])
        copier.gather(0, [5, 2, 3, 4], slots)
        assert len(lanes.rows) == (0 if not straight else 3 if in_rows else 4 * stacks)
        for slot, block in ((3, 5), (4, 2), (0, 3), (1, 4)):
            assert bytes(arena.view(0, slot)[HEADER_BYTES:][: blocks.payload_bytes]) == expected[block]
        for layer in layers:
            layer[2:].zero_()
        copier.scatter(0, slots, [5, 2, 3, 4])
        assert [payloads(group, caches, layout, block) for block in range(BLOCKS)] == expected
        arena.close()


def asking(**changes):
    """Return what is read of a configuration to ask for a layout."""
    text = SimpleNamespace(layer_types=["full_attention"], sliding_window=None, global_head_dim=None)
    model = SimpleNamespace(use_mla=False, is_hybrid=False, hf_text_config=text)
    cache = SimpleNamespace(
        block_size=16, user_specified_block_size=False, kv_cache_dtype_skip_layers=[], cache_dtype="auto"
    )
    attention = SimpleNamespace(hisparse_config=None)
    for name, value in changes.items():
        part = next(each for each in (model, cache, attention, text) if hasattr(each, name))
        setattr(part, name, value)
    return SimpleNamespace(model_config=model, cache_config=cache, attention_config=attention)


@pytest.fixture
def on_cuda(monkeypatch):
    gpu = SimpleNamespace(is_cuda=lambda: True, capability=DeviceCapability(9, 0))
    gpu.get_device_capability = lambda: gpu.capability
    monkeypatch.setattr(layout, "current_platform", gpu)
    return gpu


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, "BLNHC"),
        ({"block_size": 64, "user_specified_block_size": True}, "BLNHC"),
        ({"block_size": 256}, "BLNHC"),  # the backend's own
        ({"block_size": 128, "user_specified_block_size": True}, None),
        ({"use_mla": True}, None),
        ({"is_hybrid": True}, None),
        ({"hisparse_config": object()}, None),
        ({"kv_cache_dtype_skip_layers": ["0"]}, None),
        ({"cache_dtype": "fp8"}, None),
        ({"layer_types": ["full_attention", "sliding_attention"]}, None),
        ({"sliding_window": 4096}, None),
        ({"global_head_dim": 512}, None),
    ],
)
def test_blocks_whose_layers_lie_together_are_asked_for_where_no_engine_breaks(on_cuda, changes, wanted):
    assert KVDiskConnector.get_required_kvcache_layout(asking(**changes)) == wanted
    on_cuda.capability = DeviceCapability(10, 0)
    assert KVDiskConnector.get_required_kvcache_layout(asking(**changes)) == (wanted and "BLHNC")
    on_cuda.capability = None
    assert KVDiskConnector.get_required_kvcache_layout(asking(**changes)) == wanted


def test_nothing_is_asked_for_elsewhere_or_beside_other_connectors(on_cuda, monkeypatch):
    config = asking()
    children = classmethod(lambda cls, given: [(KVDiskConnector, given)])
    monkeypatch.setattr(MultiConnector, "_get_connector_classes_and_configs", children)
    config.kv_transfer_config = object()
    assert MultiConnector.get_required_kvcache_layout(config) is None
    assert KVDiskConnector.get_required_kvcache_layout(config) == "BLNHC"
    on_cuda.is_cuda = lambda: False
    assert KVDiskConnector.get_required_kvcache_layout(config) is None


def test_recurrent_states_have_no_one_size_of_element():
    sizes = {"shapes": ((4, 8), (2, 16)), "dtypes": (torch.bfloat16, torch.float32)}
    states = KVCacheGroupSpec(["states.0"], MambaSpec(block_size=16, **sizes))
    assert element_bytes([states]) == element_bytes([states, eighty_layers()]) == 1
