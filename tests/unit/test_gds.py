# SPDX-License-Identifier: Apache-2.0
"""Whether GPUDirect Storage is here, and that asking never hangs, crashes or raises."""

from __future__ import annotations

import importlib.util
import sys
from itertools import count
from unittest.mock import Mock

import pytest
from support.cuda_stub import write_stub

from kvdisk.device import gds
from kvdisk.device.gds import gds_unavailable

WAIT_S = 600.0


@pytest.fixture
def asker(tmp_path, monkeypatch):
    """Write the ``main`` of a process that asks; return its module."""
    monkeypatch.syspath_prepend(tmp_path)
    numbers = count()

    def write(act: str) -> str:
        name = f"asker_{next(numbers)}"
        lines = [
            "import ctypes, os, time",
            "from kvdisk.child import ParentPipe",
            "from kvdisk.device.gds import _why_unusable",
            "def main(*of): say = ParentPipe(*of).send; " + act,
        ]
        (tmp_path / f"{name}.py").write_text("\n".join(lines))
        return name

    return write


def test_what_lacks_is_said_and_kvikio_is_asked_last(monkeypatch, tmp_path, asker):
    monkeypatch.setattr(importlib.util, "find_spec", Mock())
    monkeypatch.setattr(gds, "_MAIN", asker("say('it is raining')"))
    assert "modules is missing" in gds_unavailable(tmp_path)
    (tmp_path / "modules").touch()
    assert "nvidia-fs" in gds_unavailable(tmp_path)
    (tmp_path / "driver" / "nvidia-fs").mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setattr(gds.ctypes, "CDLL", Mock(side_effect=OSError))
        assert "libcuda" in gds_unavailable(tmp_path)
    monkeypatch.setattr(gds.ctypes, "CDLL", Mock())
    assert gds_unavailable(tmp_path) == "it is raining"
    monkeypatch.setattr(gds, "_MAIN", asker("say(None)"))
    assert gds_unavailable(tmp_path) is None


def test_a_child_that_hangs_dies_or_raises_is_a_clause(monkeypatch, asker):
    assert "did not answer" in gds._ask_kvikio(asker("time.sleep(600)"), 0.5)
    assert "ended with SIGSEGV" in gds._ask_kvikio(asker("os.kill(os.getpid(), 11)"), WAIT_S)
    raising = asker("exec('raise RuntimeError(\"no driver\")')")
    assert gds._ask_kvikio(raising, WAIT_S) == "kvikio does not start: RuntimeError: no driver"
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert gds._ask_kvikio(raising, WAIT_S) == "kvikio cannot be asked: No such file or directory"


def test_the_driver_and_kvikio_themselves_can_be_asked(monkeypatch, tmp_path, asker):
    write_stub(tmp_path)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert gds._ask_kvikio(gds.__name__, WAIT_S) == "the CUDA driver does not start (error 3)"
    started = asker("say(_why_unusable(ctypes.CDLL('libcuda.so.1').cuDriverGetVersion(bytes(4))))")
    said = gds._ask_kvikio(started, WAIT_S)
    assert said in {"kvikio prefers its way through host memory", "the cuFile driver says that it is not available"}
