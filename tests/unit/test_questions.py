# SPDX-License-Identifier: Apache-2.0
"""What neighbours and the remote store are asked of long prompts, and how much of it a step
does."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import count
from typing import Any

import pytest
from support.fake_neighbours import FakeHome, FakeNeighbours
from support.fake_pool import FakePool
from support.fake_remote import FakeRemote
from support.memory_objects import MemoryObjects
from support.waits import until

from kvdisk.blocks import BlockKey, Tier, group_of
from kvdisk.config import Config
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.index.base import ForeignCopy, SegmentRecord
from kvdisk.manager import bounds
from kvdisk.manager.neighbours import NeighbourCopies
from kvdisk.manager.parts import Parts
from kvdisk.manager.peer_hints import PeerHints
from kvdisk.manager.prefix_match import Lookups, reachable
from kvdisk.manager.remote import ASK_AGAIN_S, RemoteCopies
from kvdisk.manager.requests import RequestState
from kvdisk.manager.step_work import SHARES, SPARE_BLOCKS, Kind
from kvdisk.remote.reader import MOST_ALONE, RemoteReader

TOKENS = 16
FULL = GroupGeometry(0, TOKENS, 4096)
SEVEN = (FULL, *(GroupGeometry(at, TOKENS, 4096, window_tokens=1024) for at in range(1, 7)))
"""As of Gemma 3: one group in seven reads all."""
MOST_STEPS = 100


def alike(groups: int) -> tuple[GroupGeometry, ...]:
    return tuple(GroupGeometry(at, TOKENS, 4096) for at in range(groups))


class Everything(FakeRemote):
    """A store that has all blocks, or all but some."""

    def __init__(self, but: Collection[BlockKey] = ()) -> None:
        super().__init__(most_questions=4)
        self.but = but
        self.asked: list[int] = []

    def _has(self, key: BlockKey) -> bool:
        return key not in self.but

    def ask(self, ticket: int, chains: Sequence[Sequence[BlockKey]], alone: Sequence[BlockKey]) -> bool:
        self.asked.append(sum(map(len, [*chains, alone])))
        return super().ask(ticket, chains, alone)


class Copies(dict[BlockKey, ForeignCopy]):
    """What a home has that has all blocks."""

    def __init__(self, home_id: str, segment: SegmentRecord) -> None:
        super().__init__()
        self._copy = ForeignCopy(home_id, segment, 0, 1, 0)

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: BlockKey) -> ForeignCopy:
        return self._copy


class Asker:
    """What a manager knows of others, stepped by hand. ``looked_at``: blocks that were looked for
    in the catalog."""

    def __init__(self, groups: Sequence[GroupGeometry], far: Any = None, near: FakeNeighbours | None = None) -> None:
        self.parts = Parts.make(Config(cpu_bytes=1), Geometry(tuple(groups), 1, TOKENS), FakePool(8, lambda _: None))
        self.near, self.far = near, far
        neighbours_ = NeighbourCopies(self.parts, near)
        self.hints = PeerHints(neighbours_, RemoteCopies(self.parts, far, Tier.CPU, None), self.parts.state)
        self.looked_at = 0
        presences = self.parts.catalog.presences

        def counted(keys: Sequence[BlockKey], tiers: Any = None) -> bytes:
            self.looked_at += len(keys)
            return presences(keys, tiers)

        self.parts.catalog.presences = counted  # type: ignore[method-assign]

    def come(self, blocks: int, number: int = 0) -> RequestState:
        hashes = [b"%8d%8d" % (number, at) for at in range(blocks)]
        request = RequestState(str(number), hashes, blocks * TOKENS + 1, self.parts.geometry)
        request.update_keys()
        self.hints.ask(request)
        return request

    def step(self) -> None:
        self.parts.state.now += 0.01
        for index in (self.near, self.far):
            if isinstance(index, FakeNeighbours | FakeRemote):
                index.answer()
        self.hints.absorb()
        self.parts.work.run()
        self.parts.work.end_step()

    def hit(self, request: RequestState) -> int:
        """Return the blocks that hit when all is answered."""
        for _ in range(MOST_STEPS):
            self.step()
            if not self.hints.is_asking(request):
                break
        assert not self.hints.is_asking(request)
        presences = reachable(self.parts.catalog, self.hints.usable)
        return Lookups().find(presences, self.parts.geometry, request.keys, 0, 1 << 60).ready // TOKENS


def make(kind: str, groups: Sequence[GroupGeometry]) -> Asker:
    if kind == "remote":
        return Asker(groups, far=Everything())
    segment = SegmentRecord(1, FULL.slot_bytes, 8)
    home = FakeHome("a" * 32, segment)
    home.copies = Copies(home.home_id, segment)
    return Asker(groups, near=FakeNeighbours([home]))


@pytest.mark.parametrize("kind", ["remote", "neighbours"])
@pytest.mark.parametrize(
    ("groups", "blocks", "limit"),
    [(alike(2), 70, 64), (alike(3), 40, 64), (alike(3), 40, 1), (SEVEN, 44_800 // TOKENS, None), (SEVEN, 9000, None)],
)
def test_a_prompt_of_more_blocks_than_a_question_has_hits_whole(kind, groups, blocks, limit, monkeypatch):
    if limit is not None:
        monkeypatch.setattr(bounds, "QUESTION_BLOCKS", limit)
    asker = make(kind, groups)
    assert asker.hit(asker.come(blocks)) == blocks
    assert asker.parts.stats[f"{'foreign' if kind == 'neighbours' else 'remote'}_questions"] == 1


def test_behind_a_hole_of_a_chain_nothing_more_is_asked(monkeypatch):
    monkeypatch.setattr(bounds, "QUESTION_BLOCKS", 64)
    far = Everything()
    asker = Asker(alike(2), far=far)
    request = RequestState("a", [b"%016d" % at for at in range(200)], 200 * TOKENS + 1, asker.parts.geometry)
    request.update_keys()
    far.but = {request.keys[1][40]}
    asker.hints.ask(request)
    assert asker.hit(request) == 40
    assert far.asked == [64, 64]


def test_of_states_of_several_groups_the_last_are_asked_for_alike():
    """A hit needs the state of each group at one place."""
    states = [GroupGeometry(at, TOKENS, 4096, window_tokens=2, state_tokens=TOKENS) for at in range(1, 4)]
    geometry = Geometry((FULL, *states), 1, TOKENS)
    store = MemoryObjects()
    reader = RemoteReader(store, lambda key: key.hex())
    asker = Asker(geometry.groups, far=reader)
    blocks = 2 * MOST_ALONE
    hashes = [b"%8d%8d" % (0, at) for at in range(blocks)]
    keys = RequestState("all", hashes, 0, geometry)
    keys.update_keys()
    store.contents.update({key.hex(): b"" for group in keys.keys for key in group})
    request = asker.come(blocks)

    def is_answered() -> bool:
        asker.step()
        return not asker.hints.is_asking(request)

    until(is_answered, "an answer")
    assert asker.hit(request) == blocks
    assert len({group_of(key) for key in asker.hints.remote.hints}) == 4
    reader.close()


@pytest.mark.parametrize("kind", ["remote", "neighbours"])
def test_a_step_does_a_bounded_part_of_many_questions(kind):
    """When many requests wait, all their questions are due again at the same time."""
    asker, blocks = make(kind, alike(1)), 1000
    most = 2 * (SHARES[Kind.QUESTIONS].blocks + SPARE_BLOCKS)  # the loop's end belongs to two budgets
    requests = [asker.come(blocks, number) for number in range(60)]
    for turn in count():
        before, asker.looked_at = len(hints := _hints_of(asker, kind)), 0
        asker.step()
        for request in requests:
            asker.hints.refresh(request)
        assert asker.looked_at <= most
        assert len(hints) - before <= 2 * (SHARES[Kind.ANSWERS].blocks + SPARE_BLOCKS)
        if not any(map(asker.hints.is_asking, requests)):
            break
        assert turn < 10 * MOST_STEPS
    assert len(_hints_of(asker, kind)) == 60 * blocks
    asker.parts.state.now += ASK_AGAIN_S + 1
    for _ in range(3):
        asker.looked_at = 0
        asker.step()
        for request in requests:
            asker.hints.refresh(request)
        assert asker.looked_at <= most


def _hints_of(asker: Asker, kind: str) -> Collection[BlockKey]:
    return asker.hints.remote.hints if kind == "remote" else asker.hints.neighbours.hints


def test_what_an_index_does_not_take_is_sent_when_it_does():
    asker = Asker(alike(1), far=Everything())
    requests = [asker.come(10, number) for number in range(20)]
    assert asker.far.waiting == 4
    assert all(asker.hit(request) == 10 for request in requests)


def test_while_an_index_does_not_answer_nothing_waits():
    asker = Asker(alike(1), far=Everything())
    requests = [asker.come(10, number) for number in range(20)]
    asker.far.any = False
    asker.step()
    assert not any(map(asker.hints.is_asking, requests))
    asker.far.any = True
    asker.step()
    assert not any(map(asker.hints.is_asking, requests[5:])), "they were given up"
