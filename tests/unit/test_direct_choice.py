# SPDX-License-Identifier: Apache-2.0
"""What a start makes of the way between drive and GPU: kept, not kept, or refused in one sentence.
Without a GPU."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import ClassVar

import pytest
from ranks import CpuLanes
from support.addressed_device import AddressedDevice
from support.memory_device import MemoryDevice

from kvdisk import assembly
from kvdisk.assembly import _pair_with_gpu
from kvdisk.config import Config
from kvdisk.device import probe
from kvdisk.device.posix import PosixDevice
from kvdisk.errors import ConfigError
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.testing.faulty_device import FaultPlan, FaultyDevice
from kvdisk.worker import direct as directs
from kvdisk.worker.direct import choose_direct

GEOMETRY = Geometry((GroupGeometry(0, 16, 20000), GroupGeometry(1, 16, 3000)), 1, 16)
SIZES = GEOMETRY.slot_sizes
COUNTS = (4, 4)


class OnFiles(AddressedDevice):
    """Both kinds of memory by system calls; notes whether it was closed."""

    made: ClassVar[list[OnFiles]] = []

    def __init__(self, inner=None, **_) -> None:
        super().__init__(inner or PosixDevice(threads=1))
        self.closed = False
        OnFiles.made.append(self)

    def close(self) -> None:
        super().close()
        self.closed = True


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    OnFiles.made = []
    # Its clock stands still: all repetitions are made, and no drive is silent, however long the
    # machine takes.
    monkeypatch.setattr(directs, "time", SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(probe, "GIVE_UP_S", 600.0)


def choose(path, make_device=OnFiles, *, always=False):
    return choose_direct(path, SIZES, COUNTS, CpuLanes(), make_device, always=always, file_bytes=1 << 20)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_what_is_demanded_goes_however_fast(tmp_path):
    before = open_files()
    choice = choose(tmp_path, always=True)
    assert choice.usable and choice.direct.loads == choice.direct.stores == {0, 1}
    assert choice.direct.staging.slot_counts == COUNTS
    assert [device.closed for device in OnFiles.made] == [True]
    assert open_files() == before and list(tmp_path.iterdir()) == []
    choice.direct.staging.close()


def test_what_cannot_be_made_is_said(tmp_path, monkeypatch):
    def refuse(*_):
        raise ConfigError("kvikio cannot be used: no\nluck")

    found = choose(tmp_path, refuse)
    assert (found.direct, found.usable) == (None, False) and "kvikio cannot be used: no luck" in found.line
    assert "No such file" in choose(tmp_path / "missing").line
    monkeypatch.setattr("kvdisk.worker.gpu_staging.GpuStaging", refuse)
    assert "no luck" in choose(tmp_path).line, "as where a GPU is full"


def test_a_drive_that_hangs_keeps_its_memory_and_file(tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "GIVE_UP_S", 0.0)
    monkeypatch.setattr(directs, "_given_up", [])
    before = open_files()
    plan = FaultPlan(hold=True)
    choice = choose(tmp_path, lambda: OnFiles(FaultyDevice(MemoryDevice(), plan)), always=True)
    assert (choice.direct, choice.usable) == (None, False) and "has not answered" in choice.line
    (device, fd), (arena, staging) = directs._given_up
    assert not device.closed and open_files() == before + 1
    assert arena.memory.nbytes and staging.memory.nbytes
    os.close(fd)
    arena.close()


def pair(tmp_path, lanes, device="auto", **more):
    config = Config.from_mapping({"store_dirs": str(tmp_path), "nvme_bytes": "1GiB", "device": device, **more})
    return _pair_with_gpu(config, GEOMETRY, lanes, PosixDevice())


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(assembly, "gds_unavailable", lambda: None)
    monkeypatch.setattr(assembly, "GdsDevice", OnFiles)


def test_a_start_with_a_gpu_has_a_device_of_both_memories(tmp_path, here, monkeypatch):
    monkeypatch.setattr(directs, "FASTER", 0.0)
    device, direct = pair(tmp_path, CpuLanes(), "gds", gpu_staging_bytes="1MiB")
    assert device.name == "addressed(posix)" and direct.loads == {0, 1}
    assert sum(size * count for size, count in zip(SIZES, direct.staging.slot_counts, strict=True)) <= 1 << 20
    assert [made.closed for made in OnFiles.made] == [True, False]
    device.close()
    direct.staging.close()


@pytest.mark.parametrize(
    ("lanes", "folder", "staging_bytes", "gds", "why"),
    [
        (CpuLanes, "", 1 << 20, "the kernel module is not loaded", "the kernel module is not loaded"),
        (lambda: None, "", 1 << 20, None, "the model is not on a GPU"),
        (CpuLanes, "", 0, None, "gpu_staging_bytes is 0"),
        (CpuLanes, "missing", 1 << 20, None, ".*No such file.*"),
    ],
)
def test_a_start_without_gpudirect(tmp_path, here, monkeypatch, lanes, folder, staging_bytes, gds, why):
    """What is demanded is refused in one sentence; otherwise there is the host's device alone."""
    monkeypatch.setattr(assembly, "gds_unavailable", lambda: gds)
    with pytest.raises(ConfigError, match=rf"^device 'gds' cannot be used: {why}\.$"):
        pair(tmp_path / folder, lanes(), "gds", gpu_staging_bytes=staging_bytes)
    for device in ("auto", "posix"):
        found, direct = pair(tmp_path / folder, lanes(), device, gpu_staging_bytes=staging_bytes)
        assert (type(found), direct) == (PosixDevice, None)
        found.close()
