# SPDX-License-Identifier: Apache-2.0
"""What cannot be stored whole is stored from its head: a tier that is full leaves no hole in a prompt."""

from __future__ import annotations

import pytest
from support.fake_engine import FakeEngine
from support.fake_ranks import FakeRank
from support.fake_requests import FakeRequest
from support.manager_parts import ManagerParts, Sizes
from support.manager_watch import ManagerWatch

from kvdisk.config import Config
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.index.memory_index import MemoryIndex

ONE = Geometry((GroupGeometry(0, 2, 4096),), 1, 2)
SAME_SIZE = Geometry((GroupGeometry(0, 2, 4096), GroupGeometry(1, 2, 4096)), 1, 2)
TWO_SIZES = Geometry((GroupGeometry(0, 2, 4096), GroupGeometry(1, 2, 8192)), 1, 2)
PROMPT = "abcdefghijklmnopqrstuvwxyz"
OTHER = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Memory:
    """An engine with a CPU tier of so few slots, and nothing else; its rank copies when ``work`` is called."""

    def __init__(self, geometry: Geometry, cpu_slots: tuple[int, ...]) -> None:
        config = Config(cpu_bytes=1, min_load_tokens=0)
        sizes = Sizes(geometry, config, 200, cpu_slots, (), 0, ())
        self.ranks, self.added = [FakeRank(0)], 0
        self.engine = FakeEngine(geometry, sizes.block_count, self.ranks)
        self.engine.now = 1000.0
        self.parts = ManagerParts.make(sizes, self.engine, MemoryIndex(), 0)
        self.watch = ManagerWatch(sizes, self.parts, self.engine, self.ranks, MemoryIndex())

    def add(self, prompt: str) -> FakeRequest:
        self.added += 1
        request = self.engine.add(f"request {self.added}", prompt, 0)
        request.finishing = True
        return request

    def step(self, tokens: int, *, work: bool = True, seconds: float = 0.01) -> None:
        self.engine.now += seconds
        self.engine.schedule(tokens)
        self.engine.forward()
        while work and self.ranks[0].runnable:
            self.ranks[0].run_job(self.ranks[0].runnable[0])
        self.engine.update()

    def finish(self, tokens: int, seconds: float = 0.01) -> None:
        while self.engine.requests or self.parts.manager.has_pending_work(self.engine.now):
            self.step(tokens, seconds=seconds)

    def hit(self, prompt: str) -> int:
        """Return how many tokens of a prompt a request would be promised now."""
        self.engine.pool.forget_all()
        self.added += 1
        name = f"request {self.added}"
        hashes = [prompt[:end].encode() for end in range(2, len(prompt) + 1, 2)]
        self.parts.manager.new_request(name, hashes, len(prompt))
        tokens = self.parts.manager.lookup(name, 0, len(prompt) + 1, self.engine.now)
        self.parts.manager.request_finished(name)
        assert tokens is not None
        return tokens


@pytest.mark.parametrize("step_tokens", [26, 8, 2])
def test_a_prompt_longer_than_the_tier_fills_it_with_its_head(step_tokens):
    memory = Memory(ONE, (8,))
    memory.add(PROMPT)
    memory.finish(step_tokens)
    assert memory.hit(PROMPT) == 8 * 2


@pytest.mark.parametrize("step_tokens", [26, 8, 2])
@pytest.mark.parametrize(("geometry", "slots"), [(SAME_SIZE, (8,)), (TWO_SIZES, (10, 4)), (TWO_SIZES, (4, 10))])
def test_of_several_groups_the_same_head_is_stored(geometry, slots, step_tokens):
    memory = Memory(geometry, slots)
    memory.add(PROMPT)
    memory.finish(step_tokens)
    assert memory.hit(PROMPT) == 4 * 2


def test_what_was_refused_is_stored_before_what_comes_after_it():
    memory = Memory(ONE, (16,))
    memory.add(OTHER)
    memory.step(26, work=False)
    memory.add(PROMPT)
    memory.step(8, work=False)
    assert memory.parts.manager.stats["refused_blocks.room"] == 1, "of four offers three had room"
    memory.step(8)  # and then there is some again
    memory.step(8)
    memory.finish(8)
    stored = [position for position, key in enumerate(_keys(PROMPT)) if memory.parts.catalog.find(key) >= 0]
    assert stored == list(range(len(stored))), "a hole"
    assert memory.hit(PROMPT) >= 3 * 2


def test_while_the_request_lives_all_of_it_is_stored_in_the_end():
    memory = Memory(ONE, (16,))
    memory.add(OTHER)
    memory.step(26, work=False)
    request = memory.add(PROMPT)
    request.finishing = False
    memory.step(8, work=False)
    for _ in range(20):
        memory.step(8, seconds=1.0)
    assert memory.hit(PROMPT) == 26


def _keys(prompt: str) -> list[bytes]:
    return [prompt[:end].encode() + bytes(2) for end in range(2, len(prompt) + 1, 2)]
