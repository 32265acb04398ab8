# SPDX-License-Identifier: Apache-2.0
"""Where a model's files are found: where vLLM has them from."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants
from schedulers import vllm_config
from test_start import PLAIN
from vllm.config import LoadConfig, MultiModalConfig, PoolerConfig

from kvdisk.connector.identity import fingerprint_of
from kvdisk.connector.model_files import drafter_load, model_folder, text_folder
from kvdisk.connector.model_weights import weight_files
from kvdisk.connector.plugin import register
from kvdisk.errors import ConfigError

NAME, COMMIT = "someone/tiny", "0123456789abcdef0123456789abcdef01234567"


def _cached(cache: Path, source: Path, *, is_partial: bool = False) -> Path:
    """Put a model into a hub's cache as a download does, and return its directory. ``is_partial``:
    the hub has a file more, which nobody asked for."""
    repository = cache / f"models--{NAME.replace('/', '--')}"
    folder = Path(shutil.copytree(source, repository / "snapshots" / COMMIT))
    for directory in ("refs", "trees"):
        (repository / directory).mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    if is_partial:
        files = {name: {"size": 1, "blob_id": "0"} for name in ("config.json", "original/consolidated.00.pth")}
        (repository / "trees" / f"{COMMIT}.json").write_text(json.dumps({"format_version": 1, "files": files}))
    return folder


def _model(revision: str | None = None) -> Any:
    return SimpleNamespace(model=NAME, model_weights="", revision=revision)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache that is used where nobody names one; empty."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
@pytest.mark.parametrize("is_partial", [False, True], ids=["whole", "in part"])
def test_weights_are_where_vllm_has_put_them(tiny_llama, tmp_path, hub, revision, is_partial):
    """vLLM downloads weights alone, so that of most repositories a snapshot lacks something."""
    folder = _cached(tmp_path / "downloads", tiny_llama, is_partial=is_partial)
    there = LoadConfig(download_dir=str(tmp_path / "downloads"))
    assert model_folder(_model(revision), there) == folder
    usual = _cached(hub, tiny_llama, is_partial=is_partial)
    assert model_folder(_model(revision), there) == folder
    assert model_folder(_model(revision), LoadConfig()) == usual


def test_a_path_is_a_path(tiny_llama, tmp_path):
    for path in (tiny_llama, next(tiny_llama.glob("*.safetensors"))):
        model = SimpleNamespace(model=str(path), model_weights="", revision=None)
        assert model_folder(model, LoadConfig(download_dir=str(tmp_path))) == tiny_llama


def test_modelscope_has_a_cache_of_its_own(tiny_llama, tmp_path, monkeypatch):
    """vLLM gives its downloader no directory, whatever --download-dir says."""
    asked: list[Any] = []

    def snapshot_download(model_id: str, **options: Any) -> str:
        asked.append((model_id, options))
        if model_id != NAME:
            raise RuntimeError("CacheNotFound")
        return str(tiny_llama)

    for name in ("modelscope", "modelscope.hub", "modelscope.hub.snapshot_download"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["modelscope.hub.snapshot_download"].snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
    load = LoadConfig(download_dir=str(tmp_path))
    assert model_folder(_model("v1"), load) == text_folder(NAME, "v1") == tiny_llama
    assert asked == [(NAME, {"revision": "v1", "local_files_only": True})] * 2
    with pytest.raises(ConfigError, match=r"someone/absent, .* ModelScope's cache .VLLM_USE_MODELSCOPE"):
        model_folder(SimpleNamespace(model="someone/absent", model_weights="", revision=None), load)


def test_weights_that_are_not_found_are_refused_by_the_flag_that_says_where_they_are(tmp_path, hub):
    with pytest.raises(ConfigError, match=rf"not found in {tmp_path} .--download-dir.: leave out store_dirs"):
        model_folder(_model(), LoadConfig(download_dir=str(tmp_path)))
    with pytest.raises(ConfigError, match=rf"not found in {hub} .HF_HOME"):
        model_folder(_model(), LoadConfig())


def _config(tiny_llama: Path, load: LoadConfig) -> Any:
    """Return an engine's configuration for a model that is known by its name in a hub."""
    register()
    config = vllm_config(tiny_llama)
    config.model_config.model, config.model_config.tokenizer, config.load_config = NAME, NAME, load
    return config


def test_weights_in_download_dir_make_the_namespace(tiny_llama, tmp_path, hub):
    folder = _cached(tmp_path / "downloads", tiny_llama, is_partial=True)
    config = _config(tiny_llama, LoadConfig(download_dir=str(tmp_path / "downloads")))
    first = fingerprint_of(config, PLAIN)[0]
    assert first == fingerprint_of(vllm_config(tiny_llama), PLAIN)[0], "the weights count, not where they are"
    shutil.copy(next(folder.glob("*.safetensors")), folder / "more.safetensors")
    second = fingerprint_of(config, PLAIN)[0]
    config.speculative_config = SimpleNamespace(method="eagle", draft_model_config=config.model_config)
    with_drafter = fingerprint_of(config, PLAIN)[0]
    _cached(tmp_path / "elsewhere", tiny_llama)  # the same name, other weights
    config.speculative_config.draft_load_config = LoadConfig(download_dir=str(tmp_path / "elsewhere"))
    assert drafter_load(config) == config.speculative_config.draft_load_config
    assert len({first, second, with_drafter, fingerprint_of(config, PLAIN)[0]}) == 4


def test_processors_are_where_vllm_has_them_from(tiny_llama, tmp_path, hub):
    """That is not --download-dir."""
    downloads = _cached(tmp_path / "downloads", tiny_llama)
    load = LoadConfig(download_dir=str(tmp_path / "downloads"))
    assert text_folder(NAME, None) is None
    usual = _cached(hub, tiny_llama, is_partial=True)
    assert text_folder(NAME, None) == usual
    config, seen = _config(tiny_llama, load), set()
    config.model_config.multimodal_config = MultiModalConfig()
    for content in ("{}", '{"do_resize": false}'):
        (usual / "preprocessor_config.json").write_text(content)
        seen.add(fingerprint_of(config, PLAIN)[0])
    (downloads / "preprocessor_config.json").write_text("{}")
    seen.add(fingerprint_of(config, PLAIN)[0])
    assert len(seen) == 2


@pytest.mark.parametrize("kind", ["media", "pooling", "Engram"])
def test_all_files_that_may_say_how_a_model_is_computed_make_the_namespace(kind, tiny_llama, tmp_path):
    """Of models of which vLLM reads more than the configuration: an encoder has one of its own, an
    adapter has its factor there, and Mistral's tokenizer says how large images are."""
    folder, text, other = (tmp_path / name for name in ("model", "text", "other"))
    shutil.copytree(tiny_llama, folder)
    (text / "sub").mkdir(parents=True)
    other.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (folder / "whisper").symlink_to(tmp_path / "elsewhere")
    config = vllm_config(folder)
    config.model_config.multimodal_config = MultiModalConfig() if kind == "media" else None
    config.model_config.pooler_config = PoolerConfig() if kind == "pooling" else None
    config.model_config.hf_text_config.engram_layer_ids = [1] if kind == "Engram" else None
    config.model_config.hf_config.audio_model_id = str(text)
    shutil.copy(next(tiny_llama.glob("*.safetensors")), text)
    seen = [fingerprint_of(config, PLAIN)[0]]
    for file in (".cache/of.json", "chat_template.json", "generation_config.json", "picture.png"):
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text("{ }")
        assert fingerprint_of(config, PLAIN)[0] == seen[0], file
    for file in (
        folder / "audio_tokenizer" / "config.json",
        folder / "adapters" / "retrieval" / "adapter_config.json",
        folder / "whisper" / "preprocessor_config.json",
        folder / "tekken.json",
        folder / "am.mvn",
        text / "sub" / "preprocessor_config.json",
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        for content in ("{}", '{"size": 1}'):
            file.write_text(content)
            seen.append(fingerprint_of(config, PLAIN)[0])
    config.model_config.tokenizer = str(other)
    for content in ("{}", '{"size": 1}'):
        (other / "tekken.json").write_text(content)
        seen.append(fingerprint_of(config, PLAIN)[0])
    assert len(set(seen)) == len(seen)


def test_all_files_that_may_be_loaded_are_weights(tmp_path):
    """By the format of loading, of each repository that a model has parts from, and below, also
    behind links."""
    for folder in ("model", "behind"):
        (tmp_path / folder).mkdir()
    (tmp_path / "model" / "sub").symlink_to(tmp_path / "behind")
    for name in (
        "model.safetensors",
        "model.bin",
        "sub/part.safetensors",
        "model.safetensors.index.json",
        "hf_quant_config.json",
    ):
        file = tmp_path / "model" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "text.safetensors").touch()

    def found(load_format: str = "auto", *, media: bool = False, pools: bool = False, **of_model: str) -> list[str]:
        model: Any = SimpleNamespace(
            model=str(tmp_path / "model"),
            model_weights="",
            revision=None,
            multimodal_config=MultiModalConfig() if media else None,
            pooler_config=PoolerConfig() if pools else None,
            hf_text_config=None,
            hf_config=SimpleNamespace(**of_model),
        )
        return [str(file.relative_to(tmp_path)) for file in weight_files(model, LoadConfig(load_format=load_format))]

    how = ["model/hf_quant_config.json", "model/model.safetensors.index.json"]
    assert found() == ["model/model.safetensors", *how]
    assert found("pt") == ["model/model.safetensors", "model/model.bin", *how]
    assert found(media=True) == found(pools=True) == ["model/model.safetensors", "model/sub/part.safetensors", *how]
    assert found(text_model_id=str(tmp_path / "text")) == ["model/model.safetensors", *how, "text/text.safetensors"]
