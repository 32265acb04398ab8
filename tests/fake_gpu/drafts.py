# SPDX-License-Identifier: Apache-2.0
"""Drafters for the tiny models, which vLLM's speculation by EAGLE and by MTP runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

EMBEDDING_GAIN = 10.0
"""A drafter of EAGLE does not normalise what its first layer attends to; the tiny models'
embeddings are a tenth of that."""


def write_eagle(llama: Path, folder: Path) -> Path:
    """Write a drafter that is the tiny Llama itself, and so is mostly right; return its folder."""
    shutil.copytree(llama, folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["EagleLlamaForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name.removeprefix("model."): one for name, one in load_file(llama / "model.safetensors").items()}
    for name in ("q_proj", "k_proj", "v_proj"):
        tensors[f"layers.0.self_attn.{name}.weight"] *= EMBEDDING_GAIN
    del tensors["norm.weight"], tensors["layers.0.input_layernorm.weight"], tensors["lm_head.weight"]
    size = config["hidden_size"]
    tensors["fc.weight"] = torch.cat([torch.eye(size), torch.zeros(size, size)], 1)
    save_file({name: one.contiguous() for name, one in tensors.items()}, folder / "model.safetensors")
    return folder


def write_mtp(nemotron: Path, folder: Path) -> Path:
    """Write the tiny Nemotron-H with a layer of attention that predicts one token more; return its
    folder."""
    shutil.copytree(nemotron, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*"}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(nemotron / "model.safetensors")
    (attention,) = {name.rpartition(".mixer.q_proj")[0] for name in tensors if name.endswith("mixer.q_proj.weight")}
    layer = {name.removeprefix(attention): one for name, one in tensors.items() if name.startswith(f"{attention}.")}
    size, ones = config["hidden_size"], torch.ones(config["hidden_size"])
    layer |= {f".{name}.weight": ones.clone() for name in ("enorm", "hnorm", "final_layernorm")}
    layer[".eh_proj.weight"] = torch.cat([torch.eye(size), torch.eye(size)], 1)
    tensors |= {f"mtp.layers.0{name}": one.clone() for name, one in layer.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder
