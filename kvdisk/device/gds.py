# SPDX-License-Identifier: Apache-2.0
"""GPUDirect Storage through kvikio: whether it is here, and the device of GPU memory. ``kvikio`` is
imported in this room only, and late.

An import that works says nothing: kvikio imports and opens files without a GPU, falls back to host
memory silently, and spins for ever where ``/proc/modules`` is missing. So what can be seen in files
is looked at first, and kvikio is asked in a child process, which may hang or die without harm.

What a kvikio future leaves to its user: of an operation that kvikio cuts in tasks the future ends
with the last task, while others may still move bytes if that one failed, so one call is one task;
errors come without a number; nothing can be cancelled. A call may first wait for the model's work
on the GPU's default stream. So threads of ours make the calls.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvdisk.device.base import Buffer, Op
from kvdisk.device.batches import Call
from kvdisk.device.pair import GpuRange
from kvdisk.device.posix import PosixDevice
from kvdisk.errors import ConfigError
from kvdisk.geometry import ALIGNMENT

logger = logging.getLogger("kvdisk")

PIECE_BYTES = 16 << 20
"""What cuFile moves in one go at most."""
_THREADS = 16
"""Of ours for each drive and direction, with one call under way each."""
_KVIKIO_THREADS = 128
"""In one pool for all drives: one that hangs leaves enough to three others."""

_ASK_TIMEOUT_S = 60.0
_ASK = """
import ctypes
code = ctypes.CDLL("libcuda.so.1").cuInit(0)
import kvikio.cufile_driver as driver, kvikio.defaults as defaults
if code: print(f"the CUDA driver does not start (error {code})")
elif defaults.is_compat_mode_preferred(): print("kvikio prefers its way through host memory")
elif not driver.get("is_gds_available"): print("the cuFile driver says that it is not available")
else: print("here")
"""


def gds_unavailable(proc: Path = Path("/proc")) -> str | None:
    """Return why GPUDirect Storage cannot be used on this machine, as one clause, or None where it
    can.

    None says that driver and library are there; whether a file system takes part only a checked
    write and read of a file on it can say. Where everything is there kvikio is asked in a child
    process, which takes a second or two and never more than a minute; otherwise the answer comes at
    once. Any thread; raises nothing. ``proc``: for tests.
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


class GdsDevice(PosixDevice):
    """``Device`` between files and GPU memory (``GpuRange`` in the place of ``Buffer``), without a
    copy in host memory.

    Its queues are ``PosixDevice``'s on threads, ``threads`` of them for each drive and direction.
    To be made only where ``gds_unavailable`` answered None: it forbids kvikio to fall back, so that
    what cannot be moved directly fails. ``compat``: for tests with a stub of the driver only;
    buffers are host memory then. Files have to lie where O_DIRECT is; one that cuFile cannot take
    fails all its transfers with EIO. Raises ConfigError where kvikio cannot be used.

    kvikio's settings are those of the process, and are all set here.
    """

    kind = "gds"

    def __init__(self, threads: int = _THREADS, *, compat: bool = False) -> None:
        super().__init__(threads, longest_bytes=PIECE_BYTES, kernel_queue=False)
        try:
            import kvikio
            from kvikio import CompatMode, defaults
        except Exception as error:  # without nvidia-cufile it is no ImportError
            raise ConfigError(f"kvikio cannot be used: {error}") from error
        self._kvikio = kvikio
        self._compat = compat
        settings = {
            "compat_mode": CompatMode.ON if compat else CompatMode.OFF,
            "num_threads": _KVIKIO_THREADS,
            "task_size": PIECE_BYTES,
            "gds_threshold": ALIGNMENT,  # nothing is smaller: all goes to the GPU's way
            "bounce_buffer_size": PIECE_BYTES,
            "auto_direct_io_read": True,
            "auto_direct_io_write": True,
        }
        defaults.set(settings)
        listed = ", ".join(f"{name} {getattr(value, 'name', value)}" for name, value in settings.items())
        logger.info("kvdisk uses kvikio %s: %s", kvikio.__version__, listed)
        self._registered: list[GpuRange] = []
        self._cufiles: dict[int, Any] = {}
        """``CuFile`` or None, by descriptor."""

    @property
    def name(self) -> str:
        """See ``Device``."""
        return self.kind

    def attach_memory(self, memory: Buffer) -> None:
        """See ``Device``. GPU memory is registered whole, as it was allocated; what is not is
        copied within the GPU."""
        if not isinstance(memory, GpuRange) or self._compat:
            return
        try:
            self._kvikio.memory_register(memory)
            self._registered.append(memory)
        except RuntimeError as error:
            logger.warning("kvdisk could not register %d bytes of GPU memory with cuFile: %s", memory.nbytes, error)

    def attach_file(self, fd: int) -> None:
        """See ``Device``. kvikio opens the file once more by its descriptor, whatever its name is
        by now."""
        super().attach_file(fd)
        self._cufiles[fd] = None
        try:
            writable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
            self._cufiles[fd] = self._kvikio.CuFile(f"/proc/self/fd/{fd}", "r+" if writable else "r")
        except (OSError, RuntimeError) as error:
            logger.warning("kvdisk cannot open a segment for GPUDirect: %s", error)

    def detach_file(self, fd: int) -> None:
        """See ``Device``."""
        super().detach_file(fd)
        file = self._cufiles.pop(fd, None)
        if file is not None:
            file.close()

    def close(self) -> None:
        """See ``Device``. Registered memory is still there: it is closed after the device."""
        super().close()
        for fd in list(self._cufiles):
            self.detach_file(fd)
        while self._registered:
            try:
                self._kvikio.memory_deregister(self._registered.pop())
            except RuntimeError as error:
                logger.warning("kvdisk could not take GPU memory back from cuFile: %s", error)

    def _run(self, op: Op, call: Call) -> int:
        """Move the bytes of a call, each buffer as one task of kvikio's, and wait until nothing
        moves any more."""
        file, offset = self._cufiles[call.fd], call.offset
        if file is None:
            return errno.EIO
        move = file.pread if op is Op.READ else file.pwrite
        try:
            for buffer in call.buffers:
                if move(buffer, None, offset, buffer.nbytes).get() != buffer.nbytes:
                    return errno.EIO
                offset += buffer.nbytes
        except Exception as error:
            return _errno_of(error)
        return 0


_TELLING = {
    os.strerror(number): number for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.ENODEV)
}


def _errno_of(error: Exception) -> int:
    """Return what an error of kvikio's says in words; EIO for a short read ("EOF") and whatever
    else it may be."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    return next((number for words, number in _TELLING.items() if words in str(error)), errno.EIO)
