# SPDX-License-Identifier: Apache-2.0
"""A sleep of the engine: nothing touches the GPU's memory while vLLM has it unmapped."""

from __future__ import annotations

import threading

import pytest
from ranks import Rank, move
from support.waits import WAIT_S

from kvdisk.messages import JobKind, Reason
from kvdisk.worker.copier import HostCopier

BLOCKS = range(6)


class Held:
    """A copy that ends when the test says so."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.waited = threading.Event()

    def query(self) -> bool:
        return self.ended.is_set()

    def synchronize(self) -> None:
        self.waited.set()
        assert self.ended.wait(WAIT_S)


@pytest.mark.parametrize("direct", [False, True], ids=["by memory", "straight"])
def test_nothing_begins_on_the_gpu_and_what_needs_none_goes_on(direct, monkeypatch):
    rank = Rank(direct=direct, cpu_slots=0 if direct else 48)
    kept = {block: rank.payload(0, block) for block in BLOCKS}
    if not direct:
        assert rank.do(JobKind.STORE, [move(block, 0, block, cpu=rank.cpu(0, block)) for block in BLOCKS]) == {}
    loads = rank.stored(len(BLOCKS))
    rank.mover.leave_gpu()
    rank.mover.leave_gpu()
    with monkeypatch.context() as unmapped:
        for name in ("gather", "scatter"):
            unmapped.setattr(HostCopier, name, lambda *_: pytest.fail("the GPU's memory was touched"))
        for kind, moves in ((JobKind.LOAD, loads), (JobKind.STORE, loads)):
            assert rank.do(kind, moves) == dict.fromkeys(BLOCKS, Reason.CANCELLED)
        if not direct:
            both = [move(block, 0, None, cpu=rank.cpu(0, block), nvme=20 + block) for block in BLOCKS]
            assert rank.do(JobKind.DEMOTE, both) == {}
    rank.mover.return_to_gpu()
    assert rank.do(JobKind.LOAD, loads) == {}
    assert {block: rank.payload(0, block) for block in BLOCKS} == kept
    rank.close()


def test_a_load_whose_read_is_under_way_ends_without_the_gpu(monkeypatch):
    rank = Rank()
    loads = rank.stored(len(BLOCKS))
    rank.device.plan.hold = True
    job = rank.submit(JobKind.LOAD, loads)
    rank.run()
    rank.mover.leave_gpu()
    monkeypatch.setattr(HostCopier, "scatter", lambda *_: pytest.fail("the GPU's memory was touched"))
    rank.let_go()
    assert rank.run()[job].failed == dict.fromkeys(BLOCKS, Reason.CANCELLED)
    rank.close()


def test_the_sleep_waits_for_copies_under_way(monkeypatch):
    rank, copy = Rank(threaded=True), Held()
    begun = threading.Event()

    def gather(*_: object) -> Held:
        begun.set()
        return copy

    monkeypatch.setattr(HostCopier, "gather", gather)
    rank.submit(JobKind.STORE, [move(0, 0, 0, cpu=rank.cpu(0, 0))])
    assert begun.wait(WAIT_S)
    sleeper = threading.Thread(target=rank.mover.leave_gpu)
    sleeper.start()
    while sleeper.is_alive() and not copy.waited.is_set():
        sleeper.join(0.001)
    assert sleeper.is_alive()
    copy.ended.set()
    sleeper.join(WAIT_S)
    assert not sleeper.is_alive()
    rank.mover.close()


def test_a_store_that_has_not_begun_never_does(monkeypatch):
    """What it would copy after the sleep is not what it was told to."""
    rank = Rank()
    rank.run()
    job = rank.submit(JobKind.STORE, [move(block, 0, block, cpu=rank.cpu(0, block)) for block in BLOCKS])
    rank.mover.leave_gpu()
    rank.mover.return_to_gpu()
    rank.erase()
    monkeypatch.setattr(HostCopier, "gather", lambda *_: pytest.fail("what was erased is copied"))
    assert rank.run()[job].failed == dict.fromkeys(BLOCKS, Reason.OVERWRITTEN)
    rank.close()
