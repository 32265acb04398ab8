# SPDX-License-Identifier: Apache-2.0
"""The trial of a drive: it finds out what is true, chooses by it, and leaves nothing behind."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import tempfile
from unittest.mock import Mock

import pytest
from support.faulty_device import FaultPlan, FaultyDevice
from support.open_files import open_below

from kvdisk.device import aio, posix, probe
from kvdisk.device.posix import PosixDevice
from kvdisk.device.probe import choose_device


class SilentDevice(PosixDevice):
    def poll(self, timeout_s=0.0):
        return []

    def close(self):
        raise AssertionError("closing it would wait for ever")


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.parametrize("served", [True, False])
def test_what_serves_is_tried_and_nothing_is_left(tmp_path, monkeypatch, served):
    if not served:
        monkeypatch.setattr(aio, "serves", lambda _fd: False)
    directory = tmp_path / "store"
    before = open_below(tmp_path)
    report = probe.probe(directory)
    assert report.direct is True and report.kernel_queue
    assert report.name == "posix-threads" or (served and report.name == "posix-aio")
    assert f"{directory} with the device {report.name} (with O_DIRECT)" in report.line
    assert ("right" if report.name == "posix-aio" else aio.NOT_ASYNCHRONOUS) in report.why
    assert list(directory.iterdir()) == []
    assert open_below(tmp_path) == before


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (FaultPlan(lose={1}), "what was written is not what is on the drive"),
        (FaultPlan(corrupt={2: 5}), "what was read is not what is on the drive"),
        (FaultPlan(fail={1: errno.EIO}), "a write that was tried failed: Input/output error"),
        (FaultPlan(fail={3: errno.EIO}), "a read that was tried failed: Input/output error"),
    ],
)
def test_a_queue_that_moves_wrong_bytes_is_not_used(tmp_path, plan, said):
    def make(queue):
        return FaultyDevice(PosixDevice(), plan) if queue else PosixDevice(kernel_queue=False)

    report = probe.probe(tmp_path, make)
    assert (report.kernel_queue, report.name) == (False, "posix-threads")
    assert said in report.line
    assert said in probe.probe(tmp_path, lambda _: FaultyDevice(PosixDevice(), plan)).line, "where nothing is right"


def test_where_o_direct_is_refused_the_line_says_so(tmp_path, monkeypatch):
    real = os.pwritev

    def refuse(fd, buffers, offset):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", refuse)
    before = open_below(tmp_path)
    report = probe.probe(tmp_path)
    assert (report.direct, report.name) == (False, "posix-threads")
    assert "without O_DIRECT" in report.line
    assert open_below(tmp_path) == before and list(tmp_path.iterdir()) == []


def test_where_the_queue_was_not_compiled_the_reason_is_that_and_what_to_do(tmp_path, monkeypatch, caplog):
    """The log, the trial's line and so ``kvdisk check`` say the same."""
    monkeypatch.setattr(aio, "__file__", "/nowhere/aio.py")
    monkeypatch.setattr(aio, "library", aio.library.__wrapped__)
    monkeypatch.setattr(aio, "serves", lambda _fd: True)
    posix._say_lost.cache_clear()
    with caplog.at_level(logging.WARNING, "kvdisk"):
        report = probe.probe(tmp_path)
    assert (report.name, report.why) == ("posix-threads", aio.NOT_COMPILED)
    (said,) = caplog.messages
    assert said.endswith(aio.NOT_COMPILED) and "install gcc" in aio.NOT_COMPILED


def test_where_each_file_has_a_name_what_a_killed_probe_left_goes_with_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "_O_TMPFILE_WORKS", False)
    (tmp_path / ".probe-77").touch()
    assert "with the device posix" in probe.probe(tmp_path).line
    assert list(tmp_path.iterdir()) == []


def test_a_full_drive_is_said_and_left_as_it_is(tmp_path, monkeypatch):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=full))
    before = open_below(tmp_path)
    assert "the drive is full" in probe.probe(tmp_path).line
    assert open_below(tmp_path) == before


def test_a_drive_that_does_not_answer_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "_given_up", [])
    monkeypatch.setattr(probe, "GIVE_UP_S", 0.01)
    report = probe.probe(tmp_path, lambda queue: SilentDevice(kernel_queue=queue))
    assert report.why.startswith("the drive has not answered")
    assert [kept[0].name for kept in probe._given_up][-1] == "posix-threads", "threads were tried last"
    for kept in probe._given_up:
        PosixDevice.close(kept[0])


@pytest.mark.parametrize(
    ("wanted", "queue", "direct", "levels"),
    [
        ("posix", False, True, []),
        ("auto", False, True, ["WARNING"]),
        ("gds", False, True, ["WARNING"]),
        ("auto", True, True, ["DEBUG"]),
        ("auto", True, False, ["WARNING"]),
        ("auto", True, None, ["WARNING"]),
    ],
)
def test_what_is_chosen_is_what_the_trial_found(
    tmp_path, monkeypatch, caplog, needs_queue, wanted, queue, direct, levels
):
    """And the log warns where a drive is not served at its best."""
    found = probe.ProbeReport(tmp_path, "posix", queue, direct, "the queue moved wrong bytes")
    monkeypatch.setattr(probe, "probe", lambda _: found)
    with caplog.at_level(logging.DEBUG, "kvdisk"):
        device = choose_device(wanted, [tmp_path])
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [(level, found.line) for level in levels]
    with open(tmp_path / "file", "w+b") as file:
        monkeypatch.setattr(aio, "serves", lambda _fd: True)
        device.attach_file(file.fileno())
        assert (device.name == "posix-threads") == (wanted != "posix" and not queue)
        device.close()
