# SPDX-License-Identifier: Apache-2.0
"""How much KV a model keeps, read from its Hugging Face configuration.

It knows attention with grouped heads, full or with a sliding window, and MLA. Models that keep
another state (Mamba, linear or chunked attention, sparse attention with an index of its own, layers
of different sizes, encoders) are refused, in one sentence: kvdisk does not serve them, or a figure
would be a guess.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvdisk.errors import ConfigError
from kvdisk.geometry import OWN_BLOCKS, Geometry, GroupGeometry, UnitChoice

MLA_TYPES = frozenset({"deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "pangu_ultra_moe", "axk1"})
"""vLLM: the kinds of models whose latent KV it keeps as such."""

_NESTED = ("text_config", "llm_config", "language_config", "language_model_config", "thinker_config")
_HEADS_ARE_KV_HEADS = frozenset({"llama", "gpt2", "gpt_neox", "gptj", "opt", "phi", "bloom", "stablelm"})
_ALL_LAYERS_SLIDE = frozenset({"mistral", "mixtral", "starcoder2", "phi3"})
_LEFT_OUT: dict[str, dict[str, int]] = {
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096}
}
"""Values that configurations on the hub leave to the defaults of their kind."""
_NOT_COUNTED = (
    # Mamba layers
    "hybrid_override_pattern", "mamba_d_state", "mamba_expand", "mamba_n_heads", "ssm_cfg", "ssm_state_size",
    "state_size",
    # linear, chunked or sparse attention
    "attention_chunk_size", "attn_type_list", "compress_ratios", "full_attn_idxs", "index_topk", "linear_attn_config",
    "linear_num_key_heads",
    # layers of different sizes, or without KV of their own
    "block_configs", "global_head_dim", "hybrid_layer_pattern", "per_layer_config", "swa_num_key_value_heads",
    "attn_layer_period", "conv_L_cache", "cross_attention_layers", "layers_block_type", "num_kv_shared_layers",
    # attention settings of its own kind
    "attn_config",
)  # fmt: skip
"""Fields that mean a state that is not counted here."""
_LAYER_KINDS = {"full_attention": False, "attention": False, "global": False, "sliding_attention": True, "local": True}
_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "half": 2, "float32": 4, "float": 4}
_KV_DTYPE_BYTES = _DTYPE_BYTES | {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
_LIMIT = 1 << 24
_BLOCK_TOKENS, _MLA_BLOCK_TOKENS = 16, 64


class ModelKv(NamedTuple):
    """What decides the bytes of a model's KV.

    ``windows``: of each layer, in tokens; None for full attention. ``kv_heads``: of a layer, all
    ranks together. ``head_elements``: of a head's keys and values for one token; MLA has one head,
    of latent elements. ``element_bytes``: of one element of KV. ``dtype``: in words.
    ``longest_tokens``: the longest context; None where the configuration does not say. ``notes``:
    sentences about what had to be assumed.
    """

    kind: str
    heads: int
    windows: tuple[int | None, ...]
    mla: bool
    kv_heads: int
    head_elements: int
    element_bytes: int
    dtype: str
    longest_tokens: int | None
    notes: tuple[str, ...]

    def stages(self, text: str) -> tuple[int, ...]:
        """Return the layers of each stage of a pipeline. ``text``: the number of stages, cut as
        vLLM does, or the layers of each, as ``VLLM_PP_LAYER_PARTITION`` lists them. Raises
        ConfigError."""
        layers = len(self.windows)
        try:
            found = tuple(map(int, text.split(",")))
        except ValueError:
            raise ConfigError(f"--pp is a number of stages, or the layers of each, and not {text}.") from None
        if len(found) == 1:
            (count,) = found
            if not 0 < count <= layers:
                raise ConfigError(f"--pp {count} leaves stages without layers: the model has {layers}.")
            # vLLM: the last stage takes none of the remaining layers; the others do, from behind.
            least, remaining = divmod(layers, count)
            found = tuple(least + (0 < count - 1 - stage <= remaining) for stage in range(count))
        if min(found) < 1 or sum(found) != layers:
            raise ConfigError(f"--pp {text} must list every layer once: the model has {layers}.")
        return found

    def geometry(
        self,
        ranks: int,
        block_tokens: int | None = None,
        stages: Sequence[int] = (),
        units: UnitChoice = OWN_BLOCKS,
    ) -> Geometry:
        """Return the sizes of an engine's blocks as vLLM would make them. ``ranks``: of a stage.
        ``block_tokens``: None for vLLM's default. ``stages``: layers of each stage of a pipeline;
        empty for one stage. ``units``: what decides how many blocks are one. Raises ConfigError."""
        block_tokens = block_tokens or (_MLA_BLOCK_TOKENS if self.mla else _BLOCK_TOKENS)
        if self.heads % ranks:
            raise ConfigError(f"--tp {ranks} does not divide the model's {self.heads} attention heads.")
        kv_heads = 1 if self.mla else max(1, self.kv_heads // ranks)
        token_bytes = kv_heads * self.head_elements * self.element_bytes
        groups = tuple(
            GroupGeometry(number, block_tokens, layers * block_tokens * token_bytes, window)
            for number, (layers, window) in enumerate(group_layers(self.windows, stages))
        )
        count = max(1, len(stages))
        return units.of(Geometry(groups, ranks * count, block_tokens, replicated=self.mla and ranks > 1 == count))

    def filled(self, stages: Sequence[int]) -> float:
        """Return the share of all stages' slots that is KV: slots are as large as the largest stage
        needs."""
        slots = max(1, len(stages)) * sum(layers for layers, _ in group_layers(self.windows, stages))
        return len(self.windows) / slots


def group_layers(windows: tuple[int | None, ...], stages: Sequence[int] = ()) -> list[tuple[int, int | None]]:
    """Return layers and window of each KV-cache group that an engine makes of layers of one size.

    vLLM: layers of one kind are one group. Layers of several kinds are cut into groups, which take
    turns; each group has as many layers as the rarest kind has, or as the most frequent kind where
    that is not much more. ``stages``: layers of each stage of a pipeline; the layers returned are
    then the most that one stage has of a group.
    """
    kinds = {window: windows.count(window) for window in dict.fromkeys(windows)}
    least, most = min(kinds.values()), max(kinds.values())
    per_group = most if most < 1.5 * least else least
    stage_of = [stage for stage, layers in enumerate(stages or [len(windows)]) for _ in range(layers)]
    groups = []
    for window, layers in kinds.items():
        count = -(-layers // per_group)
        of_kind = [stage for stage, each in zip(stage_of, windows, strict=True) if each == window]
        groups += [(max(Counter(of_kind[first::count]).values()), window) for first in range(count)]
    return groups


def read_model(path: Path, dtype: str | None = None, kv_dtype: str = "auto") -> ModelKv:
    """Read a model's directory, or its config.json. Raises ConfigError."""
    file = path / "config.json" if path.is_dir() else path
    if not path.exists():
        raise ConfigError(
            f"--model wants a model's directory, or its config.json, and there is no {path}{_hub_place(path)}."
        )
    try:
        whole = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{file} is not a model's configuration: it is no JSON.") from None
    if not isinstance(whole, dict):
        raise ConfigError(f"{file} is not a model's configuration: it holds no object.")
    return model_of(whole, dtype, kv_dtype)


def _hub_place(path: Path) -> str:
    """Say where the configuration is of a model that vLLM has loaded by this name."""
    if path.is_absolute() or len(path.parts) > 2:
        return ""
    name = "models--" + "--".join(path.parts if len(path.parts) == 2 else ("*", *path.parts))
    return f"; what vLLM has loaded lies in ~/.cache/huggingface/hub/{name}/snapshots/*"


def model_of(whole: Mapping[str, Any], dtype: str | None = None, kv_dtype: str = "auto") -> ModelKv:
    """Return what a configuration says. Raises ConfigError."""
    config = dict(_language_part(whole))
    kind = str(config.get("model_type") or whole.get("model_type") or "unknown")
    config = _LEFT_OUT.get(kind, {}) | config
    refused = next(_other_state(whole, config, kind), None)
    if refused is not None:
        raise ConfigError(f"kvdisk size does not count the KV of this model ({kind}): it has {refused}.")
    heads = _number(config, kind, "num_attention_heads", "n_head", "n_heads")
    mla = config.get("kv_lora_rank") is not None
    windows, notes = _windows(config, kind, _number(config, kind, "num_hidden_layers", "n_layer", "n_layers"))
    element_bytes, dtype_said, more_notes = _dtypes(whole, config, dtype, kv_dtype)
    return ModelKv(
        kind=kind,
        heads=heads,
        windows=windows,
        mla=mla,
        kv_heads=1 if mla else _kv_heads(config, kind, heads),
        head_elements=_head_elements(config, kind, heads, mla),
        element_bytes=element_bytes,
        dtype=dtype_said,
        longest_tokens=_longest(config),
        notes=(*notes, *more_notes),
    )


def _language_part(whole: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a configuration that describes the language model."""
    for name in _NESTED:
        part = whole.get(name)
        if isinstance(part, dict):
            return _language_part(part)
    return whole


def _other_state(whole: Mapping[str, Any], config: Mapping[str, Any], kind: str) -> Iterator[str]:
    if whole.get("is_encoder_decoder") or config.get("is_encoder_decoder"):
        yield "an encoder, and kvdisk serves decoders only"
    every_layer_is_full = {"attn_type_list": [1] * len(config.get("attn_type_list") or ())}
    for name in _NOT_COUNTED:
        if config.get(name) and config[name] != every_layer_is_full.get(name):
            yield f"{name}, which means another state, or another attention"
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        yield from (f"layers of the kind {name}" for name in kinds if name not in _LAYER_KINDS)
    elif any(word in kind for word in ("mamba", "rwkv", "rglru", "recurrent")):
        yield "no KV but another state"
    if config.get("kv_lora_rank") is not None and kind not in MLA_TYPES:
        yield "latent attention (kv_lora_rank) of a kind that vLLM may not keep as such"
    values = config.get("v_head_dim")
    if config.get("kv_lora_rank") is None and values is not None and values != config.get("head_dim"):
        yield "values and keys of different sizes"


def _find(config: Mapping[str, Any], kind: str, *names: str, limit: float = _LIMIT) -> int | None:
    """Return the first of these fields that the configuration has; None where it has none. Raises
    ConfigError where its value is no sensible number."""
    for name in names:
        value = config.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < limit:
                raise ConfigError(f"{name} in this model's configuration ({kind}) cannot be {value!r}.")
            return value
    return None


def _number(config: Mapping[str, Any], kind: str, *names: str) -> int:
    found = _find(config, kind, *names)
    if found is None:
        raise ConfigError(
            f"this model's configuration ({kind}) does not say {names[0]}, and its kind's default is not known here; "
            "save it in full, as transformers' AutoConfig.from_pretrained(...).save_pretrained(...) does."
        )
    return found


def _kv_heads(config: Mapping[str, Any], kind: str, heads: int) -> int:
    if kind == "falcon" and not config.get("new_decoder_architecture") and config.get("multi_query", True):
        return 1
    if kind in _HEADS_ARE_KV_HEADS and config.get("num_key_value_heads") is None:
        return heads
    return _number(config, kind, "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")


def _head_elements(config: Mapping[str, Any], kind: str, heads: int, mla: bool) -> int:
    """Return the elements of one head's keys and values for one token, the same in all layers."""
    if mla:
        return _number(config, kind, "kv_lora_rank") + _number(config, kind, "qk_rope_head_dim")
    if config.get("head_dim") is not None:
        return 2 * _number(config, kind, "head_dim")
    hidden = _number(config, kind, "hidden_size", "n_embd", "d_model")
    if hidden % heads:
        raise ConfigError(
            f"this model's configuration ({kind}) does not say head_dim, and {heads} heads do not divide it."
        )
    return 2 * (hidden // heads)


def _windows(config: Mapping[str, Any], kind: str, layers: int) -> tuple[tuple[int | None, ...], list[str]]:
    """Return the window of each layer, and what had to be assumed."""
    window = None
    if config.get("use_sliding_window") is not False:
        window = _find(config, kind, "sliding_window", limit=math.inf)  # 2147483647 is some models' word for none
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        if len(kinds) != layers:
            raise ConfigError(f"this model's configuration ({kind}) has {len(kinds)} layer_types for {layers} layers.")
        slide = [_LAYER_KINDS[name] for name in kinds]
        if any(slide) and window is None:
            raise ConfigError(f"this model's configuration ({kind}) has sliding layers, and no sliding_window.")
    elif window is None:
        slide = [False] * layers
    elif kind in _ALL_LAYERS_SLIDE:
        slide = [True] * layers
    elif kind == "gemma2":
        slide = [at % 2 == 0 for at in range(layers)]
    elif kind in {"gemma3_text", "cohere2"}:
        pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern"))
        every = pattern if isinstance(pattern, int) and pattern > 0 else 6 if kind == "gemma3_text" else 4
        slide = [(at + 1) % every != 0 for at in range(layers)]
    elif kind.startswith("qwen") and isinstance(config.get("max_window_layers"), int):
        slide = [at >= config["max_window_layers"] for at in range(layers)]
    else:
        note = (
            "which layers have a sliding window is not known for this kind of model: all are taken for full attention"
        )
        return (None,) * layers, [note]
    return tuple(window if slides else None for slides in slide), []


def _dtypes(
    whole: Mapping[str, Any], config: Mapping[str, Any], dtype: str | None, kv_dtype: str
) -> tuple[int, str, list[str]]:
    """Return the bytes of an element of KV, its type in words, and what had to be assumed."""
    if kv_dtype != "auto":
        return _element_bytes("--kv-dtype", kv_dtype, _KV_DTYPE_BYTES), kv_dtype, []
    quantised = whole.get("quantization_config") or config.get("quantization_config")
    if isinstance(quantised, dict) and (quantised.get("kv_cache_scheme") or quantised.get("kv_cache_quant_algo")):
        raise ConfigError(
            "this model's configuration has a kind of KV of its own; say which with --kv-dtype, such as fp8."
        )
    if dtype is not None:
        return _element_bytes("--dtype", dtype, _DTYPE_BYTES), dtype, []
    said = next((part[name] for part in (config, whole) for name in ("dtype", "torch_dtype") if part.get(name)), None)
    name = str(said).removeprefix("torch.")
    if name in {"bfloat16", "float16", "half"}:
        return 2, name, []
    stated = "says no dtype" if said is None else f"says {name}"
    return 2, "16 bit", [f"the configuration {stated}, and vLLM serves that with 16 bit unless --dtype says otherwise"]


def _element_bytes(option: str, dtype: str, known: Mapping[str, int]) -> int:
    if dtype not in known:
        raise ConfigError(f"{option} is one of {', '.join(known)}, and not {dtype}.")
    return known[dtype]


def _longest(config: Mapping[str, Any]) -> int | None:
    known = (config.get(name) for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"))
    return next((value for value in known if type(value) is int and value > 0), None)
