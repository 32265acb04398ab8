# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of random numbers for the tiny Llama, as PEFT writes them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

_CONFIG = {"peft_type": "LORA", "r": 8, "lora_alpha": 64, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
_HIDDEN = 128
_OUTPUTS = {"q_proj": 128, "v_proj": 64}


def write_adapter(folder: Path, seed: int, **more: object) -> Path:
    """Write an adapter, and return its folder. Another seed is another training, of files of the
    same size. ``more``: for its configuration."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(_CONFIG | more))
    numbers = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(2):
        for name, outputs in _OUTPUTS.items():
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{module}.lora_A.weight"] = 0.3 * torch.randn(8, _HIDDEN, generator=numbers)
            tensors[f"{module}.lora_B.weight"] = 0.3 * torch.randn(outputs, 8, generator=numbers)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
