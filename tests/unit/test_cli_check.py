# SPDX-License-Identifier: Apache-2.0
"""``kvdisk check``: what it refuses is what an engine refuses, and what it says is so."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from cli_stores import LLAMA, LLAMA_TOKEN_BYTES, PLAIN, json_of, leave_home, refused, run_here, run_json

from kvdisk.assembly import check_settings
from kvdisk.cli import check
from kvdisk.cli.size import fit_cpu, fit_nvme
from kvdisk.errors import ConfigError
from kvdisk.geometry import Geometry, GroupGeometry


def written(place: Path, settings: Any, **whole: Any) -> Path:
    """Write kvdisk's settings, or with ``whole`` what vLLM is given."""
    file = place / "kvdisk.json"
    file.write_text(json.dumps(whole | {"kv_connector_extra_config": settings} if whole else settings))
    return file


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return {"store_dirs": str(tmp_path / "kv"), "nvme_bytes": "64Mi", "cpu_bytes": "32Mi"}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """What a drive is said to be."""
    found = Mock(device="posix-aio", direct=True, why="right", read=4.096e9, write=2.048e9)
    monkeypatch.setattr(check, "measure", Mock(return_value=found))
    return found


def test_a_real_drive_is_measured_and_nothing_is_left(needs_queue, tmp_path, settings):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    file = written(tmp_path, settings)
    found = run_json("check", file, "--model", tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "kvdisk.json"]
    (one,) = found["directories"]
    assert (one["path"], one["state"], one["mode"]) == (settings["store_dirs"], "to be made", 0o700)
    assert one["user"] == os.geteuid() and one["device"].startswith("posix-") and one["read_bytes_per_s"] > 1e6
    geometry = Geometry((GroupGeometry(0, 16, 16 * LLAMA_TOKEN_BYTES),), 1, 16)
    assert found["token_bytes"] == LLAMA_TOKEN_BYTES
    assert found["cpu"]["tokens"] == fit_cpu(geometry, 32 << 20).tokens
    assert found["nvme"]["tokens"] == fit_nvme(geometry, 64 << 20, 1).tokens


def test_an_empty_directory_has_nothing_in_it_at_any_time(needs_queue, tmp_path, settings, monkeypatch):
    """A check that is killed would leave it, and the engine would refuse the directory for it."""
    (tmp_path / "kv").mkdir(0o700)
    file = written(tmp_path, settings)
    monkeypatch.setattr(os, "mkdir", Mock(side_effect=AssertionError("a directory was made")))
    (one,) = json_of("check", file)["directories"]
    assert (one["state"], one["direct"]) == ("empty", True) and not os.listdir(tmp_path / "kv")


def test_the_default_output_fits_a_terminal_and_says_what_loads_bring(tmp_path, settings, measured):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    leave_home(tmp_path / "kv", PLAIN, 1, last_use_s=1000)
    done = run_here("check", written(tmp_path, settings), "--model", tmp_path)
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert "An engine can start with this." in lines
    assert f"a store; user {os.geteuid()}, mode 0700" in done.stdout
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    assert "reads 4,096 MB/s = 2,000,000 tokens/s" in done.stdout
    assert "writes 2,048 MB/s = 1,000,000 tokens/s" in done.stdout
    assert "fewer than 2,000,000 prompt tokens a second" in done.stdout


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"nvme_bytes": "900Ti"}, "its part of nvme_bytes is 900.0 TiB"),
        ({"cpu_bytes": "900Ti"}, "cpu_bytes is 900.0 TiB, and this machine has"),
        ("direct", "takes no O_DIRECT"),
        ("threads", "threads would move blocks"),
        ("unmeasured", "was not measured: no permission"),
    ],
)
def test_what_is_not_as_it_should_be_is_said_and_is_an_exit_code(tmp_path, settings, measured, change, said):
    if change == "direct":
        measured.direct = False
    elif change == "threads":
        measured.device = "posix-threads"
    elif change == "unmeasured":
        check.measure.side_effect = ConfigError("no permission.")
    else:
        settings |= change
    done = run_here("check", written(tmp_path, settings))
    assert done.exit_code == 1 and said in " ".join(done.stdout.split())
    assert "An engine can start with this." in done.stdout


def test_what_an_engine_refuses_is_refused_in_its_words(tmp_path, settings, measured):
    (tmp_path / "file").touch()
    for change in (
        {"stor_dirs": "/x"},
        {"eviction": "arc"},
        {"store_dirs": str(tmp_path / "file")},
        {"store_dirs": str(tmp_path / "absent" / "kv")},
        {"nvme_admission": "absent.module:Own"},
    ):
        wrong = settings | change
        with pytest.raises(ConfigError) as engine:
            check_settings(wrong)
        assert refused("check", written(tmp_path, wrong)) == f"kvdisk: {str(engine.value).rstrip('.')}.\n"
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert "give it more" in refused("check", written(tmp_path, settings | {"nvme_bytes": "1Mi"}), "--model", tmp_path)


@pytest.mark.parametrize("among_others", [False, True])
def test_what_vllm_is_given_is_read_as_well(tmp_path, settings, measured, among_others):
    mine = {"kv_connector": check.CONNECTOR, "kv_role": "kv_both"}
    if among_others:
        settings = {"connectors": [{"kv_connector": "Other"}, mine | {"kv_connector_extra_config": settings}]}
        mine = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    assert json_of("check", written(tmp_path, settings, **mine))["nvme_bytes"] == 64 << 20


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is no JSON"),
        ("[]", "has no settings of KVDiskConnector"),
        ('{"kv_connector": "Other"}', "has no settings of KVDiskConnector"),
        ('{"kv_connector": "MultiConnector", "kv_connector_extra_config": {}}', "has no settings of KVDiskConnector"),
        ('{"kv_connector": "KVDiskConnector", "kv_role": "kv_producer"}', "set kv_role to kv_both"),
    ],
)
def test_what_is_no_configuration(tmp_path, text, said):
    file = tmp_path / "kvdisk.json"
    if text is not None:
        file.write_text(text)
    assert said in refused("check", file)
