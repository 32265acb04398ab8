# SPDX-License-Identifier: Apache-2.0
"""Cases, rounds, ratios, and that a measurement moves what it says."""

from __future__ import annotations

import errno
import threading
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from kvdisk.cli.bench import rounds
from kvdisk.cli.bench.cases import (
    Case,
    Contender,
    Flow,
    Group,
    GroupResult,
    Layout,
    Role,
    Sample,
    Series,
    Unmeasured,
    cpu_ratio,
    ratio,
)
from kvdisk.cli.bench.drive import LANES, DriveRun, auto_depth, block_order, try_device, under_way_bytes
from kvdisk.cli.bench.figures import rows_of
from kvdisk.cli.bench.gpu import GpuRun
from kvdisk.cli.bench.mover import MoverRun, blocks_of
from kvdisk.cli.bench.rounds import _spin, run_group, timed
from kvdisk.cli.output import parse_size
from kvdisk.device.base import Op
from kvdisk.device.memory import MemoryDevice
from kvdisk.errors import ConfigError, DeviceError
from kvdisk.testing.faulty_device import FaultPlan, FaultyDevice
from kvdisk.worker.arena import Arena

KIB = 1024
BLOCK = 16 * KIB
FD = 7


def case(flow: Flow = Flow.READ, layout: Layout = Layout.SCATTERED, **fields) -> Case:
    return Case(flow, BLOCK, fields.pop("depth", 6), layout, 25 * BLOCK, **fields)


def drive(plan: FaultPlan | None = None) -> tuple[DriveRun, FaultyDevice, Arena]:
    arena = Arena([BLOCK], [64], pin=False)
    arena.memory[:] = np.arange(arena.total_bytes, dtype=np.uint64).view(np.uint8)[: arena.total_bytes].tobytes()
    device = FaultyDevice(MemoryDevice(file_bytes=32 * BLOCK), plan)
    return DriveRun(device, FD, arena.memory), device, arena


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("flow", Flow)
@pytest.mark.parametrize("depth", [1, 6, 25])
def test_each_block_is_moved_once_a_pass(flow, layout, depth):
    run, device, _ = drive()
    wanted = case(flow, layout, depth=depth)
    sample = run.measure(wanted, 2)
    assert sample.seconds > 0 and sample.cpu_seconds is not None
    moved: dict[int, int] = {}
    for _, transfers in device.submitted:
        for fd, offset, size in transfers:
            assert fd == FD and offset % BLOCK == 0
            for block in range(offset // BLOCK, (offset + size) // BLOCK):
                moved[block] = moved.get(block, 0) + 1
    assert moved == dict.fromkeys(range(25), 2)
    batch = -(-depth // min(LANES, depth))
    assert all(sum(size for _, _, size in transfers) <= batch * BLOCK for _, transfers in device.submitted)
    if layout is Layout.CONTIGUOUS:
        assert all(len(transfers) == 1 for _, transfers in device.submitted), "neighbours travel as one"
    ops = {op for op, _ in device.submitted}
    assert ops == {Flow.READ: {Op.READ}, Flow.WRITE: {Op.WRITE}, Flow.MIXED: {Op.READ, Op.WRITE}}[flow]


def test_batches_under_way_have_memory_of_their_own():
    run, device, arena = drive(FaultPlan(hold=True))
    used: list[tuple[int, int]] = []
    real = device.submit

    def submit(op, batch):
        for transfer in batch:
            for buffer in transfer.buffers:
                start = np.frombuffer(buffer, np.uint8).ctypes.data
                used.append((start, start + buffer.nbytes))
        if len(used) == 6 * BLOCK // BLOCK:
            device.plan.hold = False
            device.release()
        return real(op, batch)

    device.submit = submit
    wanted = case(depth=6)
    assert under_way_bytes(6, BLOCK) <= arena.total_bytes
    run.measure(wanted, 1)
    first = sorted(used[:6])
    assert all(one[1] <= two[0] for one, two in pairwise(first))


def test_a_failing_drive_fails_the_measurement_and_nothing_is_left_under_way():
    run, device, _ = drive(FaultPlan(fail={3: errno.EIO}, hang={5}))
    with pytest.raises(DeviceError) as caught:
        run.measure(case(), 1)
    assert caught.value.errno == errno.EIO
    assert device.drain() == [], "what was under way has ended, so that the memory can go"


def test_scattered_is_scattered_and_the_same_every_time():
    order = block_order(case())
    assert order == block_order(case()) != list(range(25)) and sorted(order) == list(range(25))
    assert block_order(case(layout=Layout.CONTIGUOUS)) == list(range(25))


def test_depth_follows_the_mover_within_reason():
    assert [auto_depth(size) for size in (1 << 20, 8 << 20, 64 << 20, 4096)] == [32, 4, 4, 256]


def test_every_contender_is_measured_once_a_round_in_another_order():
    calls: list[str] = []
    ended: list[bool] = []

    def make(stack):
        stack.callback(ended.append, True)
        return [
            Contender(name, Role.OURS, lambda passes, name=name: calls.append(f"{name}{passes}") or Sample(1.0))
            for name in "abc"
        ]

    steps: list[str] = []
    result = run_group(Group(case(passes=3), make), 4, steps.append)
    assert ended == [True] and len(steps) == 15
    rounds = ["".join(call[0] for call in calls[start : start + 3]) for start in range(0, 15, 3)]
    assert all(sorted(one) == list("abc") for one in rounds) and len(set(rounds[1:])) > 1
    assert len({one[0] for one in rounds[1:]}) > 1, "not always the same begins"
    assert [call[1] for call in calls] == ["1"] * 3 + ["3"] * 12, "to warm up, one pass is enough"
    assert all(len(one.samples) == 4 and one.moved_bytes == 3 * 25 * BLOCK for one in result.series)


def test_a_contender_that_fails_is_left_out_and_said():
    def fail(_: int) -> Sample:
        raise DeviceError(errno.EIO, "the drive")

    made = [Contender("good", Role.OURS, lambda _: Sample(2.0)), Contender("bad", Role.OURS, fail)]
    result = run_group(Group(case(), lambda _: made), 3)
    assert [one.name for one in result.series] == ["good"] and "the drive" in result.dropped["bad"]


def test_the_busy_thread_runs_beside_what_is_in_this_process_only():
    seen: list[tuple[str, bool]] = []

    def look(name: str) -> Sample:
        seen.append((name, any(thread.name == "kvdisk-bench-busy" for thread in threading.enumerate())))
        return Sample(1.0, 1.0)

    made = [
        Contender("ours", Role.OURS, lambda _: look("ours")),
        Contender("fio", Role.LIMIT, lambda _: look("fio"), in_process=False),
    ]
    result = run_group(Group(case(busy=True), lambda _: made), 1)
    assert set(seen) == {("ours", True), ("fio", False)}
    assert result.series[0].cpu_rates == [], "the thread's time is nobody's"
    assert not any(thread.name == "kvdisk-bench-busy" for thread in threading.enumerate())


def test_the_busy_thread_runs_on_without_waiting():
    class Ended:
        """Of an event all that may be asked: whether it was set. It was after so many times."""

        asked = 0

        def is_set(self) -> bool:
            self.asked += 1
            return self.asked > 1000

    ended = Ended()
    _spin(ended)
    assert ended.asked == 1001


def test_a_sample_is_of_wall_time_and_of_this_process(monkeypatch):
    class Clocks:
        CLOCK_PROCESS_CPUTIME_ID = 77
        wall_s, cpu_s = 1000.0, 50.0

        def perf_counter(self) -> float:
            return self.wall_s

        def clock_gettime(self, which: int) -> float:
            assert which == self.CLOCK_PROCESS_CPUTIME_ID
            return self.cpu_s

        def move(self) -> None:
            self.wall_s += 2.0
            self.cpu_s += 0.5

    clocks = Clocks()
    monkeypatch.setattr(rounds, "time", clocks)
    assert timed(clocks.move) == Sample(2.0, 0.5)


def test_ratios_are_of_the_same_round():
    fast = Series("fast", Role.OURS, 100, [Sample(1.0, 4.0), Sample(2.0, 4.0), Sample(4.0, 8.0), Sample(10.0, 4.0)])
    slow = Series("slow", Role.LIMIT, 100, [Sample(2.0, 2.0), Sample(4.0, 2.0), Sample(8.0, 4.0), Sample(20.0, 2.0)])
    assert ratio(fast, slow) == 2.0 and ratio(slow, fast) == 0.5
    assert cpu_ratio(fast, slow) == 2.0
    assert fast.rate == 37.5


@pytest.mark.parametrize("flow", [Flow.READ, Flow.WRITE])
def test_the_mover_loads_what_it_stored(flow):
    device = FaultyDevice(MemoryDevice(file_bytes=blocks_bytes()))
    wanted = Case(flow, BLOCK, 4, Layout.CONTIGUOUS, 20 * BLOCK, route="mover")
    run = MoverRun(device, FD, wanted, cpu_tier=True)
    stored = len(device.submitted)
    assert {op for op, _ in device.submitted} == {Op.WRITE}
    run.measure(2)
    moved = device.submitted[stored:]
    assert {op for op, _ in moved} == {Op.READ if flow is Flow.READ else Op.WRITE}
    assert sum(size for _, batch in moved for _, _, size in batch) == 2 * 20 * (BLOCK + 4096)
    run.promote(1)
    device.plan.corrupt = {device._reads + 1: 9000}
    if flow is Flow.READ:
        run.measure_unverified(1)
        device.plan.corrupt = {device._reads + 1: 9000}
        with pytest.raises(Unmeasured, match="CHECKSUM"):
            run.measure(1)
    run.close()


def blocks_bytes() -> int:
    assert blocks_of(4096 + 20 * (BLOCK + 4096), BLOCK) == 20
    assert blocks_of(4095 + 20 * (BLOCK + 4096), BLOCK) == 19
    return 4096 + 20 * (BLOCK + 4096)


class Past:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class HostLanes:
    """``Lanes`` without a GPU."""

    device = torch.device("cpu")

    def on(self, lane):
        return nullcontext()

    def record(self, lane):
        return Past()

    def wait(self, lane, event) -> None:
        pass

    def numbers(self, values):
        return torch.tensor(values)


@pytest.mark.parametrize("flow", [Flow.READ, Flow.WRITE])
def test_the_copier_moves_every_block(flow):
    run = GpuRun(HostLanes(), case(flow, depth=4), pin=False)
    blocks, slots = run._gpu, run._arena.tensor(0)[:, 4096:]
    source, target = (slots, blocks) if flow is Flow.READ else (blocks, slots)
    source.copy_(torch.randint(0, 256, source.shape, dtype=torch.uint8))
    target.zero_()
    run.measure(1)
    part = 25 * BLOCK // 32
    for block, slot in enumerate(block_order(case(flow))):
        layers = [blocks[at * part : (at + 1) * part].view(25, BLOCK // 32)[block] for at in range(32)]
        assert torch.equal(torch.cat(layers), slots[slot])
    run.measure_plain(1)
    run.close()


def test_a_device_that_cannot_be_made_says_why(monkeypatch):
    monkeypatch.setattr("kvdisk.cli.bench.drive.DEVICES", {"x": ("kvdisk.device.nowhere", "Device")})
    device, why = try_device("x")
    assert device is None and "kvdisk.device.nowhere" in why


def test_sizes_as_people_write_them():
    for text, wanted in (("64K", 65536), ("2MiB", 2 << 20), ("1g", 1 << 30), ("4096", 4096), ("1MB", 10**6)):
        assert parse_size("--total", text) == wanted
    with pytest.raises(ConfigError, match="--total"):
        parse_size("--total", "much")


def group_result(wanted: Case, **rates: tuple[Role, float]) -> GroupResult:
    """A group with one round of each contender; ``rates``: MB/s by name, ``_`` for a blank."""
    moved = wanted.total_bytes * wanted.passes
    series = [
        Series(name.replace("_", " "), role, moved, [Sample(moved / 1e6 / rate, rate)])
        for name, (role, rate) in rates.items()
    ]
    return GroupResult(wanted, series)


def test_a_row_is_as_good_as_its_worst_case():
    limit, ours, peer = Role.LIMIT, Role.OURS, Role.PEER
    run = Case(Flow.READ, 1 << 20, 32, Layout.CONTIGUOUS, 64 << 20)
    small = Case(Flow.READ, 256 * KIB, 128, Layout.SCATTERED, 64 << 20)
    results = [
        group_result(run, fio=(limit, 2000), fio_x_8=(limit, 1000), posix=(ours, 1800), nixl=(ours, 1960)),
        group_result(replace(run, flow=Flow.WRITE), fio=(limit, 2000), posix=(ours, 2100), nixl=(ours, 1000)),
        group_result(small, fio=(limit, 1000), posix=(ours, 100), nixl=(ours, 840)),
        group_result(replace(small, busy=True), fio=(limit, 1000), posix=(ours, 760)),
        group_result(
            replace(run, block_bytes=64 * KIB, route="peer"), fio=(limit, 950), posix=(ours, 900), one=(peer, 400),
            four=(peer, 500),
        ),
        group_result(
            replace(run, block_bytes=2 << 20, route="mover"), posix=(ours, 1000), nixl=(ours, 900),
            posix_through_the_mover=(ours, 700), nixl_through_the_mover=(ours, 860),
            **{"posix_through_the_mover,_unverified": (ours, 700), "nixl_through_the_mover,_unverified": (ours, 1000)},
        ),
        group_result(
            replace(run, route="cpu"), bare_preadv_loop=(limit, 1.0), posix=(ours, 1.4), nixl=(ours, 1.6),
            **{"posix,_verified": (ours, 3.0), "nixl,_verified": (ours, 4.0)},
        ),
    ]  # fmt: skip
    rows = rows_of(results)
    found = [(row.wanted, None if row.reached is None else round(row.reached, 3), row.holds) for row in rows]
    assert found == [
        (0.95, 0.98, True),
        (0.85, 0.84, False),
        (0.75, 0.76, True),
        (1.0, None, None),
        (1.3, None, None),
        (2.0, 1.8, False),
        (0.85, 0.86, True),
        (0.95, 0.86, False),
        (1.5, 1.6, False),
        (4.0, 4.0, True),
    ]
    assert [cell.text for cell in rows[0].cells] == ["read 1 MiB 0.98 (nixl)", "write 1 MiB 1.05 (posix)"]
    assert [cell.text for cell in rows[5].cells] == ["read 64 KiB 1.80 (posix; fio 1.90)"]
    assert [cell.name for cell in rows[6].cells] == ["nixl"]
