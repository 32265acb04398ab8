# SPDX-License-Identifier: Apache-2.0
"""The manager's journal as vLLM's KV-cache events, for routers that know what each engine holds.
Scheduler thread only.

An event of a stored block has its tokens and its parent's hash while those are remembered: of the
latest requests. Other blocks (found on the drive at start, or promoted long after) have their hash
alone, in the form of vLLM's own offloading connector: no tokens, block size 0. A reader that has
seen the hash knows the rest.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvdisk.blocks import GROUP_BYTES, BlockKey, Tier, group_of, make_block_key
from kvdisk.connector.adapter import VLLM_TIERS
from kvdisk.geometry import Geometry
from kvdisk.manager.events import Taken

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import ExternalBlockHash
    from vllm.v1.request import Request

MOST_REMEMBERED = 65536
"""Hashes whose tokens are remembered, at 8 bytes a token and about 300 a hash; the oldest go
first."""

_LOCALITY = "LOCAL"


class BlockDescriptions:
    """Tokens and parents of the blocks of the latest requests, by hash."""

    def __init__(self, geometry: Geometry) -> None:
        self._hash_tokens = geometry.hash_tokens
        self._most = MOST_REMEMBERED
        self._known: dict[bytes, tuple[bytes | None, array[int]]] = {}

    def remember(self, request: Request, known: int) -> int:
        """Remember a request's hashes from number ``known`` on; return how many it has.

        Not of requests whose hashes cover more than tokens: a reader that hashed these tokens would
        take the blocks for those of another prompt.
        """
        count = len(request.block_hashes)
        more = request.cache_salt or request.lora_request or request.mm_features or request.prompt_embeds is not None
        if count <= known or more:
            return count
        for at in range(known, count):
            block_hash, parent = request.block_hashes[at], request.block_hashes[at - 1] if at else None
            tokens = request.all_token_ids[at * self._hash_tokens : (at + 1) * self._hash_tokens]
            self._known.pop(block_hash, None)
            self._known[block_hash] = parent, array("q", tokens)
        while len(self._known) > self._most:
            del self._known[next(iter(self._known))]
        return count

    def find(self, block_hash: bytes, block_tokens: int) -> tuple[bytes | None, list[int]] | None:
        """Return the parent's hash (None: it begins a prompt) and the tokens of a block of
        ``block_tokens``: a large block has several hashes, and is named by the last."""
        parent: bytes | None = block_hash
        tokens: list[int] = []
        while len(tokens) < block_tokens:
            known = self._known.get(parent) if parent is not None else None
            if known is None:
                return None
            parent = known[0]
            tokens[:0] = known[1]
        return parent, tokens


class EventWriter:
    """Writes what the journal says as vLLM's events. ``groups``: by kvdisk's number, vLLM's,
    the kind of attention and its window."""

    def __init__(self, geometry: Geometry, groups: Sequence[tuple[int, str, int | None]]) -> None:
        self._geometry = geometry
        self._groups = groups
        self.descriptions = BlockDescriptions(geometry)

    def write(self, taken: Taken) -> list[KVCacheEvent]:
        """Return the events of a piece of the journal, in its order."""
        events: list[KVCacheEvent] = [AllBlocksCleared()] if taken.cleared else []
        for (tier, stored), changes in groupby(taken.changes, key=lambda change: (change.tier, change.stored)):
            keys = [key for change in changes for key in change.keys]
            events.extend(self._stored(tier, keys) if stored else self._removed(tier, keys))
        return events

    def _stored(self, tier: Tier, keys: Iterable[BlockKey]) -> Iterator[BlockStored]:
        described = {
            key: self.descriptions.find(_hash_of(key), self._geometry.groups[group_of(key)].block_tokens)
            for key in keys
        }
        for key in _parents_first(described):
            group, (parent, tokens) = group_of(key), described[key] or (None, [])
            group_id, kind, window = self._groups[group]
            yield BlockStored(
                block_hashes=[_external(_hash_of(key))],
                parent_block_hash=None if parent is None else _external(parent),
                token_ids=tokens,
                block_size=self._geometry.groups[group].block_tokens if described[key] else 0,
                lora_id=None,
                medium=VLLM_TIERS[tier].medium,
                lora_name=None,
                group_idx=group_id,
                kv_cache_spec_kind=kind,
                kv_cache_spec_sliding_window=window,
                locality=_LOCALITY,
            )

    def _removed(self, tier: Tier, keys: Iterable[BlockKey]) -> Iterator[BlockRemoved]:
        by_group: dict[int, list[ExternalBlockHash]] = {}
        for key in keys:
            by_group.setdefault(group_of(key), []).append(_external(_hash_of(key)))
        for group, hashes in by_group.items():
            group_id = self._groups[group][0]
            yield BlockRemoved(
                block_hashes=hashes, medium=VLLM_TIERS[tier].medium, group_idx=group_id, locality=_LOCALITY
            )


def _parents_first(described: Mapping[BlockKey, tuple[bytes | None, list[int]] | None]) -> Iterator[BlockKey]:
    """Yield the keys, each behind its parent where that is among them: the tail of a chain is ready
    first, and readers skip a block whose parent they do not know."""
    yielded: set[BlockKey] = set()
    for first in described:
        chain: list[BlockKey] = []
        key: BlockKey | None = first
        while key is not None and key in described and key not in yielded:
            yielded.add(key)
            chain.append(key)
            parent = (described[key] or (None,))[0]
            key = None if parent is None else make_block_key(parent, group_of(key))
        yield from reversed(chain)


def _hash_of(key: BlockKey) -> bytes:
    return key[:-GROUP_BYTES]


def _external(block_hash: bytes) -> ExternalBlockHash:
    return maybe_convert_block_hash(BlockHash(block_hash))
