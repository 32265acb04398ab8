# SPDX-License-Identifier: Apache-2.0
"""System calls that the kernel refuses, as in a sandbox: by a seccomp filter, which is real."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import threading
from collections.abc import Callable, Mapping

import pytest

_SET_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD, _EQUALS, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBERS = {  # of the calls, by machine: as audit names it, and in the order of _NAMES
    "x86_64": (0xC000003E, (206, 207, 209, 208, 290, 285, 319, 316, 91, 268, 439, 204, 28, 74, 73)),
    "aarch64": (0xC00000B7, (0, 1, 2, 4, 19, 47, 279, 276, 52, 53, 439, 123, 233, 82, 32)),
}
_NAMES = (
    *("io_setup", "io_destroy", "io_submit", "io_getevents", "eventfd2", "fallocate", "memfd_create", "renameat2"),
    *("fchmod", "fchmodat", "faccessat2", "sched_getaffinity", "madvise", "fsync", "flock"),
)


def run_refusing(refused: Mapping[str, int], act: Callable[[], object]) -> None:
    """Do something on a thread for which the kernel answers calls with these errnos, as for the
    threads and processes that it starts. Raises what that raises."""
    if platform.machine() not in _NUMBERS:
        pytest.skip(f"the numbers of system calls are not known here: {platform.machine()}")
    raised: list[BaseException] = []

    def run() -> None:
        try:
            _refuse(refused)
            act()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)  # a filter is a thread's own, and for good
    thread.start()
    thread.join()
    for error in raised:
        raise error


def _refuse(refused: Mapping[str, int]) -> None:
    machine, numbers = _NUMBERS[platform.machine()]
    program = _step(_LOAD, 4) + _step(_EQUALS, machine, 1, 0) + _step(_RETURN, _ALLOW) + _step(_LOAD, 0)
    for name, number in refused.items():
        program += _step(_EQUALS, numbers[_NAMES.index(name)], 0, 1) + _step(_RETURN, _ERRNO | number)
    program += _step(_RETURN, _ALLOW)
    held = ctypes.create_string_buffer(program)
    given = ctypes.create_string_buffer(struct.pack("=HxxxxxxQ", len(program) // 8, ctypes.addressof(held)))
    libc = ctypes.CDLL(None, use_errno=True)
    for call in ((_SET_NO_NEW_PRIVILEGES, 1, 0), (_SET_SECCOMP, _FILTER, ctypes.addressof(given))):
        if libc.prctl(*(ctypes.c_ulong(each) for each in call), 0, 0):
            pytest.skip(f"no system call can be refused here: {os.strerror(ctypes.get_errno())}")


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
