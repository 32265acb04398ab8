# SPDX-License-Identifier: Apache-2.0
"""The device suite over two devices as one, every other batch by the other, and what only the pair
promises."""

from __future__ import annotations

import errno

import pytest
from support.addressed_device import AddressedDevice, range_of

from kvdisk.device import pair as pair_module
from kvdisk.device.base import Device, Op, Transfer
from kvdisk.device.memory import MemoryDevice
from kvdisk.device.pair import PairDevice
from kvdisk.device.posix import PosixDevice
from kvdisk.geometry import ALIGNMENT
from kvdisk.testing.device_conformance import WAIT_S, FilesConformance, fill, make_memory
from kvdisk.testing.faulty_device import FaultPlan, FaultyDevice


class Alternating(PairDevice):
    """Gives the buffers of every other batch as addresses."""

    def submit(self, op, batch):
        if self._tickets % 2:
            batch = [item._replace(buffers=tuple(map(range_of, item.buffers))) for item in batch]
        return super().submit(op, batch)


class TestPair(FilesConformance):
    def make_device(self) -> Device:
        return Alternating(PosixDevice(threads=2), AddressedDevice(PosixDevice(threads=1)))


@pytest.fixture
def parts():
    """Two references, the second for GPU memory, over a file each has by itself; both can be
    held."""
    host, gpu = (FaultyDevice(MemoryDevice(file_bytes=ALIGNMENT), FaultPlan()) for _ in range(2))
    pair = PairDevice(host, AddressedDevice(gpu))
    pair.attach_file(7)
    return pair, host, gpu


def test_each_batch_goes_to_the_device_of_its_memory(parts):
    pair, host, gpu = parts
    memory = make_memory(2 * ALIGNMENT)
    fill(memory, 1)
    one, other = memory[:ALIGNMENT], memory[ALIGNMENT:]
    tickets = [
        pair.submit(Op.WRITE, [Transfer(7, 0, (one,))]),
        pair.submit(Op.WRITE, [Transfer(7, 0, (range_of(other),))]),
    ]
    assert sorted(pair.drain()) == [(ticket, {}) for ticket in tickets]
    assert host.inner.contents(7) == one
    assert gpu.inner.contents(7) == other
    with pytest.raises(AssertionError):
        pair.submit(Op.WRITE, [Transfer(7, 0, (one,)), Transfer(7, 0, (range_of(other),))])


@pytest.mark.parametrize("held", [0, 1])
def test_one_that_hangs_does_not_hold_up_the_other(parts, held):
    pair, *both = parts
    both[held].plan.hold = True
    memory = make_memory(2 * ALIGNMENT)
    halves = [memory[:ALIGNMENT], range_of(memory[ALIGNMENT:])]
    tickets = [pair.submit(Op.READ, [Transfer(7, 0, (half,))]) for half in halves]
    assert pair.poll(WAIT_S) == [(tickets[1 - held], {})]
    assert pair.poll() == []
    both[held].release(1)
    assert pair.poll(WAIT_S) == [(tickets[held], {})]


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


class Slow(MemoryDevice):
    """Ends everything so many seconds of the clock after it was made; its waits move the clock."""

    def __init__(self, clock: Clock, ends_s: float) -> None:
        super().__init__(file_bytes=ALIGNMENT)
        self.clock, self.ends_s = clock, clock.now_s + ends_s

    def poll(self, timeout_s: float = 0.0):
        self.clock.now_s += max(0.0, min(timeout_s, self.ends_s - self.clock.now_s))
        return super().poll() if self.clock.now_s >= self.ends_s else []


@pytest.mark.parametrize("ends_s", [(0.05, 3600.0), (3600.0, 0.05)])
def test_it_waits_for_both_at_once(monkeypatch, ends_s):
    """Each ends a batch while the other has one that never ends."""
    clock = Clock()
    monkeypatch.setattr(pair_module, "time", clock)
    pair = PairDevice(Slow(clock, ends_s[0]), AddressedDevice(Slow(clock, ends_s[1])))
    pair.attach_file(7)
    memory = make_memory(2 * ALIGNMENT)
    for half in (memory[:ALIGNMENT], range_of(memory[ALIGNMENT:])):
        pair.submit(Op.READ, [Transfer(7, 0, (half,))])
    assert len(pair.poll(WAIT_S)) == 1
    assert clock.now_s - 1000.0 == pytest.approx(0.05, abs=2 * pair_module._TURN_S)


def test_a_file_that_only_the_host_can_take(parts):
    pair, _, gpu = parts
    gpu.detach_file(7)
    memory = make_memory(2 * ALIGNMENT)
    assert pair.submit(Op.READ, [Transfer(7, 0, (memory[:ALIGNMENT],))]) == 1
    assert pair.submit(Op.READ, [Transfer(7, 0, (range_of(memory[ALIGNMENT:]),))]) == 2
    assert sorted(pair.drain()) == [(1, {}), (2, {0: errno.EBADF})]
