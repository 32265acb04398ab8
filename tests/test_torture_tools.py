# SPDX-License-Identifier: Apache-2.0
"""Tools that documents name and that take long: each runs, small, and prints its table. What
another test runs is not here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.torture

ROOT = Path(__file__).resolve().parents[1]
TINY = "--pairs 1 --rounds 1 --requests 2 --concurrent 2 --prompt-tokens 200 --max-tokens 2 --nvme-bytes 64MiB"
CALLS = {
    "measure_identity": "--dir {folder} --gb 0.02 --distinct-gb 0.1 --rounds 1",
    "measure_long": "--rounds 1 --tokens 65536 --groups 1",
    "measure_long, calls": "--calls --rounds 1 --tokens 8192 --groups 1",
    "measure_overhead": f"{TINY} --cpu-bytes 64MiB --store-parent {{folder}}",
    "replay_states": "{trace} --block-tokens 512 --room 20",
    "compare_policies": "{trace} --families --processes 1",
}
"""By the tool, and what sets its call apart."""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A trace in Mooncake's form: 40 prompts, each of which comes again."""
    path = tmp_path / "trace.jsonl"
    with path.open("w") as stream:
        for at in range(80):
            ids = [0, *range(10 * (at % 40) + 1, 10 * (at % 40) + 9)]
            stream.write(
                json.dumps(
                    {"timestamp": 1000 * at, "input_length": 512 * 9, "output_length": 2, "hash_ids": ids},
                )
                + "\n"
            )
    return path


@pytest.mark.parametrize("name", CALLS)
def test_it_prints_its_figures(name: str, tmp_path: Path, trace: Path) -> None:
    call = CALLS[name].format(folder=tmp_path, trace=trace).split()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tools")))}
    command = [sys.executable, str(ROOT / "tools" / f"{name.partition(',')[0]}.py"), *call]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d", done.stdout) and "Traceback" not in done.stderr, done.stdout + done.stderr
