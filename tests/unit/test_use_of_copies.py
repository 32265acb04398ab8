# SPDX-License-Identifier: Apache-2.0
"""A request that has its blocks, from a tier or from the GPU's own cache, counts as a use of their copies."""

from __future__ import annotations

import pytest
from support.fake_engine import FakeEngine
from support.fake_ranks import FakeRank
from support.fake_requests import key_of
from support.manager_parts import ManagerParts, Sizes
from support.manager_watch import ManagerWatch

from kvdisk.blocks import Tier
from kvdisk.config import EVICTIONS, Config
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.index.memory_index import MemoryIndex
from kvdisk.manager.catalog import CopyState

GEOMETRY = Geometry((GroupGeometry(0, 2, 4096),), 1, 2)
FIRST, SECOND, OTHERS, LAST = "aabbx", "ccddx", ("eeffx", "gghhx"), "iijjx"


class Served:
    """An engine with a CPU tier of eight blocks."""

    def __init__(self, eviction: str) -> None:
        config = Config(cpu_bytes=1, eviction=eviction)
        sizes = Sizes(GEOMETRY, config, 40, (8,), (), 0, ())
        ranks = [FakeRank(0)]
        self.engine = FakeEngine(GEOMETRY, sizes.block_count, ranks)
        self.rank, self.requests = ranks[0], 0
        self.parts = ManagerParts.make(sizes, self.engine, MemoryIndex(), 0)
        self.watch = ManagerWatch(sizes, self.parts, self.engine, ranks, MemoryIndex())

    def serve(self, text: str) -> list[bool]:
        """Serve a prompt; return which of its blocks the tier has then."""
        self.requests += 1
        request = self.engine.add(f"request {self.requests}", text, 1)
        keys = [key_of(request, GEOMETRY.groups[0], position) for position in range(len(text) // 2)]
        while request.id in self.engine.requests:
            request.finishing = True
            self.engine.schedule(8)
            self.engine.forward()
            while self.rank.runnable:
                self.rank.run_job(self.rank.runnable[0])
            self.engine.update()
        self.keys = {**getattr(self, "keys", {}), text: keys}
        return self.held(text)

    def held(self, text: str) -> list[bool]:
        catalog = self.parts.catalog
        rows = [catalog.find(key) for key in self.keys[text]]
        return [row >= 0 and catalog.state(row, Tier.CPU) == CopyState.READY for row in rows]


@pytest.mark.parametrize("eviction", EVICTIONS)
@pytest.mark.parametrize("cold", [False, True], ids=["in the GPU's cache", "in the tier"])
def test_what_is_asked_for_again_stays(eviction, cold):
    served = Served(eviction)
    for text in (FIRST, SECOND, *OTHERS):
        assert served.serve(text) == [True, True]
    if cold:
        served.engine.pool.forget_all()
    served.serve(FIRST)
    assert served.serve(LAST) == [True, True]
    assert served.held(FIRST) == [True, True]
    assert served.held(SECOND) == [False, False]
