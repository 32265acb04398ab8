# SPDX-License-Identifier: Apache-2.0
"""Every measurement of ``tools/measure_all.py`` runs, at a size that measures nothing, and has each
figure that a page names. Most are long tests."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from measure_all import MEASUREMENTS, Places
from support.measured import run_small
from support.needs import need, why_no_mooncake

SHORT = {"identity", "memory"}
BESIDE = {"engines"}
"""Those that need other engines' packages: ``tests/hicache`` runs them."""
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def places(tmp_path) -> Places:
    trace = tmp_path / "trace.jsonl"
    lines = (
        {
            "timestamp": 1000 * at,
            "input_length": 1536,
            "output_length": 8,
            "hash_ids": [at % 7, 100 + at % 60, 1000 + at],
        }
        for at in range(200)
    )
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Places(tmp_path, trace)


@pytest.mark.parametrize(
    "one",
    [
        pytest.param(each, marks=[pytest.mark.torture] * (each.name not in SHORT))
        for each in MEASUREMENTS
        if each.name not in BESIDE
    ],
    ids=lambda each: each.name,
)
def test_a_measurement_runs_and_has_what_the_pages_name(one, places):
    if one.name == "remote-objects":
        need(why_no_mooncake())
    run_small(one, places)


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("compare_policies", "TRACE --families"),
        ("replay_states", "TRACE --room 30"),
        ("measure_offloading", "DIR --rounds 1 --divide 16"),
        ("measure_web", "--dir DIR --engines 2 --blocks 3000 --seconds 2"),
        ("measure_units", "--requests 20 --families agents --trace TRACE"),
    ],
)
@pytest.mark.torture
def test_a_tool_that_writes_no_figures_runs(tool, arguments, places):
    said = run_tool(tool, places.arguments(arguments))
    assert SAYS[tool] in said


SAYS = {
    "measure_web": "with none: ",
    "compare_policies": "**trace**",
    "replay_states": "30 %  learned",
    "measure_offloading": "Chunks that hit",
    "measure_units": "trace.jsonl, at most",
}


def run_tool(tool: str, arguments: list[str]) -> str:
    """Run a tool; return what it prints."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tools" / f"{tool}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_tool_that_a_page_names_is_run_by_a_test():
    known = {one.tool for one in MEASUREMENTS} | NOT_RUN.keys()
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for tool in set(re.findall(r"\btools/(\w+)\.py", path.read_text())) - known:
            named = tool in ELSEWHERE and re.search(rf"\b{tool}\b", (ROOT / "tests" / ELSEWHERE[tool]).read_text())
            assert named, f"{path.name}: no test runs tools/{tool}.py"


ELSEWHERE = {
    "bench_hicache": "hicache/test_bench.py",
    "bench_lmcache": "l2adapter/test_bench.py",
    "check_chart": "connector/test_deploy.py",
    "figure_pages": "unit/test_figures.py",
    "compare_offloading": "connector/test_torture_compare.py",
    "compare_returning": "connector/test_torture_compare.py",
    "compare_policies": "unit/test_measures.py",
    "demo_store": "test_docs.py",
    "gpu_report": "unit/test_gpu_report.py",
    "install": "unit/test_install.py",
    "make_docs": "test_docs.py",
    "make_traces": "unit/test_make_traces.py",
    "measure_all": "unit/test_figures.py",
    "measure_codec": "unit/test_measure_codec.py",
    "measure_offloading": "unit/test_measures.py",
    "measure_units": "unit/test_measures.py",
    "measure_web": "unit/test_measures.py",
    "mutate": "unit/test_mutate.py",
    "replay_states": "unit/test_measures.py",
}
"""The tests of the tools that are no measurement."""
NOT_RUN = {"make_pictures": "it needs a browser, and /nvme"}
