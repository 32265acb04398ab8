# SPDX-License-Identifier: Apache-2.0
"""The namespace of a model, for who keeps its blocks by the library: no vLLM, and no torch.

It is exact: of every byte of the weights, and of each file that says how they are computed. Other
weights under the same name have another namespace, and the same weights under another name the
same one; of a file its name counts. docs/LIBRARY.md says what else a caller has to name.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvdisk.connector.weights import Facts, WeightsChanged, facts, known_digest, sample_digest
from kvdisk.device.paths import files_below
from kvdisk.errors import ConfigError
from kvdisk.geometry import FORMAT_VERSION
from kvdisk.identity import Identity, Named

Model = str | Path | tuple[str, str | None]
"""A directory or file with weights, or a repository of Hugging Face's hub, as ``"name"`` or as
``("name", revision)``, of which the hub's cache has the files."""

_WEIGHTS = frozenset((".safetensors", ".bin", ".pt", ".pth", ".gguf"))
_SAY_HOW = frozenset((".json", ".mvn", ".py", ".yaml", ".yml"))
"""Files of a model that may say how it is computed: its configuration and its code."""
_OF_TEXT = frozenset(
    (
        *("added_tokens.json", "chat_template.json", "generation_config.json", "merges.txt"),
        *("special_tokens_map.json", "tokenizer.json", "tokenizer_config.json", "vocab.json"),
    )
)
_ALSO_OF_TEXT = frozenset((".model", ".tiktoken", ".txt"))
"""Files that say which text tokens stand for, and which come next: nothing that is computed of
given tokens, but by the models of ``_reads_text``."""
_BY_LONGEST, _TUNING = frozenset(("dynamic", "llama4", "llama4_text", "longrope", "su")), "attn_temperature_tuning"
"""Kinds of rotary embeddings, and of models, that depend on the longest context; and a setting."""
_OTHER_REPOSITORIES = ("audio_model_id", "text_model_id")
"""Of a model's configuration: Ultravox has its language model's weights from another repository."""
_MOST_FACT = 32 << 10
"""Bytes of one of the facts in a description: a few of them fit (``MOST_DESCRIPTION_BYTES``)."""
_Digest = Callable[[Sequence[Path]], str]


def namespace_of(
    model: Model, meaning: Mapping[str, Any], others: Sequence[Model] = (), memory: Path | None = None
) -> Named:
    """Return the namespace of a model's blocks (32 bytes), and a description for people: the first
    arguments of ``BlockStore.open`` behind the settings.

    ``meaning``: all else that decides a byte of a block for the same key, as JSON values: the
    engine and its version, data types, layout and sizes of a block, ranks and which one this is,
    and settings that change what the model computes. It must not be empty. ``others``: models whose
    weights count as well, such as adapters. ``memory``: a directory of this user's where digests
    are remembered, as long as files show no change; None: ``kvdisk`` in the user's cache directory.

    Reads all weights that are not remembered: about as long as loading them. Call it before they
    are loaded, or ``identity_of``. Raises ValueError, ConfigError where the files are not there or
    cannot be read, WeightsChanged where they change meanwhile, NoThread.
    """
    found = [_files_of(each) for each in (*_with_named(model), *others)]
    return _named(model, meaning, found, lambda files: known_digest(files, memory or _usual_memory()))


def identity_of(
    model: Model, meaning: Mapping[str, Any], others: Sequence[Model] = (), memory: Path | None = None
) -> Identity:
    """Return what ``namespace_of`` returns as an identity that is found on a thread, for
    ``BlockStore.open_for``: until it is known nothing is found or stored. A sample of the weights
    is read here. Files that change before all are read make it WeightsChanged. Raises as
    ``namespace_of``."""
    found = [_files_of(each) for each in (*_with_named(model), *others)]
    seen: dict[tuple[Path, ...], list[Facts]] = {}

    def sample(files: Sequence[Path]) -> str:
        seen[tuple(files)] = facts(files)
        return sample_digest(files)

    def exact(files: Sequence[Path]) -> str:
        return known_digest(files, memory or _usual_memory(), seen=seen[tuple(files)])

    guess = _named(model, meaning, found, sample)
    said = [_said_by(place, files) for place, files in found]

    def find() -> Named:
        if [_said_by(place, files) for place, files in found] != said:
            raise WeightsChanged(f"files of {_name_of(model)} changed while its weights were read")
        return _named(model, meaning, found, exact)

    return Identity.found_by(guess, find)


def state_of(model: Model) -> tuple[Facts, ...]:
    """Return what changes when a file of a model does: of the weights, and of all that says how
    they are computed. Equal states stand for equal files, as long as this process runs. Reads no
    weights. Raises ConfigError where they are not there."""
    try:
        return tuple(each for one in _with_named(model) for each in facts(_files_of(one)[1]))
    except OSError as error:
        raise ConfigError(f"The files of {_name_of(model)} cannot be read: {error}") from error


def depends_on_longest(model: Model) -> bool:
    """Return whether what a model computes depends on the longest context that an engine is started
    for: some rotary embeddings do, and Llama 4. Raises ConfigError where its configuration cannot
    be read."""
    return _names_longest(_config_in(_folder_of(_place_of(model))))


def _names_longest(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_names_longest, value))
    if not isinstance(value, dict):
        return False
    kinds = {str(value.get(name)) for name in ("rope_type", "type", "model_type")}
    return not kinds.isdisjoint(_BY_LONGEST) or _TUNING in value or any(map(_names_longest, value.values()))


def vouched_namespace(name: str, meaning: Mapping[str, Any]) -> Named:
    """Return the namespace of weights and code that the caller names, and vouches for: nothing is
    read. Whoever uses a name for other weights gets wrong blocks."""
    if not name:
        raise ValueError("a vouched name is not empty")
    return _hashed(name, {"vouched": name}, meaning)


def _named(
    model: Model, meaning: Mapping[str, Any], found: Iterable[tuple[Path, Sequence[Path]]], digest: _Digest
) -> Named:
    try:
        models = [{"weights": digest(_weights_in(files)), "said": _said_by(place, files)} for place, files in found]
    except OSError as error:
        raise ConfigError(f"The files of {_name_of(model)} cannot be read: {error}") from error
    return _hashed(_name_of(model), {"models": models}, meaning)


def _hashed(name: str, known: Mapping[str, Any], meaning: Mapping[str, Any]) -> Named:
    if not meaning:
        raise ValueError("weights alone do not say what a block's bytes mean: name the rest")
    try:
        text = json.dumps({"format": FORMAT_VERSION, **known, "meaning": meaning}, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ValueError(f"what gives blocks their meaning is named as JSON values: {error}") from error
    return Named(hashlib.sha256(text.encode()).digest(), {"model": name, "facts": _shown(json.loads(text))})


def _shown(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts with a digest of each that is too long to be shown, as of a directory with very
    many files."""
    texts = {name: json.dumps(value, indent=2, sort_keys=True) for name, value in facts.items()}
    return {
        name: value if len(texts[name]) <= _MOST_FACT else hashlib.sha256(texts[name].encode()).hexdigest()
        for name, value in facts.items()
    }


# -- files -----------------------------------------------------------------------------------------


def _files_of(model: Model) -> tuple[Path, list[Path]]:
    """Return a model's directory or file, and the files that count. Raises ConfigError."""
    place = _place_of(model)
    folder = _folder_of(place)
    try:
        files = files_below(folder, _raise)
        kinds = _WEIGHTS | _SAY_HOW | _ALSO_OF_TEXT
        kept = [file for file in files if file.suffix in kinds and file.is_file()]
        if not _reads_text(files):
            kept = [file for file in kept if file.name not in _OF_TEXT and file.suffix not in _ALSO_OF_TEXT]
    except OSError as error:
        raise ConfigError(f"The files of {_name_of(model)} cannot be listed: {error}") from error
    if not _weights_in(kept):
        raise ConfigError(f"There are no weight files of {_name_of(model)} in {folder}.")
    return place, kept + _code_elsewhere(folder)


def _code_elsewhere(folder: Path) -> list[Path]:
    """Return the code of other repositories that a model's configuration names, as far as the hub's
    cache has it: an engine that trusts it has loaded it from there, at the newest revision."""
    found, named = set[Path](), json.dumps(_config_in(folder).get("auto_map"))
    for repository, module in re.findall(r'"([^"]+?)--([\w.]+)\.\w+"', named):
        from huggingface_hub import try_to_load_from_cache

        file = try_to_load_from_cache(repository, f"{module.replace('.', '/')}.py")
        if isinstance(file, str):
            found.update(Path(file).parent.glob("*.py"))
    return sorted(found)


def _config_in(folder: Path) -> dict[str, Any]:
    """Return a model's configuration; {} where there is none. Raises ConfigError."""
    file = folder / "config.json"
    try:
        found = json.loads(file.read_text())
    except (FileNotFoundError, ValueError):  # no engine starts with what is no JSON
        return {}
    except OSError as error:
        raise ConfigError(f"The configuration {file} cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}


def _with_named(model: Model) -> list[Model]:
    """Return a model, and the repositories that its configuration names for weights of its
    parts."""
    config = _config_in(_folder_of(_place_of(model)))
    return [model, *(str(config[name]) for name in _OTHER_REPOSITORIES if config.get(name))]


def _raise(error: OSError) -> None:
    raise error


def _reads_text(files: Sequence[Path]) -> bool:
    """Return whether a model is computed also by what its tokenizer and generation files say:
    models of several media are, as Llama 4, and Engram, which goes by the text of tokens."""
    if any(file.name.endswith("processor_config.json") for file in files):
        return True
    return any(b"engram_layer_ids" in file.read_bytes() for file in files if file.name == "config.json")


def _folder_of(place: Path) -> Path:
    return place.parent if place.is_file() else place


def _place_of(model: Model) -> Path:
    name, revision = model if isinstance(model, tuple) else (model, None)
    if (place := Path(name)).exists():
        if revision is not None:
            raise ValueError(f"{name} is a directory, and has no revision")
        return place
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(name), revision=revision, local_files_only=True))
    except Exception as error:  # of classes that the hub's library has of its own, or it is missing
        raise ConfigError(f"The files of {name} are neither a directory nor in the hub's cache.") from error


def _weights_in(files: Sequence[Path]) -> list[Path]:
    return [file for file in files if file.suffix in _WEIGHTS]


def _said_by(place: Path, files: Sequence[Path]) -> dict[str, str]:
    """Return a digest of each file that may say how a model is computed, and the name of the one
    that has its weights, where the model is a file. Raises OSError."""
    folder = _folder_of(place)
    return ({} if folder == place else {"weights": place.name}) | {
        str(file.relative_to(folder) if file.is_relative_to(folder) else f"elsewhere: {file.name}"): hashlib.sha256(
            file.read_bytes()
        ).hexdigest()
        for file in files
        if file.suffix not in _WEIGHTS
    }


def _name_of(model: Model) -> str:
    if isinstance(model, tuple):
        return f"{model[0]}@{model[1]}" if model[1] else model[0]
    return str(model)


def _usual_memory() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "kvdisk"
