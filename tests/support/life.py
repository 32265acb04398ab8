# SPDX-License-Identifier: Apache-2.0
"""A process with a manager and an engine, and the processes after it, over drives and an index that
outlive them: what every test does with them, whatever else it chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvdisk.blocks import BlockKey
from kvdisk.index.memory_index import MemoryIndex
from kvdisk.recovery import excess
from support.fake_engine import FakeEngine, Phase
from support.fake_neighbours import FakeNeighbours
from support.fake_remote import FakeRemote
from support.fake_requests import FakeRequest, engine_geometry
from support.manager_parts import ManagerParts, Sizes, layout_of
from support.manager_watch import ManagerWatch

LONGEST_QUARANTINE_S = 3601.0


def tenant_of(prompt: str) -> int:
    """Return the tenant of a prompt: its first letter says it, as a salt is in the first block's
    hash. That of a capital has none."""
    return 0 if prompt[0].isupper() else ord(prompt[0])


class Life:
    """See the module. ``lives``: processes so far. ``budget_tokens``: of a step."""

    budget_tokens = 16
    quiet_rounds = 100

    sizes: Sizes
    index: MemoryIndex
    ranks: Sequence[Any]
    neighbours: FakeNeighbours
    remote: FakeRemote
    engine: FakeEngine
    parts: ManagerParts
    watch: ManagerWatch

    def begin(self, sizes: Sizes, index: MemoryIndex) -> None:
        self.sizes, self.index = sizes, index
        self.ranks, self.neighbours, self.remote = (), FakeNeighbours([]), self.make_remote()
        self.now = 1000.0
        self.lives = self.request_count = 0
        self.stored_s: dict[tuple[BlockKey, int], int] = {}
        self.live()

    def live(self, segments: int | None = None) -> None:
        """Start a process, whose cap has room for so many segments of each size class, or as many
        as ``sizes`` says."""
        self.lives += 1
        sizes, self.ranks = self.sizes, self.start_ranks()
        self.engine = FakeEngine(engine_geometry(sizes.geometry), sizes.block_count, self.ranks, sizes.most_running)
        self.engine.now, self.engine.zeroes, self.engine.drift = self.now, sizes.zeroes, self.drift
        if sizes.config.salt_share is not None:
            self.engine.tenant_of = tenant_of
        limited = sizes if segments is None else replace(sizes, segments=segments)
        if sizes.has_nvme:
            self._cut(limited)
        self.parts = ManagerParts.make(
            limited, self.engine, self.index, self.lives * 10_000, self.neighbours, self.remote
        )
        self.watch = ManagerWatch(sizes, self.parts, self.engine, self.ranks, self.index, self.note)
        self.watch.stored_s = self.stored_s
        if sizes.config.salt_share is not None:
            self.watch.tenant_of = tenant_of

    def _cut(self, sizes: Sizes) -> None:
        """Cut what the index has to the cap, as ``recovery.open_index`` does."""
        geometry, segments_bytes = sizes.geometry, layout_of(sizes).segments_bytes
        dropped = excess(list(self.index.segments()), geometry.slot_sizes, segments_bytes, geometry.shard_count)
        gone = {record.segment for record in dropped}
        self.index.delete([(each.epoch, each.key) for each in self.index.blocks() if each.slot.segment in gone])
        for segment in gone:
            self.index.delete_segment(segment)
        self.index.commit()

    def start_ranks(self) -> Sequence[Any]:
        """Return the ranks of a new process, which find what is on their drives."""
        raise NotImplementedError

    def make_remote(self) -> FakeRemote:
        return FakeRemote()

    def note(self, event: str) -> None:
        """Something happens: for a trace."""

    def drift(self) -> None:
        """Let time pass in which transfers may go on."""

    def restart(self, segments: int | None = None) -> None:
        """Let the process end well, and another one find what is on the drive."""
        assert self.index.flush(0.0)
        self.succeed(segments)

    def succeed(self, segments: int | None = None) -> None:
        """The process is gone; another one finds what is on the drive."""
        self.index = self.index.reopened()
        self.live(segments)

    def come(self, prompt: str, outputs: int, *, finishing: bool) -> FakeRequest:
        """A request comes. ``finishing``: it ends with its first token."""
        self.request_count += 1
        self.note(f"request {self.request_count}: {prompt}, {outputs} outputs, finishing {finishing}")
        load_tiers = self.sizes.load_tiers[self.request_count % len(self.sizes.load_tiers)]
        request = self.engine.add(f"request {self.request_count}", prompt, outputs, load_tiers)
        request.finishing = finishing
        return request

    def change_weights(self) -> None:
        epoch = 1000 * self.lives + self.engine.weights + 1
        self.watch.reset(epoch, self.engine.weights + 1)
        self.engine.reset(epoch)

    def advance(self, seconds: float) -> None:
        self.engine.now += seconds
        self.now = self.engine.now

    def finish_step(self) -> None:
        """Finish the step under way, if any."""
        if self.engine.phase is Phase.SCHEDULED:
            self.engine.forward()
        if self.engine.phase is Phase.COMPUTED:
            self.drift()
            self.engine.update()

    def run_step(self, budget_tokens: int) -> None:
        self.engine.schedule(budget_tokens)
        self.finish_step()

    def work(self) -> None:
        """Let the ranks and the index end all that they have."""
        for rank in self.ranks:
            rank.work_off()
        self.index.commit()

    def end_round(self) -> None:
        """Let everything end that is under way, and run a step."""
        self.index.refuse_puts = False
        self.remote.answer()
        self.work()
        self.advance(2.5)
        self.run_step(self.budget_tokens)

    def finish(self) -> None:
        """Let every request end, and step until nothing is pending: then nothing is left of
        them."""
        self.finish_step()
        for request in self.engine.requests.values():
            request.finishing = True
        self.index.refuse_puts = False
        for _ in range(self.quiet_rounds):
            self.parts.manager.commit()  # as the connector does before it asks
            self.watch.note_progress()
            if not self.engine.requests and not self.parts.manager.has_pending_work(self.now):
                break
            self.end_round()
        else:
            left = list(self.engine.requests.values())
            raise AssertionError(f"it never becomes quiet: {left}, {len(self.parts.transfers)} jobs")
        self.watch.check()
        self.watch.check_quiet()
