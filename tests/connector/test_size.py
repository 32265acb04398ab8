# SPDX-License-Identifier: Apache-2.0
"""``kvdisk size`` against vLLM's own view of many configurations."""

from __future__ import annotations

import importlib
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import ParallelConfig
from vllm.config.model import MODEL_ARCH_CONFIG_CONVERTORS, ModelArchConfigConvertorBase
from vllm.distributed.utils import get_pp_indices
from vllm.transformers_utils.config import get_config, get_hf_text_config
from vllm.v1.core.kv_cache_utils import _get_kv_cache_groups_uniform_page_size, _project_kv_cache_groups_to_worker
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvdisk.cli.model_kv import read_model
from kvdisk.cli.size import token_bytes
from kvdisk.connector.sizes import geometry_of
from kvdisk.engine_store import describe_geometry

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 6, "hidden_size": 256,
    "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 512, "vocab_size": 512,
    "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 512,
        "use_sliding_window": False,
    },
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 512},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "head_dim": 64, "sliding_window": 512,
        "sliding_window_pattern": 6, "num_hidden_layers": 26,
    },
    "gemma3, left to defaults": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": 512,
        "num_attention_heads": None, "num_key_value_heads": None, "num_hidden_layers": 34,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 64, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "deepseek": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "kv_lora_rank": 512,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "first_k_dense_replace": 6,
        "n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 64, "num_key_value_heads": 8,
    },
    "falcon": {
        "architectures": ["FalconForCausalLM"], "model_type": "falcon", "multi_query": True,
        "num_key_value_heads": None, "new_decoder_architecture": False,
    },
}  # fmt: skip


def written(path: Path, case: str) -> Path:
    path.mkdir()
    config = {name: value for name, value in (LLAMA | CASES[case]).items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("case", CASES)
def test_heads_layers_and_bytes_are_those_of_vllm(tmp_path, monkeypatch, case):
    path = written(tmp_path / "model", case)
    config = get_config(path, trust_remote_code=False)
    text = get_hf_text_config(config)
    convertor = MODEL_ARCH_CONFIG_CONVERTORS.get(config.model_type, ModelArchConfigConvertorBase)
    theirs = convertor(config, text).convert()
    layers, mla = theirs.total_num_hidden_layers, theirs.is_deepseek_mla
    ours = read_model(path)
    assert (len(ours.windows), ours.mla) == (layers, mla)
    window, kinds = getattr(text, "sliding_window", None), getattr(text, "layer_types", None)
    slide = [kind == "sliding_attention" for kind in kinds] if kinds else [window is not None] * layers
    assert ours.windows == tuple(window if slides else None for slides in slide)
    for ranks, stages in itertools.product((1, 2), ("1", "2", "3", "4", "5", f"{layers - 1},1")):
        if "," in stages:
            monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", stages)
        else:
            monkeypatch.delenv("VLLM_PP_LAYER_PARTITION", raising=False)
        cut = ours.stages(stages)
        kv_heads = 1 if mla else max(1, theirs.total_num_kv_heads // ranks)
        sizes = {"block_size": 16, "num_kv_heads": kv_heads, "head_size": theirs.head_size, "dtype": torch.bfloat16}
        full = MLAAttentionSpec(**sizes) if mla else FullAttentionSpec(**sizes)
        specs = [SlidingWindowSpec(**sizes, sliding_window=window) if slides else full for slides in slide]
        by_name = {f"layer.{at}": spec for at, spec in enumerate(specs)}
        groups = _get_kv_cache_groups_uniform_page_size(by_name)
        of_stages = [
            _project_kv_cache_groups_to_worker(
                groups, dict(list(by_name.items())[slice(*get_pp_indices(layers, at, len(cut)))])
            )
            for at in range(len(cut))
        ]
        cache = KVCacheConfig(8, [], groups, hash_block_size=16)
        parallel = ParallelConfig(tensor_parallel_size=ranks)
        parallel.pipeline_parallel_size = len(cut)
        model = SimpleNamespace(is_diffusion=False)
        config = SimpleNamespace(parallel_config=parallel, speculative_config=None, model_config=model)
        geometry = geometry_of(config, cache, of_stages)
        mine = ours.geometry(ranks, 16, cut)
        assert describe_geometry(mine) == describe_geometry(geometry)
        assert mine.replicated == geometry.replicated
        kv_bytes = ranks * sum(spec.page_size_bytes for spec in specs)
        assert round(token_bytes(mine, mine.rank_count * ours.filled(cut)) * 16) == kv_bytes


def test_the_tool_that_measures_vllm_can_be_imported():
    """Here, since vLLM is loaded; ``tests/test_tidy.py`` has the others."""
    importlib.import_module("measure_scheduler")
