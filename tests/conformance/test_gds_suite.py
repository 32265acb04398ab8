# SPDX-License-Identifier: Apache-2.0
"""Runs ``gds_suite.py`` where kvikio finds a stub of the CUDA driver before any other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from support.cuda_stub import write_stub

SUITE = Path(__file__).with_name("gds_suite.py")


def test_the_suite_passes_over_kvikio(tmp_path):
    write_stub(tmp_path)
    environment = os.environ | {"LD_LIBRARY_PATH": f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}"}
    command = f"{sys.executable} -m pytest -o addopts= -p no:cacheprovider --timeout 60 -p no:xdist".split()
    done = subprocess.run(
        [*command, "--basetemp", str(tmp_path / "its"), str(SUITE)],
        env=environment,
        cwd=SUITE.parent.parent.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed in", done.stdout)
    assert passed is not None, done.stdout
    assert int(passed[1]) >= 29
