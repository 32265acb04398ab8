# SPDX-License-Identifier: Apache-2.0
"""What cannot be stored whole is stored from its head: a tier that is full leaves no hole in a
prompt."""

from __future__ import annotations

import pytest
from tier_bench import TierBench

from kvdisk.geometry import Geometry, GroupGeometry

ONE = Geometry((GroupGeometry(0, 2, 4096),), 1, 2)
SAME_SIZE = Geometry((GroupGeometry(0, 2, 4096), GroupGeometry(1, 2, 4096)), 1, 2)
TWO_SIZES = Geometry((GroupGeometry(0, 2, 4096), GroupGeometry(1, 2, 8192)), 1, 2)
PROMPT = "abcdefghijklmnopqrstuvwxyz"
OTHER = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Memory(TierBench):
    """An engine with a CPU tier of so few slots, and nothing else."""

    def __init__(self, geometry: Geometry, cpu_slots: tuple[int, ...]) -> None:
        super().__init__(cpu_slots, geometry=geometry, gpu_blocks=200, min_load_tokens=0)

    def finish(self, tokens: int) -> None:
        while self.engine.requests or self.manager.has_pending_work(self.engine.now):
            self.step(tokens)

    def hit(self, prompt: str) -> int:
        """Return how many tokens of a prompt a request would be promised now."""
        self.engine.pool.forget_all()
        hashes = [prompt[:end].encode() for end in range(2, len(prompt) + 1, 2)]
        self.manager.new_request("asks", hashes, len(prompt))
        tokens = self.manager.lookup("asks", 0, len(prompt) + 1, self.engine.now)
        self.manager.request_finished("asks")
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


def _keys(prompt: str) -> list[bytes]:
    return [prompt[:end].encode() + bytes(2) for end in range(2, len(prompt) + 1, 2)]
