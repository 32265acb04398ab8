# SPDX-License-Identifier: Apache-2.0
"""What a live engine computes: its geometry, what each block must hold, and prompts that share
prefixes. Pure.

A token is a letter, a block's hash is the sha256 of the text up to its end, and the KV of a block
is a pure function of the model's name, the weights' number, the hash, the group and the rank. So
any process knows at any time what any slot of any engine must hold.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from hashlib import blake2b, sha256

import numpy as np

from kvdisk.blocks import GROUP_BYTES, BlockKey, group_of
from kvdisk.config import Config
from kvdisk.geometry import Geometry, GroupGeometry, in_units, segment_file_bytes
from kvdisk.index.lmdb_index import map_bytes_for
from support.fake_requests import FakeRequest

HASH_TOKENS = 4
_LETTERS = "abcdefghijklmnopqrstuvwxy"
PATIENT = {"lookup_wait_s": 600.0, "io_deadline_s": 600.0}
"""Settings with which nothing is given up because the machine is busy. What is given up in time has
tests with a clock of their own."""


class HashedRequest(FakeRequest):
    """A request whose hashes are of the length that vLLM's have."""

    def hash_of(self, end_tokens: int) -> bytes:
        return _digest(self.tokens[:end_tokens])


@lru_cache(maxsize=65536)
def _digest(text: str) -> bytes:
    return sha256(text.encode()).digest()


@dataclass(frozen=True)
class LiveModel:
    """``name``: models of different names have different namespaces. ``payload_bytes``: of a block
    of the first group.

    ``windowed``: a second group, of a sliding window of 8 tokens, whose blocks have twice the
    tokens and other bytes. ``replicated``: every rank computes the same KV. ``unit``: how many of
    the engine's blocks are one of kvdisk's, in the first group; more than one where the hash of a
    text is the text. ``hosts``: that the ranks lie on.
    """

    name: str = "model"
    ranks: int = 2
    windowed: bool = False
    payload_bytes: int = 3000
    replicated: bool = False
    unit: int = 1
    hosts: int = 1

    @cached_property
    def geometry(self) -> Geometry:
        """Sizes as the product wants them."""
        groups = [GroupGeometry(0, HASH_TOKENS, self.payload_bytes)]
        if self.windowed:
            groups.append(GroupGeometry(1, 2 * HASH_TOKENS, self.payload_bytes * 2 + 1000, window_tokens=8))
        if self.unit > 1:
            groups = list(in_units(groups, self.unit * HASH_TOKENS))
        return Geometry(tuple(groups), self.ranks, HASH_TOKENS, self.replicated, self.hosts)

    @property
    def fingerprint(self) -> bytes:
        mine = replace(self, hosts=1)
        alone = replace(mine, ranks=1, replicated=False)  # as alike as replicas, however many there are
        return sha256(repr(alone if self.replicated else mine).encode()).digest()

    def _gpu_payload_bytes(self, group: int) -> int:
        sizes = self.geometry.groups[group]
        return sizes.payload_bytes // sizes.gpu_blocks

    def layer_bytes(self, group: int) -> tuple[int, ...]:
        """Return the bytes of each layer of a group: two, of unequal length."""
        total = self._gpu_payload_bytes(group)
        return (total // 3, total - total // 3)

    def content(self, weights: int, digest: bytes, group: int, rank: int) -> bytes:
        """Return what a block of the engine's with this hash holds on a rank."""
        part = 0 if self.replicated else rank
        return _content(f"{self.name} {weights} {group} {part}", digest, self._gpu_payload_bytes(group))

    def digests_of(self, key: BlockKey) -> list[bytes]:
        """Return the hashes of the engine's blocks that the block of a key has."""
        digest, group = key[:-GROUP_BYTES], self.geometry.groups[group_of(key)]
        if group.gpu_blocks == 1:
            return [digest]
        first = len(digest) - group.block_tokens
        return [digest[: first + end] for end in range(HASH_TOKENS, group.block_tokens + 1, HASH_TOKENS)]

    def content_of(self, weights: int, key: BlockKey, rank: int) -> bytes:
        """Return what the block of a key holds on a rank."""
        return b"".join(self.content(weights, digest, group_of(key), rank) for digest in self.digests_of(key))

    def config(self, store: str, *, blocks: int, segment_blocks: int = 8, **values: object) -> Config:
        """Return a configuration whose cap leaves room for about ``blocks`` blocks of each group on
        NVMe.

        ``segment_blocks``: of the largest group, in a segment. ``values``: whatever else shall not
        be as it comes.
        """
        groups = self.geometry.groups
        parts = self.geometry.shard_count
        per_block = sum(group.slot_bytes for group in groups) * parts
        largest = max(self.geometry.slot_sizes)
        room = cap = per_block * blocks + per_block * blocks // 16
        for _ in range(8):  # the index is planned for as many blocks as the whole cap would hold
            cap = room + map_bytes_for(cap // (min(self.geometry.slot_sizes) * parts))
        fixed = {"store_dirs": store, "nvme_bytes": cap, "segment_bytes": segment_file_bytes(largest, segment_blocks)}
        values = {
            "cpu_bytes": 8 * per_block // parts * self.ranks,
            "staging_bytes": 16 * largest,
            "index_commit_s": 0.01,
            "min_load_tokens": 0,
            "device": "posix",  # or each start would probe the drive
            **PATIENT,
        } | values
        return Config.from_mapping(fixed | values)


@lru_cache(maxsize=4096)
def _content(whose: str, digest: bytes, payload_bytes: int) -> bytes:
    """Return words of 8 bytes that name the block and their own place in it."""
    first, step = np.frombuffer(blake2b(digest, digest_size=16, person=b"kvdisk", key=whose.encode()).digest(), "<u8")
    words = np.arange(-(-payload_bytes // 8), dtype="<u8") * (step | np.uint64(1)) + first
    return bytes(words.tobytes()[:payload_bytes])


class PromptTree:
    """Prompts drawn from a tree of shared prefixes: at each branch the first child is the likeliest
    (Zipf).

    ``branch_tokens``: letters from one branch to the next. All trees of a width are the same,
    whatever the seed of who draws from them: engines of one store ask for the same prompts.
    """

    def __init__(self, width: int = 6, branch_tokens: int = 10, most_tokens: int = 60) -> None:
        assert width <= len(_LETTERS)
        self._weights = [1 / (rank + 1) for rank in range(width)]
        self._branch_tokens = branch_tokens
        self._most_tokens = most_tokens

    def draw(self, rng: random.Random) -> str:
        length = rng.randrange(1, self._most_tokens + 1)
        if rng.random() < 0.5:  # beside a whole number of blocks
            length = max(1, length // HASH_TOKENS * HASH_TOKENS + rng.choice((-1, 0, 1)))
        path = ""
        while len(path) * self._branch_tokens < length:
            path += rng.choices(_LETTERS[: len(self._weights)], self._weights)[0]
        text = "".join(self._branch(path[: depth + 1]) for depth in range(len(path)))
        return text[:length]

    def _branch(self, path: str) -> str:
        found = random.Random(path)
        return "".join(found.choices(_LETTERS, k=self._branch_tokens))
