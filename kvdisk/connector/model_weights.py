# SPDX-License-Identifier: Apache-2.0
"""A model's weights, as a part of an engine's identity: which files they are, and when they are
read."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm import envs

from kvdisk.connector.model_files import WITHOUT, drafter_load, model_folder, text_folder
from kvdisk.connector.weights import Facts, WeightsChanged, facts, known_digest, read_early, sample_digest
from kvdisk.device.paths import files_below
from kvdisk.errors import ConfigError, KvdiskError
from kvdisk.identity import Identity, Named

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig

WeightsDigest = Callable[["ModelConfig", "LoadConfig"], str]
"""Returns a digest of a model's weights, which are loaded like that."""

_SAFETENSORS_FIRST = frozenset({"auto", "fastsafetensors", "hf", "instanttensor", "mistral", "safetensors"})
"""The formats of loading with which vLLM reads no other files where there are safetensors."""
_CONSOLIDATED_FIRST = frozenset({"auto", "mistral"})
"""Those of them with which vLLM loads ``consolidated*.safetensors`` alone, where there are any."""
_OTHER_REPOSITORIES = ("audio_model_id", "text_model_id")
"""Of a model's configuration. vLLM: Ultravox has its language model's weights from another
repository."""
_SAY_HOW = frozenset((".json", ".model", ".mvn", ".py", ".tiktoken", ".txt", ".yaml", ".yml"))
_SAY_WHAT_NEXT = frozenset(("chat_template.json", "generation_config.json"))
"""Files that say which tokens are asked for, and nothing that is computed of given ones."""


def weight_files(model: ModelConfig, load: LoadConfig) -> list[Path]:
    """Return the files that a model's weights may be loaded from, and those that say which of them
    are, and how. Raises ConfigError where there are none."""
    files = list[Path]()
    for source in (model, *_other_sources(model)):
        folder = model_folder(source, load)
        # What this process may not list, vLLM's may not either.
        there = files_below(folder) if reads_more(model) else sorted(folder.glob("*"))
        found = [file for file in there if file.suffix == ".safetensors"]
        if not found or str(load.load_format) not in _SAFETENSORS_FIRST:
            found += [file for kind in (".bin", ".pt", ".gguf") for file in there if file.suffix == kind]
        if not found:
            raise ConfigError(
                f"The NVMe tier needs the model's weight files, and there are none in {folder}: {WITHOUT}."
            )
        files += found + sorted(file for kind in ("*.index.json", "*quant*.json") for file in folder.glob(kind))
    return files


def loaded_of(model: ModelConfig, load: LoadConfig) -> dict[str, Any]:
    """Return facts that tell which of a model's weight files vLLM loads, where a directory may have
    several sets of them; empty where ``--load-format auto`` would load the same ones."""
    name, load_format = Path(str(model.model_weights or model.model)), str(load.load_format)
    found: dict[str, Any] = {"file": name.name} if name.is_file() else {}
    if load_format not in _SAFETENSORS_FIRST:
        found |= {"load_format": load_format, "loader": load.model_loader_extra_config}
    elif load_format not in _CONSOLIDATED_FIRST and any(model_folder(model, load).glob("consolidated*.safetensors")):
        found["load_format"] = "hf"
    return found


def reads_more(model: ModelConfig) -> bool:
    """Return whether vLLM reads more of a model than its configuration and what weights are beside
    it: models of several media have encoders in directories of their own, those that pool have
    adapters there, as Jina's, which are merged into the weights, and Engram goes by the text of
    tokens."""
    return model.multimodal_config is not None or model.pooler_config is not None or has_engram(model)


def has_engram(model: ModelConfig) -> bool:
    """Return whether a model has embeddings of the last few tokens together (DeepSeek V4.1)."""
    return bool(getattr(model.hf_text_config, "engram_layer_ids", None))


def how_digest(model: ModelConfig, load: LoadConfig, *, is_vouched: bool) -> str:
    """Return a digest of all files of such a model that may say how it is computed: how its images
    are processed, and the configurations of its parts. ``is_vouched``: they need not be there.

    Tokenizers count: Mistral's says how large an image is, some models tokenize what stands between
    the pictures of a video, and Engram takes tokens of alike texts for one. Raises ConfigError.
    """
    digest = hashlib.sha256()
    places = [(str(source.model), source.revision) for source in (model, *_other_sources(model))]
    # vLLM: Engram has a tokenizer of the model's revision.
    places += [(str(model.tokenizer), revision) for revision in (model.tokenizer_revision, model.revision)]
    folders = [text_folder(*place) for place in dict.fromkeys(places)]
    if folders[0] is None and not is_vouched:
        folders[0] = model_folder(model, load)
    for number, folder in enumerate(folders):
        for file in [] if folder is None else _how_files(folder):
            try:
                text = file.read_bytes()
            except OSError as error:
                raise ConfigError(f"The NVMe tier needs files of the model that can be read: {error}.") from error
            digest.update(f"{number}:{os.path.relpath(file, folder)}:{len(text)}:".encode() + text)
    return digest.hexdigest()


def _how_files(folder: Path) -> Iterator[Path]:
    for file in files_below(folder):
        is_hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)  # of who downloads them
        if file.suffix in _SAY_HOW and file.name not in _SAY_WHAT_NEXT and not is_hidden and file.is_file():
            yield file


class _Source(NamedTuple):
    """Another repository that weights of a model come from: vLLM loads its main branch."""

    model: str
    model_weights: str = ""
    revision: str | None = None


def _other_sources(model: ModelConfig) -> list[_Source]:
    names = [getattr(model.hf_config, name, None) for name in _OTHER_REPOSITORIES]
    return [_Source(name) for name in names if name]


def weights_digest(model: ModelConfig, load: LoadConfig, seen: Sequence[Facts] | None = None) -> str:
    """Return a digest of every byte of a model's weight files: weights replaced under the same path
    are another model. It is remembered in vLLM's cache directory.

    ``seen``: see ``known_digest``. Raises ConfigError where there are no files to read,
    WeightsChanged, OSError.
    """
    return known_digest(weight_files(model, load), _memory(), seen=seen)


def _memory() -> Path:
    return Path(envs.VLLM_CACHE_ROOT) / "kvdisk"


def identity_of(name: Callable[[WeightsDigest], tuple[bytes, dict[str, Any]]]) -> Identity:
    """Return the identity that ``name`` makes of digests of weights, which are loaded already.

    A sample of them is read here, and all of them on a thread. Raises ConfigError, NoThread.
    """
    seen: dict[tuple[Path, ...], list[Facts]] = {}
    noted = _noted()

    def sample(model: ModelConfig, load: LoadConfig) -> str:
        files = weight_files(model, load)
        try:
            seen[tuple(files)] = facts(files)
            return sample_digest(files)
        except OSError as error:
            raise ConfigError(f"The NVMe tier needs weight files that can be read: {error}.") from error

    def exact(model: ModelConfig, load: LoadConfig) -> str:
        files = weight_files(model, load)
        before = seen.get(tuple(files), [])
        if noted.get(str(model.model), "") not in {"", _sum_of(before)}:
            raise WeightsChanged(f"weight files of {model.model} changed while the engine was starting")
        return known_digest(files, _memory(), seen=before)

    return Identity.found_by(Named(*name(sample)), lambda: Named(*name(exact)))


_NOTED = "_KVDISK_WEIGHTS"
"""A variable of the environment, which an engine's own process has from its server's: by model, a
sum of the facts of its weight files when the configuration was built, and so before they were
loaded. Files that were not there then are downloaded by vLLM."""


def read_weights_early(vllm_config: VllmConfig) -> None:
    """An engine's configuration is being built: note what weights are here, and begin to read
    them."""
    noted = _noted()
    if noted and multiprocessing.parent_process() is not None:
        return  # vLLM builds configurations once more when it has loaded weights
    drafter = getattr(vllm_config.speculative_config, "draft_model_config", None)
    for model, load in ((vllm_config.model_config, vllm_config.load_config), (drafter, None)):
        if model is not None:
            noted[str(model.model)] = ""
            with suppress(KvdiskError, OSError):  # they are downloaded later, say
                files = weight_files(model, load or drafter_load(vllm_config))
                noted[str(model.model)] = _sum_of(facts(files))
                read_early(files, _memory())
    os.environ[_NOTED] = json.dumps(noted)


def _noted() -> dict[str, str]:
    noted: dict[str, str] = json.loads(os.environ.get(_NOTED, "{}"))
    return noted


def _sum_of(found: Sequence[Facts]) -> str:
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()
