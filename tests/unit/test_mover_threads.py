# SPDX-License-Identifier: Apache-2.0
"""Which thread does what: all that touches a GPU is the mover's, and checksums have their own."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch
from ranks import GPU_BLOCKS, Rank, move
from support.faulty_device import FaultyDevice
from support.waits import WAIT_S

from kvdisk.messages import JobKind, Reason
from kvdisk.worker import host_work
from kvdisk.worker.copier import CudaCopier, Passed
from kvdisk.worker.slot_headers import SlotHeaders


def do(rank: Rank, kind: JobKind, moves) -> dict[int, int]:
    """Run a job on the mover's thread; return its failed moves."""
    job_id = rank.submit(kind, moves)
    rank.await_jobs(job_id)
    return rank.results[job_id].failed


def test_all_that_touches_the_gpu_is_on_the_models_gpu_and_in_inference_mode(monkeypatch):
    """From the memory that the device gets to know to the end of what is under way. The tensors
    are as vLLM makes them: outside of inference mode they cannot be written."""
    within, calls = threading.local(), []
    thread = CudaCopier.thread

    @contextmanager
    def noted_thread(copier):
        with thread(copier):
            within.yes = True
            yield
            within.yes = False

    def note(owner, name):
        act = getattr(owner, name)

        def noting(*args, **fields):
            calls.append((name, getattr(within, "yes", False)))
            return act(*args, **fields)

        monkeypatch.setattr(owner, name, noting)

    monkeypatch.setattr(CudaCopier, "thread", noted_thread)
    for owner, name in (
        *((CudaCopier, name) for name in ("gather", "scatter")),
        *((FaultyDevice, name) for name in ("attach_memory", "submit", "drain", "close")),
    ):
        note(owner, name)
    with torch.inference_mode():
        rank = Rank(on_gpu=True, threaded=True, direct=True)
    rank.await_jobs(*rank.opening)
    before = rank.payload(0, 3)
    assert do(rank, JobKind.STORE, [move(3, 0, 3, nvme=3)]) == {}
    assert do(rank, JobKind.LOAD, [move(3, 0, 7, nvme=3)]) == {}
    assert rank.payload(0, 7) == before
    rank.mover.close()
    assert {name for name, _ in calls} == {"gather", "scatter", "attach_memory", "submit", "drain", "close"}
    assert all(inside for _, inside in calls), calls


@pytest.mark.parametrize("is_pageable", [False, True])
def test_a_copy_of_memory_that_is_not_pinned_waits_for_the_model_without_a_lock(monkeypatch, is_pageable):
    """CUDA would wait for it in the copy, with the locks that a step takes to give stores up, and
    that sleep takes."""
    rank, free = Rank(on_gpu=True, threaded=True), []
    rank.await_jobs(*rank.opening)
    rank.arena.is_pageable = is_pageable

    class After:
        def synchronize(self):
            copies = rank.mover._runner.copies
            free.append(not copies._gathering.locked() and not copies._touching.locked())

        def query(self):
            return True

    monkeypatch.setattr(CudaCopier, "compute_done", lambda copier: After())
    monkeypatch.setattr(rank.mover._copier._lanes, "wait", lambda lane, event: None)
    assert do(rank, JobKind.STORE, [move(3, 0, 3, rank.cpu(0, 3))]) == {}
    assert do(rank, JobKind.LOAD, [move(3, 0, 5, rank.cpu(0, 3))]) == {}
    assert free == [True] * 2 * is_pageable
    rank.mover.close()


@pytest.mark.parametrize("kind", [JobKind.STORE, JobKind.LOAD])
def test_nothing_is_asked_every_moment_while_only_the_model_is_waited_for(monkeypatch, kind):
    """A step takes many milliseconds of the interpreter that it needs itself."""
    rank, passed, ended = Rank(on_gpu=True), [False], [False]

    class Named(Passed):
        def __init__(self, state):
            self.state = state

        def query(self):
            return self.state[0]

    rank.run()
    monkeypatch.setattr(CudaCopier, "compute_done", lambda copier: Named(passed))
    monkeypatch.setattr(rank.mover._copier._lanes, "wait", lambda lane, event: None)
    monkeypatch.setattr(rank.mover._copier._lanes, "record", lambda lane: Named(ended))
    runner = rank.mover._runner
    assert not runner.copying
    if kind is JobKind.LOAD:
        passed[0] = ended[0] = True
        assert rank.do(JobKind.STORE, [move(3, 0, 3, rank.cpu(0, 3))]) == {}
        passed[0] = ended[0] = False
    job_id = rank.submit(kind, [move(3, 0, 3, rank.cpu(0, 3))])
    rank.run()
    assert job_id not in rank.results and not runner.copying
    passed[0] = True
    assert runner.copying, "the copy goes on, and soon ends"
    ended[0] = True
    rank.run()
    assert rank.results[job_id].failed == {} and not runner.copying
    rank.close()


@pytest.fixture
def all_to_threads(monkeypatch):
    """No batch is so short that the mover's own thread seals or verifies it."""
    monkeypatch.setattr(host_work, "SHORT_BYTES", 0)


@pytest.mark.usefixtures("all_to_threads")
@pytest.mark.parametrize("on_gpu", [False, True])
def test_checksum_threads_seal_and_verify_what_the_movers_own_would(on_gpu):
    rank = Rank(on_gpu=on_gpu, threaded=True, checksum_threads=3)
    rank.await_jobs(*rank.opening)
    before = [rank.payload(0, block) for block in range(GPU_BLOCKS)]
    moves = [move(block, 0, block, rank.cpu(0, block)) for block in range(GPU_BLOCKS)]
    assert do(rank, JobKind.STORE, moves) == {}
    for slot, at, expected in ((5, 5000, Reason.CHECKSUM), (17, 100, Reason.HEADER)):
        rank.arena.view(0 if rank.classes[0] == 0 else 1, slot)[at] ^= 1
        rank.erase()
        found = do(rank, JobKind.LOAD, moves)
        assert found[slot] == expected
        assert rank.is_erased(0, slot), "nothing of a block that is not what it should be is served"
    good = [block for block in range(GPU_BLOCKS) if block not in {5, 17}]
    assert set(found) == {5, 17}
    assert [rank.payload(0, block) for block in good] == [before[block] for block in good]
    demoted = [move(block, 0, block, rank.cpu(0, block), nvme=block) for block in good]
    assert do(rank, JobKind.DEMOTE, demoted) == {}
    rank.erase()
    assert do(rank, JobKind.LOAD, [move(block, 0, block, nvme=block) for block in good]) == {}
    assert [rank.payload(0, block) for block in good] == [before[block] for block in good]
    rank.mover.close()


@pytest.mark.usefixtures("all_to_threads")
def test_several_parts_are_verified_at_once_and_others_go_on_meanwhile(monkeypatch):
    threads = 3
    meet, held, check = threading.Barrier(threads + 1), threading.Event(), SlotHeaders.check
    names = set()

    def checked(headers, part):
        names.add(threading.current_thread().name.rpartition("_")[0])
        if not held.is_set():
            meet.wait(WAIT_S)
            assert held.wait(WAIT_S)
        return check(headers, part)

    rank = Rank(threaded=True, checksum_threads=threads)
    rank.await_jobs(*rank.opening)
    moves = [move(block, 0, block, rank.cpu(0, block)) for block in range(16)]  # four parts
    assert do(rank, JobKind.STORE, moves) == {}
    monkeypatch.setattr(SlotHeaders, "check", checked)
    load = rank.submit(JobKind.LOAD, moves)
    meet.wait(WAIT_S)
    assert do(rank, JobKind.DEMOTE, [move(0, 0, 0, rank.cpu(0, 0), nvme=0)]) == {}
    assert load not in rank.results
    held.set()
    rank.await_jobs(load)
    assert rank.results[load].failed == {}
    assert names == {"kvdisk-checksum"}
    rank.mover.close()
    assert not any(thread.name.startswith("kvdisk-checksum") for thread in threading.enumerate())


@pytest.mark.parametrize(("most_slots", "name"), [(1, "kvdisk-checksum"), (16, "kvdisk-mover")])
def test_a_short_batch_is_verified_without_another_thread(monkeypatch, most_slots, name):
    names, check = set(), SlotHeaders.check

    def checked(headers, batch):
        names.add(threading.current_thread().name.rpartition("_")[0] or threading.current_thread().name)
        return check(headers, batch)

    rank = Rank(threaded=True, checksum_threads=1)
    rank.await_jobs(*rank.opening)
    monkeypatch.setattr(host_work, "SHORT_BYTES", most_slots * rank.arena.slot_sizes[rank.classes[0]])
    monkeypatch.setattr(SlotHeaders, "check", checked)
    moves = [move(block, 0, block, rank.cpu(0, block)) for block in range(2)]
    assert do(rank, JobKind.STORE, moves) == {}
    assert do(rank, JobKind.LOAD, moves) == {}
    assert names == {name}
    rank.mover.close()


@pytest.mark.usefixtures("all_to_threads")
def test_an_error_of_ours_on_a_checksum_thread_reaches_the_model(monkeypatch):
    rank = Rank(threaded=True, checksum_threads=2)
    rank.await_jobs(*rank.opening)
    monkeypatch.setattr(SlotHeaders, "seal", lambda *_: 1 // 0)
    job_id = rank.submit(JobKind.STORE, [move(1, 0, 1, rank.cpu(0, 1))])
    assert rank.mover.wait_any(WAIT_S)
    with pytest.raises(ZeroDivisionError):
        rank.mover.poll()
    rank.mover.close()
    assert rank.poll()[job_id].failed == {0: Reason.CANCELLED}
