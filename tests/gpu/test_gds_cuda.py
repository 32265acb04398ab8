# SPDX-License-Identifier: Apache-2.0
"""The device suite over GPUDirect Storage, with GPU memory and a real drive. Skipped, with the
reason, where it is not.

The files lie in pytest's temporary directory: give it a drive that takes part with ``--basetemp``.
"""

from __future__ import annotations

import os

import pytest
import torch
from through_gpu import ThroughGpu

from kvdisk.device.base import Device
from kvdisk.device.gds import GdsDevice, gds_unavailable
from kvdisk.testing.device_conformance import FilesConformance

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")


@pytest.fixture(scope="module", autouse=True)
def here(tmp_path_factory):
    why = gds_unavailable()
    if why is not None:
        pytest.skip(f"no GPUDirect Storage: {why}")
    TestGdsOnGpu.parent = tmp_path_factory.mktemp("gds")


class TestGdsOnGpu(FilesConformance):
    flags = os.O_DIRECT

    def make_device(self) -> Device:
        return ThroughGpu(GdsDevice(), GPU)
