# SPDX-License-Identifier: Apache-2.0
"""Reading ahead, and waiting for what is read: its bounds and its order, over a fake engine."""

from __future__ import annotations

import pytest
from support.low_bounds import lower_shares
from support.manager_parts import Sizes, two_tiers
from support.small_engine import SmallEngine
from tier_bench import GEOMETRY, keys_of

from kvdisk.blocks import BlockKey, Tier
from kvdisk.manager import bounds, copies, prefetch
from kvdisk.manager.catalog import CopyState
from kvdisk.manager.requests import RequestLimits
from kvdisk.manager.step_work import Kind
from kvdisk.messages import Job, JobKind

PROMPTS = ("aabbccddx", "eeffgghhx", "iijjkkllx", "mmnnx", "ooppx", "qqrrx")
LONGER = "mmnnssttx"
RUNNING = "z"
"""It has no full block, so it is neither stored nor read ahead; it runs until it is told to
finish."""


class Queue(SmallEngine):
    """An engine that runs one request at a time. ``PROMPTS`` lie on NVMe, and nothing of them in
    memory."""

    def __init__(self, cpu_slots: int = 64, **config: object) -> None:
        config = {"min_load_tokens": 0} | config
        super().__init__(Sizes(GEOMETRY, two_tiers(**config), 60, (cpu_slots,), (64,), 1, PROMPTS, most_running=1))
        for prompt in (*PROMPTS, LONGER):
            self.serve(prompt)
        self.restart()
        self.first = self.add(RUNNING)
        self.step()

    def promoted(self, *, work: bool = True) -> list[Job]:
        """Run a step; return the promotions of its plan."""
        return [job for job in self.step(work=work).jobs if job.kind is JobKind.PROMOTE]

    def on_cpu(self, prompt: str) -> list[bool]:
        """Return which of a prompt's blocks are in memory."""
        catalog = self.parts.catalog
        rows = [catalog.find(key) for key in keys_of(prompt)]
        return [row >= 0 and catalog.state(row, Tier.CPU) == CopyState.READY for row in rows]


def keys(jobs: list[Job]) -> list[list[BlockKey]]:
    return [[move.key for move in job.moves] for job in jobs]


def test_a_victim_is_read_ahead_before_those_that_came_later():
    queue = Queue()
    queue.first.finishing = True
    queue.step()
    running = queue.add(PROMPTS[3])
    for _ in range(3):
        queue.step()
    queue.add(PROMPTS[0])
    queue.engine.pool.forget_all()
    for key in keys_of(PROMPTS[3]):
        queue.parts.cpu.discard(queue.parts.catalog.find(key))  # type: ignore[union-attr]
    queue.parts.manager.preempt([running.id], queue.engine.now)
    queue.parts.manager._work.run(Kind.PREFETCH)
    jobs = [job for job in queue.parts.transfers.take_queued(0.0) if job.kind is JobKind.PROMOTE]
    assert keys(jobs) == [keys_of(PROMPTS[3]), keys_of(PROMPTS[0])]


def test_what_the_tier_has_of_a_hit_stays_while_the_rest_is_read_ahead():
    queue = Queue(cpu_slots=6)
    queue.first.finishing = True
    queue.step()
    for prompt in PROMPTS[3:]:
        queue.add(prompt).finishing = True
        for _ in range(4):
            queue.step()
    assert [queue.on_cpu(prompt) for prompt in PROMPTS[3:]] == [[True, True]] * 3, "the tier is full"
    queue.engine.pool.forget_all()
    queue.add(RUNNING)
    queue.step()
    queue.add(LONGER)  # it begins with what has been in the tier for the longest time
    assert keys(queue.promoted()) == [keys_of(LONGER)[2:]]
    assert queue.on_cpu(LONGER) == [True] * 4
    assert queue.on_cpu(PROMPTS[4]) == [False, False]
    queue.finish()


def test_each_wait_has_its_own_bound():
    """One that waits for GPU memory meets reads again and again; the engine could have taken its
    hit in between."""
    queue = Queue(lookup_wait_s=2.0)
    manager, request = queue.parts.manager, queue.add(PROMPTS[0])

    def looked_up(seconds: float) -> int | None:
        return manager.lookup(request.id, 0, len(request.tokens), 5000.0 + seconds)

    queue.promoted(work=False)
    assert [looked_up(seconds) for seconds in (0.0, 1.9)] == [None, None]
    queue.work()
    queue.step()
    assert looked_up(1.95) == 8
    for key in keys_of(PROMPTS[0]):
        queue.parts.cpu.discard(queue.parts.catalog.find(key))  # type: ignore[union-attr]
    manager._promotions.enqueue(manager._requests[request.id])
    queue.promoted(work=False)
    assert [looked_up(seconds) for seconds in (2.5, 4.4)] == [None, None]
    assert looked_up(4.6) == 8
    assert manager.stats["wait_timeouts"] == 1


def test_no_more_is_read_ahead_than_the_request_may_load(monkeypatch):
    queue = Queue()
    blocks = keys_of(PROMPTS[0])
    monkeypatch.setattr(queue.engine.pool, "is_cached", lambda key: key == blocks[0])
    request = queue.add(PROMPTS[0])
    queue.parts.manager._requests[request.id].limits = RequestLimits(4)
    assert keys(queue.promoted()) == [blocks[1:3]], "behind what the GPU has"


@pytest.mark.parametrize("on_gpu", [False, True], ids=["the GPU has nothing", "the GPU has it all"])
def test_of_a_long_prompt_that_waits_a_step_looks_at_a_part(on_gpu, monkeypatch):
    """What is to be read is made out at once, by arrays; whether the GPU has it is asked block by
    block, and no read is made of what no job takes."""
    lower_shares(monkeypatch, 6, Kind.PREFETCH)
    monkeypatch.setattr(bounds, "MOVES", 4)
    monkeypatch.setattr(bounds, "JOBS", 1)
    blocks, asked, made = 25, [], []
    queue = Queue()
    prompt = "".join(letter * 2 for letter in "abcdefghijklmnopqrstuvwxy") + "z"
    queue.first.finishing = True
    queue.step()
    queue.serve(prompt)
    queue.restart()
    queue.add(RUNNING)
    queue.step()
    monkeypatch.setattr(queue.engine.pool, "is_cached", lambda key: asked.append(key) or on_gpu)
    monkeypatch.setattr(prefetch, "Read", lambda *args, **how: made.append(1) or copies.Read(*args, **how))
    queue.add(prompt)
    steps = []
    for _ in range(2 * blocks):
        queue.promoted()
        steps.append((len(asked), len(made)))
        asked.clear()
        made.clear()
    assert not queue.parts.manager._promotions._waiting
    assert queue.on_cpu(prompt) == [not on_gpu] * blocks
    assert max(looked for looked, _ in steps) <= 6 + 6 and max(read for _, read in steps) <= 6 + 1
