# SPDX-License-Identifier: Apache-2.0
"""GPUDirect Storage through kvikio: whether it is here. ``kvikio`` is imported in this room only, and late.

An import that works says nothing: kvikio imports and opens files without a GPU, falls back to host memory
silently, and spins for ever where ``/proc/modules`` is missing. So what can be seen in files is looked at
first, and kvikio is asked in a child process, which may hang or die without harm.
"""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sys
from pathlib import Path

_ASK_TIMEOUT_S = 60.0
_ASK = """
import kvikio.cufile_driver as driver, kvikio.defaults as defaults
if defaults.is_compat_mode_preferred(): print("kvikio prefers its way through host memory")
elif not driver.get("is_gds_available"): print("the cuFile driver says that it is not available")
else: print("here")
"""


def gds_unavailable(proc: Path = Path("/proc")) -> str | None:
    """Return why GPUDirect Storage cannot be used on this machine, as one clause, or None where it can.

    None says that driver and library are there; whether a file system takes part only a checked write and
    read of a file on it can say. Where everything is there kvikio is asked in a child process, which takes
    a second or two and never more than a minute; otherwise the answer comes at once. Any thread; raises
    nothing. ``proc``: for tests.
    """
    if importlib.util.find_spec("kvikio") is None:
        return "kvikio is not installed"
    if not (proc / "modules").exists():
        return f"{proc / 'modules'} is missing, without which the cuFile driver hangs"
    if not (proc / "driver" / "nvidia-fs").exists():
        return "the kernel module nvidia-fs is not loaded"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "libcuda.so.1 cannot be loaded"
    return _ask_kvikio(_ASK, _ASK_TIMEOUT_S)


def _ask_kvikio(script: str, timeout_s: float) -> str | None:
    try:
        child = subprocess.run(  # noqa: S603 - a script of ours, in this same interpreter
            [sys.executable, "-c", script],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"kvikio did not answer within {timeout_s:g} s"
    except OSError as error:
        return f"kvikio cannot be asked: {error.strerror}"
    if child.returncode != 0:
        last = (child.stderr.strip().splitlines() or [f"its process ended with {child.returncode}"])[-1]
        return f"kvikio does not start: {last[:200]}"
    said = child.stdout.strip()
    return None if said == "here" else said
