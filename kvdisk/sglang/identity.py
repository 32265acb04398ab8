# SPDX-License-Identifier: Apache-2.0
"""What gives the bytes of a page their meaning: weights, how they compute, and how a page is laid
out. SGLang's keys have nothing of it: they name tokens."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvdisk.device.paths import files_below
from kvdisk.errors import ConfigError
from kvdisk.identity import Identity
from kvdisk.model_identity import identity_of as model_identity_of
from kvdisk.model_identity import state_of, vouched_namespace
from kvdisk.sglang.versions import sglang_version

FORMAT_VERSION = 2
_FROM_FILES = frozenset(
    (
        *("auto", "bitsandbytes", "fastsafetensors", "gguf", "instanttensor", "layered", "mistral", "pt"),
        *("safetensors", "sharded_state"),
    )
)
"""SGLang: the formats of loading whose weights are the files of the model's directory. Its own copy
of them ("npcache") stays as it was when they change."""
_SAYS_NOTHING = (
    *("model_path", "revision", "download_dir", "model_checksum", "delete_ckpt_after_loading", "trust_remote_code"),
    *(
        "modelopt_checkpoint_save_path",
        "modelopt_export_path",
        "engine_info_bootstrap_port",
        "startup_weight_load_mode",
    ),
    *("checkpoint_engine_wait_weights_before_ready", "decrypted_config_file", "decrypted_draft_config_file"),
)
_SAY_NOTHING_EITHER = ("remote_instance_", "weight_cache_", "weight_loader_")
"""Arguments of the model, by name and by how they begin, that change no byte of its KV: where its
files are, whose bytes are digested, and how they come into memory."""
_COMPUTE = {
    "exec": (
        *("attention_backend", "decode_attention_backend", "prefill_attention_backend"),
        *("dsa_decode_backend", "dsa_prefill_backend", "dsv4_attn_backend", "dsv4_prefill_backend"),
        *("enable_deepseek_v4_fp4_indexer", "prefill_kv_cache_dequant_dtype", "rl_on_policy_target"),
        *("linear_attn_backend", "linear_attn_decode_backend", "linear_attn_prefill_backend", "mamba_backend"),
        *("enable_mamba_cache_stochastic_rounding", "enable_int8_mamba_checkpoint", "dllm_algorithm"),
        *("flashinfer_mxfp4_moe_precision", "enable_w4a4_mxfp4_megamoe", "kt_method", "kt_num_gpu_experts"),
        "enable_precise_embedding_interpolation",  # of images
    ),
    "mm": ("mm_process_config", "mm_attention_backend", "image_processor_backend", "disable_fast_image_processor"),
    "spec": ("speculative_algorithm", "speculative_draft_model_quantization", "speculative_draft_kv_cache_dtype"),
}
"""Arguments elsewhere that compute, by the name of their part."""
_PACKAGE = "SGLANG_EXTERNAL_MODEL_PACKAGE"
_VARIABLE = re.compile(
    "SGLANG_.*(ATTN|DTYPE|FP4|FP8|HND|INT4|INT8|KVCACHE|KV_CACHE|LAYOUT|MAMBA|MLA|MXFP|QUANT|ROPE).*|" + _PACKAGE
)
"""Variables of the environment that compute, by words in their names: SGLang has hundreds, and new
ones in each version."""
_FILES = ("modelopt_checkpoint_restore_path", "quantization_param_path")
"""Arguments that are files: of quantised weights, and of the scales of a quantised cache."""
_LOADED: list[Any] = []
"""The state of the model's files when a store was attached at the start of this server, if any
was."""


class Arguments(NamedTuple):
    """What SGLang was started with, as far as it says what a page is. ``sources``: of each model
    its path, revision and download directory. ``values``: everything else, as JSON."""

    sources: Sequence[tuple[str, str | None, str | None]]
    load_format: str
    values: dict[str, Any]


def read_arguments() -> Arguments:
    """Return what this process of SGLang has published. Raises ConfigError where that is
    nothing."""
    from sglang.srt import runtime_context as context

    try:
        model, spec = context.get_model(), context.get_spec()
        bags = {"exec": context.get_exec(), "mm": context.get_mm(), "spec": spec}
    except ValueError as error:
        raise ConfigError(
            "kvdisk needs SGLang's arguments to tell which weights these are, and there are none."
        ) from error
    values = {name: value for name, value in _leaves(model).items() if not _is_silent(name)}
    for part, names in _COMPUTE.items():
        found = _leaves(bags[part])
        values |= {name: found.get(name) for name in names}
    sources = [(str(model.model_path), model.revision, model.download_dir)]
    if spec.speculative_draft_model_path is not None:
        sources.append(
            (str(spec.speculative_draft_model_path), spec.speculative_draft_model_revision, model.download_dir)
        )
    # SGLang: weights of experts on the processor, and of a drafter that is an adapter of the model
    more = (_leaves(bags["exec"]).get("kt_weight_path"), _leaves(spec).get("uno_lora_path"))
    sources += [(str(path), None, model.download_dir) for path in more if path is not None]
    values |= {name: value for name, value in sorted(os.environ.items()) if _VARIABLE.fullmatch(name)}
    values |= {name: _digest_of([Path(values[name])]) for name in _FILES if values.get(name) is not None}
    if package := os.environ.get(_PACKAGE):
        values["external_models"] = _digest_of(_files_of_package(package))
    return Arguments(sources, str(model.load_format), values)


def _digest_of(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        try:
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        except OSError as error:
            raise ConfigError(f"kvdisk needs {file}, which cannot be read: {error}.") from error
    return digest.hexdigest()


def _files_of_package(name: str) -> list[Path]:
    """Return the code of a package of models. Raises ConfigError where there is none."""
    try:
        spec = importlib.util.find_spec(name)
    except ImportError:
        spec = None
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    files = [file for place in places for file in files_below(Path(place)) if file.suffix == ".py"]
    if not files:
        raise ConfigError(f"kvdisk needs the code of {_PACKAGE} {name}, and does not find it.")
    return files


def _is_silent(name: str) -> bool:
    return name in _SAYS_NOTHING or name.startswith(_SAY_NOTHING_EITHER)


def _leaves(bag: Any) -> dict[str, Any]:
    """Return the values of a part of SGLang's arguments, those of its parts included."""
    found = dict[str, Any]()
    for name, value in vars(bag).items():
        if type(value) is type(bag):
            found |= _leaves(value)
        elif not name.startswith("_"):
            found[name] = value
    return found


_NAME_THEM = 'name them yourself with "weights_name", another name for each other weights'


def model_place(name: str, revision: str | None, download_dir: str | None) -> Path:
    """Return the directory that SGLang has a model's files in, or the one file that it is given.
    Nothing is downloaded. Raises ConfigError where there is none."""
    if (place := Path(name)).exists():
        return place
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, cache_dir=download_dir, local_files_only=True))
    except LocalEntryNotFoundError as error:
        partial = getattr(error, "snapshot_path", None)  # SGLang downloads what it needs of a repository
        if partial is not None:
            return Path(partial)
        raise ConfigError(
            f"kvdisk needs the weight files of {name}, and they are not on this host: {_NAME_THEM}."
        ) from error
    except Exception as error:  # of classes that the hub's library has of its own
        raise ConfigError(f"kvdisk needs the weight files of {name}, and does not find them: {_NAME_THEM}.") from error


def layout_facts(storage: Any, pools: Mapping[str, Any], rows: Mapping[str, Any]) -> dict[str, Any]:
    """Return how the bytes of a page are laid out, and which part of the model they are. ``pools``:
    SGLang's host pools, by its names; ``rows``: what they are to kvdisk."""
    first = next(iter(pools.values()))
    return {
        "pools": [[str(name), _pool_facts(pool, rows[name])] for name, pool in pools.items()],
        # SGLang: every rank has the same bytes with MLA
        "tensor_parallel": None if storage.is_mla_model else [storage.tp_rank, storage.tp_size],
        "pipeline": [storage.pp_rank, storage.pp_size, first.start_layer, first.end_layer],
    }


_SHAPE = (
    *("layer_num", "head_num", "head_dim", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim"),
    *("num_mamba_layers", "conv_dtype", "conv_state_shapes", "temporal_dtype", "temporal_state_shape"),
    *("indexer_dtype", "indexer_page_stride_size"),
)
"""What SGLang's host pools say of themselves, each of some."""


def _pool_facts(pool: Any, rows: Any) -> dict[str, Any]:
    return {
        "layout": pool.layout,
        "dtype": str(pool.dtype),
        "page_tokens": rows.page_size,
        "piece_bytes": rows.piece_bytes,
        # SGLang: a variable decides which of tokens and heads comes first within a page
        "order": getattr(getattr(pool, "device_pool", None), "kv_cache_layout", None),
        "format_tag": getattr(pool, "storage_format_tag", None),
        "shape": {name: getattr(pool, name, None) for name in _SHAPE},
    }


def identity_of(layout: dict[str, Any], weights_name: str | None) -> Identity:
    """Return the identity of pages: everything that must be equal for a page to be served.

    The weights are read on a thread of kvdisk's. ``weights_name``: the user's name for them; None:
    they are found. Raises ConfigError, NoThread.
    """
    arguments = read_arguments()
    values = {"sglang": sglang_version(), "format": FORMAT_VERSION, "layout": layout, "arguments": arguments.values}
    meaning = json.loads(json.dumps(values, default=str))
    if weights_name is not None:
        return Identity.certain(*vouched_namespace(weights_name, meaning))
    if arguments.load_format not in _FROM_FILES:
        raise ConfigError(
            f"kvdisk cannot tell which weights --load-format {arguments.load_format} loads: {_NAME_THEM}."
        )
    place, *others = (model_place(*source) for source in arguments.sources)
    _refuse_others_than_loaded([state_of(each) for each in (place, *others)])
    return model_identity_of(place, meaning, others)


def _refuse_others_than_loaded(state: list[Any]) -> None:
    """Raise ConfigError where a running server may have loaded other files than there are now, or
    may have updated its weights before anybody counted that."""
    from sglang.srt import runtime_context as context

    if context.get_memory().hicache_storage_backend is not None:  # SGLang: at the start alone
        _LOADED[:] = state
    elif state != _LOADED:
        raise ConfigError(
            "kvdisk cannot tell which weights this running server has, as it was started without kvdisk or its files"
            f" have changed since: start it with kvdisk, or {_NAME_THEM}."
        )
