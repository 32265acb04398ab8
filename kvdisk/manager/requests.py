# SPDX-License-Identifier: Apache-2.0
"""What the manager keeps of a live request. Store watermarks are not here: they are the store policy's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvdisk.blocks import BlockKey, JobId, Tier, make_block_key, make_block_keys
from kvdisk.geometry import Geometry
from kvdisk.manager.lookup import Lookups


class RequestLimits(NamedTuple):
    """What a request's user allows, in tokens; None: no limit, 0: nothing.

    ``most_load_tokens`` beyond those that are on the GPU already; ``store_limit_tokens`` from the prompt's start.
    """

    most_load_tokens: int | None = None
    store_limit_tokens: int | None = None


class RequestState:
    """One request between ``new_request`` and ``request_finished``.

    ``hashes``: the engine's own growing list of block hashes, one per ``hash_tokens``; read only.
    ``hash_count``: how many of them are in ``keys``. ``lookups``: what was found of them.
    ``arrival``: its number in order of arrival.
    ``load_limit_tokens``: no external hit reaches beyond this any more, because a load failed there.
    ``most_load_tokens``, ``store_limit_tokens``: what its user allows: so many tokens to load beyond those on the GPU,
    and to store up to this one; None: no limit.
    ``load_job``: its last load. ``awaited_load``: another's, for whose blocks it waits, or has waited.
    ``stale``: what it has computed is of weights that are gone, and nothing of it is stored; until it starts again.
    ``question``: ticket of what the neighbours were asked, 0: nothing; ``asked_s``: when it was first looked up, or
    they were asked again.
    ``served``: tokens of the last planned load by the tier they come from.
    ``asked``: the last lookup, until it is known what came of it: what the GPU had of its own, a bound of the hit, and
    what was promised beyond the former, in tokens. ``waited_since_s``: when the wait that goes on began.
    """

    def __init__(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        prompt_tokens: int,
        geometry: Geometry,
        limits: RequestLimits | None = None,
    ) -> None:
        most_load_tokens, store_limit_tokens = limits or RequestLimits()
        self.request_id = request_id
        self.hashes = hashes
        self.prompt_tokens = prompt_tokens
        self.keys: tuple[list[BlockKey], ...] = tuple([[] for _ in geometry.groups])
        self.lookups = Lookups(len(self.keys))
        self.hash_count = 0
        self.arrival = 0
        self.load_limit_tokens: int | None = None
        self.most_load_tokens = most_load_tokens
        self.store_limit_tokens = store_limit_tokens
        self.wait_started_s: float | None = None
        self.gave_up_waiting = False
        self.loading = False
        self.load_job: JobId | None = None
        self.awaited_load: JobId | None = None
        self.stale = False
        self.question = 0
        self.asked_s: float | None = None
        self.served: dict[Tier, int] = {}
        self.asked: tuple[int, int, int] | None = None
        self.waited_since_s: float | None = None

    def update_keys(self, geometry: Geometry) -> None:
        """Extend ``keys`` to what the engine has hashed by now: one key per full block and group."""
        if len(self.hashes) == self.hash_count:
            return
        self.hash_count = len(self.hashes)
        for group, keys in zip(geometry.groups, self.keys, strict=True):
            # Each hash covers its whole prefix, so the last one inside a block names the block.
            scale = group.block_tokens // geometry.hash_tokens
            hashes = self.hashes[(len(keys) + 1) * scale - 1 : self.hash_count : scale]
            keys.extend(make_block_keys(hashes, group.group))

    def limit_loads(self, tokens: int) -> None:
        """A load failed at this position: no hit reaches beyond it any more."""
        self.load_limit_tokens = tokens if self.load_limit_tokens is None else min(tokens, self.load_limit_tokens)

    def may_wait_again(self) -> None:
        """What comes now is worth a wait, however it fared before: it is preempted, or another load has begun."""
        self.wait_started_s = None
        self.gave_up_waiting = False

    def await_load(self, job_id: JobId) -> None:
        """It has come to wait for another's load: a wait of its own."""
        if job_id != self.awaited_load:
            self.awaited_load = job_id
            self.may_wait_again()

    def forget_changed_keys(self, geometry: Geometry) -> bool:
        """Drop all keys where the engine has hashed the prompt anew; return whether it has.

        Each hash covers its whole prefix, so the last key of a group speaks for those before it.
        """
        for group, keys in zip(geometry.groups, self.keys, strict=True):
            last = len(keys) * (group.block_tokens // geometry.hash_tokens) - 1
            if keys and (last >= len(self.hashes) or make_block_key(self.hashes[last], group.group) != keys[-1]):
                for stale in self.keys:
                    stale.clear()
                self.hash_count = 0
                self.lookups = Lookups(len(self.keys))
                return True
        return False
