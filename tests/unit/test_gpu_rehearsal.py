# SPDX-License-Identifier: Apache-2.0
"""The tests of tests/gpu over CPU tensors, as ``tools/gpu_report.py`` runs them: what they call is
there, what they compare is equal, and they notice what is not."""

from __future__ import annotations

import subprocess

import gpu_report
import pytest

WRONG = """
import pytest
from kvdisk.worker.copier import CudaCopier, Passed

@pytest.fixture(autouse=True)
def wrong(monkeypatch):
    monkeypatch.setattr(CudaCopier, "scatter", lambda *_, **__: Passed())
"""


def run(tmp_path, monkeypatch, *more: str) -> str:
    """Run them; return what they say."""
    monkeypatch.setenv("KVDISK_GPU_TESTS_ON", "cpu")
    command = [*gpu_report.tests_command(tmp_path / "base"), *more]
    done = subprocess.run(command, cwd=gpu_report.ROOT, capture_output=True, text=True, check=False)
    print(done.stdout[-6000:], done.stderr[-2000:])  # pytest shows it when a test fails
    return done.stdout


@pytest.mark.torture  # make test-cuda runs them on the fake GPU
def test_they_pass_over_cpu_tensors(tmp_path, monkeypatch):
    found = gpu_report.read_tests(run(tmp_path, monkeypatch))
    assert found["failures"] == found["unended"] == [], found["last_lines"]
    assert found["passed"] >= 200
    assert 0 < found["skipped"] <= 20, "GPUDirect, and what a CPU has nothing of"


def test_they_notice_copies_that_do_nothing(tmp_path, monkeypatch):
    (tmp_path / "wrong_copies.py").write_text(WRONG)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{gpu_report.ROOT}")
    found = gpu_report.read_tests(run(tmp_path, monkeypatch, "-p", "wrong_copies", "-k", "any_size or other_loads"))
    assert found["failed"] >= 20 and not found["error"] and not found["passed"], found["last_lines"]
