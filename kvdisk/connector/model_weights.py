# SPDX-License-Identifier: Apache-2.0
"""A model's weights, as a part of an engine's identity: which files they are, and when they are
read."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm import envs

from kvdisk.connector.model_files import WITHOUT, drafter_load, model_folder
from kvdisk.connector.weights import Facts, WeightsChanged, facts, known_digest, read_early, sample_digest
from kvdisk.errors import ConfigError, KvdiskError
from kvdisk.identity import Identity, Named

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig

WeightsDigest = Callable[["ModelConfig", "LoadConfig"], str]
"""Returns a digest of a model's weights, which are loaded like that."""

_SAFETENSORS_FIRST = frozenset({"auto", "fastsafetensors", "hf", "instanttensor", "mistral", "safetensors"})
"""The formats of loading with which vLLM reads no other files where there are safetensors."""
_OTHER_REPOSITORIES = ("audio_model_id", "text_model_id")
"""Of a model's configuration. vLLM: Ultravox has its language model's weights from another
repository."""
_FILES_CLOCK = 5
"""CLOCK_REALTIME_COARSE, by which Linux sets the times of files: some ms behind the real time."""


def weight_files(model: ModelConfig, load: LoadConfig) -> list[Path]:
    """Return the files that a model's weights may be loaded from, and those that say which of them
    are, and how. Raises ConfigError where there are none."""
    others = [getattr(model.hf_config, name, None) for name in _OTHER_REPOSITORIES]
    files = list[Path]()
    for source in (model, *(_Source(name) for name in others if name)):
        folder = model_folder(source, load)
        # vLLM: models of several media have parts of them in directories of their own.
        look = folder.rglob if model.multimodal_config is not None else folder.glob
        found = sorted(look("*.safetensors"))
        if not found or str(load.load_format) not in _SAFETENSORS_FIRST:
            found += sorted(file for kind in ("*.bin", "*.pt", "*.gguf") for file in look(kind))
        if not found:
            raise ConfigError(
                f"The NVMe tier needs the model's weight files, and there are none in {folder}: {WITHOUT}."
            )
        files += found + sorted(file for kind in ("*.index.json", "*quant*.json") for file in folder.glob(kind))
    return files


class _Source(NamedTuple):
    """Another repository that weights of a model come from: vLLM loads its main branch."""

    model: str
    model_weights: str = ""
    revision: str | None = None


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

    A sample of them is read here, and all of them on a thread. Raises ConfigError.
    """
    seen: dict[tuple[Path, ...], list[Facts]] = {}
    began_ns = _began_ns()

    def sample(model: ModelConfig, load: LoadConfig) -> str:
        files = weight_files(model, load)
        seen[tuple(files)] = facts(files)
        return sample_digest(files)

    def exact(model: ModelConfig, load: LoadConfig) -> str:
        files = weight_files(model, load)
        before = seen.get(tuple(files), [])
        if Path(model.model_weights or model.model).exists():  # or vLLM has downloaded them just now
            for each in before:
                if began_ns is not None and each.inode_changed_ns > began_ns:
                    raise WeightsChanged(f"{each.path} changed while the engine was starting")
        return known_digest(files, _memory(), seen=before)

    return Identity.found_by(Named(*name(sample)), lambda: Named(*name(exact)))


_built_ns: int | None = None
"""When the last configuration of an engine was built in this process."""


def read_weights_early(vllm_config: VllmConfig) -> None:
    """An engine's configuration is being built: begin to read what weights are here by now."""
    global _built_ns  # noqa: PLW0603 - of the process, as configurations are
    _built_ns = time.clock_gettime_ns(_FILES_CLOCK)
    drafter = getattr(vllm_config.speculative_config, "draft_model_config", None)
    for model, load in ((vllm_config.model_config, vllm_config.load_config), (drafter, None)):
        if model is not None:
            with suppress(KvdiskError, OSError):  # they are downloaded later, say
                read_early(weight_files(model, load or drafter_load(vllm_config)), _memory())


def _began_ns() -> int | None:
    """Return when this engine began, before its weights were loaded; None: nobody knows."""
    if _built_ns is not None or multiprocessing.parent_process() is None:
        return _built_ns
    # An engine's own process, which its server started with the configuration.
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * 10**9 // os.sysconf("SC_CLK_TCK")
    return time.time_ns() - age_ns
