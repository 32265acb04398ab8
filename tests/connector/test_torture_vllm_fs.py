# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tests of its ``fs`` tier, as its source has them, over kvdisk's tier."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import vllm
from fs_tier_tests import LEFT_OUT
from test_torture_next_vllm import ROOT, VERSIONS, lay_version, with_python

pytestmark = pytest.mark.torture

INSTALLED = vllm.__version__.split("+")[0]
NAME = "test_fs_tier.py"
WHERE = f"tests/v1/kv_offload/tiering/{NAME}"
LEAST_PASSED = 25


def lay_tests(folder: Path, version: str) -> None:
    """Lay vLLM's tests of a version into ``folder``; nothing where they are there.

    pip has no way to unpack a source alone: it also asks the source what it needs. Whether that can
    be answered here does not matter.
    """
    if (folder / NAME).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        wanted = [f"vllm=={version}", "--no-deps", "--no-binary", "vllm", "--no-build-isolation", "--no-clean"]
        command = [sys.executable, "-m", "pip", "download", "--no-input", *wanted, "--dest", f"{scratch}/whole"]
        environment = os.environ | {"TMPDIR": scratch}
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment, check=False
        )
        found = [path for path in Path(scratch).rglob(NAME) if path.as_posix().endswith(WHERE)]
        if not found:
            why = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
            pytest.fail(f"pip could not download the source of vLLM {version}: {why}", pytrace=False)
        found[0].rename(folder / NAME)


@pytest.mark.parametrize("version", [INSTALLED, *VERSIONS])
def test_vllms_own_tests_of_its_fs_tier(version):
    tests = ROOT / "build" / f"vllm-{version}-tests"
    lay_tests(tests, version)
    python = ROOT / "build" / f"vllm-{version}-python"
    if version != INSTALLED:
        lay_version(python, version)
    command = [sys.executable, "-m", "pytest", "-p", "fs_tier_tests", "-p", "no:cacheprovider", "-c", os.devnull]
    done = subprocess.run(
        [*command, "--rootdir", str(tests), "--tb", "short", "-q", str(tests / NAME)],
        env=with_python(python),  # of the installed version there is no such folder
        cwd=tests,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    passed = re.search(r"(\d+) passed", done.stdout.splitlines()[-1])
    if done.returncode != 0 or passed is None or int(passed[1]) < LEAST_PASSED:
        pytest.fail(f"of vLLM {version}:\n{done.stdout[-20_000:]}", pytrace=False)
    if version == VERSIONS[-1]:
        names = set(re.findall(r"^def (test_\w+)", (tests / NAME).read_text(), re.MULTILINE))
        assert LEFT_OUT.keys() <= names, "the newest version has all that are left out"
