# SPDX-License-Identifier: Apache-2.0
"""The kernel of checksums without a GPU: Triton's interpreter runs it over CPU tensors, where the
sums are those of numpy, and Triton's compiler takes it for a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.interpreted_triton import lay_triton, paths
from support.laid import ROOT

pytestmark = pytest.mark.torture

FORCED = """
import pytest
from kvdisk.worker import gpu_staging, sum_kernel

@pytest.fixture(autouse=True, scope="session")
def forced():
    calls, inner = [], sum_kernel.sum_rows
    gpu_staging._kernel_for = lambda _: sum_kernel
    sum_kernel.sum_rows = lambda *given: calls.append(1) or inner(*given)
    yield
    assert calls, "the kernel was not used"
"""
COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvdisk.worker.sum_kernel import ROWS_AT_ONCE, _sum_rows

types = dict.fromkeys(("slots", "words", "of_rows", "sums"), "*i64")
types |= dict.fromkeys(("most_rows", "slot_words", "rows"), "i32") | {"at_once": "constexpr"}
source = ASTSource(_sum_rows, types, constexprs={"at_once": ROWS_AT_ONCE})
for capability in (80, 90):
    print(len(triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]))
"""


@pytest.fixture(scope="module")
def triton() -> Path:
    return lay_triton()


def run(command: list[str], environment: dict[str, str]) -> str:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, *command], env=inherited | environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


def test_its_sums_are_those_of_numpy(triton, tmp_path):
    (tmp_path / "forced_kernel.py").write_text(FORCED)
    tests = ["tests/unit/test_gpu_staging.py", "-k", "those_of_numpy or overflow_nothing", "-p", "forced_kernel"]
    assert "21 passed" in run(["-m", "pytest", "-p", "no:cacheprovider", *tests], paths(triton, tmp_path, ROOT))


def test_it_compiles_for_gpus(triton, tmp_path):
    (tmp_path / "compiled.py").write_text(COMPILED)
    environment = paths(triton, ROOT, interpreted=False) | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    sizes = run([str(tmp_path / "compiled.py")], environment).split()
    assert len(sizes) == 2 and all(int(size) > 1000 for size in sizes)
