# SPDX-License-Identifier: Apache-2.0
"""The manager's journal as vLLM's KV-cache events, for routers that know what each engine holds.
Scheduler's thread only.

An event of a stored block says what vLLM's own event of the block on the GPU says (its tokens, its
parent's hash, and what else its hash covers) while that is remembered, which is so for the latest
requests. Other blocks (found on the drive at the start, or promoted long after) have their hash
alone, in the form of vLLM's own offloading connector: no tokens, block size 0. A reader that has
seen the hash knows the rest.

Readers know vLLM's blocks only, and follow a prompt from the first on. So the event of a unit,
which is several of them, names each, as vLLM's own event of several blocks does. Of a unit that is
not remembered the hash of the last one is known: that is told alone, and the whole unit once a
request comes that has it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvdisk.blocks import GROUP_BYTES, BlockKey, Tier, group_of, make_block_key, make_block_keys
from kvdisk.connector.tier_names import VLLM_TIERS
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.manager.events import Taken

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_utils import ExternalBlockHash
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

MOST_REMEMBERED = 65536
"""Hashes whose tokens are remembered at most, at 8 bytes a token and about 300 a hash; the oldest
go first."""

_LOCALITY = "LOCAL"


def publishes_events(vllm_config: VllmConfig) -> bool:
    """Return whether the engine publishes KV-cache events."""
    events = vllm_config.kv_events_config
    return events is not None and events.enable_kv_cache_events


def event_groups(kv_cache_config: KVCacheConfig) -> list[tuple[int, str, int | None]]:
    """Return how events name each group: its index, its kind of attention, and its window in
    tokens."""
    specs = {at: kv_cache_config.kv_cache_groups[at].kv_cache_spec for at in kv_cache_config.prefix_cacheable_group_ids}
    return [
        (at, get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec)) for at, spec in specs.items()
    ]


ExtraKeys = tuple[Any, ...] | None
"""What a block's hash covers besides its tokens, as vLLM hashes it: its adapter, images, salt and
embeddings."""


class _Hashed(NamedTuple):
    """The tokens of one hash. ``adapter``: its request's, as vLLM's events name it. ``extra_keys``:
    by block size, those of the block of that size that ends with this hash; a size without an entry
    has none.
    """

    parent: bytes | None
    tokens: array[int]
    adapter: tuple[int, str] | None
    extra_keys: Mapping[int, ExtraKeys]


class BlockDescription(NamedTuple):
    """What an event says of a block, or of a unit of several. ``parent``: the hash before it; None
    where it begins a prompt. ``hashes``, ``extra_keys``: of each of vLLM's blocks, ``tokens`` of
    all."""

    parent: bytes | None
    hashes: list[bytes]
    tokens: list[int]
    adapter: tuple[int, str] | None
    extra_keys: list[ExtraKeys]


class BlockDescriptions:
    """What the hashes of the latest requests' blocks cover, by hash."""

    def __init__(self, geometry: Geometry) -> None:
        self._hash_tokens = geometry.hash_tokens
        self._sizes = sorted({group.gpu_block_tokens for group in geometry.groups})
        self._most = MOST_REMEMBERED
        self._known: dict[bytes, _Hashed] = {}

    def remember(self, request: Request, known: int) -> int:
        """Remember a request's hashes from number ``known`` on; return how many hashes it has."""
        count = len(request.block_hashes)
        adapter = request.lora_request and (request.lora_request.adapter_id, request.lora_request.name)
        extra_keys = _ExtraKeys(request, self._sizes)
        for at in range(known, count):
            block_hash, parent = request.block_hashes[at], request.block_hashes[at - 1] if at else None
            end = (at + 1) * self._hash_tokens
            tokens = request.all_token_ids[end - self._hash_tokens : end]
            self._known.pop(block_hash, None)
            self._known[block_hash] = _Hashed(parent, array("q", tokens), adapter, extra_keys.before(end))
        while len(self._known) > self._most:
            del self._known[next(iter(self._known))]
        return count

    def find(self, block_hash: bytes, group: GroupGeometry) -> BlockDescription | None:
        """Return the description of a block of a group; None where it is not all remembered. A
        large block has several hashes, and is named by the last."""
        size, last = group.gpu_block_tokens, self._known.get(block_hash)
        parent: bytes | None = block_hash
        hashes: list[bytes] = []
        extra_keys: list[ExtraKeys] = []
        tokens: list[array[int]] = []
        for covered in range(0, group.block_tokens, self._hash_tokens):  # from behind
            known = self._known.get(parent) if parent is not None else None
            if known is None or parent is None:
                return None
            if covered % size == 0:
                hashes.append(parent)
                extra_keys.append(known.extra_keys.get(size))
            tokens.append(known.tokens)
            parent = known.parent
        assert last is not None
        of_all = [token for each in reversed(tokens) for token in each]
        return BlockDescription(parent, hashes[::-1], of_all, last.adapter, extra_keys[::-1])


_NO_EXTRA_KEYS: Mapping[int, ExtraKeys] = {}


class _ExtraKeys:
    """Makes the extra keys of a request's blocks, from one end to the next."""

    def __init__(self, request: Request, sizes: Sequence[int]) -> None:
        self._request = request
        plain = not (request.cache_salt or request.lora_request or request.mm_features)
        self._image_at = {} if plain and request.prompt_embeds is None else dict.fromkeys(sizes, 0)
        """Where vLLM's search for a block's images begins, by block size; empty where there is
        nothing to search for."""

    def before(self, end: int) -> Mapping[int, ExtraKeys]:
        """Return the extra keys of each size of block that ends before token ``end``. ``end``
        ascends from call to call."""
        found: dict[int, ExtraKeys] = {}
        for size, image_at in self._image_at.items():
            if end % size == 0:
                keys, self._image_at[size] = generate_block_hash_extra_keys(self._request, end - size, end, image_at)
                found[size] = keys
        return found or _NO_EXTRA_KEYS


class _ToldUnits:
    """What was told of the units in one tier. Prompts may part within a unit: blocks before that
    belong to several, are told with the first of them, and gone with the last."""

    def __init__(self) -> None:
        self.named: set[BlockKey] = set()
        """Those of which the name alone was told."""
        self._hashes: dict[BlockKey, list[bytes]] = {}
        """Of the others, the hashes of all their blocks."""
        self._alike: dict[BlockKey, list[BlockKey]] = {}
        """Which of those begin with a block."""

    def add(self, key: BlockKey, hashes: list[bytes]) -> int:
        """Note that a whole unit is told; return how many of its first blocks were already."""
        alike = self._alike.setdefault(make_block_key(hashes[0], group_of(key)), [])
        told = self._alike_blocks(hashes, alike)
        alike.append(key)
        self._hashes[key] = hashes
        self.named.discard(key)
        return told

    def remove(self, key: BlockKey) -> list[bytes]:
        """Forget a unit; return the hashes that were told of it and of no other."""
        self.named.discard(key)
        hashes = self._hashes.pop(key, None)
        if hashes is None:
            return [_hash_of(key)]
        first = make_block_key(hashes[0], group_of(key))
        alike = self._alike[first]
        alike.remove(key)
        if not alike:
            del self._alike[first]
        return hashes[self._alike_blocks(hashes, alike) :]

    def _alike_blocks(self, hashes: Sequence[bytes], units: Iterable[BlockKey]) -> int:
        """Return how many blocks at its beginning a unit shares with one of others."""
        pairs = (zip(hashes, self._hashes[unit], strict=True) for unit in units)
        return max((sum(mine == other for mine, other in each) for each in pairs), default=0)


class EventWriter:
    """Writes the journal's changes as vLLM's events. ``groups``: for each of kvdisk's groups,
    vLLM's index, the kind of attention and its window."""

    def __init__(self, geometry: Geometry, groups: Sequence[tuple[int, str, int | None]]) -> None:
        self._geometry = geometry
        self._groups = groups
        self._units = [group for group in geometry.groups if group.gpu_blocks > 1]
        self.descriptions = BlockDescriptions(geometry)
        self._told: dict[Tier, _ToldUnits] = {}
        self._late: list[KVCacheEvent] = []
        """Of units that are told whole only now."""

    @property
    def waits(self) -> bool:
        """Whether there are events that no change of the journal brings."""
        return bool(self._late)

    def remember(self, request: Request, known: int) -> int:
        """Remember a request's hashes from number ``known`` on, and tell the units whole of which
        the name alone was told; return how many hashes it has."""
        count = self.descriptions.remember(request, known)
        for tier, told in self._told.items():
            for group in self._units if told.named else ():
                scale = group.block_tokens // self._geometry.hash_tokens
                first = known // scale * scale + scale - 1
                for key in make_block_keys(request.block_hashes[first:count:scale], group.group):
                    if key in told.named and (found := self.descriptions.find(_hash_of(key), group)) is not None:
                        self._late.append(self._stored_event(tier, key, found))
        return count

    def write(self, taken: Taken) -> list[KVCacheEvent]:
        """Return the events of a piece of the journal, in its order."""
        events: list[KVCacheEvent] = []
        if taken.cleared:
            self._told.clear()
            events.append(AllBlocksCleared())
        else:
            events += self._late
        self._late = []
        for (tier, stored), changes in groupby(taken.changes, key=lambda change: (change.tier, change.stored)):
            keys = [key for change in changes for key in change.keys]
            events.extend(self._stored(tier, keys) if stored else self._removed(tier, keys))
        return events

    def _stored(self, tier: Tier, keys: Iterable[BlockKey]) -> Iterator[BlockStored]:
        groups = self._geometry.groups
        described = {key: self.descriptions.find(_hash_of(key), groups[group_of(key)]) for key in keys}
        for key in _parents_first(described):
            yield self._stored_event(tier, key, described[key])

    def _stored_event(self, tier: Tier, key: BlockKey, known: BlockDescription | None) -> BlockStored:
        """Return the event of a block, without those of its unit that were told with another."""
        group, told = self._geometry.groups[group_of(key)], 0
        group_id, kind, window = self._groups[group.group]
        if group.gpu_blocks > 1:
            units = self._told.setdefault(tier, _ToldUnits())
            if known is None:
                units.named.add(key)
            else:
                told = units.add(key, known.hashes)
        hashes = known.hashes[told:] if known else [_hash_of(key)]
        parent = known and (known.hashes[told - 1] if told else known.parent)
        lora_id, lora_name = (known and known.adapter) or (None, None)
        return BlockStored(
            block_hashes=list(map(_external, hashes)),
            parent_block_hash=None if parent is None else _external(parent),
            token_ids=known.tokens[told * group.gpu_block_tokens :] if known else [],
            block_size=group.gpu_block_tokens if known else 0,
            lora_id=lora_id,
            medium=VLLM_TIERS[tier].medium,
            lora_name=lora_name,
            extra_keys=to_event_extra_keys(known.extra_keys[told:]) if known else None,
            group_idx=group_id,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
            locality=_LOCALITY,
        )

    def _removed(self, tier: Tier, keys: Iterable[BlockKey]) -> Iterator[BlockRemoved]:
        by_group: dict[int, list[ExternalBlockHash]] = {}
        units = self._told.get(tier)
        for key in keys:
            hashes = [_hash_of(key)] if units is None else units.remove(key)
            by_group.setdefault(group_of(key), []).extend(map(_external, hashes))
        for group, hashes in by_group.items():
            group_id = self._groups[group][0]
            yield BlockRemoved(
                block_hashes=hashes, medium=VLLM_TIERS[tier].medium, group_idx=group_id, locality=_LOCALITY
            )


def _parents_first(described: Mapping[BlockKey, BlockDescription | None]) -> Iterator[BlockKey]:
    """Yield the keys, each behind its parent where that is among them: the tail of a chain becomes
    READY first, and readers skip a block whose parent they do not know."""
    yielded: set[BlockKey] = set()
    for first in described:
        chain: list[BlockKey] = []
        key: BlockKey | None = first
        while key is not None and key in described and key not in yielded:
            yielded.add(key)
            chain.append(key)
            known = described[key]
            parent = known.parent if known else None
            key = None if parent is None else make_block_key(parent, group_of(key))
        yield from reversed(chain)


def _hash_of(key: BlockKey) -> bytes:
    return key[:-GROUP_BYTES]


def _external(block_hash: bytes) -> ExternalBlockHash:
    return maybe_convert_block_hash(BlockHash(block_hash))
