# SPDX-License-Identifier: Apache-2.0
"""The cap: three engines of two namespaces fill their room one after the other, and together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from live_children import CAP_IS_EXACT, SEED, held_bytes
from support.live_audit import audit
from support.live_engine import LiveEngine
from support.live_load import LiveLoad, LoadShape
from support.live_model import LiveModel

from kvdisk.device.store import Store

SHAPE = LoadShape(width=20, aborts=0.0)
BLOCKS = 330
"""So many that half of the cap is more than an index is planned for: an orphan may keep the other
half."""
PAYLOAD_BYTES = 20_000
MODELS = tuple(LiveModel(name, ranks=1, payload_bytes=2 * PAYLOAD_BYTES) for name in ("first", "second", "first"))


class Tenant:
    """An engine of one of the namespaces, and its load."""

    def __init__(self, store: Path, number: int) -> None:
        model = MODELS[number]
        self.config = model.config(str(store), blocks=BLOCKS, store_decode=True)
        self.engine = LiveEngine(self.config, model)
        self.load = LiveLoad(self.engine, SEED + number, SHAPE)

    @property
    def full(self) -> bool:
        return self.engine.manager.stats["evicted_blocks.nvme"] > 30

    def close(self) -> None:
        self.load.end()
        audit(self.engine)
        self.engine.close()


def fill(store: Path, tenants: list[Tenant], limit_bytes: Callable[[], int]) -> int:
    """Load all until each has had to evict; return the largest excess over the limit."""
    excess = -(1 << 62)
    while not all(tenant.full for tenant in tenants):
        for tenant in tenants:
            tenant.load.step()
        excess = max(excess, held_bytes(store) - limit_bytes())
    return excess


@pytest.mark.torture
def test_one_after_the_other(quick_path: Path) -> None:
    """A namespace that nobody serves any more keeps what the one that is served leaves of the cap,
    and no more."""
    store = quick_path / "store"
    for number in (0, 1, 2, 1):
        tenant = Tenant(store, number)
        cap_bytes = tenant.config.nvme_bytes or 0
        assert fill(store, [tenant], lambda cap_bytes=cap_bytes: cap_bytes) <= 0
        tenant.close()
        assert held_bytes(store) <= cap_bytes


def test_together_and_one_by_one_gone(quick_path: Path) -> None:
    store = quick_path / "store"
    tenants = [Tenant(store, number) for number in range(3)]
    assert fill(store, tenants, lambda: sum(tenant.config.nvme_bytes or 0 for tenant in tenants)) <= 0
    caps = sum(tenant.config.nvme_bytes or 0 for tenant in tenants)
    held = held_bytes(store)
    assert held > 2 * (tenants[0].config.nvme_bytes or 0) // 3, "they are full, each in a home of its own"
    while len(tenants) > 1:
        tenants.pop().close()
        tenants[0].load.run_requests(20)
        # What a dead owner left is spared for a while, but gets no room of others; then it goes.
        assert held_bytes(store) <= caps
        home = tenants[0].engine.parts.home
        assert home is not None
        opened = Store.open(store, create=False)
        assert not opened.trim(home.fingerprint, unused_s=900)
        assert opened.trim(home.fingerprint)
        if CAP_IS_EXACT:
            assert held_bytes(store) <= sum(tenant.config.nvme_bytes or 0 for tenant in tenants)
    tenants.pop().close()
