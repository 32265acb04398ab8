# SPDX-License-Identifier: Apache-2.0
"""What the manager keeps of a live request. Store watermarks are not here: they are the store policy's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvdisk.blocks import BlockKey, JobId, Tier, make_block_keys
from kvdisk.geometry import Geometry
from kvdisk.manager.lookup import Lookups


@dataclass(slots=True)
class RequestState:
    """One request between ``new_request`` and ``request_finished``.

    ``hashes``: the engine's own growing list of block hashes, one per ``hash_tokens``; read only.
    ``hash_count``: how many of them are in ``keys``. ``lookups``: what was found of them.
    ``load_limit_tokens``: no external hit reaches beyond this any more, because a load failed there.
    ``stale``: what it has computed is of weights that are gone, and nothing of it is stored; until it starts again.
    ``offered_blocks``: how far the store policy was asked, in the smallest group's blocks.
    ``question``: ticket of what the neighbours were asked, 0: nothing; ``asked_s``: when it was first looked up, or
    they were asked again.
    ``served``: tokens of the last planned load by the tier they come from.
    """

    request_id: str
    hashes: Sequence[bytes]
    prompt_tokens: int
    keys: tuple[list[BlockKey], ...]
    lookups: Lookups
    hash_count: int = 0
    load_limit_tokens: int | None = None
    wait_started_s: float | None = None
    gave_up_waiting: bool = False
    looked_up: bool = False
    loading: bool = False
    stale: bool = False
    offered_blocks: int = 0
    question: int = 0
    asked_s: float | None = None
    served: dict[Tier, int] = field(default_factory=dict)
    store_jobs: set[JobId] = field(default_factory=set)

    @classmethod
    def make(cls, request_id: str, hashes: Sequence[bytes], prompt_tokens: int, geometry: Geometry) -> RequestState:
        """Return the state of a new request."""
        keys: tuple[list[BlockKey], ...] = tuple([] for _ in geometry.groups)
        return cls(request_id, hashes, prompt_tokens, keys, Lookups(len(keys)))

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
