# SPDX-License-Identifier: Apache-2.0
"""What peers are thought to have: neighbours on this host, and the remote store. Scheduler thread
only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from kvdisk.blocks import BlockKey, Slot, Tier
from kvdisk.manager.catalog import TierChoice
from kvdisk.manager.neighbours import NeighbourCopies
from kvdisk.manager.parts import StepState
from kvdisk.manager.questions import Asking
from kvdisk.manager.remote import ASK_AGAIN_S, RemoteCopies
from kvdisk.manager.requests import RequestState


class PeerHints:
    """What others are thought to have, the nearest first: neighbours, then the remote store."""

    def __init__(self, neighbours: NeighbourCopies, remote: RemoteCopies, state: StepState) -> None:
        self._state = state
        self.neighbours = neighbours
        self.remote = remote
        self._sources = [source for source in (neighbours, remote) if source.exists]

    @property
    def changes(self) -> int:
        """Rises with each change of which keys they name."""
        return self.neighbours.changes + self.remote.changes

    @property
    def usable(self) -> Collection[BlockKey]:
        """Return the keys that a lookup may count as READY now."""
        return self.usable_in(None)

    def usable_in(self, tiers: TierChoice) -> Collection[BlockKey]:
        """Return the ``usable`` keys among those that are read as one of these tiers; None: of
        any."""
        found: Collection[BlockKey] = ()
        for source in self._sources:
            if (tiers is None or source.tier in tiers) and (usable := source.usable_hints):
                found = _Either(found, usable) if found else usable
        return found

    @property
    def known(self) -> Collection[BlockKey]:
        """Return the keys of all that others are thought to have, though it may not be read now."""
        return _Either(self.neighbours.hints, self.remote.hints) if self._sources else ()

    def ask(self, request: Asking) -> None:
        """Ask for what of a request's blocks this engine has not got. ``keys`` are up to date."""
        if not self._sources or not self._state.is_identified:
            return
        tiers = request.load_tiers
        nearer: Collection[BlockKey] = ()
        if tiers is None or self.neighbours.tier in tiers:
            self.neighbours.ask(request)
            nearer = self.neighbours.hints
        if tiers is None or self.remote.tier in tiers:
            self.remote.ask(request, nearer)
        request.asked_s = self._state.now

    def renew(self, request: RequestState) -> None:
        """Ask again where the last question of a request that waits is long ago: hints are kept for
        a time only. One that was looked up since it came does not wait a second time."""
        age_s = 0.0 if request.asked_s is None else self._state.now - request.asked_s
        if age_s > min(ASK_AGAIN_S, self.remote.hint_life_s / 2):
            self.ask(request)
            if request.looked_up:
                request.question = request.remote_question = 0

    def refresh(self, request: RequestState) -> None:
        """Take in answers before a request is looked up, and ask again where its question is long
        ago."""
        if self._sources:
            self.absorb()
            self.renew(request)
        request.looked_up = True

    def is_asking(self, request: Asking) -> bool:
        """Whether an answer to a request's questions is still to come."""
        return any(source.is_asking(request) for source in self._sources)

    def absorb(self) -> None:
        """Take in the answers that have come, and forget hints that are too old."""
        for source in self._sources:
            source.absorb()

    def take(self, key: BlockKey, tiers: TierChoice = None) -> tuple[Tier, Slot, int] | None:
        """Return where a move can read a block as of one of some tiers, and its generation; None:
        no hint names it. What it reads is held until the move is settled."""
        if self.tier_of(key, tiers) is self.remote.tier:
            return self.remote.take()
        return self.neighbours.take(key) if tiers is None or self.neighbours.tier in tiers else None

    def tier_of(self, key: BlockKey, tiers: TierChoice = None) -> Tier:
        """Return what a hinted block is read as, of some tiers."""
        remote, neighbours = self.remote, self.neighbours
        if key not in remote.hints or not (tiers is None or remote.tier in tiers):
            return neighbours.tier  # asked of each block of a long prompt: mostly there is but one source
        is_near = key in neighbours.usable_hints and (tiers is None or neighbours.tier in tiers)
        return neighbours.tier if is_near else remote.tier

    def stop(self) -> None:
        """Ask no more, because this engine's weights are no longer those of the files."""
        self.neighbours.stop()
        self.remote.stop()


class _Either(Collection[BlockKey]):
    """The keys of two collections."""

    def __init__(self, near: Collection[BlockKey], far: Collection[BlockKey]) -> None:
        self._pair = near, far
        self._near: Callable[[object], bool] = near.__contains__
        self._far: Callable[[object], bool] = far.__contains__

    def __contains__(self, key: object) -> bool:
        return self._near(key) or self._far(key)

    def __iter__(self) -> Iterator[BlockKey]:
        near, far = self._pair
        return iter({*near, *far})

    def __len__(self) -> int:
        return sum(map(len, self._pair))
