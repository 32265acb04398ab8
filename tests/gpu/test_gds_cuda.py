# SPDX-License-Identifier: Apache-2.0
"""The device suite over GPUDirect Storage, with GPU memory and a real drive. Skipped, with the
reason, where it is not.

The files lie in pytest's temporary directory: give it a drive that takes part with ``--basetemp``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from through_gpu import ThroughGpu

from kvdisk.device.base import Device
from kvdisk.device.gds import GdsDevice, gds_unavailable
from kvdisk.testing.device_conformance import DeviceConformance

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")


@pytest.fixture(scope="module", autouse=True)
def here(tmp_path_factory):
    why = gds_unavailable()
    if why is not None:
        pytest.skip(f"no GPUDirect Storage: {why}")
    TestGdsOnGpu.directory = tmp_path_factory.mktemp("gds")


class TestGdsOnGpu(DeviceConformance):
    directory: Path

    def setup_method(self, _method) -> None:
        self.fds: dict[int, Path] = {}
        super().setup_method(_method)

    def make_device(self) -> Device:
        return ThroughGpu(GdsDevice(), GPU)

    def open_file(self) -> int:
        path = self.directory / str(len(self.fds))
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
        self.fds[fd] = path
        return fd

    def close_files(self) -> None:
        for fd, path in self.fds.items():
            os.close(fd)
            path.unlink()

    def stored(self, fd: int, byte_count: int) -> bytes:
        return self.fds[fd].read_bytes()[:byte_count]
