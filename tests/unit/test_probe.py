# SPDX-License-Identifier: Apache-2.0
"""The probe of a drive: it finds out what is true, chooses by it, leaves nothing behind, and takes its time only."""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest

from kvdisk.device import aio, nixl_ring, probe
from kvdisk.device.base import Op
from kvdisk.device.nixl import NixlDevice
from kvdisk.device.posix import PosixDevice
from kvdisk.device.probe import ProbeReport, Speed, choose_device, make_like
from kvdisk.geometry import ALIGNMENT
from kvdisk.testing.faulty_device import FaultPlan, FaultyDevice

measured = probe.probe
MIB = 1 << 20
BLOCK = 64 * 1024 + ALIGNMENT


def quick(directory, block_bytes=BLOCK, **more):
    return measured(directory, block_bytes, budget_s=0.05, file_bytes=8 * MIB, run_bytes=2 * MIB, **more)


class Clock:
    """The probe's. It stands still, however long the machine takes, but for what a device of ours takes of it."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(probe, "time", made)
    return made


class PacedDevice(PosixDevice):
    """Each batch ends at once, and takes so many seconds of the clock."""

    def __init__(self, clock, batch_s, name="paced"):
        super().__init__()
        self.clock, self.batch_s, self.called = clock, batch_s, name
        self.ended = []

    @property
    def name(self):
        return self.called

    def submit(self, op, batch):
        ticket = super().submit(op, batch)
        self.ended += super().drain()
        self.clock.now_s += self.batch_s
        return ticket

    def poll(self, timeout_s=0.0):
        ended, self.ended = self.ended, []
        return ended


def paced(clock, **batches_s):
    """Return makers of devices that take so long for each batch."""
    return {name: partial(PacedDevice, clock, batch_s, name) for name, batch_s in batches_s.items()}


class SilentDevice(PosixDevice):
    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def poll(self, timeout_s=0.0):
        self.clock.now_s += timeout_s
        return []

    def close(self):
        raise AssertionError("closing it would wait for ever")


def open_files():
    return set(os.listdir("/proc/self/fd"))


def report_of(**speeds):
    """Return a report with the same speed in every cell, by device."""
    report = ProbeReport("/somewhere", BLOCK, 2 * MIB, direct=True)
    for device, speed in speeds.items():
        report.speeds += [
            Speed(device, op, run, 2 * MIB if run else BLOCK, (speed, speed)) for op in Op for run in (False, True)
        ]
    return report


def test_every_device_is_tried_and_measured_and_nothing_is_left(tmp_path):
    directory = tmp_path / "store"
    before = open_files()
    report = quick(directory)
    assert report.problem == "" and report.absent == {}
    assert report.direct is True
    cells = {(each.device, each.op, each.run, each.bytes_each) for each in report.speeds}
    assert cells == {
        (d, op, run, 2 * MIB if run else BLOCK) for d in probe.MAKERS for op in Op for run in (False, True)
    }
    assert all(each.bytes_per_s > 0 and 1 <= len(each.samples) <= 5 for each in report.speeds)
    assert report.chosen in probe.MAKERS
    assert list(directory.iterdir()) == []
    assert open_files() == before


def test_the_line_names_choice_reason_sizes_and_figures(tmp_path):
    report = quick(tmp_path)
    assert "\n" not in report.line
    for said in (str(tmp_path), f"the device {report.chosen}", "O_DIRECT", "reads and writes", "times as fast as"):
        assert said in report.line
    speed = report.speed("posix", Op.READ, False)
    figure = f"{report.name('posix')} {speed.bytes_per_s / 1e6:.0f}/"
    assert f"blocks of {BLOCK} bytes" in report.line and figure in report.line
    assert f"runs of {2 * MIB} bytes" in report.line


@pytest.mark.parametrize("block_bytes", [ALIGNMENT, 8 * MIB, 100 * MIB])
def test_blocks_of_any_size(tmp_path, block_bytes):
    report = quick(tmp_path, block_bytes=block_bytes)
    assert report.problem == "" and len(report.speeds) == 8
    assert all(each.bytes_each <= 2 * MIB for each in report.speeds)


def test_it_keeps_to_its_time(tmp_path, clock):
    """Four batches are tried, eight cells are measured once, a little longer than 50 ms each, and more within 0.6 s."""
    report = probe.probe(tmp_path, BLOCK, makers=paced(clock, a=0.02, b=0.02))
    assert report.seconds == clock.now_s - 1000.0
    assert 0.6 <= report.seconds - 4 * 0.02 <= 0.6 + 0.06
    assert {len(each.samples) for each in report.speeds} == {1, 2}


def test_a_machine_that_stops_for_long_measures_something(tmp_path, clock, monkeypatch):
    """Each look at the clock finds it a second later: nothing is measured twice, and no rate is 0."""
    ticks = itertools.count(1000)
    monkeypatch.setattr(probe, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    report = quick(tmp_path, makers=paced(clock, a=0.0))
    assert report.problem == "" and report.chosen == "a"
    assert all(len(each.samples) == 1 and each.bytes_per_s > 0 for each in report.speeds)


def test_the_slower_one_is_not_chosen(tmp_path, clock):
    assert quick(tmp_path, makers=paced(clock, nixl=0.02, posix=0.01)).chosen == "posix"
    assert quick(tmp_path, makers=paced(clock, posix=0.01, nixl=0.02)).chosen == "posix"


@pytest.mark.parametrize(("called", "chosen"), [("posix-aio", "posix"), ("posix-threads", "nixl")])
def test_of_two_alike_posix_goes_first_where_it_has_a_queue_of_the_kernels(tmp_path, clock, called, chosen):
    makers = {"nixl": partial(PacedDevice, clock, 0.01, "nixl"), "posix": partial(PacedDevice, clock, 0.01, called)}
    report = quick(tmp_path, makers=makers)
    assert report.chosen == chosen
    assert f"with the device {'posix-aio' if chosen == 'posix' else 'nixl'} (with O_DIRECT)" in report.line
    assert f"{called} " in report.line.partition("MB/s")[2]


def test_a_queue_that_the_kernel_refuses_is_not_claimed(tmp_path, monkeypatch):
    def refuse(_kernel, _most_events):
        raise OSError(errno.EAGAIN, "fs.aio-max-nr")

    monkeypatch.setattr(aio, "serves", lambda _fd: True)
    monkeypatch.setattr(aio._Kernel, "setup", refuse)
    report = quick(tmp_path, makers={"posix": PosixDevice})
    assert report.chosen == "posix"
    assert "with the device posix-threads (with O_DIRECT)" in report.line


@pytest.mark.parametrize(
    ("nixl", "posix", "chosen"), [(100, 50, "nixl"), (100, 100, "nixl"), (90, 100, "nixl"), (80, 100, "posix")]
)
def test_the_preferred_one_loses_only_to_one_that_is_clearly_faster(nixl, posix, chosen):
    found, why = probe.choose(report_of(nixl=nixl, posix=posix), ["nixl", "posix"])
    assert found == chosen
    assert ("would be taken if it were" in why) == (chosen == "nixl" and nixl < posix)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (FaultPlan(lose={1}), "what was written is not what is on the drive"),
        (FaultPlan(corrupt={2: 5}), "what was read is not what is on the drive"),
        (FaultPlan(fail={1: errno.EIO}), "a write that was tried failed: Input/output error"),
        (FaultPlan(fail={3: errno.EIO}), "a read that was tried failed: Input/output error"),
    ],
)
def test_a_device_that_moves_wrong_bytes_is_not_used_however_fast(tmp_path, clock, plan, said):
    makers = {"wrong": lambda: FaultyDevice(PosixDevice(), plan), **paced(clock, slow=0.02)}
    report = quick(tmp_path, makers=makers)
    assert report.absent == {"wrong": said}
    assert report.chosen == "slow"
    assert {each.device for each in report.speeds} == {"slow"}
    assert f"without wrong: {said}" in report.line


def test_without_nixl_the_line_says_so(tmp_path, monkeypatch):
    for name in nixl_ring._PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)
    report = quick(tmp_path)
    assert report.chosen == "posix"
    assert "without nixl: device 'nixl' needs the package nixl-cu13" in report.line
    assert report.why == "it is the only one that can be used"


def test_where_o_direct_is_refused_posix_is_used(tmp_path, monkeypatch):
    real = os.open

    def refuse(path, flags, *rest, **more):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    report = quick(tmp_path)
    assert (report.direct, report.chosen) == (False, "posix")
    assert "the file system refuses O_DIRECT" in report.line
    assert list(tmp_path.iterdir()) == []


def test_where_the_first_direct_write_is_refused_posix_is_used(tmp_path, monkeypatch):
    real = os.pwritev

    def refuse(fd, buffers, offset):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", refuse)
    before = open_files()
    report = quick(tmp_path)
    assert (report.direct, report.chosen) == (False, "posix")
    assert open_files() == before


def test_a_file_system_without_nameless_files(tmp_path, monkeypatch):
    """A name is there for a moment; one that a killed probe left goes with the next."""
    real = os.open

    def refuse(path, flags, *rest, **more):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    (tmp_path / ".probe-77-1").write_bytes(b"left")
    report = quick(tmp_path)
    assert report.problem == "" and report.direct is True
    assert list(tmp_path.iterdir()) == []


def test_a_full_drive_is_said_and_left_as_it_is(tmp_path, monkeypatch):
    def refuse(fd, offset, length):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = open_files()
    report = quick(tmp_path)
    assert (report.chosen, report.why) == ("posix", "the drive is full")
    assert "the drive is full" in report.line
    assert open_files() == before


def test_a_directory_that_cannot_be_had_is_said(tmp_path):
    report = quick(tmp_path / "missing" / "store")
    assert report.chosen == "posix" and "nothing could be tried there" in report.line
    (tmp_path / "file").touch()
    assert "nothing could be tried there" in quick(tmp_path / "file").line


def test_a_drive_that_does_not_answer_is_given_up(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(probe, "_given_up", [])
    report = quick(tmp_path, makers={"silent": partial(SilentDevice, clock)})
    assert 5.0 <= report.seconds < 5.1
    assert report.chosen == "posix" and report.why.startswith("the drive has not answered")
    (kept,) = probe._given_up
    PosixDevice.close(kept[0]["silent"])


def test_a_probe_that_is_killed_leaves_nothing(tmp_path):
    program = f"""
import time
from pathlib import Path
from kvdisk.device.posix import PosixDevice
from kvdisk.device.probe import probe
class Stopping(PosixDevice):
    def submit(self, op, batch):
        print("go", flush=True)
        time.sleep(3600)
probe(Path({str(tmp_path)!r}), 65536, makers={{"posix": Stopping}})
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"go\n"
        child.kill()
    assert list(tmp_path.iterdir()) == []


def test_the_device_that_is_named_is_the_device(tmp_path):
    for name, kind in (("posix", PosixDevice), ("nixl", NixlDevice)):
        device = choose_device(name, [tmp_path], BLOCK)
        assert type(device) is kind
        device.close()
        another = make_like(device)
        assert type(another) is kind
        another.close()
    host = choose_device("gds", [tmp_path], BLOCK)
    assert host.name in {"nixl", "posix"}, "for what goes through host memory"
    host.close()


def test_auto_is_what_the_probe_found_and_one_line_says_so(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "kvdisk")
    for makers in ({"nixl": NixlDevice}, {"posix": PosixDevice}):
        caplog.clear()
        monkeypatch.setattr(probe, "probe", partial(quick, makers=makers))
        device = choose_device("auto", [tmp_path], BLOCK)
        assert device.name == next(iter(makers))
        device.close()
        (record,) = caplog.records
        assert f"with the device {device.name}" in record.getMessage()


def test_without_directories_nothing_is_probed(monkeypatch):
    monkeypatch.setattr(probe, "probe", None)
    device = choose_device("auto", [], BLOCK)
    assert device.name == "posix"
    device.close()
