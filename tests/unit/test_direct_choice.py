# SPDX-License-Identifier: Apache-2.0
"""What a start makes of the way between drive and GPU: by which speeds it is chosen, and what a way
that lies, fails or hangs comes to. Without a GPU."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from ranks import CpuLanes
from support.addressed_device import AddressedDevice
from support.faulty_device import FaultPlan, FaultyDevice
from support.memory_device import MemoryDevice
from support.open_files import open_below

from kvdisk import assembly
from kvdisk.config import Config
from kvdisk.device import probe
from kvdisk.device.base import GpuRange, Op
from kvdisk.device.posix import PosixDevice
from kvdisk.errors import ConfigError
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.worker import direct as directs
from kvdisk.worker.direct import choose_direct
from kvdisk.worker.gpu_staging import PayloadSums

GEOMETRY = Geometry((GroupGeometry(0, 16, 20000), GroupGeometry(1, 16, 3000)), 1, 16)
SIZES = GEOMETRY.slot_sizes
FILE_BYTES = 1 << 20
FAST, SLOW = 4e8, 1e8


class InRam(AddressedDevice):
    """Both kinds of memory over bytes in RAM, at a speed for each op, way, and whether slots are
    neighbours, in bytes per second. What goes straight by ``lies`` is written or read elsewhere."""

    def __init__(self, speeds=lambda *_: FAST, *, lies: Op | None = None, **plan) -> None:
        super().__init__(FaultyDevice(MemoryDevice(FILE_BYTES), FaultPlan(**plan)))
        self.speeds = speeds
        self.lies = lies
        self.now_s = 1000.0
        self.closed = False

    def submit(self, op, batch):
        direct = isinstance(batch[0].buffers[0], GpuRange)
        self.now_s += sum(b.nbytes for item in batch for b in item.buffers) / self.speeds(op, direct, len(batch) == 1)
        if direct and op is self.lies:
            batch = [item._replace(offset=item.offset + 4096) for item in batch]
        return super().submit(op, batch)

    def close(self) -> None:
        super().close()
        self.closed = True


@pytest.fixture
def choose(tmp_path, monkeypatch):
    """Choose by a trial of this device, by its own clock; the memory that is chosen is closed at
    the end."""
    stagings = []
    monkeypatch.setattr(probe, "GIVE_UP_S", 600.0)  # no drive is silent, however long the machine takes

    def choice(device, *, always=False):
        monkeypatch.setattr(directs, "time", SimpleNamespace(monotonic=lambda: device.now_s))
        found = choose_direct(tmp_path, SIZES, (4, 4), CpuLanes(), lambda: device, always=always, file_bytes=FILE_BYTES)
        stagings.extend([found.direct.staging] if found.direct else [])
        return found

    yield choice
    for staging in stagings:
        staging.close()


@pytest.mark.parametrize(
    ("speeds", "loads", "stores"),
    [
        (lambda op, direct, run: FAST if direct else SLOW, {0, 1}, {0, 1}),
        (lambda op, direct, run: SLOW if direct else FAST, set(), set()),
        (lambda op, direct, run: FAST if direct and op is Op.READ else SLOW, {0, 1}, set()),
        (lambda op, direct, run: FAST if direct and op is Op.WRITE else SLOW, set(), {0, 1}),
        (lambda op, direct, run: FAST if direct == run else SLOW, set(), set()),
    ],
    ids=["faster", "slower", "faster for reads", "faster for writes", "slower for single slots"],
)
def test_what_is_faster_is_chosen_by_direction(choose, speeds, loads, stores):
    chosen = choose(InRam(speeds))
    found = (chosen.direct.loads, chosen.direct.stores) if chosen.direct else (set(), set())
    assert found == (loads, stores)
    sizes = ", ".join(map(str, SIZES))
    for what, which in (("loads", loads), ("stores", stores)):
        assert (f"{what} of {sizes} bytes" in chosen.line) == bool(which)


def test_the_gpu_has_done_what_the_trial_asked_for_before_the_device_moves(tmp_path):
    """kvikio waits for no stream of ours."""
    device, lanes, settled = InRam(lambda *_: FAST), CpuLanes(), []
    submit = device.submit
    device.submit = lambda op, batch: settled.append(lanes.log.count(("record", None))) or submit(op, batch)
    found = choose_direct(tmp_path, SIZES, (4, 4), lanes, lambda: device, always=True, file_bytes=FILE_BYTES)
    found.direct.staging.close()
    made = 1
    assert settled[:4] == [made + 1, made + 1, made + 2, made + 2], "two trials, each of a write and a read"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"lies": Op.READ}, "what was read straight is not"),
        ({"lies": Op.WRITE}, "what was written straight is not"),
        ({"fail": {1: errno.EIO}}, "a write that was tried failed straight"),
        ({"fail": {3: errno.EIO}}, "a write that was tried failed in host memory"),
        ({"fail": {4: errno.EIO}}, "a read that was tried failed straight"),
    ],
)
def test_a_way_that_lies_or_fails_is_not_gone(choose, fault, said):
    """By the size in which it does; where it is demanded, by none."""
    speeds = lambda op, direct, run: FAST if direct else SLOW  # noqa: E731
    chosen = choose(InRam(speeds, **fault))
    assert f"of {SIZES[0]} bytes {said}" in chosen.line
    assert chosen.direct is None if "lies" in fault else chosen.direct.loads == chosen.direct.stores == {1}
    assert choose(InRam(speeds, **fault), always=True).direct is None


def test_a_gpu_that_computes_other_checksums_is_not_gone_to(choose, monkeypatch):
    of = PayloadSums.of

    def wrong(self, slots, payload_bytes, out):
        of(self, slots, payload_bytes, out)
        out[-1, 1] += 1

    monkeypatch.setattr(PayloadSums, "of", wrong)
    choice = choose(InRam(), always=True)
    assert choice.direct is None and "other checksums than a processor" in choice.line
    monkeypatch.setattr(PayloadSums, "of", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory.")))
    choice = choose(InRam(), always=True)
    assert choice.direct is None and "no memory for checksums" in choice.line


@pytest.mark.parametrize("always", [False, True])
def test_where_the_trial_of_a_later_size_breaks_off_nothing_goes_that_way(choose, monkeypatch, always):
    speed = directs._Trial._speed

    def breaks(trial, size_class, *how):
        if size_class == 1:
            raise RuntimeError("cuFile is gone")
        return speed(trial, size_class, *how)

    monkeypatch.setattr(directs._Trial, "_speed", breaks)
    chosen = choose(InRam(lambda op, direct, run: FAST if direct else SLOW), always=always)
    assert f"{SIZES[0]} bytes read" in chosen.line and "cuFile is gone" in chosen.line
    assert chosen.direct is None


def test_what_is_demanded_goes_however_slow_and_leaves_nothing_open(choose, tmp_path):
    device = InRam(lambda op, direct, run: SLOW if direct else FAST)
    chosen = choose(device, always=True)
    assert chosen.direct.loads == chosen.direct.stores == {0, 1}
    assert device.closed and list(tmp_path.iterdir()) == open_below(tmp_path) == []


def test_a_drive_that_hangs_keeps_its_memory_and_file(choose, tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(probe, "_given_up", kept)
    device = InRam(hold=True)
    monkeypatch.setattr(probe, "GIVE_UP_S", 0.0)
    chosen = choose(device, always=True)
    assert chosen.direct is None and "has not answered" in chosen.line
    assert not device.closed and len(open_below(tmp_path)) == 1
    ((of, _, owners),) = kept
    assert of is device and all(memory.memory.nbytes for memory in owners)


# -- as the assembly asks for it -----------------------------------------------------------------


def pair(tmp_path, lanes, device="auto", **more):
    config = Config.from_mapping({"store_dirs": str(tmp_path), "nvme_bytes": "1GiB", "device": device, **more})
    return assembly._pair_with_gpu(config, GEOMETRY, lanes, PosixDevice())


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(assembly, "gds_unavailable", lambda: None)
    monkeypatch.setattr(assembly, "GdsDevice", lambda **_: AddressedDevice(PosixDevice(threads=1)))


def test_a_start_with_a_gpu_has_a_device_of_both_memories(tmp_path, here):
    device, direct = pair(tmp_path, CpuLanes(), "gds", gpu_staging_bytes="1MiB")
    assert device.name == "addressed(posix)" and direct.loads == {0, 1}
    assert sum(size * count for size, count in zip(SIZES, direct.staging.slot_counts, strict=True)) <= 1 << 20
    device.close()
    direct.staging.close()


@pytest.mark.parametrize(
    ("lanes", "folder", "staging_bytes", "gds", "why"),
    [
        (CpuLanes, "", 1 << 20, "the kernel module is not loaded", "the kernel module is not loaded"),
        (lambda: None, "", 1 << 20, None, "the model is not on a GPU"),
        (CpuLanes, "", 0, None, "gpu_staging_bytes is 0"),
        (CpuLanes, "missing", 1 << 20, None, ".*No such file.*"),
        (Mock, "", 1 << 20, None, ".*: out of memory"),
    ],
    ids=["no driver", "no GPU", "no staging", "no directory", "a full GPU"],
)
def test_a_start_without_gpudirect(tmp_path, here, monkeypatch, lanes, folder, staging_bytes, gds, why):
    """What is demanded is refused in one sentence; otherwise there is the host's device alone."""
    monkeypatch.setattr(assembly, "gds_unavailable", lambda: gds)
    if lanes is Mock:
        monkeypatch.setattr("kvdisk.worker.gpu_staging.GpuStaging", Mock(side_effect=RuntimeError("out of memory")))
    with pytest.raises(ConfigError, match=rf"^device 'gds' cannot be used: {why}\.$"):
        pair(tmp_path / folder, lanes(), "gds", gpu_staging_bytes=staging_bytes)
    for device in ("auto", "posix"):
        found, direct = pair(tmp_path / folder, lanes(), device, gpu_staging_bytes=staging_bytes)
        assert (type(found), direct) == (PosixDevice, None)
        found.close()
