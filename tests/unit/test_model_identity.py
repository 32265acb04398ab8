# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdisk.connector.weights import WeightsChanged
from kvdisk.device.paths import encode_json
from kvdisk.errors import ConfigError
from kvdisk.identity import MOST_DESCRIPTION_BYTES
from kvdisk.model_identity import identity_of, namespace_of, state_of, vouched_namespace

MEANING = {"engine": "an engine 1.2", "dtype": "bfloat16", "rank": [0, 2]}


def make_model(folder: Path, seed: int = 1) -> Path:
    """Write a directory with two weight files and what lies beside them."""
    folder.mkdir(parents=True)
    for number in range(2):
        content = np.random.default_rng(seed + number).integers(0, 256, 200_000, np.uint8).tobytes()
        header = json.dumps({"tensor": {"dtype": "U8", "shape": [200_000], "data_offsets": [0, 200_000]}}).encode()
        file = folder / f"model-{number}.safetensors"
        file.write_bytes(len(header).to_bytes(8, "little") + header + content)
    (folder / "config.json").write_text('{"rope_theta": 10000}')
    (folder / "modeling_mine.py").write_text("x = 1\n")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("a model")
    return folder


def flip(file: Path, offset: int) -> None:
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(content)


@pytest.fixture
def name(tmp_path: Path) -> Callable[..., bytes]:
    def named(model: Any, meaning: Any = MEANING, others: Any = ()) -> bytes:
        return namespace_of(model, meaning, others, tmp_path / "memory").fingerprint

    return named


def test_it_is_the_same_wherever_the_files_lie(tmp_path: Path, name: Callable[..., bytes]) -> None:
    """By a directory, a copy, and another order of what else is named."""
    model = make_model(tmp_path / "one")
    copy = shutil.copytree(model, tmp_path / "other name")
    first = name(model)
    assert len(first) == 32
    assert first == name(str(model)) == name(copy)
    assert first == name(model, dict(reversed(MEANING.items())))
    (copy / "tokenizer.json").write_text('{"a": 1}')
    (copy / "README.md").write_text("another text")
    assert first == name(copy)


def test_of_several_files_the_one_that_is_the_model_counts(tmp_path: Path, name: Callable[..., bytes]) -> None:
    """As with several quantisations of a model in one directory."""
    model = make_model(tmp_path / "one")
    copy = shutil.copytree(model, tmp_path / "copy")
    found = [name(model / f"model-{number}.safetensors") for number in range(2)]
    assert len({name(model), *found}) == 3
    assert name(copy / "model-1.safetensors") == found[1]


@pytest.mark.parametrize("offset", [20, 1000, 150_001, -1])
def test_each_byte_of_the_weights_counts(tmp_path: Path, name: Callable[..., bytes], offset: int) -> None:
    model = make_model(tmp_path / "one")
    first = name(model)
    flip(model / "model-1.safetensors", offset)
    assert name(model) != first


def test_what_says_how_counts(tmp_path: Path, name: Callable[..., bytes]) -> None:
    """The configuration, code, files in directories below, other models, and what the caller
    names."""
    model, adapter = make_model(tmp_path / "one"), make_model(tmp_path / "adapter", seed=7)
    found = [name(model), name(model, others=[adapter]), name(model, {**MEANING, "rank": [1, 2]})]
    (model / "config.json").write_text('{"rope_theta": 20000}')
    found.append(name(model))
    (model / "modeling_mine.py").write_text("x = 2\n")
    found.append(name(model))
    make_model(model / "vision", seed=3)
    found.append(name(model))
    assert len(set(found)) == len(found)


def test_files_behind_a_link_to_a_directory_count(tmp_path: Path, name: Callable[..., bytes]) -> None:
    """Also where it leads in a circle."""
    model, adapter = make_model(tmp_path / "one"), make_model(tmp_path / "adapter", seed=7)
    (model / "adapters").symlink_to(adapter)
    (adapter / "up").symlink_to(model)
    found = [name(model)]
    flip(adapter / "model-1.safetensors", 1000)
    found.append(name(model))
    (adapter / "config.json").write_text("{}")
    found.append(name(model))
    assert len(set(found)) == 3


@pytest.mark.parametrize(
    ("file", "says"), [("preprocessor_config.json", "{}"), ("config.json", '{"engram_layer_ids": [1]}')]
)
def test_text_counts_for_models_that_read_it(tmp_path: Path, name: Callable[..., bytes], file: str, says: str) -> None:
    """Those of several media, and Engram."""
    model = make_model(tmp_path / "one")
    (model / file).write_text(says)
    found, states = [name(model)], [state_of(model)]
    for text in ("tokenizer.json", "generation_config.json", "tekken.json", "vocab.txt", "am.mvn"):
        (model / text).write_text('{"attn_temperature_tuning": false}')
        found.append(name(model))
        states.append(state_of(model))
    assert len(set(found)) == len(set(states)) == 6


def test_weights_of_another_repository_count(tmp_path: Path, name: Callable[..., bytes]) -> None:
    """As the language model's of Ultravox."""
    model, text = make_model(tmp_path / "one"), make_model(tmp_path / "text", seed=7)
    (model / "config.json").write_text(json.dumps({"text_model_id": str(text)}))
    found, state = name(model), state_of(model)
    flip(text / "model-1.safetensors", 1000)
    assert name(model) != found
    assert state_of(model) != state
    (model / "config.json").write_text(json.dumps({"audio_model_id": "org/nowhere"}))
    with pytest.raises(ConfigError, match="org/nowhere are neither a directory nor"):
        name(model)


def test_code_of_another_repository_counts(tmp_path: Path, name: Callable[..., bytes], monkeypatch: Any) -> None:
    """Once it is in the hub's cache, with what is beside it."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    model, code = make_model(tmp_path / "one"), tmp_path / "code"
    auto = {"AutoConfig": "org/code--configuration_x.Config", "AutoModel": ["org/code--modeling_x.Model", None]}
    (model / "config.json").write_text(json.dumps({"auto_map": auto}))
    code.mkdir()

    def look(repository: str, file: str) -> str | None:
        assert repository == "org/code"
        return str(code / file) if (code / file).exists() else None

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", look)
    found, states = [name(model)], [state_of(model)]
    for file, text in (("modeling_x.py", "x = 1"), ("modeling_x.py", "x = 22"), ("beside.py", "y = 1")):
        (code / file).write_text(text)
        found.append(name(model))
        states.append(state_of(model))
    assert len(set(found)) == len(set(states)) == 4


def test_a_repository_in_the_hubs_cache(tmp_path: Path, name: Callable[..., bytes], monkeypatch: Any) -> None:
    """By its name, or with a revision; the same files in a directory have the same namespace."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    snapshots = {None: make_model(tmp_path / "main"), "v1": make_model(tmp_path / "v1", seed=5)}

    def download(repository: str, *, revision: str | None, local_files_only: bool) -> str:
        assert local_files_only
        if repository != "org/model":
            raise RuntimeError("it is not here")
        return str(snapshots[revision])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert name("org/model") == name(snapshots[None]) != name(("org/model", "v1")) == name(snapshots["v1"])
    with pytest.raises(ConfigError, match="neither a directory nor in the hub's cache"):
        name("org/other")


def test_what_has_no_identity_is_an_error(tmp_path: Path, name: Callable[..., bytes]) -> None:
    model = make_model(tmp_path / "one")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no weight files"):
        name(tmp_path / "empty")
    with pytest.raises(ValueError, match="name the rest"):
        name(model, {})
    with pytest.raises(ValueError, match="JSON values"):
        name(model, {"dtype": {1, 2}})
    with pytest.raises(ValueError, match="has no revision"):
        name((str(model), "main"))
    with pytest.raises(ValueError, match="not empty"):
        vouched_namespace("", MEANING)


def test_a_vouched_name_reads_nothing(tmp_path: Path, name: Callable[..., bytes]) -> None:
    model = make_model(tmp_path / "one")
    first = vouched_namespace(str(model), MEANING).fingerprint
    assert first == vouched_namespace(str(model), dict(MEANING)).fingerprint
    assert len({first, vouched_namespace("v2", MEANING).fingerprint, name(model)}) == 3


def test_what_is_shown_of_very_many_files_fits_an_engine_store(tmp_path: Path, name: Callable[..., bytes]) -> None:
    """All of them count."""
    model = make_model(tmp_path / "one")
    for number in range(3000):
        (model / f"{number}.json").write_text("{}")
    described = namespace_of(model, MEANING, memory=tmp_path / "memory").description
    assert len(encode_json({"description": described})) <= MOST_DESCRIPTION_BYTES
    assert described["facts"]["meaning"] == MEANING
    first = name(model)
    (model / "2999.json").write_text("[]")
    assert name(model) != first


def test_an_identity_is_found_later(tmp_path: Path) -> None:
    """It is the namespace that is found at once; the guess is another."""
    model = make_model(tmp_path / "one")
    named = namespace_of(model, MEANING, memory=tmp_path / "memory")
    identity = identity_of(model, MEANING, memory=tmp_path / "memory")
    found = identity.wait(120.0)
    assert found is not None
    assert found.fingerprint == named.fingerprint != identity.guess.fingerprint
    assert found.description["model"] == str(model)


@pytest.mark.parametrize("file", ["model-1.safetensors", "config.json"])
def test_files_that_change_meanwhile_have_no_identity(tmp_path: Path, monkeypatch: Any, file: str) -> None:
    """Nobody knows which were loaded."""
    import threading

    from kvdisk import model_identity

    goes_on, exact = threading.Event(), model_identity.known_digest

    def later(*arguments: Any, **more: Any) -> str:
        goes_on.wait(120.0)
        return exact(*arguments, **more)

    model = make_model(tmp_path / "one")
    said_by = model_identity._said_by
    monkeypatch.setattr(model_identity, "known_digest", later)
    main = threading.current_thread()

    def said(*arguments: Any) -> dict[str, str]:
        if threading.current_thread() is not main:
            goes_on.wait(120.0)
        return said_by(*arguments)

    monkeypatch.setattr(model_identity, "_said_by", said)
    identity = identity_of(model, MEANING, memory=tmp_path / "memory")
    flip(model / file, 40 if file.startswith("model") else 1)
    goes_on.set()
    with pytest.raises(WeightsChanged):
        identity.wait(120.0)


@pytest.mark.parametrize("file", ["model-1.safetensors", "config.json", "modeling_mine.py"])
def test_a_state_shows_that_a_file_has_changed(tmp_path: Path, file: str) -> None:
    model = make_model(tmp_path / "model")
    state = state_of(model)
    (model / "README.md").write_text("another text")
    assert state_of(model) == state
    flip(model / file, 5)
    assert state_of(model) != state
    (model / file).unlink()
    assert state_of(model) != state
    with pytest.raises(ConfigError):
        state_of(tmp_path / "nothing")


def test_it_needs_no_engine() -> None:
    code = "import sys, kvdisk.model_identity, kvdisk.shared_store; print(*{'torch', 'vllm'} & set(sys.modules))"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], check=True, env=env, capture_output=True, text=True)
    assert done.stdout.split() == []
