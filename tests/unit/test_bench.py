# SPDX-License-Identifier: Apache-2.0
"""``kvdisk bench`` on a real drive."""

from __future__ import annotations

import json
import os
from unittest.mock import Mock

import pytest
from cli_stores import LLAMA, LLAMA_TOKEN_BYTES, refused, run_here, run_json
from support.faulty_device import FaultPlan, FaultyDevice
from support.memory_device import MemoryDevice

from kvdisk.cli import bench
from kvdisk.device import probe
from kvdisk.device.probe import FILE_BYTES


def test_a_run_has_everything_needs_no_torch_and_leaves_nothing(needs_queue, tmp_path):
    place, model = tmp_path / "place", tmp_path / "config.json"
    place.mkdir()
    model.write_text(json.dumps(LLAMA))
    options = ["--model", model, "--tp", "2", "--prefill", "1e9"]
    found = run_json("bench", place, *options, without=("torch", "vllm"))
    assert not list(place.iterdir())
    assert found["json_version"] == 4 and found["device"].startswith("posix-")
    slot_bytes = 4096 + 16 * LLAMA_TOKEN_BYTES // 2  # of 16 tokens on each of two ranks
    assert (found["block_bytes"], found["token_bytes"]) == (slot_bytes, 2 * slot_bytes / 16)
    assert found["tokens_per_s"] == pytest.approx(found["read"] / found["token_bytes"])
    assert min(found["run_read"], found["write"]) > 0 and found["verdict"].startswith("too slow: ")


@pytest.mark.parametrize(
    ("tokens_per_s", "prefill", "words"),
    [
        (None, 500.0, "name a model"),
        (9000.0, None, "worth it where the GPU computes less than 9,000 tokens/s"),
        (9000.0, 4500.0, "fast enough: it loads a prompt 2.0 times as fast"),
        (4500.0, 9000.0, "too slow: the GPU computes a prompt 2.0 times as fast"),
    ],
)
def test_the_question_that_it_answers(tmp_path, monkeypatch, tokens_per_s, prefill, words):
    model = tmp_path / "config.json"
    model.write_text(json.dumps(LLAMA))
    slot_bytes = 4096 + 16 * LLAMA_TOKEN_BYTES
    speed = (tokens_per_s or 1.0) * slot_bytes / 16
    monkeypatch.setattr(bench, "measure_drive", lambda *_: (speed, 2 * speed, speed))
    options = [*(["--model", model] if tokens_per_s else []), *(["--prefill", prefill] if prefill else [])]
    done = run_here("bench", tmp_path, *options)
    lines = done.stdout.splitlines()
    assert done.exit_code == 0 and len(lines) <= 10 and max(map(len, lines)) <= 80
    assert words in " ".join(done.stdout.split())


def test_wrong_usage_and_a_drive_without_room_are_refused_in_one_line(tmp_path, monkeypatch):
    real, full = os.statvfs, Mock(f_frsize=1, f_bavail=bench.LEFT_FREE_BYTES + FILE_BYTES - 1)
    monkeypatch.setattr(os, "statvfs", lambda path: full if path == tmp_path else real(path))
    for arguments, words in (
        ((tmp_path, "--model", "org/name"), "--model wants a model's directory, or its config.json"),
        ((tmp_path / "absent",), "is not a directory"),
        ((tmp_path,), "and leaves 1.0 GiB free"),
    ):
        assert words in refused("bench", *arguments)
    assert not list(tmp_path.iterdir())
    full.f_bavail += 1
    assert run_here("bench", tmp_path).exit_code == 0


@pytest.mark.parametrize(
    ("plan", "said"), [(FaultPlan(full=True), "errno 28"), (FaultPlan(hold=True), "nothing was heard of it for 0.05 s")]
)
def test_a_drive_that_fails_or_hangs_while_it_is_measured_is_an_exit_code(tmp_path, monkeypatch, plan, said):
    monkeypatch.setattr(bench, "SILENT_S", 0.05)
    monkeypatch.setattr(probe, "_given_up", [])
    monkeypatch.setattr(bench, "PosixDevice", lambda **_: FaultyDevice(MemoryDevice(), plan))
    done = run_here("bench", tmp_path)
    assert done.exit_code == 1 and done.stderr.startswith("kvdisk: the drive failed: ") and said in done.stderr
    assert done.stderr.count("\n") == 1 and not list(tmp_path.iterdir())
