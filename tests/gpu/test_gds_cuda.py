# SPDX-License-Identifier: Apache-2.0
"""The device suite over GPU memory and a real drive: over GPUDirect Storage, skipped with the
reason where it is not, and over what stands for it.

The files lie in pytest's temporary directory: give it a drive that takes part with ``--basetemp``.
"""

from __future__ import annotations

import os

import pytest
import torch
from place import GPU, REHEARSED
from support.addressed_device import view_of
from support.bounce_device import BounceDevice
from support.device_conformance import FilesConformance
from through_gpu import ThroughGpu

from kvdisk.device.base import Device
from kvdisk.device.gds import GdsDevice, gds_unavailable
from kvdisk.device.posix import PosixDevice

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def here(tmp_path_factory):
    parent = tmp_path_factory.mktemp("gds")
    for each in (TestGdsOnGpu, TestBouncedOnGpu):
        each.parent = parent


class TestGdsOnGpu(FilesConformance):
    flags = os.O_DIRECT

    def make_device(self) -> Device:
        why = "this is a CPU" if REHEARSED else gds_unavailable()
        if why is not None:
            self.close_files()
            pytest.skip(f"no GPUDirect Storage: {why}")
        return ThroughGpu(GdsDevice(), GPU)


class TestBouncedOnGpu(FilesConformance):
    flags = os.O_DIRECT

    def make_device(self) -> Device:
        if REHEARSED:
            return ThroughGpu(
                BounceDevice(PosixDevice(), lambda place: torch.frombuffer(view_of(place), dtype=torch.uint8)), GPU
            )
        return ThroughGpu(BounceDevice(PosixDevice()), GPU)
