# SPDX-License-Identifier: Apache-2.0
"""``kvdisk why``: how far prompts would hit, and the sentence that says why no further. That the
hashes are vLLM's, and the answers an engine's: ``tests/connector``."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from cli_stores import CAP, HYBRID, PLAIN, Model, json_of, refused, run, run_here
from mass_stores import Layer

from kvdisk.blocks import BlockKey, Slot, make_block_key
from kvdisk.cli.why import chain_hashes, explain, parse_token_ids
from kvdisk.device.store import Store
from kvdisk.device.telemetry_file import write_telemetry
from kvdisk.engine_store import describe_geometry
from kvdisk.errors import ConfigError
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.index.base import BlockRecord
from kvdisk.stats import Stats
from kvdisk.telemetry import Telemetry

FACTS = {"hash": '["sha256", null]', "kv_dtype": '"auto"', "vllm": '"0.33"'}
PROMPT = list(range(1000, 1100))
SIZE = 16


def described(model: Model, fingerprint: bytes, **facts: str) -> Model:
    named = {"facts": FACTS | facts} if facts is not None else {}
    return model._replace(fingerprint=fingerprint, description=model.description | named)


def keys_of(tokens: list[int], model: Model, group: int = 0) -> list[BlockKey]:
    algorithm, seed = json.loads(model.description.get("facts", FACTS)["hash"])
    scale = model.geometry.groups[group].block_tokens // SIZE
    return [make_block_key(one, group) for one in chain_hashes(tokens, SIZE, algorithm, seed)[scale - 1 :: scale]]


def put(layer: Layer, tokens: list[int], *, group: int = 0, first: int = 0, epoch: int = 0) -> None:
    """Store the blocks of a prompt from block ``first`` on, those that are not there yet."""
    keys, held = keys_of(tokens, layer.model, group), {record.key for record in layer.records}
    for at in range(first, len(keys)):
        if keys[at] not in held:
            layer.generation += 1
            slot = Slot(group, layer.generation % layer.slots)
            above = keys[at - 1] if at else None
            layer.records.append(BlockRecord(epoch, keys[at], slot, layer.generation, above, 1000))


def answered(path: Path, tokens: object, *options: object, code: int = 0) -> dict[str, Any]:
    file = path.parent / "tokens"
    file.write_text(tokens if isinstance(tokens, str) else json.dumps(tokens))
    return json_of("why", path, "--tokens", file, *options, code=code)


def test_where_a_hit_ends_and_why(path: Path) -> None:
    layer = Layer(path, described(PLAIN, b"\x01" * 32))
    put(layer, PROMPT)
    put(layer, PROMPT[:32] + [1] * 32)
    put(layer, [7] * 64, first=2)
    put(layer, [8] * 32, epoch=5)
    put(layer, [9] * 32)
    layer.leave()
    for tokens, hit, words in (
        (PROMPT, 96, "nothing is missing"),
        (PROMPT[:96], 80, "nothing is missing"),  # the last token is computed, and so its block
        (
            PROMPT[:32] + [2] * 64,
            32,
            "2 stored prompts continue differently from here: this one differs from each within ",
        ),
        (PROMPT[:96] + [2] * 64, 96, "nothing behind it is stored: tokens 96 to 112 were never seen"),
        ([3] * 64, 0, "2 stored prompts begin differently: this one differs from each within tokens 0 to 16"),
        ([7] * 64, 0, "tokens 0 to 16 are missing, and 2 blocks behind them are here"),
        ([8] * 40, 0, "private to that engine"),
        (PROMPT[:16], 0, "too short"),
    ):
        found = answered(path, tokens)
        assert (found["found"]["hit_tokens"], found["prompt_tokens"]) == (hit, len(tokens)), words
        assert words in found["ends"] and not found["elsewhere"]
    assert answered(path, PROMPT, "--cache-salt", "x")["found"]["hit_tokens"] == 0


def test_where_a_prompt_goes_is_told_part_by_part(path: Path) -> None:
    layer = Layer(path, described(PLAIN, b"\x01" * 32))
    put(layer, PROMPT[:64])
    put(layer, PROMPT, first=5)
    layer.leave()
    for tokens, parts in (
        (PROMPT, [(0, 64, "hit"), (64, 80, "missing"), (80, 96, "here"), (96, 100, "rest")]),
        (PROMPT[:64], [(0, 48, "hit"), (48, 64, "here")]),
        ([5] * 20, [(0, 16, "missing"), (16, 20, "rest")]),
        ([5] * 3, [(0, 3, "rest")]),
    ):
        found = explain([path], tokens)
        assert [(each.start_tokens, each.end_tokens, each.state) for each in found.path] == parts


def test_what_are_no_tokens_is_said() -> None:
    for text in ("", "one two", "[1, -2]", "[" * 100_000, "9" * 5000, "²", "5", '{"tokens": 5}', "1.5"):
        with pytest.raises(ConfigError, match="what was pasted does not hold token ids"):
            parse_token_ids(text, "what was pasted")


def test_what_an_engine_does_not_serve_since_its_reset_would_not_hit(path: Path) -> None:
    """Another that was not reset serves it."""
    layer = Layer(path, described(PLAIN, b"\x01" * 32))
    put(layer, PROMPT[:64])
    put(layer, [8] * 64, epoch=77)
    store = Store.open(path)
    layer.leave()
    home = store.hold_home(layer.home.id)
    told = telemetry_of(home.path)
    told.write()
    assert answered(path, PROMPT)["found"]["hit_tokens"] == 64
    told.note_reset(77, "all")
    told.write()
    found = answered(path, PROMPT)
    assert (
        found["found"]["hit_tokens"] == 0 and "tokens 0 to 16 were stored before the engine was reset" in found["ends"]
    )
    (reset,) = found["resets"]
    assert (reset["engine_store"], reset["hit_tokens"]) == (home.id, 0) and reset["reset_s"] > 0
    assert answered(path, [8] * 64)["found"]["hit_tokens"] == 48, "what it has stored since is served"
    shown = " ".join(run_here("why", path, "--tokens", path.parent / "tokens").stdout.split())
    assert f"engine store {home.id[:8]} was reset" in shown and "48 tokens would hit" in shown
    beside = store.acquire_home(layer.model.fingerprint, layer.model.description, CAP)
    found = answered(path, PROMPT)
    assert found["found"]["hit_tokens"] == 64 and [one["hit_tokens"] for one in found["resets"]] == [0]
    beside.close(clean=True)
    home.close(clean=True)
    found = answered(path, PROMPT)
    assert found["found"]["hit_tokens"] == 64 and found["resets"] == [], "the next start serves it"


def telemetry_of(home_path: Path) -> Telemetry:
    gauges = Mock(busy=False, planned_jobs=0)
    gauges.read.return_value = {}
    return Telemetry(Stats(), gauges, model="m", ranks=2, write_file=partial(write_telemetry, home_path))


def test_groups_of_several_sizes_need_what_an_engine_needs(path: Path) -> None:
    """The second group has blocks of 32 tokens and a window of 1024."""
    layer = Layer(path, described(HYBRID, b"\x02" * 32), slots=200)
    long = [at % 500 for at in range(1600)]
    put(layer, long)
    put(layer, long, group=1, first=10)  # what lies before the window is not needed
    layer.leave()
    assert answered(path, long)["found"]["hit_tokens"] == 1568, "whole steps of 32, the last token is computed"
    found = answered(path, long[:1200])
    assert found["found"]["hit_tokens"] == 0 and "another KV-cache group lacks blocks for tokens 0 on" in found["ends"]


def test_a_chunk_of_several_hashes_is_known_by_the_last(path: Path) -> None:
    """As behind vLLM's own connector, where its blocks are smaller than its chunks."""
    geometry = Geometry((GroupGeometry(0, 4 * SIZE, 4000),), rank_count=2, hash_tokens=4 * SIZE)
    model = Model(b"", geometry, PLAIN.description | describe_geometry(geometry))
    layer = Layer(path, described(model, b"\x01" * 32, row_tokens="[16, 4]"))
    put(layer, PROMPT)
    layer.leave()
    assert answered(path, PROMPT)["found"]["hit_tokens"] == 64
    assert answered(path, PROMPT[:63] + PROMPT[64:])["found"]["hit_tokens"] == 0


def test_of_a_chunked_group_only_the_last_chunk_is_needed(path: Path) -> None:
    geometry = Geometry((GroupGeometry(0, 16, 4000), GroupGeometry(1, 16, 4000, chunk_tokens=64)), 1, 16)
    chunked = HYBRID._replace(geometry=geometry, description={"geometry": describe_geometry(geometry)})
    layer = Layer(path, described(chunked, b"\x03" * 32))
    put(layer, PROMPT)
    put(layer, PROMPT, group=1, first=4)  # the chunk before is not needed
    layer.leave()
    assert answered(path, PROMPT)["found"]["hit_tokens"] == 96
    assert answered(path, PROMPT[:60])["found"]["hit_tokens"] == 0


def test_another_namespace_has_it(path: Path) -> None:
    """The one that was used last is asked about; the other's hashes are of another algorithm."""
    first = Layer(path, described(PLAIN, b"\xaa" * 32, hash='["sha256_cbor", "7"]', kv_dtype='"fp8"'))
    put(first, PROMPT)
    put(first, [9] * 64)
    old = Layer(path, PLAIN._replace(fingerprint=b"\xbb" * 32))
    put(old, PROMPT)
    mine = Layer(path, described(PLAIN, b"\xcc" * 32))
    put(mine, PROMPT[:32])
    for layer in (first, old):
        layer.leave()
    mine.leave()
    found = answered(path, PROMPT, "--namespace", "cccc")
    assert (found["found"]["hit_tokens"], found["found"]["differs"]) == (32, None)
    others = {one["fingerprint"][:2]: one for one in found["elsewhere"]}
    assert {name: one["hit_tokens"] for name, one in others.items()} == {"aa": 96, "bb": 96}
    assert others["bb"]["differs"] is None, "an older kvdisk did not keep the facts"
    assert others["aa"]["differs"] == {
        "hash": ['["sha256", null]', '["sha256_cbor", "7"]'],
        "kv_dtype": ['"auto"', '"fp8"'],
    }
    assert answered(path, PROMPT, "--namespace", "aaaa")["elsewhere"] == []
    file = path.parent / "tokens"
    done = run("why", path, "--tokens", file, "--namespace", "cc", COLUMNS="80")
    lines = done.stdout.splitlines()
    assert lines[0].rstrip() == "Verdict    32 of 100 prompt tokens would hit"
    assert len(lines) <= 20 and max(map(len, lines)) <= 80 and 'kv_dtype: "fp8", "auto"' in done.stdout


def test_forms_of_a_prompt_and_what_is_refused(path: Path, tmp_path: Path) -> None:
    layer = Layer(path, described(PLAIN, b"\x01" * 32))
    put(layer, PROMPT)
    layer.leave()
    for text in ({"count": 100, "tokens": PROMPT}, " ".join(map(str, PROMPT)), ", ".join(map(str, PROMPT)) + "\n"):
        assert answered(path, text)["found"]["hit_tokens"] == 96
    words = tmp_path / "prompt"
    words.write_text(" ".join(f"w{token}" for token in PROMPT))
    vocabulary = {f"w{token}": token for token in PROMPT}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps(
            {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}}
            | {"model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w1000"}}
        )
    )
    assert json_of("why", path, "--prompt", words, "--tokenizer", tmp_path)["found"]["hit_tokens"] == 96
    (tmp_path / "bad").write_text("[1, -2]")
    for options, said in (
        ([], "name the prompt"),
        (["--prompt", words], "name the prompt"),
        (["--tokens", tmp_path / "none"], "cannot be read"),
        (["--tokens", tmp_path / "bad"], "does not hold token ids"),
        (["--tokens", path.parent / "tokens", "--namespace", "zz"], "no namespace of this store"),
        (["--prompt", words, "--tokenizer", tmp_path / "none"], "cannot be read as a tokenizer"),
    ):
        assert said in refused("why", path, *options)
