# SPDX-License-Identifier: Apache-2.0
"""That ``tools/measure_codec.py`` runs, at a size that measures nothing."""

from __future__ import annotations

import json

import measure_codec
import pytest


def test_it_finds_what_blocks_shrink_to_and_what_links_carry(tmp_path, monkeypatch):
    arguments = ["--slot-kib", "64", "--slots", "2", "--rounds", "1", "--gbits", "25", "--json", str(tmp_path / "x")]
    monkeypatch.setattr("sys.argv", ["measure_codec", *arguments])
    assert measure_codec.main() == 0
    found = json.loads((tmp_path / "x").read_text())["tables"]
    shorter = {name: row["times shorter"]["median"] for name, row in found["coding"].items()}
    assert min(shorter["bf16, drawn"], shorter["fp32, drawn"], shorter["fp8, drawn"]) > 1.1
    assert shorter["random bytes"] == pytest.approx(64 / 60, abs=0.01), "but for the header"
    assert set(found["links"]) == {"put, 25 Gbit/s", "get, 25 Gbit/s"}
