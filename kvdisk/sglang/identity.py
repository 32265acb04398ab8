# SPDX-License-Identifier: Apache-2.0
"""What gives the bytes of a page their meaning: weights, how they compute, and how a page is laid
out. SGLang's keys have nothing of it: they name tokens."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvdisk.errors import ConfigError
from kvdisk.identity import Identity
from kvdisk.model_identity import identity_of as model_identity_of
from kvdisk.model_identity import vouched_namespace
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
    "exec": ("attention_backend", "decode_attention_backend", "prefill_attention_backend"),
    "mm": ("mm_process_config", "mm_attention_backend", "image_processor_backend", "disable_fast_image_processor"),
    "spec": ("speculative_algorithm", "speculative_draft_model_quantization", "speculative_draft_kv_cache_dtype"),
}
"""Arguments elsewhere that compute, by the name of their part."""
_VARIABLES = ("SGLANG_EXTERNAL_MODEL_PACKAGE",)


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
    scales = model.quantization_param_path
    values |= {name: os.environ.get(name) for name in _VARIABLES}
    if scales is not None:  # a file with the scales of a quantized cache
        values["quantization_param_path"] = _digest_of(Path(scales))
    return Arguments(sources, str(model.load_format), values)


def _digest_of(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"kvdisk needs {file}, which cannot be read: {error}.") from error


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
    return model_identity_of(place, meaning, others)
