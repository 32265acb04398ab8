# SPDX-License-Identifier: Apache-2.0
"""Random-weight models and a tokenizer trained on local text, so that the real engine runs without
a model hub.

The weights are scaled so that greedy decoding depends on the whole prompt: attention is peaked
(one wrong block of KV changes the tokens), and what the layers add outweighs the embedding of the
last token. ``python tools/tiny_models.py KIND DIR [TEXT ...]`` builds one model.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

SEED = 20260
VOCABULARY = 4096
TINY_VOCABULARY = 512
ATTENTION_SPREAD = 3.0
"""Standard deviation of the attention logits; e**-9 of a prompt's tokens then share the weight."""
BOS, EOS = "<bos>", "<eos>"
STAMP = "kvdisk_model.json"
"""Written last, so that a directory without it is a build that did not finish."""


def train_tokenizer(texts: Iterable[str], directory: Path, vocabulary: int) -> None:
    """Train a byte-level BPE tokenizer on ``texts`` and save it for transformers in
    ``directory``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS).save_pretrained(directory)


ALL: dict[str, Any] = {"tie_word_embeddings": False, "dtype": "float32", "bos_token_id": 0, "eos_token_id": 1}
TINY: dict[str, Any] = ALL | {
    "vocab_size": TINY_VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
}
MAMBA: dict[str, Any] = TINY | {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 64,
}
GEMMA: dict[str, Any] = TINY | {"sliding_window": 64, "pad_token_id": 0}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "demo-llama": (
        "LlamaConfig",
        ALL
        | {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": VOCABULARY,
            "hidden_size": 512,
            "intermediate_size": 1408,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": 8192,
        },
    ),
    # For a GPU: 1.1 billion weights, and 64 KiB of KV a token.
    "bench-llama": (
        "LlamaConfig",
        ALL
        | {
            "architectures": ["LlamaForCausalLM"],
            "dtype": "bfloat16",
            "vocab_size": VOCABULARY,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
        },
    ),
    # Two KV heads, so that TP=2 splits it.
    "tiny-llama": ("LlamaConfig", TINY | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2}),
    # For prompts that are long: one layer, whose KV is 256 bytes a token.
    "long-llama": (
        "LlamaConfig",
        TINY
        | {
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": 1,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 65536,
        },
    ),
    "tiny-qwen3": ("Qwen3Config", TINY | {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 2}),
    # A hybrid model, which vLLM puts into three KV-cache groups.
    "tiny-gemma3": (
        "Gemma3TextConfig",
        GEMMA
        | {
            "architectures": ["Gemma3ForCausalLM"],
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 32,
        },
    ),
    # Its layers differ in the bytes of a token: heads of 64 and of 128. Without its hybrid KV-cache
    # manager vLLM puts all of them into one KV-cache group.
    "tiny-gemma4": (
        "Gemma4TextConfig",
        GEMMA
        | {
            "architectures": ["Gemma4ForCausalLM"],
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "head_dim": 64,
            "global_head_dim": 128,
            "vocab_size_per_layer_input": TINY_VOCABULARY,
            "hidden_size_per_layer_input": 0,
        },
    ),
    # Recurrent state: gated delta nets (vLLM's kernel for CPUs wants 16 bits and heads of 128),
    # Mamba 2 beside attention and alone, short convolutions.
    "tiny-qwen3-next": (
        "Qwen3NextConfig",
        TINY
        | {
            "architectures": ["Qwen3NextForCausalLM"],
            "dtype": "bfloat16",
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 128,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "tiny-granite4": (
        "GraniteMoeHybridConfig",
        MAMBA
        | {
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "num_hidden_layers": 4,
            "layer_types": ["mamba"] * 3 + ["attention"],
            "shared_intermediate_size": 256,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "position_embedding_type": "nope",
        },
    ),
    "tiny-nemotron": (
        "NemotronHConfig",
        TINY
        | {
            "architectures": ["NemotronHForCausalLM"],
            "num_hidden_layers": 6,
            "hybrid_override_pattern": "M-M*M-",
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "n_groups": 1,
            "ssm_state_size": 16,
            "chunk_size": 64,
        },
    ),
    "tiny-falcon": (
        "FalconH1Config",
        MAMBA
        | {
            "architectures": ["FalconH1ForCausalLM"],
            "num_hidden_layers": 2,
            "mamba_d_ssm": 256,
            "mamba_rms_norm": True,
        },
    ),
    "tiny-mamba2": (
        "Mamba2Config",
        ALL
        | {
            "architectures": ["Mamba2ForCausalLM"],
            "vocab_size": TINY_VOCABULARY,
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 32,
            "state_size": 16,
            "n_groups": 1,
            "chunk_size": 64,
        },
    ),
    "tiny-lfm2": (
        "Lfm2Config",
        TINY
        | {
            "architectures": ["Lfm2ForCausalLM"],
            "num_hidden_layers": 4,
            "layer_types": ["conv"] * 3 + ["full_attention"],
            "conv_dim": 128,
            "block_dim": 128,
            "conv_L_cache": 3,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "tiny-llama4": (
        "Llama4TextConfig",
        TINY
        | {
            "architectures": ["Llama4ForCausalLM"],
            "num_hidden_layers": 4,
            "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
            "attention_chunk_size": 128,
            "no_rope_layers": [1, 1, 1, 0],
            "intermediate_size_mlp": 256,
            "num_local_experts": 1,
            "moe_layers": [],
            "interleave_moe_layer_step": 0,
        },
    ),
    # MLA, of a size that vLLM has kernels for. No layer has experts.
    "tiny-deepseek": (
        "DeepseekV2Config",
        TINY
        | {
            "architectures": ["DeepseekV2ForCausalLM"],
            "num_hidden_layers": 2,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "first_k_dense_replace": 2,
            "n_routed_experts": 2,
            "q_lora_rank": None,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64,
            "v_head_dim": 32,
        },
    ),
    # Its attention sinks are weights.
    "tiny-gpt-oss": (
        "GptOssConfig",
        TINY
        | {
            "architectures": ["GptOssForCausalLM"],
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 64,
            "intermediate_size": 128,
            "num_local_experts": 2,
            "num_experts_per_tok": 2,
        },
    ),
}
"""The class of the configuration in transformers, and what it is given."""


def build(kind: str, directory: Path, texts: Sequence[str]) -> Path:
    """Write the model ``kind`` (a key of ``KINDS``) with its tokenizer to ``directory`` and return
    the directory.

    Does nothing where the same kind, seed and configuration have been built there before; the
    tokenizer is then the one of that time.
    """
    import transformers

    name, settings = KINDS[kind]
    config = getattr(transformers, name)(**settings)
    stamp = {"kind": kind, "seed": SEED, "spread": ATTENTION_SPREAD, "config": config.to_diff_dict()}
    wanted = json.loads(json.dumps(stamp, default=str))
    stamp_file = directory / STAMP
    if stamp_file.exists() and json.loads(stamp_file.read_text()) == wanted:
        return directory
    stamp_file.unlink(missing_ok=True)
    directory.mkdir(parents=True, exist_ok=True)
    train_tokenizer(texts, directory, config.vocab_size)
    transformers.set_seed(SEED)
    model = transformers.AutoModelForCausalLM.from_config(config)
    _spread(model)
    model.save_pretrained(directory, safe_serialization=True)
    transformers.GenerationConfig(bos_token_id=0, eos_token_id=1).save_pretrained(directory)
    stamp_file.write_text(json.dumps(wanted, indent=1))
    return directory


def _spread(model: Any) -> None:
    """Scale the random weights: unit gain everywhere, attention logits of ``ATTENTION_SPREAD``, a
    faint embedding."""
    for name, tensor in model.state_dict().items():
        if tensor.dim() != 2:
            # Norms keep their neutral initial value; Gemma's query and key norms would undo a
            # scaled projection. Gemma 3 adds 1 to its, and divides the logits by the root of the
            # head's size; Gemma 4 does neither.
            if name.endswith("q_norm.weight"):
                tensor.fill_(ATTENTION_SPREAD / math.sqrt(len(tensor)) if tensor.any() else ATTENTION_SPREAD - 1.0)
            elif name.endswith("A_log"):  # a recurrent state forgets over a hundred tokens, not within a few
                tensor.fill_(-5.0)
            elif name.endswith("conv.conv.weight"):
                tensor.normal_()
            continue
        gain = 1.0 / math.sqrt(tensor.shape[1])
        if "embed_tokens" in name:
            gain = 0.1
        elif name.endswith("q_proj.weight"):
            gain *= ATTENTION_SPREAD
        tensor.normal_(0.0, gain)


def main(arguments: Sequence[str]) -> None:
    """Build one model from the command line; further arguments are text files for the tokenizer."""
    kind, directory, *files = arguments
    build(kind, Path(directory), [Path(name).read_text() for name in files])


if __name__ == "__main__":
    main(sys.argv[1:])
