# SPDX-License-Identifier: Apache-2.0
"""The device suite over kvikio, and what the wrapping of its futures promises. ``test_gds_suite``
runs this file in a process of its own, where a stub of the driver is found: kvikio moves host
memory then, in its own threads."""

from __future__ import annotations

import errno
import os
import resource
import signal
import threading
from collections.abc import Sequence
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from gpu_measures import drive_route
from support.addressed_device import CpuLanes, range_of
from support.device_conformance import FilesConformance

from kvdisk.device import gds
from kvdisk.device.base import Buffer, Device, GpuRange, Op, Transfer
from kvdisk.device.gds import GdsDevice
from kvdisk.geometry import ALIGNMENT


class ByAddress:
    """A device that is given host memory as addresses only, as it is given a GPU's."""

    def __init__(self, inner: GdsDevice) -> None:
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def submit(self, op: Op, batch: Sequence[Transfer]) -> int:
        return self.inner.submit(op, [item._replace(buffers=tuple(map(self._range, item.buffers))) for item in batch])

    def _range(self, buffer: Buffer) -> GpuRange:
        return buffer if isinstance(buffer, GpuRange) else range_of(buffer)


class Alternating(ByAddress):
    """Every other batch is of host memory."""

    batches = 0

    def submit(self, op: Op, batch: Sequence[Transfer]) -> int:
        self.batches += 1
        return super().submit(op, batch) if self.batches % 2 else self.inner.submit(op, batch)


class TestBothMemories(FilesConformance):
    flags = os.O_DIRECT

    def make_device(self) -> Device:
        return Alternating(GdsDevice(3, compat=True))


class TestGds(FilesConformance):
    flags = os.O_DIRECT

    def make_device(self) -> Device:
        return ByAddress(GdsDevice(3, compat=True))

    # What only this device promises

    def test_one_call_is_one_task_of_kvikio(self) -> None:
        """The future of a call that is cut ends with its last task, although others may still be
        moving bytes."""
        fd = self.attach()
        data = self.written(fd, 5 * gds.PIECE_BYTES // 2)
        calls: list[tuple[int, int]] = []
        queues, file = self.device._gpu_files[fd]

        class Watched:
            def pread(self, buffer, size, offset, task_size):
                calls.append((buffer.nbytes, task_size))
                return file.pread(buffer, size, offset, task_size)

            def close(self):
                file.close()

        self.device._gpu_files[fd] = queues, Watched()
        assert self.read(fd, 0, len(data)) == data
        assert all(size == task_size <= gds.PIECE_BYTES for size, task_size in calls)
        assert sum(size for size, _ in calls) == len(data)

    def test_writes_that_hang_hold_up_no_read(self) -> None:
        fd = self.attach()
        data = self.written(fd, ALIGNMENT)
        queues, file = self.device._gpu_files[fd]
        go = threading.Event()

        class Hanging:
            pread, close = file.pread, file.close

            def pwrite(self, *arguments):
                go.wait()
                return file.pwrite(*arguments)

        self.device._gpu_files[fd] = queues, Hanging()
        memory = self.memory(ALIGNMENT)
        for at in range(1, 9):  # more than it has threads
            self.device.submit(Op.WRITE, [Transfer(fd, at * ALIGNMENT, (memory,))])
        try:
            assert self.read(fd, 0, ALIGNMENT) == data
        finally:
            go.set()
        assert not any(outcome.errors for outcome in self.await_outcomes(8))

    def test_a_full_drive_keeps_its_number(self) -> None:
        fd = self.attach()
        self.written(fd, ALIGNMENT)
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        memory = self.memory(4 * ALIGNMENT)
        resource.setrlimit(resource.RLIMIT_FSIZE, (ALIGNMENT, limit[1]))
        try:
            found = self.run(Op.WRITE, Transfer(fd, ALIGNMENT, (memory,)))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert found == {0: errno.EFBIG}
        full = RuntimeError(f"Unable to write. Linux system/library function call error: {os.strerror(errno.ENOSPC)}")
        assert gds._errno_of(full) == errno.ENOSPC

    def test_a_file_that_can_only_be_read(self) -> None:
        writable = self.attach()
        data = self.written(writable, 2 * ALIGNMENT)
        fd = os.open(self.fds[writable], os.O_RDONLY | os.O_DIRECT)
        self.fds[fd] = self.fds[writable]
        self.device.attach_file(fd)
        self.fds[writable].unlink()  # its owner deletes it
        assert self.read(fd, 0, len(data)) == data
        assert self.run(Op.WRITE, Transfer(fd, 0, (self.memory(ALIGNMENT),))) == {0: errno.EIO}

    def test_a_file_that_cufile_does_not_take_fails_its_transfers(self, monkeypatch) -> None:
        fd = self.open_file()
        refused = RuntimeError("cuFile error at: GPUDirect Storage not supported on current file")
        with monkeypatch.context() as patch:
            patch.setattr(self.device._kvikio, "CuFile", Mock(side_effect=refused))
            self.device.attach_file(fd)
        assert self.run(Op.READ, Transfer(fd, 0, (self.memory(ALIGNMENT),))) == {0: errno.EIO}


@pytest.mark.parametrize("stored_straight", [True, False])
@pytest.mark.parametrize("loaded_straight", [True, False])
def test_the_whole_way_of_a_mover(tmp_path, stored_straight, loaded_straight) -> None:
    """Blocks of CPU tensors, by kvikio's hands and the host's, each reading what the other
    wrote."""
    route = drive_route(CpuLanes(), tmp_path, partial(GdsDevice, compat=True), 1 << 16, 48, direct=True)
    direct = route._mover._runner._resources.direct
    before = [layer.clone() for layer in route.layers]
    for straight, act in ((stored_straight, route.store), (loaded_straight, route.load)):
        every = frozenset({0}) if straight else frozenset()
        direct.loads, direct.stores = frozenset({0}) if act == route.store else every, every
        act()
        if act == route.store:
            for layer in route.layers:
                layer.zero_()
    for layer, was in zip(route.layers, before, strict=True):
        assert torch.equal(layer, was)
    route.close()
