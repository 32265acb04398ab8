# SPDX-License-Identifier: Apache-2.0
"""The device suite over the kernel's queue, and over the same files where the kernel offers none."""

from __future__ import annotations

import errno
import os

import pytest

from kvdisk.device import aio
from kvdisk.device.base import Device
from kvdisk.device.posix import PosixDevice
from kvdisk.geometry import ALIGNMENT
from kvdisk.testing.device_conformance import FilesConformance


class DirectFiles(FilesConformance):
    flags = os.O_DIRECT

    def make_device(self) -> Device:
        return PosixDevice(threads=3)


@pytest.fixture
def _any_file_system(monkeypatch) -> None:
    # Where temporary files are on another one, the kernel waits in the submission, and all else is the same.
    monkeypatch.setattr(aio, "serves", lambda _fd: True)


@pytest.mark.usefixtures("_any_file_system")
class TestKernelQueue(DirectFiles):
    pass


@pytest.mark.usefixtures("_any_file_system")
class TestKernelQueueShortCalls(DirectFiles):
    """More calls than the kernel takes at a time, and every cut falls between buffers of one transfer."""

    def make_device(self) -> Device:
        return PosixDevice(longest_bytes=ALIGNMENT)


class TestThreadsOnDirectFiles(DirectFiles):
    def make_device(self) -> Device:
        return PosixDevice(threads=3, kernel_queue=False)


@pytest.mark.usefixtures("_any_file_system")
class TestKernelWithoutQueue(DirectFiles):
    """The kernel forbids it, or has no room: threads serve as well."""

    @pytest.fixture(autouse=True)
    def _forbid(self, monkeypatch) -> None:
        def forbidden(_kernel, _most_events):
            raise OSError(errno.EAGAIN, "fs.aio-max-nr")

        monkeypatch.setattr(aio._Kernel, "setup", forbidden)
