# SPDX-License-Identifier: Apache-2.0
"""``kvdisk size``: what is refused, and that it counts as an engine does. That it reads a
configuration as vLLM does: ``tests/connector/test_size.py``."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from cli_stores import json_of, refused, run_here, run_json
from rebuild_stores import NoPool, make_store, stamp

from kvdisk.assembly import assemble_scheduler
from kvdisk.cli.model_kv import group_layers, model_of
from kvdisk.cli.size import fit_cpu, fit_nvme, token_bytes
from kvdisk.config import Config
from kvdisk.device import store as stores
from kvdisk.identity import Identity

GIB = 1 << 30

LLAMA = {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}
LLAMA |= {"num_key_value_heads": 8, "torch_dtype": "bfloat16", "max_position_embeddings": 131072}
DEEPSEEK = LLAMA | {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128}
GEMMA = LLAMA | {"model_type": "gemma3_text", "head_dim": 128, "sliding_window": 1024, "sliding_window_pattern": 6}
GEMMA = {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": GEMMA}


def written(path: Path, config: object) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("changes", "options", "element_bytes", "groups", "assumed"),
    [
        ({}, {"kv_dtype": "fp8"}, 1, [(32, None)], ""),
        ({}, {"dtype": "float32"}, 4, [(32, None)], ""),
        ({}, {"dtype": "float32", "kv_dtype": "float16"}, 2, [(32, None)], ""),
        ({"torch_dtype": "float32"}, {}, 2, [(32, None)], "16 bit"),
        ({"torch_dtype": None}, {}, 2, [(32, None)], "16 bit"),
        ({"model_type": "gemma2", "sliding_window": 4096}, {}, 2, [(16, 4096), (16, None)], ""),
        ({"model_type": "qwen2", "max_window_layers": 16, "sliding_window": 512}, {}, 2, [(16, None), (16, 512)], ""),
        ({"model_type": "mistral", "sliding_window": 2**31 - 1}, {}, 2, [(32, 2**31 - 1)], ""),
        ({"model_type": "newest", "sliding_window": 4096}, {}, 2, [(32, None)], "all are taken for full attention"),
    ],
)
def test_what_a_configuration_says(changes, options, element_bytes, groups, assumed):
    known = model_of(LLAMA | changes, **options)
    assert (known.element_bytes, group_layers(known.windows)) == (element_bytes, groups)
    assert assumed in " ".join(known.notes) and bool(known.notes) == bool(assumed)


@pytest.mark.parametrize(
    ("config", "arguments", "words"),
    [
        ({"layer_types": ["linear_attention", "full_attention"] * 16}, [], "layers of the kind linear_attention"),
        ({"mamba_d_state": 16}, [], "mamba_d_state"),
        ({"is_encoder_decoder": True}, [], "an encoder"),
        ({"kv_lora_rank": 256, "qk_rope_head_dim": 32}, [], "latent attention"),
        ({"v_head_dim": 64, "head_dim": 128}, [], "values and keys of different sizes"),
        ({"model_type": "qwen3", "num_key_value_heads": None}, [], "does not say num_key_value_heads"),
        ({"num_hidden_layers": 0}, [], "num_hidden_layers in this model's configuration (llama) cannot be 0"),
        ({"hidden_size": 4097}, [], "does not say head_dim"),
        ({"sliding_window": -1}, [], "sliding_window in this model's configuration (llama) cannot be -1"),
        ({"quantization_config": {"kv_cache_scheme": {"type": "float"}}}, [], "say which with --kv-dtype"),
        ({}, ["--tp", "3"], "--tp 3 does not divide the model's 32 attention heads."),
        ({}, ["--pp", "33"], "--pp 33 leaves stages without layers: the model has 32."),
        ({}, ["--pp", "0"], "--pp 0 leaves stages without layers"),
        ({}, ["--pp", "two"], "--pp is a number of stages, or the layers of each, and not two."),
        ({}, ["--pp", "17,16"], "--pp 17,16 must list every layer once: the model has 32."),
        ({}, ["--pp", "33,-1"], "--pp 33,-1 must list"),
        ({}, ["--nvme", "1MiB"], "--nvme leaves "),
        ({}, ["--cpu", "1MiB"], "--cpu 1048576 is too small for a block of each size"),
        ({}, ["--kv-dtype", "int3"], "--kv-dtype is one of"),
        ({}, ["--write-rate", "/nowhere"], "/nowhere does not exist."),
        (None, [], "cannot be read: No such file or directory"),
        ([], [], "holds no object"),
    ],
)
def test_what_is_refused_in_one_sentence(tmp_path, config, arguments, words):
    if config is not None:
        written(tmp_path, LLAMA | config if isinstance(config, dict) else config)
    assert words in refused("size", "--model", tmp_path, *arguments)


@pytest.mark.parametrize(("config", "ranks"), [(LLAMA, 1), (GEMMA, 2), (DEEPSEEK, 4)])
def test_what_fits_is_what_an_engine_has_room_for(tmp_path, config, ranks, monkeypatch):
    monkeypatch.setattr(stores, "_free_bytes", lambda path: 1 << 50)  # the test's own drive may have less
    geometry = model_of(config).geometry(ranks, 64)
    fit, cpu = fit_nvme(geometry, 40 * GIB, 1), fit_cpu(geometry, 8 * GIB)
    given: dict[str, Any] = {"store_dirs": str(tmp_path / "store"), "nvme_bytes": 40 * GIB, "cpu_bytes": 8 * GIB}
    parts = assemble_scheduler(
        Config.from_mapping(given), geometry, NoPool(), Identity.certain(b"\x01" * 32, {"model": "m"})
    )
    slots = sum(parts.nvme.capacity)
    parts.close()
    assert 0 <= slots - fit.blocks <= slots * 0.05
    assert fit.used_bytes == round(fit.tokens * token_bytes(geometry, geometry.shard_count)) <= 40 * GIB
    assert 0.9 < fit.used_bytes / (40 * GIB) < 1
    assert cpu.blocks <= sum(geometry.memory_slots(8 * GIB)) and 0.9 < cpu.used_bytes / (8 * GIB) < 1
    for one in (fit, cpu):
        assert one.tokens % 64 == 0 and one.blocks == one.tokens // 64 * len(geometry.groups)


def test_units_leave_less_to_headers_and_the_index(tmp_path):
    """By default there are units where the longest prompt has many blocks, and the tiers room."""
    arguments = ["--model", written(tmp_path / "model", LLAMA), "--tp", "8", "--nvme", "1TiB"]
    plain, units = json_of("size", *arguments), json_of("size", *arguments, "--max-model-len", "1000000")
    assert [found["groups"][0]["block_tokens"] for found in (plain, units)] == [16, 128]
    assert plain["nvme"]["blocks"] // 8 < units["nvme"]["blocks"] * 1.02
    for more, tokens in ((["--unit-tokens", "off"], 16), (["--unit-tokens", "64"], 64), (["--cpu", "4GiB"], 64)):
        found = json_of("size", *arguments, "--max-model-len", "1000000", *more)
        assert found["groups"][0]["block_tokens"] == tokens, more
    assert units["nvme"]["tokens"] > plain["nvme"]["tokens"]
    refused = run_here("size", *arguments, "--unit-tokens", "24")
    assert refused.exit_code == 2 and "unit_tokens 24 fits no KV-cache group" in " ".join(refused.stderr.split())


def test_the_report_and_its_json(tmp_path):
    """In a process of its own, where neither vLLM nor torch can be loaded."""
    arguments = ["--model", written(tmp_path / "model", LLAMA), "--tp", "4", "--nvme", "1TiB", "--cpu", "64GiB"]
    arguments += ["--write-rate", "2TB", "--drive-endurance", "1.2PBW"]
    found = run_json("size", *arguments, without=("torch", "vllm", "transformers"))
    wanted = {"json_version": 3, "pipeline": [32], "tensor_parallel": 4, "block_tokens": 16, "context_tokens": 32768}
    wanted |= {"token_bytes": 131072, "token_bytes_rank": 32768, "token_bytes_drive": 131072}
    wanted["writes"] = {"bytes_per_day": 2 * 10**12, "measured_s": None, "at_least": False}
    assert found == found | wanted | {"endurance": {"bytes": 12 * 10**14, "days": 600.0}}
    assert found["nvme"]["conversations"] == found["nvme"]["tokens"] // 32768 == 253
    assert found["cpu"] == found["cpu"] | {"capacity_bytes": 64 * GIB, "conversations": 15}
    said = " ".join(run_here("size", *arguments).stdout.split())
    for words in (
        "128.0 KiB a token, 32.0 KiB on each of 4 ranks",
        "16 tokens, full attention: 512.0 KiB in a slot of 516.0 KiB",
        "after 600 days (1.6 years)",
        "blocks of 16 tokens are assumed; see --block-size",
    ):
        assert words in said, said


def test_data_parallel_ranks_are_engines_that_have_each_so_much(tmp_path):
    model = ("--model", written(tmp_path / "model", LLAMA), "--cpu", "8GiB", "--nvme", "100GiB")
    one, three = json_of("size", *model), json_of("size", *model, "--dp", "3")
    assert three.pop("data_parallel") == 3 and one.pop("data_parallel") == 1 and one == three
    said = run_here("size", *model, "--dp", "3").stdout
    assert "each of 3 engines has so much: 24.0 GiB together" in said and "300.0 GiB together" in said


def test_what_a_pipeline_pads(tmp_path):
    """A slot is as large on each stage as the largest needs."""
    arguments = ["--model", written(tmp_path / "model", LLAMA), "--pp", "3", "--tp", "2", "--nvme", "1TiB"]
    found = json_of("size", *arguments)
    assert (found["tensor_parallel"], found["pipeline"]) == (2, [11, 11, 10])
    assert found["token_bytes"] == found["token_bytes_drive"] == 131072
    assert found["token_bytes_rank"] == 11 * 131072 // 32 // 2
    assert found["nvme"]["used_bytes"] == found["nvme"]["tokens"] * 131072
    alone = json_of("size", *arguments[:2], *arguments[4:])
    assert found["nvme"]["tokens"] < alone["nvme"]["tokens"] * 32 / 33 * 1.01
    said = " ".join(run_here("size", *arguments).stdout.split())
    assert "128.0 KiB a token, at most 22.0 KiB on each of 6 ranks" in said
    assert "Stages 3, of 11, 11, 10 layers" in said


def test_the_rate_of_a_store(tmp_path):
    path, model = tmp_path / "store", written(tmp_path / "model", LLAMA)
    make_store(path)
    arguments = ["size", "--model", model, "--write-rate", path, "--drive-endurance", "1TB"]
    assert "nothing was written to" in refused(*arguments), "its blocks are years old"
    now_s = int(time.time())
    home_id = stamp(path, lambda slot: now_s - (3600 if slot.segment < 3 else 30 * 3600))
    file = path / "homes" / home_id / "HOME"
    recent = 2 * (2 * 5 * 8192 + 5 * 16384)
    for age_s, factor in ((12 * 3600, 2), (100 * 86400, 1)):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"created_s": now_s - age_s}))
        writes = json_of(*arguments)["writes"]
        assert writes["at_least"] and abs(writes["measured_s"] - min(age_s, 86400)) < 60
        assert abs(writes["bytes_per_day"] - factor * recent) < recent / 100
    assert "at least, since what was evicted is not counted" in " ".join(run_here(*arguments).stdout.split())


def test_the_link_carries_what_is_computed(tmp_path):
    model = written(tmp_path / "model", LLAMA)
    token = 2 * 32 * 8 * 128 * 2
    found = json_of("size", "--model", model, "--prefill", "4000")
    assert found["link"] == {
        "prefill_tokens_per_s": 4000.0, "bits_per_s": 8 * 4000 * token, "sent_bytes_per_day": 86400 * 4000 * token,
        "shrinks": None, "coded_bits_per_s": None, "coded_bytes_per_day": None,
    }  # fmt: skip
    coded = json_of("size", "--model", model, "--prefill", "4000", "--shrinks", "1.25")["link"]
    assert coded["coded_bits_per_s"] * 1.25 == coded["bits_per_s"] == found["link"]["bits_per_s"]
    assert coded["coded_bytes_per_day"] * 1.25 == coded["sent_bytes_per_day"]
    shown = run_here("size", "--model", model, "--prefill", "4000", "--shrinks", "1.25").stdout
    assert "3.4 Gb/s and 33.0 TiB a day, where remote_codec makes it 1.25 times shorter" in " ".join(shown.split())
    assert "--shrinks needs --prefill" in refused("size", "--model", model, "--shrinks", "1.25")
    shown = run_here("size", "--model", model, "--prefill", "4000").stdout
    assert "4.2 Gb/s, for loads as fast as 4,000 computed tokens/s" in " ".join(shown.split())
    assert "41.2 TiB a day" in shown
    shared = json_of("size", "--model", written(tmp_path / "mla", DEEPSEEK), "--tp", "4", "--prefill", "1")["link"]
    assert shared["bits_per_s"] * 86400 == 4 * 8 * shared["sent_bytes_per_day"], "each rank loads, one sends"
