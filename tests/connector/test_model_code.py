# SPDX-License-Identifier: Apache-2.0
"""Code that is not vLLM's, and settings that change what is computed, make the namespace."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_child import EngineChild
from huggingface_hub import constants
from schedulers import vllm_config
from test_start import PLAIN
from test_tier import _config_of
from torch import nn
from torture_rounds import BLOCK_TOKENS, random_prompt
from vllm import envs
from vllm.model_executor import model_loader
from vllm.model_executor.layers import quantization
from vllm.model_executor.models.registry import ModelRegistry, _LazyRegisteredModel
from vllm.v1.attention.backends import registry as attention

from kvdisk.connector import model_code, model_settings
from kvdisk.connector.identity import fingerprint_of, fingerprint_of_rows, refuse_nameless, refuse_nameless_rows
from kvdisk.connector.model_code import foreign_code
from kvdisk.connector.plugin import register
from kvdisk.errors import ConfigError

PLUGIN = {
    "own_plugin/__init__.py": "",
    "own_plugin/entry.py": """
def register():
    from vllm import ModelRegistry
    from own_plugin.modeling import Own
    ModelRegistry.register_model("LlamaForCausalLM", Own)
""",
    "own_plugin/modeling.py": """
from vllm.model_executor.models.llama import LlamaForCausalLM
from .shift import SHIFT

class Own(LlamaForCausalLM):
    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None, **more):
        embeds = self.model.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds=embeds.roll(SHIFT, -1), **more)
""",
    "own_plugin/shift.py": "SHIFT = 0\n",
    "own_plugin-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: own-plugin\nVersion: 1.0\n",
    "own_plugin-1.0.dist-info/entry_points.txt": "[vllm.general_plugins]\nown = own_plugin.entry:register\n",
}


def _lay(place: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    return place


@pytest.mark.torture
def test_another_text_of_a_plugins_model_is_another_model(tiny_llama, tmp_path):
    """The configuration, the weights and the class's name are the same."""
    place, prompt = _lay(tmp_path / "python", PLUGIN), random_prompt(1, 500)
    whole = (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    env = {"PYTHONPATH": str(place)}
    extra = {"cpu_bytes": 0, "store_dirs": str(tmp_path / "kv"), "nvme_bytes": "64MiB", "device": "posix"}
    found = []
    for shift in (0, 1, 0):
        (place / "own_plugin" / "shift.py").write_text(f"SHIFT = {shift}\n")
        with EngineChild(tiny_llama, tmp_path / "log", extra_config=extra, env=env, max_model_len=2048) as engine:
            answer, salted = engine.generate([prompt]) + engine.generate([prompt], salt=str(len(found)))
            engine.drain()
        found.append((answer.cached, answer.tokens == salted.tokens))
    assert found == [(0, True), (0, True), (whole, True)]


# -- code ------------------------------------------------------------------------------------------

PACKAGES = {
    "own/__init__.py": "",
    "own/modeling.py": "import own.plain\nfrom .near import Near\nfrom . import part\n"
    "import beside, other_package.sub, utils.near\ndef late():\n    from own.lazy import Lazy\n"
    "    return 'own.named:Class', 'no.such.name'",
    "own/plain.py": "",
    "own/near.py": "import torch, json, vllm.envs",
    "own/part.abi3.so": "bytes",
    "own/lazy.py": "x = 'own.twice.named.Class'",
    "own/named.py": "",
    "own/twice/__init__.py": "",
    "own/twice/named.py": "from .. import broken",
    "own/broken.py": "def",
    "own/unused.py": "",
    "beside.py": "from own import part",
    "unused.py": "",
    "site-packages/other_package/sub.py": "",
    "utils/near.py": "",
    "site-packages/other-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: other\nVersion: 1.0\n",
    "site-packages/other-1.0.dist-info/top_level.txt": "other_package\nutils\n",
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that Python imports from."""
    register()
    monkeypatch.syspath_prepend(tmp_path / "python" / "site-packages")
    monkeypatch.syspath_prepend(tmp_path / "python")
    model_code._distributions.cache_clear()
    return tmp_path / "python"


def _register(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setitem(ModelRegistry.models, "SomebodysForCausalLM", _LazyRegisteredModel(module, "Own"))


def test_the_code_of_a_class_is_its_module_and_what_that_imports(tiny_llama, place, monkeypatch):
    _lay(place, PACKAGES)
    _register(monkeypatch, "own.modeling")
    config = vllm_config(tiny_llama)
    facts = foreign_code(config)
    assert facts.keys() >= {"code of own", "code of beside", "version of other", "version of torch"}
    assert facts["version of other"] == "1.0" and "version of vllm" not in facts
    assert "own.plain" not in importlib.sys.modules, "nothing is imported: that might touch a GPU"
    for name, text in PACKAGES.items():
        (place / name).write_text(f"{text}\n# changed")
        found = foreign_code(config)
        counts = name.startswith(("own/", "beside", "utils")) and "unused" not in name
        assert (found != facts) == counts, name
        facts = found
    (place / "site-packages" / "other-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: other\nVersion: 2.0\n"
    )
    assert foreign_code(config) == facts | {"version of other": "2.0"}


def test_whatever_is_registered_counts(tiny_llama, place, monkeypatch):
    """Each has a module of its own, all with the same text."""
    config = vllm_config(tiny_llama)
    assert foreign_code(config) == {}, "vLLM's own code, and ours"

    def module(name: str) -> type:
        _lay(place, {f"{name}.py": "class Own: pass"})
        importlib.invalidate_caches()
        return importlib.import_module(name).Own

    _register(monkeypatch, module("for_models").__module__)
    registered = SimpleNamespace(model_cls=module("for_loaded_models"))
    monkeypatch.setitem(ModelRegistry.models, "LlamaForCausalLM", registered)
    monkeypatch.setitem(quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG, "own", module("for_quantization"))
    monkeypatch.setitem(model_loader._LOAD_FORMAT_TO_MODEL_LOADER, "own", module("for_loading"))
    module("for_attention")
    backend = attention.AttentionBackendEnum.CUSTOM
    monkeypatch.setitem(attention._ATTN_OVERRIDES, backend, "for_attention.Own")
    module("for_states")
    monkeypatch.setitem(attention._MAMBA_ATTN_OVERRIDES, attention.MambaAttentionBackendEnum.LINEAR, "for_states.Own")
    monkeypatch.setattr(model_code, "current_platform", module("for_a_platform")())
    config.parallel_config.worker_cls = f"{module('for_workers').__module__}.Own"
    config.parallel_config.worker_extension_cls = f"{module('for_more_workers').__module__}.Own"
    config.model_config.model_class_overrides = {"LlamaForCausalLM": f"{module('for_overrides').__module__}:Own"}
    drafter = SimpleNamespace(model_class_overrides={"Draft": f"{module('for_drafters').__module__}:Own"})
    config.speculative_config = SimpleNamespace(draft_model_config=drafter)
    _lay(
        place, {f"for_plugins-1.dist-info/{name}": PLUGIN[f"own_plugin-1.0.dist-info/{name}"] for name in ["METADATA"]}
    )
    entry = "[vllm.general_plugins]\nown = for_plugins:register\nabsent = no_such_module:register\n"
    _lay(place, {"for_plugins-1.dist-info/entry_points.txt": entry, "for_plugins.py": ""})
    files = {path.stem for path in place.glob("*.py")}
    assert foreign_code(config).keys() == {f"code of {name}" for name in files} and len(files) == 12
    monkeypatch.setenv("VLLM_PLUGINS", "kvdisk")
    assert foreign_code(config).keys() == {f"code of {name}" for name in files - {"for_plugins"}}


def test_code_without_a_file_is_refused_unless_somebody_vouches_for_it(tiny_llama, place, monkeypatch):
    config = vllm_config(tiny_llama)
    own = type("Own", (nn.Module,), {"__module__": "typed_into_a_shell"})
    monkeypatch.setitem(ModelRegistry.models, "LlamaForCausalLM", SimpleNamespace(model_cls=own))
    with pytest.raises(ConfigError, match=r"'typed_into_a_shell' is in no file: put it into one, or leave out store"):
        refuse_nameless(config)
    with pytest.raises(ConfigError, match=r"'typed_into_a_shell' .* or set the tier's namespace to a text"):
        refuse_nameless_rows(config)
    assert fingerprint_of_rows(_config_of(1), 4096, (config, PLAIN), "mine")


def test_code_that_a_model_brings_along_is_what_lies_beside_it(tiny_llama, tmp_path, place, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def snapshot(name: str, commit: str, text: str) -> None:
        repository = f"hub/models--{name.replace('/', '--')}"
        _lay(tmp_path, {f"{repository}/snapshots/{commit}/modeling.py": text, f"{repository}/refs/main": commit})

    config, commits = vllm_config(tiny_llama), [str(number) * 40 for number in range(4)]
    assert foreign_code(config) == {}
    model = config.model_config
    model.trust_remote_code = True
    model.model, model.revision = str(_lay(tmp_path / "model", {"config.json": "{}"})), None
    found = [foreign_code(config)]
    for name in ("modeling.py", "deeper/modeling.py"):
        _lay(tmp_path / "model", {name: "x = 1"})
        found.append(foreign_code(config))
    model.hf_config.auto_map = {"AutoModel": "modeling.Own", "AutoTokenizer": ["some/where--modeling.Own", None]}
    with pytest.raises(ConfigError, match="that of some/where is not found on this machine: leave out"):
        foreign_code(config)
    assert foreign_code(config, is_vouched=True) == found[-1]
    snapshot("some/where", commits[0], "x = 1")
    found.append(foreign_code(config))
    snapshot("some/where", commits[1], "x = 2")
    found.append(foreign_code(config))
    model.code_revision = commits[0]
    assert foreign_code(config) != found[-1]
    model.model, model.revision, model.code_revision = "some/model", commits[2], None
    snapshot("some/model", commits[2], "x = 3")
    found.append(foreign_code(config))
    snapshot("some/model", commits[3], "x = 4")
    model.code_revision = commits[3]
    with pytest.raises(ConfigError, match="that of some/where"):
        foreign_code(config)
    snapshot("some/where", commits[3], "x = 2")
    found.append(foreign_code(config))
    assert len({each["code beside the model"] for each in found}) == len(found)
    config.speculative_config = SimpleNamespace(draft_model_config=model)
    assert foreign_code(config)["code beside the drafter"] == found[-1]["code beside the model"]


# -- settings --------------------------------------------------------------------------------------


def _fingerprint(config: Any) -> bytes:
    return fingerprint_of(config, PLAIN)[0]


@pytest.mark.parametrize(
    ("variable", "value", "counts"),
    [
        ("VLLM_BATCH_INVARIANT", "1", True),
        ("VLLM_FLOAT32_MATMUL_PRECISION", "medium", True),
        ("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random", True),
        ("VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE", "64", True),
        ("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "1", True),
        ("VLLM_CPU_INT4_W4A8", "1", True),
        ("VLLM_PORT", "4321", False),
        ("VLLM_DP_RANK", "1", False),
        ("VLLM_LOGGING_LEVEL", "DEBUG", False),
        ("VLLM_CONFIGURE_LOGGING", "1", False),
        ("VLLM_CACHE_ROOT", "/elsewhere", False),
        ("VLLM_IMAGE_TAG", "v1", False),
        ("VLLM_PLUGINS", "kvdisk", False),
        ("VLLM_ENGINE_READY_TIMEOUT_S", "60", False),
        ("VLLM_RPC_TIMEOUT", "60", False),
        ("VLLM_CPU_OMP_THREADS_BIND", "0", False),
        ("VLLM_OF_A_PLUGIN", "1", False),
        ("PYTHONPATH", "/elsewhere", False),
    ],
)
def test_variables_that_change_what_is_computed_count(tiny_llama, monkeypatch, variable, value, counts):
    register()
    for name in filter(model_settings._computes, envs.environment_variables):
        monkeypatch.delenv(name, raising=False)
    config = vllm_config(tiny_llama)
    first, facts = fingerprint_of(config, PLAIN)
    monkeypatch.setenv(variable, value)
    second, others = fingerprint_of(config, PLAIN)
    assert (first != second) == counts
    assert set(others["facts"]) - set(facts["facts"]) == ({variable} if counts else set())


def test_variables_that_compute_nothing_are_vllms():
    assert envs.environment_variables.keys() >= model_settings._OTHERS


def test_settings_that_change_what_is_computed_count(tiny_llama, place):
    config = vllm_config(tiny_llama)
    found = {_fingerprint(config)}
    config.kernel_config.enable_jit_warmup = not config.kernel_config.enable_jit_warmup
    assert {_fingerprint(config)} == found
    config.attention_config.use_prefill_query_quantization = True
    found.add(_fingerprint(config))
    config.kernel_config.moe_backend = "marlin"
    found.add(_fingerprint(config))
    config.additional_config = {"of a platform": 1}
    found.add(_fingerprint(config))
    config.model_config._architecture = "TransformersForCausalLM"  # --model-impl transformers
    found.add(_fingerprint(config))
    assert len(found) == 5


def test_what_a_configuration_says_stands_beside_a_name(tiny_llama, place, monkeypatch):
    """A user who names weights does not name what he says of them."""
    config = vllm_config(tiny_llama)

    def fingerprint(name: str | None = "mine") -> bytes:
        return fingerprint_of_rows(_config_of(1), 4096, (config, PLAIN), name)[0]

    found = [fingerprint(None), fingerprint(), fingerprint("another")]
    assert fingerprint() == found[1]
    config.load_config.load_format = "dummy"
    assert fingerprint() == found[1], "how weights are loaded is what the name is for"
    overrides: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 1234.5}}
    config.model_config.hf_config.update(overrides)  # --hf-overrides
    found.append(fingerprint())
    config.cache_config.cache_dtype = "fp8"
    found.append(fingerprint())
    config.model_config.quantization = "awq"
    found.append(fingerprint())
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    found.append(fingerprint())
    _lay(place, PACKAGES)
    _register(monkeypatch, "own.modeling")
    found.append(fingerprint())
    assert len(set(found)) == len(found)
