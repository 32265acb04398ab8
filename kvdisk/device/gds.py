# SPDX-License-Identifier: Apache-2.0
"""GPUDirect Storage through kvikio: whether it can be used here, and the device that also moves GPU
memory. Only this module imports ``kvikio``, and late.

kvikio imports and opens files without a GPU, falls back to host memory silently, and spins for ever
where ``/proc/modules`` is missing. So this module looks at files first, and asks kvikio in a
process of its own (``main``), which may hang or die without harm.

A kvikio future of several tasks ends with the last one, while others may still move bytes if that
one failed: so one call is one task. Errors come without a number, and nothing can be cancelled. A
call may first wait for the model's work on the GPU's default stream: so threads of ours make the
calls.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import importlib.util
import logging
import os
import signal
from pathlib import Path
from typing import Any

from kvdisk.child import ChildProcess, ParentPipe
from kvdisk.device.base import Buffer, GpuRange, Op, Transfer
from kvdisk.device.batches import Call, DriveQueue
from kvdisk.device.posix import PosixDevice
from kvdisk.errors import ConfigError
from kvdisk.geometry import ALIGNMENT

logger = logging.getLogger("kvdisk")

PIECE_BYTES = 16 << 20
"""The most bytes that cuFile moves at once."""
_THREADS = 16
"""Threads of ours for each drive and direction, with one call under way each."""
_KVIKIO_THREADS = 128
"""Threads of kvikio, in one pool for all drives: one drive that hangs leaves enough for three
others."""

_ASK_TIMEOUT_S = 60.0
_MAIN = __name__
"""The module whose ``main`` asks."""


def gds_unavailable(proc: Path = Path("/proc")) -> str | None:
    """Return why GPUDirect Storage cannot be used on this machine, as one clause, or None where it
    can.

    None says that driver and library are there; only a trial can say whether a file system takes
    part. Waits a second or two for kvikio, a minute at most. Any thread; raises nothing. ``proc``:
    for tests.
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
    return _ask_kvikio(_MAIN, _ASK_TIMEOUT_S)


def _ask_kvikio(module: str, timeout_s: float) -> str | None:
    try:
        child = ChildProcess(module)
    except OSError as error:
        return f"kvikio cannot be asked: {error.strerror}"
    try:
        said: str | None = child.pipe.receive(timeout_s)
    except TimeoutError:
        return f"kvikio did not answer within {timeout_s:g} s"
    except (OSError, EOFError):
        ended = child.end()
        return f"kvikio does not start: {(ended.last_words or f'its process ended with {ended.how}')[:200]}"
    else:
        return said
    finally:
        child.end()


def main(descriptor: int, parent: int) -> None:
    """Be the process: ask the driver and kvikio, and say why it cannot be used, or None."""
    pipe = ParentPipe(descriptor, parent)
    signal.alarm(2 * int(_ASK_TIMEOUT_S))  # what spins in C sees no end of the parent
    pipe.send(_why_unusable(ctypes.CDLL("libcuda.so.1").cuInit(0)))


def _why_unusable(driver_code: int) -> str | None:
    """Return why kvikio cannot be used, by the CUDA driver's answer and its own."""
    from kvikio import cufile_driver, defaults

    if driver_code:
        return f"the CUDA driver does not start (error {driver_code})"
    if defaults.is_compat_mode_preferred():
        return "kvikio prefers its way through host memory"
    return None if cufile_driver.get("is_gds_available") else "the cuFile driver says that it is not available"


class GdsDevice(PosixDevice):
    """``PosixDevice`` that also moves GPU memory (``GpuRange``), without a copy in host memory.

    GPU memory has queues of its own: ``gpu_threads`` threads for each drive and direction, which
    call kvikio. Make one only where ``gds_unavailable`` returned None: kvikio may not fall back
    here, so what cannot be moved directly fails. A transfer of GPU memory fails with EIO where
    cuFile cannot take its file. ``compat``: for tests with a stub of the driver; ranges are of host
    memory then. Raises ConfigError where kvikio cannot be used.

    kvikio's settings hold for the process, and all of them are set here.
    """

    def __init__(self, gpu_threads: int = _THREADS, *, kernel_queue: bool = True, compat: bool = False) -> None:
        super().__init__(longest_bytes=PIECE_BYTES, kernel_queue=kernel_queue)
        try:
            import kvikio
            from kvikio import CompatMode, defaults
        except Exception as error:  # without nvidia-cufile it is no ImportError
            raise ConfigError(f"kvikio cannot be used: {error}") from error
        self._kvikio = kvikio
        self._compat = compat
        self._gpu_threads = gpu_threads
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
        self._gpu_queues: dict[int, dict[Op, DriveQueue]] = {}
        """The queues for GPU memory, by drive (``st_dev``)."""
        self._gpu_files: dict[int, tuple[dict[Op, DriveQueue], Any]] = {}
        """The queues, and the ``CuFile`` or None, by descriptor."""

    @property
    def name(self) -> str:
        return f"{super().name}+gds"

    def attach_memory(self, memory: Buffer) -> None:
        """See ``Device``. GPU memory is registered whole, as it was allocated; memory that is not
        registered is copied within the GPU."""
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
        file, drive = None, os.fstat(fd).st_dev
        if drive not in self._gpu_queues:
            name = f"kvdisk-gds-{len(self._gpu_queues) + 1}"
            self._gpu_queues[drive] = self._make_thread_queues(name, self._gpu_threads, self._run_on_gpu)
        try:
            writable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
            file = self._kvikio.CuFile(f"/proc/self/fd/{fd}", "r+" if writable else "r")
        except (OSError, RuntimeError) as error:
            logger.warning("kvdisk cannot open a segment for GPUDirect: %s", error)
        self._gpu_files[fd] = self._gpu_queues[drive], file

    def detach_file(self, fd: int) -> None:
        super().detach_file(fd)
        _, file = self._gpu_files.pop(fd, (None, None))
        if file is not None:
            file.close()

    def close(self) -> None:
        """See ``Device``. Registered memory must still be there: the caller frees it after the
        device is closed."""
        super().close()
        for places in self._gpu_queues.values():
            for place in places.values():
                place.close()
        self._gpu_queues.clear()
        for fd in list(self._gpu_files):
            self.detach_file(fd)
        while self._registered:
            try:
                self._kvikio.memory_deregister(self._registered.pop())
            except RuntimeError as error:
                logger.warning("kvdisk could not take GPU memory back from cuFile: %s", error)

    def _queues_of(self, transfer: Transfer) -> dict[Op, DriveQueue] | None:
        if not isinstance(transfer.buffers[0], GpuRange):
            return super()._queues_of(transfer)
        queues, _ = self._gpu_files.get(transfer.fd, (None, None))
        return queues

    def _run_on_gpu(self, op: Op, call: Call) -> int:
        """Move the bytes of a call, each buffer as one task of kvikio's, and wait until nothing
        moves any more. Return 0 or an errno."""
        (_, file), offset = self._gpu_files[call.fd], call.offset
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
    """Return the errno that an error of kvikio's names in words; EIO for a short read ("EOF") and
    all others."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    return next((number for words, number in _TELLING.items() if words in str(error)), errno.EIO)
