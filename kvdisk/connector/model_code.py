# SPDX-License-Identifier: Apache-2.0
"""The code that computes a model's KV, as far as no version of vLLM says what it is.

A fingerprint has the text of it: who changes a plugin's model, and nothing else, has another model.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from importlib.machinery import all_suffixes
from importlib.metadata import entry_points, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from vllm import envs
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import current_platform
from vllm.plugins import DEFAULT_PLUGINS_GROUP

from kvdisk.connector.model_files import WITHOUT, text_folder
from kvdisk.device.paths import files_below
from kvdisk.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

_MODELS, _ROTARY = "vllm.model_executor.models", "vllm.model_executor.layers.rotary_embedding"
_NO_MATHEMATICS = frozenset({"adapters", "config", "interfaces", "interfaces_base", "registry", "utils"})
"""Modules of models that say how weights are loaded, and what a model supports."""
_KNOWN = frozenset({"vllm", "kvdisk"}) | sys.stdlib_module_names
"""Packages that are known otherwise, or compute nothing."""
_INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Directories of distributions. Some claim names that a package of the user's has, too, as
"utils"."""
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.\w+)+(:\w+)?")
"""How vLLM's registries name a class: "module.Class", "module:Class"."""


def code_digest(root: Path, module: str) -> str | None:
    """Return a digest of a model's code: its module of vLLM's models, those that it imports, and
    the rotary embeddings, with their imports. None where it is elsewhere.

    A version that computes K and V of this model in another way has other text there. ``root``: the
    directory that ``vllm`` lies in.
    """
    waiting, found = [module, _ROTARY], dict[str, str]()
    while waiting:
        name = waiting.pop()
        path = root.joinpath(*name.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if name in found or not name.startswith((f"{_MODELS}.", _ROTARY)) or not file.is_file():
            continue
        if name.rpartition(".")[2] in _NO_MATHEMATICS:
            continue
        text = file.read_bytes()
        found[name] = hashlib.sha256(text).hexdigest()
        waiting += _imported(name, file, ast.parse(text))
    return _digest_of(found) if module in found else None


def refuse_code_without_file(vllm_config: VllmConfig) -> None:
    """Raise ConfigError where code that is not vLLM's has no text to be known by."""
    if fileless := sorted(name for name in _foreign_roots(vllm_config) if _file_of(name) is None):
        raise ConfigError(
            "The NVMe tier knows the code of models and plugins again by its text, and that of the module "
            f"{fileless[0]!r} is in no file: put it into one, or {WITHOUT}."
        )


def foreign_code(vllm_config: VllmConfig, *, is_vouched: bool = False) -> dict[str, str]:
    """Return what the code that is not vLLM's is known by, for the fingerprint; empty where there
    is none.

    That is a digest by package of the text of plugins, of registered classes, and of all that they
    import which belongs to no installed distribution; the versions of distributions that they
    import; and of models that bring code along (``--trust-remote-code``) the text beside them.
    ``is_vouched``: that need not be found. Raises ConfigError where it is not, otherwise.
    """
    roots = _foreign_roots(vllm_config)
    facts = _facts_of(roots) if roots else {}
    for whose, model in _models_of(vllm_config).items():
        if getattr(model, "trust_remote_code", False):
            facts[f"code beside the {whose}"] = _remote_digest(model, is_vouched=is_vouched)
    return facts


def _models_of(vllm_config: VllmConfig) -> dict[str, ModelConfig]:
    drafter = getattr(vllm_config.speculative_config, "draft_model_config", None)
    return {"model": vllm_config.model_config} | ({} if drafter is None else {"drafter": drafter})


def _foreign_roots(vllm_config: VllmConfig) -> set[str]:
    """Return the modules that plugins and registered classes are in, but for vLLM's and ours."""
    return {name for name in _roots(vllm_config) if name.split(".")[0] not in _KNOWN}


def _roots(vllm_config: VllmConfig) -> Iterator[str]:
    """Yield the modules of all that may take part in what is computed, vLLM's among them. A model
    may be made of several that are registered, so all of them are."""
    allowed = envs.VLLM_PLUGINS
    for plugin in entry_points(group=DEFAULT_PLUGINS_GROUP):
        # One that cannot be found was not loaded: vLLM says so, and goes on.
        if (allowed is None or plugin.name in allowed) and (plugin.module in sys.modules or _file_of(plugin.module)):
            yield plugin.module
    yield type(current_platform).__module__
    for registered in ModelRegistry.models.values():
        yield getattr(registered, "module_name", None) or registered.model_cls.__module__
    for model in _models_of(vllm_config).values():
        for target in (getattr(model, "model_class_overrides", None) or {}).values():
            yield target.partition(":")[0]
    yield from (each.__module__ for each in _registry("layers.quantization", "_CUSTOMIZED_METHOD_TO_QUANT_CONFIG"))
    yield from (each.__module__ for each in _registry("model_loader", "_LOAD_FORMAT_TO_MODEL_LOADER"))
    yield from filter(None, map(_module_of, _attention_classes()))
    parallel = vllm_config.parallel_config
    yield from filter(None, map(_module_of, (parallel.worker_cls, parallel.worker_extension_cls)))


def _registry(module: str, name: str) -> Iterable[type]:
    """Return the classes of one of vLLM's registries. Nobody has registered anything in a module
    that was not imported; some of them must not be imported early."""
    loaded = sys.modules.get(f"vllm.model_executor.{module}")
    return () if loaded is None else vars(loaded)[name].values()


def _attention_classes() -> Iterator[str]:
    """Yield the names of the classes of attention that are registered."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, MambaAttentionBackendEnum

    for enum in (AttentionBackendEnum, MambaAttentionBackendEnum):
        for member in enum.__members__.values():
            with suppress(ValueError):  # a place for somebody's own, and nobody has taken it
                yield member.get_path()


def _module_of(qualified_name: str) -> str:
    return qualified_name.rpartition(".")[0]


def _facts_of(roots: Iterable[str]) -> dict[str, str]:
    """Return a digest by package of modules and of what they import, and the versions of the
    distributions that these have it from."""
    waiting, seen, texts, versions = sorted(roots), set[str](), dict[str, dict[str, str]](), dict[str, str]()
    ours = {name.split(".")[0] for name in waiting}
    while waiting:
        name = waiting.pop()
        package = name.split(".")[0]
        if name in seen or package in _KNOWN:
            continue
        seen.add(name)
        waiting += [name.rpartition(".")[0]] * ("." in name)
        file = _file_of(name)
        for distribution in filter(None, _distributions().get(package, ())):
            versions[f"version of {distribution}"] = version(distribution)
        if file is None or (package not in ours and package in _distributions() and _is_installed(file)):
            continue
        text = file.read_bytes()
        texts.setdefault(package, {})[name] = hashlib.sha256(text).hexdigest()
        with suppress(SyntaxError, ValueError):  # compiled, or of another Python
            waiting += _named_in(name, file, ast.parse(text), package)
    return versions | {f"code of {package}": _digest_of(found) for package, found in texts.items()}


def _is_installed(file: Path) -> bool:
    return not _INSTALLED.isdisjoint(file.parts)


@lru_cache(maxsize=1)
def _distributions() -> Mapping[str, list[str]]:
    return packages_distributions()


def _file_of(module: str) -> Path | None:
    """Return the file that a module is imported from, without importing it; None where there is
    none."""
    package, *rest = module.split(".")
    place = getattr(sys.modules.get(module), "__file__", None)
    places = [] if place is None else [Path(place)]
    with suppress(ImportError, ValueError):  # ValueError: it is loaded, and has no specification
        spec = None if places else find_spec(package)
        if spec is not None and not rest and spec.origin is not None:
            places.append(Path(spec.origin))
        for folder in (spec.submodule_search_locations or ()) if spec is not None and rest else ():
            path = Path(folder).joinpath(*rest)
            places += [path / "__init__.py", *(Path(f"{path}{suffix}") for suffix in all_suffixes())]
    return next((place for place in places if place.is_file()), None)


def _named_in(name: str, file: Path, tree: ast.AST, package: str) -> Iterator[str]:
    """Yield what a module imports, or may: also what a text names, as vLLM's registries do."""
    yield from _imported(name, file, tree)
    for node in ast.walk(tree):
        text = getattr(node, "value", None) if isinstance(node, ast.Constant) else None
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(text, str) and text.startswith(f"{package}.") and _DOTTED.fullmatch(text):
            yield text.replace(":", ".")


def _imported(name: str, file: Path, tree: ast.AST) -> Iterator[str]:
    """Yield what a module of this name imports parts of, and the parts, which may be modules."""
    is_package = file.name == "__init__.py"
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            above = name.split(".")[: len(name.split(".")) - node.level + is_package] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


def _remote_digest(model: ModelConfig, *, is_vouched: bool) -> str:
    """Return a digest of the code that a model brings along, in its own repository or in those that
    its configuration names."""
    name, auto_map = str(model.model), getattr(model.hf_config, "auto_map", None) or {}
    places = {"": (name, model.revision), "code_revision": (name, model.code_revision or model.revision)}
    for reference in auto_map.values():
        for text in reference if isinstance(reference, list | tuple) else [reference]:
            repository, found, _ = str(text).rpartition("--")
            if found and repository != name:
                places[repository] = (repository, model.code_revision)
    texts: dict[str, str] = {}
    for label, place in places.items():
        folder = text_folder(*place)
        if folder is None and auto_map and not is_vouched:
            raise ConfigError(
                f"The NVMe tier knows the code of models again by its text, and that of {place[0]} is not found on "
                f"this machine: {WITHOUT}."
            )
        if folder is not None:
            texts |= {
                f"{label}/{file.relative_to(folder)}": hashlib.sha256(file.read_bytes()).hexdigest()
                for file in files_below(folder)
                if file.suffix == ".py"
            }
    return _digest_of(texts)


def _digest_of(found: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
