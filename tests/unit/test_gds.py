# SPDX-License-Identifier: Apache-2.0
"""Whether GPUDirect Storage is here, and that asking never hangs, crashes or raises."""

from __future__ import annotations

import importlib.util
from unittest.mock import Mock

from support.cuda_stub import write_stub

from kvdisk.device import gds
from kvdisk.device.gds import gds_unavailable

WAIT_S = 600.0


def test_what_lacks_is_said_and_kvikio_is_asked_last(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", Mock())
    monkeypatch.setattr(gds, "_ASK", "print('it is raining')")
    assert "modules is missing" in gds_unavailable(tmp_path)
    (tmp_path / "modules").touch()
    assert "nvidia-fs" in gds_unavailable(tmp_path)
    (tmp_path / "driver" / "nvidia-fs").mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setattr(gds.ctypes, "CDLL", Mock(side_effect=OSError))
        assert "libcuda" in gds_unavailable(tmp_path)
    monkeypatch.setattr(gds.ctypes, "CDLL", Mock())
    assert gds_unavailable(tmp_path) == "it is raining"
    monkeypatch.setattr(gds, "_ASK", "print('here')")
    assert gds_unavailable(tmp_path) is None


def test_a_child_that_hangs_dies_or_raises_is_a_clause():
    assert "did not answer" in gds._ask_kvikio("import time; time.sleep(600)", 0.5)
    assert "ended with -11" in gds._ask_kvikio("import os; os.kill(os.getpid(), 11)", WAIT_S)
    assert (
        gds._ask_kvikio("raise RuntimeError('no driver')", WAIT_S) == "kvikio does not start: RuntimeError: no driver"
    )


def test_the_driver_and_kvikio_themselves_can_be_asked(monkeypatch, tmp_path):
    write_stub(tmp_path)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert gds._ask_kvikio(gds._ASK, WAIT_S) == "the CUDA driver does not start (error 3)"
    started = gds._ASK.replace("cuInit(0)", "cuDriverGetVersion(bytes(4))")
    said = gds._ask_kvikio(started, WAIT_S)
    assert said in {"kvikio prefers its way through host memory", "the cuFile driver says that it is not available"}
