# SPDX-License-Identifier: Apache-2.0
"""How llm-d's router reads KV-cache events of vLLM: what it decodes, and what it then believes.

Rewritten from github.com/llm-d/llm-d-router at ebab6879 (August 2026); lines are those of
``pkg/kvevents``, unless said. It is Go, and no part of kvdisk's environment. Caches that forget the
least recently used, and what it keeps of requests that it has just sent, are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

STORED_FIELDS = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
    *("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
)
"""engineadapter/vllm_adapter.go:140-144."""
REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")
"""engineadapter/vllm_adapter.go:145."""
INDEXED_KINDS = {"full_attention", "mla_attention", "sink_full_attention"}
"""pool.go:49-56, events.go."""
TOKENS_OF_A_KEY = 16
"""kvcache/kvblock/token_processor.go:34: the router's own blocks, unless ``blockSizeTokens`` says
otherwise."""


class Refused(Exception):
    """The router drops the whole batch (engineadapter/vllm_adapter.go:73-79, pool.go:316-320)."""


class Event(NamedTuple):
    """What is decoded (events.go). ``parent`` 0: none."""

    tag: str
    hashes: tuple[int, ...] = ()
    parent: int = 0
    tokens: tuple[int, ...] = ()
    block_size: int = 0
    medium: str = ""
    group: int | None = None
    kind: str = ""
    window: int | None = None
    adapter: str = ""
    extra: tuple[tuple[str, ...], ...] | None = None
    """By block of the engine, what its key covers besides tokens: what ``extra_keys`` has that is a
    text, or begins with one (kvcache/kvblock/extra_keys.go:49-88)."""


# -- decoding ----------------------------------------------------------------------------------


def parse_topic(topic: str) -> tuple[str, str]:
    """Return pod and model (engineadapter/common.go:39-45)."""
    parts = topic.split("@")
    return (parts[1], parts[2]) if len(parts) == 3 else (topic, "")


def decode(payload: bytes) -> list[Event]:
    """Decode a batch (engineadapter/vllm_adapter.go:64-135). Raises Refused."""
    batch = msgspec.msgpack.decode(payload)
    if not isinstance(batch, list):
        raise Refused("the batch is no array")
    return [_decode_event(one) for one in batch[1]]


def _decode_event(one: Any) -> Event:
    """engineadapter/vllm_adapter.go:101-179: an array as vLLM wrote it once, or a map by name."""
    if isinstance(one, dict):
        if "type" not in one:
            raise Refused("a map without its tag")
        order = {"BlockStored": STORED_FIELDS, "BlockRemoved": REMOVED_FIELDS}.get(one["type"], ())
        one = [one["type"], *map(one.get, order)]
    if not isinstance(one, list) or not one:
        raise Refused("neither an array nor a map")
    tag, *fields = one
    if tag == "AllBlocksCleared":
        return Event(tag)
    if tag == "BlockRemoved":
        hashes, medium, group = [*fields, *[None] * len(REMOVED_FIELDS)][: len(REMOVED_FIELDS)]
        return Event(tag, _hashes(hashes), medium=_text(medium), group=_number(group))
    if tag == "BlockStored" and len(fields) >= 4:
        row = dict(zip(STORED_FIELDS, [*fields, *[None] * len(STORED_FIELDS)], strict=False))
        _number(row["lora_id"])
        if not isinstance(row["token_ids"], list) or row["block_size"] is None:
            raise Refused("tokens and size are required")
        return Event(
            tag,
            _hashes(row["block_hashes"]),
            0 if row["parent_block_hash"] is None else _hash(row["parent_block_hash"]),
            tuple(row["token_ids"]),
            row["block_size"],
            _text(row["medium"]),
            _number(row["group_idx"]),
            _text(row["kv_cache_spec_kind"]),
            _number(row["kv_cache_spec_sliding_window"]),
            _text(row["lora_name"]),
            _extra(row["extra_keys"]),
        )
    raise Refused(f"{tag} is unknown or too short")


def _hashes(raw: Any) -> tuple[int, ...]:
    if not isinstance(raw, list):
        raise Refused("hashes are no array")
    return tuple(map(_hash, raw))


def _hash(raw: Any) -> int:
    """engineadapter/common.go:50-71. A number that needs fewer than 64 bits arrives as another
    type, and is refused."""
    if isinstance(raw, bytes) and raw:
        return int.from_bytes(raw[-8:], "big")
    if isinstance(raw, int) and raw >= 1 << 32:
        return raw
    raise Refused(f"a hash like {raw!r}")


def _extra(raw: Any) -> tuple[tuple[str, ...], ...] | None:
    """engineadapter/common.go:115-130, and ``ParseRawExtraKeys``."""
    if raw is None:
        return None
    if not isinstance(raw, list) or not all(keys is None or isinstance(keys, list) for keys in raw):
        raise Refused(f"extra keys like {raw!r}")
    heads = [[key[0] if isinstance(key, list) and key else key for key in keys or ()] for keys in raw]
    return tuple(tuple(head for head in block if isinstance(head, str)) for block in heads)


def _text(raw: Any) -> str:
    if raw is not None and not isinstance(raw, str):
        raise Refused(f"{raw!r} is no text")
    return raw or ""


def _number(raw: Any) -> int | None:
    if raw is not None and (not isinstance(raw, int) or raw < 0):
        raise Refused(f"{raw!r} is no number")
    return raw


# -- believing ---------------------------------------------------------------------------------


class Router:
    """What the router believes of one pod (pool.go:430-676, kvcache/kvblock/in_memory.go:157-350).

    A request's tokens are cut into keys of its own; an engine's hash leads to those of its block. A
    key covers the model, for which an adapter's name stands, and ``Event.extra``.
    """

    def __init__(self, tokens_of_a_key: int = TOKENS_OF_A_KEY) -> None:
        self._step = tokens_of_a_key
        self.tiers: dict[tuple[Any, ...], set[tuple[str, int | None]]] = {}
        """Own key to tiers and groups that hold it."""
        self.keys: dict[int, list[tuple[Any, ...]]] = {}
        """An engine's hash to own keys."""
        self.skipped = 0
        self._kinds: dict[int, str] = {}
        self._stored: Counter[tuple[str, int | None, int]] = Counter()

    def digest(self, events: Sequence[Event]) -> None:
        """Take decoded events, in order."""
        for event in events:
            if event.tag == "BlockStored":
                self.skipped += not self._store(event)
            elif event.tag == "BlockRemoved":
                self._remove(event)
            else:
                self.tiers.clear()
                self._stored.clear()

    def held(self, tier: str, group: int) -> set[int]:
        """Return the engine's hashes of blocks that are believed to be in a tier, whole."""
        believed = (tier, group)
        return {
            one for one, keys in self.keys.items() if keys and all(believed in self.tiers.get(key, ()) for key in keys)
        }

    def found(self, tier: str, group: int, tokens: Sequence[int], extra: Sequence[Sequence[str]], model: str) -> int:
        """Return how many of a request's keys are believed to be in a tier, from the first on.
        ``extra``: by key, its images, and in the first its salt behind them
        (preciseprefixcache/blockkeys.go)."""
        keys = self._cut((), tokens, extra, model)
        return next((at for at, key in enumerate(keys) if (tier, group) not in self.tiers.get(key, ())), len(keys))

    def _cut(
        self, parent: tuple[Any, ...], tokens: Sequence[int], extra: Sequence[Sequence[str]], model: str
    ) -> list[tuple[Any, ...]]:
        """Return the keys of these tokens behind a key (kvcache/kvblock/token_processor.go:283)."""
        keys: list[tuple[Any, ...]] = []
        for at in range(len(tokens) // self._step):
            begin = hash(parent) if parent else hash(model)
            parent = (begin, tuple(tokens[at * self._step : (at + 1) * self._step]), tuple(extra[at]))
            keys.append(parent)
        return keys

    def _store(self, event: Event) -> bool:
        tier = event.medium.lower() or "gpu"  # pool.go:42-47
        if event.group is not None:
            kind = self._kinds.setdefault(event.group, event.kind) if not event.kind else event.kind
            self._kinds[event.group] = kind
            if kind not in INDEXED_KINDS:  # pool.go:65-71
                return False
            dense = event.block_size > 0 and len(event.tokens) == event.block_size * len(event.hashes)
            if event.tokens and not dense:  # pool.go:72-81
                return False
        parent: tuple[Any, ...] = ()
        if event.parent:  # pool.go:496-512
            if not self.keys.get(event.parent):
                return False
            parent = self.keys[event.parent][-1]
        count = len(event.tokens) // self._step
        own = self._cut(parent, event.tokens, _realigned(event.extra or (), count), event.adapter)
        if not own:  # pool.go:390-427: it knows the hash, whose last key it takes, or learns nothing
            own = [self.keys[one][-1] for one in event.hashes if self.keys.get(one)]
            if event.tokens or not own:
                return False
        else:
            share = len(own) // len(event.hashes)
            for at, one in enumerate(event.hashes):
                self.keys[one] = own[at * share : (at + 1) * share]
        for key in own:
            self.tiers.setdefault(key, set()).add((tier, event.group))
        self._stored.update((tier, event.group, one) for one in event.hashes)
        return True

    def _remove(self, event: Event) -> None:
        tier = event.medium.lower() or "gpu"
        if event.group is not None and self._kinds.get(event.group) not in INDEXED_KINDS:  # pool.go:591-608
            return
        for one in event.hashes:
            scope = (tier, event.group, one)
            self._stored[scope] -= 1
            if self._stored[scope] > 0:  # event_dedup_filter.go: another announcement still counts
                continue
            del self._stored[scope]
            keys = self.keys.get(one, [])
            for key in keys:
                self.tiers.get(key, set()).discard((tier, event.group))
            if keys and not any(self.tiers.get(key) for key in keys):  # in_memory.go:250-260
                del self.keys[one]


def _realigned(extra: Sequence[tuple[str, ...]], count: int) -> list[tuple[str, ...]]:
    """Return what the blocks of an event cover besides tokens by the router's own blocks
    (pool.go:348-381)."""
    if len(extra) < count:
        return [extra[at * len(extra) // count] if extra else () for at in range(count)]
    merged: list[tuple[str, ...]] = [()] * count
    for at, one in enumerate(extra if count else ()):
        merged[at * count // len(extra)] += one
    return merged
