# SPDX-License-Identifier: Apache-2.0
"""The file of ``trace_file``: what is in it, how large it grows, and what ``kvdisk replay`` reads.
Of an engine: ``tests/connector/test_scheduler_found.py``."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from cli_stores import run_here

from kvdisk import request_trace
from kvdisk.cli.output import size
from kvdisk.cli.replay.tiers import bytes_for
from kvdisk.cli.replay.trace import read_trace
from kvdisk.cli.size import fit_nvme
from kvdisk.errors import ConfigError
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.request_trace import RequestTrace

T0 = 1_800_000_000.0


def begin(path: Path) -> RequestTrace:
    return RequestTrace(path, block_tokens=16, block_bytes=1 << 20, model="some/model")


def hashes(*names: int) -> list[bytes]:
    return [name.to_bytes(32, "big") for name in names]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_equal_beginnings_are_told_within_a_file_and_never_between_two(tmp_path):
    path = tmp_path / "t.jsonl"
    for _ in range(2):
        trace = begin(path)
        trace.add(T0 + 5, 7, hashes(1, 2, 3))
        trace.write()
        trace.add(T0 + 2.5, 0, hashes(1, 2, 4))
        trace.add(T0 + 6, 1, hashes())
        trace.close()
        trace.close()
    assert sorted(os.listdir(tmp_path)) == ["t.jsonl", "t.jsonl.1"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before, after = (lines(each) for each in (tmp_path / "t.jsonl.1", path))
    assert before[0] == {"kvdisk_trace": 1, "block_tokens": 16, "block_bytes": 1 << 20, "model": "some/model"}
    one, two, three = after[1:]
    assert (one["time_s"], one["prompt_tokens"], one["output_tokens"]) == (0, 48, 7)
    assert one["blocks"][:2] == two["blocks"][:2] and one["blocks"][2] != two["blocks"][2] and not three["blocks"]
    assert {len(block) for block in one["blocks"]} == {12}
    assert not set(one["blocks"]) & set(before[1]["blocks"]), "the key is another"
    found = read_trace(path)
    assert (found.form, found.block_tokens, found.block_bytes) == ("kvdisk", 16, 1 << 20)
    assert [request.time_s for request in found.requests] == [-2.5, 0, 1], "in order of arrival"
    assert found.most_hits == 32


def test_it_is_bounded_in_bytes_and_in_what_waits(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(request_trace, "MOST_BYTES", 4000)
    path = tmp_path / "t.jsonl"
    trace = begin(path)
    for at in range(100):
        trace.add(T0 + at, 1, hashes(*range(20)))
        trace.write()
    sizes = [each.stat().st_size for each in (path, tmp_path / "t.jsonl.1")]
    assert max(sizes) < 4200 and sizes[1] > 3000 and len(os.listdir(tmp_path)) == 2
    firsts = [lines(each)[1]["blocks"][0] for each in (path, tmp_path / "t.jsonl.1")]
    assert firsts[0] != firsts[1], "each file has a key of its own"
    monkeypatch.setattr(request_trace, "MOST_BYTES", 1 << 30)
    for at in range(request_trace.MOST_WAITING + 3):
        trace.add(T0 + at, 1, [])
    trace.close()
    assert "lacks 3 requests" in caplog.text


def test_what_cannot_be_written_is_one_sentence_and_nothing_is_lost(tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("precious")
    (tmp_path / "link").symlink_to(mine)
    trace = begin(tmp_path / "t.jsonl")
    for name, said in (
        ("mine", "something else than a trace of kvdisk is there"),
        ("link", "something else than a trace of kvdisk is there"),
        ("no/t.jsonl", "No such file or directory"),
        ("t.jsonl", "another engine writes it"),
    ):
        with pytest.raises(ConfigError, match=rf"^trace_file '.*{name}' cannot be written: {said}\.$"):
            begin(tmp_path / name)
    assert mine.read_text() == "precious"
    trace.close()
    begin(tmp_path / "t.jsonl").close()


@pytest.mark.parametrize("slot_bytes", [8192, 200_704, (64 << 20) + 4096])
@pytest.mark.parametrize("slots", [1, 77, 5000])
def test_the_bytes_that_replay_names_hold_that_many_slots_and_a_mib_less_do_not(slots, slot_bytes):
    geometry = Geometry((GroupGeometry(0, 1, slot_bytes - 4096),), 1, 1)
    found = bytes_for(slots, slot_bytes)
    assert fit_nvme(geometry, found, 1).blocks >= slots
    try:
        fewer = fit_nvme(geometry, found - (1 << 20), 1).blocks
    except ConfigError:
        fewer = 0
    assert fewer < slots


def write(path: Path, prompts: list[list[int]]) -> Path:
    trace = begin(path)
    for at, prompt in enumerate(prompts):
        trace.add(T0 + at, 1, hashes(*prompt))
    trace.close()
    return path


def test_replay_says_how_large_the_tier_has_to_be(tmp_path):
    again = [[100 * document + at for at in range(8)] for document in range(40)] * 3
    path = write(tmp_path / "t.jsonl", again)
    done = run_here("replay", path, "--nvme", "10%,100%", "--processes", "1")
    assert done.exit_code == 0, done.stderr
    said = " ".join(done.stdout.split())
    found = json.loads(run_here("replay", path, "--nvme", "100%", "--json", "--processes", "1").stdout)
    (run,) = found["runs"]
    assert run["nvme_bytes"] == bytes_for(run["room"]["slots"], found["slot_bytes"])
    words = f"nvme_bytes of {size(run['nvme_bytes'])} brings 66.67 %; no size brings more than 66.67 %."
    assert words in said, done.stdout
    done = run_here("replay", path, "--nvme", "10%", "--processes", "1", "--eviction", "lru", "--nvme-admission", "all")
    said = " ".join(done.stdout.split())
    assert "None of these is enough: " in said and " brings 0.00 % of 66.67 %; try more" in said, done.stdout
    lone = write(tmp_path / "lone.jsonl", again[:40])
    assert "No prompt begins as another did" in run_here("replay", lone, "--nvme", "10%", "--processes", "1").stdout
