# SPDX-License-Identifier: Apache-2.0
"""The probe of a drive: it finds out what is true, chooses by it, leaves nothing behind, and takes its time only."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from kvdisk.device import choice, nixl_ring, probe
from kvdisk.device.base import Op
from kvdisk.device.choice import choose_device, make_like
from kvdisk.device.nixl import NixlDevice
from kvdisk.device.posix import PosixDevice
from kvdisk.device.probe import ProbeReport, Speed
from kvdisk.geometry import ALIGNMENT
from kvdisk.testing.faulty_device import FaultPlan, FaultyDevice

MIB = 1 << 20
BLOCK = 64 * 1024 + ALIGNMENT


def quick(directory, block_bytes=BLOCK, **more):
    return probe.probe(directory, block_bytes, budget_s=0.05, file_bytes=8 * MIB, run_bytes=2 * MIB, **more)


class SlowDevice(PosixDevice):
    def submit(self, op, batch):
        time.sleep(0.02)
        return super().submit(op, batch)


class SilentDevice(PosixDevice):
    def poll(self, timeout_s=0.0):
        time.sleep(timeout_s)
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
    assert f"blocks of {BLOCK} bytes" in report.line and f"posix {speed.bytes_per_s / 1e6:.0f}/" in report.line
    assert f"runs of {2 * MIB} bytes" in report.line


@pytest.mark.parametrize("block_bytes", [ALIGNMENT, 8 * MIB, 100 * MIB])
def test_blocks_of_any_size(tmp_path, block_bytes):
    report = quick(tmp_path, block_bytes=block_bytes)
    assert report.problem == "" and len(report.speeds) == 8
    assert all(each.bytes_each <= 2 * MIB for each in report.speeds)


def test_it_keeps_to_its_time(tmp_path):
    began_s = time.monotonic()
    report = probe.probe(tmp_path, BLOCK, makers={"a": SlowDevice, "b": SlowDevice})
    assert report.seconds <= time.monotonic() - began_s
    # Sixteen calls of 20 ms each in what is tried, and eight cells of at most 50 ms, then the budget.
    assert report.seconds < 4


def test_the_slower_one_is_not_chosen(tmp_path):
    assert quick(tmp_path, makers={"slow": SlowDevice, "posix": PosixDevice}).chosen == "posix"
    assert quick(tmp_path, makers={"posix": PosixDevice, "slow": SlowDevice}).chosen == "posix"


@pytest.mark.parametrize(("queued", "chosen"), [(True, "posix"), (False, "nixl")])
def test_of_two_alike_posix_goes_first_where_it_has_a_queue_of_the_kernels(tmp_path, monkeypatch, queued, chosen):
    monkeypatch.setattr(probe, "serves", lambda fd: queued)
    assert quick(tmp_path, makers={"nixl": SlowDevice, "posix": SlowDevice}).chosen == chosen


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
def test_a_device_that_moves_wrong_bytes_is_not_used_however_fast(tmp_path, plan, said):
    makers = {"wrong": lambda: FaultyDevice(PosixDevice(), plan), "slow": SlowDevice}
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


def test_a_drive_that_does_not_answer_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "_GIVE_UP_S", 0.2)
    monkeypatch.setattr(probe, "_given_up", [])
    began_s = time.monotonic()
    report = quick(tmp_path, makers={"silent": SilentDevice})
    assert time.monotonic() - began_s < 5
    assert report.chosen == "posix" and report.why.startswith("the drive has not answered")
    (kept,) = probe._given_up
    PosixDevice.close(kept[0]["silent"])


def test_a_probe_that_is_killed_leaves_nothing(tmp_path):
    program = (
        f"from kvdisk.device.probe import probe; import sys; from pathlib import Path\n"
        f"print('go', flush=True); probe(Path({str(tmp_path)!r}), 65536, budget_s=60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        time.sleep(0.5)
        child.send_signal(signal.SIGKILL)
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
        monkeypatch.setattr(choice, "probe", partial(quick, makers=makers))
        device = choose_device("auto", [tmp_path], BLOCK)
        assert device.name == next(iter(makers))
        device.close()
        (record,) = caplog.records
        assert f"with the device {device.name}" in record.getMessage()


def test_without_directories_nothing_is_probed(monkeypatch):
    monkeypatch.setattr(choice, "probe", None)
    device = choose_device("auto", [], BLOCK)
    assert device.name == "posix"
    device.close()
