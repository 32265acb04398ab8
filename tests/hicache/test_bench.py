# SPDX-License-Identifier: Apache-2.0
"""``tools/bench_hicache.py`` runs, and the demo beside both engines, at sizes that measure
nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from measure_all import MEASUREMENTS, Places
from support.measured import run_small

from kvdisk.sglang.versions import SUPPORTED_VERSIONS, sglang_version

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def test_bench_hicache_runs(tmp_path):
    told = tmp_path / "told.json"
    command = [sys.executable, str(TOOLS / "bench_hicache.py"), "--dir", str(tmp_path), "--pairs", "1"]
    command += ["--batches", "1", "--page-tokens", "16", "--json", str(told)]
    path = os.pathsep.join([str(TOOLS.parent), str(TOOLS.parent / "tests"), os.environ["PYTHONPATH"]])
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(told.read_text())


@pytest.mark.skipif(
    not sglang_version().startswith(SUPPORTED_VERSIONS[-1]), reason="it has the newest packages of both engines"
)
def test_the_demo_beside_both_engines_finds_what_it_is_about(tmp_path):
    """As pages have it: kvdisk keeps all, serves nothing wrong, and stays below its cap, and the
    backends beside it do not."""
    (one,) = (each for each in MEASUREMENTS if each.name == "engines")
    table = run_small(one, Places(tmp_path))["tables"]["backends"]

    def of(row):
        return [table[row][name]["median"] for name in columns if name in table[row]]

    columns = ["SGLang, its file backend", "SGLang, kvdisk", "LMCache, fs_native", "LMCache, kvdisk"]
    assert of("found after kill -9") == of("pages stored") == [8] * 4
    assert of("loaded after a bit flip") == [8, 7, 8, 7] and of("of these wrong") == [1, 0, 1, 0]
    theirs, ours, native, ours_again = of("most on the drive")
    assert max(ours, ours_again) <= 64 < min(theirs, native)
    assert len(of("store")) == len(of("load")) == 4 and min(of("store") + of("load")) > 0
    assert len(of("lookup, busy Python")) == 2
