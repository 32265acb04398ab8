# SPDX-License-Identifier: Apache-2.0
"""Engines that are compared: one model, with whatever keeps its KV; other weights under its path;
nothing in the kernel's page cache."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from connectors import python_path
from demo import WARM_UP, WORK
from engine_child import CPU, EngineChild, EngineError, vllm_device
from machine import Machine

from kvdisk.cli.model_kv import read_model


class ComparedEngines:
    """Starts engines of one model, one at a time. ``place``: a directory on the drive; what is made
    there is the caller's. ``gpu_bytes``, ``most_tokens``: vLLM's own cache, and the longest prompt
    with its answer; a subclass sets them."""

    gpu_bytes: int
    most_tokens: int

    def __init__(self, model: Path, place: Path, *, eager: bool) -> None:
        self.place, self._eager = place, eager
        self.model = place / "model"  # a copy: a trial changes its weights
        shutil.copytree(model, self.model)
        config = json.loads((self.model / "config.json").read_text())
        self.vocabulary = int(config.get("vocab_size") or config["text_config"]["vocab_size"])
        kv = read_model(self.model, dtype="float32" if vllm_device() == CPU else "bfloat16")
        self.token_bytes = sum(kv.kv_heads * kv.head_elements * kv.element_bytes for _ in kv.windows)

    @contextmanager
    def engine(self, name: str, transfer: dict[str, Any] | None = None) -> Iterator[EngineChild]:
        """Start an engine that has answered a first request. Raises EngineError."""
        how: dict[str, Any] = {} if transfer is None else {"kv_transfer_config": transfer}
        if vllm_device() != CPU:
            how["enforce_eager"] = self._eager
        with EngineChild(
            self.model,
            WORK / f"compared-{name.replace(' ', '-').replace(',', '')}.log",
            env=python_path(),
            kv_gib=-(-self.gpu_bytes // (1 << 30)),
            max_model_len=self.most_tokens,
            **how,
        ) as engine:
            engine.generate([WARM_UP], 2)
            yield engine

    @contextmanager
    def other_weights(self) -> Iterator[None]:
        """Have other weights under the model's path: a layer's keys in another order."""
        from safetensors import safe_open
        from safetensors.torch import save_file

        for path in sorted(self.model.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                names, metadata = sorted(file.keys()), file.metadata()
                name = next((name for name in names if "k_proj.weight" in name or "qkv_proj.weight" in name), None)
                if name is not None:
                    tensors = {each: file.get_tensor(each) for each in names}
                    break
        else:
            raise EngineError(f"{self.model} has no weights whose keys could be changed.")
        kept = path.with_suffix(".kept")
        tensors[name] = tensors[name].flip(0).contiguous()
        path.rename(kept)
        try:
            save_file(tensors, path, metadata=metadata)
            yield
        finally:
            kept.replace(path)


def drop_pages() -> None:
    """Let nothing come from the kernel's page cache, where that may be said."""
    os.sync()
    with suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("3\n")


def hardware(place: Path) -> str:
    """Return what the figures were measured on, in a sentence."""
    sentence = Machine.here(place).sentence
    if vllm_device() == CPU:
        return f"vLLM's CPU build; {sentence}"
    asked = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    return f"{subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()}; {sentence}"
