# SPDX-License-Identifier: Apache-2.0
"""Where vLLM has a model's files from: a directory, a hub's cache, or ``--download-dir``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vllm import envs

from kvdisk.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig

WITHOUT = "leave out store_dirs and remote"
"""What a user does whose weights cannot be told."""


def model_folder(model: ModelConfig, load: LoadConfig) -> Path:
    """Return the directory that vLLM loads a model's weights from. ``load``: says how; of a
    drafter see ``drafter_load``.

    Nothing is downloaded: of a model from a hub the directory is there when vLLM has loaded it.
    Raises ConfigError where it is not.
    """
    name = str(model.model_weights or model.model)
    if (place := Path(name)).exists():
        return place.parent if place.is_file() else place
    try:
        if envs.VLLM_USE_MODELSCOPE:  # vLLM: it then has weights in ModelScope's cache, whatever download_dir says
            return _in_scope(name, model.revision)
        return _in_hub(name, model.revision, load.download_dir)
    except Exception as error:  # of classes that each hub's library has of its own
        raise ConfigError(
            f"The NVMe tier needs the weight files of {name}, and they are not found in {_said(load)}: {WITHOUT}."
        ) from error


def text_folder(name: str, revision: str | None) -> Path | None:
    """Return the directory that vLLM has the processors and the code of a model or a repository
    from; None where there is none. vLLM: it never looks for them in ``--download-dir``."""
    if (place := Path(name)).exists():
        return place.parent if place.is_file() else place
    try:
        return _in_scope(name, revision) if envs.VLLM_USE_MODELSCOPE else _in_hub(name, revision, None)
    except Exception:  # of classes that each hub's library has of its own
        return None


def drafter_load(vllm_config: VllmConfig) -> LoadConfig:
    """Return how vLLM loads a drafter: as its own settings say, or like the model."""
    return getattr(vllm_config.speculative_config, "draft_load_config", None) or vllm_config.load_config


def _in_hub(name: str, revision: str | None, cache: str | None) -> Path:
    """Return a snapshot in a cache of Hugging Face's hub. ``cache``: None: the usual one."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True))
    except LocalEntryNotFoundError as error:
        # vLLM downloads what it needs of a repository, and the rest is missing for ever.
        partial = getattr(error, "snapshot_path", None)
        if partial is None:
            raise
        return Path(partial)


def _in_scope(name: str, revision: str | None) -> Path:
    """Return a model's directory in ModelScope's cache."""
    from modelscope.hub.snapshot_download import snapshot_download

    return Path(snapshot_download(name, revision=revision, local_files_only=True))


def _said(load: LoadConfig) -> str:
    """Return, for people, where the files of models lie, and what says so."""
    if envs.VLLM_USE_MODELSCOPE:
        return "ModelScope's cache (VLLM_USE_MODELSCOPE, MODELSCOPE_CACHE)"
    if load.download_dir is not None:
        return f"{load.download_dir} (--download-dir)"
    from huggingface_hub import constants

    return f"{constants.HF_HUB_CACHE} (HF_HOME, HF_HUB_CACHE)"
