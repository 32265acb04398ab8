# SPDX-License-Identifier: Apache-2.0
"""What can go wrong under the mover, and who hears of it."""

from __future__ import annotations

import threading
from unittest.mock import Mock

import pytest
import torch
from ranks import GPU_BLOCKS, Rank, move, segment_of
from support.late_lanes import LateLanes
from support.waits import WAIT_S

from kvdisk.messages import JobKind, Plan, Reason
from kvdisk.worker.copier import CudaLanes, HostCopier, Lane
from kvdisk.worker.gpu_staging import GpuStaging, PayloadSums


def test_void_reaches_a_result_that_nobody_has_polled_for(rank):
    moves = rank.stored(2)
    load = rank.submit(JobKind.LOAD, moves)
    while rank.mover.turn():
        pass
    rank.mover.submit(Plan(void=(load, 999)))
    assert rank.run()[load].failed == dict.fromkeys(range(2), Reason.CANCELLED)


def test_close_waits_for_what_has_begun_and_cancels_it_with_the_rest(rank):
    rank.do(JobKind.STORE, [move(b, 0, b, rank.cpu(0, b)) for b in range(GPU_BLOCKS)])
    rank.device.plan.hold = True
    demote = rank.submit(JobKind.DEMOTE, [move(b, cpu=rank.cpu(0, b), nvme=b) for b in range(GPU_BLOCKS)])
    rank.run()
    load = rank.submit(JobKind.LOAD, [move(0, 0, 0, nvme=0)])
    rank.erase()
    rank.run()
    held = rank.device.held
    unseen = rank.submit(JobKind.STORE, [move(1, 0, 1, rank.cpu(0, 1))])
    file_job = rank.submit(JobKind.DROP_SEGMENT, segment=segment_of(0))
    rank.mover.close()
    results = rank.poll()
    assert held > 1 and rank.device.held == 0
    assert results[demote].failed == dict.fromkeys(range(GPU_BLOCKS), Reason.CANCELLED)
    assert results[load].failed == {0: Reason.CANCELLED}  # read, but not scattered any more
    assert rank.is_erased(0, 0)
    assert results[unseen].failed == {0: Reason.CANCELLED}
    assert results[file_job].failed == {-1: Reason.CANCELLED}
    assert rank.files.closed
    rank.mover.close()
    assert rank.poll() is results


def test_after_an_error_of_ours_nobody_waits_for_a_drive_that_hangs(monkeypatch):
    """Loads and urgent stores are answered when nothing is copied any more, and the drive is waited
    for after that."""

    class Broken(HostCopier):
        def gather(self, *args, **fields):
            raise ZeroDivisionError("planted")

    rank = Rank(copier=Broken([]), threaded=True)
    drain, ends = rank.device.drain, threading.Event()
    monkeypatch.setattr(rank.device, "drain", lambda: (ends.wait(WAIT_S), drain())[1])
    rank.device.plan.hold = True
    load = rank.submit(JobKind.LOAD, [move(1, 0, 1, nvme=1)])
    urgent = rank.job(JobKind.STORE, [move(2, 0, 2, rank.cpu(0, 2))])
    rank.mover.protect(Plan((urgent,), urgent=(urgent.id,)))
    assert rank.mover.wait_any(WAIT_S)
    with pytest.raises(ZeroDivisionError, match="planted"):
        rank.mover.poll()
    while load not in rank.poll():
        assert not ends.is_set()
    later = rank.submit(JobKind.LOAD, [move(1, 0, 1, nvme=1)])
    rank.poll()
    assert [rank.results[each].failed for each in (load, urgent.id, later)] == [{0: Reason.CANCELLED}] * 3
    assert not rank.files.closed
    ends.set()
    rank.mover.close()
    assert rank.files.closed and not rank.mover.out


def test_a_halt_begins_nothing_more_and_ends_what_has_begun():
    rank = Rank()
    moves = rank.stored(2)
    rank.device.plan.hold = True
    begun = rank.submit(JobKind.LOAD, moves)
    rank.mover.turn()
    rank.mover.halt()
    late = rank.submit(JobKind.STORE, [move(7, 0, 7, rank.cpu(0, 7))])
    assert rank.run()[late].failed == {0: Reason.CANCELLED}
    assert begun not in rank.results and rank.mover.out == {begun}, "its read is under way"
    rank.let_go()
    assert rank.run()[begun].failed == dict.fromkeys(range(2), Reason.CANCELLED)
    assert all(rank.is_erased(0, block) for block in range(2)), "nothing is written to its GPU blocks"
    rank.mover.close()


@pytest.mark.parametrize("kernel", ["gather", "scatter", "sums of a store", "sums of a load", "headers"])
def test_a_full_gpu_fails_a_part_and_the_mover_goes_on(kernel, monkeypatch, caplog):
    straight = kernel not in {"gather", "scatter"}
    rank = Rank(cpu_slots=0, on_gpu=True, direct=straight)
    kept = [rank.payload(0, block) for block in range(3)]
    loads, is_load = rank.stored(3), kernel in {"scatter", "sums of a load"}
    owner, name = {
        "gather": (torch, "index_select"),
        "scatter": (torch.Tensor, "index_copy_"),
        "headers": (GpuStaging, "_start_headers"),
    }.get(kernel, (PayloadSums, "of"))
    with monkeypatch.context() as full:
        full.setattr(owner, name, Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory.")))
        kind = JobKind.LOAD if is_load else JobKind.STORE
        assert rank.do(kind, loads) == dict.fromkeys(range(3), Reason.NO_GPU_MEMORY)
    assert all(rank.is_erased(0, block) for block in range(3))
    assert [record.message for record in caplog.records if "no memory left" in record.message]
    assert rank.do(JobKind.LOAD, loads) == {}, "there is memory again, and what was stored is there"
    assert [rank.payload(0, block) for block in range(3)] == kept
    rank.close()


@pytest.mark.parametrize("end", ["close", "sleep"])
def test_a_copy_that_fails_half_way_has_ended_before_its_memory_goes(end, monkeypatch):
    """Such a copy has no event that could be waited for."""
    lanes, select = LateLanes(0), torch.index_select
    monkeypatch.setattr("ranks.CpuLanes", lambda: lanes)
    rank = Rank(cpu_slots=0, on_gpu=True)  # each slot is a part of its own

    def fail_second(*args, **fields):
        monkeypatch.setattr(torch, "index_select", Mock(side_effect=RuntimeError("planted")))
        return select(*args, **fields)

    monkeypatch.setattr(torch, "index_select", fail_second)
    rank.submit(JobKind.STORE, [move(block, 0, block, nvme=block) for block in range(2)])
    with pytest.raises(RuntimeError, match="planted"):
        rank.run()
    assert any(lanes.given(lane) for lane in Lane), "nothing is under way"
    rank.mover.leave_gpu() if end == "sleep" else rank.mover.close()
    assert not any(lanes.given(lane) for lane in Lane)


def test_a_wait_that_a_capture_of_graphs_forbids_is_tried_again(monkeypatch):
    """Else memory would be given back under copies: the GPU goes on with them."""
    ended, forbidden = [], RuntimeError("operation not permitted when stream is capturing")
    forbidden.error_code = 900
    stream = Mock(synchronize=Mock(side_effect=[forbidden, forbidden, None]))
    monkeypatch.setattr("kvdisk.worker.copier._CAPTURE_WAIT_S", 0.0)
    lanes = CudaLanes.__new__(CudaLanes)
    lanes._streams = dict.fromkeys(Lane, stream)
    lanes.synchronize(Lane.LOAD)
    ended.append(stream.synchronize.call_count)
    stream.synchronize = Mock(side_effect=RuntimeError("an illegal memory access was encountered"))
    with pytest.raises(RuntimeError, match="illegal"):
        lanes.synchronize(Lane.LOAD)
    assert [*ended, stream.synchronize.call_count] == [3, 1]
