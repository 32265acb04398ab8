# SPDX-License-Identifier: Apache-2.0
"""``tools/compare_offloading.py`` and ``tools/compare_returning.py`` on real engines, small: they
must see what the ``fs`` tier serves wrongly, and nothing wrong of kvdisk's doors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "compare_offloading.py"
RETURNING = TOOL.with_name("compare_returning.py")
SIZES = ("--lengths", "256", "512", "--prompts", "2", "--cap-mib", "32")

pytestmark = pytest.mark.torture


def test_what_is_served_wrongly_is_seen(tmp_path):
    figures, picture = tmp_path / "figures.json", tmp_path / "bars.svg"
    command = [sys.executable, str(TOOL), "--dir", str(tmp_path), "--json", str(figures), "--picture", str(picture)]
    done = subprocess.run([*command, *SIZES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {one["way"]: one for one in json.loads(figures.read_text())["found"]}
    assert not any(one["failed"] for one in found.values()), done.stdout
    for way in ("kvdisk", "kvdisk as tier"):
        one = found[way]
        assert sum(one["asked"].values()) == 18 and not sum(one["wrong"].values())
        assert all(one["loaded"][trial] for trial in ("from memory", "from the drive"))
        assert one["loaded"]["other weights, same path"] == one["loaded"]["a bit flipped in every 64 KiB"] == 0
    fs = found["memory, fs"]
    assert fs["wrong"]["a bit flipped in every 64 KiB"] and fs["wrong"]["other weights, same path"]
    assert fs["drive_bytes"] > 2 * found["kvdisk"]["drive_bytes"]
    assert found["memory"]["first_s"]["from memory"]
    assert "from the drive</text>" in picture.read_text()
    assert not list(tmp_path.glob("kvdisk-compared-*"))


def test_users_who_return_with_more_than_the_memory(tmp_path):
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(RETURNING), "--dir", str(tmp_path), "--json", str(figures)]
    sizes = ("--tokens", "256", "--memory-mib", "8", "--times", "2", "--only", "kvdisk", "kvdisk as tier", "memory, fs")
    done = subprocess.run([*command, *sizes], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {one["way"]: one for one in json.loads(figures.read_text())["found"]}
    assert not any(one["failed"] for one in found.values()), done.stdout
    for way in ("kvdisk", "kvdisk as tier"):
        returned = found[way]["returned"]
        assert returned["2"]["users"] == 8 and returned["2"]["loaded"] > 0.5
        assert not any(one["wrong"] for one in returned.values())
        for trial in ("other weights, same path", "a bit flipped in every 64 KiB"):
            assert not returned[trial]["loaded"], trial
        assert returned["after kill -9"]["users"] == 8
    assert found["memory, fs"]["returned"]["2"]["users"] == 8
    assert not list(tmp_path.glob("kvdisk-compared-*"))
