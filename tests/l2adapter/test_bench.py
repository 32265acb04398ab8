# SPDX-License-Identifier: Apache-2.0
"""``tools/bench_lmcache.py`` runs, at a size that measures nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def test_bench_lmcache_runs(tmp_path):
    told = tmp_path / "told.json"
    command = [sys.executable, str(TOOLS / "bench_lmcache.py"), "--dir", str(tmp_path), "--pairs", "1"]
    command += ["--keys", "2", "--in-flight", "1", "--rounds", "1", "--kib", "64", "--json", str(told)]
    path = os.pathsep.join([str(TOOLS.parent), os.environ["PYTHONPATH"]])
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(told.read_text())
