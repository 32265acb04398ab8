# SPDX-License-Identifier: Apache-2.0
"""The engine of a simulation, and what must hold of it: ``FakeEngine`` and ``ManagerWatch`` over
real bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from kvdisk.blocks import BlockKey, Slot, Tier, group_of
from kvdisk.config import Config
from kvdisk.device.header import SlotIdentity, check_slot
from kvdisk.geometry import HEADER_BYTES, Geometry, Namespace
from kvdisk.index.memory_index import MemoryIndex
from kvdisk.messages import Plan
from support.fake_engine import FakeEngine, Phase
from support.fake_ranks import FakeRank
from support.fake_requests import FakeRequest
from support.live_model import LiveModel
from support.live_rank import StepWork
from support.manager_parts import FINGERPRINT, ManagerParts, Sizes
from support.manager_watch import ManagerWatch
from support.sim_drive import Note
from support.sim_rank import SimRank


def _config(**changes: object) -> Config:
    values = {
        "store_dirs": (Path("/nowhere"),),
        "nvme_bytes": 1,
        "cpu_bytes": 1,
        "io_deadline_s": 5.0,
        "store_decode": True,
    }
    return Config(**(values | changes))  # type: ignore[arg-type]


_ONE = LiveModel(payload_bytes=200)
_TWO = LiveModel(payload_bytes=2000, windowed=True)
SHAPES = {
    "two tiers": (_ONE, Sizes(_ONE.geometry, _config(), 14, (5,), (4,), 3, ())),
    "a window": (_TWO, Sizes(_TWO.geometry, _config(), 18, (5, 3), (3, 2), 3, ())),
    "reuse": (_ONE, Sizes(_ONE.geometry, _config(nvme_admission="reuse(2)"), 14, (5,), (4,), 2, ())),
    "NVMe only": (_ONE, Sizes(_ONE.geometry, _config(cpu_bytes=0), 14, (), (4,), 3, ())),
    "memory only": (_ONE, Sizes(_ONE.geometry, _config(store_dirs=(), nvme_bytes=None), 14, (5,), (), 0, ())),
}
"""Models and sizes by name; a seed picks one."""
PICKS = ("two tiers", "two tiers", "a window", "a window", "reuse", "NVMe only", "NVMe only", "memory only")
"""The names, as often as they shall come."""


class SimEngine(FakeEngine):
    """Schedules as any ``FakeEngine``; its ranks compute and look at bytes. ``drift`` is called
    where time passes."""

    def __init__(
        self, geometry: Geometry, block_count: int, ranks: Sequence[SimRank], drift: Callable[[], None]
    ) -> None:
        super().__init__(geometry, block_count, cast("Sequence[FakeRank]", ranks))
        self._sim_ranks = ranks
        self._drift = drift

    def forward(self) -> None:
        """Run the model on every rank, while transfers go on."""
        assert self.phase is Phase.SCHEDULED
        self.phase = Phase.COMPUTED
        work = StepWork(self._plan, self.weights)
        for request, new_tokens in self._scheduled.items():
            work.add(request, request.computed - new_tokens, self._geometry.groups)
        for rank in self._sim_ranks:
            for _, block, _ in work.writes:
                assert not rank.reads(block), "a block is overwritten while a store reads it"
                assert not rank.writers_of(block), "a block is computed while a load writes it"
            rank.forward(work)
        self._drift()
        for rank in self._sim_ranks:
            rank.check_reads(work)
            rank.after_forward(work)

    def _send_plan(self) -> None:
        for rank in self._sim_ranks:
            rank.before_forward(StepWork(self._plan, self.weights))
        self._drift()

    def _check_loaded(self, rank: FakeRank, request_id: str, bad: Sequence[int]) -> None:
        """Nothing: the rank has looked."""


class ByteWatch(ManagerWatch):
    """``ManagerWatch`` of one life, which looks at the bytes of every slot but those that were
    damaged on purpose."""

    def __init__(
        self,
        sizes: Sizes,
        parts: ManagerParts,
        engine: SimEngine,
        ranks: Sequence[SimRank],
        index: MemoryIndex,
        model: LiveModel,
        note: Note,
    ) -> None:
        super().__init__(sizes, parts, engine, cast("Sequence[FakeRank]", ranks), index)
        self.sim_ranks = ranks
        self._model = model
        self._note = note
        self.preempted = 0

    def answered(self, request: FakeRequest, local_tokens: int, answer: int | None, now: float) -> None:
        """See ``ManagerWatch``."""
        self._note(f"{request.id} has {local_tokens} tokens and is promised {answer}")
        super().answered(request, local_tokens, answer, now)

    def planned(self, plan: Plan, preempted: Sequence[str]) -> None:
        """See ``ManagerWatch``."""
        if preempted or plan.fence or plan.void:
            self._note(f"preempted {list(preempted)}, fence {plan.fence}, void {plan.void}")
        for job in plan.jobs:
            moves = [(move.key, move.generation, move.block, dict(move.slots)) for move in job.moves]
            self._note(f"plan {job.kind.name} {job.id}: {moves or job.segment or job.home}")
        self.preempted += len(preempted)
        super().planned(plan, preempted)

    def _check_slot(self, tier: Tier, slot: Slot, epoch: int, key: BlockKey, generation: int) -> None:
        group = self.sizes.geometry.groups[group_of(key)]
        for rank in self.sim_ranks:
            if (key, generation) in rank.drive.damaged:
                continue
            view = rank.slot(tier, slot, group.slot_bytes)
            where = f"{tier.name} {slot} of rank {rank.rank}"
            assert len(view) == group.slot_bytes, f"{where} is not there"
            namespace, ranks = Namespace(FINGERPRINT, epoch), self.sizes.geometry.rank_count
            wrong = check_slot(view, SlotIdentity(namespace, key, generation, group.payload_bytes, rank.rank, ranks))
            assert wrong is None, f"{where} is not sealed for {key!r}, generation {generation}: {wrong!r}"
            content = self._model.content_of(self.weights[epoch], key, rank.rank)
            found = view[HEADER_BYTES : HEADER_BYTES + group.payload_bytes]
            assert found == content, f"{where} holds other bytes than those of {key!r}"
